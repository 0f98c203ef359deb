"""The options that shape an instance, the same for `prefill`, `decode` and `up`.

In: parsed arguments. Out: the daemon's configuration, or the command line of a child that will parse to
the same. The names of the options follow the fields of `DaemonConfig`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import parse_address, parse_layers, parse_port, parse_size

if TYPE_CHECKING:
    from pipeline.io.instance_config import DaemonConfig

BACKENDS = ("auto", "mooncake", "nixl", "stream")
DTYPES = ("float32", "bfloat16", "float16")

# Option, field of DaemonConfig.
SHARED = (
    ("model_name", "model_name"),
    ("dtype", "dtype"),
    ("batch_invariant", "batch_invariant"),
    ("page_size", "page_size"),
    ("pages", "pages"),
    ("kv_memory", "kv_bytes"),
    ("host_memory", "host_bytes"),
    ("chunk_size", "chunk_size"),
    ("max_batch_rows", "max_batch_rows"),
    ("async_depth", "async_depth"),
    ("max_model_len", "max_model_len"),
    ("max_queue", "max_queue"),
    ("transfer_backend", "transfer_backend"),
    ("transfer_device", "transfer_device"),
    ("push", "push"),
    ("checksum", "checksum"),
    ("request_timeout", "request_timeout"),
    ("ring_timeout", "ring_timeout"),
    ("tick_timeout", "tick_timeout"),
    ("progress_timeout", "progress_timeout"),
    ("stage_timeout", "stage_timeout"),
    ("drain_timeout", "drain_timeout"),
    ("load_timeout", "load_timeout"),
    ("otlp", "otlp"),
)


def sentence(about: str) -> str:
    """With a capital first letter; names in it keep theirs."""
    return about[0].upper() + about[1:]


def checked(parse: Any, name: str) -> Any:
    """An argparse type whose message is the parser's own."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    convert.__name__ = name
    return convert


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"must be at least 1, not {value}")
    return value


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(f"cannot be negative, but is {value}")
    return value


AT_LEAST_ONE = checked(positive, "number")
AT_LEAST_ZERO = checked(natural, "number")
SIZE = checked(parse_size, "size")
ADDRESS = checked(parse_address, "address")
ADDRESS_OR_NONE = checked(lambda text: parse_address(text) if text else "", "address")
PORT = checked(parse_port, "port")


def layer_split(text: str) -> str:
    if text:
        parse_layers(text)
    return text


LAYERS = checked(layer_split, "layers")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="Hugging Face folder with the weights (default: SmolLM2-135M-Instruct)",
    )
    group.add_argument("--model-name", default="", metavar="NAME", help="name clients use (default: the folder's)")


def add_secrets_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--secrets", default=os.environ.get("PACELINE_SECRETS", ""), metavar="DIR",
        help="the cluster's, made by `paceline certs` (default: $PACELINE_SECRETS, or none)",
    )  # fmt: skip


def add_security_options(parser: argparse._ActionsContainer) -> None:
    add_secrets_option(parser)
    parser.add_argument(
        "--insecure", action="store_true", help="let others than this host reach it without secrets or keys"
    )


def add_key_options(parser: argparse._ActionsContainer) -> None:
    """Of the gateway, and of whoever starts one."""
    parser.add_argument(
        "--api-keys", default="", metavar="FILE", help="API keys, one per line: KEY [NAME] (default: everyone may ask)"
    )
    parser.add_argument(
        "--key-requests-per-second", type=float, default=0.0, metavar="N",
        help="of one API key; more get 429 (default: any number)",
    )  # fmt: skip
    parser.add_argument(
        "--key-inflight", type=AT_LEAST_ZERO, default=0, metavar="N",
        help="requests of one API key at once; more get 429 (default: up to --max-inflight)",
    )  # fmt: skip


