"""What the image is built from: linted, complete, and at the versions of the project."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from tests.deploy.tools import Tools
from tests.deploy.variants import ROOT

IMAGE = ROOT / "deploy" / "image"


def project() -> dict:  # type: ignore[type-arg]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_linters_have_nothing_to_say(toolbox: Tools) -> None:
    scripts: list[Path] = [*IMAGE.glob("*.sh"), IMAGE / "paceline-pod", *(ROOT / "deploy").glob("*/*.sh")]
    for linter, files in {"hadolint": [IMAGE / "Dockerfile"], "shellcheck": scripts}.items():
        command = [str(toolbox.validator(linter)), *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")


def test_every_version_is_pinned_and_is_the_projects() -> None:
    lines = (IMAGE / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    told = project()["project"]
    for requirement in (
        *told["dependencies"],
        *told["optional-dependencies"]["cuda"],
        *told["optional-dependencies"]["otel"],
    ):
        name, version = requirement.split("==")
        assert pinned.get(re.sub(r"\[.*", "", name)) == version, f"{requirement}: run `make image-lock`"


def test_all_packages_of_the_product_get_into_the_image() -> None:
    sent = {line[1:] for line in (IMAGE / "ignore").read_text().splitlines() if line.startswith("!")}
    for package in project()["tool"]["setuptools"]["packages"]:
        folder = package.split(".")[0]
        assert folder == "paceline_proto" or folder in sent


def test_the_finished_image_runs_as_nobody_and_says_how_it_is() -> None:
    final = (IMAGE / "Dockerfile").read_text().split(" AS paceline\n")[1]
    assert (
        "USER 10001:10001" in final and "HEALTHCHECK" in final and 'ENTRYPOINT ["tini", "--", "paceline-pod"]' in final
    )
    assert "RUN apt" not in final and "pip" not in final
