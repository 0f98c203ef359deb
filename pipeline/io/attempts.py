"""The attempts an instance knows, and what each has to tell its reader.

In: `Tokens` and `Ended` from rank 0, readers that come and go. Out: per attempt a `Stream` of token
runs that ends with exactly one `Outcome`. Invariants: an attempt counts as known until rank 0 says
it ended (or the ranks are dead), also when its reader has left, so rank 0's queue is bounded by ours;
a stream holds at most `buffer` tokens; keys are never reused, and an `Abort` that overtakes its
`Generate` still aborts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from consensus.entry import Key, TokenOut
from pipeline.io import control
from pipeline.outcome import ABORT, ERROR, Outcome
from pipeline.phases import Stages

T = TypeVar("T")

_LONGEST_RUN = 256  # tokens; with logprobs still far below the 4 MiB that gRPC clients accept in a message
_REMEMBERED = 8192  # ended attempts, and aborts of attempts not seen yet


class AlreadyKnown(Exception):
    """This attempt was submitted before."""


class QueueFull(Exception):
    """As many attempts as the instance takes are open."""


@dataclass(slots=True)
class TokenRun:
    """Consecutive output tokens from `position`."""

    position: int
    tokens: list[TokenOut]


class Stream:
    """What one attempt's reader has not taken yet."""

    def __init__(self, key: Key, buffer: int) -> None:
        self.key = key
        self.overflowed = False
        self.buffer = buffer
        self.first_stages: Stages = ()  # up to the first token
        self.stages: Stages = ()  # as far as rank 0 has told
        self._runs: list[TokenRun] = []
        self._outcome: Outcome | None = None
        self._news = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Tokens not taken yet."""
        return sum(len(run.tokens) for run in self._runs)

    async def next(self) -> TokenRun | Outcome:
        """The next run of consecutive tokens, or the outcome after the last one."""
        while not self._runs and self._outcome is None:
            self._news.clear()
            await self._news.wait()
        if self._runs:
            return self._runs.pop(0)
        assert self._outcome is not None
        return self._outcome

    def push(self, position: int, tokens: tuple[TokenOut, ...]) -> bool:
        """False: the reader is too far behind; from now on nothing is kept for it."""
        if self.overflowed or self.waiting + len(tokens) > self.buffer:
            self.overflowed = True
            return False
        for token in tokens:
            last = self._runs[-1] if self._runs else None
            if last is None or last.position + len(last.tokens) != position or len(last.tokens) == _LONGEST_RUN:
                self._runs.append(last := TokenRun(position, []))
            last.tokens.append(token)
            position += 1
        self._news.set()
        return True

    def end(self, outcome: Outcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._news.set()


class Attempts:
    def __init__(self, limit: int, buffer: int, cancel: Callable[[Key, str], None]) -> None:
        """`cancel` tells rank 0 that an attempt is no longer wanted."""
        self.unknown = 0  # tokens and outcomes of attempts nobody asked for
        self._limit, self._buffer, self._cancel = limit, buffer, cancel
        self._open: dict[Key, Stream | None] = {}  # None: the reader has left
        self._cancelled: set[Key] = set()
        self._ended: dict[Key, None] = {}
        self._aborted_early: dict[Key, str] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, key: Key) -> Stream:
        """A stream for a new attempt. If it already ended by an early `abort`, it is not to be submitted.

        Raises `AlreadyKnown` or `QueueFull`.
        """
        if key in self._open or key in self._ended:
            raise AlreadyKnown(f"attempt {key.attempt} of request {key.request!r} is already known here")
        if len(self._open) >= self._limit:
            raise QueueFull(f"{len(self._open)} attempts are open here, and max_queue is {self._limit}")
        stream = Stream(key, self._buffer)
        if (reason := self._aborted_early.pop(key, None)) is not None:
            stream.end(Outcome(ABORT, reason))
            _remember(self._ended, key, None)
        else:
            self._open[key] = stream
            self._empty.clear()
        return stream

    def is_open(self, key: Key) -> bool:
        return key in self._open

    def tokens(self, message: control.Tokens) -> None:
        if message.key not in self._open:
            self.unknown += 1
            return
        stream = self._open[message.key]
        if stream is not None and message.stages:
            stream.first_stages = stream.stages = message.stages
        if stream is not None and not stream.push(message.position, message.tokens):
            self._cancel_once(message.key, f"the reader is more than {stream.buffer} tokens behind")

    def ended(self, message: control.Ended) -> None:
        if message.key not in self._open:
            self.unknown += 1
            return
        stream = self._open[message.key]
        self._forget(message.key)
        if stream is not None:
            stream.stages = message.stages or stream.stages
            stream.end(message.outcome)

    def leave(self, key: Key, reason: str) -> None:
        """The reader is gone; an attempt that still runs is cancelled."""
        if key in self._open:
            self._open[key] = None
            self._cancel_once(key, reason)

    def abort(self, key: Key, reason: str) -> None:
        """Ends an attempt early; its outcome comes from rank 0. One never seen is aborted when it comes."""
        if key in self._open:
            self._cancel_once(key, reason)
        elif key not in self._ended:
            _remember(self._aborted_early, key, reason)

    def fail_all(self, reason: str) -> int:
        """The ranks are gone: every open attempt ends here and now. Returns how many had a reader."""
        streams = [stream for stream in self._open.values() if stream is not None]
        for key in list(self._open):
            self._forget(key)
        for stream in streams:
            stream.end(Outcome(ERROR, reason, 0, retryable=True))
        return len(streams)

    async def drained(self, patience: float) -> bool:
        """Waits up to `patience` seconds for every attempt to end by itself; whether all did."""
        try:
            async with asyncio.timeout(patience):
                while self._open:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def let_go(self, reason: str, patience: float) -> None:
        """Ends every stream and cancels every attempt; waits up to `patience` seconds until rank 0 ended them."""
        for key, stream in list(self._open.items()):
            if stream is not None:
                stream.end(Outcome(ERROR, reason, 0, retryable=True, draining=True))
            self._open[key] = None
            self._cancel_once(key, reason)
        try:
            async with asyncio.timeout(patience):
                await self._empty.wait()
        except TimeoutError:
            pass

    def _cancel_once(self, key: Key, reason: str) -> None:
        if key not in self._cancelled:
            self._cancelled.add(key)
            self._cancel(key, reason)

    def _forget(self, key: Key) -> None:
        del self._open[key]
        self._cancelled.discard(key)
        _remember(self._ended, key, None)
        if not self._open:
            self._empty.set()


def _remember(memory: dict[Key, T], key: Key, value: T) -> None:
    """Adds to a bounded memory, whose oldest member makes room."""
    memory[key] = value
    if len(memory) > _REMEMBERED:
        del memory[next(iter(memory))]