def repeat_security(options: argparse.Namespace) -> Iterator[str]:
    """As a child's command line. Explicit, so that the environment cannot make it differ."""
    yield from ("--secrets", str(Path(options.secrets).absolute()) if options.secrets else "")
    if options.insecure:
        yield "--insecure"


def repeat_keys(options: argparse.Namespace) -> Iterator[str]:
    if options.api_keys:
        yield from ("--api-keys", str(Path(options.api_keys).absolute()))
    yield from ("--key-requests-per-second", str(options.key_requests_per_second))
    yield from ("--key-inflight", str(options.key_inflight))


def add_registration_options(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--gateway",
        type=ADDRESS,
        action="append",
        metavar="HOST:PORT",
        help="registry of a gateway; a name means all of its addresses; may be repeated (default: $PACELINE_GATEWAY)",
    )


def gateways(options: argparse.Namespace) -> tuple[str, ...]:
    """Of the command line, or else of the environment, where commas or spaces lie between several."""
    given = options.gateway or os.environ.get("PACELINE_GATEWAY", "").replace(",", " ").split()
    try:
        return tuple(dict.fromkeys(parse_address(address) for address in given))
    except ValueError as error:
        raise SystemExit(f"paceline: PACELINE_GATEWAY: {error}") from error


def add_tracing_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("tracing").add_argument(
        "--otlp", type=ADDRESS_OR_NONE, default="", metavar="HOST:PORT",
        help="send OpenTelemetry traces to this OTLP/gRPC collector (default: none; needs the extra otel)",
    )  # fmt: skip


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and KV (default: %(default)s)")
    group.add_argument(
        "--batch-invariant", action="store_true",
        help="a request's logits do not depend on the requests beside it, to the bit; float32 always has this",
    )  # fmt: skip
    group.add_argument(
        "--page-size", type=AT_LEAST_ONE, default=16, metavar="N", help="token positions per KV page (default: 16)"
    )
    group.add_argument(
        "--pages",
        type=AT_LEAST_ZERO,
        default=0,
        metavar="N",
        help="KV pages per rank (default: as many as fit in --kv-memory)",
    )
    group.add_argument(
        "--kv-memory", type=SIZE, default=512 << 20, metavar="SIZE", help="KV memory per rank, e.g. 2G (default: 512M)"
    )
    group.add_argument(
        "--host-memory", type=SIZE, default=1 << 30, metavar="SIZE",
        help="host memory per decode rank for the KV of retracted requests (default: 1G)",
    )  # fmt: skip
    group.add_argument(
        "--chunk-size",
        type=AT_LEAST_ONE,
        default=512,
        metavar="N",
        help="prompt tokens computed at a time (default: 512)",
    )
    group.add_argument(
        "--max-batch-rows", type=AT_LEAST_ONE, default=64, metavar="N", help="requests in one microbatch (default: 64)"
    )
    group.add_argument(
        "--async-depth", type=AT_LEAST_ZERO, default=1, metavar="N",
        help="microbatches in flight beyond the number of ranks (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-model-len", type=AT_LEAST_ZERO, default=0, metavar="N", help="prompt plus output (default: the model's)"
    )
    group.add_argument(
        "--max-queue",
        type=AT_LEAST_ONE,
        default=256,
        metavar="N",
        help="requests known at once; more are refused (default: 256)",
    )
    group = parser.add_argument_group("KV transfer")
    group.add_argument(
        "--transfer-backend",
        choices=BACKENDS,
        default="auto",
        help="library that moves KV (default: auto; both sides alike)",
    )
    group.add_argument("--transfer-device", default="", metavar="NAME", help="RDMA device, e.g. mlx5_0 (default: any)")
    group.add_argument(
        "--push", choices=("layer", "chunk"), default="layer",
        help="prefill sends KV after each layer of a chunk, or after the whole chunk (default: layer)",
    )  # fmt: skip
    group.add_argument(
        "--checksum", choices=("xxh3", "none"), default="xxh3",
        help="of each KV page that is handed over; both sides alike (default: xxh3)",
    )  # fmt: skip
    add_tracing_option(parser)
    group = parser.add_argument_group("deadlines, in seconds")
    group.add_argument("--request-timeout", type=float, default=600.0, metavar="S", help="of a request (default: 600)")
    group.add_argument(
        "--ring-timeout",
        type=float,
        default=8.0,
        metavar="S",
        help="of silence after which a rank counts as stuck (default: 8)",
    )
    group.add_argument(
        "--tick-timeout", type=float, default=60.0, metavar="S",
        help="of one microbatch, after which the instance counts as hung (default: 60)",
    )  # fmt: skip
    group.add_argument(
        "--progress-timeout", type=float, default=5.0, metavar="S",
        help="of one microbatch, after which the health service says so (default: 5)",
    )  # fmt: skip
    group.add_argument(
        "--stage-timeout", type=float, default=30.0, metavar="S", help="of each stage of a hand-over (default: 30)"
    )
    group.add_argument(
        "--drain-timeout", type=float, default=20.0, metavar="S",
        help="that open requests get to end after SIGTERM; a second one ends them at once (default: 20)",
    )  # fmt: skip
    group.add_argument(
        "--load-timeout", type=float, default=600.0, metavar="S", help="of loading the model (default: 600)"
    )


