"""A process of the operating system: it lives, may stand still for a while (SIGSTOP), and dies.

In: `freeze`, `thaw`, `die`. Out: what would happen to a process that stands still happens when it goes on, in
the order in which it came; what it holds dies with it. Time in which it stood still is not time it lived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim.case import MS, SECOND
from sim.channel import Channel

if TYPE_CHECKING:
    from sim.world import World

READ_KERNEL = 20 * MS  # at most, until a process that went on has read what its kernel held
Work = tuple[Callable[..., object], tuple[Any, ...]]


class Process:
    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.frozen = False
        self.thawed_at = -SECOND
        self.inbound: list[Channel] = []
        self._stood = 0  # for how long it has stood still in all its life
        self._backlog: deque[Work] = deque()
        self._kernel: deque[Work] = deque()  # remote writes that it has not read

    def die(self) -> None:
        self.alive = self.frozen = False
        self._backlog.clear()
        while self._kernel:  # lost with the process, as its writer will find
            land, args = self._kernel.popleft()
            land(*args)

    def freeze(self) -> int:
        """All its threads stop. What its channels bring waits, and so does what `held` is asked about."""
        self.frozen = True
        for channel in self.inbound:
            channel.stop_reading()
        return self.world.clock.now

    def thaw(self, since: int) -> None:
        if not self.alive:
            return
        self.frozen = False
        self.thawed_at = self.world.clock.now
        self._stood += self.thawed_at - since
        while self._kernel:  # the threads that read it start no sooner than the others
            land, args = self._kernel.popleft()
            self.world.clock.after(int(self.world.chance.draw() * READ_KERNEL), land, *args)
        while self._backlog:
            action, args = self._backlog.popleft()
            action(*args)
        for channel in self.inbound:
            channel.read_on()

    def held(self, action: Callable[..., object], *args: Any) -> bool:
        """True: the process stands still, and the action follows when it goes on."""
        if self.frozen:
            self._backlog.append((action, args))
        return self.frozen

    def in_kernel(self, land: Callable[..., object], *args: Any) -> bool:
        """True: the process stands still, and this remote write lands when it goes on, or is lost with it."""
        if self.frozen:
            self._kernel.append((land, args))
        return self.frozen

    def after_living(self, delay: int, action: Callable[..., object], *args: Any) -> None:
        """Like `clock.after`, but time in which the process stood still does not count."""
        self.world.clock.after(delay, self._has_lived, self._stood, action, args)

    def _has_lived(self, stood: int, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.held(self._has_lived, stood, action, args):
            return
        if self._stood > stood:
            self.after_living(self._stood - stood, action, *args)
        else:
            action(*args)
