"""Two-pass ring votes: merging votes on the way round, and rank 0's book of bells and ballots.

Pass 1 travels with an entry: each rank joins its vote to the ones before it, good by intersection, bad
by union. Pass 2 is the verdict, an entry like any other and immutable.

Rank 0 opens a ballot on a topic when every rank rang good for a key or one rang bad. One ballot per
topic is outstanding; the next opens no earlier than the entry after the verdict's. Bells are never
lost: a bell that completes a key marks its topic dirty, and only the opening of a ballot clears that.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from consensus.entry import Ballot, Key, StageKey, Verdict


class Bell(msgspec.Struct, frozen=True, array_like=True):
    """A rank tells rank 0 that it could vote on a key now."""

    rank: int
    topic: str
    key: StageKey
    good: bool


def join(before: Ballot, mine: Ballot) -> Ballot:
    """The votes of ranks 0..k-1 and of rank k as one: good ∩ good, bad ∪ bad, first reasons kept."""
    assert before.topic == mine.topic
    also = frozenset(mine.good)
    known = {key for key, _ in before.bad}
    return Ballot(
        before.topic,
        tuple(key for key in before.good if key in also),
        before.bad + tuple(item for item in mine.bad if item[0] not in known),
    )


def conclude(ballot: Ballot) -> Ballot:
    """What all ranks agree on: bad wins over good."""
    bad = {key for key, _ in ballot.bad}
    return Ballot(ballot.topic, tuple(key for key in ballot.good if key not in bad), ballot.bad)


class _Topic:
    __slots__ = ("bells", "dirty", "outstanding", "settled")

    def __init__(self) -> None:
        self.bells: dict[Key, tuple[StageKey, list[int]]] = {}  # the stage, and who rang good, without repeats
        self.dirty = False
        self.outstanding = 0  # seq of the entry that carried the open ballot
        self.settled = 0  # seq of the entry that carried the last verdict


class BallotBox:
    """Rank 0's book. `topics` fixes the order in which ballots open."""

    def __init__(self, ranks: int, topics: Sequence[str]) -> None:
        self._ranks = ranks
        self._topics = {topic: _Topic() for topic in topics}

    @property
    def bells(self) -> int:
        """Keys with a bell that no verdict has answered yet."""
        return sum(len(t.bells) for t in self._topics.values())

    def ring(self, bell: Bell) -> None:
        """Counts a bell. The caller has checked that its key can be voted on at all."""
        topic = self._topics[bell.topic]
        stage, ranks = topic.bells.setdefault(bell.key.key, (bell.key, []))
        assert stage == bell.key, "bells of a stage that was left are void before the next stage's ring"
        if bell.good and bell.rank not in ranks:
            ranks.append(bell.rank)
        if not bell.good or len(ranks) == self._ranks:
            topic.dirty = True

    def due(self, seq: int) -> tuple[str, ...]:
        """Topics whose ballot may open in entry `seq`."""
        return tuple(n for n, t in self._topics.items() if t.dirty and not t.outstanding and t.settled < seq)

    def opened(self, topics: Sequence[str], seq: int) -> None:
        for name in topics:
            topic = self._topics[name]
            assert not topic.outstanding and topic.dirty
            topic.outstanding, topic.dirty = seq, False

    def settled(self, verdict: Verdict, seq: int) -> None:
        """The verdict goes out in entry `seq`; its keys need no more bells."""
        topic = self._topics[verdict.topic]
        assert topic.outstanding == verdict.ballot_seq, "a verdict answers the one open ballot"
        topic.outstanding, topic.settled = 0, seq
        for key, _ in (*verdict.good, *verdict.bad):
            topic.bells.pop(key.key, None)

    def forget(self, key: Key, keep: str | None) -> None:
        """The attempt entered a new stage, voted on in `keep`: bells for other stages are void."""
        for name, topic in self._topics.items():
            if name != keep:
                topic.bells.pop(key, None)
