"""API keys: who may ask, how much, and what everyone else is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.api_keys import KeyRing
from gateway.key_file import KeysError, read_keys
from gateway.key_limits import KeyLimits, KeyUse
from tests.gateway.scripted_cluster import cluster, run, until
from tests.gateway.scripted_instances import decode_saying, prefill_saying, tells_then_hangs, tokens

FIRST, SECOND = "first-key-0123456789", "second-key-0123456789"
HELLO: Any = [{"role": "user", "content": "hello"}]
EOS = 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who may ask\n{FIRST} alice\n\n{SECOND}  # no name\n")
    return path


def test_the_file_holds_keys_names_and_comments(file: Path) -> None:
    assert [(key.name, key.secret) for key in read_keys(file)] == [("alice", FIRST), ("line 4", SECOND)]
    assert FIRST not in repr(read_keys(file))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "holds no key"), (b"# nothing\n", "holds no key"), (b"short-secret\n", "line 1"), (b"\xff\xfe", "cannot be read"),
     ("ключ-который-длинный".encode(), "line 1"), (b"k" * (5 << 20), "larger")],
)  # fmt: skip
def test_a_file_that_cannot_be_meant_is_refused_without_telling_it(content: bytes, complaint: str, tmp_path: Path) -> None:  # fmt: skip
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(KeysError, match=complaint) as refused:
        read_keys(path)
    assert "short-secret" not in str(refused.value)


def test_keys_are_read_again_and_a_bad_file_changes_nothing(file: Path) -> None:
    ring = KeyRing(file, KeyLimits())
    kept = ring.use_of(f"Bearer {FIRST}")
    file.write_text(FIRST)
    ring.reload()
    assert ring.use_of(f"Bearer {FIRST}") is kept and ring.use_of(f"Bearer {SECOND}") is None
    file.write_text("")
    ring.reload()
    assert ring.use_of(f"Bearer {FIRST}") is kept


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer ", f"Basic {FIRST}", FIRST, f"Bearer {FIRST}x", "Bearer \udcff"]
)
def test_what_is_no_key(sent: str, file: Path) -> None:
    assert KeyRing(file, KeyLimits()).use_of(sent) is None


def test_a_key_gets_its_rate_and_no_more() -> None:
    use, limits = KeyUse(), KeyLimits(requests_per_s=2.0)
    waits = [use.begin(10.0, limits) for _ in range(3)]
    assert waits == [None, None, 0.5]
    assert use.begin(10.4, limits) == pytest.approx(0.1)
    assert use.begin(10.5, limits) is None
    slow = KeyUse()
    assert [slow.begin(t, KeyLimits(requests_per_s=0.1)) for t in (0.0, 1.0, 10.0)] == [None, pytest.approx(9.0), None]


def test_a_key_runs_no_more_at_once_than_it_may() -> None:
    use, limits = KeyUse(), KeyLimits(inflight=2)
    assert [use.begin(0.0, limits) for _ in range(3)] == [None, None, 1.0]
    use.end()
    assert use.begin(0.0, limits) is None


def test_only_holders_of_a_key_are_served(model_folder: Path, file: Path) -> None:
    async def test() -> None:
        async with cluster(model_folder, prefill_saying(5), decode_saying([5, 6, EOS]), api_keys=str(file)) as c:
            with pytest.raises(openai.AuthenticationError) as refused:
                await c.client.chat.completions.create(model="m", messages=HELLO)
            assert refused.value.code == "invalid_api_key"
            known = c.client.with_options(api_key=FIRST)
            assert (await known.chat.completions.create(model="m", messages=HELLO)).choices
            assert len(c.prefill.asked) == 1
            async with aiohttp.ClientSession() as session:
                codes = {}
                for path in ("/health", "/metrics", "/v1/models", "/tokenize", "/nothing"):
                    async with session.get(c.url + path) as answer:
                        codes[path] = answer.status
                assert codes == {"/health": 200, "/metrics": 200, "/v1/models": 401, "/tokenize": 401, "/nothing": 401}
                async with session.get(f"{c.url}/v1/models") as answer:
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    error = (await answer.json())["error"]
                    assert set(error) == {"message", "type", "param", "code"}
                    assert error["message"].startswith("no API key given: send")
            assert "no such API key" in refused.value.message

    run(test)


def test_a_key_that_asks_for_too_much_waits_and_others_do_not(model_folder: Path, file: Path) -> None:
    async def test() -> None:
        settings = {"api_keys": str(file), "key_inflight": 1}
        async with cluster(model_folder, prefill_saying(5), tells_then_hangs(tokens(1, 5)), **settings) as c:
            alice, other = c.client.with_options(api_key=FIRST), c.client.with_options(api_key=SECOND)
            stream = await alice.chat.completions.create(model="m", messages=HELLO, stream=True)
            with pytest.raises(openai.RateLimitError) as limited:
                await alice.models.list()
            assert (limited.value.code, limited.value.response.headers["Retry-After"]) == ("rate_limit_exceeded", "1")
            assert (await other.models.list()).data
            await stream.close()
            await until(lambda: not c.server.gateway.in_flight)
            assert (await alice.models.list()).data

    run(test)
