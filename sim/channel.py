"""A FIFO channel with one writer and one reader, over which messages take as long as the seed says.

With a `capacity`, so many messages are on the way at once, the rest waits in the writer's outbox; with
0 the channel has no buffer at all: a send is complete only when the reader has taken the message and
the writer has heard of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from sim.clock import Chance, Clock


class Channel:
    def __init__(
        self,
        clock: Clock,
        chance: Chance,
        bounds: tuple[int, int],
        receive: Callable[[Any], object],
        capacity: int | None = None,
    ) -> None:
        self._clock, self._chance, self._bounds, self._receive = clock, chance, bounds, receive
        self.capacity = capacity
        self.outbox: deque[Any] = deque()
        self.most_waiting = 0
        self.most_unread = 0
        self._flying = 0
        self._unread: deque[Any] = deque()  # arrived, and the reader does not take it yet
        self._prompt = True  # the reader has never stood still nor been slow
        self._reads = True
        self._slow_until = self._per_message = 0
        self._last = 0  # when the message before this one arrives: nothing overtakes it

    def send(self, message: Any) -> None:
        if self.capacity is None or self._flying < max(1, self.capacity):
            self._transmit(message)
        else:
            self.outbox.append(message)
            self.most_waiting = max(self.most_waiting, len(self.outbox))

    def hold(self, until: int) -> None:
        """Nothing sent from now on arrives before `until`."""
        self._last = max(self._last, until)

    def stop_reading(self) -> None:
        """The reader stands still; what arrives waits for it."""
        self._prompt = self._reads = False

    def read_on(self) -> None:
        self._reads = True
        self._read()

    def slow_down(self, until: int, per_message: int) -> None:
        """Until then the reader takes that long for each message."""
        self._prompt = False
        self._slow_until, self._per_message = until, per_message

    @property
    def empty(self) -> bool:
        return not self._flying

    def _transmit(self, message: Any) -> None:
        self._flying += 1
        delay = self._chance.between(self._bounds)
        self._last = arrival = max(self._clock.now + delay, self._last)
        self._clock.at(arrival, self._deliver, message)

    def _deliver(self, message: Any) -> None:
        if self._prompt or (self._reads and not self._unread and self._slow_until <= self._clock.now):
            self._take(message)
        else:
            self._keep(message)

    def _keep(self, message: Any) -> None:
        self._unread.append(message)
        self.most_unread = max(self.most_unread, len(self._unread))
        if self._reads and len(self._unread) == 1:
            self._clock.after(self._per_message, self._read)

    def _read(self) -> None:
        """One message while the reader is slow, and all that waits once it is not."""
        while self._unread and self._reads:
            self._take(self._unread.popleft())
            if self._unread and self._slow_until > self._clock.now:
                self._clock.after(self._per_message, self._read)
                return

    def _take(self, message: Any) -> None:
        if self.capacity == 0:
            self._clock.after(self._bounds[0], self._complete)
        else:
            self._complete()
        self._receive(message)

    def _complete(self) -> None:
        self._flying -= 1
        if self.outbox:
            self._transmit(self.outbox.popleft())
