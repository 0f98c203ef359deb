"""One PP rank, without any I/O: applies the log, votes, and says what the shell must do.

In: entries from the predecessor (rank 0 has a `Sequencer` instead) and this rank's observations.
Out: effects. A rank relays an entry before it applies it, so control never waits for compute; it
compares digests at every entry, so two ranks that differ stop at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from consensus.entry import BOOTSTRAP, Ballot, Entry, Trailer
from consensus.log import Cursor
from consensus.recorder import Recorder
from consensus.status import KVPoll
from consensus.store import Reporter
from consensus.votes import join
from pipeline.effects import TOLD, Acknowledge, CloseRoom, Effect, Relay, Report
from pipeline.local import Local, Observation
from pipeline.replica import Replica
from pipeline.request import DONE


class RankCore:
    """Rank `rank` of `pp_size`. Rank 0's core is driven by its `Sequencer`."""

    def __init__(self, rank: int, pp_size: int, replica: Replica) -> None:
        self.rank = rank
        self.last = rank == pp_size - 1
        self.replica = replica
        self.cursor = Cursor(replica.config.epoch)
        self.local = Local(rank)
        self.store = Reporter(rank)
        self.recorder = Recorder()
        self.stale = 0  # entries of another epoch, dropped

    def observe(self, observation: Observation) -> list[Effect]:
        """Something only this rank saw. Bootstrap goes through the store, the rest through doorbells."""
        if observation.topic == BOOTSTRAP:
            if observation.room not in self.replica.rooms:
                return []
            status = KVPoll.WAITING_FOR_INPUT if observation.good else KVPoll.FAILED
            update = self.store.put(observation.room, status, observation.reason)
            return [] if update is None else [Report(update)]
        bell = self.local.observe(observation, self.replica)
        return [] if bell is None else [Report(bell)]

    def on_entry(self, entry: Entry, trailer: Trailer) -> list[Effect]:
        """Ranks above 0. Raises `Diverged` when this rank and its predecessor no longer agree."""
        if entry.epoch != self.cursor.epoch:
            self.stale += 1
            return []
        self.cursor.check(entry, trailer, self.replica.digest.value)
        votes = tuple(join(before, self.local.vote(before.topic, self.replica)) for before in trailer.votes)
        onward: Effect
        if self.last:
            onward = Acknowledge(entry.seq, votes)
        else:
            onward = Relay(entry, Trailer(self.replica.digest.value, votes))
        effects = self.replica.apply(entry)
        if entry.launch is not None:
            effects += self.replica.launch(entry.launch)
        effects = self.settle(entry, effects)
        # The acknowledgement says "applied", so it follows the work; a relay promises nothing and leads.
        return [*effects, onward] if self.last else [onward, *effects]

    def vote(self, topics: Iterable[str]) -> tuple[Ballot, ...]:
        """Rank 0's own vote, the first on the way round."""
        return tuple(self.local.vote(topic, self.replica) for topic in topics)

    def settle(self, entry: Entry, effects: list[Effect]) -> list[Effect]:
        """Ends an entry: rings for stages that were observed already, folds the digest, forgets closed rooms."""
        # Reports lead: they are numbered here, and carrying out an effect may make this rank report more.
        reports: list[Effect] = []
        if self.replica.uses_store:
            reports += [Report(self.store.delete(effect.room)) for effect in effects if isinstance(effect, CloseRoom)]
        if self.rank != 0:  # every rank decides them, rank 0 tells them
            effects = [effect for effect in effects if not isinstance(effect, TOLD)]
        for request in self.replica.moved:
            if request.state == DONE:
                self.local.forget(request.key.room)
        reports += [Report(bell) for bell in self.local.bells(self.replica.moved, self.replica)]
        notes = self.replica.fold()
        self.cursor.advance(entry.seq)
        self.recorder.record(entry, notes, self.replica.digest.value)
        return reports + effects
