"""G1: ten long prompts cancelled before their first token cost the next request no more than what was launched.

Of that, ranks skip what they have not begun (`tests/pipeline/test_core.py`, `test_skipped_ticks.py`)."""

from __future__ import annotations

import http.client
import json
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from paceline_proto.v1 import admin_pb2
from tests.e2e.cluster import Cluster
from tests.e2e.load import addresses, told, until
from tests.e2e.prompts import prompts, reference
from tests.e2e.test_resume import TOKENS, metric, stream

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
CHUNK, SLOTS, SHORT = 32, 3, 3  # slots: two ranks and one more


def ask(cluster: Cluster, prompt: list[int]) -> http.client.HTTPConnection:
    """Sends a request and reads nothing."""
    place = urlsplit(cluster.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def test_G1_ten_cancelled_long_prompts_leave_only_what_was_launched(tiny: Path) -> None:
    asked, wanted = prompts(tiny), reference(tiny, TOKENS)
    with Cluster("--chunk-size", str(CHUNK), "--ring-timeout", "60", model=tiny, decode_pp=1) as cluster:
        prefill = addresses(cluster, "prefill")["prefill-0"]
        assert stream(cluster, asked[SHORT]) == wanted[SHORT]

        def state() -> admin_pb2.StatusResponse:
            found = told(prefill)
            assert found is not None
            return found

        def slots_taken(status: admin_pb2.StatusResponse) -> admin_pb2.StatusResponse | None:
            return status if status.ranks[0].queues["ticks_in_flight"] == SLOTS else None

        def computed(status: admin_pb2.StatusResponse) -> int:
            return status.ranks[0].counters["prompt_tokens_computed"]

        before, attempts = state(), metric(cluster, "attempts_total")
        # Given ten prompts of 3 000 tokens, the first of them in every slot, and a rank that gives none of these back,
        clients = [ask(cluster, asked[-1])]
        until("the first is being computed", lambda: computed(state()) > computed(before))
        os.kill(before.ranks[1].pid, signal.SIGSTOP)
        try:  # from here on each question to the instance takes as long as a silent rank is waited for
            clients += [ask(cluster, asked[-1][i:]) for i in range(1, 10)]
            until("all ten are under way", lambda: metric(cluster, "attempts_total") == attempts + 10)
            frozen = until("every slot is taken", lambda: slots_taken(state()))
            # when all are cancelled,
            clients.pop(0).close()
            until("the gateway cancels it", lambda: metric(cluster, "requests_in_flight") == 9)
            for client in clients:
                client.close()
            # those that hold no slot are gone, unless the log's window is full and their ends wait,
            until("rank 0 knows", lambda: (now := state()).open_attempts - now.ranks[0].queues["log_aborts"] <= 1)
        finally:
            os.kill(before.ranks[1].pid, signal.SIGCONT)
        # then nothing of them is launched any more, and the next request is served.
        assert stream(cluster, asked[SHORT]) == wanted[SHORT]
        after = state()
        assert computed(after) - computed(frozen) == len(asked[SHORT]), "no chunk was launched after the cancel"
        cluster.assert_baseline()
