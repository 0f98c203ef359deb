"""Against a real gateway with the default model's tokenizer, all in processes of their own."""

from __future__ import annotations

import argparse
import asyncio
import json
import urllib.request
from collections.abc import Iterator

import pytest

from bench.records import Record
from bench.run import run
from bench.scripted_gateway import ScriptedGateway, scripted_gateway
from engine.smollm2 import ensure_default_model
from paceline.cli import build_parser

pytestmark = pytest.mark.e2e
FOLDER = str(ensure_default_model())


@pytest.fixture(scope="module")
def gateway() -> Iterator[ScriptedGateway]:
    with scripted_gateway(0.0, 1, ["--model", FOLDER]) as running:
        yield running


def asked(gateway: ScriptedGateway, *arguments: str) -> list[Record]:
    options: argparse.Namespace = build_parser().parse_args(
        ["bench", "serve", "--warmup", "0", "--requests", "5", "--output", "7", "--url", gateway.url, *arguments]
    )
    return asyncio.run(run(options, gateway.url, 3)).records


def template_tokens(gateway: ScriptedGateway) -> int:
    """Of the chat template around one message, by a message of three tokens."""
    body = json.dumps({"messages": [{"role": "user", "content": "the of and"}]}).encode()
    request = urllib.request.Request(f"{gateway.url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        count: int = json.load(answer)["count"]
    return count - 3


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompt-as", "text"],
        ["--prompt-as", "text", "--tokenizer", FOLDER],
        ["--endpoint", "chat"],
        ["--endpoint", "chat", "--tokenizer", FOLDER],
        ["--endpoint", "chat", "--plain"],
    ],
)
def test_prompts_and_answers_are_exactly_as_long_as_asked(gateway: ScriptedGateway, arguments: list[str]) -> None:
    records = asked(gateway, "--input", "123", *arguments)
    expected = 123 + (template_tokens(gateway) if "chat" in arguments else 0)
    for record in records:
        assert (record.error, record.prompt_tokens, record.output_tokens) == ("", expected, 7)
        assert len(record.gaps) == 6 or "--plain" in arguments  # without usage in every event, events are counted
