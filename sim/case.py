"""What one simulated run is: plain data, so that a failing run can be cut down and kept as a test.

A `Case` holds the topology, every request, every fault and the bounds of all delays. Together with its
seed, from which the delays themselves are drawn, it decides a run completely. Times are in microseconds.
`repr` of a case is Python that builds it again.
"""

from __future__ import annotations

from dataclasses import dataclass

MS = 1_000
SECOND = 1_000_000

# Kinds of faults and what their fields mean.
CRASH = "crash"  # the whole instance at once; up again after `length`
KILL_RANK = "kill_rank"  # rank `rank`; the others are reaped `value` later; up again `length` after that
FAIL_QUIET = "fail_quiet"  # the next `value` writes of the rank fail and never started
FAIL_LATE = "fail_late"  # the next `value` writes are reported failed, and yet land up to `length` later
STALL = "stall"  # the next `value` writes of the rank take up to `length` longer
CORRUPT = "corrupt"  # the next `value` writes of the rank land with one position damaged
LOSE = "lose"  # the next `value` writes are reported failed, and never end; some of them land all the same
CUT = "cut"  # nothing passes between prefill instance `rank` and decode instance `value` for `length`
HOLD_RELAY = "hold_relay"  # entries into the rank wait for `length`
HOLD_BACK = "hold_back"  # acks and returns wait for `length`
HOLD_REPORTS = "hold_reports"  # store updates and bells of the rank wait for `length`

FREEZE = "freeze"  # the rank stands still for `length`; its daemon waits for it no longer than `SILENT_RANK`
SLOW = "slow"  # for `length`, rank 0 takes `value` for each frame that it reads, and as long before it writes
STUTTER = "stutter"  # for `length`, what the rank's side observes is said again, a failed handshake as a good one
DRAIN = "drain"  # the instance takes nothing new, lets go of what is open after `value`, leaves; back after `length`
ADMIN = "admin"  # `value` times within `length`: the status and the recording of every rank are asked for

# What the first profiles draw from: another member would give their seeds other cases.
FAULTS = (CRASH, KILL_RANK, FAIL_QUIET, FAIL_LATE, STALL, LOSE, CUT, HOLD_RELAY, HOLD_BACK, HOLD_REPORTS)


SILENT_RANK = 8 * SECOND  # after which the daemon takes a rank for stuck and ends the instance
HURRY = 30 * SECOND  # a stage deadline as long as this never comes: whoever ends a room tells its peer
BLINK = 500 * MS  # a cut this short must cost nobody anything but time


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One instance. `forward` is the time of an empty forward of each rank, `per_token` what a token adds, `jitter` by
    which share of it a forward takes longer at most."""

    ranks: int
    pages: int = 12
    chunk: int = 8
    rows: int = 8
    async_depth: int = 1
    forward: tuple[int, ...] = (2 * MS,)  # per rank; the last one repeats
    per_token: int = 100
    jitter: float = 0.25
    stage_timeout: int = 60 * SECOND
    host_pages: int = 1000  # pages of KV that a decode rank can keep in host memory


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One client request. `cancel` is when the client gives up, counted from `at`; 0: never."""

    name: str
    at: int
    prompt: int
    output: int
    timeout: int = 3600 * SECOND
    cancel: int = 0
    ignore_eos: bool = False
    twice: bool = False  # the first attempt is submitted twice to both sides
    any_epoch: bool = False  # the gateway names peers without their epoch


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    at: int
    instance: str = ""
    rank: int = 0
    length: int = 0
    value: int = 0

    @property
    def gentle(self) -> bool:
        """It only delays."""
        if self.kind in (CUT, FREEZE):
            return self.length <= (BLINK if self.kind == CUT else SILENT_RANK // 2)
        return self.kind in (STALL, HOLD_RELAY, HOLD_BACK, HOLD_REPORTS, SLOW, STUTTER, ADMIN)


@dataclass(frozen=True, slots=True)
class Delays:
    """Bounds of what is drawn for each message: (least, most)."""

    ring: tuple[int, int] = (20, 200)  # relay, acks, returns, reports, hidden states
    link: tuple[int, int] = (50, 500)  # prefill rank ↔ decode rank, and instance ↔ gateway
    engine: tuple[int, int] = (200, 5 * MS)  # a remote write
    copy: tuple[int, int] = (200, 5 * MS)  # a copy to or from host memory
    loop: tuple[int, int] = (0, 50)  # how long rank 0 gathers news before it writes
    straggler: float = 0.01  # share of messages that take twenty times as long


@dataclass(frozen=True, slots=True)
class Case:
    seed: int
    prefill: tuple[InstancePlan, ...]
    decode: tuple[InstancePlan, ...]
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...] = ()
    delays: Delays = Delays()
    layers: int = 4
    page_size: int = 4
    capacity: int | None = None  # of each ring channel: None unbounded, else frames on the way at once
    checksums: bool = False
    skew: int = 0  # by which the clocks of instances may differ
    leased: bool = False  # decode's engine checks each write against a lease, and a revoked one is a fence
    tail: int = 2 * SECOND  # for which a dead process's writes may still land
    retries: int = 6
    parked: int = 1024  # rooms whose destinations may reach a prefill rank before its log opens them

    @property
    def calm(self) -> bool:
        """Things only take long: nothing would excuse a failed request, or a second attempt."""
        gentle = self.parked >= len(self.requests) and all(fault.gentle for fault in self.faults)
        return gentle and all(
            plan.stage_timeout >= HURRY and plan.host_pages >= 1000 for plan in (*self.prefill, *self.decode)
        )

    @property
    def max_len(self) -> int:
        return 256
