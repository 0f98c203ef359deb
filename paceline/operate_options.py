"""The commands for operators of running instances, on the command line: drain, resume, dump, log-level."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import default_run_dir
from paceline.engine_options import ADDRESS, add_secrets_option, sentence

if TYPE_CHECKING:
    from paceline.operate import Action

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def add_operator_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "let instances finish what they have and take nothing new"
    parser = _command(commands, "drain", about, "Undone by `paceline resume`; SIGTERM is a drain, then the end.")
    parser.add_argument("--reason", default="", metavar="TEXT", help="for people and logs")
    parser.add_argument(
        "--deadline", type=float, metavar="S",
        help="after which open requests go on elsewhere (default: the instance's --drain-timeout)",
    )  # fmt: skip
    parser.add_argument("--wait", action="store_true", help="until the instances are empty")
    parser.set_defaults(run=_drain)

    parser = _command(commands, "resume", "undo a drain", "An instance that does not drain stays as it is.")
    parser.set_defaults(run=_resume)

    about = "write the flight recordings of ranks that go on running"
    parser = _command(commands, "dump", about, "Says where the files are; `paceline replay` reads them.")
    parser.add_argument("--reason", default="", metavar="TEXT", help="written into the recordings")
    parser.set_defaults(run=_dump)

    about = "set how much instances log, until they end"
    parser = _command(commands, "log-level", about, "Goes to the daemon and to its ranks.")
    parser.add_argument("--level", choices=LEVELS, required=True)
    parser.add_argument("--logger", default="", metavar="PART", help="e.g. transfer or pipeline (default: everything)")
    parser.set_defaults(run=_log_level)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, about: str, more: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=about, description=f"{sentence(about)}. {more} Exit code 1 if an instance did not do it."
    )
    # What takes instances out of service, or back into it, is never meant for all by default.
    named = name in ("dump", "log-level")
    parser.add_argument(
        "instances", nargs="*", metavar="NAME",
        help="of `paceline up`, or of --registry" + (" (default: all of them)" if named else ""),
    )  # fmt: skip
    parser.add_argument("--address", type=ADDRESS, nargs="+", default=[], metavar="HOST:PORT", help="other instances")
    parser.add_argument(
        "--registry", type=ADDRESS, metavar="HOST:PORT",
        help="the names are those that the gateway there knows, not those of `paceline up`",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=15.0, metavar="S", help="for each answer (default: 15)")
    parser.add_argument(
        "--run-dir", type=Path, default=default_run_dir(), metavar="PATH",
        help="of `paceline up` (default: $PACELINE_RUN_DIR or .run)",
    )  # fmt: skip
    add_secrets_option(parser)
    parser.set_defaults(needs_name=not named)
    return parser


def _drain(options: argparse.Namespace) -> int:
    from paceline.operate import drain

    return _carry_out(drain(options.reason, options.deadline, options.wait, options.timeout), options)


def _resume(options: argparse.Namespace) -> int:
    from paceline.operate import resume

    return _carry_out(resume(options.timeout), options)


def _dump(options: argparse.Namespace) -> int:
    from paceline.operate import dump

    return _carry_out(dump(options.reason, options.timeout), options)


def _log_level(options: argparse.Namespace) -> int:
    from paceline.operate import log_level

    return _carry_out(log_level(options.level, options.logger, options.timeout), options)


def _carry_out(action: Action, options: argparse.Namespace) -> int:
    from paceline.asked import asked
    from paceline.operate import carry_out

    if options.needs_name and not options.instances and not options.address:
        raise SystemExit(f"paceline: which instances? Name them, e.g. `paceline {options.command} decode-0`")
    return asyncio.run(carry_out(action, asked(options, options.instances), options.instances))