def default_model_folder() -> Path:
    from engine.smollm2 import DEFAULT_MODEL_NAME, cache_folder

    return cache_folder() / DEFAULT_MODEL_NAME


def model_folder(options: argparse.Namespace) -> Path:
    """Ends the command with a message if there is no model there."""
    folder: Path = options.model or default_model_folder()
    if not (folder / "config.json").is_file():
        hint = "" if options.model else "; make it with `python -m engine.smollm2`"
        raise SystemExit(f"paceline: no model in {folder} (config.json is missing){hint}")
    return folder.absolute()


def check_ranks(model: Path, *splits: tuple[str, str, str, int]) -> None:
    """Ends the command if the model's layers cannot be shared out so: (flag, layers, flag, ranks) of each split."""
    from engine.checkpoint import parse_split, read_spec

    for layers_flag, layers, ranks_flag, ranks in splits:
        if layers and (count := len(parse_layers(layers))) != ranks:
            raise SystemExit(
                f"paceline: {layers_flag} gives {count} rank{'s' * (count != 1)}, {ranks_flag} says {ranks}"
            )
    try:
        total = read_spec(model).layers
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise SystemExit(f"paceline: the model in {model} cannot be used: {what}") from error
    for layers_flag, layers, ranks_flag, ranks in splits:
        if ranks > total:
            raise SystemExit(
                f"paceline: {ranks_flag} {ranks} is too many: the model has {total} layers and every rank needs one"
            )
        try:
            if layers:
                parse_split(layers, total)
        except ValueError as error:
            raise SystemExit(f"paceline: {layers_flag}: {error}") from error


def daemon_config(options: argparse.Namespace, model: Path, **more: Any) -> DaemonConfig:
    """`more` are fields of options that only instances by themselves have."""
    from pipeline.io.instance_config import DaemonConfig

    return DaemonConfig(
        role=options.command,
        instance=options.instance,
        model=str(model),
        run_dir=str((options.run_dir / options.instance).absolute()),
        listen=options.listen,
        advertise=options.advertise,
        secrets=str(Path(options.secrets).absolute()) if options.secrets else "",
        insecure=options.insecure,
        gateways=gateways(options),
        metrics=options.metrics,
        pp_size=options.pp,
        layers=options.layers,
        **{field: getattr(options, option) for option, field in SHARED},
        **more,
    )


def repeat_options(options: argparse.Namespace) -> Iterator[str]:
    """The shared engine options as a child's command line."""
    for option, _ in SHARED:
        value = getattr(options, option)
        if value is not False and value != "":
            yield f"--{option.replace('_', '-')}"
            if value is not True:
                yield str(value)
