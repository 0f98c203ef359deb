"""The peer link between one decode rank, which dials, and one prefill rank, which listens.

Messages of one connection arrive in order. A connection that breaks loses what was on the way; the
decode end dials anew until somebody answers, and both ends then say again what counts. Silence of a
wanted peer for `SILENCE` makes it lost. Mirrors what the sockets of the real link do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer.actions import Peer
from transfer.messages import RoomMessage

if TYPE_CHECKING:
    from sim.ports import ReceivingPort, SendingPort
    from sim.world import World

REDIAL = 500_000
SILENCE = 8_000_000


class Link:
    def __init__(self, world: World, port: ReceivingPort, instance: str, rank: int) -> None:
        self.world, self.port, self.instance, self.rank = world, port, instance, rank
        self.number = 0  # of the connection; whatever belongs to an older one is void
        self.peer: Peer | None = None  # who welcomed us
        self.server: SendingPort | None = None
        self.silent = 0
        self.closed = False
        self._watching = False
        self._last = [0, 0]  # arrival of the latest message, up and down: a connection is FIFO

    # -- connecting ----------------------------------------------------------------------------------

    def dial(self) -> None:
        self.number += 1
        self.peer = self.server = None
        self._watch()
        self._carry(0, self._hello, self.number, self.port.wanted_epoch(self.instance))

    def break_off(self) -> None:
        """The connection is gone; the decode end notices, the prefill end does not."""
        self.number += 1
        self.peer = None
        self._watch()

    def close(self) -> None:
        """The port has no more use for it."""
        self.closed = True
        self.number += 1
        self.peer = None

    def _hello(self, number: int, epoch: int) -> None:
        process = self.world.process(self.instance, self.rank)
        if process is None:
            return  # nobody answers
        if process.held(self._hello, number, epoch):
            return
        if number != self.number:
            return  # another connection has taken its place
        server = process.sending
        if epoch not in (0, server.identity.epoch):
            self._carry(1, self._refused, number, f"{self.instance} is epoch {server.identity.epoch}, not {epoch}")
            return
        self.server = server
        server.accept(self, number, lambda: self._carry(1, self._welcome, number, server.identity))

    def _welcome(self, number: int, peer: Peer) -> None:
        if number == self.number and not self.port.owner.held(self._welcome, number, peer):
            self.peer, self.silent = peer, 0
            self.port.welcomed(self)

    def _refused(self, number: int, reason: str) -> None:
        if number == self.number and not self.port.owner.held(self._refused, number, reason):
            self.port.refused(self, reason)

    # -- messages ------------------------------------------------------------------------------------

    def up(self, message: RoomMessage) -> None:
        if self.peer is not None:
            self._carry(0, self._at_prefill, self.number, message)

    def down(self, number: int, message: RoomMessage) -> None:
        self._carry(1, self._at_decode, number, message)

    def _at_prefill(self, number: int, message: RoomMessage) -> None:
        server = self.server
        if number != self.number or server is None or not server.owner.alive:
            return
        if not server.owner.held(self._at_prefill, number, message):
            server.heard(self, number, message)

    def _at_decode(self, number: int, message: RoomMessage) -> None:
        if number != self.number or self.peer is None or not self.port.owner.alive:
            return
        if not self.port.owner.held(self._at_decode, number, message):
            self.port.heard(self.peer, message)

    def _carry(self, way: int, action: object, number: int, *args: object) -> None:
        world = self.world
        arrival = world.clock.now + world.chance.between(world.chance.delays.link)
        self._last[way] = arrival = max(arrival, self._last[way])
        world.clock.at(arrival, self._arrive, action, number, args)

    def _arrive(self, action: object, number: int, args: tuple[object, ...]) -> None:
        alive = self.port.owner.alive
        if alive and number == self.number and not self.cut:
            action(number, *args)  # type: ignore[operator]

    @property
    def cut(self) -> bool:
        return self.world.cut_until(self.instance, self.port.owner.incarnation.name) > self.world.clock.now

    # -- silence -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self.world.clock.after(REDIAL, self._look)

    def _look(self) -> None:
        """While there is no connection: dial again, and give the peer up if it is wanted and silent for too long."""
        if self.port.owner.held(self._look):
            return
        self._watching = False
        if self.peer is not None or self.closed or not self.port.owner.alive:
            return
        wanted = self.port.wants(self.instance)
        self.silent = self.silent + REDIAL if wanted else 0
        if self.silent >= SILENCE:
            self.silent = 0
            self.port.silent(self)
        if wanted:
            self.dial()
        else:
            self._watch()
