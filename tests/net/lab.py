"""Hosts on one machine: a network namespace each, joined by a switch in this process (`switch.py`).

In: names of hosts. Out: processes started on them, and a network between them that can be slowed, made
lossy, cut and healed, each direction by itself.

Each host has one device `eth0` with one address, and the kernel settings that docs/operations.md asks for.
The others' Ethernet addresses are fixed: a cut is silence, as behind a router, and no "host unreachable".
Names are looked up in a file per host, which can change while a process runs. `close` ends all processes,
and removes namespaces, devices and files; what a killed run left behind is removed by the next one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import IO

from tests.net.switch import Path, Switch, open_tap

PREFIX = "paceline-net"
TUN = FilePath("/dev/net/tun")
NAMESPACES, FILES = FilePath("/run/netns"), FilePath("/etc/netns")  # ip-netns(8)
MTU = 9000
SYSCTLS = {"net.ipv4.tcp_syn_retries": 1, "net.ipv4.tcp_retries2": 5, "net.ipv4.tcp_orphan_retries": 2}


def missing() -> str | None:
    """Why no lab can be built here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` (Debian package iproute2) is missing"
    if not TUN.exists():
        return f"{TUN} is missing"
    try:
        os.close(os.open(TUN, os.O_RDWR))
        _ip("netns", "add", probe := f"{PREFIX}-{os.getpid()}-probe")
        _ip("netns", "delete", probe)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces or TAP devices here: {getattr(error, 'stderr', None) or error}"
    return None


def _ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


class Lab:
    def __init__(self, hosts: Sequence[str], path: Path) -> None:
        """`path`: between any two of them, at first."""
        _remove_leftovers()
        self.addresses = {host: f"10.99.0.{number}" for number, host in enumerate(hosts, start=1)}
        self.switch = Switch()
        self._id = secrets.token_hex(3)
        self.name_of_run = f"{PREFIX}-{os.getpid()}-{self._id}"
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for number, host in enumerate(hosts, start=1):
                self._add(host, number)
            self._introduce()
            for one in hosts:
                for other in hosts:
                    self.switch.set_path(one, other, path)
            self.switch.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(
        self, host: str, command: Sequence[str], environment: Mapping[str, str], log: IO[str]
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *command],  # becomes the command: same process id
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=dict(environment),
        )
        self._processes.append(process)
        return process

    def name(self, host: str, names: Mapping[str, str]) -> None:
        """What that host finds in its file of names from now on: name -> address."""
        self.name_all(host, names.items())

    def name_all(self, host: str, names: Iterable[tuple[str, str]]) -> None:
        """The same for names that may have several addresses."""
        lines = [f"{address} {name}\n" for name, address in [("localhost", "127.0.0.1"), *names]]
        self._names_file(host).write_text("".join(lines))  # in place: the running process sees the same file

    def readdress(self, host: str, address: str) -> None:
        """Another address for that host, as a pod that takes another's place has. What runs there should have ended."""
        _ip("-n", self.namespace(host), "addr", "flush", "dev", "eth0")
        _ip("-n", self.namespace(host), "addr", "add", f"{address}/24", "dev", "eth0")
        self.addresses[host] = address
        self._introduce()

    def tune(self, host: str, settings: Mapping[str, object]) -> None:
        """Sets kernel settings of that host's network."""
        for name, value in settings.items():
            setting = FilePath("/proc/sys", *name.split("."))
            command = ["ip", "netns", "exec", self.namespace(host), "tee", str(setting)]
            subprocess.run(command, input=f"{value}\n", check=True, capture_output=True, text=True)

    # ---- the network

    def cut(self, source: str, target: str, both: bool = True) -> None:
        self._change(source, target, both, cut=True)

    def heal(self, source: str, target: str) -> None:
        self._change(source, target, True, cut=False)

    def _change(self, source: str, target: str, both: bool, cut: bool) -> None:
        for one, other in [(source, target), (target, source)][: 2 if both else 1]:
            self.switch.set_path(one, other, replace(self.switch.path(one, other), cut=cut))

    # ---- the end

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self.switch.close()
        for host in self.addresses:
            _remove(self.namespace(host))

    # ---- inside

    def namespace(self, host: str) -> str:
        return f"{self.name_of_run}-{host}"

    def _names_file(self, host: str) -> FilePath:
        return FILES / self.namespace(host) / "hosts"

    def _add(self, host: str, number: int) -> None:
        namespace, device = self.namespace(host), f"pn{self._id}{number}"
        self._names_file(host).parent.mkdir(parents=True)
        self.name(host, {})
        _ip("netns", "add", namespace)
        hardware = bytes([2, 0, 0, 0, 0, number])
        self.switch.plug(host, open_tap(device), hardware)
        _ip("link", "set", device, "address", hardware.hex(":"), "mtu", MTU, "netns", namespace)
        _ip("-n", namespace, "link", "set", device, "name", "eth0")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        self.tune(host, SYSCTLS)

    def _introduce(self) -> None:
        for host in self.addresses:
            for number, (other, address) in enumerate(self.addresses.items(), start=1):
                if other != host:
                    hardware = bytes([2, 0, 0, 0, 0, number]).hex(":")
                    _ip("-n", self.namespace(host), "neigh", "replace", address, "lladdr", hardware, "dev", "eth0")


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)
    shutil.rmtree(FILES / namespace, ignore_errors=True)


def _remove_leftovers() -> None:
    """Of runs that were killed. A namespace's name has the process id of its maker."""
    present = [entry.name for folder in (NAMESPACES, FILES) if folder.is_dir() for entry in folder.iterdir()]
    for namespace in dict.fromkeys(present):
        maker = namespace.removeprefix(f"{PREFIX}-").partition("-")[0]
        if namespace.startswith(f"{PREFIX}-") and maker.isdecimal() and not FilePath("/proc", maker).exists():
            _remove(namespace)
