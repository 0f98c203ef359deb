"""Checks whether this machine can run an instance: one line per check, with what to do about it.

In: the machine. Out: `Check`s; the command's exit code is 1 if one failed. Libraries that may crash or
print at import are tried in processes of their own.
"""

from __future__ import annotations

import datetime
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from paceline.config import port_problem

OK, WARN, FAIL = "ok", "warn", "fail"
GIB = 1 << 30

# A loopback transfer proves more than an import: the library found its transport.
MOONCAKE = """
import os; os.environ.setdefault("MC_FORCE_TCP", "1"); os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "initialize failed"
os._exit(0)
"""
# _exit: at a normal exit the library may crash after UCX has loaded its ib module.
NIXL = "import os, nixl; os._exit(0)"


@dataclass(frozen=True, slots=True)
class Check:
    level: str
    what: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.what:<16} {self.found}" + (f"\n      → {self.remedy}" if self.remedy else "")


def run_checks(host: str, port: int, secrets: str) -> Iterator[Check]:
    """One after another, so that each shows as soon as it is known."""
    yield python()
    for name in ("torch", "pyzmq", "msgspec", "grpcio", "cryptography", "aiohttp", "tokenizers", "safetensors"):
        yield distribution(name)
    yield from system_libraries()
    yield library("mooncake", MOONCAKE, "transfer backend mooncake cannot be used; run `make setup`")
    yield library("nixl", NIXL, "transfer backend nixl cannot be used; run `make setup`")
    yield rdma(Path("/sys/class/infiniband"))
    yield memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield shared_memory()
    yield default_model()
    yield port_free(host, port)
    if secrets:
        yield cluster_secrets(Path(secrets), datetime.datetime.now(datetime.UTC))


def python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(OK, "python", version)


def distribution(name: str) -> Check:
    try:
        return Check(OK, name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(FAIL, name, "not installed", "run `make setup`")


def system_libraries() -> Iterator[Check]:
    loader = shutil.which("ldconfig", path="/sbin:/usr/sbin:/usr/bin")
    known = subprocess.run([loader, "-p"], capture_output=True, text=True, check=False).stdout if loader else ""
    for soname, package in (
        ("libibverbs.so.1", "libibverbs1"),
        ("libnuma.so.1", "libnuma1"),
        ("libcurl.so.4", "libcurl4"),
    ):
        if soname in known:
            yield Check(OK, soname, "found")
        else:
            yield Check(FAIL, soname, "missing; Mooncake needs it", f"apt-get install {package}")


def library(
    name: str, script: str, remedy: str, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> Check:
    try:
        done = run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Check(FAIL, name, "did not load within 60 s", remedy)
    if done.returncode == 0:
        return Check(OK, name, "loads and starts")
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Check(FAIL, name, last, remedy)


def rdma(devices: Path) -> Check:
    found = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if found:
        return Check(OK, "rdma devices", ", ".join(found))
    return Check(WARN, "rdma devices", "none", "KV goes over TCP, which is fine on one host and slow between hosts")


def memlock(limit: int) -> Check:
    if limit == resource.RLIM_INFINITY:
        return Check(OK, "memlock limit", "unlimited")
    text = f"{limit / GIB:.2f} GiB"
    if limit >= 16 * GIB:
        return Check(OK, "memlock limit", text)
    return Check(
        WARN, "memlock limit", text, "only RDMA needs it: `ulimit -l unlimited`, or LimitMEMLOCK= of the service"
    )


def shared_memory(path: Path = Path("/dev/shm")) -> Check:
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Check(FAIL, str(path), str(error), "mount a tmpfs there")
    if free < GIB:
        return Check(WARN, str(path), f"{free / GIB:.2f} GiB free", "give the container more, e.g. --shm-size 2g")
    return Check(OK, str(path), f"{free / GIB:.1f} GiB free")


def default_model() -> Check:
    from paceline.engine_options import default_model_folder

    folder = default_model_folder()
    if (folder / "config.json").exists():
        return Check(OK, "default model", str(folder))
    return Check(
        WARN, "default model", "not made yet", "`make setup` or `python -m engine.smollm2`, or use --model PATH"
    )


def port_free(host: str, port: int) -> Check:
    problem = port_problem(host, port)
    if problem:
        return Check(WARN, f"port {port}", problem, "choose another with --port, or 0 for any free one")
    return Check(OK, f"port {port}", f"free on {host}")


def cluster_secrets(folder: Path, now: datetime.datetime) -> Check:
    """Whether they can be used, and until when."""
    from security.secrets import SecretsError, load

    try:
        secrets = load(folder, now)
    except SecretsError as error:
        return Check(FAIL, "secrets", "cannot be used", str(error))
    left = (secrets.expires - now).days
    found = f"{folder} ({secrets.fingerprint}), good until {secrets.expires:%Y-%m-%d} ({left} days)"
    if left < 30:
        return Check(WARN, "secrets", found, "make new ones with `paceline certs --force` and restart every process")
    return Check(OK, "secrets", found)
