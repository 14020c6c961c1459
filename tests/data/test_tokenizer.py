from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tensorgrad.data import END_OF_TEXT, PublishedTokenizer, Tokenizer, documents, prepare
from tensorgrad.data import tokenizer as module
from tensorgrad.data.tokenizer_file import ALPHABET, TokenBytes, in_order, vocabulary_state
from tensorgrad.errors import ArgumentError, DataError, DtypeError
from tests.disk import full_disk
from tests.source_tree import ROOT

TEXT = "".join(text for text, _ in zip(documents("stdlib"), range(12), strict=False))
# Characters that the rule for words treats differently, and whitespace on which systems disagree.
SPACES = "\t\n\x0b\x0c\r\x1c\x85\xa0\u180e\u2003\u200b\u3000\ufeff"
CHARACTERS = [*SPACES, *"ab1 !'_é²Ⅷ中\u0301😀", "'s", "'ll"]
TANGLED = st.lists(st.sampled_from(CHARACTERS), max_size=40).map("".join)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], 600)


@given(text=st.text() | TANGLED)
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@given(data=st.binary() | st.text().map(lambda text: text.encode()[1:]))
def test_every_byte_string_comes_back(tokenizer: Tokenizer, data: bytes) -> None:
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


@given(text=st.text() | TANGLED | st.text(st.characters(max_codepoint=127)))
def test_cutting_and_remembering_leave_no_trace(tokenizer: Tokenizer, text: str) -> None:
    whole = tokenizer._inner.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_batch([text, "x", text]) == [whole, tokenizer.encode("x"), whole]


def test_source_code_is_encoded_as_the_library_does(tokenizer: Tokenizer) -> None:
    for text in (TEXT, TEXT + "é"):
        whole = tokenizer._inner.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == whole


def test_what_is_remembered_has_a_limit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 10)
    for number in range(100):
        assert tokenizer.decode(tokenizer.encode(f"word{number}")) == f"word{number}"
        assert len(tokenizer._known) < 20
    monkeypatch.setattr(module, "_REMEMBERED", 1000)
    for number in range(100):
        line = f"語{number}" * 100  # no place to cut it
        assert tokenizer.decode(tokenizer.encode(line)) == line
        assert sum(map(len, tokenizer._known)) < 1400


def test_training_compresses_and_cuts_without_a_trace(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenizer.vocab_size == 600
    assert len(tokenizer.encode(TEXT)) < 0.5 * len(TEXT)
    monkeypatch.setattr(module, "_PIECE", 50)
    assert Tokenizer.train([TEXT], 600).to_json() == tokenizer.to_json()


def test_words_that_would_train_for_hours_are_cut() -> None:
    genome = "acgt" * 10_000
    for text in (genome, f"a title\n{genome}\nan end "):
        pieces = list(module._pieces(text))
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= 1001
    tokenizer = Tokenizer.train([genome], 300)
    assert tokenizer.decode(tokenizer.encode(genome)) == genome


def test_training_gives_the_same_in_every_process(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT, encoding="utf-8", newline="")
    script = (
        "import sys\nfrom tensorgrad.data import Tokenizer\n"
        "from tensorgrad.data.text import read_text\n"
        "Tokenizer.train([read_text(sys.argv[1])], 600).save(sys.argv[2])\n"
    )
    processes = {
        tmp_path / threads: subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "text"), str(tmp_path / threads)],
            cwd=ROOT,
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
        )
        for threads in ("1", "3")
    }
    for saved, process in processes.items():
        assert process.wait(120) == 0
        assert saved.read_text(encoding="utf-8") == tokenizer.to_json()


def test_special_tokens_have_ids_but_are_text_in_a_text() -> None:
    tokenizer = Tokenizer.train([TEXT], 300, special_tokens=["<pad>", "<bos>"])
    assert tokenizer.end_of_text == tokenizer.start_token == 0
    assert tokenizer.end_tokens == (0,)
    assert tokenizer.special_ids == {0, 1, 2}
    assert repr(tokenizer) == (
        f"Tokenizer(vocab_size={tokenizer.vocab_size}, special_tokens=['<|endoftext|>', '<pad>', "
        "'<bos>'])"
    )
    assert tokenizer.encode_prompt("") == [0]
    assert tokenizer.encode_prompt("a") == tokenizer.encode("a") != []
    assert tokenizer.decode([2, *tokenizer.encode("a"), 0], skip_special_tokens=True) == "a"
    assert tokenizer.special_tokens == {END_OF_TEXT: 0, "<pad>": 1, "<bos>": 2}
    ids = tokenizer.encode(f"a<pad>b{END_OF_TEXT}")
    assert not {0, 1, 2} & set(ids)
    assert tokenizer.decode(ids) == f"a<pad>b{END_OF_TEXT}"
    assert tokenizer.decode([2, *tokenizer.encode("é"), 0]) == f"<bos>é{END_OF_TEXT}"


