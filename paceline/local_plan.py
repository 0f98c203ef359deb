"""Decides what a local cluster consists of, before anything is started.

In: the options of `paceline up`. Out: a `Plan`: the command, the address, the log and the probe of
every part. Daemons listen on free loopback ports, and register
with the gateway at another; the gateway's own is the user's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.child import Answer, ChildSpec
from paceline.config import cluster_secrets, free_ports
from paceline.engine_options import repeat_keys, repeat_options, repeat_security
from paceline.gateway_options import repeat_gateway_options
from paceline.health import GatewayProbe, InstanceProbe, close_all

GATEWAY_GRACE = 5.0  # for requests in flight; less than a child is given to stop


@dataclass(frozen=True, slots=True)
class Plan:
    specs: list[ChildSpec]
    url: str
    model_name: str
    run_dir: Path
    close: Callable[[], Awaitable[None]]


def plan(options: argparse.Namespace, model: Path, run_dir: Path, port: int) -> Plan:
    roles = ["prefill"] * options.prefill_instances + ["decode"] * options.decode_instances
    names = [f"{role}-{roles[:index].count(role)}" for index, role in enumerate(roles)]
    registry, *free = [f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", 1 + 2 * len(roles))]
    addresses, metrics = free[: len(roles)], free[len(roles) :]
    secrets = cluster_secrets(options.secrets)
    instances = [InstanceProbe(address, secrets) for address in addresses]
    parts = list(zip(roles, names, addresses, metrics, strict=True))
    specs = [
        _spec(
            name,
            role,
            address,
            [*_instance_command(options, role, name, address, told, model, run_dir), "--gateway", registry],
            run_dir,
            probe,
            told,
        )
        for (role, name, address, told), probe in zip(parts, instances, strict=True)
    ]
    model_name = options.model_name or model.name
    # A gateway that listens on every address is asked on loopback.
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    url = f"http://{host}:{port}"
    gateway = GatewayProbe(url)
    command = (
        f"gateway --host {options.host} --port {port} --request-timeout {options.request_timeout} "
        f"--shutdown-grace {GATEWAY_GRACE} --registry {registry}"
    ).split()
    command += ["--model", str(model), "--model-name", model_name, *repeat_gateway_options(options)]
    command += [*repeat_security(options), *repeat_keys(options), *(("--otlp", options.otlp) if options.otlp else ())]
    specs.append(_spec("gateway", "gateway", f"{host}:{port}", command, run_dir, gateway))
    return Plan(specs, url, model_name, run_dir, lambda: close_all([*instances, gateway]))


def _instance_command(
    options: argparse.Namespace, role: str, name: str, address: str, metrics: str, model: Path, run_dir: Path
) -> list[str]:
    layers = getattr(options, f"{role}_layers")
    return [
        role,
        *("--instance", name),
        *("--listen", address),
        *("--metrics", metrics),
        *("--pp", str(getattr(options, f"{role}_pp"))),
        *("--model", str(model)),
        *("--run-dir", str(run_dir)),
        *("--first-epoch", "1"),  # all that runs starts over with the run directory
        *(("--layers", layers) if layers else ()),
        *repeat_security(options),
        *repeat_options(options),
    ]


def _spec(
    name: str,
    role: str,
    address: str,
    command: list[str],
    run_dir: Path,
    probe: Callable[[], Awaitable[Answer]],
    metrics: str = "",
) -> ChildSpec:
    return ChildSpec(
        name=name,
        role=role,
        address=address,
        command=(sys.executable, "-m", "paceline.cli", *command),
        log=run_dir / "logs" / f"{name}.log",
        probe=probe,
        metrics=metrics,
        environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1"},
    )
