"""What benchmark clients send, field by field, must be taken and answered as they read it.

The bodies are those that aiperf, guidellm, evalscope, SGLang's and vLLM's benchmarks were seen to
send; the clients themselves are not run here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.smollm2 import ensure_default_model
from tests.gateway.scripted_cluster import cluster, run
from tests.gateway.scripted_instances import Kind, decode_saying, prefill_saying

PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
PLAIN = [{"role": "user", "content": "hello"}]
COUNT = 8

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "aiperf": (
        "chat/completions",
        {"messages": PLAIN, "max_completion_tokens": COUNT, "ignore_eos": True, "min_tokens": COUNT,
         "stream_options": {"include_usage": True}},
    ),
    "guidellm": (
        "chat/completions",
        {"messages": PARTS, "max_completion_tokens": COUNT, "max_tokens": COUNT, "ignore_eos": True, "stop": None,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "evalscope": (
        "chat/completions",
        {"messages": PLAIN, "max_tokens": COUNT, "min_tokens": COUNT, "ignore_eos": True,
         "stream_options": {"include_usage": True}},
    ),
    "sglang chat": (
        "chat/completions",
        {"messages": PLAIN, "temperature": 0.0, "max_completion_tokens": COUNT, "ignore_eos": True},
    ),
    "sglang completions": (
        "completions",
        {"prompt": [1, 2, 3], "temperature": 0.0, "best_of": 1, "max_tokens": COUNT, "ignore_eos": True},
    ),
    "vllm chat": (
        "chat/completions",
        {"messages": PARTS, "temperature": 0.0, "max_completion_tokens": COUNT, "ignore_eos": True,
         "stream_options": {"include_usage": True}},
    ),
    "vllm completions": (
        "completions",
        {"prompt": "hello", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": COUNT, "logprobs": None,
         "ignore_eos": True, "stream_options": {"include_usage": True}},
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return ensure_default_model()


@pytest.mark.clients
def test_all_are_taken(model_folder: Path) -> None:
    async def test() -> None:
        says = decode_saying([2751] * COUNT, Kind.KIND_LENGTH)
        async with cluster(model_folder, prefill_saying(2751), says) as c, aiohttp.ClientSession(c.url) as http:
            for name, (endpoint, body) in BODIES.items():
                sent = {"model": "m", "stream": True} | body
                async with http.post(f"/v1/{endpoint}", json=sent) as answer:
                    raw = (await answer.read()).decode()
                assert answer.status == 200, f"{name}: {raw}"
                *events, done, nothing = raw.split("\n\n")
                assert (done, nothing) == ("data: [DONE]", ""), name
                chunks = [json.loads(event.removeprefix("data: ")) for event in events]
                usage = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
                wants_usage = "stream_options" in body
                assert [one["completion_tokens"] for one in usage] == [COUNT] * wants_usage, name
                reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
                assert reasons[-1] == "length", name
                assert set(reasons[:-1]) <= {None}, name
                assert c.decode.asked[-1].sampling.max_tokens == COUNT
                assert c.decode.asked[-1].sampling.ignore_eos

    run(test)