def test_nothing_is_encoded_as_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode_batch(["", "a"]) == [[], tokenizer.encode("a")]
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode_bytes(b"") == []


def test_half_a_character_is_replaced(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_bytes("é".encode()[:1])) == "\ufffd"


def test_decode_takes_arrays(tokenizer: Tokenizer) -> None:
    ids = np.array(tokenizer.encode("some text"), np.uint16)
    assert tokenizer.decode(ids) == tokenizer.decode(iter(ids)) == "some text"


def test_the_alphabet_of_bytes_is_that_of_gpt2() -> None:
    shown = {character: byte for byte, character in enumerate(ALPHABET)}
    assert len(shown) == 256
    for byte, character in ((0, 256), (0x20, 0x120), (0x21, 0x21), (0x7E, 0x7E), (0x7F, 0x121)):
        assert ord(ALPHABET[byte]) == character
    for byte, character in ((0xA0, 0x142), (0xA1, 0xA1), (0xAC, 0xAC), (0xAD, 0x143), (0xAE, 0xAE)):
        assert ord(ALPHABET[byte]) == character
    assert set(ALPHABET) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("bad", [-1, 600, 1 << 40])
def test_an_id_outside_the_vocabulary_is_an_error(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(DataError, match=f"ids has {bad}, expected 0 to 599 .a vocabulary of 600"):
        tokenizer.decode([5, bad, 7])


def test_vocabularies_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_order({"b": 1, "a": 0}, "x") == ["a", "b"]
    with pytest.raises(DataError, match=r"x has 2 tokens with ids up to 2, expected ids 0 to 1 wi"):
        in_order({"a": 0, "b": 2}, "x")
    monkeypatch.setattr("tensorgrad.data.tokenizer_file._VALUES", {",": 2})
    assert vocabulary_state('{"a": 0, "b": 1, "c": 2}', "x") == {"a": 0, "b": 1, "c": 2}
    with pytest.raises(DataError, match="x has 3 times ',', expected at most 2"):
        vocabulary_state('{"a": 0, "b": 1, "c": 2, "d": 3}', "x")
    for needed in (lambda: TokenBytes().start_token, lambda: TokenBytes().encode("a")):
        with pytest.raises(NotImplementedError):
            needed()


def test_text_is_cut_for_training_where_words_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one two three four five six seven"
    assert list(module._pieces(text)) == [text]
    monkeypatch.setattr(module, "_PIECE", 8)
    pieces = list(module._pieces(text))
    assert "".join(pieces) == text
    assert len(pieces) == 3
    assert all(8 <= len(piece) <= 16 for piece in pieces[:-1])


def test_little_text_gives_a_small_vocabulary() -> None:
    assert Tokenizer.train(["abab"], 1000).vocab_size < 300


def test_training_on_nothing_is_an_error() -> None:
    for texts in ([], ["", ""]):
        with pytest.raises(DataError, match="documents has no text"):
            Tokenizer.train(texts, 300)


def test_one_text_is_refused_as_a_list(tokenizer: Tokenizer) -> None:
    with pytest.raises(DtypeError, match=r"Tokenizer\.train: texts is a str, expected a list"):
        Tokenizer.train("some text", 300)
    with pytest.raises(DtypeError, match=r"Tokenizer\.train: text is a bytes, expected a str"):
        Tokenizer.train([b"some text"], 300)  # type: ignore[list-item]
    with pytest.raises(DtypeError, match=r"Tokenizer\.encode: texts is a str, expected a list"):
        tokenizer.encode_batch("some text")


def test_half_a_surrogate_pair_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"encode: text has '\\ud800', half of a surrogate pair"):
        tokenizer.encode_batch(["good", "bad \ud800"])
    with pytest.raises(DataError, match=r"train: text has '\\ud800', half of a surrogate pair"):
        Tokenizer.train(["good", "bad \ud800"], 300)
    with pytest.raises(TypeError):
        tokenizer.encode(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="text is a NoneType, expected a str"):
        tokenizer.encode_batch(["good", None])  # type: ignore[list-item]


