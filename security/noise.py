"""What strangers send does not fill the log: a library's error about it is counted, and told in a line once.

In: the name of a library's logger, and the exceptions that mean "the peer sent nonsense". Out: a filter with a count.
Libraries log each with a traceback, so whoever reaches a port could fill a disk and write what he likes into a log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Noise(logging.Filter):
    def __init__(self, what: str, exceptions: tuple[type[BaseException], ...], on_one: Callable[[], None]) -> None:
        super().__init__()
        self.count = 0
        self._what, self._exceptions, self._on_one = what, exceptions, on_one

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, self._exceptions):
            return True
        self.count += 1
        self._on_one()
        if self.count == 1:
            log.warning("%s: refused (%s); further ones are only counted", self._what, type(error).__name__)
        return False


def count_noise(
    logger: logging.Logger,
    what: str,
    exceptions: tuple[type[BaseException], ...],
    on_one: Callable[[], None] = lambda: None,
) -> Noise:
    """From now on, in place of what an earlier call for this logger set up."""
    for former in [one for one in logger.filters if isinstance(one, Noise)]:
        logger.removeFilter(former)
    noise = Noise(what, exceptions, on_one)
    logger.addFilter(noise)
    return noise
