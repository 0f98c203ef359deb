"""By when and where: what clients ask for in headers."""

from __future__ import annotations

import math

import pytest

from gateway.errors import ApiError, too_late
from gateway.terms import Terms, terms_of


@pytest.mark.parametrize(
    ("headers", "user", "terms"),
    [
        ({}, None, Terms(math.inf, "")),
        ({"X-Request-Timeout": "2.5"}, None, Terms(2.5, "")),
        ({}, "u7", Terms(math.inf, "u7")),
        ({"X-Session-ID": "s"}, "u7", Terms(math.inf, "s")),
        ({"X-Session-ID": "s", "X-Session-Affinity": "a"}, None, Terms(math.inf, "a")),
        ({}, {"not": "text"}, Terms(math.inf, "")),
        ({"X-Session-ID": "x" * 1000}, None, Terms(math.inf, "x" * 256)),
    ],
)
def test_what_is_asked_for(headers: dict[str, str], user: object, terms: Terms) -> None:
    assert terms_of(headers, user) == terms


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", ""])
def test_a_timeout_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="a number of seconds above 0") as caught:
        terms_of({"X-Request-Timeout": text}, None)
    assert caught.value.status == 400


@pytest.mark.parametrize(("late_s", "retry_after_s"), [(0.01, 1), (2.1, 3), (1e9, 600), (math.inf, 600)])
def test_retry_after_is_when_the_queue_may_be_short_enough(late_s: float, retry_after_s: int) -> None:
    error = too_late("too late", late_s)
    assert (error.status, error.retry_after_s) == (429, retry_after_s)
