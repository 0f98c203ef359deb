"""Two processes that move KV to each other, and the questions to them.

In: a backend's name, or "reference". Out: their answers. Invariants: every answer is awaited with a deadline; a
process that ends or breaks ends the measurement with its reason; the kernel ends the processes when the command dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

from paceline.die_with_parent import __file__ as launcher

from .messages import (
    Answer,
    Begin,
    Broken,
    Channel,
    Check,
    Checked,
    Closed,
    Cpu,
    CpuSeconds,
    Direct,
    Done,
    Methods,
    Poison,
    Prefill,
    Prompt,
    Question,
    Target,
    Timed,
    Up,
)
from .pool import Pool

START_WITHIN = 180.0  # libraries are imported on a machine that may be busy
ANSWER_WITHIN = 90.0  # more than any wait inside a member
END_WITHIN = 5.0
REFERENCE = "reference"

A = TypeVar("A", bound=Answer)


class Stopped(Exception):
    """A process ended or broke: with its reason."""


class Missing(Exception):
    """The backend cannot be used here: with the reason."""


class Process:
    def __init__(self, name: str, role: str, begin: Begin, source: Pool, destination: Pool, netns: str = "") -> None:
        self.name = f"{name} {role}"
        self._channel, theirs = Channel.pair()
        self._log = os.memfd_create("bench-log")
        descriptors = (theirs.fileno(), source.descriptor, destination.descriptor)
        module = "paceline.transfer_bench.member"
        command = [sys.executable, "-m", module, role, *map(str, descriptors)]
        inside = ["ip", "netns", "exec", netns] if netns else []
        with theirs:
            self._process = subprocess.Popen(
                [*inside, sys.executable, "-I", "-S", str(Path(launcher)), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=descriptors,
            )  # fmt: skip
        self._channel.send(begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Question) -> None:
        try:
            self._channel.send(question)
        except Closed:
            raise self._ended() from None

    def answer(self, kind: type[A], seconds: float = ANSWER_WITHIN) -> A:
        try:
            answer = self._channel.receive(seconds)
        except Closed:
            raise self._ended() from None
        except TimeoutError:
            raise Stopped(f"{self.name} did not answer within {seconds:.0f} s") from None
        if isinstance(answer, Broken):
            raise Missing(answer.reason) if answer.missing else Stopped(f"{self.name}: {answer.reason}")
        assert isinstance(answer, kind), f"{self.name} answered {answer}"
        return answer

    def close(self) -> None:
        self._channel.socket.close()
        try:
            self._process.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._log)

    def _ended(self) -> Stopped:
        try:
            code: object = self._process.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            code = "no exit code"
        last = os.pread(self._log, 1 << 20, 0).decode(errors="replace").strip().splitlines()[-3:]
        return Stopped(f"{self.name} ended ({code}): {' | '.join(last) or 'it said nothing'}")


class Pair:
    """Of one backend; or of the reference, whose receiver takes part in what is moved without ports, too."""

    def __init__(
        self, name: str, begin: Begin, source: Pool, destination: Pool, peer_host: str = "", peer_netns: str = ""
    ) -> None:
        """Raises `Missing` if the backend does not start here. `peer_host` is the receiver's, by default the same."""
        self.name = name
        self.methods: list[str] = []
        self._rooms = 0
        self._processes: list[Process] = []
        roles = ("copier", "reader") if name == REFERENCE else ("sender", "receiver")
        try:
            self.sender = self._start(roles[0], begin, source, destination)
            address = self.sender.answer(Up, START_WITHIN).address
            self.receiver = self._start(
                roles[1],
                Begin(begin.backend, begin.shape, peer_host or begin.host, begin.checksum, address),
                source,
                destination,
                peer_netns,
            )
            self._up = self.receiver.answer(Up, START_WITHIN)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> tuple[Process, Process]:
        return self.sender, self.receiver

    def aim(self) -> None:
        """From now on the sender can also write without ports; `methods` says in which ways."""
        self.sender.ask(Target(self._up.endpoint, self._up.base))
        self.methods = self.sender.answer(Methods, START_WITHIN).names

    def prompt(self, tokens: int, chunk: int) -> tuple[float, float]:
        """Through the ports. Seconds until the receiver observed it; processor seconds of both, handshake included."""
        self._rooms += 1
        question = Prompt(f"{self.name}-{self._rooms}/1", tokens, chunk)
        for process in self.processes:
            process.ask(question)
        sent, received = (process.answer(Timed) for process in self.processes)
        return received.ended - sent.began, sent.cpu + received.cpu

    def tail(self, tokens: int, chunk: int, push: str, layer_seconds: float) -> float:
        """Seconds from the end of the last chunk's forward until the receiver observed the transfer."""
        self._rooms += 1
        question = Prefill(f"{self.name}-{self._rooms}/1", tokens, chunk, push, layer_seconds)
        for process in self.processes:
            process.ask(question)
        sent, received = (process.answer(Timed) for process in self.processes)
        return received.ended - sent.began

    def direct(self, method: str, tokens: int) -> tuple[float, float]:
        """Without ports: the same two figures."""
        question = Direct(method, tokens)
        if self.name != REFERENCE or method == "memcpy":
            before = self._receiver_cpu()
            self.sender.ask(question)
            sent = self.sender.answer(Timed)
            return sent.ended - sent.began, sent.cpu + self._receiver_cpu() - before
        for process in (self.receiver, self.sender):  # it waits already when the first byte comes
            process.ask(question)
        sent, received = (process.answer(Timed) for process in self.processes)
        return received.ended - sent.began, sent.cpu + received.cpu

    def poison(self) -> None:
        self.receiver.ask(Poison())
        self.receiver.answer(Done)

    def wrong_writes(self, tokens: int, in_one_piece: bool) -> int:
        self.receiver.ask(Check(tokens, in_one_piece))
        return self.receiver.answer(Checked).wrong

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def _receiver_cpu(self) -> float:
        self.receiver.ask(Cpu())
        return self.receiver.answer(CpuSeconds).seconds

    def _start(self, role: str, begin: Begin, source: Pool, destination: Pool, netns: str = "") -> Process:
        process = Process(self.name, role, begin, source, destination, netns)
        self._processes.append(process)
        return process
