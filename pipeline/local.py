"""What this one rank has seen, and its votes. Never read by the replicated state.

An observation concerns a room and a topic; it never changes once made. It counts when the log has put
the attempt into the stage that is voted on in that topic, which may be before or after the observation.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from consensus.entry import Ballot, Key, StageKey
from consensus.votes import Bell
from pipeline.replica import Replica
from pipeline.request import Request


class Observation(msgspec.Struct, frozen=True, gc=False):
    """Something only this rank knows: work for a room ended well or badly."""

    room: str
    topic: str
    good: bool
    reason: str = ""
    payload: bytes = b""
    stage_seq: int = 0  # of the stage the work was for; 0 for topics that a room meets only once


class Local:
    """Observations of rooms that the log has opened, and which of them were rung for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._seen: dict[str, dict[str, Observation]] = {}  # room → topic → observation
        self._voted: dict[str, dict[str, int]] = {}  # room → topic → stage_seq of the last good vote
        self._rung: dict[str, dict[str, int]] = {}  # room → topic → stage_seq of the last bell
        self._due: dict[str, dict[Key, None]] = {}  # topic → attempts in that stage, and observed for it

    def __len__(self) -> int:
        return len(self._seen)

    def observe(self, observation: Observation, replica: Replica) -> Bell | None:
        """Keeps an observation; returns the bell to ring if its attempt is in that stage already."""
        key = replica.attempts.get(observation.room)
        if key is None:
            return None  # the attempt is over; nobody will ask
        topics = self._seen.setdefault(observation.room, {})
        old = topics.get(observation.topic)
        # A failure must win over a success that it followed (a slice refused after all were sent), but not over
        # a vote: the verdict may be on its way, and rank 0's payload with it.
        voted = self._voted.get(observation.room, {}).get(observation.topic)
        if old is not None and voted == replica.requests[key].stage_seq:
            return None
        if old is not None and old.stage_seq >= observation.stage_seq and not (old.good and not observation.good):
            return None
        topics[observation.topic] = observation
        return self._bell(replica.requests[key], replica)

    def bells(self, moved: Iterable[Request], replica: Replica) -> list[Bell]:
        """After every entry: bells for attempts that have just entered a stage and were already observed for it."""
        found = []
        for request in moved:
            for due in self._due.values():
                due.pop(request.key, None)
            if request.key in replica.requests and (bell := self._bell(request, replica)) is not None:
                found.append(bell)
        return found

    def vote(self, topic: str, replica: Replica) -> Ballot:
        """This rank's vote on the state before the entry that carries the ballot."""
        good: list[StageKey] = []
        bad: list[tuple[StageKey, str]] = []
        # Only those that something is known of: thousands may be in the stage.
        due = [replica.requests[key] for key in self._due.get(topic, ())]
        for request in sorted(due, key=lambda r: (r.stage_seq, r.number)):
            observation = self._find(request, topic)
            assert observation is not None
            if observation.good:
                good.append(request.stage)
                self._voted.setdefault(request.key.room, {})[topic] = request.stage_seq
            else:
                bad.append((request.stage, f"rank {self.rank}: {observation.reason}"))
        return Ballot(topic, tuple(good), tuple(bad))

    def payload(self, topic: str, room: str) -> bytes:
        """What came with a good observation; rank 0 puts it into the verdict."""
        return self._seen[room][topic].payload

    def forget(self, room: str) -> None:
        self._seen.pop(room, None)
        self._rung.pop(room, None)
        self._voted.pop(room, None)

    def _find(self, request: Request, topic: str) -> Observation | None:
        """What was seen for the stage the attempt is in now."""
        found = self._seen.get(request.key.room, {}).get(topic)
        return found if found is not None and found.stage_seq in (0, request.stage_seq) else None

    def _bell(self, request: Request, replica: Replica) -> Bell | None:
        topic = replica.topics.get(request.state)
        if topic is None:
            return None
        observation = self._find(request, topic)
        if observation is None:
            return None
        self._due.setdefault(topic, {})[request.key] = None
        rung = self._rung.setdefault(request.key.room, {})
        if rung.get(topic) == request.stage_seq and observation.good:
            return None
        rung[topic] = request.stage_seq
        return Bell(self.rank, topic, request.stage, observation.good)
