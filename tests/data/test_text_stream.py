from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorgrad.data import TextStream, Tokenizer
from tensorgrad.errors import ArgumentError, DataError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["some words, some more words"], 270)


def parts(stream: TextStream, ids: list[int]) -> list[str]:
    found = [stream.add(token) for token in ids]
    return [*found, stream.rest()]


@given(text=st.text())
def test_no_character_is_cut(tokenizer: Tokenizer, text: str) -> None:
    found = parts(TextStream(tokenizer), tokenizer.encode(text))
    assert "".join(found) == text
    assert "\ufffd" not in "".join(found) or "\ufffd" in text


def test_special_tokens_are_no_text_but_may_be_a_stop(tokenizer: Tokenizer) -> None:
    end = tokenizer.end_of_text
    ids = [*tokenizer.encode("so"), end, *tokenizer.encode("me")]
    assert "".join(parts(TextStream(tokenizer), ids)) == "some"
    assert "".join(parts(TextStream(tokenizer, ["<|endoftext|>"]), ids)) == "so"
    assert tokenizer.decode(ids) == "so<|endoftext|>me"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "some"


def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    found = parts(TextStream(tokenizer), tokenizer.encode_bytes("a€b".encode()))
    assert found == ["a", "", "", "€", "b", ""]


@given(data=st.binary())
def test_bytes_that_are_not_utf8_are_replaced(tokenizer: Tokenizer, data: bytes) -> None:
    found = parts(TextStream(tokenizer), tokenizer.encode_bytes(data))
    assert "".join(found) == data.decode("utf-8", "replace")


@given(text=st.text("ab\n", max_size=12), stops=st.lists(st.sampled_from(["\n\n", "ab", "bba"])))
def test_the_first_stop_ends_the_text(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    stream = TextStream(tokenizer, stops)
    found = "".join(parts(stream, tokenizer.encode_bytes(text.encode())))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stream.ended == bool(ends)
    if not ends:
        assert found == text
    else:
        first = min(ends)  # the stop whose last character comes first
        assert found == text[: min(text.find(s) for s in stops if s in text[:first])]
    assert stream.add(5) == "" or not ends


@pytest.mark.parametrize("text", ["some words", " some more"])
def test_what_ends_a_text_does_not_depend_on_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    letters = [token for letter in text for token in tokenizer.encode(letter)]
    assert len(tokens) < len(letters)
    for stops in (["some", "m"], ["om", "me"], ["me", "ome"]):
        whole, bit_by_bit = (
            "".join(parts(TextStream(tokenizer, stops), ids)) for ids in (tokens, letters)
        )
        assert whole == bit_by_bit


def test_what_cannot_be_done_is_said(tokenizer: Tokenizer) -> None:
    with pytest.raises(ArgumentError, match="stops has ''"):
        TextStream(tokenizer, ["a", ""])
    with pytest.raises(DataError, match="ids has 999"):
        TextStream(tokenizer).add(999)


def test_blanks_before_the_first_word_are_dropped(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "blanks", 2, raising=False)
    for text, begins, expected in (
        ("   a b", True, " a b"),
        (" a b", True, "a b"),
        ("a  b", True, "a  b"),
        ("  a", False, "  a"),
    ):
        ids = tokenizer.encode_bytes(text.encode())
        assert "".join(parts(TextStream(tokenizer, begins=begins), ids)) == expected
    assert not TextStream(tokenizer).ended
    with pytest.raises(ArgumentError, match="stops has '', expected texts of a character or more"):
        TextStream(tokenizer, ["a", ""])
    with pytest.raises(DataError, match="expected 0 to"):
        TextStream(tokenizer).add(tokenizer.vocab_size)
