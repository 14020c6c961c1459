"""The tokenizers of published models, with their special tokens and chat templates.

A folder in the layout of Hugging Face transformers has tokenizer.json, the vocabulary, and beside
it settings that all are optional: tokenizer_config.json, special_tokens_map.json,
chat_template.jinja and generation_config.json. Tests: tests/data/test_published_tokenizer.py and,
against transformers, tests/parity/test_pretrained.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import DataError, DtypeError
from tensorgrad.data import tokenizer_file
from tensorgrad.data.chat import render_chat
from tensorgrad.data.limited_encoding import encode_limited
from tensorgrad.data.text import END_OF_TEXT, read_text, write_text
from tensorgrad.data.tokenizer import Tokenizer
from tensorgrad.data.tokenizer_file import BYTE_OF, TokenBytes, named_errors
from tensorgrad.data.tokenizer_parts import takes_long
from tensorgrad.io.display import call_text
from tensorgrad.io.readers import parse_json, read_json

_VOCABULARY, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_CONFIG, _TOKENS, _GENERATION = (
    *("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
)
_SETTINGS = (_CONFIG, _TOKENS, _GENERATION, _TEMPLATE)
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of SentencePiece that is one byte
_BYTE_LEVEL = ("GPT2Tokenizer", "Qwen2Tokenizer")  # classes that apply add_prefix_space
_SPACE = "\u2581"  # stands for a space in SentencePiece's tokens


class PublishedTokenizer(TokenBytes):
    """A BPE of any kind that the tokenizers library reads: of GPT-2, Llama, Mistral, Qwen, SmolLM.

    Unlike `Tokenizer`, `encode` finds special tokens in a text and adds those that the model
    expects around one, as transformers does. Make one with `load` or `of`.

    Args:
        files: the content of tokenizer.json, and of the settings that there are, by name.
        name: the name of the folder, for errors.
        end_tokens: the ids to use where no generation_config.json has any.

    Attributes:
        end_tokens: the ids that end a text or an answer.
        special_tokens: what the settings name, such as {"eos_token": "</s>"}.
        adds_space: whether the settings ask for a space before each text.
        chat_template: the template in Jinja's language; None: the model is not for conversations.

    Raises:
        DataError: a file is damaged, or the vocabulary is not a BPE.

    Example:
        >>> from tensorgrad.data import PublishedTokenizer, Tokenizer
        >>> PublishedTokenizer.of(Tokenizer.train(["Once upon a time."], 257)).save("model")
        >>> tokenizer = PublishedTokenizer.load("model")
        >>> tokenizer.decode(tokenizer.encode("a time<|endoftext|>"), skip_special_tokens=True)
        'a time'
    """

    def __init__(self, files: Mapping[str, str], name: str, end_tokens: Sequence[int] = ()) -> None:
        state = tokenizer_file.vocabulary_state(files[_VOCABULARY], f"{name}/{_VOCABULARY}")
        tokenizer_file.check_file(state, f"{name}/{_VOCABULARY}")
        settings = {
            key: parse_json(files[key], f"{name}/{key}", long_integers=True)
            for key in (_TOKENS, _CONFIG, _GENERATION)
            if key in files
        }
        named = settings.get(_TOKENS, {}) | settings.get(_CONFIG, {})
        _set_prefix_space(state, named)
        inner = tokenizer_file.inner_tokenizer(json.dumps(state), f"{name}/{_VOCABULARY}")
        self._inner, self._name, self._files = inner, name, dict(files)
        self._takes_long = takes_long(state)
        self._ids = inner.get_vocab(with_added_tokens=True)
        added = {token["content"] for token in state["added_tokens"]}
        of_token = _decoder(state.get("decoder"), name)
        self._bytes = [
            token.encode() if token in added else of_token(token)
            for token in tokenizer_file.in_order(self._ids, name)
        ]
        self.special_ids = frozenset(
            self._ids[token["content"]] for token in state["added_tokens"] if token.get("special")
        )
        self.blanks = _blanks(state.get("decoder"))
        self.special_tokens = dict(_special_tokens(named))
        self.adds_space = bool(named.get("add_prefix_space"))
        self.chat_template = files.get(_TEMPLATE, _template(named.get("chat_template")))
        self._generation = settings.get(_GENERATION, {})
        given = self._generation.get("eos_token_id")
        self.end_tokens = self._checked_ends(list(end_tokens) if given is None else given)

    def __repr__(self) -> str:
        sizes = {"vocab_size": self.vocab_size, "special_tokens": len(self.special_ids)}
        settings = {"end_tokens": self.end_tokens, "chat_template": self.chat_template is not None}
        return call_text(self, repr(self._name), **sizes, **settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PublishedTokenizer:
        """Read the tokenizer of a folder, or a tokenizer.json with its settings beside it.

        A folder may have vocab.json and merges.txt of GPT-2 in place of tokenizer.json.

        Raises:
            DataError: a file is missing or damaged, or the vocabulary is not a BPE.
        """
        path = Path(path)
        file = tokenizer_file.vocabulary_file(path)
        folder = file.parent
        if file.name == "vocab.json":
            return cls.of(Tokenizer.load(file))
        files = {name: read_text(folder / name) for name in _SETTINGS if (folder / name).exists()}
        return cls({_VOCABULARY: read_text(file), **files}, str(folder), _ends_of_model(folder))

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat_template: str | None = None) -> PublishedTokenizer:
        """Return a tokenizer of ours with the settings that others need.

        Args:
            tokenizer: the tokenizer of a run.
            chat_template: see `render_chat`; None: the model is not for conversations.
        """
        end = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
        values = {"tokenizer_class": "PreTrainedTokenizerFast", **end}
        files = {
            _VOCABULARY: tokenizer.to_json(),
            _CONFIG: _json({**values, "clean_up_tokenization_spaces": False}),
            _GENERATION: _json(
                dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.end_of_text)
            ),
        }
        if chat_template is not None:
            files[_TEMPLATE] = chat_template
        return cls(files, "the tokenizer")

    @property
    def start_token(self) -> int | None:
        """The id after which a document begins: the BOS, or the end of the document before.

        None: the settings name neither.
        """
        names = (self.special_tokens.get(name, "") for name in ("bos_token", "eos_token"))
        ids = (self._ids[name] for name in names if name in self._ids)
        return next(iter((*ids, *self.end_tokens)), None)

    @property
    def digest(self) -> str:
        """The SHA-256 of the files, in hexadecimal: equal for equal tokenizers."""
        return hashlib.sha256(_json(self._saved()).encode()).hexdigest()

    @property
    def end_of_text(self) -> int:
        """The id that ends every document of a token file: of the EOS token.

        Raises:
            DataError: the settings name none.
        """
        named = self._ids.get(self.special_tokens.get("eos_token", ""))
        if named is None and not self.end_tokens:
            raise DataError(
                f"PublishedTokenizer: {self._name} names no token that ends a text, expected "
                f"eos_token in {_CONFIG}"
            )
        return self.end_tokens[0] if named is None else named

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the files into a folder, which is created if missing.

        Those of another tokenizer there are replaced, or deleted where this one has none.

        Args:
            path: the folder, or tokenizer.json in it.
        Raises:
            DataError: a file cannot be written; it is unchanged.
        """
        folder = Path(path)
        folder = folder.parent if folder.name == _VOCABULARY else folder
        files = self._saved()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"PublishedTokenizer.save: cannot write {os.fspath(folder)}: {error.strerror}"
            ) from error
        for name, text in files.items():
            write_text("PublishedTokenizer.save", folder / name, text)
        for name in set(_SETTINGS) - set(files):
            (folder / name).unlink(missing_ok=True)

    def _saved(self) -> dict[str, str]:
        """Return the content of the files that `save` writes, by name."""
        generation = {**self._generation, "eos_token_id": list(self.end_tokens)}
        return {**self._files, _GENERATION: _json(generation)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the model expects around it.

        Raises:
            DataError: the text has half of a surrogate pair, which no UTF-8 text has.
            DtypeError: it is not a str.
        """
        return self._encode(text, True)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; see `encode`."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, without the blank that SentencePiece adds before it.

        Args, Raises: as for `TokenBytes.decode`.
        """
        text = super().decode(ids, skip_special_tokens)
        return text[min(self.blanks, len(text) - len(text.lstrip(" "))) :]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Return the ids of a conversation, up to where the answer of the model begins.

        Args:
            messages: each with a "role" ("system", "user", "assistant") and its "content".
            variables: more that the template may use, such as `enable_thinking=False`.
        Raises:
            ArgumentError: there is no message, or one is not as above.
            DataError: there is no chat template, it fails, or jinja2 is not installed.
        """
        if self.chat_template is None:
            raise DataError(
                f"PublishedTokenizer: {self._name} has no chat template, expected one in {_CONFIG} "
                f"or {_TEMPLATE}: the model continues texts and is not for conversations"
            )
        given = {**self.special_tokens, **variables}
        return self._encode(render_chat(self.chat_template, messages, given, self._name), False)

    def _encode(self, text: str, with_special: bool) -> list[int]:
        if not isinstance(text, str):
            kind = type(text).__name__
            raise DtypeError(f"PublishedTokenizer.encode: text is a {kind}, expected a str")
        if self._takes_long:
            op = f"PublishedTokenizer.encode: {self._name}"
            return encode_limited(self._inner, [text], with_special, op)[0]
        with named_errors(f"PublishedTokenizer.encode: {text[:30]!r} cannot be encoded"):
            ids: list[int] = self._inner.encode(text, add_special_tokens=with_special).ids
        return ids

    def _checked_ends(self, given: Any) -> tuple[int, ...]:
        """Return the ids that end a text: those given, and the one that settings name."""
        ids = given if isinstance(given, list) else [given]
        for number in ids:
            if type(number) is not int or not 0 <= number < self.vocab_size:
                raise DataError(
                    f"PublishedTokenizer: {self._name} has eos_token_id {number!r:.80}, "
                    f"expected 0 to {self.vocab_size - 1}"
                )
        named = self._ids.get(self.special_tokens.get("eos_token", ""))
        return tuple(sorted({*ids, *([] if named is None else [named])}))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | PublishedTokenizer:
    """Return the tokenizer of a folder, or of a tokenizer.json: a Tokenizer where it is one.

    A published one of another kind, or that adds a space before each text, has settings beside it.

    Raises:
        DataError: a file is missing or damaged.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    has_settings = any((folder / name).exists() for name in (_CONFIG, _GENERATION))
    try:
        if not has_settings or not PublishedTokenizer.load(path).adds_space:
            return Tokenizer.load(path)
    except DataError:
        if not has_settings:
            raise
    return PublishedTokenizer.load(path)


def _decoder(decoder: Any, name: str) -> Any:
    """Return the function from a token to its bytes: of GPT-2's kind, or of SentencePiece's."""
    kinds = {part.get("type") for part in _parts(decoder, "decoders")}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentence_piece
    raise DataError(
        f"PublishedTokenizer: {name} has the decoder {decoder!r:.80}, expected one with ByteLevel, "
        "ByteFallback or Metaspace"
    )


def _set_prefix_space(state: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Apply the setting add_prefix_space, which overrules tokenizer.json, as transformers does.

    Classes that read tokenizer.json as it is, such as PreTrainedTokenizerFast, ignore it.
    """
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    prefix = settings.get("add_prefix_space")
    words = _parts(state.get("pre_tokenizer"), "pretokenizers")
    byte_level = [part for part in words if part.get("type") == "ByteLevel"]
    if byte_level and (kind in _BYTE_LEVEL or (not kind and prefix is not None)):
        for part in byte_level:
            part["add_prefix_space"] = bool(prefix)
    elif kind == "LlamaTokenizer" and not byte_level and isinstance(prefix, bool):
        rules = _parts(state.get("normalizer"), "normalizers")
        rules = [part for part in rules if part.get("type") not in ("Prepend", None)]
        if not any(part.get("type") == "Metaspace" for part in words):
            prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
            state["normalizer"] = {"type": "Sequence", "normalizers": [*prepend, *rules]}
        for part in (*words, *_parts(state.get("decoder"), "decoders")):
            if part.get("type") == "Metaspace":
                part["prepend_scheme"] = "always" if prefix else "never"
            elif part.get("type") == "Strip":
                part["start"] = int(prefix)


def _blanks(decoder: Any) -> int:
    """Return how many blanks a decoder drops before a text."""
    for part in _parts(decoder, "decoders"):
        if part.get("type") == "Strip" and part.get("content") == " ":
            return int(part.get("start", 0))
        if part.get("type") == "Metaspace":
            return int(part.get("prepend_scheme", "always") != "never" and _has_prefix(part))
    return 0


def _has_prefix(metaspace: Mapping[str, Any]) -> bool:
    """Whether a Metaspace step adds a blank, in files of versions before prepend_scheme."""
    return metaspace.get("add_prefix_space") is not False


def _parts(state: Any, key: str) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer.json, which has one or a sequence of them."""
    steps = state.get(key, [state]) if isinstance(state, dict) else []
    return [step for step in steps if isinstance(step, dict)]


def _byte_level(token: str) -> bytes:
    known = BYTE_OF.keys() >= set(map(ord, token))
    return token.translate(BYTE_OF).encode("latin-1") if known else token.encode()


def _sentence_piece(token: str) -> bytes:
    found = _BYTE.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token.replace(_SPACE, " ").encode()


def _special_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the special tokens that settings name, each as a text or as a mapping with it."""
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            yield key, content


def _template(value: Any) -> str | None:
    """Return the chat template of a tokenizer_config.json; of several, the default one."""
    for item in value if isinstance(value, list) else []:
        if isinstance(item, dict) and item.get("name") == "default":
            value = item.get("template")
    return value if isinstance(value, str) else None


def _ends_of_model(folder: Path) -> list[int]:
    """Return the ids that end a text by the model's config.json, where there is one."""
    try:
        found = read_json(folder / "config.json", links=True).get("eos_token_id")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"PublishedTokenizer: cannot read {folder}: {error}") from error
    return found if isinstance(found, list) else [] if found is None else [found]


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
