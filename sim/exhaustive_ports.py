"""What the other side of a hand-over may do to one rank: every observation that is legal now.

In: the effects of one rank that concern a room, and which batches it ran. Out: the observations that this rank
could make at this moment, and the pages that a remote engine or a copy may touch until it has made one.
The rules are those of `transfer.sending_room` and `transfer.receiving_room`, with all timing taken out:

    shaking ─▶ ready ─▶ done            a handshake and a transfer each end once, well or badly;
        └────────┴────▶ failed ─▶ quiet after a failure or a stop, `release` says when nothing is touched any more.
"""

from __future__ import annotations

from collections.abc import Iterator

from consensus.entry import BOOTSTRAP, PREALLOC, RELEASE, TRANSFER
from pipeline.effects import CloseRoom, FirstToken, OpenRoom, RoomEffect, SendDestinations, StartSender, StopRoom

SHAKING, READY, DONE, FAILED, QUIET = "shaking", "ready", "done", "failed", "quiet"

Event = tuple[str, bool, bool]  # topic, good, and whether the environment owes one of its kind sooner or later


class Port:
    """One rank's end of one room. `pages` are what the transfer may touch now; empty: nothing."""

    __slots__ = ("begun", "pages", "ran", "sampler", "sends", "state", "stopped", "token")

    def __init__(self, sends: bool, sampler: bool) -> None:
        self.sends = sends  # on the prefill side
        self.sampler = sampler  # prefill's last rank: it also waits for the first token
        self.state = SHAKING
        self.stopped = self.begun = self.ran = self.token = False
        self.pages: tuple[int, ...] = ()

    @property
    def handshake(self) -> str:
        return BOOTSTRAP if self.sends else PREALLOC

    def events(self) -> Iterator[Event]:
        """A peer can be lost at any time, so a bad transfer is legal long before there is one."""
        if self.state == SHAKING:
            yield self.handshake, True, True
            yield self.handshake, False, True
        elif self.state == READY:
            whole = self.begun and (not self.sends or (self.ran and (self.token or not self.sampler)))
            if whole:
                yield TRANSFER, True, True
            yield TRANSFER, False, whole
        elif self.state == FAILED or (self.state == DONE and self.stopped):
            yield RELEASE, True, True

    def observed(self, topic: str, good: bool) -> None:
        if topic == RELEASE:
            self.state, self.pages = QUIET, ()
        elif not good:
            self.state = FAILED  # what was under way may still land: only `release` ends that
        elif topic == TRANSFER:
            self.state, self.pages = DONE, ()
        else:
            self.state = READY

    def perform(self, effect: RoomEffect) -> None:
        match effect:
            case StartSender(_, pages) | SendDestinations(_, pages):
                if self.state == READY:  # a room that failed meanwhile hands nothing out
                    self.begun, self.pages = True, pages
            case FirstToken():
                self.token = True
            case StopRoom():
                self.stopped = True
                if self.state in (SHAKING, READY):
                    self.state = FAILED  # the log knows why: only the release is told
            case OpenRoom() | CloseRoom():
                raise AssertionError("the world opens and closes ports")
