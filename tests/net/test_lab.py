"""The hosts and the network between them are what they claim to be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.net.lab import FILES, NAMESPACES, SYSCTLS, Lab
from tests.net.switch import Path

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("_hosts")]

# Sends numbered datagrams to a host that prints what came, and what came back with its delay.
ECHO = """
import socket
ours = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ours.bind(("0.0.0.0", 5000))
print("ready", flush=True)
while True:
    data, sender = ours.recvfrom(100)
    print(data.decode(), flush=True)
    ours.sendto(data, sender)
"""
ASK = """
import socket, sys, time
ours = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ours.settimeout(0.5)
for number in range(int(sys.argv[2])):
    began = time.monotonic()
    ours.sendto(str(number).encode(), (sys.argv[1], 5000))
    try:
        ours.recv(100)
        print(time.monotonic() - began)
    except TimeoutError:
        print("lost")
"""


def python(lab: Lab, host: str, code: str, *arguments: str) -> subprocess.Popen[str]:
    return lab.start(host, [sys.executable, "-c", code, *arguments], os.environ, sys.stderr)


def ask(lab: Lab, to: str, count: int = 3) -> list[str]:
    told, _ = python(lab, "one", ASK, to, str(count)).communicate(timeout=60)
    return told.split()


def remains(lab: Lab) -> list[str]:
    return [
        str(folder / name) for folder in (NAMESPACES, FILES) for name in os.listdir(folder) if lab.name_of_run in name
    ]


def test_a_lab_delays_cuts_heals_and_leaves_nothing_behind() -> None:
    with Lab(["one", "other"], Path(delay=0.01)) as lab:
        echo, address = python(lab, "other", ECHO), lab.addresses["other"]
        assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
        assert all(float(trip) >= 0.02 for trip in ask(lab, address))
        assert [echo.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]

        lab.cut("other", "one", both=False)
        assert ask(lab, address, 1) == ["lost"] and echo.stdout.readline() == "0\n", "it came, its answer did not"
        lab.heal("one", "other")
        lab.cut("one", "other")
        assert ask(lab, address, 1) == ["lost"]
        lab.heal("one", "other")
        assert "lost" not in ask(lab, address, 2)
        assert [echo.stdout.readline() for _ in range(2)] == ["0\n", "1\n"], "and nothing of the cut"

        lab.name("one", {"a-name.that-is-told-later": address})
        assert "lost" not in ask(lab, "a-name.that-is-told-later")

        for name, value in SYSCTLS.items():
            shown, _ = python(lab, "one", f"print(open('/proc/sys/{name.replace('.', '/')}').read())").communicate()
            assert int(shown) == value
        assert len(remains(lab)) == 4
    assert remains(lab) == [] and echo.poll() is not None


def test_a_lab_loses_frames_at_random_and_keeps_to_its_rate() -> None:
    with Lab(["one", "other"], Path(loss=0.5)) as lab:
        echo = python(lab, "other", ECHO)
        assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
        told = ask(lab, lab.addresses["other"], 20)
        assert 0 < told.count("lost") < 20
        lab.switch.set_path("one", "other", Path(rate=1000.0, backlog=1.0))
        lab.switch.set_path("other", "one", Path())
        assert all(float(trip) > 0.04 for trip in ask(lab, lab.addresses["other"])), "43 bytes at 1000 a second"


def test_a_lab_that_fails_to_be_built_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Lab] = []

    def introduce(lab: Lab) -> None:
        built.append(lab)
        raise OSError("no more")

    monkeypatch.setattr(Lab, "_introduce", introduce)
    with pytest.raises(OSError, match="no more"):
        Lab(["one", "other"], Path())
    assert remains(built[0]) == []
