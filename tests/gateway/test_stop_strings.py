"""Stop strings, wherever the text is cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopStrings


def shown(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    text = "".join([matcher.push(piece) for piece in pieces])
    return text + matcher.flush(), matcher.stopped


def test_text_before_the_stop_string_is_shown_and_nothing_after() -> None:
    assert shown(["END"], ["abc E", "N", "D def"]) == ("abc ", True)


def test_the_beginning_of_a_stop_string_is_held_until_decided() -> None:
    matcher = StopStrings(["</s>"])
    assert matcher.push("x</") == "x"
    assert matcher.push("s") == ""
    assert matcher.push("p>") == "</sp>"
    assert matcher.push("<") == ""
    assert matcher.flush() == "<"


def test_the_stop_string_complete_first_wins() -> None:
    assert shown(["abcd", "b"], ["abcd"]) == ("a", True)
    assert shown(["bc", "abc"], ["xabc"]) == ("x", True), "of two complete at once, the longer"


def test_overlapping_beginnings() -> None:
    assert shown(["aab"], ["aa", "aab"]) == ("aa", True)
    assert shown(["ab"], ["a", "a", "a"]) == ("aaa", False)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=4), max_size=12),
)
def test_pieces_do_not_matter(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert shown(stops, pieces) == expected
