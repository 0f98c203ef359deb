"""Rows T8 and T14 to T16 on every real engine: who does not fit is told why, who is not there yet is waited for."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path

import msgspec
import numpy
import pytest
from safetensors.numpy import save_file

from engine.checkpoint import model_digest
from tests.transfer.pools import Pool, pipeline
from tests.transfer.rig import DECODE, HOST, PREFILL, REAL, Rig, engine_for, on_real_engines, terms
from transfer.actions import Peer
from transfer.io.engine import EngineError, choose, make_engine
from transfer.io.receiving_port import ReceivingPort
from transfer.io.sending_port import SendingPort
from transfer.messages import Terms
from transfer.plan import Shard, Topology

ELSEWHERE = "192.0.2.1"  # of a network that exists in documentation only
PAGES = [3, 4]
FITTING = pipeline(1, 6)
UNLIKE: dict[str, tuple[Topology, str]] = {
    "page size": (pipeline(1, 6, page_size=8), "page size: 4 at the source, 8 at the destination"),
    "layer count": (pipeline(1, 5), "layers: 6 at the source, 5 at the destination"),
    "head count": (
        Topology.uniform((Shard(0, (0, 6), (0, 1)),), 4, 64),
        "KV heads: 2 at the source, 1 at the destination",
    ),
    "head size": (pipeline(1, 6, bytes_per_token=128), "bytes per token and layer: 64 at the source, 128 at the dest"),
}


def refused(rig: Rig, topology: Topology, agreed: Terms, host: str = HOST) -> str:
    """What a decode rank of this kind is told, and that no byte has moved for it; the one that fits is served."""
    pool = Pool(topology, 0, 16)
    before = rig.senders[0].counters().handles_submitted
    rig.receivers, fitting = [], rig.receivers
    port = ReceivingPort(Peer("stranger", 1, 0), topology, pool.regions, engine_for(rig.backend, pool), agreed, host)
    rig.receivers = [port]
    try:
        port.introduce(PREFILL, [rig.senders[0].address])
        rig.note(PREFILL, 0, rig.senders[0].open("no/0", "stranger", 0, 8))
        rig.note(DECODE, 0, port.open("no/0", PREFILL, 0, 8))
        rig.pump(lambda: rig.all_heard(DECODE, "no/0", "prealloc"))
        (end,) = rig.heard(DECODE, "no/0", "prealloc")
        assert not end.good and rig.heard(PREFILL, "no/0", "bootstrap") == []
        assert rig.senders[0].counters().handles_submitted == before
    finally:
        port.close_port()
        rig.receivers = fitting
    rig.stop(PREFILL, "no/0")
    rig.senders[0].close("no/0")
    rig.hand_over("fits/0", 8, PAGES, PAGES)
    return end.reason


@on_real_engines
@pytest.mark.parametrize("what", UNLIKE)
def test_T8_an_unlike_pool_is_refused_at_the_handshake_with_both_values(backend: str, what: str) -> None:
    topology, reason = UNLIKE[what]
    with Rig(backend, 1, 1) as rig:
        assert reason in refused(rig, topology, terms(backend))


@on_real_engines
def test_T8_another_dtype_is_refused_at_the_handshake_with_both_values(backend: str) -> None:
    with Rig(backend, 1, 1) as rig:
        agreed = msgspec.structs.replace(terms(backend), kv_dtype="bfloat16")
        assert refused(rig, FITTING, agreed) == "kv_dtype: 'uint8' here, 'bfloat16' there"


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a model, of another revision of it, and of the same one with another tokenizer."""
    found = {}
    for name, weight, word in (("model", 1.0, "a"), ("revision", 1.5, "a"), ("tokenizer", 1.0, "b")):
        folder: Path = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {word: 0}}}))
        save_file({"w": numpy.full((4, 4), weight, dtype=numpy.float32)}, folder / "model.safetensors")
        found[name] = model_digest(folder)
    return found


@on_real_engines
@pytest.mark.parametrize("what", ["revision", "tokenizer"])
def test_T8_another_model_is_refused_at_the_handshake_with_both_values(
    backend: str, what: str, digests: dict[str, str]
) -> None:
    with Rig(backend, 1, 1) as rig:
        rig.senders[0]._terms = msgspec.structs.replace(terms(backend), model=digests["model"])
        for port in rig.receivers:
            port._terms = rig.senders[0]._terms
        agreed = msgspec.structs.replace(terms(backend), model=digests[what])
        assert refused(rig, FITTING, agreed) == f"model: {digests['model']!r} here, {digests[what]!r} there"


@on_real_engines
def test_T14_an_address_that_peers_cannot_reach_is_refused_at_start(backend: str) -> None:
    name = backend.removesuffix("-tcp")
    with pytest.raises(EngineError, match="needs an address that peers can reach, not '0\\.0\\.0\\.0'"):
        make_engine(name, "0.0.0.0")
    with pytest.raises(EngineError, match=f"needs an address of this host, and {ELSEWHERE} is none"):
        make_engine(name, ELSEWHERE)
    pool = Pool(FITTING, 0, 16)
    engine = engine_for(backend, pool)
    for kind in (SendingPort, ReceivingPort):
        with pytest.raises(ValueError, match="can reach, not '0\\.0\\.0\\.0'"):
            kind(Peer("x", 1, 0), FITTING, pool.regions, engine, terms(backend), "0.0.0.0")
    engine.close()


