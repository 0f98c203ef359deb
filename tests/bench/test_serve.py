"""`paceline bench serve` against a real socket: what is sent, what is kept, what fails and how."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.records import Record, read_records
from bench.run import RunError, make_plan, run
from bench.serve import keep
from bench.show import warnings
from bench.summary import summarise, whole_run
from paceline.cli import build_parser
from tests.bench.fake_server import FakeServer


def parsed(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "serve", *arguments])


def measured(server: FakeServer, arguments: Sequence[str], seed: int = 0) -> list[Record]:
    async def main() -> list[Record]:
        async with server.serving():
            options = parsed("--url", server.url, "--warmup", "0", *arguments)
            return (await run(options, server.url, seed)).records

    return asyncio.run(main())


def test_ttft_of_an_open_loop_holds_the_wait_behind_others() -> None:
    """Five requests within 40 ms, each of which takes the server 50 ms and more: the last one waits for four."""
    server = FakeServer(pause=0.05)
    records = measured(server, ["--rate", "100", "--arrival", "constant", "--requests", "5", "--output", "2"])
    assert [round(r.scheduled, 6) for r in records] == [0.0, 0.01, 0.02, 0.03, 0.04]
    for place, record in enumerate(sorted(records, key=lambda r: r.ended)):
        assert record.ok
        assert record.ttft is not None
        assert record.ttft >= 0.05 * (place + 1) - record.scheduled


def test_the_same_seed_sends_the_same_bodies_and_another_seed_others() -> None:
    arguments = ["--dataset", "prefix", "--input", "4:9", "--output", "1:3", "--requests", "6", "--concurrency", "1"]
    sent = []
    for seed in (1, 1, 2):
        server = FakeServer()
        measured(server, arguments, seed)
        sent.append(server.bodies)
    assert sent[0] == sent[1] != sent[2]
    assert [planned.due for planned in make_plan(parsed("--rate", "5"), 3)[0]] == [
        planned.due for planned in make_plan(parsed("--rate", "5"), 3)[0]
    ]


def test_a_server_with_keys_is_said_to_want_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    server = FakeServer()
    server.key = "a-key-0123456789"
    with pytest.raises(RunError, match=r"answered 401: .* give --api-key or set \$PACELINE_API_KEY"):
        measured(server, ["--requests", "1"])
    assert measured(server, ["--requests", "1", "--api-key", server.key])[0].ok


def test_token_ids_of_the_exact_length_are_sent_and_every_field_that_fixes_the_output() -> None:
    server = FakeServer()
    measured(server, ["--input", "33", "--output", "4", "--requests", "1", "--extra-body", '{"top_p": 0.5}'])
    (body,) = server.bodies
    assert len(body.pop("prompt")) == 33
    assert body == {
        "model": "fake", "stream": True, "temperature": 0, "max_tokens": 4, "min_tokens": 4, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "top_p": 0.5,
    }  # fmt: skip


def test_plain_requests_hold_only_openai_s_own_fields() -> None:
    server = FakeServer(usage=False)
    records = measured(server, ["--plain", "--endpoint", "chat", "--input", "5", "--output", "3", "--requests", "1"])
    (body,) = server.bodies
    assert len(body.pop("messages")[0]["content"].split()) == 5
    assert body == {
        "model": "fake", "stream": True, "temperature": 0, "max_completion_tokens": 3,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert (records[0].output_tokens, records[0].prompt_tokens) == (3, None)


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    server = FakeServer()
    measured(server, ["--requests", "1", "--output", "1"])
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_failures_have_kinds_and_leave_the_others_alone() -> None:
    server = FakeServer()
    server.failures = {1: "refuse", 2: "break"}
    records = measured(server, ["--requests", "4", "--concurrency", "1", "--output", "3"])
    assert [record.error for record in records] == ["", "http_503", "broken", ""]
    assert "no room" in records[1].reason
    assert records[2].output_tokens == 1
    summary = summarise(records, whole_run(records), {})
    assert summary.errors == {"broken": 1, "http_503": 1}
    assert any(
        "http_503, the first of 1" in line and "no room" in line for line in warnings(summary, records, False, 0, False)
    )


def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    server = FakeServer(pause=30.0)
    records = measured(server, ["--requests", "1", "--request-timeout", "0.05"])
    assert (records[0].error, records[0].chunks) == ("timeout", ())


def test_a_server_that_is_not_there_ends_the_run_with_its_address() -> None:
    with pytest.raises(RunError, match=r"no answer from http://127\.0\.0\.1:1"):
        asyncio.run(run(parsed(), "http://127.0.0.1:1", 0))


def test_prompts_of_a_file_are_sent_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "max_tokens": 2}\n\n{"text": "two"}\n')
    server = FakeServer()
    arguments = ["--dataset", "file", "--prompts", str(tmp_path / "p.jsonl"), "--output", "5", "--requests", "3"]
    measured(server, [*arguments, "--concurrency", "1"])
    assert [(body["prompt"], body["max_tokens"]) for body in server.bodies] == [("one", 2), ("two", 5), ("one", 2)]


def test_a_bad_line_of_prompts_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"question": "two"}\n')
    with pytest.raises(RunError, match="line 2 has no prompt"):
        measured(FakeServer(), ["--dataset", "file", "--prompts", str(tmp_path / "p.jsonl")])


def test_a_trace_is_replayed_with_its_shared_blocks_at_its_times(tmp_path: Path) -> None:
    rows = [(0, 600, [1, 2]), (20, 600, [1, 3]), (30, 5000, [*range(10)])]
    (tmp_path / "t.jsonl").write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": n, "output_length": 2, "hash_ids": ids}) + "\n"
            for at, n, ids in rows
        )
    )
    server = FakeServer()
    arguments = ["--dataset", "trace", "--trace", str(tmp_path / "t.jsonl"), "--time-scale", "2", "--max-input", "1000"]
    records = measured(server, arguments)
    assert [record.scheduled for record in records] == [0.0, 0.04]
    first, second = (body["prompt"] for body in server.bodies)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


def test_what_is_kept_says_the_same_as_what_is_shown(tmp_path: Path) -> None:
    async def main() -> None:
        server = FakeServer()
        async with server.serving():
            options = parsed(
                "--url", server.url, "--requests", "5", "--output", "3", "--json", str(tmp_path / "s.json"),
                "--records", str(tmp_path / "r.jsonl"), "--report", str(tmp_path / "page.html"), "--slo", "ttft:60000",
                "--api-key", "secret",
            )  # fmt: skip
            finished = await run(options, server.url, 0)
            keep(options, finished, summarise(finished.records, whole_run(finished.records), dict(options.slo)))

    asyncio.run(main())
    told = json.loads((tmp_path / "s.json").read_text())
    assert told["model"] == "fake"
    assert told["summary"]["completed"] == 5 == len(read_records(tmp_path / "r.jsonl"))
    assert told["summary"]["goodput"]["share"] == 1.0
    assert told["summary"]["latency_ms"]["itl"]["count"] == 10
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 4
    # One file: nothing is fetched, and no key is told.
    assert not any(word in page for word in ("<script", "<link", "<img", "@import", "src="))
    assert "secret" not in page + (tmp_path / "s.json").read_text()
