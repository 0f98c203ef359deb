"""The control loop of a rank: the shell around `RankCore`. It does I/O and decides nothing.

One thread, one `zmq.Poller`, asleep while nothing happens. Effects of the core are carried out; what
arrives is handed to the core. Whatever goes wrong (a digest that differs, a silent neighbour, a dead
executor, an invariant) ends in one place: the rank writes its flight recorder, tells the daemon why,
and exits, so that the whole instance is restarted under a new epoch.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from consensus import recorder
from consensus.log import Diverged
from consensus.progress import Progress
from consensus.store import Update
from pipeline.effects import (
    Acknowledge,
    CopyFromHost,
    CopyToHost,
    DropHostCopy,
    Effect,
    End,
    Relay,
    Reply,
    Report,
    RoomEffect,
    Run,
    Skip,
)
from pipeline.io import control
from pipeline.io.control import RankConfig
from pipeline.io.executor import Copied, Died, Executor, Ran, Sampled, Wrote
from pipeline.io.flight import FlightFiles
from pipeline.io.links import Links
from pipeline.io.ring import (
    AckFrame,
    BellFrame,
    ProgressFrame,
    RelayFrame,
    ReturnFrame,
    UpdateFrame,
)
from pipeline.io.watch import Watch
from pipeline.lease import LeaseBook
from pipeline.local import Observation
from pipeline.planner import Batch
from pipeline.rank import RankCore
from pipeline.sequencer import Sequencer

log = logging.getLogger(__name__)

ALIVE_EVERY = 1.0  # seconds


class FailStop(Exception):
    """This rank must not go on; the message is the reason people will read."""


class Port(Protocol):
    """The rank's end of the KV transfer, as the loop needs it: `transfer.io` behind role-specific glue."""

    def perform(self, effect: RoomEffect) -> list[Observation]: ...
    def wrote(self, batch: Batch, layers: tuple[int, int]) -> list[Observation]:
        """The batch's KV for these layers, global and half-open, is in the pool. Each layer at least once."""

    def register(self, poller: zmq.Poller) -> None:
        """Called before every poll; cheap, for links come and go."""

    def on_readable(self) -> list[Observation]:
        """Called after every wake-up, whatever woke the loop."""

    def tick(self) -> list[Observation]:
        """Called about once a second."""

    def status(self) -> tuple[int, int, dict[str, int], dict[str, int]]:
        """Rooms, handles in flight, queues, counters."""

    def close(self) -> None: ...


