"""Instances that register: who is known, for how long, and what a gateway makes of what they say.

Real registration code and real gateways over sockets; the instances behind them are scripted.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest

from gateway.app import Listening, listening
from gateway.config import GatewayConfig
from paceline.config import free_ports
from paceline_proto.v1 import bootstrap_pb2, common_pb2, registry_pb2, registry_pb2_grpc
from pipeline.io.address import BadAddress
from pipeline.io.registration import Registration, heartbeat_pause, resolve
from security.folder import make
from tests.gateway.registering import registered
from tests.gateway.scripted_cluster import run, until
from tests.gateway.scripted_instances import (
    ScriptedInstance,
    decode_saying,
    prefill_saying,
    scripted_decode,
    scripted_prefill,
)
from tests.gateway.test_processes import ENVIRONMENT, ROOT, process


def prefill(name: str = "p0", **facts: Any) -> ScriptedInstance:
    return scripted_prefill(prefill_saying(5), name, **facts)


def decode(name: str = "d0", **facts: Any) -> ScriptedInstance:
    return scripted_decode(decode_saying([5, 6]), name, **facts)


@asynccontextmanager
async def gateway(model: Path, **config: Any) -> AsyncIterator[Listening]:
    settings = {"model": model, "model_name": "m", "port": 0, "registry": "127.0.0.1:0", "lease_s": 1.0}
    settings |= {"pair_wait_s": 0.0, "shutdown_grace_s": 0.2, "drain_s": 0.2}
    async with listening(GatewayConfig(**(settings | config))) as server:
        yield server


def registry_of(server: Listening) -> str:
    return f"127.0.0.1:{server.gateway.registry_port}"


def used(server: Listening) -> list[str]:
    fleet = server.gateway.registry.fleet
    return sorted(one.instance_id for one in (*fleet.prefills, *fleet.decodes))


async def ask(server: Listening, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        create: Any = client.completions.with_raw_response.create
        return await create(model="m", prompt=[5, 6], extra_headers=headers, **fields)


# -- coming and going ------------------------------------------------------------------------------------------------


def test_an_instance_comes_drains_and_leaves(model_folder: Path) -> None:
    async def test() -> None:
        async with gateway(model_folder) as server, registered(decode(), [registry_of(server)]):
            one = prefill()
            async with registered(one, [registry_of(server)]) as registration:
                await until(lambda: used(server) == ["d0", "p0"])
                assert (await ask(server)).parse().choices[0].finish_reason == "stop"
                one.facts |= {"serving": False, "not_serving_reason": "p0 is draining"}
                registration.nudge()
                await until(lambda: used(server) == ["d0"])
                [status] = [str(e["status"]) for e in server.gateway.registry.describe() if e["role"] == "prefill"]
                assert status == "p0 is draining", "it is still known, and why it is not used"
            assert [e["role"] for e in server.gateway.registry.describe()] == ["decode"], "it has left"

    run(test)


def test_one_that_dies_without_a_word_is_forgotten_when_its_lease_ends(model_folder: Path) -> None:
    async def test() -> None:
        async with gateway(model_folder) as server:
            one = prefill()
            async with one.serving():
                registration = Registration([registry_of(server)], one.description)
                registration.start()
                await until(lambda: used(server) == ["p0"])
                assert registration._task is not None
                for contact in registration._contacts.values():
                    await contact.close()  # nothing is said any more, as if it had been killed
                registration._task.cancel()
                await until(lambda: not server.gateway.registry.describe())

    run(test)


def test_a_restart_under_another_address_replaces_the_old_one_at_once(model_folder: Path) -> None:
    """As of a pod that is started anew: same name, next epoch, another address, no good-bye."""

    async def test() -> None:
        async with gateway(model_folder, lease_s=30.0) as server:
            old, new = prefill(), prefill()
            async with old.serving(), new.serving():
                stub = registry_pb2_grpc.RegistryStub(grpc.aio.insecure_channel(registry_of(server)))
                reborn = new.description()
                reborn.instance.epoch = 8
                new.facts["instance"] = reborn.instance
                await stub.Register(registry_pb2.RegisterRequest(description=old.description()))
                await until(lambda: used(server) == ["p0"])
                await stub.Register(registry_pb2.RegisterRequest(description=new.description()))
                known = server.gateway.registry.describe()
                assert [e["address"] for e in known] == [new.address]
                with pytest.raises(grpc.aio.AioRpcError, match="which is newer than 7"):
                    await stub.Register(registry_pb2.RegisterRequest(description=old.description()))

    run(test)


def test_an_instance_that_cannot_be_called_is_not_used_and_said_so(model_folder: Path) -> None:
    async def test() -> None:
        async with gateway(model_folder, describe_timeout_s=0.2) as server:
            one = prefill()
            [port] = free_ports("127.0.0.1", 1)
            one.address = f"127.0.0.1:{port}"  # nobody listens there
            registration = Registration([registry_of(server)], one.description)
            registration.start()
            await until(lambda: any("UNAVAILABLE" in str(e["status"]) for e in server.gateway.registry.describe()))
            assert used(server) == []
            async with one.serving(port):
                await until(lambda: used(server) == ["p0"])
            await registration.leave("")

    run(test)


def test_listed_and_registered_is_one_instance_and_stays_when_it_stops_registering(model_folder: Path) -> None:
    async def test() -> None:
        one = prefill()
        async with one.serving(), gateway(model_folder, prefill=(one.address,), describe_interval_s=0.1) as server:
            await until(lambda: used(server) == ["p0"])
            registration = Registration([registry_of(server)], one.description)
            registration.start()
            registered_now = server.gateway.registry.registered
            await until(lambda: registered_now().instances[0].HasField("lease_left_s"))
            assert used(server) == ["p0"] and len(registered_now().instances) == 1
            await registration.leave("no more")
            assert used(server) == ["p0"] and not registered_now().instances[0].HasField("lease_left_s")

    run(test)


def test_a_name_means_all_of_its_addresses_whenever_they_come(model_folder: Path) -> None:
    async def test() -> None:
        async with gateway(model_folder) as first, gateway(model_folder) as second:
            found: list[str] = []

            async def looked_up(name: str) -> list[str]:
                if not found:
                    raise OSError("no such name yet")
                return list(found)

            one = prefill()
            async with one.serving():
                registration = Registration(
                    ["gateways.local:8001"], one.description, None, looked_up, resolve_every_s=0.1
                )
                registration.start()
                found.append(registry_of(first))
                await until(lambda: used(first) == ["p0"])
                assert used(second) == []
                found.append(registry_of(second))
                await until(lambda: used(second) == ["p0"])
                found.remove(registry_of(first))
                await until(lambda: used(first) == [])
                assert used(second) == ["p0"]
                await registration.leave("")
            assert used(second) == []

    run(test)


def test_a_name_is_resolved_to_every_address_it_has() -> None:
    async def test() -> None:
        assert await resolve("127.0.0.1:8001") == ["127.0.0.1:8001"]
        assert "127.0.0.1:8001" in await resolve("localhost:8001")
        for no_name in ("no-such-host.invalid:8001", "a..b:8001", f"{'a' * 64}.local:8001"):
            with pytest.raises(OSError):
                await resolve(no_name)

    run(test)
    assert [heartbeat_pause(asked) for asked in (0.0, 0.4, 1e9, float("nan"))] == [0.05, 0.4, 60.0, 1.0]
    with pytest.raises(BadAddress, match="has port 0"):
        Registration(["127.0.0.1:0"], bootstrap_pb2.DescribeResponse)


def test_secrets_of_another_cluster_are_told_once_on_both_sides(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make(tmp_path / "ours")
    theirs = make(tmp_path / "theirs")

    async def test() -> None:
        one = prefill()
        async with one.serving():  # without any secrets
            async with gateway(model_folder, secrets=str(tmp_path / "ours"), prefill=(one.address,)) as server:
                registration = Registration([registry_of(server)], one.description, theirs)
                registration.start()
                await until(lambda: len(told("CERTIFICATE_VERIFY_FAILED")) == len(told("takes no requests")) == 1)
                await asyncio.sleep(0.5)  # and no more, though both go on trying
                await registration.leave("")
                assert used(server) == []

    def told(what: str) -> list[str]:
        return [line for record in caplog.records if what in (line := record.getMessage())]

    run(test)
    assert "does not answer, trying on: " in told("CERTIFICATE_VERIFY_FAILED")[0]
    assert "takes no requests: UNAVAILABLE: " in told("takes no requests")[0]
    assert len(told("does not answer")) == len(told("takes no requests")) == 1


# -- G2 --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def gateway_at(model: Path, registry: str) -> AsyncIterator[tuple[Process, str]]:
    arguments = ["--model", str(model), "--model-name", "m", "--port", "0", "--registry", registry]
    async with process("gateway.app", *arguments) as one:
        assert one.stderr is not None
        async for line in one.stderr:
            if ready := re.search(rb"gateway ready on (http://[\d.:]+)", line):
                yield one, ready[1].decode()
                return
        pytest.fail("the gateway ended before it was ready")


async def all_known(http: aiohttp.ClientSession, url: str, count: int) -> None:
    """Bounded by the test's own time."""
    while True:
        async with http.get(f"{url}/health") as answer:
            instances = (await answer.json())["instances"]
        if [one["serving"] for one in instances] == [True] * count:
            return
        await asyncio.sleep(0.02)


