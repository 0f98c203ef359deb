"""The gateway draws a token for each attempt and tells it to its two instances alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.attempt import ROOM_TOKEN_BYTES
from tests.gateway.scripted_cluster import cluster, run
from tests.gateway.scripted_instances import decode_saying, prefill_saying

HELLO: Any = [{"role": "user", "content": "hello"}]


def test_both_sides_get_the_attempts_token_and_no_log_does(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        with caplog.at_level(logging.DEBUG):
            async with cluster(model_folder, prefill_saying(5), decode_saying([5, 2])) as c:
                for _ in range(2):
                    await c.client.chat.completions.create(model="m", messages=HELLO)
                told = [asked.room_token for asked in c.prefill.asked]
                assert told == [asked.room_token for asked in c.decode.asked]
                assert [len(token) for token in told] == [ROOM_TOKEN_BYTES] * 2 and told[0] != told[1]
                assert not any(token.hex() in caplog.text or repr(token) in caplog.text for token in told)

    run(test)
