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

from paceline.gateway_options import gateway_arguments

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


def become(module: str, *arguments: str) -> NoReturn:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    # Below this gRPC tells of every stranger whose handshake fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
