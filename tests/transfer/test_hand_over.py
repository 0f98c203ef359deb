"""The two sides against each other: any order, repeats, stops, failures, deaths."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer.pools import PAGE, pipeline
from tests.transfer.world import DECODE, PREFILL, World

LAYERS = 4
sizes = st.integers(1, LAYERS)
seeds = st.integers(0, 2**32)


def world(
    prefill: int,
    decode: int,
    seed: int,
    rooms: int,
    checksums: bool = False,
    leased: bool = False,
    damage: float = 0.0,
) -> World:
    random = Random(seed)
    made = World(pipeline(prefill, LAYERS), pipeline(decode, LAYERS), random, True, checksums, leased, damage)
    src, dst = list(range(40)), list(range(40))
    random.shuffle(src)
    random.shuffle(dst)
    for index in range(rooms):
        tokens = random.randint(1, 4 * PAGE)
        pages = -(-tokens // PAGE)
        made.add(f"r{index}/0", tokens, [src.pop() for _ in range(pages)], [dst.pop() for _ in range(pages)])
    return made


def ranks(made: World) -> list[tuple[str, int]]:
    return [(PREFILL, rank) for rank in range(len(made.senders))] + [
        (DECODE, rank) for rank in range(len(made.receivers))
    ]


def close_all(made: World) -> None:
    """Each room has told of its release on each rank that has it, and once closed it is forgotten."""
    for room in made.rooms.values():
        for rank, receiver in enumerate(made.receivers):
            if room.name in [status.room for status in receiver.rooms()]:
                assert made.told[DECODE, rank, room.name, "release"].good
                made.received(rank, receiver.close(room.name))
        for rank, sender in enumerate(made.senders):
            if room.written[rank] >= 0:
                assert made.told[PREFILL, rank, room.name, "release"].good
                made.sent(rank, sender.close(room.name))
    assert not any(side.rooms() for side in made.senders)
    assert not any(side.rooms() for side in made.receivers)


@given(sizes, sizes, seeds)
@settings(max_examples=80, deadline=None)
def test_every_byte_lands_and_each_end_is_told_once(prefill: int, decode: int, seed: int) -> None:
    made = world(prefill, decode, seed, rooms=3)
    made.run(300)
    made.settle()
    for room in made.rooms.values():
        for side, rank in ranks(made):
            told = made.told[side, rank, room.name, "transfer"]
            assert told.good, told
            assert told.payload == (b"token" if (side, rank) == (DECODE, 0) else b"")
            assert (side, rank, room.name, "release") not in made.told
        made.assert_landed(room)
    assert len(made.memory) == sum(room.tokens for room in made.rooms.values()) * LAYERS
    assert sum(side.in_flight() for side in made.senders) == 0


@given(sizes, sizes, seeds)
@settings(max_examples=120, deadline=None)
def test_a_stopped_room_is_released_everywhere_once_nothing_can_land(prefill: int, decode: int, seed: int) -> None:
    made = world(prefill, decode, seed, rooms=3)
    made.run(300, stops=0.02)
    made.settle()
    for room in made.rooms.values():
        if not room.stopped:
            made.stop(room)
    made.settle()
    close_all(made)


@given(sizes, sizes, seeds)
@settings(max_examples=120, deadline=None)
def test_a_failed_handle_holds_the_pages_until_its_sender_is_proven_dead(prefill: int, decode: int, seed: int) -> None:
    made = world(prefill, decode, seed, rooms=2)
    made.run(300, failures=0.03, stops=0.002)
    for room in made.rooms.values():
        made.stop(room)
    made.run(100)
    made.settle()
    unproven = {
        (status.room, rank) for rank, side in enumerate(made.senders) for status in side.rooms() if status.unproven
    }
    for name, rank in unproven:
        assert (PREFILL, rank, name, "release") not in made.told
    made.kill_prefill()
    for room in made.rooms.values():
        for rank, receiver in enumerate(made.receivers):
            if room.name in [status.room for status in receiver.rooms()]:
                assert (DECODE, rank, room.name, "release") in made.told
    assert sum(side.unfenced() for side in made.receivers) == 0


@given(sizes, sizes, seeds)
@settings(max_examples=80, deadline=None)
def test_the_death_of_a_prefill_ends_and_fences_its_rooms(prefill: int, decode: int, seed: int) -> None:
    made = world(prefill, decode, seed, rooms=2)
    made.run(Random(seed).randint(10, 300))
    made.kill_prefill()
    for room in made.rooms.values():
        for rank, receiver in enumerate(made.receivers):
            states = {status.room: status.state for status in receiver.rooms()}
            if room.name in states and states[room.name] != "done":
                assert states[room.name] == "fenced"
                assert made.told[DECODE, rank, room.name, "release"].good
            made.received(rank, receiver.close(room.name))
    late = made.receivers[0].open("late/0", PREFILL, 1, 5)
    assert [(action.topic, action.good) for action in late if hasattr(action, "topic")] == [  # type: ignore[union-attr]
        ("prealloc", False),
        ("release", True),
    ]


@given(sizes, sizes, seeds)
@settings(max_examples=120, deadline=None)
def test_replaced_engines_release_everything_and_no_late_write_meets_a_released_page(
    prefill: int, decode: int, seed: int
) -> None:
    made = world(prefill, decode, seed, rooms=3)
    made.run(400, failures=0.03, stops=0.002, replacements=0.08)
    for room in made.rooms.values():
        if not room.stopped:
            made.stop(room)
    made.settle_engines()
    made.settle()
    assert sum(side.unproven() + side.trailing() + side.in_flight() for side in made.senders) == 0
    close_all(made)


@given(sizes, sizes, seeds)
@settings(max_examples=120, deadline=None)
def test_t13_damaged_slices_are_sent_again_or_end_the_room_and_are_never_decoded(
    prefill: int, decode: int, seed: int
) -> None:
    made = world(prefill, decode, seed, rooms=3, checksums=True, damage=Random(seed).choice([0.002, 0.02, 0.2]))
    made.run(300)
    made.settle()
    again = sum(side.counters.again for side in made.senders)
    assert again <= sum(side.counters.damaged for side in made.receivers)
    for room in made.rooms.values():
        ends = [made.told.get((DECODE, rank, room.name, "transfer")) for rank in range(decode)]
        if all(end is not None and end.good for end in ends):
            made.assert_landed(room)
        else:
            failed = [end.reason for end in ends if end is not None and not end.good]
            assert any("damaged twice" in reason for reason in failed), failed
            made.stop(room)
    made.settle()
    assert sum(side.unfenced() for side in made.receivers) == 0


def test_t13_damage_is_repaired_at_all() -> None:
    """Of many rooms with a little damage, most are sent again and end well."""
    repaired = 0
    for seed in range(60):
        made = world(2, 3, seed, rooms=3, checksums=True, damage=0.02)
        made.run(300)
        made.settle()
        good = all(end.good for (side, _, _, topic), end in made.told.items() if (side, topic) == (DECODE, "transfer"))
        repaired += good and sum(side.counters.again for side in made.senders) > 0
    assert repaired >= 10


@given(sizes, sizes, seeds)
@settings(max_examples=120, deadline=None)
def test_under_leases_no_write_lands_after_the_release_whatever_the_sender_says(
    prefill: int, decode: int, seed: int
) -> None:
    made = world(prefill, decode, seed, rooms=3, checksums=True, leased=True)
    made.run(300, stops=0.01, failures=0.02)
    made.settle()
    for room in made.rooms.values():
        if not room.stopped:
            made.stop(room)
    made.settle()
    assert not made.granted, "every lease has ended"
    close_all(made)
