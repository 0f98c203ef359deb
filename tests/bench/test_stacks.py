"""What part of a process encodes and decodes: from lines as py-spy writes them, and from a real process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.allocations import Trackers
from bench.members import Member
from bench.stacks import Spies, rows, summarise_stacks

START = "thread (7): MainThread;<module> (t.py:1);"
LINES = [
    START + "_say (pipeline/io/driver.py:350);Encoder_encode (msgspec/_core.cpython-311-x86_64-linux-gnu.so) 6",
    START + "_handle (grpc/aio.py:3);upb_inttable_lookup (_message.abi3.so) 3",
    START + "dumps (json/__init__.py:231);encode (json/encoder.py:200) 1",
    START + "forward (engine/stage.py:84);sgemm (libtorch_cpu.so) 25",
    START + "forward (engine/stage.py:84);copy_ (libtorch_cpu.so);0x7f4 (libc.so.6) 5",  # a copy is work
    # Waits: for a socket, a queue, the interpreter lock.
    START + "run (pipeline/io/driver.py:135);zmq_poll (libzmq.so.5);poll (libc.so.6) 500",
    START
    + "_main (pipeline/io/executor.py:155);PyThread_acquire_lock_timed (libpython3.11.so.1.0);0x7f1 (libc.so.6);0x7f2 (libc.so.6) 700",
    START + "busy (t.py:9);pthread_cond_timedwait (libc.so.6);0x7f3 (libc.so.6) 90",
]

WORK = """
import sys, msgspec
from collections import deque
values, encoder, decoder = list(range(200)), msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()
def encode():
    decoder.decode(encoder.encode(values))
def compute():
    sum(range(3000))
work = globals()[sys.argv[1]]
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    work()
print("worked", flush=True)
sys.stdin.readline()
"""


def test_samples_at_work_are_shared_out_by_codec_and_waits_are_none() -> None:
    found = summarise_stacks("rank", LINES)
    assert found.samples == 40
    assert found.shares == {"msgspec": 6 / 40, "protobuf": 3 / 40, "json": 1 / 40}
    assert found.hottest[0] == ("forward engine/stage.py:84", 30 / 40)
    assert "25.0%" in rows([found])[1]


def worker(kind: str, times: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORK, kind, str(times)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_process_that_encodes_is_told_from_one_that_computes(tmp_path: Path) -> None:
    workers = {"encode": worker("encode", 150_000), "compute": worker("compute", 15_000)}
    spies = Spies(tmp_path)
    spies.start([Member(kind, process.pid) for kind, process in workers.items()])
    for process in workers.values():
        assert process.stdout is not None and process.stdout.readline() == "worked\n"
    found = {one.name: one for one in spies.collect()}
    for process in workers.values():
        process.communicate("\n")
    assert found["encode"].shares["msgspec"] > 0.5
    assert sum(found["compute"].shares.values()) < 0.1


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("gdb") is None, reason="memray attaches by gdb")
def test_what_a_process_allocates_meanwhile_is_counted(tmp_path: Path) -> None:
    process = worker("encode", 100_000_000)
    trackers = Trackers(tmp_path)
    trackers.start([Member("worker", process.pid)])
    (told,) = trackers.collect()
    process.kill()
    process.communicate()
    assert told.times > 1000 and told.bytes > told.times
    assert "encode" in told.largest[0][0]
