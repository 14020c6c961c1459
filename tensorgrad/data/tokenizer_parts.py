"""The parts that a tokenizer.json may have: an allow-list, with the sizes of each.

The tokenizers library does what the file says: a chain of 40 `Replace` turns one letter into 2^40,
a post-processor adds a million tokens to each text, a regular expression backtracks for days. Here
are the parts of published tokenizers, and bounds that these are far from. A text of n characters
becomes 64 n at most inside the library. Tests: tests/data/test_tokenizer_parts.py.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorgrad.core.errors import DataError
from tensorgrad.data.word_patterns import LINEAR, problem_of

_NORMALIZERS = {
    *("ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Precompiled", "Prepend", "Replace"),
    *("Strip", "StripAccents"),
}
_PRE_TOKENIZERS = {
    *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation"),
    *("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
}
_POST_PROCESSORS = {"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"}
_DECODERS = {
    "BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip",
}  # fmt: skip
_SECTIONS = {  # and the key of a sequence of steps
    "normalizer": (_NORMALIZERS, "normalizers"),
    "pre_tokenizer": (_PRE_TOKENIZERS, "pretokenizers"),
    "post_processor": (_POST_PROCESSORS, "processors"),
    "decoder": (_DECODERS, "decoders"),
}
_STEPS = 32  # steps of a section
_TEXT = 64  # characters that a step adds, or looks for
_GROWTH = 64  # growth of a text by all steps
_PIECES = 64  # pieces of a template of the post-processor
_SPECIAL = 16  # ids of a special token in it
_TOKEN = 2048  # characters of a token
_ADDED, _ADDED_CHARACTERS = 20_000, 1 << 18
_AFFIX = 16  # characters of the prefix or suffix of tokens inside words
_MODEL_TEXTS = {
    "continuing_subword_prefix": _AFFIX, "end_of_word_suffix": _AFFIX, "unk_token": _TOKEN,
}  # fmt: skip
_STEP_TEXTS = {"prepend", "content", "replacement", "delimiter", "suffix"}
_FLAGS = {
    *("fuse_unk", "byte_fallback", "ignore_merges", "single_word", "lstrip", "rstrip"),
    *("normalized", "special", "add_prefix_space", "trim_offsets", "use_regex", "invert"),
}


class PartError(Exception):
    """A part that is refused: the part, and what is expected in its place."""


def check_parts(state: Mapping[str, Any], size: int, name: str) -> None:
    """Raise DataError where a tokenizer.json has a part that is unknown or too large.

    Args:
        state: of the file.
        size: of the vocabulary, with added tokens.
        name: of the file, for errors.
    """
    try:
        _check_model(state["model"])
        check_added(state["added_tokens"])
        _check_sections(state, size)
    except PartError as error:
        part, expected = error.args
        raise DataError(
            f"Tokenizer: {name} is not a tokenizer.json of a published model: it has {part}, "
            f"expected {expected}"
        ) from error


def _expect(is_good: bool, part: str, expected: str) -> None:
    if not is_good:
        raise PartError(part, expected)


def _check_sections(state: Mapping[str, Any], size: int) -> None:
    growth = 1.0
    for section, (kinds, key) in _SECTIONS.items():
        steps = list(_steps_of(state.get(section), key))
        _expect(len(steps) <= _STEPS, f"{len(steps):,} steps of its {section}", f"at most {_STEPS}")
        for step in steps:
            kind, known = str(step.get("type")), ", ".join(sorted(kinds))
            _expect(kind in kinds, f"the {section} {step.get('type')!r:.80}", f"one of {known}")
            _check_flags(step)
            _check_step(kind, step, size)
            if section in ("normalizer", "pre_tokenizer"):
                growth *= _growth(kind, step)
    longer = f"steps that make a text {growth:,.0f} times as long"
    _expect(growth <= _GROWTH, longer, f"at most {_GROWTH}")


def _steps_of(part: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a section, which has none, one, or a sequence of them."""
    if part is None:
        return
    _expect(isinstance(part, dict), f"{part!r:.80} as a part", "an object with a type")
    if part.get("type") != "Sequence":
        yield part
        return
    steps = part.get(key)
    _expect(isinstance(steps, list), f"a Sequence with {key} {steps!r:.80}", "a list")
    for step in steps:
        yield from _steps_of(step if step is not None else {}, key)


def takes_long(state: Mapping[str, Any]) -> bool:
    """Whether the time to encode a text may grow faster than its length."""
    return any(
        isinstance(pattern := step.get("pattern"), dict)
        and "Regex" in pattern
        and pattern["Regex"] not in LINEAR
        for section in ("normalizer", "pre_tokenizer")
        for step in _steps_of(state.get(section), _SECTIONS[section][1])
    )


def _check_model(model: Mapping[str, Any]) -> None:
    dropout = model.get("dropout")
    _expect(dropout in (None, 0), f"dropout {dropout!r:.80}", "none: a text has one encoding")
    for key, most in _MODEL_TEXTS.items():
        _check_text(model.get(key) or "", key, most)
    _check_flags(model)
    _check_text(max(model["vocab"], key=len, default=""), "a token", _TOKEN)


def check_added(tokens: Sequence[Mapping[str, Any]]) -> None:
    """Check that added tokens are not empty, too long, or too many for the library to find them.

    Raises:
        PartError: one is, or they are.
    """
    _expect(len(tokens) <= _ADDED, f"{len(tokens):,} added tokens", f"at most {_ADDED:,}")
    for token in tokens:
        _expect(token["content"] != "", "an added token without a character", "one or more")
        _check_text(token["content"], "an added token", _TOKEN)
        _check_flags(token)
    length = sum(len(token["content"]) for token in tokens)
    most = f"at most {_ADDED_CHARACTERS:,}"
    _expect(length <= _ADDED_CHARACTERS, f"added tokens of {length:,} characters", most)


