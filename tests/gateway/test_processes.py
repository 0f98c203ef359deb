"""The gateway as a process, and instances that stop answering without a word."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from tests.gateway.scripted_cluster import run, until
from tests.gateway.scripted_instances import decode_saying, prefill_saying, scripted_decode, scripted_prefill

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=PIPE, stderr=PIPE, env=ENVIRONMENT, cwd=ROOT
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


@asynccontextmanager
async def gateway_process(model: Path, prefill: str, decode: str, *options: str) -> AsyncIterator[tuple[Process, str]]:
    arguments = ["--model", str(model), "--model-name", "m", "--port", "0", "--prefill", prefill, "--decode", decode]
    async with process("gateway.app", *arguments, *options) as gateway:
        assert gateway.stderr is not None
        async for line in gateway.stderr:
            if found := re.search(rb"gateway ready on (http://[\d.:]+)", line):
                yield gateway, found[1].decode()
                return
        pytest.fail("the gateway ended before it was ready")


async def said(one: Process) -> str:
    assert one.stdout is not None
    return (await one.stdout.readline()).decode().strip()


async def answer_once_served(url: str) -> openai.types.Completion:
    """The answer to a request sent as soon as the gateway has seen the instances."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        while True:
            try:
                return await client.completions.create(model="m", prompt="x")
            except openai.InternalServerError as error:
                if "is serving" not in error.message:
                    raise
            await asyncio.sleep(0.02)


def test_it_starts_answers_and_ends_on_sigterm_after_what_is_in_flight(model_folder: Path) -> None:
    async def test() -> None:
        prefill, decode = scripted_prefill(prefill_saying(5)), scripted_decode(decode_saying([5] * 10, pause_s=0.05))
        async with (
            prefill.serving(),
            decode.serving(),
            gateway_process(model_folder, prefill.address, decode.address) as (gateway, url),
        ):
            last = asyncio.create_task(answer_once_served(url))
            await until(lambda: decode.running)
            gateway.send_signal(signal.SIGTERM)
            assert (await last).usage is not None, "in flight when the signal came"
            assert await gateway.wait() == 0

    run(test)


def test_a_registry_whose_port_is_taken_is_said_and_the_gateway_does_not_start(model_folder: Path) -> None:
    async def test() -> None:
        holder = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        taken = f"127.0.0.1:{holder.sockets[0].getsockname()[1]}"
        async with (
            holder,
            process("gateway.app", "--model", str(model_folder), "--port", "0", "--registry", taken) as one,
        ):
            _, said = await one.communicate()
            assert one.returncode == 2
            assert f"refused to start: cannot listen on {taken}" in said.decode()

    run(test)


def test_a_stopped_instance_is_noticed_and_used_again(model_folder: Path) -> None:
    async def test() -> None:
        pings = (
            "--keepalive-s",
            "1.0",
            "--keepalive-timeout-s",
            "1.0",
            "--describe-timeout-s",
            "0.5",
            "--resumes",
            "0",
        )
        async with (
            process("tests.gateway.frozen_instance", "prefill") as prefill,
            process("tests.gateway.frozen_instance", "decode") as decode,
            gateway_process(model_folder, await said(prefill), await said(decode), *pings) as (_, url),
        ):
            for side, frozen in (("prefill", prefill), ("decode", decode)):
                waiting = asyncio.create_task(answer_once_served(url))
                assert (await said(prefill), await said(decode)) == ("taken", "taken")
                frozen.send_signal(signal.SIGSTOP)
                began = time.monotonic()
                with pytest.raises(openai.InternalServerError) as caught:
                    await waiting
                assert caught.value.status_code == 503
                assert f"{side} side" in caught.value.message
                assert time.monotonic() - began < 8
                frozen.send_signal(signal.SIGCONT)

    run(test)
