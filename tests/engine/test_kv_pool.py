"""The geometry of KV memory, which the transfer engine relies on."""

from __future__ import annotations

import os
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_pool import ALIGNMENT, KVPool, pages_that_fit, pool_bytes

GEOMETRY = {
    "layers": st.integers(1, 4),
    "pages": st.integers(1, 9),
    "page_size": st.sampled_from([1, 4, 16]),
    "kv_heads": st.integers(1, 3),
    "head_dim": st.sampled_from([2, 8, 64]),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
}


@settings(max_examples=50, deadline=None)
@given(**GEOMETRY)
def test_regions_are_disjoint_aligned_and_inside_the_pool(
    layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    pool = KVPool(range(5, 5 + layers), pages, page_size, kv_heads, head_dim, dtype)
    regions = pool.regions()
    assert [(region.layer, region.kind) for region in regions] == [
        (layer, kind) for layer in range(5, 5 + layers) for kind in ("k", "v")
    ]
    end = pool.base_address
    for region in regions:
        assert region.address % ALIGNMENT == 0
        assert region.address >= end
        assert region.nbytes == pages * page_size * region.bytes_per_token
        end = region.address + region.nbytes
    assert end <= pool.base_address + pool.nbytes
    assert pool.nbytes == pool_bytes(layers, pages, page_size, kv_heads, head_dim, dtype)
    assert pool.bytes_per_page == sum(page_size * region.bytes_per_token for region in regions)
    assert not pool.memory.any()


def test_a_page_is_where_its_region_says() -> None:
    pool = KVPool(range(2, 4), pages=3, page_size=4, kv_heads=2, head_dim=8, dtype=torch.float32)
    pool.values(3)[2, 1] = 1.0  # page 2, second token
    region = pool.regions()[3]
    start = region.address - pool.base_address + (2 * 4 + 1) * region.bytes_per_token
    written = pool.memory[start : start + region.bytes_per_token].view(torch.float32)
    assert written.eq(1).all()
    assert int(pool.memory.count_nonzero()) == int(written.view(torch.uint8).count_nonzero()), "and nothing else is"


@settings(max_examples=200, deadline=None)
@given(budget=st.integers(0, 3_000_000), **{key: value for key, value in GEOMETRY.items() if key != "pages"})
def test_pages_that_fit_fill_the_budget_and_do_not_exceed_it(
    budget: int, layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    pages = pages_that_fit(budget, layers, page_size, kv_heads, head_dim, dtype)
    assert pages >= 0
    assert pool_bytes(layers, pages, page_size, kv_heads, head_dim, dtype) <= budget
    assert pool_bytes(layers, pages + 1, page_size, kv_heads, head_dim, dtype) > budget


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="0 pages"):
        KVPool(range(2), 0, 16, 1, 8, torch.float32)


def test_a_shared_pool_is_a_file_mapped_from_its_first_byte() -> None:
    pool = KVPool(range(2, 4), 3, 4, 2, 8, torch.float32, shared=True)
    assert pool.descriptor is not None and not os.get_inheritable(pool.descriptor)
    assert os.fstat(pool.descriptor).st_size == pool.nbytes == pool_bytes(2, 3, 4, 2, 8, torch.float32)
    assert pool.base_address % ALIGNMENT == 0 and not pool.memory.any()
    assert pool.regions()[0].address == pool.base_address
    pool.keys(3)[1] = 1.0
    offset = pool.regions()[2].address - pool.base_address + 4 * pool.bytes_per_token
    assert os.pread(pool.descriptor, 4, offset) == pool.memory[offset : offset + 4].numpy().tobytes() != bytes(4)
    descriptor = pool.descriptor
    keys = pool.keys(2)
    del pool
    with pytest.raises(OSError):
        os.fstat(descriptor)
    keys[:] = 2.0  # what is still used stays mapped
    assert KVPool(range(1), 1, 4, 1, 8, torch.float32).descriptor is None


def test_a_pool_that_may_not_be_shared_is_one_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    descriptors = os.listdir("/proc/self/fd")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        pool = KVPool(range(8), 64, 16, 2, 8, torch.float32, shared=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert pool.descriptor is None and "is not shared" in caplog.text
    assert pool.base_address % ALIGNMENT == 0 and not pool.memory.any()
    assert os.listdir("/proc/self/fd") == descriptors