class Driver:
    """Runs one rank until it is told to quit. `run` returns the exit code."""

    def __init__(
        self,
        config: RankConfig,
        core: RankCore,
        links: Links,
        executor: Executor,
        port: Port,
        daemon: zmq.Socket[bytes],
    ) -> None:
        self._config, self._core, self._links = config, core, links
        self._executor, self._port, self._daemon = executor, port, daemon
        self._sequencer = Sequencer(core, config.pp_size, _clock()) if config.rank == 0 else None
        self._from_daemon = msgspec.msgpack.Decoder(control.ToRank).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._flight = FlightFiles(config, core)
        self._watch = Watch(core.replica, config.rank == 0)
        self._quit = self._dump_wanted = False
        signal.signal(signal.SIGUSR1, self._want_dump)
        self._stale = self._undecodable = 0
        self._last_entry = self._last_tick = time.monotonic()
        self._handlers: dict[zmq.Socket[bytes] | int, Callable[[], None]] = {
            daemon: self._read_daemon,
            executor.fd: self._read_executor,
            links.gatekeeper.socket: links.gatekeeper.answer,
        }
        for inbox, handler in (
            (links.relay_in, self._read_relay),
            (links.back_in, self._read_back),
            (links.report_in, self._read_reports),
        ):
            if inbox is not None:
                self._handlers[inbox.socket] = handler

    # -- the loop ------------------------------------------------------------------------------------

    def run(self) -> int:
        self._executor.start()
        poller = zmq.Poller()
        for source in self._handlers:
            poller.register(source, zmq.POLLIN)
        try:
            while not self._quit:
                self._poll_outboxes(poller)
                self._port.register(poller)
                for source, events in poller.poll(self._sleep_ms()):
                    if events & zmq.POLLIN and source in self._handlers:
                        self._handlers[source]()
                self._observe(self._port.on_readable())
                self._advance()
                self._record()
        except FailStop as error:
            self._fail(str(error))
            return 1
        except Diverged as error:
            self._fail(f"{error}; {self._flight.difference()}", diverged=True)
            return 1
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            return 1
        return 0

    def _want_dump(self, *_: object) -> None:
        self._dump_wanted = True  # a signal handler does nothing else

    def _record(self) -> None:
        self._flight.write()
        if self._dump_wanted:
            self._dump_wanted = False
            self._dump("SIGUSR1")

    def _dump(self, reason: str) -> tuple[str, str]:
        """(path, error) of a recording; a disk that is full costs the recording, not the rank."""
        try:
            path = str(self._flight.dump(reason))
        except (OSError, recorder.FlightError) as error:
            log.error("no flight recording: %s", error)
            return "", str(error)
        log.info("flight recorder written to %s (%s)", path, reason)
        return path, ""

    def _poll_outboxes(self, poller: zmq.Poller) -> None:
        for outbox in self._links.outboxes():
            outbox.flush()
            if len(outbox):
                poller.register(outbox.socket, zmq.POLLOUT)
            elif outbox.socket in poller:
                poller.unregister(outbox.socket)

    def _sleep_ms(self) -> int:
        wake = self._last_tick + ALIVE_EVERY
        if self._sequencer is not None and not self._sequencer.window.full:
            wake = min(wake, self._sequencer.wake_at() / 1e6)
        return max(0, min(1000, int((wake - time.monotonic()) * 1000) + 1))

    def _advance(self) -> None:
        """Rank 0 writes what there is to write; every rank looks at its timers."""
        now = time.monotonic()
        if self._sequencer is not None:
            while (effects := self._sequencer.next_entry(_clock(), time.time_ns() // 1000)) is not None:
                self._last_entry = now
                self._watch.applied(self._core.recorder.latest)
                self._perform(effects)
        if now - self._last_tick < ALIVE_EVERY:
            return
        self._last_tick = now
        self._observe(self._port.tick())
        self._tell_progress()
        self._check_ring(now)

    def _tell_progress(self) -> None:
        """The daemon hears from every rank, rank 0 from every busy one."""
        applied = self._core.cursor.applied
        progress = Progress(self._config.rank, applied, *self._executor.running())
        seconds, doing = 0.0, ""
        if self._sequencer is not None:
            self._sequencer.note_progress(progress)
            seconds, doing = self._sequencer.stalled(_clock())
            if seconds > self._config.tick_timeout:
                raise FailStop(doing)
        elif progress.tick:
            assert self._links.report_out is not None
            self._links.report_out.send(ProgressFrame(self._config.epoch, progress))
        last_tick = self._core.replica.slots.next_tick - 1
        alive = control.Alive(applied, last_tick, self._executor.executing(), seconds, doing)
        if self._sequencer is not None:
            alive = msgspec.structs.replace(alive, workload=self._core.replica.workload())
        self._say(alive)

    def _check_ring(self, now: float) -> None:
        limit = self._config.ring_timeout
        if self._sequencer is None:
            if now - self._last_entry > limit:
                raise FailStop(f"no entry from rank {self._config.rank - 1} for {now - self._last_entry:.1f} s")
        elif why := self._sequencer.stuck(_clock(), int(limit * 1e6)):
            raise FailStop(f"the ring does not answer: {why}")

    # -- what arrives --------------------------------------------------------------------------------

    def _read_relay(self) -> None:
        assert self._links.relay_in is not None
        for sender, frame in self._links.relay_in.receive():
            if sender != self._config.rank - 1:
                self._stale += 1
                continue
            self._last_entry = time.monotonic()
            effects = self._core.on_entry(frame.entry, frame.trailer)
            if frame.entry.epoch == self._config.epoch:
                self._watch.applied(self._core.recorder.latest)
            self._perform(effects)

    def _read_back(self) -> None:
        assert self._links.back_in is not None and self._sequencer is not None
        for sender, frame in self._links.back_in.receive():
            if frame.epoch != self._config.epoch or sender != self._config.pp_size - 1:
                self._stale += 1
            elif isinstance(frame, AckFrame):
                self._sequencer.acknowledged(frame.seq, frame.ballots)
            else:
                self._sequencer.returned(frame.item)

    def _read_reports(self) -> None:
        assert self._links.report_in is not None and self._sequencer is not None
        for sender, frame in self._links.report_in.receive():
            if frame.epoch != self._config.epoch or frame.item.rank != sender:
                self._stale += 1
            elif isinstance(frame, ProgressFrame):
                self._sequencer.note_progress(frame.item)
            else:
                self._sequencer.report(frame.item)

    def _read_executor(self) -> None:
        for event in self._executor.events():
            match event:
                case Wrote(batch, layers):
                    self._watch.wrote(batch)
                    self._observe(self._port.wrote(batch, layers))
                case Ran(batch):
                    self._watch.wrote(batch)
                    self._watch.ran(event)
                    self._observe(self._port.wrote(batch, (self._config.layer_begin, self._config.layer_end)))
                case Sampled(item):
                    if self._sequencer is not None:
                        self._sequencer.returned(item)
                    else:
                        assert self._links.back_out is not None
                        self._links.back_out.send(ReturnFrame(self._config.epoch, item))
                case Copied(seen):
                    self._observe([seen])
                case Died(reason):
                    raise FailStop(reason)

    def _read_daemon(self) -> None:
        while True:
            try:
                data = self._daemon.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._from_daemon(data)
            except msgspec.DecodeError:
                self._undecodable += 1
                continue
            match message:
                case control.Submit(spec) if self._sequencer is not None:
                    self._sequencer.submit(spec)
                case control.Cancel(key, reason) if self._sequencer is not None:
                    self._sequencer.cancel(key, reason)
                case control.AskStatus(token):
                    self._say(self._status(token))
                case control.Dump(token, reason):
                    self._say(control.Dumped(token, *self._dump(reason)))
                case control.SetLogLevel(name, level):
                    logging.getLogger(name or None).setLevel(level)
                case control.AskTimeline(token, seconds):
                    self._say(control.TimelineReport(token, self._watch.timeline(seconds)))
                case control.Quit():
                    self._quit = True
                case _:
                    self._undecodable += 1

    # -- what is done --------------------------------------------------------------------------------

    def _observe(self, observations: list[Observation]) -> None:
        for observation in observations:
            self._watch.observed(observation)
            if self._sequencer is not None:
                self._sequencer.observe(observation)
            else:
                self._perform(self._core.observe(observation))

    def _perform(self, effects: list[Effect]) -> None:
        epoch = self._config.epoch
        for effect in effects:
            match effect:
                case Relay(entry, trailer):
                    if self._links.relay_out is not None:
                        self._links.relay_out.send(RelayFrame(entry, trailer))
                case Acknowledge(seq, ballots):
                    assert self._links.back_out is not None
                    self._links.back_out.send(AckFrame(epoch, seq, ballots))
                case Report(item):
                    assert self._links.report_out is not None
                    frame = UpdateFrame(epoch, item) if isinstance(item, Update) else BellFrame(epoch, item)
                    self._links.report_out.send(frame)
                case Run(batch):
                    self._watch.launched(batch)
                    self._executor.run(batch)
                case Skip(tick):
                    self._executor.skip(tick)
                case CopyToHost() | CopyFromHost() | DropHostCopy():
                    self._executor.run(effect)
                case Reply(key, position, tokens):
                    self._say(control.Tokens(key, position, tokens, self._watch.first_token(key)))
                case End(key, outcome):
                    self._say(control.Ended(key, outcome, self._watch.ended(key)))
                case _:
                    self._watch.performed(effect)
                    self._observe(self._port.perform(effect))

    def _say(self, message: control.ToDaemon) -> None:
        try:
            self._daemon.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise FailStop("the daemon does not read its control channel") from None

    def _status(self, token: int) -> control.StatusReport:
        core, replica = self._core, self._core.replica
        rooms, handles, queues, counters = self._port.status()
        queues |= {"ring_outbox": sum(map(len, self._links.outboxes()))}
        queues |= {"executor": self._executor.queued(), "ticks_in_flight": replica.slots.in_flight}
        queues |= {"observations": len(core.local), **(self._sequencer.queues() if self._sequencer else {})}
        dropped = self._links.dropped() + self._stale + self._undecodable + core.stale
        return control.StatusReport(
            token,
            os.getpid(),
            core.cursor.applied,
            replica.digest.value.hex(),
            queues,
            replica.count_requests(),
            replica.leases.count(),
            rooms,
            len(core.store),
            handles,
            time.monotonic() - self._last_entry,
            {
                **replica.counters,
                **counters,
                **self._watch.counters(),
                "host_bytes": self._executor.host.used,
                "ticks_skipped": self._executor.skipped,
                "recordings_lost": self._flight.lost_segments,
                "frames_dropped": dropped + counters.get("frames_dropped", 0),
            },
            self._executor.executing(),
            _audit(replica.leases),
        )

    def _fail(self, reason: str, diverged: bool = False) -> None:
        log.error("fail-stop: %s", reason, exc_info=True)
        self._dump(reason)
        try:
            self._say(control.Failing(reason, diverged))
        except FailStop:
            log.error("the daemon cannot be told")  # it will see the exit code


def _audit(leases: LeaseBook) -> str:
    try:
        leases.audit()
    except AssertionError as wrong:
        return str(wrong)
    return ""


def _clock() -> int:
    return time.monotonic_ns() // 1000