@on_real_engines
def test_T14_a_loopback_address_and_one_of_another_host_do_not_meet(backend: str) -> None:
    with Rig(backend, 1, 1) as rig:
        told = refused(rig, FITTING, terms(backend), host=ELSEWHERE)
        assert told == f"address: {HOST} here, {ELSEWHERE} there; one cannot reach the other"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@on_real_engines
def test_T15_a_decode_rank_that_starts_long_before_its_prefill_dials_until_it_is_there(backend: str) -> None:
    with Rig(backend, 1, 1) as rig:
        late = f"tcp://{HOST}:{free_port()}"
        rig.receivers[0].introduce(PREFILL, [late])
        rig.note(DECODE, 0, rig.receivers[0].open("a/0", PREFILL, 0, 8))
        rig.idle(2.5)
        assert rig.heard(DECODE, "a/0", "prealloc") == [], "still waiting"
        rig.senders[0].link.socket.bind(late)
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "prealloc"))
        assert rig.heard(DECODE, "a/0", "prealloc")[0].good
        rig.hand_over("b/0", 8, PAGES, PAGES)


@on_real_engines
def test_T15_an_address_that_does_not_resolve_yet_fails_its_rooms_cleanly_and_works_later(backend: str) -> None:
    with Rig(backend, 1, 1, peer_timeout=1.0) as rig:
        rig.receivers[0].introduce(PREFILL, ["tcp://prefill.invalid:5555"])
        rig.note(DECODE, 0, rig.receivers[0].open("a/0", PREFILL, 0, 8))
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "prealloc"))
        (end,) = rig.heard(DECODE, "a/0", "prealloc")
        assert not end.good and end.reason == "no word from prefill rank 0 at tcp://prefill.invalid:5555"
        rig.receivers[0].introduce(PREFILL, [rig.senders[0].address])
        rig.hand_over("b/0", 8, PAGES, PAGES)


@on_real_engines
def test_T15_a_prefill_rank_whose_decode_starts_much_later_keeps_its_room(backend: str) -> None:
    with Rig(backend, 1, 1) as rig:
        rig.note(PREFILL, 0, rig.senders[0].open("a/0", DECODE, 0, 8))
        rig.idle(1.5)
        assert rig.heard(PREFILL, "a/0", "bootstrap") == []
        rig.note(DECODE, 0, rig.receivers[0].open("a/0", PREFILL, 0, 8))
        rig.pump(lambda: rig.all_heard(DECODE, "a/0", "prealloc"))
        rig.note(DECODE, 0, rig.receivers[0].send_destinations("a/0", PAGES))
        rig.pump(lambda: rig.all_heard(PREFILL, "a/0", "bootstrap"))
        rig.note(PREFILL, 0, rig.senders[0].start("a/0", PAGES))
        rig.prefill("a/0", 0, 8)
        rig.sample("a/0", b"t")
        rig.finish("a/0")
        rig.assert_exact(8, PAGES, PAGES)


@pytest.mark.parametrize("backend", [*(name for name in REAL if name != "stream-tcp"), "auto"])
def test_T16_rdma_that_is_not_there_is_never_replaced_by_something_else(backend: str) -> None:
    reason = (
        "the stream backend has no RDMA" if backend == "stream" else "no RDMA device 'nosuch0' on this host; there "
    )
    with pytest.raises(EngineError, match=reason):
        make_engine(backend, HOST, "nosuch0")


def test_T16_the_refusal_names_the_devices_there_are(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no RDMA device 'mlx5_0' on this host; there are: none"):
        choose("auto", "mlx5_0", tmp_path / "absent")
    (tmp_path / "mlx5_3").mkdir()
    with pytest.raises(EngineError, match="no RDMA device 'mlx5_0' on this host; there are: mlx5_3"):
        choose("nixl", "mlx5_3,mlx5_0", tmp_path)
    assert choose("nixl", "mlx5_3", tmp_path).device == "mlx5_3"


def test_T16_auto_takes_rdma_where_there_is_some_and_else_the_fastest_over_tcp_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = choose("auto", sysfs=tmp_path / "absent")
    assert (nowhere.backend, nowhere.device) == ("stream", "") and "no RDMA device" in nowhere.why
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    here = choose("auto", sysfs=tmp_path)
    assert (here.backend, here.device) == ("mooncake", "mlx5_0,mlx5_1") and "RDMA" in here.why
    with caplog.at_level(logging.INFO):
        engine = make_engine("auto", HOST)
    assert f"transfer backend {engine.name} over tcp on {HOST} (auto: " in caplog.text
    engine.close()
