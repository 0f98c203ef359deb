"""`python -m bench.engines`: inference engines on the same weights in float32, one thread each, asked for the same.

    python -m bench.engines --install
    python -m bench.engines --rounds 5 --json engines.json

In: engines, cases, a model folder. Out: per case and engine the figure, its ratio to ours with the interval that
`paceline bench compare` gives, and whether all gave the same tokens. Exit code 1 if ours is slower than the best of
vLLM and transformers in a case, if tokens differ, or if idle engines used the processor; 2 if an engine failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.compare import table
from bench.engines.cases import CASES
from bench.engines.engines import HERE, OURS, engines, peers_folder
from bench.engines.install import INSTALLERS, InstallError, install, is_installed
from bench.engines.process import EngineError, EngineProcess
from bench.engines.rounds import Round, run_rounds
from bench.engines.verdict import MOST_IDLE, answers_of, disagreements, idle_share, lines_of, slower_than, wall_lines
from bench.prompts import PromptError, lexicon_of, load_tokenizer

NAMES = tuple(engines(peers_folder()))


def measure(options: argparse.Namespace) -> list[Round]:
    """Raises `EngineError`, or `PromptError` if the model's tokenizer has too few plain words."""
    known = {name: engine for name, engine in engines(peers_folder()).items() if name in (OURS, *options.engines)}
    plan = {CASES[case]: [name for name, engine in known.items() if case in engine.cases] for case in options.cases}
    lexicon = lexicon_of(load_tokenizer(options.model))
    environment = {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parents[1] / "proto")])}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-engines-")))
        processes = {}
        for name, engine in known.items():
            if any(name in names for names in plan.values()):
                command = [word.format(model=options.model) for word in engine.command]
                processes[name] = EngineProcess(name, command, environment, logs / name)
                stack.callback(processes[name].stop)
        for name, process in processes.items():
            print(f"{name}: {process.wait_ready()}", file=sys.stderr, flush=True)
        return run_rounds(processes, plan, options.rounds, options.seed, lexicon)


def report(options: argparse.Namespace, rounds: list[Round]) -> int:
    cases = [CASES[name] for name in options.cases]
    lines = lines_of(rounds, cases, options.seed)
    judged = [name for name, engine in engines(peers_folder()).items() if engine.judged]
    slower = [text for case in cases if (text := slower_than(lines, case, judged))]
    different = [text for case in cases for text in disagreements(rounds, case)]
    idle = idle_share(rounds)
    print("\n".join(table(lines, options.rounds)))
    print("\nby the clock, median:\n" + "\n".join(line for case in cases for line in wall_lines(rounds, case)))
    print(f"\n{answers_of(rounds)} answers; " + ("other tokens:" if different else "the same tokens by all engines"))
    print("\n".join(different), end="\n" if different else "")
    print(f"engines that were not asked used {idle:.2%} of a core" + (": too much" if idle > MOST_IDLE else ""))
    print("\n".join(slower) or "ours is at least as fast as the best of vLLM and transformers in every case")
    if options.json is not None:
        body = {"options": vars(options), "lines": lines, "rounds": rounds, "idle_share": idle}
        encoded = msgspec.json.encode(body, enc_hook=str)
        options.json.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    return int(bool(slower or different or idle > MOST_IDLE))


def main() -> int:
    default_model = peers_folder().parent / "SmolLM2-135M-Instruct"
    parser = argparse.ArgumentParser(
        prog="python -m bench.engines", description="Compare inference engines on the same weights."
    )
    parser.add_argument(
        "--install", nargs="*", choices=tuple(INSTALLERS), metavar="NAME",
        help=f"install engines of other people under {peers_folder()} and end (default: {', '.join(INSTALLERS)})",
    )  # fmt: skip
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=NAMES, help=f"beside {OURS} (default: all)")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and order (default: 0)")
    parser.add_argument("--model", type=Path, default=default_model, help="its folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured")
    options = parser.parse_args()
    try:
        if options.install is not None:
            for name in options.install or INSTALLERS:
                install(name, peers_folder())
            return 0
        missing = [name for name in options.engines if not is_installed(name, peers_folder())]
        if missing:
            parser.error(f"{', '.join(missing)}: not installed; add them with --install, or name others by --engines")
        if "llama.cpp" in options.engines and options.model != default_model:
            parser.error("llama.cpp reads a file of the default model only; for another model name others by --engines")
        if options.rounds < 1:
            parser.error("--rounds must be at least 1")
        return report(options, measure(options))
    except (EngineError, InstallError, PromptError) as error:
        print(f"bench.engines: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
