"""Which release of the software this is; for people, and for hosts that must be alike."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def release() -> str:
    """E.g. "0.1.0"; empty where the package is not installed."""
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return ""
