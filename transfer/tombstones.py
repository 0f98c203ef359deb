"""A bounded memory of what is over, or came too early.

In: keys with a value. Out: the value, until `limit` younger keys pushed it out.
Insertion order decides, so the same calls always forget the same keys.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: dict[str, T] = {}
        self.forgotten = 0

    def put(self, key: str, value: T) -> None:
        self._items.pop(key, None)
        self._items[key] = value
        if len(self._items) > self._limit:
            del self._items[next(iter(self._items))]
            self.forgotten += 1

    def get(self, key: str) -> T | None:
        return self._items.get(key)

    def pop(self, key: str) -> T | None:
        return self._items.pop(key, None)

    def items(self) -> list[tuple[str, T]]:
        return list(self._items.items())

    def values(self) -> list[T]:
        return list(self._items.values())

    def __len__(self) -> int:
        return len(self._items)
