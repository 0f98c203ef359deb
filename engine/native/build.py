"""Builds the compiled kernels: `python -m engine.native.build`.

In: `paged_attention.c` with `vectors.h`, and `gcc` (or what `CC` names). Out: beside them one shared object for each
instruction set of this architecture, so that what one machine builds runs on any other. Its name carries the digest
of what it was built from, sources and flags: an object of other sources is never loaded, and one that exists is not
built again.

Only the standard library is imported: an image is built before anything is installed in it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("paged_attention.c")
HEADER = SOURCE.with_name("vectors.h")
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror=implicit")


class BuildError(Exception):
    """Why there is no kernel, and what to do."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The kernel for processors that have all of `needs`, by their names in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()

    def path(self) -> Path:
        made_of = (SOURCE.read_bytes(), HEADER.read_bytes(), " ".join((*FLAGS, *self.flags)).encode())
        digest = hashlib.sha256(b"".join(made_of)).hexdigest()
        return SOURCE.with_name(f"{SOURCE.stem}-{self.name}-{digest[:16]}.so")


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The fastest first; the last one runs everywhere.
_VARIANTS = {
    "x86_64": (
        Variant("avx512", ("-march=x86-64-v4",), _V4),
        Variant("avx2", ("-march=x86-64-v3",), _V3),
        Variant("baseline"),
    )
}


def variants() -> tuple[Variant, ...]:
    """Those of this architecture, the fastest first."""
    return _VARIANTS.get(platform.machine(), (Variant("baseline"),))


def build() -> list[Path]:
    """Builds what is missing and removes what other sources left behind; returns what it built.

    Raises `BuildError` if there is no compiler, or it fails.
    """
    missing = [variant for variant in variants() if not variant.path().exists()]
    if missing:
        compiler = shlex.split(os.environ.get("CC") or "gcc")
        if shutil.which(compiler[0]) is None:
            raise BuildError(
                f"no C compiler: {compiler[0]!r} is not there. Install one (Debian: apt-get install gcc libc6-dev) or "
                "name it in CC, then run `make setup` again"
            )
        for variant in missing:
            _compile(compiler, variant)
    wanted = {variant.path() for variant in variants()}
    for other in SOURCE.parent.glob(f"{SOURCE.stem}-*.so"):
        if other not in wanted:
            other.unlink(missing_ok=True)
    return [variant.path() for variant in missing]


def _compile(compiler: list[str], variant: Variant) -> None:
    # Under another name until it is whole: a process that starts meanwhile must not load half of it.
    target = variant.path()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        made = Path(folder) / target.name
        command = [*compiler, *FLAGS, *variant.flags, str(SOURCE), "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise BuildError(f"`{shlex.join(command)}` failed:\n{done.stderr.strip()}")
        made.chmod(0o755)
        made.replace(target)


def main() -> int:
    try:
        for path in build():
            print(f"built {path.name}")
    except (BuildError, OSError, subprocess.TimeoutExpired) as error:
        print(f"engine.native.build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
