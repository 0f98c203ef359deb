"""Planted bugs: each takes one rule of the protocol away, to prove that the simulator would notice.

`MUTATIONS` maps a name to what is broken, the profile in which it shows best, and a patch: a context
manager under which the core has the bug. Nothing outside the `with` is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import sim.mutants_log as log
import sim.mutants_pages as pages
import sim.mutants_transfer as transfer

Patch = tuple[object, str, Any]  # owner, attribute, what stands there instead


@dataclass(frozen=True, slots=True)
class Mutation:
    breaks: str
    patches: Callable[[], list[Patch]]
    profile: str = "mixed"

    def planted(self) -> AbstractContextManager[None]:
        return _swap(self.patches())


@contextmanager
def _swap(patches: list[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, new in patches:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        yield


MUTATIONS: dict[str, Mutation] = {
    # How the ranks agree.
    "repoll": Mutation("a rank looks again at what it saw when it applies a verdict", log.repoll, "aborts"),
    "union": Mutation("votes are joined by union instead of intersection", log.union),
    "good_wins": Mutation("a bad vote does not outweigh the good ones", log.good_wins, "transfer"),
    "bad_ignored": Mutation("bad votes are dropped from the verdict", log.bad_ignored, "transfer"),
    "no_stage_seq": Mutation("votes and verdicts are keyed by attempt and topic alone", log.no_stage_seq, "grow"),
    "lost_bells": Mutation("bells that ring while a ballot is out are forgotten", log.lost_bells),
    "ballot_with_verdict": Mutation("a topic's ballot opens in the entry of its verdict", log.ballot_with_verdict),
    "verdict_unchecked": Mutation("a verdict is applied whatever stage its key is in", log.verdict_unchecked, "aborts"),
    "no_tombstone": Mutation("the store forgets a room at its first deletion", log.no_tombstone, "aborts"),
    "short_tombstone": Mutation("the store's tombstone ends when rank 0 deletes", log.short_tombstone, "aborts"),
    "failed_forgiven": Mutation("a later report overwrites FAILED in the store", log.failed_forgiven, "slow"),
    "reports_after_effects": Mutation(
        "numbered reports wait behind effects that may observe something", log.reports_after_effects, "aborts"
    ),
    "silent_when_empty": Mutation("no acknowledgement while nothing is held", log.silent_when_empty),
    "no_window": Mutation("rank 0 writes on without waiting for acknowledgements", log.no_window, "zero"),
    "own_clock": Mutation("ranks judge deadlines by their own clocks", log.own_clock, "aborts"),
    "skip_shared": Mutation("a tick is skipped when one of its attempts has ended", log.skip_shared, "aborts"),
    # Who may have which pages.
    "free_before_fence": Mutation(
        "an aborted attempt's destination pages are free at once", pages.free_before_fence, "aborts"
    ),
    "free_source_early": Mutation(
        "source pages are free before the sender is quiet", pages.free_source_early, "aborts"
    ),
    "no_tick_holder": Mutation(
        "an aborted attempt's pages are free while its tick runs", pages.no_tick_holder, "aborts"
    ),
    "free_before_copied": Mutation("a victim's pages are free before they are saved", pages.free_before_copied, "grow"),
    "half_prefilled": Mutation("a prompt gets its pages chunk by chunk", pages.half_prefilled, "prompts"),
    "arrival_order": Mutation("pages are given in the order this rank saw handshakes end", pages.arrival_order),
    "maintain_in_launch": Mutation("pages are given only when a batch is launched", pages.maintain_in_launch),
    "any_victim": Mutation("the oldest may be made to leave", pages.any_victim, "grow"),
    # How KV moves.
    "early_decode": Mutation("one source's Finished is enough", transfer.early_decode),
    "no_sampler": Mutation("a sampler without common layers is not waited for", transfer.no_sampler),
    "submit_after_stopped": Mutation(
        "chunks of a stopped room are still sent", transfer.submit_after_stopped, "aborts"
    ),
    "failed_is_quiet": Mutation("a handle that failed counts as proof", transfer.failed_is_quiet, "transfer"),
    "stopped_at_once": Mutation("Stopped is said while handles are in flight", transfer.stopped_at_once, "aborts"),
    "unacked_done": Mutation("a room is done before Finished is acknowledged", transfer.unacked_done, "blinks"),
    "no_repeat": Mutation("nothing is said again on a new link", transfer.no_repeat, "transfer"),
    "death_is_an_edge": Mutation("a death is forgotten once told", transfer.death_is_an_edge, "deaths"),
    "tail_ignored": Mutation(
        "a destroyed engine is a fence at once, without its tail", transfer.tail_ignored, "transfer"
    ),
    "tail_not_lived": Mutation(
        "a dead sender's tail also counts while the rank stands still", transfer.tail_not_lived, "freezes"
    ),
    "lost_is_dead": Mutation("a peer that falls silent counts as fenced", transfer.lost_is_dead, "transfer"),
    "early_destinations_dropped": Mutation(
        "destinations that overtake the log are dropped", transfer.early_destinations_dropped
    ),
    "damage_ignored": Mutation("checksums are compared in vain", transfer.damage_ignored, "corrupt"),
    "fenced_while_asked_again": Mutation(
        "a source counts as quiet while it writes a damaged slice again", transfer.fenced_while_asked_again, "corrupt"
    ),
    "lease_not_awaited": Mutation("under a lease, the sender's word is a fence", transfer.lease_not_awaited, "leases"),
    "no_stop_tombstone": Mutation(
        "a Stop that overtakes the log leaves no tombstone", transfer.no_stop_tombstone, "aborts"
    ),
    "stop_only_answered": Mutation(
        "a Stop that overtakes the log is answered, and that is all", transfer.stop_only_answered, "aborts"
    ),
    "no_close_tombstone": Mutation(
        "a closed room leaves no tombstone for late destinations", transfer.no_close_tombstone, "aborts"
    ),
    "token_unchecked": Mutation("whoever names a room may speak for its target", transfer.token_unchecked),
    "no_parking_tombstone": Mutation(
        "destinations that find no place leave no tombstone", transfer.no_parking_tombstone, "early"
    ),
}