@pytest.mark.parametrize("ids", [[1.0], ["a"], [None], np.ones((1, 2), int)], ids=str)
def test_ids_that_are_not_integers_are_named(tokenizer: Tokenizer, ids: Any) -> None:
    with pytest.raises(DtypeError, match=r"Tokenizer\.decode: ids has .*, expected integers"):
        tokenizer.decode(ids)


@pytest.mark.parametrize("special", ["e", "\u0120", "the", "\u0120the"])
def test_a_special_token_that_text_gives_too_is_refused(special: str) -> None:
    with pytest.raises(DataError, match=f"has the special token '{special}', which stands for"):
        Tokenizer.train(["over the the hills"] * 9, 400, [special])


@pytest.mark.parametrize("special", ["ab", [3]])
def test_special_tokens_of_another_kind_are_named(special: Any) -> None:
    with pytest.raises(ArgumentError, match=r"special_tokens is .*, expected a list"):
        Tokenizer.train(["text"], 400, special)


@pytest.mark.parametrize(
    ("size", "special", "message"),
    [
        (256, (), "vocab_size has 256, expected 257 or more"),
        (257, ("<a>",), "vocab_size has 257, expected 258 or more .256 bytes and 2 special"),
        (1 << 31, (), "below 2"),
        (1 << 24, (), "vocab_size has 16777216, expected 257 or more .* and below 2"),
        (300, ("x" * 100_000,), "special_tokens has .*, expected"),
        (300, ("<a>", "<a>"), "special_tokens has .*, expected distinct"),
        (300, ("",), "special_tokens has .*, expected distinct, not empty"),
        (300, (END_OF_TEXT,), "special_tokens has .*, expected distinct, .* without"),
    ],
)
def test_bad_settings_are_errors(size: int, special: tuple[str, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Tokenizer.train([TEXT], size, special)


def test_a_saved_tokenizer_is_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.special_tokens == tokenizer.special_tokens
    theirs = tokenizers.Tokenizer.from_file(str(path))
    assert theirs.encode(TEXT).ids == tokenizer.encode(TEXT)
    assert theirs.decode(tokenizer.encode(TEXT)) == TEXT


DIGITS = r"'(?i:s|t)|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"


def test_words_follow_a_pattern_which_is_saved(tmp_path: Path) -> None:
    texts = ["in 1234567 words 1234567, that isn't\n\n  so\n"] * 50
    tokenizer = Tokenizer.train(texts, 320, pattern=DIGITS)
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode("1234567 words")]
    assert tokens == ["123", "456", "7", " ", "words"]
    assert Tokenizer.train(texts, 320).pattern is None
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (again.pattern, again.digest) == (DIGITS, tokenizer.digest)
    assert again.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert PublishedTokenizer.of(again).encode(texts[0]) == tokenizer.encode(texts[0])
    with pytest.raises(DataError, match="half of a surrogate pair"):
        tokenizer.encode("\ud800")
    several = ["so", "", "in 12"]
    assert tokenizer.encode_batch(several) == [tokenizer.encode(text) for text in several]
    assert tokenizer.decode(tokenizer.encode_batch(several)[2]) == "in 12"


@given(text=st.text(st.sampled_from("ab1 \n\rä世\u3000'.")))
def test_text_comes_back_whatever_the_pattern(digits: Tokenizer, text: str) -> None:
    assert digits.decode(digits.encode(text)) == text


@pytest.fixture(scope="module")
def digits() -> Tokenizer:
    return Tokenizer.train(["a1 b22 ä333"], 270, pattern=r"\p{N}+")  # the rest is between matches


@pytest.mark.parametrize("pattern", ["(a", "", r"\p{Nothing}", 3])
def test_a_pattern_that_is_no_regular_expression_is_an_error(pattern: Any) -> None:
    with pytest.raises(ArgumentError, match=r"pattern .*expression"):
        Tokenizer.train(["text"], 300, pattern=pattern)
    with pytest.raises(ArgumentError, match=r"pattern .*expression"):
        prepare("no-such-file", "cache", pattern=pattern)


def test_a_full_disk_keeps_the_saved_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    with full_disk(1000), pytest.raises(DataError, match=r"cannot write .*tokenizer\.json"):
        tokenizer.save(path)
    assert path.read_text() == "old"


def change(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update(changes)


def drop(token: str) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        del state["model"]["vocab"][token]
        state["model"]["merges"] = []
        state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] != token]

    return edit


