"""`/metrics` of a real daemon with scripted ranks: bounded, patient, and never a load on the ranks."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.daemon_harness import Daemon, eventually, request
from tests.pipeline.scripted_rank import ECHO, SUICIDE


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    daemons: list[Daemon] = []

    def starter(**settings: Any) -> Daemon:
        daemons.append(Daemon(tmp_path, **({"metrics": "127.0.0.1:0"} | settings)))
        return daemons[-1]

    yield starter
    for daemon in daemons:
        daemon.close()


def url_of(daemon: Daemon) -> str:
    return eventually("where its metrics are", lambda: re.findall(r"metrics at (\S+)", daemon.log))[0]


def scrape(daemon: Daemon) -> str:
    with urllib.request.urlopen(url_of(daemon), timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text: str = answer.read().decode()
    return text


def test_many_scrapes_at_once_ask_each_rank_once(start: Callable[..., Daemon]) -> None:
    daemon = start().when_serving()
    list(daemon.generate(request([ECHO, 5, 6])))
    with ThreadPoolExecutor(20) as pool:
        texts = list(pool.map(lambda _: scrape(daemon), range(20)))
    assert "AskStatus(token=1)" in daemon.heard(1)
    # One question in the second that the first answer is fresh, another if the 20 took longer than that.
    assert daemon.heard(1).count("AskStatus") <= 2
    for line in (
        'paceline_rank_up{rank="1"} 1.0',
        'paceline_rank_generation_tokens_total{rank="0"} 12.0',
        'paceline_rank_kv_pages{rank="0",state="free"} 100.0',
        'paceline_rank_queue_length{queue="waiting",rank="1"} 3.0',
        'paceline_instance_attempts_total{outcome="length"} 1.0',
        "paceline_instance_serving 1.0",
    ):
        assert all(line in text for text in texts), line
    # Nothing else is served.
    base = url_of(daemon).removesuffix("/metrics")
    for path, data in (("/", None), ("/metrics/x", None), ("/metrics", b"x" * 4096)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(base + path, data), timeout=30)
        assert refused.value.code in (404, 405)


def test_a_rank_that_does_not_answer_is_shown_as_such(start: Callable[..., Daemon]) -> None:
    daemon = start(ranks={1: {"mute_status": True}}).when_serving()
    text = scrape(daemon)
    assert 'paceline_rank_up{rank="0"} 1.0' in text and 'paceline_rank_up{rank="1"} 0.0' in text


def test_a_restart_is_counted_and_loading_is_no_error(start: Callable[..., Daemon]) -> None:
    daemon = start().when_serving()
    list(daemon.generate(request([SUICIDE])))
    (daemon.model / "hold").touch()
    text = eventually("a scrape of the second epoch", lambda: _with(scrape(daemon), "paceline_instance_epoch 2.0"))
    assert "paceline_instance_serving 0.0" in text and "paceline_instance_restarts_total 1.0" in text
    assert "paceline_instance_divergences_total 1.0" in text, "the scripted rank says that it diverged"
    assert 'paceline_instance_attempts_total{outcome="error"} 1.0' in text


def _with(text: str, line: str) -> str:
    return text if line in text else ""


def test_a_port_in_use_is_said_at_start(start: Callable[..., Daemon]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        daemon = start(metrics=address)
        assert daemon.wait() == 2
    assert f"cannot serve metrics on {address}" in daemon.log
