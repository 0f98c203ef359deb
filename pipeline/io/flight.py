"""The flight recorder's files: the last entries of this rank, on disk, bounded, whatever kills the rank.

Two segment files take turns; each begins with a snapshot of the state, so either can be replayed alone.
Writes go to the page cache and survive the death of the process. `dump` joins the two into one file.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path

import msgspec

from consensus import recorder
from consensus.recorder import Flight, Header
from pipeline import snapshot
from pipeline.io.control import RankConfig
from pipeline.rank import RankCore
from pipeline.replay import difference

log = logging.getLogger(__name__)

SEGMENT = 4096  # entries per segment file
KEPT_EPOCHS = 8  # incarnations of the instance whose recordings stay on disk


class FlightFiles:
    """Writes what `core` records. Not thread-safe; used by the control loop alone."""

    def __init__(self, config: RankConfig, core: RankCore) -> None:
        self._config, self._core = config, core
        folder = Path(config.dump_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._segments = _segments(config, config.rank)
        self._dump = folder / f"{config.instance}-e{config.epoch}-r{config.rank}.dump"
        _prune(folder, config)
        self.lost_segments = 0  # not or not wholly recorded, for want of disk
        self._file: io.FileIO | None = None
        self._current = 1
        self._count = 0
        self._begin()

    def write(self) -> None:
        """Everything recorded since the last call."""
        fresh = self._core.recorder.fresh()
        if not fresh:
            return
        self._count += len(fresh)
        if self._file is not None:
            self._put(b"".join(recorder.frame(record) for record in fresh))
        if self._count >= SEGMENT:
            self._begin()

    def dump(self, reason: str) -> Path:
        """One file with all that both segments hold."""
        self.write()
        flight = _read(self._segments)
        header = msgspec.structs.replace(flight.header, reason=reason)
        self._dump.write_bytes(recorder.frame(header) + b"".join(map(recorder.frame, flight.records)))
        return self._dump

    def difference(self) -> str:
        """Where this rank and its predecessor first decided differently, if the latter's files are on this host."""
        self.write()
        theirs = _segments(self._config, self._config.rank - 1)
        if not any(path.exists() for path in theirs):
            return ""
        found = difference(_read(theirs), _read(self._segments))
        return f"first difference: {found}" if found else ""

    def _begin(self) -> None:
        self._current, self._count = 1 - self._current, 0
        config = self._config
        state = msgspec.msgpack.encode(snapshot.take(self._core.replica))
        if self._file is not None:
            self._file.close()
        try:
            # Unbuffered: what was handed to the kernel survives a kill -9 of this process.
            self._file = open(self._segments[self._current], "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            self._stop(error)
            return
        self._put(recorder.frame(Header(config.role, config.instance, config.epoch, config.rank, state)))

    def _put(self, data: bytes) -> None:
        """A full disk ends the recording of this segment, not the service; the next segment tries again."""
        assert self._file is not None
        try:
            if self._file.write(data) != len(data):  # unbuffered writes may be short
                raise OSError(f"only a part of {len(data)} bytes could be written")
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self.lost_segments += 1
        log.error("the flight recorder pauses: %s", error)


def _segments(config: RankConfig, rank: int) -> tuple[Path, Path]:
    stem = f"{config.instance}-e{config.epoch}-r{rank}"
    return Path(config.dump_dir) / f"{stem}.a.flight", Path(config.dump_dir) / f"{stem}.b.flight"


def _read(segments: tuple[Path, Path]) -> Flight:
    """Both segments as one flight, whichever is the older."""
    flights = [recorder.read(path.read_bytes()) for path in segments if path.exists()]
    flights.sort(key=lambda flight: flight.records[0].entry.seq if flight.records else 1 << 62)
    return flights[0] if len(flights) == 1 else recorder.join(*flights)


def _prune(folder: Path, config: RankConfig) -> None:
    """Deletes this rank's recordings of epochs long gone, so that restarts cannot fill the disk."""
    for path in folder.glob(f"{config.instance}-e*-r{config.rank}.*"):
        epoch = path.name.removeprefix(f"{config.instance}-e").partition("-")[0]
        if epoch.isdigit() and int(epoch) <= config.epoch - KEPT_EPOCHS:
            path.unlink(missing_ok=True)
