"""When to replace a sending engine, and when what a destroyed one wrote has landed or never will.

In: handles of unknown fate, starts that failed, engines that were destroyed, peers that were heard;
moments are the caller's. Out: whether a replacement is due, and which fences may be said now.

A library cannot cancel a write, so only the end of its engine proves that a handle of unknown fate reads
our pages no more. For the peer's pages that is not enough: kernels still hold bytes. They have landed, or
never will, once (1) the tail has passed since the engine's end, in which our kernel gives up on what it
still had to send, and (2) the peer was heard after that and some time has passed since: a peer that was
frozen for longer than the tail finds what its own kernel had taken only when it thaws.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .actions import Peer


@dataclass(frozen=True, slots=True)
class ReplacementLimits:
    """Seconds."""

    replace_after: float = 2.0  # of unknown fate before the engine is replaced: most end by themselves
    drain: float = 5.0  # that a retired engine's healthy handles get to end
    hold: float = 15.0  # that a submit waits for an engine, or for a word of its peer
    backoff: float = 1.0  # before the second replacement, doubled for each further one
    backoff_most: float = 30.0
    # For which closed sockets may still deliver, with tcp_orphan_retries=2 and tcp_retries2=5. Measured: the
    # orphan was gone at the first look, after 15 s. With the kernel's defaults it is minutes.
    tail: float = 20.0
    settle: float = 1.0  # from a word of the peer after the tail, to the fence
    give_up: float = 600.0  # of silence after the tail: nobody is left to be told


DEFAULT_LIMITS = ReplacementLimits()


class Suspects:
    """Handles of one engine that ended badly and may still end well."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self.reason = ""  # of the oldest

    def ended(self, handle: int, error: str | None, quiet: bool, now: float) -> None:
        if error is None or quiet:
            self._since.pop(handle, None)
        elif handle not in self._since:
            self.reason = self.reason if self._since else error
            self._since[handle] = now

    def __len__(self) -> int:
        return len(self._since)

    def age(self, now: float) -> float:
        return now - next(iter(self._since.values())) if self._since else 0.0


@dataclass(slots=True)
class Backoff:
    """Each use puts the next one further off; a long quiet time forgets."""

    first: float
    most: float
    wait: float = 0.0
    not_before: float = float("-inf")

    def ready(self, now: float) -> bool:
        return now >= self.not_before

    def used(self, now: float) -> None:
        if now >= self.not_before + 2 * self.most:
            self.wait = 0.0
        self.wait = min(max(self.first, 2 * self.wait), self.most)
        self.not_before = now + self.wait


@dataclass(slots=True)
class Tails:
    """Destroyed engines whose writes may still land, peer by peer."""

    limits: ReplacementLimits
    _destroyed: dict[tuple[int, Peer], float] = field(default_factory=dict)
    _heard: dict[tuple[int, Peer], float] = field(default_factory=dict)  # first word after the tail

    def __len__(self) -> int:
        return len(self._destroyed)

    def destroyed(self, engine: int, peers: tuple[Peer, ...], now: float) -> None:
        for peer in peers:
            self._destroyed[engine, peer] = now

    def heard(self, peer: Peer, now: float) -> None:
        for key, at in self._destroyed.items():
            if key[1] == peer and now >= at + self.limits.tail:
                self._heard.setdefault(key, now)

    def unheard(self, now: float) -> tuple[Peer, ...]:
        """Peers whose word is all that is missing."""
        waiting = (key for key, at in self._destroyed.items() if now >= at + self.limits.tail)
        return tuple(dict.fromkeys(key[1] for key in waiting if key not in self._heard))

    def gone(self, instance: str, epoch: int) -> None:
        """Up to that incarnation it is dead, and its pages with it: nobody is left to be told."""
        for key in self._destroyed:
            if key[1].instance == instance and key[1].epoch <= epoch:
                self._heard[key] = float("-inf")

    def passed(self, now: float) -> list[tuple[int, Peer]]:
        """(engine, peer) that can be fenced, each once."""
        limits = self.limits
        over = [
            key
            for key, at in self._destroyed.items()
            if (key in self._heard and now >= self._heard[key] + limits.settle)
            or now >= at + limits.tail + limits.give_up
        ]
        for key in over:
            del self._destroyed[key]
            self._heard.pop(key, None)
        return over
