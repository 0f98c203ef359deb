"""A4, A6, A8, D4, D5, T11 with real processes: full pools, unlike ranks, deadlines, impossible requests."""

from __future__ import annotations

import json
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from paceline_proto.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.cluster import Cluster
from tests.e2e.prompts import prompts, reference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def ending(cluster: Cluster, prompt: list[int], tokens: int) -> str:
    """ "done" or the message of the one error."""
    try:
        return "done" if len(cluster.generate(prompt, tokens)) == tokens else "short"
    except urllib.error.HTTPError as error:
        return str(json.load(error)["error"]["message"])


def test_A4_A8_deadlines_in_every_queue_are_clean_errors_and_the_instance_recovers(tiny: Path) -> None:
    asked, wanted = prompts(tiny), reference(tiny, 64)
    # One request fills the pool for longer than the others' time.
    options = ("--pages", "128", "--max-model-len", "2048", "--request-timeout", "4")
    with Cluster(*options, model=tiny) as cluster, ThreadPoolExecutor(6) as pool:
        endings = list(pool.map(lambda _: ending(cluster, asked[4], 1990), range(6)))
        assert "done" not in endings and all("timed out while" in message for message in endings), endings
        cluster.assert_baseline()
        assert cluster.generate(asked[4], 64) == wanted[4]
        assert [instance["restarts"] for instance in cluster.status()["instances"]] == [0, 0]


def test_A6_capacity_is_the_minimum_over_unlike_ranks(tiny: Path) -> None:
    asked, wanted = prompts(tiny), reference(tiny, 64)
    options = ("--decode-layers", "5,2,1", "--prefill-layers", "1,7", "--kv-memory", "4M")
    with Cluster(*options, model=tiny, prefill_pp=2, decode_pp=3) as cluster:
        per_page = 16 * 2 * 2 * 16 * 4  # positions × K and V × heads × head dim × float32
        for role, most_layers in (("prefill", 7), ("decode", 5)):
            pools = [sum(rank["pages"].values()) for rank in cluster.ranks(role)]
            assert len(set(pools)) == 1, "page ids mean the same everywhere"
            assert pools[0] == pytest.approx((4 << 20) / (most_layers * per_page), rel=0.02)
        assert cluster.generate(asked[22], 64) == wanted[22]
        cluster.assert_baseline()


@pytest.mark.parametrize("backend", ["mooncake", "nixl", "stream"])
def test_T11_a_prompt_over_the_pool_is_refused_at_once_and_two_that_exceed_it_together_finish(
    tiny: Path, backend: str
) -> None:
    asked, wanted = prompts(tiny), reference(tiny, 64)
    assert [len(asked[i]) // 16 for i in (22, 23)] == [62, 187], "pages"
    with Cluster("--pages", "100", "--transfer-backend", backend, model=tiny) as cluster:
        began = time.monotonic()
        assert "the context of 1600 tokens" in ending(cluster, asked[23], 4), "as many as the pool has"
        assert time.monotonic() - began < 2.0
        answers = cluster.generate_all([asked[22], asked[22], asked[21]], 64, at_once=3)
        assert answers == [wanted[22], wanted[22], wanted[21]]
        cluster.assert_baseline()


def test_D4_what_can_never_run_is_refused_also_by_the_instance_itself(tiny: Path) -> None:
    with Cluster("--pages", "8", model=tiny) as cluster:
        addresses = {part["role"]: part["address"] for part in cluster.record["parts"]}
        for role, prompt, tokens, message in (
            ("decode", [], 4, "empty"),
            ("decode", [5, 49152], 4, "49152"),
            ("decode", [5] * 100, 64, "pages"),
            ("prefill", [5] * 200, 1, "pages"),
            ("decode", [5], 0, "max_tokens"),
        ):
            channel = grpc.insecure_channel(addresses[role])
            request = generation_pb2.GenerateRequest(
                request_id=f"{role}{len(prompt)}{tokens}",
                prompt_ids=prompt,
                sampling=generation_pb2.SamplingParams(max_tokens=tokens, top_p=1, repetition_penalty=1),
                peer=common_pb2.InstanceRef(instance_id="other", address="127.0.0.1:9"),
            )
            with pytest.raises(grpc.RpcError) as refused:
                list(generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=20))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert message in refused.value.details()
        cluster.assert_baseline()


def test_D5_an_abort_during_the_transfer_ends_without_a_token_more(tiny: Path) -> None:
    """Straight to decode: its prefill never sends, the caller hangs up, and no token ever comes."""
    with Cluster(model=tiny) as cluster:
        address = {part["name"]: part["address"] for part in cluster.record["parts"]}
        stub = generation_pb2_grpc.GenerationStub(grpc.insecure_channel(address["decode-0"]))
        request = generation_pb2.GenerateRequest(
            request_id="lonely",
            prompt_ids=range(5, 105),
            sampling=generation_pb2.SamplingParams(max_tokens=20, top_p=1, repetition_penalty=1),
            peer=common_pb2.InstanceRef(instance_id="prefill-0", address=address["prefill-0"]),
        )
        call = stub.Generate(request, timeout=60)
        deadline = time.monotonic() + 30
        while not any(rank["requests"].get("transferring") for rank in cluster.ranks("decode")):
            assert time.monotonic() < deadline
        stub.Abort(generation_pb2.AbortRequest(request_id="lonely", reason="changed my mind"))
        events = list(call)
        assert [event.WhichOneof("event") for event in events] == ["outcome"]
        assert events[0].outcome.kind == generation_pb2.Outcome.KIND_ABORT
        assert events[0].outcome.output_tokens == 0
        cluster.assert_baseline()
