from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tensorgrad.data import PublishedTokenizer, TextStream, Tokenizer, published_tokenizer
from tensorgrad.data.published_tokenizer import load_tokenizer
from tensorgrad.errors import ArgumentError, DataError, DtypeError

TEXT = ["the cat sat on the mat, the cat's 12345 hats; Größe 世界\n\n  and so on"] * 3
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "system", "content": "sit "}, {"role": "user", "content": "the cat"}]


def byte_level() -> tokenizers.Tokenizer:
    """Llama 3 and Qwen: a split by a regular expression of their own, and a BOS."""
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}|\s?\p{L}+|\s+"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(inner, initial_alphabet=alphabet, special_tokens=SPECIAL)


def gpt2_words(prefix: bool) -> tokenizers.Tokenizer:
    """GPT-2, perhaps with a space before a text."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(inner, initial_alphabet=alphabet, special_tokens=SPECIAL)


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """SentencePiece in newer files."""
    inner = sentence_piece()
    inner.normalizer = normalizers.Sequence([])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    return inner


def sentence_piece() -> tokenizers.Tokenizer:
    """Llama 2 and Mistral: spaces are characters, unknown ones are bytes."""
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    inner = trained(inner, special_tokens=["<unk>", *SPECIAL, *bytes_])
    state = json.loads(inner.to_str())  # bytes are not special tokens
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in bytes_]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def trained(inner: tokenizers.Tokenizer, **options: Any) -> tokenizers.Tokenizer:
    inner.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, show_progress=False, **options)
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    return inner


def write(folder: Path, inner: tokenizers.Tokenizer, **more: str) -> Path:
    settings = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "model_max_length": 10**30,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    generation = {"eos_token_id": [inner.token_to_id("<|im_end|>")]}
    files = {
        "tokenizer.json": inner.to_str(),
        "tokenizer_config.json": json.dumps(settings),
        "generation_config.json": json.dumps(generation),
    }
    for name, text in (files | more).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


KINDS = pytest.mark.parametrize("make", [byte_level, sentence_piece])


@KINDS
def test_a_text_comes_back_token_by_token(
    make: Callable[[], tokenizers.Tokenizer], tmp_path: Path
) -> None:
    tokenizer = PublishedTokenizer.load(write(tmp_path, make()))
    text = "the hats\n of Größe 12 世界 and ok: \u00e9\U0001f600"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer._ids["<s>"]
    assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    for begins in (True, False):
        stream = TextStream(tokenizer, begins=begins)
        blank = "" if begins or make is byte_level else " "  # continues the text before it
        assert "".join([*map(stream.add, ids), stream.rest()]) == blank + text
    ends = {tokenizer._ids[name] for name in ("</s>", "<|im_end|>")}
    assert set(tokenizer.end_tokens) == ends
    assert tokenizer.encode("</s>")[-1] in ends  # special tokens in a text are found
    with pytest.raises(DtypeError, match="text is a int, expected a str"):
        tokenizer.encode(3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="cannot be encoded"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize(
    ("make", "kind", "prefix", "begins_with_space"),
    [
        (lambda: gpt2_words(False), "GPT2TokenizerFast", True, True),
        (lambda: gpt2_words(True), "GPT2Tokenizer", False, False),
        (lambda: gpt2_words(True), "GPT2Tokenizer", None, False),
        (lambda: gpt2_words(True), "PreTrainedTokenizerFast", False, True),
        (lambda: gpt2_words(False), "", True, True),
        (byte_level, "Qwen2Tokenizer", True, True),
        (sentence_piece, "LlamaTokenizer", None, True),
        (sentence_piece, "LlamaTokenizerFast", False, False),
        (sentence_piece, "PreTrainedTokenizerFast", False, True),
        (lambda: metaspace("never"), "LlamaTokenizer", True, True),
        (lambda: metaspace("always"), "LlamaTokenizer", False, False),
    ],
)
def test_the_settings_say_whether_a_text_begins_with_a_space(
    make: Callable[[], tokenizers.Tokenizer],
    kind: str,
    prefix: bool | None,
    begins_with_space: bool,
    tmp_path: Path,
) -> None:
    settings = {"tokenizer_class": kind, "add_prefix_space": prefix}
    settings = {key: value for key, value in settings.items() if value not in (None, "")}
    write(tmp_path, make(), **{"tokenizer_config.json": json.dumps(settings)})
    tokenizer = PublishedTokenizer.load(tmp_path)
    ids = [token for token in tokenizer.encode("the cat") if token not in tokenizer.special_ids]
    assert tokenizer.decode_bytes(ids) == b" " * begins_with_space + b"the cat"
    byte_level_kind = make not in (sentence_piece,) and tokenizer.blanks == 0
    assert tokenizer.decode(ids) == (" " * (begins_with_space and byte_level_kind) + "the cat")
    tokenizer.save(tmp_path / "saved")
    assert PublishedTokenizer.load(tmp_path / "saved").encode("the cat")[-len(ids) :] == ids


@pytest.mark.parametrize(
    ("decoder", "blanks"),
    [
        (None, 0),
        ({"type": "ByteLevel"}, 0),
        ({"type": "Metaspace"}, 1),
        ({"type": "Metaspace", "prepend_scheme": "first"}, 1),
        ({"type": "Metaspace", "prepend_scheme": "never"}, 0),
        ({"type": "Metaspace", "add_prefix_space": False}, 0),
        ({"decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1}]}, 1),
        ({"type": "Strip", "content": " "}, 0),
        ({"type": "Strip", "content": "_", "start": 1}, 0),
    ],
)
def test_blanks_that_a_decoder_drops(decoder: Any, blanks: int) -> None:
    assert published_tokenizer._blanks(decoder) == blanks


def test_tokens_beside_the_vocabulary_count(tmp_path: Path) -> None:
    inner = byte_level()
    size = inner.get_vocab_size()
    inner.add_special_tokens(["<extra>"])
    tokenizer = PublishedTokenizer.load(write(tmp_path, inner))
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.encode("<extra>")[-1] == size
    assert size in tokenizer.special_ids
    assert tokenizer.decode_bytes([size]) == b"<extra>"


@KINDS
def test_saved_files_are_loaded_as_they_were(
    make: Callable[[], tokenizers.Tokenizer], tmp_path: Path
) -> None:
    tokenizer = PublishedTokenizer.load(write(tmp_path, make()))
    tokenizer.save(tmp_path / "new" / "folder")
    again = PublishedTokenizer.load(tmp_path / "new" / "folder")
    assert again.encode(TEXT[0]) == tokenizer.encode(TEXT[0])
    assert (again.end_tokens, again.chat_template) == (tokenizer.end_tokens, TEMPLATE)
    assert again.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_tokenizer_of_ours_gets_the_settings_that_others_need(tmp_path: Path) -> None:
    own = Tokenizer.train(TEXT, 300)
    PublishedTokenizer.of(own, "{{ messages }}").save(tmp_path)
    PublishedTokenizer.of(own).save(tmp_path)
    found = PublishedTokenizer.load(tmp_path)
    assert found.chat_template is None
    assert found.encode(TEXT[0]) == own.encode(TEXT[0])
    assert found.end_tokens == own.end_tokens == (own.end_of_text,)
    assert Tokenizer.load(tmp_path / "tokenizer.json").digest == own.digest


def test_a_document_begins_with_the_token_that_settings_name(tmp_path: Path) -> None:
    inner = byte_level()
    inner.post_processor = None
    ids = {name: inner.token_to_id(name) for name in SPECIAL}
    for settings, start in (
        ({"bos_token": "<s>", "eos_token": "</s>"}, ids["<s>"]),
        ({"bos_token": None, "eos_token": "</s>"}, ids["</s>"]),
        ({}, None),
    ):
        more = {"tokenizer_config.json": json.dumps(settings), "generation_config.json": "{}"}
        found = PublishedTokenizer.load(write(tmp_path, inner, **more))
        assert found.start_token == start
        if start is not None:
            assert found.encode_prompt("") == [start]
    assert found.encode_prompt("the") == found.encode("the")
    with pytest.raises(DataError, match="text is empty and the tokenizer names no token that beg"):
        found.encode_prompt("")


def test_a_conversation_has_the_form_of_the_template(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    tokenizer = PublishedTokenizer.load(write(tmp_path, byte_level()))
    ids = tokenizer.encode_chat(MESSAGES)
    assert tokenizer.decode(ids) == (
        "<s><|im_start|>system\nsit<|im_end|>\n<|im_start|>user\nthe cat<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.count(tokenizer._ids["<|im_start|>"]) == 3
    marked = (
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    )
    write(tmp_path, byte_level(), **{"chat_template.jinja": marked})
    tokenizer = PublishedTokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES[1:])) == json.dumps(MESSAGES[1])
    for template, reason in (
        ("{{ raise_exception('only user') }}", "only user"),
        ("{% for %}", "fails"),
        ("{{ ''.__class__.__mro__ }}", "fails: access to attribute '__class__'"),
    ):
        write(tmp_path, byte_level(), **{"chat_template.jinja": template})
        with pytest.raises(DataError, match=reason):
            PublishedTokenizer.load(tmp_path).encode_chat(MESSAGES)


def test_what_is_no_conversation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = PublishedTokenizer.load(write(tmp_path, byte_level()))
    for wrong in ([], ["hello"], [{"role": "user"}]):
        with pytest.raises(ArgumentError, match=r"chat: messages (has|is)"):
            tokenizer.encode_chat(wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="has no chat template, expected one in"):
        PublishedTokenizer.of(Tokenizer.train(TEXT, 300)).encode_chat(MESSAGES)
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(DataError, match="jinja2 is not installed"):
        tokenizer.encode_chat(MESSAGES)


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("tokenizer.json", lambda v: v["model"].update(type="Unigram"), "type 'Unigram', expected"),
        ("tokenizer.json", lambda v: v.update(decoder={"type": "Fuse"}), "has the decoder"),
        ("tokenizer.json", lambda v: v["model"]["vocab"].update(z=10**9), "has the id 1000000000"),
        ("tokenizer.json", lambda v: v["model"]["merges"].append(["a", "zz"]), "'zz' is not one"),
        (
            "tokenizer.json",
            lambda v: v.update(normalizer={"type": "No"}),
            "is not a tokenizer.json",
        ),
        ("generation_config.json", lambda v: v.update(eos_token_id=10**6), "eos_token_id 1000000"),
        ("generation_config.json", lambda v: v.update(eos_token_id="x"), "eos_token_id 'x'"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, edit: Any, message: str) -> None:
    path = write(tmp_path, byte_level()) / file
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=message) as caught:
        PublishedTokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        PublishedTokenizer.load(tmp_path)


def test_a_folder_gives_the_kind_of_tokenizer_that_it_has(tmp_path: Path) -> None:
    own = Tokenizer.train(TEXT, 300)
    PublishedTokenizer.of(own).save(tmp_path / "own")
    for path in (tmp_path / "own", tmp_path / "own" / "tokenizer.json"):
        found = load_tokenizer(path)
        assert isinstance(found, Tokenizer)
        assert found.digest == own.digest
    published = PublishedTokenizer.load(write(tmp_path, sentence_piece()))
    published.save(tmp_path / "run" / "tokenizer.json")
    assert load_tokenizer(tmp_path / "run").digest == published.digest
    assert published.end_of_text == published.encode("</s>")[-1]
    (tmp_path / "own" / "generation_config.json").unlink()
    (tmp_path / "own" / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    assert isinstance(load_tokenizer(tmp_path / "own"), PublishedTokenizer)


def test_the_settings_are_shown_and_a_batch_is_encoded(tmp_path: Path) -> None:
    tokenizer = PublishedTokenizer.load(write(tmp_path, byte_level()))
    ends = tuple(sorted(tokenizer._ids[name] for name in ("</s>", "<|im_end|>")))
    assert repr(tokenizer) == (
        f"PublishedTokenizer({str(tmp_path)!r}, vocab_size={tokenizer.vocab_size}, "
        f"special_tokens=4, end_tokens={ends}, chat_template=True)"
    )
    assert repr(PublishedTokenizer.of(Tokenizer.train(TEXT, 300))).endswith("chat_template=False)")
    assert tokenizer.encode_batch(["the", "", "cat"]) == [
        tokenizer.encode(text) for text in ("the", "", "cat")
    ]
    assert tokenizer.end_of_text == tokenizer._ids["</s>"]
    assert not tokenizer.adds_space
    (tmp_path / "other").mkdir()
    same = PublishedTokenizer.load(write(tmp_path / "other", byte_level()))
    assert same.digest == tokenizer.digest
    (tmp_path / "other" / "generation_config.json").write_text("{}")
    assert PublishedTokenizer.load(tmp_path / "other").digest != tokenizer.digest


def test_the_end_of_a_text_comes_from_the_settings_or_the_model(tmp_path: Path) -> None:
    inner = byte_level()
    ids = {name: inner.token_to_id(name) for name in SPECIAL}
    bare = {"tokenizer_config.json": "{}", "generation_config.json": "{}"}
    for config, ends in (
        (None, ()),
        ("{}", ()),
        (f'{{"eos_token_id": {ids["</s>"]}}}', (ids["</s>"],)),
        (f'{{"eos_token_id": [{ids["</s>"]}, {ids["<s>"]}]}}', (ids["<s>"], ids["</s>"])),
    ):
        if config is not None:
            bare["config.json"] = config
        found = PublishedTokenizer.load(write(tmp_path, inner, **bare))
        assert found.end_tokens == ends
        assert found.start_token == (ends[0] if ends else None)
        if ends:
            assert found.end_of_text == ends[0]
        else:
            with pytest.raises(DataError, match="names no token that ends a text, expected eos_to"):
                _ = found.end_of_text
    for wrong in (-1, found.vocab_size, True):
        bare["generation_config.json"] = json.dumps({"eos_token_id": [0, wrong]})
        message = f"has eos_token_id {wrong}, expected 0 to {found.vocab_size - 1}"
        with pytest.raises(DataError, match=message):
            PublishedTokenizer.load(write(tmp_path, inner, **bare))
    bare["generation_config.json"] = json.dumps({"eos_token_id": found.vocab_size - 1})
    last = PublishedTokenizer.load(write(tmp_path, inner, **bare))
    assert last.end_tokens == (found.vocab_size - 1,)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    del bare["config.json"]
    with pytest.raises(DataError, match="config"):
        PublishedTokenizer.load(write(tmp_path, inner, **bare))


def test_of_several_chat_templates_the_default_counts() -> None:
    several: list[Any] = [
        3, {"name": "rag", "template": "a"}, {"name": "default", "template": "b"},
    ]  # fmt: skip
    for value, expected in (
        (several, "b"),
        (several[:2], None),
        ([{"name": "default"}], None),
        ("c", "c"),
        (None, None),
        (3, None),
    ):
        assert published_tokenizer._template(value) == expected


def test_the_files_of_gpt2_are_a_published_tokenizer(tmp_path: Path) -> None:
    own = Tokenizer.train(TEXT, 300)
    model = json.loads(own.to_json())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    found = PublishedTokenizer.load(tmp_path)
    assert found.encode(TEXT[0]) == own.encode(TEXT[0])
    assert isinstance(load_tokenizer(tmp_path), Tokenizer)
    with pytest.raises(DataError, match="cannot read"):
        load_tokenizer(tmp_path / "none.json")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tokenizer = PublishedTokenizer.of(Tokenizer.train(TEXT, 300))
    message = r"PublishedTokenizer.save: cannot write .*file/x: Not a directory"
    with pytest.raises(DataError, match=message):
        tokenizer.save(tmp_path / "file" / "x")
