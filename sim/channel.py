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
        self._flying = 0
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

    @property
    def empty(self) -> bool:
        return not self._flying

    def _transmit(self, message: Any) -> None:
        self._flying += 1
        arrival = self._clock.now + self._chance.between(self._bounds)
        self._last = arrival = arrival if arrival > self._last else self._last
        self._clock.at(arrival, self._deliver, message)

    def _deliver(self, message: Any) -> None:
        if self.capacity == 0:
            self._clock.after(self._bounds[0], self._complete)
        else:
            self._complete()
        self._receive(message)

    def _complete(self) -> None:
        self._flying -= 1
        if self.outbox:
            self._transmit(self.outbox.popleft())
