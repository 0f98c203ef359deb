"""docs/clients.md and versions.toml name the same clients at the same versions."""

from __future__ import annotations

from tests.clients.installed import COMMANDS, VERSIONS, command_of


def test_the_documented_versions_are_the_installed_ones() -> None:
    text = COMMANDS.read_text()
    assert list(VERSIONS) == ["openai", "litellm", "aiperf", "guidellm", "evalscope", "sglang"]
    for name, pins in VERSIONS.items():
        introduction = text.split(f"\n## {name}\n", 1)[1].split("\n```sh", 1)[0]
        for package in pins.get("without_dependencies", pins["packages"]):
            assert package in introduction, f"{name}: docs/clients.md does not install {package}"
        assert command_of(name).strip()
