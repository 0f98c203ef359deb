"""Other people's clients, each in a virtual environment of its own.

In: a name of versions.toml. Out: the environment's folder, with the pinned versions in it. Kept between
runs under the cache folder; installed again when the pins change.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS = HERE.parents[1] / "docs" / "clients.md"
INSTALL_S = 900
VERSIONS: dict[str, dict[str, list[str]]] = tomllib.loads((HERE / "versions.toml").read_text())


def installed(name: str) -> Path:
    cache = Path(os.environ.get("PACELINE_CACHE", Path.home() / ".cache" / "paceline"))
    folder = cache / "clients" / name
    stamp, wanted = folder / ".paceline-pins", repr(VERSIONS[name])
    if not (stamp.exists() and stamp.read_text() == wanted):
        uv = Path(sys.executable).with_name("uv")
        _run(uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder)
        install = [uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python", *_sources()]
        if without := VERSIONS[name].get("without_dependencies"):
            _run(*install, "--no-deps", *without)
        _run(*install, *VERSIONS[name]["packages"])
        stamp.write_text(wanted)
    return folder


def command_of(name: str) -> str:
    """The commands that docs/clients.md has under the client's heading."""
    section = COMMANDS.read_text().split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    return block


def _sources() -> list[str]:
    """uv reads no pip configuration: where pip was told to look (for a CPU build of torch), uv looks too."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    links = dict(re.findall(r"^\S*\.(find-links|index-url)='(.*)'$", told, flags=re.MULTILINE))
    options = [f"--find-links={links['find-links']}"] if "find-links" in links else []
    return [*options, f"--default-index={links['index-url']}"] if "index-url" in links else options


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=INSTALL_S)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}"