def add(token: str, number: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["model"]["vocab"].update({token: number})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(pre_tokenizer=None), "pre_tokenizer None, expected 'ByteLevel'"),
        (change(pre_tokenizer={"type": "Whitespace"}), "'Whitespace', expected 'ByteLevel'"),
        (change(normalizer={"type": "NFC"}), "normalizer 'NFC', expected None"),
        (lambda state: state["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space"),
        (lambda state: state["model"].update(dropout=0.5), "dropout 0.5, expected None"),
        (lambda state: state["model"].update(end_of_word_suffix="e"), "suffix 'e', expected None"),
        (lambda state: state["added_tokens"][0].update(special=False), "special False"),
        (drop("a"), "lacks 1 needed tokens, such as 'a'"),
        (drop(END_OF_TEXT), "lacks 1 needed tokens, such as '<.endoftext.>'"),
        (add("ab", 5000), "has the id 5000 for 'ab', expected 0 to 599 without gaps"),
        (add("\u4e00", 600), "the token '\u4e00', expected only the characters that stand for"),
        (lambda state: state.clear(), r"not a tokenizer\.json"),
        (change(model=None), "has model None, expected a dict"),
        (change(model=[]), r"has model \[\], expected a dict"),
        (change(added_tokens={}), r"has added_tokens \{\}, expected a list"),
        (change(added_tokens=[3]), "has special None, expected a bool"),
        (change(added_tokens=[{"special": True}]), "has content None, expected a str"),
        (change(added_tokens=[]), r"the special tokens \[\], expected '<.endoftext.>' among them"),
        (change(pre_tokenizer=7), "pre_tokenizer 7, expected 'ByteLevel'"),
        (change(normalizer=[1]), r"normalizer \[1\], expected None"),
        (lambda state: state["model"].update(vocab=[]), r"has vocab \[\], expected a dict"),
        (lambda state: state["model"].update(merges=None), "has merges None, expected a list"),
        (lambda state: state["model"]["merges"].append(3), "the merge 3, expected two tokens"),
        (lambda state: state["model"]["merges"].append("a b c"), "'a b c', expected two tokens"),
        (lambda state: state["model"]["merges"].append(["a", 1]), "expected two tokens"),
        # These two abort the process where the library sees them.
        (add("ab", 2**31), "the id 2147483648 for 'ab', expected 0 to 599 without gaps"),
        (add("ab", 2**32 - 1), "the id 4294967295 for 'ab', expected 0 to 599 without gaps"),
        (add("ab", -1), "the id -1 for 'ab', expected 0 to 599 without gaps"),
        (add("ab", "1"), "the id '1' for 'ab', expected 0 to 599"),
        (add("ab", True), "the id True for 'ab', expected 0 to 599"),
        (add("ab", None), "the id None for 'ab', expected 0 to 599"),
        (lambda state: state["added_tokens"][0].update(id=2**31), "the id 2147483648 for '<.endof"),
        # A panic: no token is as long as what this makes.
        (lambda state: state["model"]["merges"].append(["a" * 99, "b"]), "of the vocabulary: 'aaa"),
    ],
)
def test_a_tokenizer_of_another_kind_is_an_error(
    tokenizer: Tokenizer, tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    state = json.loads(tokenizer.to_json())
    edit(state)
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=message):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_missing_or_damaged_file_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"cannot read .*tokenizer\.json: No such file"):
        Tokenizer.load(path)
    path.write_text(tokenizer.to_json()[:-100])
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read as JSON"):
        Tokenizer.load(path)


@pytest.fixture
def published(tokenizer: Tokenizer, tmp_path: Path) -> tuple[Path, Path]:
    """Write the vocabulary as GPT-2's was published."""
    model = json.loads(tokenizer.to_json())["model"]
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt.gz"
    vocab.write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    merges.write_bytes(gzip.compress("\n".join(lines).encode()))
    return vocab, merges


def test_the_tokenizer_of_a_folder_is_found_in_one_way(
    tokenizer: Tokenizer, published: tuple[Path, Path]
) -> None:
    folder = published[0].parent
    (folder / "merges.txt").write_bytes(gzip.decompress(published[1].read_bytes()))
    for expected in (tokenizer, Tokenizer.train([TEXT], 260)):
        assert Tokenizer.load(folder).encode(TEXT) == expected.encode(TEXT)
        assert PublishedTokenizer.load(folder).encode(TEXT) == expected.encode(TEXT)
        Tokenizer.train([TEXT], 260).save(folder / "tokenizer.json")


