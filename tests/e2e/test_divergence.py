"""A13 with real processes: a rank that decides differently stops its instance at once, and the dump explains it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline_proto.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]
ROOT = Path(__file__).parents[2]


class Instance:
    """A daemon without `paceline up`, so that its rank module can be chosen."""

    def __init__(self, role: str, folder: Path, model: Path, **config: Any) -> None:
        self.name, self.folder = f"{role}-0", folder / role
        self.folder.mkdir()
        path = self.folder / "config.json"
        settings = {"instance": self.name, "model": str(model), "run_dir": str(self.folder / "run"), "pp_size": 2}
        path.write_text(json.dumps(settings | config))
        self.log = self.folder / "log"
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"}
        with self.log.open("w") as out:
            command = [sys.executable, "-m", f"{role}.io.daemon", str(path)]
            self.process = subprocess.Popen(command, stderr=out, cwd=ROOT, env=env)

    def wait_for(self, pattern: str, seconds: float = 90.0) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.log.read_text())):
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        return found

    @property
    def address(self) -> str:
        return self.wait_for(r"ready: .* at (\S+),").group(1)


@pytest.fixture
def pair(tiny: Path, tmp_path: Path) -> Iterator[tuple[Instance, Instance]]:
    made = [
        Instance("prefill", tmp_path, tiny),
        Instance("decode", tmp_path, tiny, rank_module="tests.e2e.faulty_rank"),
    ]
    yield made[0], made[1]
    for instance in made:
        instance.process.terminate()
        instance.process.wait(20)


def generate(prefill: Instance, decode: Instance, number: int) -> list[str]:
    """How both sides of one request ended: outcome kinds, or the reason of an error."""
    ends = []
    calls = []
    for here, there in ((prefill, decode), (decode, prefill)):
        peer = common_pb2.InstanceRef(instance_id=there.name, address=there.address)
        sampling = generation_pb2.SamplingParams(max_tokens=20, top_p=1, repetition_penalty=1)
        request = generation_pb2.GenerateRequest(
            request_id=f"r{number}", prompt_ids=range(5, 45), sampling=sampling, peer=peer
        )
        channel = grpc.insecure_channel(here.address)
        calls.append(generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60))
    for call in calls:
        for event in call:
            if event.HasField("outcome"):
                kind = generation_pb2.Outcome.Kind.Name(event.outcome.kind)
                ends.append(event.outcome.reason or kind)
    return ends


def test_a_divergence_stops_the_instance_and_replays_to_the_same_difference(
    pair: tuple[Instance, Instance], capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = pair
    assert generate(prefill, decode, 1) == ["KIND_HANDED_OVER", "KIND_LENGTH"]
    reason = ""
    for number in range(2, 6):
        ends = generate(prefill, decode, number)
        if ends[-1] != "KIND_LENGTH":
            reason = ends[-1]
            break
    assert "state differs after seq" in reason and "rank 1" in reason
    assert re.search(r"first difference: seq \d+, decision \d+: \('pages', 'r\d'", reason), reason
    decode.wait_for("epoch 1 failed")
    dump = Path(decode.wait_for(r"flight recorder written to (\S+)").group(1))
    assert dump.name == "decode-0-e1-r1.dump"
    healthy = dump.with_name("decode-0-e1-r0.a.flight")

    from paceline import replay

    assert replay.run(str(dump), None, str(healthy), None) == 1
    told = capsys.readouterr().out
    first = re.search(r"FIRST DIFFERENCE, rank 1 against rank 0: seq (\d+), .*'pages', 'r\d'", told)
    assert first is not None, told
    assert replay.run(str(healthy), None, None, None) == 0, "rank 0 decided as its log says"
    capsys.readouterr()
    assert replay.run(str(dump), None, None, None) == 1, "rank 1 did not"
    assert f"DIFFERS from the recording at seq {first.group(1)}" in capsys.readouterr().out
    assert int(first.group(1)) == int(re.search(r"after seq (\d+)", reason).group(1)), "caught at the very next entry"
