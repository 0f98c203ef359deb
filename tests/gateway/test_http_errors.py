"""Whatever is wrong with a request, the answer has OpenAI's error shape and the client's X-Request-Id."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import aiohttp

from tests.gateway.scripted_cluster import cluster, run
from tests.gateway.scripted_instances import decode_saying, hang, prefill_saying

GZIP = {"Content-Encoding": "gzip"}
BODY = json.dumps({"prompt": "x"}).encode()

# method, path, body, headers → status, code, and what the message says
WRONG: list[tuple[str, str, bytes, dict[str, str], int, str | None, str]] = [
    ("GET", "/v1/nothing", b"", {}, 404, "not_found", "/v1/nothing"),
    ("GET", "/v1/models/other", b"", {}, 404, "model_not_found", "other"),
    ("POST", "/v1/completions", b'{"prompt": "x", "model": "other"}', {}, 404, "model_not_found", "other"),
    ("GET", "/v1/completions", b"", {}, 405, "method_not_allowed", "does not take GET"),
    ("DELETE", "/v1/models/m", b"", {}, 405, "method_not_allowed", "does not take DELETE"),
    ("POST", "/v1/chat/completions", b'"' + b"x" * 3000, {}, 413, "request_too_large", "2000 bytes"),
    ("POST", "/v1/completions", gzip.compress(b" " * 3000), GZIP, 413, "request_too_large", "2000 bytes"),
    ("POST", "/v1/completions", BODY, GZIP, 400, "unreadable_body", "gzip"),
    ("POST", "/v1/completions", b"", {}, 400, None, "not valid JSON"),
    ("POST", "/v1/completions", b'{"prompt": "x", "n": "two"}', {}, 400, None, "int"),
    ("POST", "/tokenize", b"{}", {}, 400, None, "either prompt or messages"),
    ("POST", "/detokenize", b'{"tokens": ["a"]}', {}, 400, None, "int"),
]


def test_errors_have_openais_shape_and_the_clients_id(model_folder: Path) -> None:
    async def test() -> None:
        async with (
            cluster(model_folder, hang, hang, max_body_bytes=2000) as c,
            aiohttp.ClientSession(c.url) as http,
        ):
            for at, (method, path, body, headers, status, code, says) in enumerate(WRONG):
                mine = {"X-Request-Id": f"mine-{at}", "Content-Type": "application/json"} | headers
                async with http.request(method, path, data=body, headers=mine) as answer:
                    error: dict[str, Any] = (await answer.json())["error"]
                    where = f"{method} {path}: {error}"
                    assert (answer.status, error["code"]) == (status, code), where
                    assert set(error) == {"message", "type", "param", "code"}, where
                    assert error["type"] == "invalid_request_error" and says in error["message"], where
                    assert answer.headers["X-Request-Id"] == f"mine-{at}", where
                    assert ("Allow" in answer.headers) == (status == 405), where
            assert c.prefill.asked == []

    run(test)


def test_what_clients_send_is_read_whatever_its_wrapping(model_folder: Path) -> None:
    async def test() -> None:
        async with (
            cluster(model_folder, prefill_saying(1000), decode_saying([1000, 2])) as c,
            aiohttp.ClientSession(c.url) as http,
        ):
            for data, headers in (
                (gzip.compress(BODY), GZIP),
                (BODY, {"Content-Type": "application/x-www-form-urlencoded"}),  # what curl says by itself
                (json.dumps({"prompt": "x", "user": "me", "metadata": {"a": "b"}}).encode(), {}),
            ):
                async with http.post("/v1/completions", data=data, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
            for bad in ("", "x" * 257, "a\tb"):  # not echoed: the gateway's own instead
                async with http.get("/v1/models", headers={"X-Request-Id": bad}) as answer:
                    assert len(answer.headers["X-Request-Id"]) == 32
            for path in ("/metrics", "/health", "/v1/models", "/v1/models/m"):
                async with http.head(path) as answer:
                    assert (answer.status, await answer.read()) == (200, b""), path
            async with http.post("/tokenize", json={"prompt": "x " * 40_000}) as answer:
                long = (await answer.json())["tokens"]
            async with http.post("/detokenize", json={"tokens": long}) as answer:
                assert (await answer.json())["prompt"] == "x " * 40_000

    run(test)
