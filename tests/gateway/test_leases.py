"""Who is registered, and until when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.leases import Leases, Refusal


def leases(most: int = 10) -> Leases:
    return Leases(5.0, most)


def test_a_lease_lasts_until_it_is_not_renewed_in_time() -> None:
    held = leases()
    assert held.renew("p0", "h:1", 1, 0.0) is None
    assert held.look(4.0, 0.5) == []
    assert held.renew("p0", "h:1", 1, 4.4) is None
    assert [held.look(t / 2, 0.5) for t in range(9, 19)] == [[]] * 10
    assert held.look(9.5, 0.5) == ["p0"]
    assert held.held() == {}


def test_a_second_of_silence_is_nothing() -> None:
    """G3: heartbeats come every second; one that is a second late, or lost, costs nothing."""
    held = leases()
    for second in (0.0, 1.0, 3.0, 4.0, 7.0):
        assert held.renew("p0", "h:1", 1, second) is None
    assert held.look(11.9, 0.5) == []


def test_an_incarnation_replaces_older_ones_only() -> None:
    held = leases()
    held.renew("p0", "h:1", 4, 0.0)
    assert held.renew("p0", "h:2", 5, 1.0) is None, "a pod that was started anew has another address"
    assert list(held.held()) == ["h:2"]
    assert held.renew("p0", "h:1", 4, 1.0) == Refusal("p0 at h:2 is registered with epoch 5, which is newer than 4")
    assert held.look(6.1, 100.0) == ["p0"]
    assert held.renew("p0", "h:1", 1, 6.1) is None, "one that has lost its epochs waits for the old lease to end"


def test_two_instances_with_one_name_are_told_so() -> None:
    held = leases()
    held.renew("p0", "h:1", 1, 0.0)
    refused = held.renew("p0", "h:2", 1, 0.0)
    assert refused is not None
    assert (
        "two instances cannot have one name" in refused.reason and "h:1" in refused.reason and "h:2" in refused.reason
    )


def test_an_address_has_one_name() -> None:
    held = leases()
    held.renew("p0", "h:1", 1, 0.0)
    held.renew("p1", "h:1", 1, 1.0)
    assert not held.end("p0", 1)
    assert held.end("p1", 1)


def test_who_leaves_is_gone_at_once_but_nobody_else() -> None:
    held = leases()
    held.renew("p0", "h:1", 2, 0.0)
    assert not held.end("p0", 1), "the last word of an old incarnation, late"
    assert held.end("p0", 2)
    assert not held.end("p0", 2)


def test_there_is_a_bound() -> None:
    held = leases(most=1)
    held.renew("p0", "h:1", 1, 0.0)
    refused = held.renew("p1", "h:2", 1, 0.0)
    assert refused is not None and refused.full
    assert held.renew("p0", "h:1", 1, 1.0) is None, "those there are go on"


def test_a_gateway_that_stood_still_blames_nobody() -> None:
    held = leases()
    held.renew("p0", "h:1", 1, 0.0)
    assert held.look(0.5, 0.5) == []
    assert held.look(60.0, 0.5) == [], "heartbeats of the meantime lie unread"
    assert held.look(65.0, 5.0) == ["p0"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["h:1", "h:2"]), st.integers(1, 3)), max_size=30))
def test_whatever_comes_no_address_and_no_name_is_twice(calls: list[tuple[str, str, int]]) -> None:
    held = leases()
    for at, (name, address, epoch) in enumerate(calls):
        if held.renew(name, address, epoch, 0.01 * at) is None:
            assert held.held()[address].epoch == epoch
    addresses = len(held.held())
    assert sum(held.end(name, epoch) for name in "abc" for epoch in (1, 2, 3)) == addresses <= 2
