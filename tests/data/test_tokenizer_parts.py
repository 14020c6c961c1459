"""An untrusted tokenizer.json: parts that are unknown, too large, or take too long."""

from __future__ import annotations

import base64
import copy
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tensorgrad.data import PublishedTokenizer, Tokenizer, limited_encoding
from tensorgrad.data.tokenizer_file import ALPHABET
from tensorgrad.errors import ArgumentError, DataError

State = dict[str, Any]
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
END: State = {"id": 256, "content": "<|endoftext|>", "special": True, **FLAGS}
BYTES: State = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
PLAIN: State = {
    "version": "1.0",
    "added_tokens": [END],
    "pre_tokenizer": BYTES,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
    "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(ALPHABET)}, "merges": []},
}


def steps(section: str, *parts: State) -> Callable[[State], None]:
    key = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}.get(section, "processors")
    return lambda state: state.update({section: {"type": "Sequence", key: list(parts)}})


def split(pattern: str) -> Callable[[State], None]:
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return steps("pre_tokenizer", part, BYTES | {"use_regex": False})


def replace(pattern: str, content: str) -> State:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def template(*single: State, ids: list[Any] | None = None) -> Callable[[State], None]:
    special = {"x": {"id": "x", "ids": [256] if ids is None else ids, "tokens": ["x"]}}
    part = {"type": "TemplateProcessing", "pair": [], "special_tokens": special}
    return steps("post_processor", {**part, "single": list(single)})


def precompiled(texts: bytes, trie: int = 1024) -> Callable[[State], None]:
    data = base64.b64encode(struct.pack("<I", trie) + bytes(1024) + texts).decode()
    return steps("normalizer", {"type": "Precompiled", "precompiled_charsmap": data})


def model(**values: Any) -> Callable[[State], None]:
    return lambda state: state["model"].update(values)


def added(count: int, length: int) -> Callable[[State], None]:
    more = [{**END, "id": 257 + n, "content": f"{n:0{length}}"} for n in range(count)]
    return lambda state: state["added_tokens"].extend(more)


def made(change: Callable[[State], None]) -> PublishedTokenizer:
    state = copy.deepcopy(PLAIN)
    change(state)
    return PublishedTokenizer({"tokenizer.json": json.dumps(state)}, "untrusted")


