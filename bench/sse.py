"""Server-sent events out of bytes that may be cut anywhere. Pure.

In: what was read from the socket, piece by piece. Out: the data of each event that is complete. An event longer
than `LONGEST` raises `ValueError`: a server that never ends a line must not fill the memory.
"""

from __future__ import annotations

LONGEST = 16 << 20


class EventReader:
    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        if len(self._rest) + sum(map(len, self._data)) > LONGEST:
            raise ValueError(f"an event is longer than {LONGEST} bytes")
        return events
