"""What a daemon and its ranks say to each other, over a ZMQ ipc socket, or TCP for ranks on other hosts.

The daemon binds a ROUTER; each rank dials it with a DEALER whose identity is its rank number in
decimal. Over TCP both are encrypted, and a rank is known by its key (`pipeline.io.zap`). Rank 0 always runs on the
daemon's own host, so that all that is said of attempts goes over ipc, which loses nothing. Every frame is one
msgpack-encoded member of `ToRank` or `ToDaemon`; what does not decode is dropped and counted.

Start-up: a rank says `Capacity` with the pages it could hold; the daemon answers every rank with
`Configure` (the minimum over ranks); the rank reads its weights and says `Loading` meanwhile, allocates,
binds its sockets, registers memory and says `Ready`; when all are ready the daemon says `Go` and the log
starts. Nothing else is said to a rank before `Go`.
"""

from __future__ import annotations

import msgspec

from consensus.entry import Key, RequestSpec, TokenOut
from pipeline.io.timeline import RankTimeline
from pipeline.io.zap import RingKeys
from pipeline.outcome import Outcome
from pipeline.phases import Stages
from pipeline.workload import Workload


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one rank process is told at birth; passed as JSON on its standard input."""

    role: str  # "prefill" or "decode"
    instance: str
    epoch: int
    rank: int
    pp_size: int
    layer_begin: int
    layer_end: int
    layer_ranges: tuple[tuple[int, int], ...]  # of all ranks, in rank order
    windows: tuple[int, ...]  # per layer of the model: how many last positions a token sees; 0: all
    model: str  # Hugging Face folder
    model_digest: str
    dtype: str
    batch_invariant: bool  # of logits, also where that costs: in other dtypes than float32
    page_size: int
    pages: int  # 0: as many as fit in kv_bytes
    kv_bytes: int  # budget of this rank's pool when pages is 0
    host_bytes: int  # of this rank's host memory for retracted KV
    chunk_size: int  # tokens per prefill chunk
    max_batch_rows: int
    async_depth: int  # microbatches in flight beyond pp_size
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_queue: int  # attempts known at once; more are refused
    transfer_backend: str
    transfer_device: str
    push: str  # prefill: "layer" or "chunk", after which KV is sent
    checksum: str  # of KV pages: "xxh3" or "none"
    host: str  # address peers can reach, for the link and the transfer engine
    secrets: str  # folder of the cluster's; "": none
    control: str  # ZMQ endpoints from here on: ipc, or tcp where the two ends are on different hosts
    control_key: str  # public key of the daemon's end; "" over ipc
    relay_in: str  # "" on rank 0
    relay_out: str  # "" on the last rank
    hidden_in: str
    hidden_out: str
    returns: str  # rank 0 binds, the last rank dials
    store: str  # rank 0 binds, all others dial
    keys: RingKeys  # of relay, returns and store; over tcp also of hidden states and control
    ring_timeout: float  # seconds without an entry, or without an ack, after which a rank fail-stops
    tick_timeout: float  # seconds a launched microbatch may take before the instance counts as hung
    stage_timeout: float  # seconds an attempt may stay in bootstrapping, prealloc, granted, transferring
    dump_dir: str  # where a rank writes its flight recorder when it fail-stops


# Messages that may wait for a daemon that stands still, at each end: seconds of tokens of a busy instance.
HIGH_WATER = 200_000
LARGEST_FRAME = 4 << 20


# daemon → rank


class Configure(msgspec.Struct, frozen=True, tag=True):
    pages: int


class Go(msgspec.Struct, frozen=True, tag=True):
    pass


class Submit(msgspec.Struct, frozen=True, tag=True):
    """To rank 0 only. Answered by `Tokens` and exactly one `Ended`."""

    spec: RequestSpec


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """To rank 0 only. Unknown and ended attempts are ignored."""

    key: Key
    reason: str


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """Answered by a `StatusReport`, for which the rank audits its pages."""

    token: int


class Dump(msgspec.Struct, frozen=True, tag=True):
    """Write the flight recorder now and go on. Answered by `Dumped`."""

    token: int
    reason: str


class SetLogLevel(msgspec.Struct, frozen=True, tag=True):
    logger: str  # "": the root
    level: str


class AskTimeline(msgspec.Struct, frozen=True, tag=True):
    """Answered by a `TimelineReport`."""

    token: int
    seconds: float


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Leave now with exit code 0."""


ToRank = Configure | Go | Submit | Cancel | AskStatus | AskTimeline | Dump | SetLogLevel | Quit

# rank → daemon


class Loading(msgspec.Struct, frozen=True, tag=True):
    fraction: float  # 0..1
    text: str


class Capacity(msgspec.Struct, frozen=True, tag=True):
    pages: int  # pages this rank can hold


class Ready(msgspec.Struct, frozen=True, tag=True):
    link_address: str  # "" on decode ranks
    transfer_backend: str  # the one chosen


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """From rank 0: output tokens of an attempt from `position` (0 = first output token).

    `stages` come with an attempt's first tokens. Their clock is the monotonic one of this host, which is the daemon's
    as well."""

    key: Key
    position: int
    tokens: tuple[TokenOut, ...]
    stages: Stages = ()


class Ended(msgspec.Struct, frozen=True, tag=True):
    """From rank 0, once per attempt, last."""

    key: Key
    outcome: Outcome
    stages: Stages = ()


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Once a second from every rank's control loop; silence for ring_timeout means it is stuck."""

    applied_seq: int
    last_tick: int = 0  # the last one this rank has launched
    executing: str = ""  # what its executor is in, for people
    stalled: float = 0.0  # from rank 0: seconds since a launched tick should be back
    doing: str = ""  # from rank 0: which tick that is, and which rank is in it
    workload: Workload = Workload()  # from rank 0


class StatusReport(msgspec.Struct, frozen=True, tag=True):
    """The rank's own state; fields as in `paceline.v1.RankStatus`."""

    token: int
    pid: int
    applied_seq: int
    digest: str
    queues: dict[str, int]
    requests: dict[str, int]
    pages: dict[str, int]
    rooms: int
    store_entries: int
    transfer_handles: int
    last_progress_s: float
    counters: dict[str, int]
    executing: str
    audit: str  # what the page auditor found wrong, or empty


class Dumped(msgspec.Struct, frozen=True, tag=True):
    token: int
    path: str
    error: str  # why there is no file, or empty


class TimelineReport(msgspec.Struct, frozen=True, tag=True):
    token: int
    timeline: RankTimeline


class Failing(msgspec.Struct, frozen=True, tag=True):
    """The rank is about to exit with a nonzero code; `reason` names what and where."""

    reason: str
    diverged: bool = False  # it and its predecessor no longer agree


ToDaemon = Capacity | Loading | Ready | Tokens | Ended | Alive | StatusReport | TimelineReport | Dumped | Failing
