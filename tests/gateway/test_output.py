"""From tokens to shown text: counts, stop strings across tokens, ending tokens, offsets."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.detokenize import Vocabulary
from gateway.merge import Token
from gateway.model_files import ModelFiles
from gateway.output import Output

EOS = 2


def output(
    vocabulary: Vocabulary, stops: Sequence[str] = (), min_tokens: int = 0, ending: Sequence[int] = ()
) -> Output:
    return Output(vocabulary, stops, min_tokens, ending)


def told(files: ModelFiles, text: str) -> list[Token]:
    return [Token(token) for token in files.encode(text, add_special_tokens=False)]


def test_a_stop_string_across_tokens_cuts_the_text_and_the_count(files: ModelFiles) -> None:
    tokens = told(files, "one two three four")
    assert len(tokens) == 4
    out = output(files.vocabulary, ["wo th"])
    assert [out.push([token]).text for token in tokens[:3]] == ["one", " t", ""]
    assert out.stopped
    assert out.count == 3
    assert out.push(tokens[3:]).text == ""
    assert (out.finish().text, out.count) == ("", 3)


def test_one_batch_or_many_give_the_same(files: ModelFiles) -> None:
    tokens = told(files, "one two three four")
    out = output(files.vocabulary, ["wo th"])
    piece = out.push(tokens)
    assert (piece.text, out.count, len(piece.tokens)) == ("one t", 3, 3)


def test_held_text_is_shown_at_the_end(files: ModelFiles) -> None:
    out = output(files.vocabulary, ["two!"])
    assert out.push(told(files, "one two")).text == "one "
    assert out.finish().text == "two"
    assert not out.stopped


def test_a_stop_string_completed_by_the_last_flush(files: ModelFiles) -> None:
    out = output(files.vocabulary, ["\ufffd"])
    out.push([Token(token) for token in files.encode("x👩", add_special_tokens=False)[:-1]])
    assert out.finish().text == ""
    assert out.stopped


def test_the_token_that_ends_is_counted_but_not_shown(files: ModelFiles) -> None:
    tokens = told(files, "one two")
    out = output(files.vocabulary, ending=(tokens[1].id,))
    assert (out.push(tokens).text, out.count) == ("one", 2)


def test_nothing_stops_before_min_tokens(files: ModelFiles) -> None:
    tokens = told(files, "one one one")
    out = output(files.vocabulary, [" one"], min_tokens=2, ending=(tokens[1].id,))
    assert out.push(tokens[:2]).text == "one one"
    assert not out.stopped
    out.push([tokens[2]])
    assert out.finish().text == ""


def test_offsets_count_characters_of_the_whole_text(files: ModelFiles) -> None:
    out = output(files.vocabulary)
    first = out.push(told(files, "one two"))
    second = out.push(told(files, " three"))
    assert [*first.offsets, *second.offsets] == [0, 3, 7]


def test_special_tokens_are_not_shown(files: ModelFiles) -> None:
    out = output(files.vocabulary)
    assert out.push([Token(EOS), *told(files, "x"), Token(EOS)]).text == "x"
    assert out.count == 3
