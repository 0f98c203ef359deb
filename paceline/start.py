"""Becomes one part of a cluster: an instance's daemon or the gateway.

The part replaces this process (exec), so it has its pid, its signals and its place among the
supervised, and its modules are those it has when started by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

if TYPE_CHECKING:
    from pipeline.io.instance_config import DaemonConfig


def run_instance(config: DaemonConfig) -> NoReturn:
    # The daemon reads its configuration from standard input; unlike a pipe, a memfd needs no writer.
    stdin = os.memfd_create("daemon-config")
    os.write(stdin, msgspec.json.encode(config))
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    become(f"{config.role}.io.daemon")


def run_gateway(options: argparse.Namespace, model: Path) -> NoReturn:
    become("gateway.app", *gateway_arguments(options, model))


def gateway_arguments(options: argparse.Namespace, model: Path) -> list[str]:
    arguments = ["--model", str(model), "--host", options.host, "--port", str(options.port)]
    arguments += ["--secrets", options.secrets, "--api-keys", options.api_keys]
    if options.insecure:
        arguments.append("--insecure")
    if options.model_name:
        arguments += ["--model-name", options.model_name]
    for option, value in (
        ("--key-requests-per-s", options.key_requests_per_second),
        ("--key-inflight", options.key_inflight),
        ("--max-inflight", options.max_inflight),
        ("--request-timeout-s", options.request_timeout),
        ("--shutdown-grace-s", options.shutdown_grace),
        ("--resumes", options.resumes),
        ("--resume-wait-s", options.resume_wait),
    ):
        arguments += [option, str(value)]
    for role in ("prefill", "decode"):
        for address in getattr(options, role):
            arguments += [f"--{role}", address]
    return arguments


def become(module: str, *arguments: str) -> NoReturn:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    # Below this gRPC tells of every stranger whose handshake fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
