"""The command line means what it says, and says it fast."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.app import parse_arguments
from paceline.cli import build_parser
from paceline.config import free_ports, parse_address, parse_layers, parse_size, port_problem
from paceline.engine_options import SHARED, daemon_config
from paceline.local_plan import plan
from paceline.start import gateway_arguments
from pipeline.io.instance_config import DaemonConfig

MODEL = Path("/models/tiny")


def parse(line: str):  # type: ignore[no-untyped-def]
    return build_parser().parse_args(shlex.split(line))


def test_help_is_fast_because_nothing_heavy_is_imported() -> None:
    script = (
        "import sys; from paceline.cli import build_parser; build_parser().format_help(); "
        "print([m for m in ('torch', 'grpc', 'zmq', 'aiohttp', 'numpy', 'engine') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONPATH": ".:proto"}
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["up", "status", "doctor", "replay", "gateway", "prefill", "decode"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(f"{command} --help")
    assert ended.value.code == 0
    assert len(capsys.readouterr().out) > 200


def test_options_become_the_daemons_configuration(tmp_path: Path) -> None:
    options = parse(
        f"decode --instance d7 --listen 0.0.0.0:9 --advertise 10.0.0.7 --pp 4 --layers 8,7,8,7 --run-dir {tmp_path} "
        "--dtype bfloat16 --page-size 32 --pages 99 --kv-memory 2G --chunk-size 64 --async-depth 0 "
        "--transfer-backend nixl --model-name m"
    )
    config = daemon_config(options, MODEL)
    assert config == DaemonConfig(
        role="decode", instance="d7", listen="0.0.0.0:9", advertise="10.0.0.7", pp_size=4, layers="8,7,8,7",
        run_dir=f"{tmp_path}/d7", dtype="bfloat16", page_size=32, pages=99, kv_bytes=2 << 30, chunk_size=64,
        async_depth=0, transfer_backend="nixl", model_name="m", model=str(MODEL),
    )  # fmt: skip


def test_the_commands_defaults_are_the_daemons() -> None:
    ours = daemon_config(parse("prefill"), MODEL)
    theirs = DaemonConfig(instance="x", model="x", run_dir="x")
    differing = {field for _, field in SHARED if getattr(ours, field) != getattr(theirs, field)}
    assert differing == {"kv_bytes"}  # a laptop runs four ranks


def test_up_starts_parts_that_parse_to_what_it_was_told(tmp_path: Path) -> None:
    options = parse(
        "up --prefill-instances 2 --prefill-pp 3 --decode-layers 20,10 --page-size 8 --kv-memory 64M --host 0.0.0.0 "
        "--stage-timeout 7.5 --transfer-device mlx5_0"
    )
    made = plan(options, MODEL, tmp_path, 4321)
    assert [spec.name for spec in made.specs] == ["prefill-0", "prefill-1", "decode-0", "gateway"]
    assert made.url == "http://127.0.0.1:4321"
    configs = []
    for spec in made.specs[:-1]:
        assert spec.command[1:3] == ("-m", "paceline.cli")
        configs.append(daemon_config(build_parser().parse_args(spec.command[3:]), MODEL))
    for config, spec in zip(configs, made.specs[:-1], strict=True):
        assert (config.instance, config.role, config.listen) == (spec.name, spec.role, spec.address)
        assert (config.page_size, config.kv_bytes, config.stage_timeout) == (8, 64 << 20, 7.5)
        assert config.transfer_device == "mlx5_0"
    assert [config.pp_size for config in configs] == [3, 3, 2]
    assert [config.layers for config in configs] == ["", "", "20,10"]
    assert len({config.listen for config in configs}) == 3

    gateway = build_parser().parse_args(made.specs[-1].command[3:])
    told = parse_arguments(gateway_arguments(gateway, MODEL))
    assert told.prefill == (made.specs[0].address, made.specs[1].address)
    assert told.decode == (made.specs[2].address,)
    assert (told.host, told.port, told.model, told.served_name) == ("0.0.0.0", 4321, MODEL, "tiny")
    assert told.shutdown_grace_s == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("up --prefill-pp 0", "must be at least 1"),
        ("up --pages -1", "cannot be negative"),
        ("up --kv-memory lots", "not a size: 'lots' (examples: 512M"),
        ("prefill --listen 9000", "not an address: '9000' (example: 127.0.0.1:9000)"),
        ("prefill --layers 3,x", "not a layer split: '3,x' (example: 19,11)"),
        ("up --transfer-backend pigeon", "invalid choice: 'pigeon'"),
        ("gateway --prefill a:1", "the following arguments are required: --decode"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_mistakes_are_explained(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes_addresses_and_layers() -> None:
    assert [parse_size(text) for text in ("4096", "1k", "1.5GiB", "512 MB", "2T")] == [
        4096, 1024, 3 << 29, 512 << 20, 2 << 40,
    ]  # fmt: skip
    assert parse_address("[::1]:80") == "[::1]:80"
    assert parse_layers("8,7") == (8, 7)
    for parse_wrong, text in ((parse_size, "-1"), (parse_address, "host:99999"), (parse_layers, "0,3")):
        with pytest.raises(ValueError, match="not a"):
            parse_wrong(text)


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    assert all(port_problem("127.0.0.1", port) == "" for port in ports)
