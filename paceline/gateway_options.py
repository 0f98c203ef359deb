"""The options that shape a gateway, the same for `gateway` and `up`.

In: parsed arguments. Out: the command line of `gateway.app`, or that of a child that will parse to the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from paceline.engine_options import AT_LEAST_ONE, AT_LEAST_ZERO

DEFAULT_REGISTRY = "127.0.0.1:8001"
POLICIES = ("least-work", "power-of-two", "session", "round-robin")

# Option, option of gateway.app.
SHARED = (
    ("policy", "policy"),
    ("max_inflight", "max-inflight"),
    ("pair_wait", "pair-wait-s"),
    ("resumes", "resumes"),
    ("resume_wait", "resume-wait-s"),
)


def add_gateway_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routing")
    group.add_argument(
        "--policy", choices=POLICIES, default="least-work",
        help="which of the instances that would do is taken (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-inflight", type=AT_LEAST_ONE, default=1024, metavar="N",
        help="requests at once; more get 429 (default: 1024)",
    )  # fmt: skip
    group.add_argument(
        "--pair-wait", type=float, default=2.0, metavar="S",
        help="how long a new request waits while no pair of instances serves; then it gets 503 (default: 2)",
    )  # fmt: skip
    group.add_argument(
        "--resumes", type=AT_LEAST_ZERO, default=3, metavar="N",
        help="times a request goes on elsewhere after what served it has failed (default: 3)",
    )  # fmt: skip
    group.add_argument(
        "--resume-wait", type=float, default=120.0, metavar="S",
        help="how long it then waits until a pair serves again (default: 120)",
    )  # fmt: skip


def repeat_gateway_options(options: argparse.Namespace) -> Iterator[str]:
    """The shared options as a child's command line."""
    for option, _ in SHARED:
        yield f"--{option.replace('_', '-')}"
        yield str(getattr(options, option))


def gateway_arguments(options: argparse.Namespace, model: Path) -> list[str]:
    """Where the options of `paceline gateway` go."""
    arguments = ["--model", str(model), "--host", options.host, "--port", str(options.port)]
    if options.model_name:
        arguments += ["--model-name", options.model_name]
    arguments += ["--secrets", options.secrets, "--api-keys", options.api_keys]
    arguments += ["--key-requests-per-s", str(options.key_requests_per_second)]
    arguments += ["--key-inflight", str(options.key_inflight)]
    if options.insecure:
        arguments.append("--insecure")
    if options.otlp:
        arguments += ["--otlp", options.otlp]
    arguments += ["--request-timeout-s", str(options.request_timeout)]
    arguments += ["--shutdown-grace-s", str(options.shutdown_grace)]
    for option, theirs in SHARED:
        arguments += [f"--{theirs}", str(getattr(options, option))]
    listed = [(role, address) for role in ("prefill", "decode") for address in getattr(options, role) or ()]
    for role, address in listed:
        arguments += [f"--{role}", address]
    # Two gateways that only know their lists can share a host.
    if registry := options.registry or ("" if listed else DEFAULT_REGISTRY):
        arguments += ["--registry", registry]
    return arguments
