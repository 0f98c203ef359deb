"""What both sides of a pair have in common: engine and terms."""

from __future__ import annotations

from transfer.io.engine import TransferEngine, make_engine
from transfer.messages import Terms

from .messages import Begin
from .options import STREAM_TCP
from .pool import Pool

SENDER, RECEIVER = "bench-prefill", "bench-decode"
LEASE = "transfer-bench"  # of the whole pool, for what is written without ports
PEER_TIMEOUT = 60.0  # a side that is inside a library call answers no pings


def engine_for(begin: Begin, pool: Pool) -> TransferEngine:
    """Started, the pool registered. Raises `EngineError`."""
    apart = begin.backend == STREAM_TCP
    engine = make_engine("stream" if apart else begin.backend, begin.host)
    try:
        engine.register(pool.base, pool.nbytes, None if apart else pool.descriptor)
    except BaseException:
        engine.close()
        raise
    return engine


def terms(begin: Begin, engine: TransferEngine) -> Terms:
    return Terms(
        model="transfer-bench",
        kv_dtype=f"{begin.shape.dtype_bytes} bytes",
        cache="kv",
        backend=engine.name,
        checksum=begin.checksum,
    )
