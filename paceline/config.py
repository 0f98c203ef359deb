"""What the command is told and what it leaves behind for its other invocations.

In: strings from the command line. Out: checked values, and `cluster.json`, which says where the parts
of a running local cluster are. Nothing here starts or asks anything.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from security.secrets import Secrets

CLUSTER_FILE = "cluster.json"
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Part(msgspec.Struct, kw_only=True):
    """One child process of `paceline up`: an instance's daemon, or the gateway."""

    name: str
    role: str  # "prefill", "decode" or "gateway"
    address: str  # host:port
    log: str
    metrics: str = ""  # host:port of an instance's /metrics
    pid: int = 0  # 0 while it is not running


class Cluster(msgspec.Struct, kw_only=True):
    """What `cluster.json` holds."""

    up_pid: int
    url: str
    model_name: str
    parts: list[Part]

    @property
    def instances(self) -> list[Part]:
        return [part for part in self.parts if part.role != "gateway"]

    def write(self, run_dir: Path) -> None:
        """Replaces the file in one step, so that a reader never sees half of it."""
        new = run_dir / f".{CLUSTER_FILE}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        new.replace(run_dir / CLUSTER_FILE)


def read_cluster(run_dir: Path) -> Cluster | None:
    """The cluster that runs, or ran until it was killed, in `run_dir`."""
    try:
        return msgspec.json.decode((run_dir / CLUSTER_FILE).read_bytes(), type=Cluster)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise SystemExit(f"paceline: {run_dir / CLUSTER_FILE} is not readable: {error}") from error


def cluster_secrets(folder: str) -> Secrets | None:
    """Ends the command if they cannot be used."""
    from security.secrets import SecretsError, load_if

    try:
        return load_if(folder)
    except SecretsError as error:
        raise SystemExit(f"paceline: {error}") from error


def default_run_dir() -> Path:
    return Path(os.environ.get("PACELINE_RUN_DIR", ".run"))


def parse_size(text: str) -> int:
    """`"512M"`, `"1.5GiB"`, `"4096"` → bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if not found:
        raise ValueError(f"not a size: {text!r} (examples: 512M, 1.5G, 4096)")
    return int(float(found[1]) * UNITS[found[2]])


def parse_address(text: str) -> str:
    """Checks `host:port` and gives it back."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"not an address: {text!r} (example: 127.0.0.1:9000)")
    return text


def parse_port(text: str) -> int:
    """`"8000"` → 8000; 0 is a port too: any free one."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise ValueError(f"not a port: {text!r} (0 to 65535)")
    return int(text)


def parse_layers(text: str) -> tuple[int, ...]:
    """`"8,7,8,7"` → layers of each rank."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ValueError(f"not a layer split: {text!r} (example: 19,11)")
    return counts


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nothing listens on now; all are held until the last is found, so they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind((host, 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


def port_problem(host: str, port: int) -> str:
    """Why a server could not listen there, or an empty string."""
    with socket.socket() as probe:
        # As servers do: a port whose last connections linger in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            # The numbers of name resolution are not those of the system.
            return error.strerror or str(error) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    return ""
