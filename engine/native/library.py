"""Which build of the kernels this processor runs.

In: the shared objects beside this file. Out: the fastest that can run here, loaded, once per process.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from pathlib import Path

import torch

from engine.native.build import FOLDER, Variant, variants

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)  # what the kernels compute in


def runnable() -> list[Variant]:
    """The variants that this processor can run, the fastest first, built or not."""
    features = _processor_features()
    return [variant for variant in variants() if variant.needs <= features]


@functools.cache
def load() -> ctypes.CDLL | None:
    """The fastest that was built and runs here; None, with one line in the log, if there is none."""
    for variant in runnable():
        if variant.path().exists():
            try:
                library = ctypes.CDLL(str(variant.path()))
            except OSError as error:
                log.warning("the compiled kernels %s cannot be loaded: %s", variant.path(), error)
                continue
            log.info("compiled kernels: variant %s", variant.name)
            return library
    log.warning(
        "the compiled kernels are missing in %s; attention runs in plain torch, many times slower: "
        "run `make setup`, or `python -m engine.native.build` where there is a C compiler",
        FOLDER,
    )
    return None


def _processor_features() -> frozenset[str]:
    """What the processor can do, by the names of /proc/cpuinfo; nothing where there is none."""
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
