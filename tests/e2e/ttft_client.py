"""A streaming client that measures its own time to first token: one kept connection, nothing between it and the socket."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Streamed:
    first_token_s: float  # from the first byte sent to the first event's arrival
    parts: dict[str, float]  # seconds, as the response's Server-Timing says; without the delivery


class TtftClient:
    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._connection.connect()

    def stream(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Streamed:
        data = json.dumps(body | {"stream": True, "return_token_ids": True}).encode()
        began = time.monotonic()
        self._connection.request(
            "POST", "/v1/completions", data, {"Content-Type": "application/json", **(headers or {})}
        )
        response = self._connection.getresponse()
        line = response.readline()
        took = time.monotonic() - began
        assert response.status == 200 and line.startswith(b"data: {"), (response.status, line)
        assert response.read().endswith(b"data: [DONE]\n\n")
        return Streamed(took, parse_server_timing(response.headers["Server-Timing"]))

    def close(self) -> None:
        self._connection.close()


def parse_server_timing(header: str) -> dict[str, float]:
    parts: dict[str, float] = {}
    for part in header.split(", "):
        name, _, milliseconds = part.partition(";dur=")
        parts[name] = parts.get(name, 0.0) + float(milliseconds) / 1000
    return parts