def test_G2_a_gateway_killed_and_restarted_under_twenty_instances_knows_all_again(model_folder: Path) -> None:
    async def test() -> None:
        registry = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
        instances = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.gateway.registering", registry, "20"),
            stdin=PIPE, stdout=PIPE, env=ENVIRONMENT, cwd=ROOT,
        )  # fmt: skip
        assert instances.stdin is not None and instances.stdout is not None
        try:
            async with aiohttp.ClientSession() as http:
                assert await instances.stdout.readline() == b"ready\n", "long before there is any gateway"
                for _ in range(2):
                    async with gateway_at(model_folder, registry) as (one, url):
                        async with asyncio.timeout(8):  # heartbeats are at most a second apart
                            await all_known(http, url, 20)
                        answer = await http.post(f"{url}/v1/completions", json={"prompt": [5, 6]})
                        assert answer.status == 200
                        one.send_signal(signal.SIGKILL)
                        await one.wait()
        finally:
            instances.stdin.close()
            await asyncio.wait_for(instances.wait(), 10)

    run(test)


# -- G3 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["registered", "listed"])
def test_G3_an_answer_that_is_a_second_late_once_costs_nothing(
    model_folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The instance stands still for a second (its whole process, as by a garbage collection or a throttled CPU)."""
    caplog.set_level(logging.INFO)

    async def test() -> None:
        async with AsyncExitStack() as stack:
            frozen = await stack.enter_async_context(process("tests.gateway.frozen_instance", "prefill"))
            assert frozen.stdout is not None
            address = (await frozen.stdout.readline()).decode().strip()
            lists = {"prefill": (address,)} if how == "listed" else {}
            server = await stack.enter_async_context(
                gateway(model_folder, describe_timeout_s=0.7, describe_interval_s=0.05, lease_s=5.0, **lists)
            )
            if how == "registered":
                ref = common_pb2.InstanceRef(instance_id="p0", address=address, epoch=7)
                description = prefill(instance=ref).description()
                stack.push_async_callback(await _registers(server, description))
            await until(lambda: used(server) == ["p0"])
            changed = asyncio.create_task(server.gateway.registry.change())
            frozen.send_signal(signal.SIGSTOP)
            [instance] = server.gateway.registry.fleet.prefills
            server.gateway.registry.failed(instance, unreachable=False)  # a reason to ask now, while it is frozen
            await asyncio.sleep(1.0)
            frozen.send_signal(signal.SIGCONT)
            await server.gateway.registry.ask_again(instance)
            assert not changed.done(), "the fleet was the same all the time"
            assert used(server) == ["p0"]
            changed.cancel()

    run(test)
    assert not [r for r in caplog.records if "takes no requests" in r.getMessage()]


async def _registers(server: Listening, description: bootstrap_pb2.DescribeResponse) -> Any:
    registration = Registration([registry_of(server)], lambda: description)
    registration.start()
    return lambda: registration.leave("")


def test_an_instance_that_stays_silent_is_not_used_for_long(model_folder: Path) -> None:
    async def test() -> None:
        async with process("tests.gateway.frozen_instance", "prefill") as frozen:
            assert frozen.stdout is not None
            address = (await frozen.stdout.readline()).decode().strip()
            async with gateway(
                model_folder, describe_timeout_s=0.2, describe_interval_s=0.05, prefill=(address,)
            ) as server:
                await until(lambda: used(server) == ["p0"])
                frozen.send_signal(signal.SIGSTOP)
                await until(lambda: used(server) == [])
                frozen.send_signal(signal.SIGCONT)
                await until(lambda: used(server) == ["p0"])

    run(test)


@pytest.mark.parametrize("first", [True, False])
def test_one_that_gives_the_address_of_another_is_refused_and_harms_it_not(
    model_folder: Path, caplog: pytest.LogCaptureFixture, first: bool
) -> None:
    caplog.set_level(logging.INFO)

    async def test() -> None:
        one, impostor = prefill(), decode("d9")
        async with gateway(model_folder) as server, one.serving():
            impostor.address = one.address
            true, false = (Registration([registry_of(server)], instance.description) for instance in (one, impostor))
            for registration in (true, false) if first else (false, true):
                registration.start()
                await until(server.gateway.registry.describe)
            await until(lambda: "p0" in used(server) and "refuses (ALREADY_EXISTS)" in caplog.text)
            assert f"at {one.address} answers p0, not d9; every instance needs" in caplog.text
            changed = asyncio.create_task(server.gateway.registry.change())
            for _ in range(10):
                false.nudge()
                await asyncio.sleep(0.02)
            assert not changed.done() and used(server) == ["p0"]
            changed.cancel()
            # When another instance runs there from now on, it is known under its own name at once, as it was before.
            await false.leave("")
            one.name = "p1"
            true.nudge()
            await until(lambda: used(server) == ["p1"])
            await true.leave("")

    run(test)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"role": common_pb2.ROLE_UNSPECIFIED}, "role is 0; it is prefill or decode"),
        ({"instance": common_pb2.InstanceRef(address="h:1")}, "instance.instance_id has 0 characters"),
        ({"instance": common_pb2.InstanceRef(instance_id="x" * 300, address="h:1")}, "has 300 characters"),
        ({"instance": common_pb2.InstanceRef(instance_id="x", address="h")}, "instance.address 'h' is not host:port"),
        ({"instance": common_pb2.InstanceRef(instance_id="x", address="h:0")}, "is not host:port"),
        ({"instance": common_pb2.InstanceRef(instance_id="x", address="h:٣")}, "is not host:port"),
    ],
)
def test_what_is_no_registration_is_refused_with_the_reason(
    model_folder: Path, facts: dict[str, Any], reason: str
) -> None:
    async def test() -> None:
        async with gateway(model_folder) as server, grpc.aio.insecure_channel(registry_of(server)) as channel:
            stub = registry_pb2_grpc.RegistryStub(channel)
            request = registry_pb2.RegisterRequest(description=prefill(**facts).description())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Register(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason in str(caught.value.details())
            assert server.gateway.registry.describe() == []

    run(test)


def test_what_others_cannot_dial_is_refused() -> None:
    from gateway.registry_server import _what_is_wrong

    def wrong(address: str, peer: str) -> str:
        ref = common_pb2.InstanceRef(instance_id="p0", address=address)
        return _what_is_wrong(ref, common_pb2.ROLE_PREFILL, peer)

    for local in ("127.0.0.1:9", "localhost:9", "[::1]:9", "0.0.0.0:9"):
        assert "it needs --advertise" in wrong(local, "ipv4:10.0.0.7:4711")
        assert wrong(local, "ipv4:127.0.0.1:4711") == wrong(local, "ipv6:%5B::1%5D:4711") == ""
        assert wrong(local, "ipv6:%5B::ffff:127.0.0.1%5D:4711") == ""
    assert wrong("10.0.0.7:9", "ipv4:10.0.0.8:4711") == ""


# -- watching ----------------------------------------------------------------------------------------------------------


def test_operators_see_who_is_known_and_changes(model_folder: Path) -> None:
    async def test() -> None:
        async with gateway(model_folder) as server, grpc.aio.insecure_channel(registry_of(server)) as channel:
            stream = registry_pb2_grpc.RegistryStub(channel).Watch(registry_pb2.WatchRequest())
            assert list((await stream.read()).instances) == []
            load = bootstrap_pb2.Load(queued_prefill_tokens=700, free_pages=9, requests=3, prefill_tokens_per_second=5)
            async with (
                registered(decode("d0"), [registry_of(server)]),
                registered(prefill("p0", load=load), [registry_of(server)]),
            ):
                while len(now := list((await stream.read()).instances)) != 2 or not all(one.used for one in now):
                    pass
                assert [one.description.instance.instance_id for one in now] == ["d0", "p0"]
                assert now[1].description.load == load
                assert now[1].status == "serving" and 0 < now[1].lease_left_s <= 1.0
            while (await stream.read()).instances:
                pass
            stream.cancel()

    run(test)


# -- what a client gets out of it ------------------------------------------------------------------------------------


def busy(**load: Any) -> dict[str, Any]:
    return {"load": bootstrap_pb2.Load(prefill_tokens_per_second=100.0, **load)}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_hope_is_turned_away_with_when_to_come_back(model_folder: Path, stream: bool) -> None:
    async def test() -> None:
        async with (
            gateway(model_folder) as server,
            registered(decode(), [registry_of(server)]),
            registered(prefill(**busy(queued_prefill_tokens=1198)), [registry_of(server)]),
        ):
            await until(lambda: used(server) == ["d0", "p0"])
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(server, {"X-Request-Timeout": "5"}, stream=stream)
            assert caught.value.response.headers["Retry-After"] == "8", (
                "12 s of work, a little less than 5 s of patience"
            )
            assert caught.value.code == "too_late"
            assert "expected in 12.0 s" in caught.value.message
            answer = await ask(server, {"X-Request-Timeout": "20"}, stream=stream)
            assert answer.http_response.headers["X-Paceline-Prefill"] == "p0"
            assert answer.http_response.headers["X-Paceline-Decode"] == "d0"
            assert answer.http_response.headers["X-Paceline-Mode"] == "disaggregated"
            with pytest.raises(openai.BadRequestError, match="X-Request-Timeout is 'soon'"):
                await ask(server, {"X-Request-Timeout": "soon"})

    run(test)


def test_a_clients_own_deadline_is_the_instances(model_folder: Path) -> None:
    async def test() -> None:
        one = prefill()
        async with (
            gateway(model_folder) as server,
            registered(decode(), [registry_of(server)]),
            registered(one, [registry_of(server)]),
        ):
            await until(lambda: used(server) == ["d0", "p0"])
            await ask(server, {"X-Request-Timeout": "7"})
            assert 5 < one.asked[0].timeout_s <= 7
            with pytest.raises(openai.APIStatusError, match="time was over before") as caught:
                await ask(server, {"X-Request-Timeout": "1e-9"})
            assert caught.value.status_code == 504

    run(test)


def test_sessions_stay_on_their_pair(model_folder: Path) -> None:
    async def test() -> None:
        async with gateway(model_folder, policy="session") as server, AsyncExitStack() as stack:
            for one in (*(prefill(f"p{i}") for i in range(3)), *(decode(f"d{i}") for i in range(3))):
                await stack.enter_async_context(registered(one, [registry_of(server)]))
            await until(lambda: len(used(server)) == 6)

            async def pair(headers: dict[str, str], **fields: Any) -> str:
                told = (await ask(server, headers, **fields)).http_response.headers
                return str(told["X-Paceline-Prefill"]) + str(told["X-Paceline-Decode"])

            pairs = {name: await pair({"X-Session-ID": name}) for name in "abcd"}
            assert len(set(pairs.values())) > 1
            for name, first in pairs.items():
                assert await pair({"X-Session-Affinity": name}) == await pair({}, user=name) == first

    run(test)


def test_a_request_waits_a_little_for_a_pair_that_is_about_to_come(model_folder: Path) -> None:
    async def test() -> None:
        async with gateway(model_folder, pair_wait_s=10.0) as server, registered(decode(), [registry_of(server)]):
            waiting = asyncio.create_task(ask(server))
            await until(lambda: used(server) == ["d0"] and server.gateway.in_flight)
            async with registered(prefill(), [registry_of(server)]):
                assert (await waiting).parse().choices[0].finish_reason == "stop"

    run(test)


def test_requests_that_name_no_limit_fit_every_pair(model_folder: Path) -> None:
    """Pools differ by what memory was free; the largest must not get all requests for that."""

    async def test() -> None:
        small, large = decode("small", pages=10), decode("large", pages=20)
        async with (
            gateway(model_folder) as server,
            registered(prefill(), [registry_of(server)]),
            registered(small, [registry_of(server)]),
            registered(large, [registry_of(server)]),
        ):
            await until(lambda: len(used(server)) == 3)
            for _ in range(4):
                await ask(server, max_tokens=150)
            assert len(small.asked) == len(large.asked) == 2
            await ask(server, max_tokens=200)
            assert len(large.asked) == 3, "which fits nowhere else"
            with pytest.raises(openai.BadRequestError, match="the context holds 320"):
                await ask(server, max_tokens=400)
            url = f"http://127.0.0.1:{server.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
            last = (small.asked + large.asked[3:])[-1]
            assert len(last.prompt_ids) + last.sampling.max_tokens == 160

    run(test)
