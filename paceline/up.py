"""Runs a whole cluster on this machine: one daemon per instance, one gateway, all supervised.

In: the options of `paceline up`. Out: an exit code; on standard output one ready line and the answer
to `--ask`, on standard error everything else. Invariants: when this process is gone, so is everything
it started; addresses stay the same over restarts of a part, so the parts find each other again.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gateway.key_file import KeysError, read_keys
from paceline.ask import AskError, ask, curl_command
from paceline.child import Answer, Child, Patience, last_lines
from paceline.config import CLUSTER_FILE, Cluster, Part, free_ports, port_problem, read_cluster
from paceline.engine_options import check_ranks, model_folder
from paceline.family import Family
from paceline.local_plan import Plan, plan
from paceline.progress import Progress
from security.exposure import Exposed, check_public_port

# What daemons exit with when their configuration cannot work, and when they have tried enough themselves.
FINAL = ("exited with 1", "exited with 2")
GIVE_UP_AFTER = 3  # failures of one part before the cluster was ever ready


async def up(options: argparse.Namespace) -> int:
    run_dir: Path = options.run_dir.absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    with lock(run_dir):
        model = model_folder(options)
        if problem := port_problem(options.host, 0):
            raise SystemExit(f"paceline: cannot listen on --host {options.host}: {problem}")
        key = first_key(options)
        port = options.port or free_ports(options.host, 1)[0]
        if problem := port_problem(options.host, port):
            raise SystemExit(
                f"paceline: cannot listen on {options.host}:{port}: {problem}; choose another with --port, or 0 for any"
            )
        check_ranks(
            model,
            ("--prefill-layers", options.prefill_layers, "--prefill-pp", options.prefill_pp),
            ("--decode-layers", options.decode_layers, "--decode-pp", options.decode_pp),
        )
        return await Supervisor(plan(options, model, run_dir, port)).run(options.ask, key)


def lock(run_dir: Path) -> IO[str]:
    """Held while a cluster runs there. Ends the command if one already does."""
    file = (run_dir / "up.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        running = read_cluster(run_dir)
        where = f" at {running.url} (pid {running.up_pid})" if running else ""
        raise SystemExit(f"paceline: a cluster already runs{where}; stop it, or use another --run-dir") from None
    return file


def first_key(options: argparse.Namespace) -> str:
    """For our own question. Ends the command if the gateway would refuse to start."""
    try:
        check_public_port("the gateway", options.host, bool(options.api_keys), options.insecure)
        return read_keys(Path(options.api_keys))[0].secret if options.api_keys else ""
    except (Exposed, KeysError) as error:
        raise SystemExit(f"paceline: {error}") from error


@dataclass
class Supervisor:
    """Listens to the children and tells the user; decides when the cluster is ready and when it has failed."""

    plan: Plan
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        self.parts = {
            spec.name: Part(
                name=spec.name, role=spec.role, address=spec.address, log=str(spec.log), metrics=spec.metrics
            )
            for spec in self.plan.specs
        }
        self.progress = Progress(list(self.parts), sys.stderr)
        self.waiting = set(self.parts)  # not ready yet
        self.failures = dict.fromkeys(self.parts, 0)
        self.noted = dict.fromkeys(self.parts, "")
        self.ready = asyncio.Event()
        self.over = asyncio.Event()
        self.exit_code = 0

    async def run(self, question: str | None, key: str = "") -> int:
        family = Family()
        children = [Child(spec, family, self, self.patience) for spec in self.plan.specs]
        self._handle_signals(family)
        self.progress.say(f"starting {len(children)} processes; logs in {self.plan.run_dir / 'logs'}/")
        tasks = [asyncio.create_task(child.run(), name=child.spec.name) for child in children]
        for task in tasks:
            task.add_done_callback(self._notice)
        serving = asyncio.create_task(self._serve(question, key))
        try:
            await self.over.wait()
        finally:
            self.progress.finish()
            self.progress.say("stopping" if self.exit_code else "stopping (Ctrl-C again to stop at once)")
            serving.cancel()
            # The gateway first: it ends its clients' requests in good order while there are instances.
            await asyncio.gather(*(child.stop() for child in children if child.spec.role == "gateway"))
            await asyncio.gather(*(child.stop() for child in children))
            for task in tasks:
                task.cancel()
            await asyncio.gather(serving, *tasks, return_exceptions=True)
            family.end_orphans()
            await self.plan.close()
            (self.plan.run_dir / CLUSTER_FILE).unlink(missing_ok=True)
            self.progress.say("stopped")
        return self.exit_code

    # What the children tell.

    def started(self, name: str, pid: int) -> None:
        self.parts[name].pid = pid
        self._record()
        self.progress.show(name, "starting")

    def answered(self, name: str, answer: Answer) -> None:
        self.progress.show(name, answer.text)
        if answer.note and answer.note != self.noted[name]:
            self.noted[name] = answer.note
            self.progress.say(f"{name}: {answer.note}")
        if answer.ready:
            self.waiting.discard(name)
        if not self.waiting:
            self.ready.set()

    def ended(self, name: str, why: str, pause: float) -> None:
        part = self.parts[name]
        part.pid = 0
        self._record()
        if self.over.is_set():
            return
        self.failures[name] += 1
        if not self.ready.is_set() and (why in FINAL or self.failures[name] >= GIVE_UP_AFTER):
            said = last_lines(Path(part.log)) or ["(it wrote nothing)"]
            self._fail(f"{name} {why}; the end of {part.log}:", said)
        else:
            self.progress.say(f"{name} {why}; restarting it in {pause:g} s (log: {part.log})")

    # The rest.

    async def _serve(self, question: str | None, key: str) -> None:
        await self.ready.wait()
        self.progress.finish()
        url, model = self.plan.url, self.plan.model_name
        print(f"ready: {url}  try: {curl_command(url, model, bool(key))}", flush=True)
        if question is None:
            return
        print(f"\n> {question}\n", flush=True)
        try:
            await ask(url, model, question, sys.stdout, key=key)
        except AskError as error:
            self.progress.say(f"the question was not answered: {error}")
        else:
            self.progress.say("serving; Ctrl-C stops")

    def _notice(self, task: asyncio.Task[None]) -> None:
        """Nobody would restart a part whose keeper has died: then all of it ends, with the reason."""
        if not task.cancelled() and (error := task.exception()) is not None and not self.over.is_set():
            self._fail(f"{task.get_name()} cannot be looked after: {type(error).__name__}: {error}", [])

    def _handle_signals(self, family: Family) -> None:
        def stop() -> None:
            if self.over.is_set():  # asked twice: no more patience
                for pid in list(family.pids):
                    family.kill(pid)
            self.over.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop)

    def _record(self) -> None:
        parts = list(self.parts.values())
        cluster = Cluster(up_pid=os.getpid(), url=self.plan.url, model_name=self.plan.model_name, parts=parts)
        try:
            cluster.write(self.plan.run_dir)
        except OSError as error:  # the cluster runs on; only `paceline status` does not find it
            self.progress.say(f"cannot record the cluster in {self.plan.run_dir}: {error}")

    def _fail(self, reason: str, details: list[str]) -> None:
        self.exit_code = 1
        self.progress.finish()
        self.progress.say("\n".join([f"paceline: {reason}", *(f"    {line}" for line in details)]))
        self.over.set()