def test_gpt2_files_are_read(tokenizer: Tokenizer, published: tuple[Path, Path]) -> None:
    loaded = Tokenizer.from_gpt2(*published)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.special_tokens == tokenizer.special_tokens
    assert loaded.decode(loaded.encode(TEXT)) == TEXT


def test_gpt2_files_that_do_not_fit_are_errors(published: tuple[Path, Path]) -> None:
    vocab, merges = published
    with pytest.raises(DataError, match="cannot read"):
        Tokenizer.from_gpt2(vocab, vocab.with_name("none"))
    short = vocab.with_name("short.txt")
    short.write_text("\n".join(gzip.decompress(merges.read_bytes()).decode().splitlines()[:-1]))
    with pytest.raises(DataError, match=r"none of which makes .*, expected one for each token"):
        Tokenizer.from_gpt2(vocab, short)
    with pytest.raises(DataError, match="cannot be read as JSON"):
        Tokenizer.from_gpt2(merges, vocab)
    for line in ("a b c", "unknown pair"):
        wrong = vocab.with_name("merges.txt")
        wrong.write_text(f"#version: 0.2\n{line}\n")
        with pytest.raises(DataError, match=r"has the merge .*, expected (two t|t)okens"):
            Tokenizer.from_gpt2(vocab, wrong)
    state = json.loads(vocab.read_text())
    del state[END_OF_TEXT]
    vocab.write_text(json.dumps(state))
    with pytest.raises(DataError, match="lacks 1 needed tokens"):
        Tokenizer.from_gpt2(vocab, merges)
    vocab.write_text("[]")
    with pytest.raises(DataError, match="holds a list, expected a mapping"):
        Tokenizer.from_gpt2(vocab, merges)


def test_a_panic_of_the_library_is_an_error(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorgrad.data.tokenizer_file.check_merges", lambda *_: None)
    state = json.loads(tokenizer.to_json())
    state["model"]["merges"].append(["a" * 99, "b"])
    for each in ("a" * 99, "b"):
        state["model"]["vocab"].setdefault(each, len(state["model"]["vocab"]))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer\.json: .*out of "):
        Tokenizer.load(path)


def test_what_ends_the_program_is_not_an_error_of_the_library(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped:
        @staticmethod
        def from_str(text: str) -> None:
            raise KeyboardInterrupt

    tokenizer.save(tmp_path / "tokenizer.json")
    monkeypatch.setattr("tokenizers.Tokenizer", Stopped)
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"model": ' + "9" * 5000 + "}", "has 5000 digits, expected 64 bits"),
        ('{"model": {}, "model": {}}', "the key 'model' is there 2 times"),
        ('{"model": "\\ud800"}', "half of a surrogate pair"),
        ('{"model": NaN}', "has the number NaN"),
    ],
)
def test_json_that_is_refused_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"{path} cannot be read as JSON: .*{message}"):
        Tokenizer.load(path)
    with pytest.raises(DataError, match=rf"{path} cannot be read as JSON: .*{message}"):
        Tokenizer.from_gpt2(path, path)


def test_merges_that_were_cut_short_are_noticed(published: tuple[Path, Path]) -> None:
    vocab, merges = published
    lines = gzip.decompress(merges.read_bytes()).splitlines(keepends=True)
    for length in (0, 1, len(lines) // 2, len(lines) - 1):
        merges.write_bytes(gzip.compress(b"".join(lines[:length])))
        with pytest.raises(DataError, match=r"none of which makes .* is it cut short\?"):
            Tokenizer.from_gpt2(vocab, merges)


def test_a_vocabulary_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    bomb = gzip.compress(b" " * (1 << 24), 1)
    (tmp_path / "vocab.json.gz").write_bytes(bomb * 8)
    with pytest.raises(DataError, match=r"vocab\.json\.gz has more than 67,108,864 characters"):
        Tokenizer.from_gpt2(tmp_path / "vocab.json.gz", tmp_path / "none")


@pytest.mark.parametrize("word", [" ", "\n", "a", " \n", "é"])
def test_a_long_run_of_a_character_is_trained_on_soon(word: str) -> None:
    began = time.process_time()
    tokenizer = Tokenizer.train([word * 300_000, f"{word * 200_000}the cat"], 262)
    assert time.process_time() - began < 5  # n^2 steps took a minute
    text = f"{word * 5000} cat"
    assert tokenizer.decode(tokenizer.encode(text)) == text
