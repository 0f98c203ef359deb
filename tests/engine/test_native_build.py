"""How the compiled kernel is built and chosen, and what is said and done where there is none."""

from __future__ import annotations

import logging
import platform
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import attention
from engine.native import build, kernel, library
from tests.engine.test_attention import run, text

SOURCE, HEADER = "paged_attention.c", "vectors.h"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with sources that are built at once, for one variant."""
    (tmp_path / SOURCE).write_text("int paged_attention(void) { return 0; }\n")
    (tmp_path / HEADER).write_text("")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setitem(build._VARIANTS, platform.machine(), (build.Variant("baseline"),))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    cached = (library.load, kernel.best)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_what_exists_is_not_built_again_and_what_is_stale_goes(sources: Path) -> None:
    (first,) = build.build()
    assert build.build() == []
    assert stat.S_IMODE(first.stat().st_mode) == 0o755
    (sources / SOURCE).write_text("int paged_attention(void) { return 1; }\n")
    (second,) = build.build()
    assert first != second
    (sources / HEADER).write_text("/* changed */\n")
    (third,) = build.build()
    assert sorted(sources.glob("*.so")) == [third]
    assert not list(sources.glob(".build-*"))


def test_without_a_compiler_it_says_what_to_do(
    sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.main() == 1
    assert "'no-such-compiler' is not there. Install one (Debian: apt-get install gcc" in capsys.readouterr().err


def test_a_compiler_that_fails_leaves_nothing_behind(
    sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (sources / SOURCE).write_text("this is not C\n")
    assert build.main() == 1
    assert "failed:" in (told := capsys.readouterr().err) and "paged_attention.c" in told
    assert sorted(path.name for path in sources.iterdir()) == [SOURCE, HEADER]


def test_where_it_was_not_built_torch_answers_and_the_log_says_so_once(
    sources: Path, nothing_loaded: None, caplog: pytest.LogCaptureFixture
) -> None:
    own = text(40)
    parts = [(own, 0, 40)]
    with caplog.at_level(logging.WARNING):
        (answer,) = run(attention.attend, parts)
        run(attention.attend, parts)
    assert torch.equal(answer, run(attention.attend_in_torch, parts)[0])
    (record,) = caplog.records
    assert f"compiled kernels are missing in {sources}" in record.message and "run `make setup`" in record.message


def test_a_broken_object_is_named_and_torch_answers(
    sources: Path, nothing_loaded: None, caplog: pytest.LogCaptureFixture
) -> None:
    build.variants()[0].path().write_bytes(b"not an object")
    run(attention.attend, [(text(3), 0, 3)])
    assert "cannot be loaded" in caplog.records[0].message
    assert "kernels are missing" in caplog.records[1].message


def test_float16_is_attended_in_torch() -> None:
    own = text(40, dtype=torch.float16)
    (answer,) = run(attention.attend, [(own, 0, 40)])
    assert answer.dtype == torch.float16


@pytest.mark.skipif(platform.machine() != "x86_64", reason="variants are of x86-64")
def test_a_processor_gets_the_fastest_variant_that_it_has_all_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for features, names in {
        frozenset[str](): ["baseline"],
        build._V3: ["avx2", "baseline"],
        build._V3 - {"fma"}: ["baseline"],
        build._V4: ["avx512", "avx2", "baseline"],
        build._V4 - {"avx512vl"}: ["avx2", "baseline"],
    }.items():
        monkeypatch.setattr(library, "_processor_features", lambda given=features: given)
        assert [variant.name for variant in library.runnable()] == names