TEXT_A: State = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL: State = {"SpecialToken": {"id": "x", "type_id": 0}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (steps("normalizer", *[replace("a", "aa")] * 32), "times as long"),
        (steps("normalizer", *[replace("a", "a")] * 33), "33 steps of its normalizer"),
        (steps("normalizer", replace("a", "a" * 65)), "content of 65 characters"),
        (steps("normalizer", replace("", "a")), "it is empty or not a text"),
        (steps("normalizer", replace("a", 3)), "content 3, expected a text"),  # type: ignore[arg-type]
        (steps("normalizer", *[{"type": "Prepend", "prepend": "a" * 64}] * 4), "times as long"),
        (steps("normalizer", {"type": "Nmt"}), "the normalizer 'Nmt', expected one of"),
        (steps("normalizer", None), "the normalizer None"),  # type: ignore[arg-type]
        (lambda state: state.update(normalizer=[]), r"\[\] as a part"),
        (precompiled(b"a" * 1000 + b"\0"), "a text of 1,000 bytes"),
        (precompiled(b"a"), "a text of 1 bytes, expected at most 64 and a 0"),
        (precompiled(b"", 5000), "a trie of 5,000 bytes"),
        (steps("normalizer", {"type": "Precompiled", "precompiled_charsmap": "!"}), "map of char"),
        (split("(a+)+$"), "a repetition in a repetition"),
        (split(""), "it is empty or not a text"),
        (steps("pre_tokenizer", {"type": "FixedLength", "length": 0}), "'FixedLength'"),
        (steps("pre_tokenizer", *[BYTES] * 7), "times as long"),
        (template(TEXT_A, TEXT_A), r"texts \['A', 'A'\] in single"),
        (template(*[SPECIAL] * 64, TEXT_A), "a list of at most 64"),
        (template(TEXT_A, ids=[4_000_000_000]), "the id 4000000000, expected 0 to 256"),
        (template(TEXT_A, ids=[1] * 17), "a list of at most 16"),
        (steps("post_processor", {"type": "BertProcessing", "sep": ["a", 999]}), "sep"),
        (lambda s: s.update(decoder={"type": "Strip", "content": " ", "start": "x"}), "start 'x'"),
        (lambda s: s.update(decoder={"type": "CTC"}), "the decoder 'CTC'"),
        (model(dropout=0.5), "dropout 0.5, expected none"),
        (model(unk_token="x" * 2049), "unk_token of 2,049 characters, expected at most 2,048"),
        (template(TEXT_A, ids=[257]), "the id 257, expected 0 to 256"),
        (template(TEXT_A, ids=[-1]), "the id -1, expected 0 to 256"),
        (template(TEXT_A, ids=[True]), "the id True, expected 0 to 256"),
        (template(SPECIAL), r"texts \[\] in single, expected \['A'\]"),
        (
            steps("post_processor", {"type": "RobertaProcessing", "sep": 3}),
            "cls None, expected a t",
        ),
        (
            steps("post_processor", {"type": "BertProcessing", "sep": ["a", 257]}),
            "sep 257, expected",
        ),
        (lambda s: s.update(decoder={"type": "Strip", "start": 65}), "start 65, expected 0 to 64"),
        (lambda s: s.update(decoder={"type": "Strip", "stop": -1}), "stop -1, expected 0 to 64"),
        (steps("normalizer", {"type": "Replace", "pattern": 3}), "pattern 3, expected a String or"),
        (steps("normalizer", replace("a" * 65, "b")), "pattern of 65 characters, expected at most"),
        (lambda s: s.update(normalizer={"type": "Sequence"}), "normalizers None, expected a list"),
        (precompiled(b"", 1023), "a trie of 1,023 bytes, expected at most 1,024"),
        (precompiled(b"a" * 65 + b"\0"), "a text of 65 bytes, expected at most 64 and a 0"),
        (model(continuing_subword_prefix="x" * 17), "of 17 characters"),
        (model(end_of_word_suffix=["x"]), "end_of_word_suffix"),
        (model(byte_fallback="yes"), "byte_fallback 'yes', expected true or false"),
        (lambda s: s["model"]["vocab"].update({"x" * 2049: 257}), "a token of 2,049 characters"),
        (added(20_001, 5), "20,002 added tokens"),
        (added(200, 2000), "added tokens of 400,013 characters"),
        (added(1, 2049), "an added token of 2,049 characters"),
        (lambda s: s["added_tokens"].append({**END, "id": 257, "content": ""}), "without a char"),
        (lambda s: s.update(version=[{}] * 100_001), r"times '\{', expected at most 100,000"),
        (lambda s: s.update(version=":" * 700_001), "times ':', expected at most 700,000"),
    ],
)
def test_an_untrusted_part_is_refused(change: Callable[[State], None], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        made(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: None,
        split(r"\s+$"),
        split("[0-9][0-9][0-9]"),
        steps("pre_tokenizer", {"type": "Digits", "individual_digits": True}, BYTES),
        steps("normalizer", {"type": "NFC"}, {"type": "Lowercase"}, replace(" ", "\u2581")),
        precompiled(b"a\0fi\0"),
        template(SPECIAL, TEXT_A, SPECIAL),
        model(dropout=0.0, unk_token=None, fuse_unk=False, ignore_merges=True),
        added(1500, 10),
        template(TEXT_A, ids=[0] * 16),
        template(*[SPECIAL] * 63, TEXT_A),
        model(unk_token="x" * 2048, continuing_subword_prefix="x" * 0),
        steps("normalizer", *[replace("1", "1")] * 32),
        steps("normalizer", *[replace("z", "zz")] * 5),
        steps("normalizer", replace("z", "z" * 32)),
        precompiled(b"a" * 32 + b"\0"),
        added(1, 2048),
    ],
)
def test_parts_of_published_models_are_allowed(change: Callable[[State], None]) -> None:
    tokenizer = made(change)
    assert tokenizer.decode(tokenizer.encode("12a 3"), True).replace("\u2581", " ") == "12a 3"


def test_a_long_text_is_encoded_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    published, pattern = made(split(r"\s+$")), r"[a-z]+|\s+$"
    own = Tokenizer.train(["ab"], 300, pattern=pattern)
    text = "ab c\u00e9 <|endoftext|> " * 200
    for tokenizer in (published, own):
        whole = tokenizer.encode(text)
        assert len(text) > 2000
        assert tokenizer.decode(whole) == text
    texts = ["ab", text, "c", text[:2001], ""]
    assert own.encode_batch(texts) == [own.encode(each) for each in texts]
    assert own.end_of_text not in own.encode(text)
    monkeypatch.setattr(limited_encoding, "_SECONDS", 0.5)
    for tokenizer in (published, own):
        with pytest.raises(DataError, match=r"it took more than 0.5 s"):
            tokenizer.encode(" " * 49_000 + "x")


def test_training_refuses_what_could_not_be_loaded() -> None:
    with pytest.raises(ArgumentError, match=r"pattern is .*expected one that is matched soon"):
        Tokenizer.train(["a b"], 300, pattern="(a+)+$")
    with pytest.raises(ArgumentError, match="special_tokens has an added token of 3,000 char"):
        Tokenizer.train(["a b"], 300, ["x" * 3000])
