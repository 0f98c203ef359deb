"""What is hashed, and that the thread that hashes ends when it is told to."""

from __future__ import annotations

import select
import threading

import xxhash

from tests.transfer.pools import HEAD_BYTES, HEADS, PAGE, Pool, pipeline
from transfer.io.checksums import Checksums


def results(checksums: Checksums, count: int) -> dict[object, bytes]:
    found: dict[object, bytes] = {}
    while len(found) < count:
        assert select.select([checksums.fd], [], [], 10.0)[0], "the thread says nothing"
        found |= dict(checksums.results())
    return found


def test_a_checksum_is_of_the_keys_and_then_the_values_of_a_page_in_a_layer() -> None:
    pool = Pool(pipeline(1, 2), 0, 8, seed=3)
    checksums = Checksums(pool.regions)
    spans = [(5 * PAGE, PAGE), (2 * PAGE + 1, 2)]
    checksums.ask("whole", (0, 2), (0, HEADS), spans)
    checksums.ask("one head", (1, 2), (1, 2), spans[1:])
    found = results(checksums, 2)
    flat = pool.data.reshape(2, 2, 8 * PAGE, HEADS, HEAD_BYTES)
    wanted = b"".join(
        xxhash.xxh3_64_digest(b"".join(flat[layer, half, at : at + count].tobytes() for half in (0, 1)))
        for layer in (0, 1)
        for at, count in spans
    )
    assert found["whole"] == wanted
    at, count = spans[1]
    one = b"".join(flat[1, half, at : at + count, 1].tobytes() for half in (0, 1))
    assert found["one head"] == xxhash.xxh3_64_digest(one)
    checksums.close()


def test_closing_does_not_wait_for_what_is_still_to_be_hashed() -> None:
    pool = Pool(pipeline(1, 2), 0, 8, seed=3)
    others = set(threading.enumerate())
    checksums = Checksums(pool.regions)
    assert "checksums" in [thread.name for thread in set(threading.enumerate()) - others]
    for number in range(20_000):
        checksums.ask(number, (0, 2), (0, HEADS), [(0, 8 * PAGE)] * 10)
    checksums.close()
    assert "checksums" not in [thread.name for thread in set(threading.enumerate()) - others]
    assert checksums._jobs.qsize() > 0, "it had hashed everything, which shows nothing"
