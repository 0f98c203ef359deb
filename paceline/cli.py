"""The `paceline` command: parses, then hands over. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bench import options as bench_options
from paceline.config import default_run_dir
from paceline.engine_options import (
    ADDRESS,
    ADDRESS_OR_NONE,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    LAYERS,
    PORT,
    add_engine_options,
    add_key_options,
    add_model_options,
    add_registration_options,
    add_secrets_option,
    add_security_options,
    add_tracing_option,
    check_ranks,
    daemon_config,
    model_folder,
    sentence,
)
from paceline.gateway_options import DEFAULT_REGISTRY, add_gateway_options
from paceline.group_options import add_group_options, from_environment, group_fields
from paceline.operate_options import add_operator_commands
from paceline.transfer_bench.options import add_options as add_transfer_bench_options

DESCRIPTION = "Prefill/decode-disaggregated LLM serving whose pipeline-parallel ranks cannot drift apart."
EPILOG = "Try it: paceline up --ask 'What is the capital of France?'"


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output is gone, e.g. `paceline status | head`.
        sys.stderr.close()
        return 141


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paceline", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"paceline {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands)
    _add_status(commands)
    add_operator_commands(commands)
    _add_top(commands)
    _add_timeline(commands)
    _add_health(commands)
    _add_doctor(commands)
    _add_certs(commands)
    _add_replay(commands)
    _add_transfer_bench(commands)
    _add_bench(commands)
    _add_gateway(commands)
    for role in ("prefill", "decode"):
        _add_instance(commands, role)
    return parser


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "start a whole cluster on this machine: gateway, prefill and decode instances"
    parser = commands.add_parser("up", help=about, description=sentence(about) + ". Ctrl-C ends it.")
    group = parser.add_argument_group("cluster")
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--{role}-instances", type=AT_LEAST_ONE, default=1, metavar="N", help=f"{role} instances (default: 1)"
        )
        group.add_argument(
            f"--{role}-pp",
            type=AT_LEAST_ONE,
            default=2,
            metavar="P",
            help=f"pipeline ranks of each {role} instance (default: 2)",
        )
        group.add_argument(
            f"--{role}-layers",
            type=LAYERS,
            default="",
            metavar="A,B,…",
            help="layers of each rank (default: balanced by cost)",
        )
    group.add_argument("--host", default="127.0.0.1", help="address the gateway listens on (default: %(default)s)")
    group.add_argument("--port", type=PORT, default=8000, help="of the gateway; 0: any free one (default: %(default)s)")
    add_security_options(group)
    add_key_options(group)
    group.add_argument("--ask", metavar="QUESTION", help="ask this once the cluster is ready, then go on serving")
    _add_run_dir(group)
    add_gateway_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=_run_up)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "show every instance and rank: what it holds, what it does, how far it is"
    parser = commands.add_parser(
        "status", help=about, description=sentence(about) + ". Exit code 1 if an instance does not answer."
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    _add_asked(parser)
    parser.set_defaults(run=_run_status)


def _add_top(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "watch requests, tokens, pages, batches and bubbles of every rank, once a second"
    parser = commands.add_parser("top", help=about, description=sentence(about) + ". Ctrl-C ends it.")
    parser.add_argument("--once", action="store_true", help="one picture of one second, then exit")
    _add_asked(parser)
    parser.set_defaults(run=_run_top)


def _add_timeline(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "show what every rank did and when: a trace for Perfetto, or a table of bubbles"
    parser = commands.add_parser(
        "timeline", help=about, description=sentence(about) + ". Exit code 1 if an instance does not answer."
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a trace (Chrome's JSON format) there")
    parser.add_argument("--summary", action="store_true", help="print per rank how long it computed, and its bubbles")
    parser.add_argument(
        "--seconds", type=float, default=0.0, metavar="N", help="only the last N seconds (default: all that is kept)"
    )
    _add_asked(parser)
    parser.set_defaults(run=_run_timeline)


def _add_asked(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        type=ADDRESS,
        nargs="+",
        metavar="HOST:PORT",
        help="instances to ask (default: those of `paceline up`)",
    )
    parser.add_argument(
        "--registry", type=ADDRESS, metavar="HOST:PORT", help="ask all instances that the gateway there knows"
    )
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="for each instance (default: 3)")
    add_secrets_option(parser)
    _add_run_dir(parser)


def _add_health(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "ask one part whether it serves: exit code 0 if it does"
    parser = commands.add_parser("health", help=about, description=sentence(about) + ", 1 and a reason if not.")
    parser.add_argument(
        "target", nargs="?", metavar="HOST:PORT|URL",
        default=os.environ.get("PACELINE_HEALTH") or "http://127.0.0.1:8000/health",
        help="an instance's gRPC address or a gateway's health URL (default: $PACELINE_HEALTH or %(default)s)",
    )  # fmt: skip
    parser.add_argument("--live", action="store_true", help="any answer will do: loading and draining are no failures")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="in seconds (default: 3)")
    add_secrets_option(parser)
    parser.set_defaults(run=_run_health)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "check this machine: libraries, limits, devices, ports"
    parser = commands.add_parser("doctor", help=about, description=sentence(about) + ".")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=PORT, default=8000, help="that the gateway would use (default: 8000)")
    add_secrets_option(parser)
    parser.set_defaults(run=_run_doctor)


def _add_certs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "make the secrets that the processes of one cluster share: certificates and keys"
    parser = commands.add_parser(
        "certs", help=about,
        description=sentence(about) + ". Copy the folder to every host and name it with --secrets.",
    )  # fmt: skip
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write them, readable by you alone")
    parser.add_argument(
        "--name", action="append", default=[], metavar="HOST",
        help="host name or IP address that other gRPC clients will check; the cluster's own need none (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--days", type=AT_LEAST_ONE, default=3650, metavar="N", help="until they expire (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="replace those that are there")
    parser.set_defaults(run=_run_certs)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "replay what a rank decided, from its flight recording"
    parser = commands.add_parser(
        "replay", help=about, description=sentence(about) + ". Exit code 1 if the replay or the other rank differs."
    )
    parser.add_argument("file", metavar="FILE", help="a recording; the daemon's log names it when an instance stops")
    parser.add_argument("--until", type=AT_LEAST_ZERO, metavar="SEQ", help="stop after this log entry")
    parser.add_argument("--request", metavar="ID", help="show only what touched this request")
    parser.add_argument("--diff", metavar="FILE", help="another rank's recording: show where the two first differ")
    parser.set_defaults(run=_run_replay)


def _add_transfer_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "measure how fast KV moves between two processes here, beside what the machine could do"
    parser = commands.add_parser("transfer-bench", help=about, description=sentence(about) + ".")
    add_transfer_bench_options(parser)
    parser.set_defaults(run=_run_transfer_bench)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "measure a server that speaks OpenAI's API"
    parser = commands.add_parser("bench", help=about, description=sentence(about) + ".")
    kinds = parser.add_subparsers(dest="measure", required=True, metavar="KIND")
    for name, add, what in (
        ("serve", bench_options.add_serve, "put a load on it: latencies, throughputs, goodput"),
        ("compare", bench_options.add_compare, "put the same load on several, in turn: ratios to the first"),
        ("profile", bench_options.add_profile, "put a load on it and show where the time goes"),
    ):
        kind = kinds.add_parser(name, help=what, description=sentence(what) + ".")
        add(kind)
        kind.set_defaults(run=_run_bench)


def _add_gateway(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "run the OpenAI-compatible gateway"
    parser = commands.add_parser("gateway", help=about, description=sentence(about) + " in front of running instances.")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            type=ADDRESS,
            nargs="+",
            metavar="HOST:PORT",
            help=f"gRPC addresses of {role} instances that do not register",
        )
    parser.add_argument(
        "--registry",
        type=ADDRESS,
        metavar="HOST:PORT",
        help=f"where instances register (default: {DEFAULT_REGISTRY}; nowhere if instances are listed)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=PORT, default=8000, help="default: %(default)s")
    add_security_options(parser)
    add_model_options(parser)
    add_tracing_option(parser)
    add_gateway_options(parser)
    group = parser.add_argument_group("limits")
    add_key_options(group)
    group.add_argument("--request-timeout", type=float, default=600.0, metavar="S", help="in seconds (default: 600)")
    group.add_argument(
        "--shutdown-grace",
        type=float,
        default=10.0,
        metavar="S",
        help="for requests in flight at SIGTERM (default: 10)",
    )
    parser.set_defaults(run=_run_gateway)


def _add_instance(commands: argparse._SubParsersAction[argparse.ArgumentParser], role: str) -> None:
    about = f"run one {role} instance: its daemon and its pipeline ranks"
    parser = commands.add_parser(role, help=about, description=sentence(about) + ".")
    group = parser.add_argument_group("instance")
    group.add_argument(
        "--instance", default=f"{role}-0", metavar="NAME", help="unique in the cluster (default: %(default)s)"
    )
    group.add_argument(
        "--listen",
        type=ADDRESS,
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="of its gRPC server (default: %(default)s)",
    )
    group.add_argument(
        "--advertise",
        default=from_environment("PACELINE_ADVERTISE", ""),
        metavar="HOST",
        help="address that others reach it by (default: $PACELINE_ADVERTISE or the one it listens on)",
    )
    add_security_options(group)
    group.add_argument(
        "--metrics",
        type=ADDRESS_OR_NONE,
        default="",
        metavar="HOST:PORT",
        help="serve Prometheus metrics there (default: not)",
    )
    group.add_argument("--pp", type=AT_LEAST_ONE, default=1, metavar="P", help="pipeline ranks (default: 1)")
    group.add_argument(
        "--layers", type=LAYERS, default="", metavar="A,B,…", help="layers of each rank (default: by cost)"
    )
    add_registration_options(group)
    _add_run_dir(group)
    add_group_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=_run_instance)


def _add_run_dir(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--run-dir", type=Path, default=default_run_dir(), metavar="PATH",
        help="for sockets, logs and the record of what runs where (default: $PACELINE_RUN_DIR or .run)",
    )  # fmt: skip


def _run_up(options: argparse.Namespace) -> int:
    from paceline.up import up

    return asyncio.run(up(options))


def _run_status(options: argparse.Namespace) -> int:
    from paceline.asked import asked
    from paceline.status import status

    return asyncio.run(status(asked(options), options.json))


def _run_top(options: argparse.Namespace) -> int:
    from paceline.asked import asked
    from paceline.top import top

    return asyncio.run(top(asked(options), options.once))


def _run_timeline(options: argparse.Namespace) -> int:
    from paceline.asked import asked
    from paceline.timeline import timeline

    if options.out is None and not options.summary:
        raise SystemExit("paceline: timeline needs --out FILE, --summary, or both")
    return asyncio.run(timeline(asked(options), options.seconds, options.out, options.summary))


def _run_health(options: argparse.Namespace) -> int:
    from paceline.config import cluster_secrets
    from paceline.probe import probe

    return probe(options.target, options.timeout, options.live, cluster_secrets(options.secrets))


def _run_doctor(options: argparse.Namespace) -> int:
    from paceline.doctor import FAIL, run_checks

    failed = 0
    for check in run_checks(options.host, options.port, options.secrets):
        print(check, flush=True)
        failed += check.level == FAIL
    return 1 if failed else 0


def _run_certs(options: argparse.Namespace) -> int:
    from security.folder import make
    from security.secrets import SecretsError

    try:
        made = make(options.folder, options.name, options.days, options.force)
    except SecretsError as error:
        raise SystemExit(f"paceline: {error}") from error
    print(f"secrets {made.fingerprint}, good until {made.expires:%Y-%m-%d}; use them with --secrets {made.folder}")
    return 0


def _run_replay(options: argparse.Namespace) -> int:
    from paceline.replay import run

    return run(options.file, options.until, options.diff, options.request)


def _run_transfer_bench(options: argparse.Namespace) -> int:
    from paceline.transfer_bench.run import run

    return run(options)


def _run_bench(options: argparse.Namespace) -> int:
    match options.measure:
        case "serve":
            from bench.serve import serve

            return serve(options)
        case "compare":
            from bench.compare import compare

            return compare(options)
        case _:
            from bench.breakdown import profile

            return profile(options)


def _run_gateway(options: argparse.Namespace) -> int:
    from paceline.start import run_gateway

    return run_gateway(options, model_folder(options))


def _run_instance(options: argparse.Namespace) -> int:
    from paceline.start import run_instance

    model = model_folder(options)
    check_ranks(model, ("--layers", options.layers, "--pp", options.pp))
    return run_instance(daemon_config(options, model, **group_fields(options)))


def _version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
