"""The gateway, as far as the cluster notices it: pairs, resumed requests, cancels; with the real `Merge`.

In: the request plans of a case; what instances tell; deaths. Out: submits and cancels. Checked here:
delivered tokens equal the reference's, each attempt ends on both sides, and nothing fails without an
excuse (a fault, a cancel, a deadline, a pool that can never hold it).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from consensus.entry import Key, PeerRef, RequestSpec, SamplingParams
from gateway.instances import Side
from gateway.merge import Deliver, Ending, Event, Finish, Merge, SideEnd, Token
from pipeline.outcome import Outcome
from sim.case import RequestPlan
from sim.clock import Violation
from sim.model import EOS, prompt_of, reference, token_at

if TYPE_CHECKING:
    from consensus.entry import TokenOut
    from sim.incarnation import Incarnation
    from sim.world import World

BACKOFF = 200_000
_ENDS = {end.value.replace(" ", "_"): end for end in SideEnd}


@dataclass
class Attempt:
    key: Key
    names: dict[Side, str]  # instance of each side
    merge: Merge
    open: dict[Side, Incarnation | None] = field(default_factory=dict)  # sides that have not ended; None: not there yet
    cancelled: bool = False


@dataclass
class Client:
    plan: RequestPlan
    prompt: tuple[int, ...]
    expected: list[int]
    delivered: list[int] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    gone: bool = False  # the client gave up
    outcome: str = ""  # "", "ok", or why it failed
    retryable: bool = False
    counted: bool = False  # as over

    @property
    def patient(self) -> bool:
        """Resumed only when both sides of the failed attempt have ended. The real gateway does not wait for that; but
        where a peer stands still, only who waits is still there when it goes on."""
        return sum(self.plan.name.encode()) % 2 == 1

    @property
    def over(self) -> bool:
        return bool(self.outcome) and all(not attempt.open for attempt in self.attempts)


class GatewayModel:
    def __init__(self, world: World) -> None:
        self.world = world
        self.clients: dict[str, Client] = {}
        self.numbers: dict[Key, int] = {}  # attempts, numbered from 1: what KV tags are made of
        self.owners: dict[Key, tuple[Client, Attempt]] = {}
        self.waiting = 0  # clients that are not over
        self.scheduled = 0  # clients yet to come

    def schedule(self, plan: RequestPlan, pair: tuple[str, str] | None = None) -> None:
        self.scheduled += 1
        self.world.clock.at(plan.at, self._arrive, plan, pair)

    def _arrive(self, plan: RequestPlan, pair: tuple[str, str] | None) -> None:
        seed = self.world.case.seed
        prompt = prompt_of(seed, plan.name, plan.prompt)
        expected = reference(seed, plan.name, plan.prompt, plan.output, plan.ignore_eos)
        client = self.clients[plan.name] = Client(plan, prompt, expected)
        self.scheduled -= 1
        self.waiting += 1
        if plan.cancel:
            self.world.clock.after(plan.cancel, self._give_up, client)
        self._attempt(client, pair)

    # -- an attempt ----------------------------------------------------------------------------------

    def _attempt(self, client: Client, pair: tuple[str, str] | None = None) -> None:
        world, plan = self.world, client.plan
        if client.outcome:
            return
        key = Key(plan.name, len(client.attempts))
        names = pair or world.choose_pair(client.attempts[-1].names if client.attempts else None)
        merge = Merge(client.delivered)
        attempt = Attempt(key, {Side.PREFILL: names[0], Side.DECODE: names[1]}, merge)
        client.attempts.append(attempt)
        self.numbers[key] = len(self.numbers) + 1
        self.owners[key] = (client, attempt)
        params = SamplingParams(max_tokens=plan.output, ignore_eos=plan.ignore_eos)
        prompt, resumed = (*client.prompt, *client.delivered), len(client.delivered)
        for side in Side:
            other = attempt.names[side.other]
            epoch = 0 if plan.any_epoch else world.epochs[other]
            spec = RequestSpec(
                key, prompt, params, PeerRef(other, other, epoch), plan.timeout, resumed, key.room.encode()
            )
            attempt.open[side] = None
            for _ in range(1 + (plan.twice and key.attempt == 0)):
                world.to_instance(attempt.names[side], self._submitted, attempt, side, spec)

    def _submitted(self, attempt: Attempt, side: Side, spec: RequestSpec) -> None:
        """At the instance."""
        incarnation = self.world.instances[attempt.names[side]]
        if attempt.open.get(side, incarnation) is not None and attempt.open.get(side) is not incarnation:
            return  # a repeated call on a connection that ended with its instance
        if incarnation is None or not incarnation.alive or incarnation.draining:
            self.world.from_instance(attempt.names[side], self._broke, attempt.key, side, None)
            return
        if side in attempt.open:
            attempt.open[side] = incarnation
            incarnation.submit(spec)

    def hears(self, incarnation: Incarnation, key: Key, said: tuple[int, tuple[TokenOut, ...]] | Outcome) -> None:
        client, attempt = self.owners[key]
        side = Side.PREFILL if incarnation.is_prefill else Side.DECODE
        if isinstance(said, Outcome):
            if side not in attempt.open:
                return  # counted as broken when it died
            del attempt.open[side]
            events = attempt.merge.outcome(
                side, _ENDS[said.kind], said.reason, said.output_tokens, said.retryable, said.hand_over
            )
        else:
            position, tokens = said
            events = attempt.merge.tokens(side, position, [Token(t.token) for t in tokens])
        self._follow(client, attempt, events)

    def died(self, incarnation: Incarnation) -> None:
        """Everything open there broke."""
        side = Side.PREFILL if incarnation.is_prefill else Side.DECODE
        for client in self.clients.values():
            for attempt in client.attempts:
                if attempt.open.get(side) is incarnation:
                    self._broke(attempt.key, side, incarnation)

    def _broke(self, key: Key, side: Side, incarnation: Incarnation | None) -> None:
        client, attempt = self.owners[key]
        if side in attempt.open and attempt.open[side] is incarnation:
            del attempt.open[side]
            reason = f"{attempt.names[side]} is gone"
            self._follow(client, attempt, attempt.merge.broke(side, "UNAVAILABLE", reason))

    def _follow(self, client: Client, attempt: Attempt, events: list[Event]) -> None:
        for event in events:
            match event:
                case Deliver(tokens):
                    self._deliver(client, [token.id for token in tokens])
                case Finish(ending, reason, retryable=retryable):
                    self._finish(client, attempt, ending, reason, retryable)
        finish = attempt.merge.finish
        if finish is not None and finish.ending is Ending.FAILED and attempt.open and not attempt.cancelled:
            attempt.cancelled = True
            self._cancel(attempt, "the other side ended")
        last = finish is not None and not attempt.open and client.attempts[-1] is attempt
        if last and client.patient and not client.outcome:
            self.world.clock.after(BACKOFF, self._attempt, client)
        self._count(client)

    def _count(self, client: Client) -> None:
        if client.over and not client.counted:
            client.counted = True
            self.waiting -= 1

    def _deliver(self, client: Client, tokens: list[int]) -> None:
        at = len(client.delivered)
        client.delivered += tokens
        if client.gone:
            return
        if client.expected[at : at + len(tokens)] != tokens:
            raise Violation(f"{client.plan.name}: tokens {tokens} at {at}, expected {client.expected[at:]}")

    def _finish(self, client: Client, attempt: Attempt, ending: Ending, reason: str, retryable: bool) -> None:
        if client.outcome:
            return
        if ending is not Ending.FAILED:
            client.outcome = "ok"
            if client.delivered != client.expected:
                raise Violation(
                    f"{client.plan.name} ended with {len(client.delivered)} of {len(client.expected)} tokens"
                )
            kind = Ending.STOP if client.expected[-1] == EOS and not client.plan.ignore_eos else Ending.LENGTH
            if ending is not kind:
                raise Violation(f"{client.plan.name} ended by {ending.value}, expected {kind.value}")
        elif client.delivered == client.expected:
            client.outcome = f"failed after its last token: {reason}"  # nothing is left to ask another pair for
        elif not retryable or len(client.attempts) > self.world.case.retries:
            client.outcome = reason
            client.retryable = retryable
        elif not client.patient:  # the failed attempt may still be ending
            self.world.clock.after(BACKOFF, self._attempt, client)

    # -- the client ----------------------------------------------------------------------------------

    def _give_up(self, client: Client) -> None:
        if client.outcome:
            return
        client.outcome, client.gone = "cancelled", True
        attempt = client.attempts[-1]
        if attempt.open and not attempt.cancelled:
            attempt.merge.close(Finish(Ending.FAILED, "cancelled"))
            attempt.cancelled = True
            self._cancel(attempt, "cancelled by the client")
        self._count(client)  # it may be between two attempts

    def _cancel(self, attempt: Attempt, reason: str) -> None:
        for side in list(attempt.open):
            self.world.to_instance(attempt.names[side], self._cancelled, attempt, side, reason)

    def _cancelled(self, attempt: Attempt, side: Side, reason: str) -> None:
        incarnation = attempt.open.get(side)
        if incarnation is not None and incarnation.alive:
            incarnation.cancel(attempt.key, reason)

    # -- for others ----------------------------------------------------------------------------------

    def token(self, key: Key, position: int) -> int:
        return token_at(self.world.case.seed, key.request, position)

    def text(self, key: Key) -> tuple[int, ...]:
        """Prompt and reference of a request: what may stand at each position."""
        client = self.owners[key][0]
        return (*client.prompt, *client.expected)

    def excuses(self) -> list[str]:
        """Clients that failed, or needed a second attempt, without an excuse."""
        case, bad = self.world.case, []
        smallest = min(plan.pages for plan in (*case.prefill, *case.decode))
        for client in self.clients.values():
            plan, why = client.plan, client.outcome
            hurried = plan.timeout < 600_000_000
            excused = (
                (why == "ok" and (len(client.attempts) == 1 or hurried or not case.calm))
                or why == "cancelled"
                or (-(-(plan.prompt + plan.output) // case.page_size) > smallest and "pages, the pool has" in why)
                or (hurried and ("timed out" in why or why.startswith("failed after its last token")))
                or (not case.calm and (client.retryable or why.startswith("failed after its last token")))
            )
            if not excused:
                reasons = [attempt.merge.finish.reason for attempt in client.attempts if attempt.merge.finish]
                bad.append(f"{plan.name} failed without an excuse: {why or 'never ended'}; attempts: {reasons}")
        return bad