def _check_flags(step: Mapping[str, Any]) -> None:
    for key in _FLAGS & step.keys():
        _expect(isinstance(step[key], bool), f"{key} {step[key]!r:.80}", "true or false")


def _check_text(text: Any, what: str, most: int) -> None:
    _expect(isinstance(text, str), f"{what} {text!r:.80}", "a text")
    _expect(len(text) <= most, f"{what} of {len(text):,} characters", f"at most {most:,}")


def _check_id(index: Any, most: int, what: str, expected: str = "") -> None:
    is_good = type(index) is int and 0 <= index <= most
    _expect(is_good, f"{what} {index!r:.80}", f"{expected}0 to {most}")


def _check_items(items: Any, kind: type[list[Any] | dict[Any, Any]], what: str, most: int) -> None:
    is_good = isinstance(items, kind) and len(items) <= most
    _expect(is_good, f"{what} {items!r:.80}", f"a {kind.__name__} of at most {most}")


def _check_step(kind: str, step: Mapping[str, Any], size: int) -> None:
    """Check what a step has besides its type."""
    for key in _STEP_TEXTS & step.keys():
        _check_text(step[key], f"{kind}: {key}", _TEXT)
    if kind == "Strip":
        for key in ("start", "stop"):
            _check_id(step.get(key, 0), _TEXT, f"Strip: {key}")
    if kind in ("Replace", "Split"):
        _check_pattern(kind, step.get("pattern"))
    if kind == "Precompiled":
        _check_precompiled(step.get("precompiled_charsmap"))
    if kind == "TemplateProcessing":
        _check_template(step, size)
    if kind in ("BertProcessing", "RobertaProcessing"):
        for key in ("sep", "cls"):
            pair = step.get(key)
            index = pair[1] if isinstance(pair, list) and len(pair) == 2 else pair
            _check_id(index, size - 1, f"{kind}: {key}", "a token and its id, ")


def _check_pattern(kind: str, pattern: Any) -> None:
    is_good = isinstance(pattern, dict) and len(pattern) == 1
    _expect(is_good, f"{kind}: pattern {pattern!r:.80}", "a String or a Regex")
    ((form, text),) = pattern.items()
    if form == "String":
        _check_text(text, f"{kind}: pattern", _TEXT)
    problem = "" if isinstance(text, str) and text else "it is empty or not a text"
    problem = problem or (problem_of(text) if form != "String" else "")
    expected = f"one that is matched soon: {problem}"
    _expect(not problem, f"{kind}: pattern {text!r:.80}", expected)


def _check_precompiled(text: Any) -> None:
    """Check that no character becomes a long text.

    The map is a trie, with its length in bytes before it, and texts, each of which ends with 0.
    """
    try:
        data = base64.b64decode(text, validate=True)
        (length,) = struct.unpack_from("<I", data)
    except (TypeError, ValueError, struct.error) as error:
        part = f"Precompiled: precompiled_charsmap {text!r:.40}"
        raise PartError(part, "a map of characters") from error
    most = len(data) - 4
    is_good = length <= most and length % 4 == 0
    _expect(is_good, f"Precompiled: a trie of {length:,} bytes", f"at most {most:,}")
    longest = _longest(data)
    is_good = longest <= _GROWTH and not data[-1]
    _expect(is_good, f"Precompiled: a text of {longest:,} bytes", f"at most {_GROWTH} and a 0")


def _longest(data: bytes) -> int:
    """Return the length of the longest text in a map of characters."""
    (length,) = struct.unpack_from("<I", data)
    return max(map(len, data[4 + length :].split(b"\0")))


def _check_template(step: Mapping[str, Any], size: int) -> None:
    for key in ("single", "pair"):
        pieces = step.get(key, [])
        _check_items(pieces, list, f"TemplateProcessing: {key}", _PIECES)
        texts = [piece.get("Sequence") for piece in pieces if isinstance(piece, dict)]
        texts = [text.get("id") for text in texts if isinstance(text, dict)]
        is_good = key == "pair" or texts == ["A"]
        _expect(is_good, f"TemplateProcessing: texts {texts!r:.80} in {key}", "['A']")
    tokens: Any = step.get("special_tokens")
    _check_items(tokens, dict, "TemplateProcessing: special_tokens", _PIECES)
    for token in tokens.values():
        ids: Any = token.get("ids") if isinstance(token, dict) else None
        _check_items(ids, list, "TemplateProcessing: ids", _SPECIAL)
        for index in ids:
            _check_id(index, size - 1, "TemplateProcessing: the id")


def _growth(kind: str, step: Mapping[str, Any]) -> float:
    """Return how much longer a step may make a text that has one character."""
    if kind == "Prepend":
        return 1.0 + len(step.get("prepend", "")) / 8
    if kind == "Replace":
        content, pattern = step.get("content", ""), step["pattern"]
        found = len(pattern["String"]) if "String" in pattern else 1
        return max(1.0, len(content) / found)
    if kind == "Precompiled":
        return float(max(2, _longest(base64.b64decode(step["precompiled_charsmap"]))))
    return 2.0 if kind in ("ByteLevel", "Metaspace", "NFKC", "NFKD") else 1.0
