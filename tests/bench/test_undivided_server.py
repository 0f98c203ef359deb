"""The undivided engine behind a real gateway: the tokens of transformers' generate, and nothing left of who hangs up."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch

from bench.scripted_gateway import free_port, wait_until_healthy
from bench.undivided_engine import UndividedEngine
from bench.undivided_server import PAGE_SIZE, Undivided, serving
from engine.facts import read_facts
from engine.sampler import sample
from engine.smollm2 import ensure_default_model
from engine.stage import Stage
from tests.engine.tiny_models import NEW_TOKENS, greedy, save_tiny

VOCAB = 49152  # the default model's
MODEL = "SmolLM2-135M-Instruct"
PAGES, CONTEXT = 512, 8192
PROMPTS = [[(17 * length + 29 * place) % VOCAB for place in range(length)] for length in (5, 90, 33)]


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[tuple[str, Undivided]]:
    """The engine is in this process, the gateway in its own, with a tokenizer of as many ids as the model has."""
    facts = read_facts(str(folder), "", 1)
    stage = Stage.load(folder, range(facts.num_layers), PAGES, PAGE_SIZE)
    engine = UndividedEngine(stage, sample, chunk_size=16)
    shared = Undivided(engine, facts, MODEL, PAGES)
    async with serving(shared) as (prefill, decode):
        port = free_port()
        command = ["paceline.cli", "gateway", "--prefill", prefill, "--decode", decode, "--port", str(port)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, "--model", str(ensure_default_model())
        )
        url = f"http://127.0.0.1:{port}"
        try:
            await asyncio.to_thread(wait_until_healthy, url, lambda: process.returncode is None)
            yield url, shared
        finally:
            process.terminate()
            await process.wait()


async def ids_of(client: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> AsyncGenerator[int, None]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True,
            "temperature": 0, "stream": True, "return_token_ids": True}  # fmt: skip
    async with client.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    for token in choice.get("token_ids") or ():
                        yield token


@pytest.mark.e2e
def test_tokens_are_those_of_transformers_and_a_client_that_hangs_up_frees_its_pages(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save_tiny("llama", tmp_path, {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT})

    async def main() -> None:
        async with gateway(tmp_path) as (url, shared), aiohttp.ClientSession() as client:

            async def answer(prompt: list[int], tokens: int) -> list[int]:
                return [token async for token in ids_of(client, url, prompt, tokens)]

            found = await asyncio.gather(*(answer(prompt, NEW_TOKENS) for prompt in PROMPTS))
            assert found == [greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]

            leaving = ids_of(client, url, [1], CONTEXT - 1)  # the whole pool, for longer than this test may take
            await anext(leaving)
            next_one = asyncio.create_task(answer(PROMPTS[0], 2))  # waits for pages
            await leaving.aclose()
            async with asyncio.timeout(30):
                assert await next_one == found[0][:2]
            assert shared.free_pages == PAGES
            assert not shared.attempts

    asyncio.run(main())
