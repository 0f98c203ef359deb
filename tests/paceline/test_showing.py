"""What people see: progress, answers, and the doctor's findings."""

from __future__ import annotations

import asyncio
import io
import resource
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from paceline import doctor
from paceline.ask import AskError, ask, curl_command, parse_event
from paceline.child import describe_exit, last_lines
from paceline.health import describe_limit, describe_progress
from paceline.progress import Progress
from paceline_proto.v1 import bootstrap_pb2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_output_gets_a_line_for_what_is_new_only() -> None:
    out = io.StringIO()
    progress = Progress(["prefill-0", "gateway"], out)
    for text in ("starting", "loading 1 %", "loading 2 %", "loading 26 %", "loading 27 %", "serving"):
        progress.show("prefill-0", text)
    progress.show("gateway", "serving")
    assert out.getvalue().splitlines() == [
        "prefill-0  starting", "prefill-0  loading 1 %", "prefill-0  loading 26 %", "prefill-0  serving",
        "gateway    serving",
    ]  # fmt: skip


def test_a_terminal_gets_one_line_per_part_rewritten_in_place() -> None:
    out = Terminal()
    progress = Progress(["prefill-0", "gateway"], out)
    progress.show("prefill-0", "starting")
    progress.show("prefill-0", "loading 50 %")
    progress.say("something that stays")
    redraw = "\x1b[2A\x1b[J"
    assert out.getvalue() == (
        "prefill-0  starting\ngateway    waiting\n"
        f"{redraw}prefill-0  loading 50 %\ngateway    waiting\n"
        f"{redraw}something that stays\nprefill-0  loading 50 %\ngateway    waiting\n"
    )


def test_progress_of_an_instance_in_words() -> None:
    ranks = [bootstrap_pb2.RankDescription(rank=r, layer_begin=19 * r, layer_end=19 + 11 * r) for r in (0, 1)]
    ranks[0].loaded, ranks[1].loaded = 100, 50
    loading = bootstrap_pb2.DescribeResponse(ranks=ranks, not_serving_reason="loads")
    assert describe_progress(loading) == "loading 75 %"
    serving = bootstrap_pb2.DescribeResponse(ranks=ranks, serving=True, pages=64, page_size=16)
    assert describe_progress(serving) == "serving (layers 0–18, 19–29; 64 pages of 16)"
    assert describe_progress(bootstrap_pb2.DescribeResponse(not_serving_reason="drains")) == "drains"
    assert describe_progress(bootstrap_pb2.DescribeResponse()) == "starting"


def test_a_pool_smaller_than_the_context_is_said() -> None:
    told = bootstrap_pb2.DescribeResponse(serving=True, pages=4, page_size=16, max_model_len=512)
    assert describe_limit(told) == (
        "prompt plus output are limited to 64 tokens: that is what the KV pool holds (4 pages of 16); raise --pages "
        "or --kv-memory for the whole context of 512"
    )
    told.pages = 32
    assert describe_limit(told) == ""
    told.pages, told.serving = 4, False  # not known yet
    assert describe_limit(told) == ""


def test_exits_in_words() -> None:
    assert [describe_exit(code) for code in (0, 3, -9, -199)] == [
        "exited with 0", "exited with 3", "was killed by SIGKILL", "was killed by signal 199",
    ]  # fmt: skip


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"{n}\n" for n in range(9999)))
    assert last_lines(log, 2) == ["9997", "9998"]
    assert last_lines(tmp_path / "none") == []
    with log.open("a") as file:
        file.write("--- 2026-01-02 03:04:05 python -m much\nnew\n--- a line of its own\n")
    assert last_lines(log) == ["new", "--- a line of its own"]


def test_the_curl_to_try_survives_a_shell() -> None:
    words = shlex.split(curl_command("http://127.0.0.1:8000", "it's tiny"))
    assert words[:3] == ["curl", "-sN", "http://127.0.0.1:8000/v1/chat/completions"]
    assert '"model": "it\'s tiny"' in words[-1]


def test_events_are_parsed() -> None:
    assert parse_event(b'data: {"a": 1}\n') == {"a": 1}
    assert [parse_event(line) for line in (b"\n", b": comment\n", b"data: [DONE]\n")] == [None] * 3


async def asked(reply: Any, tokenize: Any = None) -> str:
    """What `ask` prints when a gateway replies so."""
    application = web.Application()
    if tokenize is not None:
        application.router.add_post("/tokenize", tokenize)
    application.router.add_post("/v1/chat/completions", reply)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    out = io.StringIO()
    try:
        await ask(f"http://127.0.0.1:{runner.addresses[0][1]}", "tiny", "Hello?", out, timeout=10)
    finally:
        await runner.cleanup()
    return out.getvalue()


def test_an_answer_is_printed_as_it_comes() -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["messages"] == [{"role": "user", "content": "Hello?"}]
        response = web.StreamResponse()
        await response.prepare(request)
        for event in (
            '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
            '{"choices": [{"delta": {"content": "Good "}}]}',
            '{"choices": [{"delta": {"content": "day"}, "finish_reason": "stop"}]}',
            '{"choices": [], "usage": {"completion_tokens": 2}}',
            "[DONE]",
        ):
            await response.write(f"data: {event}\n\n".encode())
        return response

    text = asyncio.run(asked(reply))
    assert text.startswith("Good day\n(2 tokens in ")
    assert text.endswith("ended by stop)\n")


@pytest.mark.parametrize(("context", "wanted"), [(64, 24), (8192, 128), (40, 128)])
def test_a_question_asks_for_no_more_than_fits(context: int, wanted: int) -> None:
    async def tokenize(request: web.Request) -> web.Response:
        assert (await request.json())["messages"] == [{"role": "user", "content": "Hello?"}]
        return web.json_response({"count": 40, "max_model_len": context, "tokens": []})

    async def reply(request: web.Request) -> web.Response:
        assert (await request.json())["max_tokens"] == wanted
        return web.Response(text='data: {"choices": [{"delta": {"content": "Yes"}, "finish_reason": "stop"}]}\n\n')

    assert asyncio.run(asked(reply, tokenize)).startswith("Yes\n")


def test_no_answer_is_an_error_that_says_why() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=503, text="no prefill instance")

    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"content": "Go"}}]}\n\n')
        return response

    async def fail(request: web.Request) -> web.Response:
        return web.Response(text='data: {"error": {"message": "rank 1 died"}}\n\n')

    for reply, message in ((refuse, "503: no prefill instance"), (break_off, "broke off"), (fail, "rank 1 died")):
        with pytest.raises(AskError, match=message):
            asyncio.run(asked(reply))


def test_the_doctor_says_what_to_do(tmp_path: Path) -> None:
    def crash(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ImportError: libnuma.so.1\n")

    found = doctor.library("mooncake", "import mooncake", "install it", crash)
    assert str(found) == "fail  mooncake         ImportError: libnuma.so.1\n      → install it"
    assert doctor.rdma(tmp_path / "none").level == doctor.WARN
    (tmp_path / "mlx5_0").mkdir()
    assert doctor.rdma(tmp_path) == doctor.Check(doctor.OK, "rdma devices", "mlx5_0")
    assert doctor.memlock(resource.RLIM_INFINITY).level == doctor.OK
    assert doctor.memlock(8 << 20).level == doctor.WARN
    assert doctor.distribution("no-such-distribution").level == doctor.FAIL
    assert doctor.shared_memory(tmp_path / "nowhere").level == doctor.FAIL
