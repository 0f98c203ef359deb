"""The command line means what it says, and says it fast."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from consensus import recorder
from consensus.recorder import Header
from gateway import policies
from gateway.app import parse_arguments
from gateway.config import GatewayConfig
from paceline import gateway_options
from paceline.cli import build_parser, main
from paceline.config import free_ports, parse_address, parse_layers, parse_size, port_problem
from paceline.engine_options import SHARED, check_ranks, daemon_config
from paceline.gateway_options import DEFAULT_REGISTRY, gateway_arguments
from paceline.group_options import group_fields
from paceline.local_plan import Plan, plan
from paceline.up import first_key
from pipeline import snapshot
from pipeline.io.instance_config import DaemonConfig
from tests.pipeline.ring import Pair

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


@pytest.mark.parametrize(
    "command",
    [
        "up", "status", "health", "top", "timeline", "drain", "resume", "dump", "log-level", "doctor", "certs", "bench",
        "replay", "gateway", "prefill", "decode",
    ],
)  # fmt: skip
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(f"{command} --help")
    assert ended.value.code == 0
    assert len(capsys.readouterr().out) > 200


def test_options_become_the_daemons_configuration(tmp_path: Path) -> None:
    options = parse(
        f"decode --instance d7 --listen 0.0.0.0:9 --advertise 10.0.0.7 --pp 4 --layers 8,7,8,7 --run-dir {tmp_path} "
        "--dtype bfloat16 --page-size 32 --pages 99 --kv-memory 2G --chunk-size 64 --async-depth 0 "
        "--transfer-backend nixl --model-name m --secrets s --insecure --metrics 127.0.0.1:9090 --otlp otel:4317"
    )
    config = daemon_config(options, MODEL)
    assert config == DaemonConfig(
        role="decode", instance="d7", listen="0.0.0.0:9", advertise="10.0.0.7", secrets=str(Path("s").absolute()), insecure=True, pp_size=4, layers="8,7,8,7",
        run_dir=f"{tmp_path}/d7", dtype="bfloat16", page_size=32, pages=99, kv_bytes=2 << 30, chunk_size=64,
        async_depth=0, transfer_backend="nixl", model_name="m", model=str(MODEL),
        metrics="127.0.0.1:9090", otlp="otel:4317",
    )  # fmt: skip


def test_a_group_is_described_by_options_or_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SIZE", "2"), ("INDEX", "1")):
        monkeypatch.setenv(f"PACELINE_GROUP_{name}", value)
    monkeypatch.setenv("PACELINE_LEADER", "p-0.p:9000")
    monkeypatch.setenv("PACELINE_ADVERTISE", "10.0.0.5")
    told = group_fields(parse("prefill --first-epoch 7"))
    assert told == {"group_size": 2, "group_index": 1, "leader": "p-0.p:9000", "ring_ports": 7800, "first_epoch": 7}
    assert parse("prefill").advertise == "10.0.0.5"
    typed = group_fields(parse("prefill --group-size 3 --group-index 2 --leader a:1 --ring-ports 9100"))
    assert (typed["group_size"], typed["group_index"], typed["leader"], typed["ring_ports"]) == (3, 2, "a:1", 9100)
    monkeypatch.setenv("PACELINE_GROUP_SIZE", "two")
    with pytest.raises(SystemExit):
        parse("prefill")


def test_epochs_grow_also_where_the_run_directory_is_lost() -> None:
    before = int(time.time())
    assert before <= group_fields(parse("decode"))["first_epoch"] <= int(time.time())


def test_gateways_come_from_the_command_line_or_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_GATEWAY", "a:1,b:2 a:1")
    assert daemon_config(parse("prefill"), MODEL).gateways == ("a:1", "b:2")
    assert daemon_config(parse("prefill --gateway c:3 --gateway d:4"), MODEL).gateways == ("c:3", "d:4")
    monkeypatch.setenv("PACELINE_GATEWAY", "a")
    with pytest.raises(SystemExit, match="PACELINE_GATEWAY: not an address: 'a'"):
        daemon_config(parse("prefill"), MODEL)
    monkeypatch.delenv("PACELINE_GATEWAY")
    assert daemon_config(parse("prefill"), MODEL).gateways == ()


@pytest.mark.parametrize(
    ("line", "registry"),
    [
        ("gateway", DEFAULT_REGISTRY),
        ("gateway --prefill a:1 --decode b:2", ""),
        ("gateway --prefill a:1 --registry c:3", "c:3"),
    ],
)
def test_a_gateway_with_lists_needs_no_registry(line: str, registry: str) -> None:
    assert parse_arguments(gateway_arguments(parse(line), MODEL)).registry == registry


def test_the_gateways_choices_and_defaults_are_the_commands() -> None:
    told = parse_arguments(gateway_arguments(parse("gateway"), MODEL))
    assert told == GatewayConfig(model=MODEL, registry=DEFAULT_REGISTRY)
    assert gateway_options.POLICIES == policies.POLICIES


def test_the_commands_defaults_are_the_daemons() -> None:
    ours = daemon_config(parse("prefill"), MODEL)
    theirs = DaemonConfig(instance="x", model="x", run_dir="x")
    differing = {field for _, field in SHARED if getattr(ours, field) != getattr(theirs, field)}
    assert differing == {"kv_bytes"}  # a laptop runs four ranks


def test_up_starts_parts_that_parse_to_what_it_was_told(tmp_path: Path) -> None:
    options = parse(
        "up --prefill-instances 2 --prefill-pp 3 --decode-layers 20,10 --page-size 8 --kv-memory 64M --host 0.0.0.0 "
        "--stage-timeout 7.5 --transfer-device mlx5_0 --insecure --api-keys k --key-inflight 3 "
        "--key-requests-per-second 1.5 --resumes 7 --resume-wait 9 --policy session"
    )

    async def planned() -> Plan:  # its probes want an event loop
        return plan(options, MODEL, tmp_path, 4321)

    made = asyncio.run(planned())
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
    assert {config.gateways for config in configs} == {(told.registry,)}
    assert (told.prefill, told.decode) == ((), ()), "they register"
    assert (told.resumes, told.resume_wait_s, told.policy) == (7, 9.0, "session")
    assert (told.host, told.port, told.model, told.served_name) == ("0.0.0.0", 4321, MODEL, "tiny")
    assert told.shutdown_grace_s == 5
    assert (told.insecure, told.api_keys, told.secrets) == (True, str(Path("k").absolute()), "")
    assert (told.key_inflight, told.key_requests_per_s) == (3, 1.5)
    assert all(config.insecure for config in configs)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("up --prefill-pp 0", "must be at least 1"),
        ("up --pages -1", "cannot be negative"),
        ("up --port 99999", "argument --port: not a port: '99999' (0 to 65535)"),
        ("gateway --prefill a:1 --decode a:2 --port -1", "argument --port: not a port: '-1' (0 to 65535)"),
        ("up --kv-memory lots", "not a size: 'lots' (examples: 512M"),
        ("prefill --listen 9000", "not an address: '9000' (example: 127.0.0.1:9000)"),
        ("prefill --metrics 9000", "argument --metrics: not an address: '9000' (example: 127.0.0.1:9000)"),
        ("gateway --prefill a:1 --decode a:2 --otlp here", "argument --otlp: not an address: 'here'"),
        ("prefill --layers 3,x", "not a layer split: '3,x' (example: 19,11)"),
        ("up --transfer-backend pigeon", "invalid choice: 'pigeon'"),
        ("gateway --policy luck", "invalid choice: 'luck'"),
        ("decode --gateway here", "not an address: 'here'"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_mistakes_are_explained(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def thirty_layers(tmp_path: Path) -> Path:
    config = {
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "eos_token_id": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("up --port 0 --prefill-layers 10,10,10", "--prefill-layers gives 3 ranks, --prefill-pp says 2"),
        ("up --port 0 --decode-layers 30", "--decode-layers gives 1 rank, --decode-pp says 2"),
        (
            "up --port 0 --decode-layers 10,10",
            "--decode-layers: layer split '10,10' adds up to 20, but the model has 30",
        ),
        ("up --port 0 --decode-pp 31", "--decode-pp 31 is too many: the model has 30 layers and every rank needs one"),
        ("prefill --layers 15,15", "--layers gives 2 ranks, --pp says 1"),
        ("decode --layers 15,14 --pp 2", "--layers: layer split '15,14' adds up to 29, but the model has 30 layers"),
        ("decode --pp 99", "--pp 99 is too many: the model has 30 layers and every rank needs one"),
    ],
)
def test_a_split_that_the_model_cannot_have_is_said_before_anything_starts(
    line: str, message: str, thirty_layers: Path
) -> None:
    run = thirty_layers / "run"
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(line), "--model", str(thirty_layers), "--run-dir", str(run)])
    assert message in str(ended.value.code)
    assert not (run / "logs").exists()


def test_a_split_that_fits_is_no_problem(thirty_layers: Path) -> None:
    check_ranks(thirty_layers, ("--prefill-layers", "20,10", "--prefill-pp", 2), ("--layers", "", "--pp", 30))


def test_a_model_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(SystemExit, match=r"the model in .* cannot be used: model_type 'abacus' is not supported"):
        check_ranks(tmp_path, ("--layers", "", "--pp", 1))


def test_make_hands_on_a_question_as_it_is() -> None:
    """`make -n` shows that the question is no part of the command; its text is in the environment."""
    question = """say "hi", it's $5 `id` $(HOME)"""
    script = 'include Makefile\nshow: export ASK := $(ASK)\nshow:\n\t@printf %s "$$ASK"\n'
    for arguments, environment in (([f"ASK={question}"], {}), ([], {"ASK": question})):
        shown = subprocess.run(
            ["make", "-f", "-", "show", *arguments], input=script, capture_output=True, text=True, check=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        assert shown.stdout == question
        planned = subprocess.run(
            ["make", "-n", "run", *arguments], capture_output=True, text=True, check=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        assert 'up --ask="$ASK"' in planned.stdout


def test_a_file_that_is_no_recording_is_said(tmp_path: Path) -> None:
    (tmp_path / "photo").write_bytes(b"\x89PNG not a recording at all")
    for name in ("photo", "empty"):
        (tmp_path / name).touch()
        with pytest.raises(SystemExit, match=rf"^paceline: \S+/{name} is not a flight recording \([^()]+\)$"):
            main(["replay", str(tmp_path / name)])
    with pytest.raises(SystemExit, match=r"^paceline: cannot read \S+/none: No such file or directory$"):
        main(["replay", str(tmp_path / "none")])


def test_a_request_that_the_recording_does_not_know_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair(7, 1, 1)
    start = msgspec.msgpack.encode(snapshot.take(pair.decode.cores[0].replica))
    pair.submit("r", prompt=9, out=3)
    pair.run()
    records = pair.decode.cores[0].recorder.records()
    file = tmp_path / "decode.flight"
    file.write_bytes(b"".join(map(recorder.frame, (Header("decode", "D", 1, 0, start), *records))))
    assert main(["replay", str(file), "--request", "r"]) == 0
    assert " open r " in capsys.readouterr().out
    assert main(["replay", str(file), "--request", "s"]) == 1
    assert capsys.readouterr().err == "nothing touched request s in this recording\n"
    assert main(["replay", str(file), "--request", "r", "--until", "0"]) == 1
    assert capsys.readouterr().err == "nothing touched request r up to seq 0\n"


def test_a_timeline_for_nobody_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="timeline needs --out FILE, --summary, or both"):
        main(["timeline", "--address", "127.0.0.1:1"])
    with pytest.raises(SystemExit, match="no cluster runs in"):
        main(["timeline", "--summary", "--run-dir", str(tmp_path)])
    assert main(["timeline", "--summary", "--address", "127.0.0.1:1", "--timeout", "0.5"]) == 1
    assert capsys.readouterr().err == "paceline: 127.0.0.1:1: no answer\n"


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


def test_up_off_loopback_needs_keys_or_insistence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"would listen on 0.0.0.0.*--api-keys FILE.*--insecure"):
        first_key(parse("up --host 0.0.0.0"))
    assert first_key(parse("up --host 0.0.0.0 --insecure")) == first_key(parse("up")) == ""
    (keys := tmp_path / "keys").write_text("first-key-0123456789\nsecond-key-0123456789")
    assert first_key(parse(f"up --host 0.0.0.0 --api-keys {keys}")) == "first-key-0123456789"
    with pytest.raises(SystemExit, match="cannot be read"):
        first_key(parse(f"up --api-keys {tmp_path / 'none'}"))
