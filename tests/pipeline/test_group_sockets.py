"""What goes between the hosts of an instance is encrypted, and who speaks is known by its key: control, hidden states."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
import zmq

from pipeline.io import control
from pipeline.io.control_socket import ControlSocket, Lock
from pipeline.io.hidden import HiddenLost, HiddenReceiver, HiddenSender
from pipeline.io.zap import RingKeys, make_keys
from security.gatekeeper import Gatekeeper
from tests.pipeline.group_harness import free_port

ALIVE = msgspec.msgpack.encode(control.Alive(1))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], name: bytes, keys: RingKeys | None, server: str
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name)
    socket.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        keys.dial_key(socket, server)
    return socket


def test_the_daemon_hears_ranks_of_other_hosts_by_their_keys_and_nobody_else(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async def scenario() -> None:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        keys, stranger = make_keys(3), make_keys(1)[0]
        public, secret = (key.decode() for key in zmq.curve_keypair())
        heard: list[tuple[int, control.ToDaemon]] = []
        ours = ControlSocket(
            endpoint, [1, 2], 8, lambda rank, said: heard.append((rank, said)), Lock(secret, keys[0].ranks)
        )
        peers = [
            dealer(context, b"1", None, public),  # unencrypted
            dealer(context, b"1", stranger, public),
            dealer(context, b"2", keys[1], public),  # rank 1 under the name of rank 2
            dealer(context, b"0", keys[0], public),  # not of another host
        ]
        for peer in peers:
            peer.connect(endpoint)
            peer.send(ALIVE)
        async with asyncio.timeout(10):
            while ours.dropped["not one of our ranks"] < 2:
                await asyncio.sleep(0.01)
        assert heard == []
        rank = dealer(context, b"1", keys[1], public)
        rank.connect(endpoint)
        rank.send(ALIVE)
        async with asyncio.timeout(10):
            while not heard:
                await asyncio.sleep(0.01)
        assert heard == [(1, control.Alive(1))]
        assert ours.send(1, control.Go()) and await asyncio.to_thread(rank.poll, 5000)
        assert msgspec.msgpack.decode(rank.recv(), type=control.ToRank) == control.Go()
        # A rank that had to dial again, while its old connection is not known to be gone, is heard in its place.
        again = dealer(context, b"1", keys[1], public)
        again.connect(endpoint)
        again.send(ALIVE)
        async with asyncio.timeout(10):
            while len(heard) < 2:
                await asyncio.sleep(0.01)
        assert ours.send(1, control.Go()) and await asyncio.to_thread(again.poll, 5000)
        ours.close()

    asyncio.run(scenario())


def test_a_port_that_is_taken_is_said(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async def scenario() -> None:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        owner = context.socket(zmq.REP)
        owner.bind(endpoint)
        with pytest.raises(OSError, match=f"the control channel cannot listen on {endpoint}"):
            ControlSocket(endpoint, [1], 8, lambda rank, said: None, Lock("s" * 40, ()))

    asyncio.run(scenario())


def test_hidden_states_between_hosts_are_taken_from_the_previous_rank_alone(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    endpoint, keys = f"tcp://127.0.0.1:{free_port()}", make_keys(3)
    gatekeeper = Gatekeeper(context, keys[2].ranks)
    receiver = HiddenReceiver(context, endpoint, 5, keys[2], 1, most_tokens=64)
    plain = context.socket(zmq.PUSH)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(endpoint)
    plain.send_multipart([b"\x95\x05\x07\x04\x02\xa7float32", bytes(32)])
    forged = HiddenSender(context, endpoint, 5, keys[0], 2)
    forged.send(7, torch.zeros(4, 2), 5)
    true = HiddenSender(context, endpoint, 5, keys[1], 2)
    wanted = torch.arange(8, dtype=torch.bfloat16).view(4, 2)
    true.send(7, wanted, 5)

    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(receiver.receive, 7, 4, 10.0)
        while not taken.done():
            if gatekeeper.socket.poll(20):
                gatekeeper.answer()
        assert torch.equal(taken.result(), wanted)
        nothing = pool.submit(receiver.receive, 8, 4, 1.0)
        while not nothing.done():
            if gatekeeper.socket.poll(20):
                gatekeeper.answer()
        with pytest.raises(HiddenLost, match="no hidden states of tick 8"):
            nothing.result()
    assert receiver.dropped == 1, "rank 0's; the unencrypted peer was not even let in"
