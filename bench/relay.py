"""Stands between a client and a server, and keeps a record of each request: a third witness beside the two.

`python -m bench.relay URL --records FILE` prints the URL that it serves itself. In: requests, which go on to URL as
their answers go back, piece by piece, each stamped when it has come. Out: at SIGTERM the records of the whole streamed
answers by their beginning, as `bench.records` writes them, with moments of this machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from bench.answer import StreamedAnswer
from bench.records import Record, read_records, write_records
from bench.sse import EventReader

PASSED = ("Authorization", "Content-Type")
GONE_WITHIN = 20.0


class Relay:
    def __init__(self, server: str, session: aiohttp.ClientSession) -> None:
        self._server, self._session = server, session
        self.records: list[Record] = []

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        began = time.monotonic()
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        pieces: list[tuple[float, bytes]] = []
        async with self._session.request(
            request.method, self._server + request.path_qs, data=body or None, headers=headers
        ) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")}
            )
            await response.prepare(request)
            while piece := await answer.content.readany():
                pieces.append((time.monotonic(), piece))
                await response.write(piece)
        await response.write_eof()
        if answer.content_type == "text/event-stream":
            self.records.append(self._record(began, pieces))
        return response

    def _record(self, began: float, pieces: list[tuple[float, bytes]]) -> Record:
        told, reader = StreamedAnswer(), EventReader()
        for at, piece in pieces:
            for data in reader.feed(piece):
                told.push(data, at)
        return Record(
            index=len(self.records), scheduled=began, sent=began, ended=time.monotonic(), chunks=tuple(told.chunks),
            prompt_tokens=told.prompt_tokens, output_tokens=told.tokens, asked_tokens=told.tokens,
            finish_reason=told.finish_reason, error="server_error" if told.error else "", reason=told.error,
        )  # fmt: skip


async def serve(server: str, file: Path) -> None:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        relay = Relay(server, session)
        site = web.Application(client_max_size=1 << 26)
        site.router.add_route("*", "/{any:.*}", relay.pass_on)
        runner = web.AppRunner(site, access_log=None, handler_cancellation=True)  # who is gone is not answered
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listening, shutdown_timeout=1.0).start()
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        await ended.wait()
        await runner.cleanup()
        write_records(file, sorted(relay.records, key=lambda record: record.scheduled))


@dataclass(slots=True)
class Watched:
    url: str
    records: list[Record] = field(default_factory=list)  # after the block


@contextmanager
def relayed(server: str) -> Iterator[Watched]:
    """A relay in a process of its own; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        file = Path(folder) / "records.jsonl"
        command = [sys.executable, "-m", "bench.relay", server, "--records", str(file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            watched = Watched(process.stdout.readline().strip())
            if not watched.url:
                raise SystemExit("the relay did not start")
            yield watched
        finally:
            process.terminate()
            try:
                process.wait(GONE_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        watched.records = read_records(file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.relay", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of the server")
    parser.add_argument("--records", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(serve(options.url.rstrip("/"), options.records))


if __name__ == "__main__":
    main()
