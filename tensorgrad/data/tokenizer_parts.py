"""The parts that a tokenizer.json may have: an allow-list, with the sizes of each.

The tokenizers library does what the file says: a chain of 40 `Replace` turns one letter into 2^40,
a post-processor adds a million tokens to each text, a regular expression backtracks for days. Here
are the parts of published tokenizers, and bounds that these are far from. A text of n characters
becomes 64 n at most inside the library. Tests: tests/data/test_tokenizer_parts.py.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from tensorgrad.data.word_patterns import LINEAR, problem_of
from tensorgrad.errors import DataError

__all__ = ["check_added", "check_parts", "takes_long"]

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
_STEPS = 32  # of a section
_TEXT = 64  # characters that a step adds, or looks for
_GROWTH = 64  # of a text by all steps
_PIECES = 64  # of a template of the post-processor
_SPECIAL = 16  # ids of a special token in it
_TOKEN = 2048  # characters of a token
_ADDED, _ADDED_CHARACTERS = 20_000, 1 << 18
_AFFIX = 16  # characters of the prefix or suffix of tokens inside words
_FLAGS = (
    *("fuse_unk", "byte_fallback", "ignore_merges", "single_word", "lstrip", "rstrip"),
    *("normalized", "special", "add_prefix_space", "trim_offsets", "use_regex", "invert"),
)


def check_parts(state: Mapping[str, Any], size: int, name: str) -> None:
    """Raise DataError where a tokenizer.json has a part that is unknown or too large.

    Args:
        state: of the file.
        size: of the vocabulary, with added tokens.
        name: of the file, for errors.
    """

    def refuse(part: str, expected: str) -> NoReturn:
        raise DataError(
            f"Tokenizer: {name} is not a tokenizer.json of a published model: it has {part}, "
            f"expected {expected}"
        )

    _check_model(state["model"], refuse)
    check_added(state["added_tokens"], refuse)
    growth = 1.0
    for section, (kinds, key) in _SECTIONS.items():
        steps = list(_steps_of(state.get(section), key, refuse))
        if len(steps) > _STEPS:
            refuse(f"{len(steps):,} steps of its {section}", f"at most {_STEPS}")
        for step in steps:
            kind = step.get("type")
            if not isinstance(kind, str) or kind not in kinds:
                refuse(f"the {section} {kind!r:.80}", f"one of {', '.join(sorted(kinds))}")
            _check_flags(step, refuse)
            _check_step(kind, step, size, refuse)
            if section in ("normalizer", "pre_tokenizer"):
                growth *= _growth(kind, step)
    if growth > _GROWTH:
        refuse(f"steps that make a text {growth:,.0f} times as long", f"at most {_GROWTH}")


_Refuse = Callable[[str, str], NoReturn]


def _steps_of(part: Any, key: str, refuse: _Refuse) -> Iterator[dict[str, Any]]:
    """Yield the steps of a section, which has none, one, or a sequence of them."""
    if part is None:
        return
    if not isinstance(part, dict):
        refuse(f"{part!r:.80} as a part", "an object with a type")
    if part.get("type") != "Sequence":
        yield part
        return
    steps = part.get(key)
    if not isinstance(steps, list):
        refuse(f"a Sequence with {key} {steps!r:.80}", "a list")
    for step in steps:
        yield from _steps_of(step if step is not None else {}, key, refuse)


def takes_long(state: Mapping[str, Any]) -> bool:
    """Whether the time to encode a text may grow faster than its length."""

    def refuse(part: str, expected: str) -> NoReturn:
        raise DataError(f"Tokenizer: got {part}, expected {expected}")

    return any(
        isinstance(pattern := step.get("pattern"), dict)
        and "Regex" in pattern
        and pattern["Regex"] not in LINEAR
        for section in ("normalizer", "pre_tokenizer")
        for step in _steps_of(state.get(section), _SECTIONS[section][1], refuse)
    )


def _check_model(model: Mapping[str, Any], refuse: _Refuse) -> None:
    if model.get("dropout") not in (None, 0):
        refuse(f"dropout {model['dropout']!r:.80}", "none: a text has one encoding")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        _check_text(model.get(key) or "", key, _AFFIX, refuse)
    _check_text(model.get("unk_token") or "", "unk_token", _TOKEN, refuse)
    _check_flags(model, refuse)
    longest = max(model["vocab"], key=len, default="")
    _check_text(longest, "a token", _TOKEN, refuse)


def check_added(tokens: Sequence[Mapping[str, Any]], refuse: _Refuse) -> None:
    """Refuse added tokens that are empty, too long, or too many for the library to find them."""
    if len(tokens) > _ADDED:
        refuse(f"{len(tokens):,} added tokens", f"at most {_ADDED:,}")
    for token in tokens:
        if not token["content"]:
            refuse("an added token without a character", "one or more")
        _check_text(token["content"], "an added token", _TOKEN, refuse)
        _check_flags(token, refuse)
    length = sum(len(token["content"]) for token in tokens)
    if length > _ADDED_CHARACTERS:
        refuse(f"added tokens of {length:,} characters", f"at most {_ADDED_CHARACTERS:,}")


def _check_flags(step: Mapping[str, Any], refuse: _Refuse) -> None:
    for key in _FLAGS:
        if not isinstance(step.get(key, False), bool):
            refuse(f"{key} {step[key]!r:.80}", "true or false")


def _check_text(text: Any, what: str, most: int, refuse: _Refuse) -> None:
    if not isinstance(text, str):
        refuse(f"{what} {text!r:.80}", "a text")
    if len(text) > most:
        refuse(f"{what} of {len(text):,} characters", f"at most {most:,}")


def _check_step(kind: str, step: Mapping[str, Any], size: int, refuse: _Refuse) -> None:
    """Check what a step has besides its type."""
    for key in ("prepend", "content", "replacement", "delimiter", "suffix"):
        if key in step:
            _check_text(step[key], f"{kind}: {key}", _TEXT, refuse)
    if kind == "Strip":
        for key in ("start", "stop"):
            if not 0 <= _integer(step.get(key, 0)) <= _TEXT:
                refuse(f"Strip: {key} {step[key]!r:.80}", f"0 to {_TEXT}")
    if kind in ("Replace", "Split"):
        _check_pattern(kind, step.get("pattern"), refuse)
    if kind == "Precompiled":
        _check_precompiled(step.get("precompiled_charsmap"), refuse)
    if kind == "TemplateProcessing":
        _check_template(step, size, refuse)
    for key in ("sep", "cls"):
        pair = step.get(key)
        if kind in ("BertProcessing", "RobertaProcessing") and not (
            isinstance(pair, list) and len(pair) == 2 and 0 <= _integer(pair[1]) < size
        ):
            refuse(f"{kind}: {key} {pair!r:.80}", f"a token and its id, 0 to {size - 1}")


def _check_pattern(kind: str, pattern: Any, refuse: _Refuse) -> None:
    if not isinstance(pattern, dict) or len(pattern) != 1:
        refuse(f"{kind}: pattern {pattern!r:.80}", "a String or a Regex")
    ((form, text),) = pattern.items()
    if form == "String":
        _check_text(text, f"{kind}: pattern", _TEXT, refuse)
    problem = "" if isinstance(text, str) and text else "it is empty or not a text"
    problem = problem or (problem_of(text) if form != "String" else "")
    if problem:
        refuse(f"{kind}: pattern {text!r:.80}", f"one that is matched soon: {problem}")


def _check_precompiled(text: Any, refuse: _Refuse) -> None:
    """Check that no character becomes a long text.

    The map is a trie, with its length in bytes before it, and texts, each of which ends with 0.
    """
    try:
        data = base64.b64decode(text, validate=True)
        (length,) = struct.unpack_from("<I", data)
    except (TypeError, ValueError, binascii.Error, struct.error):
        refuse(f"Precompiled: precompiled_charsmap {text!r:.40}", "a map of characters")
    if length > len(data) - 4 or length % 4:
        refuse(f"Precompiled: a trie of {length:,} bytes", f"at most {len(data) - 4:,}")
    if _longest(data) > _GROWTH or data[-1]:
        refuse(f"Precompiled: a text of {_longest(data):,} bytes", f"at most {_GROWTH} and a 0")


def _longest(data: bytes) -> int:
    """Return the length of the longest text in a map of characters."""
    (length,) = struct.unpack_from("<I", data)
    return max(map(len, data[4 + length :].split(b"\0")))


def _check_template(step: Mapping[str, Any], size: int, refuse: _Refuse) -> None:
    for key in ("single", "pair"):
        pieces = step.get(key, [])
        if not isinstance(pieces, list) or len(pieces) > _PIECES:
            refuse(f"TemplateProcessing: {key} {pieces!r:.80}", f"a list of at most {_PIECES}")
        texts = [piece.get("Sequence") for piece in pieces if isinstance(piece, dict)]
        texts = [text.get("id") for text in texts if isinstance(text, dict)]
        if key == "single" and texts != ["A"]:
            refuse(f"TemplateProcessing: texts {texts!r:.80} in {key}", "['A']")
    tokens = step.get("special_tokens")
    if not isinstance(tokens, dict) or len(tokens) > _PIECES:
        refuse(f"TemplateProcessing: special_tokens {tokens!r:.80}", f"at most {_PIECES}")
    for token in tokens.values():
        ids = token.get("ids") if isinstance(token, dict) else None
        if not isinstance(ids, list) or len(ids) > _SPECIAL:
            refuse(f"TemplateProcessing: ids {ids!r:.80}", f"a list of at most {_SPECIAL}")
        wrong = [index for index in ids if not 0 <= _integer(index) < size]
        if wrong:
            refuse(f"TemplateProcessing: the id {wrong[0]!r:.80}", f"0 to {size - 1}")


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


def _integer(value: Any) -> int:
    """Return an integer, and -1 for what is none."""
    return value if type(value) is int else -1
