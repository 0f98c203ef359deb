"""Sending and receiving sides of two instances, a network that reorders and repeats, and memory that keeps book.

In: topologies, rooms, a seeded random generator, which faults may happen.
Out: an end state to assert on. After each step it checks itself: observations come once
per topic, nothing is submitted after `Stopped`, no write lands after the destination
released its pages, no write reads source pages that were released.

With `leased`, an engine that checks each write: one that comes after the lease was revoked
does not land, and a failed handle is called quiet although its bytes are still on their way.
With `damage`, some of what lands is not what was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from transfer.actions import Grant, NeedPeer, Observe, Peer, ReceiverAction, Revoke, Send, SenderAction, Submit, Verify
from transfer.messages import RoomMessage, Stopped
from transfer.plan import Topology, TransferPlan
from transfer.receiver import ReceivingSide
from transfer.sender import SendingSide

PREFILL, DECODE = "prefill", "decode"


def digest(content: object) -> bytes:
    return crc32(repr(content).encode()).to_bytes(4, "big")


@dataclass
class Room:
    name: str
    tokens: int
    src_pages: list[int]
    dst_pages: list[int]
    stopped: bool = False
    written: list[int] = field(default_factory=list)  # per source rank
    started: list[bool] = field(default_factory=list)


@dataclass
class Flight:
    rank: int
    submit: Submit
    writes: list[tuple[int, int, int]]  # layer, source offset, destination offset: one token each
    engine: int = 1
    failed: bool = False


@dataclass
class Orphan:
    """What the kernel took of a write whose engine is destroyed."""

    rank: int
    engine: int
    room: str
    to: int
    layer: int
    offset: int
    position: int


class World:
    def __init__(
        self,
        source: Topology,
        destination: Topology,
        random: Random,
        repeats: bool = True,
        checksums: bool = False,
        leased: bool = False,
        damage: float = 0.0,
    ) -> None:
        self.random, self.repeats, self.leased, self.damage = random, repeats, leased, damage
        self.source, self.destination = source, destination
        self.plan = TransferPlan(source, destination)
        last = len(source.shards) - 1
        self.senders = [SendingSide(rank, source, rank == last, checksums) for rank in range(len(source.shards))]
        self.receivers = [
            ReceivingSide(rank, destination, checksums, leased) for rank in range(len(destination.shards))
        ]
        self.checks: list[tuple[int, Verify]] = []  # destination rank
        self.revocations: list[tuple[int, str]] = []
        self.granted: dict[tuple[int, str], tuple[int, ...]] = {}  # destination rank, room -> pages
        self.damaged = 0
        self.rooms: dict[str, Room] = {}
        self.told: dict[tuple[str, int, str, str], Observe] = {}  # side, rank, room, topic
        self.messages: list[tuple[Peer, Peer, RoomMessage]] = []
        self.flights: list[Flight] = []
        self.memory: dict[
            tuple[int, int, int], tuple[str, int, int]
        ] = {}  # rank, layer, offset -> room, layer, position
        self.stopped_said: dict[tuple[int, str, int], bool] = {}  # source rank, room, destination rank
        self.dead = False
        self.engines = [1] * len(self.senders)
        self.retired: list[tuple[int, int]] = []  # source rank, engine: gets nothing more, still writes
        self.tails: list[tuple[int, int, Peer]] = []
        self.orphans: list[Orphan] = []
        for rank in range(len(destination.shards)):
            for sender in self.senders:
                self.sent(sender.rank, sender.peer_connected(Peer(DECODE, 1, rank), destination))

    # ---- actions

    def observe(self, side: str, rank: int, observation: Observe) -> None:
        key = (side, rank, observation.room, observation.topic)
        assert key not in self.told, f"{key} told twice"
        self.told[key] = observation
        if side == PREFILL and observation.topic == "release":
            flying = [
                flight for flight in self.flights if (flight.rank, flight.submit.room) == (rank, observation.room)
            ]
            assert not flying, f"{key}: the pages are still being read"

    def sent(self, rank: int, actions: Sequence[SenderAction]) -> None:
        for action in actions:
            match action:
                case Observe():
                    self.observe(PREFILL, rank, action)
                case Send(peer, message):
                    if isinstance(message, Stopped):
                        self.stopped_said[rank, message.room, peer.rank] = True
                    self.messages.append((Peer(PREFILL, 1, rank), peer, message))
                case Submit():
                    key = (rank, action.room, action.peer.rank)
                    assert key not in self.stopped_said, f"{key}: submitted after Stopped"
                    writes = [
                        (layer, src + i, dst + i)
                        for layer in range(*action.layers)
                        for src, dst, tokens in action.runs
                        for i in range(tokens)
                    ]
                    self.flights.append(Flight(rank, action, writes, self.engines[rank]))

    def received(self, rank: int, actions: Sequence[ReceiverAction]) -> None:
        for action in actions:
            match action:
                case Observe():
                    self.observe(DECODE, rank, action)
                case Send(peer, message):
                    self.messages.append((Peer(DECODE, 1, rank), peer, message))
                case Grant(room, pages):
                    self.granted[rank, room] = pages
                case Revoke(room):
                    self.revocations.append((rank, room))
                case Verify():
                    self.checks.append((rank, action))
                case NeedPeer(instance, _):
                    self.received(rank, self.receivers[rank].peer_ready(instance, 1, self.source))

    # ---- what may happen next

    def deliver(self) -> None:
        index = self.random.randrange(len(self.messages))
        sender, to, message = self.messages[index]
        if not (self.repeats and self.random.random() < 0.2):
            self.messages.pop(index)
        if to.instance == PREFILL and not self.dead:
            self.sent(to.rank, self.senders[to.rank].on_message(sender, message))
        elif to.instance == DECODE:
            self.received(to.rank, self.receivers[to.rank].on_message(sender, message))

    def land(self, whole: bool = False) -> None:
        flight = self.random.choice(self.flights)
        count = len(flight.writes) if whole else self.random.randint(1, max(1, len(flight.writes)))
        for _ in range(min(count, len(flight.writes))):
            layer, src, dst = flight.writes.pop(self.random.randrange(len(flight.writes)))
            self.write(flight, layer, src, dst)
        if not flight.writes:
            self.flights.remove(flight)
            if not self.dead and (not flight.failed or self.random.random() < 0.5):
                checksums = self.checksums(flight)
                self.sent(
                    flight.rank, self.senders[flight.rank].completed(flight.submit.handle, None, checksums=checksums)
                )

    def checksums(self, flight: Flight) -> bytes:
        """Of the source, which holds at each position what names it."""
        submit = flight.submit
        name, pages, size = submit.room, self.rooms[submit.room].src_pages, self.source.page_size
        positions = [
            pages.index((at + i) // size) * size + (at + i) % size for at, tokens in submit.spans for i in range(tokens)
        ]
        return digest([(name, layer, position) for layer in range(*submit.layers) for position in positions])

    def check(self) -> None:
        rank, asked = self.checks.pop(self.random.randrange(len(self.checks)))
        offsets = [at + i for at, tokens in asked.spans for i in range(tokens)]
        found = digest([self.memory.get((rank, layer, at)) for layer in range(*asked.layers) for at in offsets])
        sound = found == asked.checksums
        self.received(rank, self.receivers[rank].verified(asked.room, asked.source, asked.number, sound))

    def revoke(self) -> None:
        rank, room = self.revocations.pop(self.random.randrange(len(self.revocations)))
        self.granted.pop((rank, room), None)
        self.received(rank, self.receivers[rank].revoked(room))

    def write(self, flight: Flight, layer: int, src: int, dst: int) -> None:
        self.arrive(self.orphan(flight, layer, src, dst))

    def orphan(self, flight: Flight, layer: int, src: int, dst: int) -> Orphan:
        room = self.rooms[flight.submit.room]
        page, within = divmod(src, self.source.page_size)
        position = room.src_pages.index(page) * self.source.page_size + within
        return Orphan(flight.rank, flight.engine, room.name, flight.submit.peer.rank, layer, dst, position)

    def arrive(self, bytes_: Orphan) -> None:
        if self.leased and (bytes_.to, bytes_.room) not in self.granted:
            return
        released = (DECODE, bytes_.to, bytes_.room, "release") in self.told
        assert not released, f"a write of {bytes_.room} landed after its release"
        if self.leased:
            assert bytes_.offset // self.source.page_size in self.granted[bytes_.to, bytes_.room]
        what = bytes_.room
        if self.random.random() < self.damage:
            self.damaged += 1
            what = "flipped"
        self.memory[bytes_.to, bytes_.layer, bytes_.offset] = (what, bytes_.layer, bytes_.position)

    def fail_a_handle(self) -> None:
        flight = self.random.choice(self.flights)
        if self.leased:  # its connection is closed: what the kernel had taken of it is on its way
            self.flights.remove(flight)
            for layer, src, dst in flight.writes[: self.random.randint(0, len(flight.writes))]:
                self.orphans.append(self.orphan(flight, layer, src, dst))
            self.sent(flight.rank, self.senders[flight.rank].completed(flight.submit.handle, "cut", True))
        elif not flight.failed and not self.dead:
            flight.failed = True
            self.sent(flight.rank, self.senders[flight.rank].completed(flight.submit.handle, "cut"))

    def replace_an_engine(self) -> None:
        """One step of it: the engine gets nothing more; it is destroyed; a tail passes; or some of a tail lands."""
        choice = self.random.random()
        if self.dead:
            return
        if choice < 0.3:
            rank = self.random.randrange(len(self.senders))
            self.retired.append((rank, self.senders[rank].retire_engine()))
            self.engines[rank] += 1
        elif choice < 0.6 and self.retired:
            self.destroy_an_engine(*self.retired.pop(0))
        elif choice < 0.8 and self.tails:
            self.pass_a_tail(*self.tails.pop(self.random.randrange(len(self.tails))))
        elif self.orphans:
            self.arrive(self.orphans.pop(self.random.randrange(len(self.orphans))))

    def destroy_an_engine(self, rank: int, engine: int) -> None:
        cut = [flight for flight in self.flights if flight.rank == rank and flight.engine <= engine]
        self.flights = [flight for flight in self.flights if flight not in cut]
        for flight in cut:
            flight.engine = engine
            for layer, src, dst in flight.writes[: self.random.randint(0, len(flight.writes))]:
                self.orphans.append(self.orphan(flight, layer, src, dst))
        self.sent(rank, self.senders[rank].engine_replaced(engine))
        self.tails += [(rank, engine, peer) for peer in self.senders[rank].trailing_peers(engine)]

    def pass_a_tail(self, rank: int, engine: int, peer: Peer) -> None:
        mine = [one for one in self.orphans if (one.rank, one.engine, one.to) == (rank, engine, peer.rank)]
        self.orphans = [one for one in self.orphans if one not in mine]
        for one in mine:
            if self.random.random() < 0.5:
                self.arrive(one)
        self.sent(rank, self.senders[rank].tail_passed(engine, peer))

    def settle_engines(self) -> None:
        """Every engine is replaced, and every tail passes."""
        for rank, side in enumerate(self.senders):
            self.retired.append((rank, side.retire_engine()))
            self.engines[rank] += 1
        while self.retired:
            self.destroy_an_engine(*self.retired.pop(0))
        while self.tails:
            self.pass_a_tail(*self.tails.pop())

    def step_log(self, room: Room) -> None:
        """One thing the two logs would let some rank do for this room."""
        rank = self.random.randrange(len(self.senders) + len(self.receivers))
        if rank < len(self.senders):
            self.step_sender(room, rank)
        else:
            self.step_receiver(room, rank - len(self.senders))

    def step_sender(self, room: Room, rank: int) -> None:
        side = self.senders[rank]
        if self.dead:
            return
        if room.written[rank] < 0:
            room.written[rank] = 0
            self.sent(rank, side.open(room.name, DECODE, self.random.choice([0, 1]), room.tokens))
            if rank == side.topology.shards[-1].rank and self.random.random() < 0.5:
                self.sent(rank, side.first_token(room.name, b"token"))
        elif not room.started[rank]:
            if self.all_good(PREFILL, room, "bootstrap"):
                room.started[rank] = True
                self.sent(rank, side.start(room.name, room.src_pages))
        elif room.written[rank] < room.tokens:
            start, end = room.written[rank], self.random.randint(room.written[rank] + 1, room.tokens)
            first, last = side.topology.shards[rank].layers
            cut = self.random.randint(first, last)
            room.written[rank] = end
            self.sent(rank, side.written(room.name, start, end, (first, cut)))
            self.sent(rank, side.written(room.name, start, end, (cut, last)))
        elif rank == len(self.senders) - 1:
            self.sent(rank, side.first_token(room.name, b"token"))

    def step_receiver(self, room: Room, rank: int) -> None:
        side = self.receivers[rank]
        states = {status.room: status.state for status in side.rooms()}
        if room.name not in states:
            self.received(rank, side.open(room.name, PREFILL, self.random.choice([0, 1]), room.tokens))
        elif states[room.name] == "ready" and self.all_good(DECODE, room, "prealloc"):
            self.received(rank, side.send_destinations(room.name, room.dst_pages))

    def all_good(self, side: str, room: Room, topic: str) -> bool:
        ranks = len(self.senders if side == PREFILL else self.receivers)
        told = [self.told.get((side, rank, room.name, topic)) for rank in range(ranks)]
        return all(observation is not None and observation.good for observation in told)

    def stop(self, room: Room) -> None:
        """The logs of both instances abort the room, on the ranks that have it open."""
        room.stopped = True
        for rank, sender in enumerate(self.senders):
            if room.written[rank] >= 0 and not self.dead and room.name in [s.room for s in sender.rooms()]:
                self.sent(rank, sender.stop(room.name, "abort"))
        for rank, receiver in enumerate(self.receivers):
            if room.name in [status.room for status in receiver.rooms()]:
                self.received(rank, receiver.stop(room.name, "abort"))

    def add(self, name: str, tokens: int, src_pages: list[int], dst_pages: list[int]) -> None:
        ranks = len(self.senders)
        self.rooms[name] = Room(name, tokens, src_pages, dst_pages, False, [-1] * ranks, [False] * ranks)

    def kill_prefill(self) -> None:
        """Its processes die, what was in flight is lost or lands, and only then is the death proven."""
        self.dead = True
        while self.flights:
            flight = self.flights.pop()
            for layer, src, dst in flight.writes[: self.random.randint(0, len(flight.writes))]:
                self.write(flight, layer, src, dst)
        self.messages = [message for message in self.messages if self.random.random() < 0.5]
        for rank, receiver in enumerate(self.receivers):
            self.received(rank, receiver.peer_lost(PREFILL, 1, "silent", dead=False))
            self.received(rank, receiver.peer_lost(PREFILL, 1, "reaped", dead=True))

    # ---- runs

    def run(self, steps: int, stops: float = 0.0, failures: float = 0.0, replacements: float = 0.0) -> None:
        for _ in range(steps):
            room = self.random.choice(list(self.rooms.values()))
            choice = self.random.random()
            if choice < stops and not room.stopped:
                self.stop(room)
            elif stops <= choice < stops + failures and self.flights:
                self.fail_a_handle()
            elif stops + failures <= choice < stops + failures + replacements:
                self.replace_an_engine()
            elif choice < 0.4 and self.messages:
                self.deliver()
            elif choice < 0.6 and self.flights:
                self.land()
            elif choice < 0.65 and self.checks:
                self.check()
            elif choice < 0.7 and self.revocations:
                self.revoke()
            elif choice < 0.75 and self.leased and self.orphans:
                self.arrive(self.orphans.pop(self.random.randrange(len(self.orphans))))
            elif not room.stopped:
                self.step_log(room)

    def settle(self) -> None:
        self.repeats = False
        for _ in range(400):
            while self.messages:
                self.deliver()
            while self.flights:
                self.land(whole=True)
            while self.checks:
                self.check()
            while self.revocations:
                self.revoke()
            while self.leased and self.orphans:
                self.arrive(self.orphans.pop())
            for room in self.rooms.values():
                if not room.stopped:
                    for rank in range(len(self.senders)):
                        self.step_sender(room, rank)
                    for rank in range(len(self.receivers)):
                        self.step_receiver(room, rank)

    def assert_landed(self, room: Room) -> None:
        page_size = self.source.page_size
        for shard in self.destination.shards:
            for layer in range(*shard.layers):
                for position in range(room.tokens):
                    offset = room.dst_pages[position // page_size] * page_size + position % page_size
                    assert self.memory.get((shard.rank, layer, offset)) == (room.name, layer, position)
