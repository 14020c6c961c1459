"""Files that anyone may have written: each ends in a valid value or in one error that names it.

A case takes the files of a loader, changes bytes, values, headers or lengths or puts something in
the place of a file, and loads them with little time and memory.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import os
import shutil
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorgrad.data import (
    PublishedTokenizer,
    TokenFile,
    Tokenizer,
    documents,
    prepare,
    read_labelled,
    read_pairs,
)
from tensorgrad.data.words import WordVocabulary, read_vectors
from tensorgrad.errors import TensorgradError
from tensorgrad.io.files import to_json
from tensorgrad.io.weights import ArrayFile, load_arrays, save_arrays
from tensorgrad.kernels import tuned
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.pretrained import from_pretrained, save_pretrained
from tensorgrad.models.sentiment import MeanClassifier, MeanConfig
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.models.translation import TranslationConfig, TranslationModel
from tensorgrad.nn import Module, RopeScaling
from tensorgrad.parallel import Comm, Mesh
from tensorgrad.parallel.checkpoint import RankWriters
from tensorgrad.parallel.merge import merge, open_checkpoint
from tensorgrad.train import config
from tensorgrad.train.average import average_checkpoints
from tensorgrad.train.checkpoint import OneWriter, list_checkpoints
from tensorgrad.train.load import (
    load_classifier,
    load_language_model,
    load_trained,
    load_translator,
)
from tensorgrad.train.log import StepLog, read_metrics
from tensorgrad.train.sentiment import CLASSES, SentimentSettings
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.shards import Shards, load_pieces
from tests.checkpoints import save_checkpoint, save_shards
from tests.fuzz.cases import cases
from tests.parallel.test_checkpoint import at, held_on
from tests.parallel.threads import on_ranks
from tests.train.tiny_run import make_trainer

pytestmark = pytest.mark.slow

resource = pytest.importorskip("resource", reason="the system has no limits of memory")

SECONDS, MEMORY = 10, 1 << 30
TEXT = "".join(f"Line {n}: the häuser of the {n % 7} <b>\n" for n in range(60))
SIZES = GPT2Config(vocab_size=270, context=8, layers=2, heads=2, width=4)
TINY = GPT2Config(vocab_size=32, context=8, layers=1, heads=2, width=4)
SETTINGS = SentimentSettings()
Files = dict[str, bytes]


@dataclass(frozen=True)
class Loader:
    """Makers of valid files in a folder, and what reads them and checks the result."""

    make: Callable[[Path], None]
    load: Callable[[Path], None]


def arrays_of(model: Module) -> dict[str, Any]:
    return {name: tensor.data for name, tensor in model.state_dict().items()}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], 270, ["<|de|>", "<|en|>"])


def make_tokenizer(folder: Path) -> None:
    tokenizer().save(folder / "tokenizer.json")


def check_tokenizer(found: Tokenizer) -> None:
    ids = found.encode(TEXT)
    assert all(0 <= i < found.vocab_size for i in ids)
    assert found.decode(ids) == TEXT
    assert 0 <= found.end_of_text < found.vocab_size


def make_gpt2_tokenizer(folder: Path) -> None:
    found = Tokenizer.train([TEXT], 270)
    model = json.loads(found.to_json())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")


def load_gpt2_tokenizer(folder: Path) -> None:
    check_tokenizer(Tokenizer.from_gpt2(folder / "vocab.json", folder / "merges.txt"))


def load_words(folder: Path) -> None:
    found = WordVocabulary.load(folder / "words.json")
    assert found.encode_batch(["no such"]) == [[0, 0]] or "no" in found.words
    assert len(set(found.words)) == found.vocab_size - 1


def make_vectors(folder: Path) -> None:
    (folder / "vectors.txt").write_text("2 3\na 1 2 3\nb .5 -1e-3 7\n")


def load_vectors(folder: Path) -> None:
    vectors, found = read_vectors(folder / "vectors.txt", ["a", "b", "c"], 3)
    assert vectors.shape == (3, 3)
    assert np.isfinite(vectors).all()
    assert found.any()


def make_tokens(folder: Path) -> None:
    np.save(folder / "tokens.npy", np.arange(50, dtype=np.uint16))


def load_tokens(folder: Path) -> None:
    found = TokenFile.open(folder / "tokens.npy", 300)
    assert len(found) == found.tokens.size >= 1
    assert found.tokens.max() < 300


def make_corpus(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    os.utime(folder / "text.txt", (0, 0))
    prepare(folder / "text.txt", folder / "cache", 260)


def load_corpus(folder: Path) -> None:
    found = prepare(folder / "text.txt", folder / "cache", 260)
    check_tokenizer(found.tokenizer)
    text = found.tokenizer.decode([*found.train.tokens, *found.validation.tokens])
    # Changed files with changed sums are believed; with the old sums they are noticed.
    facts = _made["corpus"].get(str(found.folder.relative_to(folder) / "corpus.json"))
    if facts == (found.folder / "corpus.json").read_bytes():
        assert text.replace("<|endoftext|>", "") == TEXT


def make_text(folder: Path) -> None:
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(TEXT, encoding="utf-8")
    (folder / "text" / "b.md.gz").write_bytes(zlib.compress(TEXT.encode(), wbits=31))
    (folder / "text" / "c.txt.xz").write_bytes(lzma.compress(TEXT.encode()))


def load_text(folder: Path) -> None:
    assert all(text and not text.isspace() for text in documents(folder / "text"))
    assert "".join(documents(folder / "text" / "a.txt")).encode()


def make_pairs(folder: Path) -> None:
    for part in ("train", "valid", "test"):
        (folder / f"{part}.de").write_text("eins\nzwei drei\n")
        (folder / f"{part}.en").write_text("one\ntwo three\n")


def load_pairs(folder: Path) -> None:
    found = read_pairs(folder)
    for pairs in (found.train, found.validation, found.test):
        assert all(isinstance(text, str) for pair in pairs for text in pair)
        assert pairs
    assert found.digest


def make_labelled(folder: Path) -> None:
    (folder / "train.tsv").write_text("label\tsentence\n1\ta good film\n0\ta bad one\n")


def load_labelled(folder: Path) -> None:
    found = read_labelled(folder, "train")
    assert {*found.labels.tolist()} <= {0, 1}
    assert len(found) == len(found.labels) >= 1
    assert found.digest


def make_arrays(folder: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(4, np.int8), "c": np.array(2.5)}
    save_arrays(folder / "arrays.safetensors", arrays, {"note": "x"})


def load_array_file(folder: Path) -> None:
    path = folder / "arrays.safetensors"
    whole = load_arrays(path)
    with ArrayFile(path) as file:
        assert sorted(file.names) == sorted(whole)
        for name, array in whole.items():
            assert (file.shape(name), file.dtype(name)) == (array.shape, array.dtype)
            part = file.read(name, 1, 3)
            assert part.tobytes() == array.reshape(-1)[1:3].tobytes()


def make_huggingface(folder: Path) -> None:
    save_pretrained(GPT2(TINY), folder)


def load_huggingface(folder: Path) -> None:
    check_language_model(from_pretrained(folder))


def make_llama(folder: Path) -> None:
    scaling = RopeScaling(
        "llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16
    )
    sizes = TransformerLMConfig(300, 32, 1, 2, 1, 8, hidden=12, tied=False, rope_scaling=scaling)
    save_pretrained(TransformerLM(sizes), folder, max_file_bytes=10_000)
    PublishedTokenizer.of(Tokenizer.train([TEXT], 270), "{{ messages }}").save(folder)


def load_published(folder: Path) -> None:
    model, tokenizer = load_language_model(folder)
    assert isinstance(model, GPT2 | TransformerLM)
    check_language_model(model)
    ids = tokenizer.encode(TEXT)
    assert all(0 <= i < tokenizer.vocab_size for i in (*ids, *tokenizer.end_tokens))
    assert tokenizer.decode(ids)


def check_language_model(model: LanguageModel) -> None:
    sizes = model.config
    assert sum(p.size for p in model.parameters()) == sizes.parameters < 10_000
    with np.errstate(all="ignore"):  # a bit of a weight may be any
        assert model(np.zeros((1, 1), np.int64)).shape == (1, 1, sizes.vocab_size)


def make_published(folder: Path) -> None:
    save_pretrained(GPT2(SIZES), folder)
    make_gpt2_tokenizer(folder)


def load_generate(path: Path) -> None:
    model, found = load_trained(path)
    check_language_model(model)
    assert isinstance(found, Tokenizer)
    check_tokenizer(found)


def save_run(folder: Path, model: Module, state: dict[str, Any], count: int = 2) -> None:
    for step in range(1, count + 1):
        metrics = {"metrics": {"validation_loss": 2.0 - step}}
        arrays = {"model": arrays_of(model), "optimizer": {}}
        save_checkpoint(folder / "checkpoints", step, arrays, {**state, **metrics})


def make_run(folder: Path) -> None:
    save_run(folder, GPT2(SIZES), {"model": asdict(SIZES)})
    make_tokenizer(folder)


def make_merged(folder: Path) -> None:
    header = {"step": "1", "model": json.dumps(asdict(SIZES))}
    save_arrays(folder / "merged.safetensors", arrays_of(GPT2(SIZES)), header)
    make_tokenizer(folder)


def load_average(folder: Path) -> None:
    paths = list_checkpoints(folder / "checkpoints")
    if paths:
        assert average_checkpoints(paths)


def make_training(folder: Path) -> None:
    trainer = make_trainer(folder, None, TINY, dtype="float16", steps=2, warmup=0, batch=2)
    trainer.run()
    config.save(trainer.settings, folder)


def load_training(folder: Path) -> None:
    settings = config.load(TrainSettings, folder)
    assert settings.steps >= 1
    trainer = make_trainer(folder, None, TINY, dtype="float16", steps=2, warmup=0, batch=2)
    if trainer.resume():
        assert trainer.step >= 0
        assert np.isfinite(trainer.optimizer.lr)


def load_metrics(folder: Path) -> None:
    records = read_metrics(folder / "metrics.jsonl")
    assert all(type(record["step"]) is int for record in records)
    log = StepLog(folder / "metrics.jsonl", 1)
    log.write({"step": 2, "loss": 1.0})
    log.close()
    after = read_metrics(folder / "metrics.jsonl")
    assert after[:-1] == [r for n, r in enumerate(records) if _until(records[: n + 1], 1)]
    assert after[-1] == {"step": 2, "loss": 1.0}


def _until(records: list[dict[str, Any]], step: int) -> bool:
    return all(record["step"] <= step for record in records)


def make_metrics(folder: Path) -> None:
    lines = [json.dumps({"step": n, "loss": 3 - n, "lr": None}) for n in range(3)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))


def make_shards(folder: Path) -> None:
    model = GPT2(TINY)
    full = {f"model/{name}": array for name, array in arrays_of(model).items()}
    for kind in ("m", "v"):
        full |= {f"optimizer/{kind}/{name}": data for name, data in arrays_of(model).items()}
    mesh = Mesh(2, 1, 2)
    numbers = {"step": 1, "lr": 0.1}

    def program(comm: Comm) -> None:
        shards = Shards(RankWriters(comm), list(held_on(at(mesh, comm), True, full)))
        save_shards(shards, folder / "checkpoints", 1, {"metrics": {}, "optimizer": numbers})

    on_ranks(mesh.size, program)


def load_shards(folder: Path) -> None:
    found = open_checkpoint(folder)
    merge(found, folder / "merged.safetensors")
    assert load_arrays(folder / "merged.safetensors")


def load_shards_to_train(folder: Path) -> None:
    trainer = make_trainer(folder / "no run", None, TINY)
    found = RankWriters(Comm()).load_latest(folder / "checkpoints")
    if found is not None:
        load_pieces(OneWriter(), found, trainer.model, trainer.optimizer)


def make_sentiment(folder: Path) -> None:
    words = WordVocabulary(["good", "bad"])
    words.save(folder / "words.json")
    sizes = MeanConfig(3, width=4, hidden=5)
    state = {
        "model": {"kind": "mean", **asdict(sizes)},
        "vocabulary": {"sha256": hashlib.sha256(words.to_json().encode()).hexdigest()},
    }
    save_run(folder, MeanClassifier(sizes), state, 1)
    config.save(SETTINGS, folder)


def load_sentiment(folder: Path) -> None:
    ((name, _),) = load_classifier(folder)(["good film"])
    assert name in CLASSES


def make_translation(folder: Path) -> None:
    sizes = TranslationConfig(270, context=16, layers=1, heads=2, kv_heads=1, width=4, hidden=8)
    data = {"source": "de", "target": "en", "lowercase": True}
    make_tokenizer(folder)
    text = Tokenizer.load(folder / "tokenizer.json").to_json()
    tokenizer = {"sha256": hashlib.sha256(text.encode()).hexdigest()}
    state = {"model": asdict(sizes), "data": data, "tokenizer": tokenizer}
    save_run(folder, TranslationModel(sizes), state, 1)


def load_translation(folder: Path) -> None:
    found = load_translator(folder, "best", "cpu")
    check_tokenizer(found.tokenizer)
    assert sum(p.size for p in found.model.parameters()) == found.model.config.parameters


def make_tuned(folder: Path) -> None:
    tuned.write(folder / "tuned.json", {"sm_90": {"matmul": {"case": "wgmma"}}})


def load_tuned(folder: Path) -> None:
    for choices in tuned.read(folder / "tuned.json").values():
        assert all(type(name) is str for cases in choices.values() for name in cases.values())


LOADERS = {
    "tokenizer": Loader(
        make_tokenizer, lambda folder: check_tokenizer(Tokenizer.load(folder / "tokenizer.json"))
    ),
    "tokenizer of GPT-2": Loader(make_gpt2_tokenizer, load_gpt2_tokenizer),
    "words": Loader(
        lambda folder: WordVocabulary(["a", "häuser"]).save(folder / "words.json"), load_words
    ),
    "vectors": Loader(make_vectors, load_vectors),
    "tokens": Loader(make_tokens, load_tokens),
    "corpus": Loader(make_corpus, load_corpus),
    "text": Loader(make_text, load_text),
    "pairs": Loader(make_pairs, load_pairs),
    "labelled": Loader(make_labelled, load_labelled),
    "arrays": Loader(make_arrays, load_array_file),
    "Hugging Face": Loader(make_huggingface, load_huggingface),
    "Llama": Loader(make_llama, load_published),
    "published": Loader(make_published, load_generate),
    "run": Loader(make_run, load_generate),
    "merged": Loader(make_merged, lambda folder: load_generate(folder / "merged.safetensors")),
    "average": Loader(make_run, load_average),
    "training": Loader(make_training, load_training),
    "metrics": Loader(make_metrics, load_metrics),
    "shards, merged": Loader(make_shards, load_shards),
    "shards, loaded": Loader(make_shards, load_shards_to_train),
    "sentiment": Loader(make_sentiment, load_sentiment),
    "translation": Loader(make_translation, load_translation),
    "tuned": Loader(make_tuned, load_tuned),
}

# Things in the place of a value of JSON, or of a header of NumPy.
VALUES = (
    *("null", "true", "false", "0", "1", "2", "-1", "3", "7", "1e999", "-0.0", "0.5", "NaN"),
    *("65536", "2147483647", "2147483648", "4294967296", "1000000000000", "9223372036854775807"),
    *("18446744073709551615", "18446744073709551616", "1" * 5000, "0." + "1" * 5000, "1e-5000"),
    *('""', '"x"', '"gpt2"', '"\\ud800"', '"\\u0000"', '"../../x"', '"/dev/zero"', '"<f4"', '"|O"'),
    *('"F32"', '"I64"', '"F8_E4M3"', '"BF16"', '"BOOL"', f'"{"a" * 5000}"', '"a b"', '"[]"'),
    *("[]", "{}", "[1]", "[[]]", '["a", "b"]', '{"a": 1}', "[0, 0]", "[-1, 4]", "[" * 100_000),
    *('{"a":' * 2000 + "1" + "}" * 2000, "[" * 500 + "]" * 500, "(3,)", "()", "None", "True"),
    *("[[0, 9223372036854775807]]", "[0, 1000000000000000000]", "[]," * 100 + "[]", "0, 0"),
)  # fmt: skip

EDITS = (
    *("value",) * 20,
    *("delete", "rename", "twice", "swap values") * 3,
    *("flip", "byte", "cut", "insert", "truncate", "repeat", "empty", "other"),
    *("missing", "FIFO", "folder", "circle", "zero"),
)


@dataclass(frozen=True)
class Edit:
    """A change: what it is, and where in which file."""

    kind: str
    file: int
    place: int
    value: str
    data: bytes


POSITIONS = st.integers(0, 1 << 16)
CHANGES = st.builds(
    Edit,
    st.sampled_from(EDITS),
    POSITIONS,
    POSITIONS,
    st.sampled_from(VALUES),
    st.binary(max_size=9),
)


@given(
    st.sampled_from(sorted(LOADERS)),
    st.lists(CHANGES, min_size=1, max_size=2),
    st.sampled_from([True, True, True, False]),
)
@cases(1000)
def test_each_file_is_loaded_or_named_in_one_error(
    case: Path, name: str, changes: list[Edit], with_sums: bool
) -> None:
    files = dict(valid(name, case))
    special = {}
    for change in changes:
        path = sorted(files)[change.file % len(files)]
        if change.kind in SPECIAL:
            special[path] = change.kind
        else:
            other = files[sorted(files)[change.place % len(files)]]
            files[path] = changed(path, files[path], change, other)
    if with_sums:
        repair(files)
    write(case, files, special)
    said = None
    try:
        with limits():
            LOADERS[name].load(case)
    except TensorgradError as error:
        said = str(error)
    if said is not None:
        assert str(case) in said, said
        assert len(said.encode()) < 2000, said[:1000]


@pytest.mark.parametrize("name", sorted(LOADERS))
def test_valid_files_are_loaded(case: Path, name: str) -> None:
    files = dict(valid(name, case))
    repair(files)
    write(case, files, {})
    with limits():
        LOADERS[name].load(case)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the files of a case are: always the same, and named in errors."""
    return tmp_path_factory.mktemp("fuzz") / "case"


_made: dict[str, Files] = {}


def valid(name: str, folder: Path) -> Files:
    """Return the content of the valid files of a loader by path."""
    if name not in _made:
        write(folder, {}, {})
        LOADERS[name].make(folder)
        _made[name] = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix != ".lock"
        }
    return _made[name]


def write(folder: Path, files: Files, special: dict[str, str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in special:
            SPECIAL[special[name]](path)
        else:
            path.write_bytes(content)
            os.utime(path, (0, 0))  # a part of the name of a prepared corpus


SPECIAL: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "FIFO": lambda path: os.mkfifo(path),
    "folder": lambda path: path.mkdir(),
    "circle": lambda path: path.symlink_to(path.name),
    "zero": lambda path: path.symlink_to("/dev/zero"),
}


class Hang(BaseException):
    """A case took too long; nothing catches it."""


@contextmanager
def limits() -> Iterator[None]:
    """Let a block take little time and little memory."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Hang

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = [signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its own time: others may keep it waiting
    signal.setitimer(signal.ITIMER_REAL, 30 * SECONDS)  # for what waits and computes nothing
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


def changed(path: str, content: bytes, change: Edit, other: bytes) -> bytes:
    """Return the content of a file after a change."""
    place = change.place % (len(content) + 1)
    left, right = content[:place], content[place:]
    match change.kind:
        case "flip":
            return left + bytes(byte ^ 1 << change.file % 8 for byte in right[:1]) + right[1:]
        case "byte":
            return left + change.data[:1] + right[1:]
        case "cut":
            return left + right[1 + change.file % 300 :]
        case "insert":
            return left + change.data + right
        case "truncate":
            return left
        case "repeat":
            return left + right[:40] * 3 + right
        case "empty":
            return b""
        case "other":
            return other
    return restructured(path, content, change)


def restructured(path: str, content: bytes, change: Edit) -> bytes:
    """Return a file with a value in its JSON or its header changed; as it is without any."""
    if path.endswith(".npy"):
        return _npy(content, change)
    if path.endswith(".safetensors"):
        return _safetensors(content, change)
    if path.endswith(".jsonl"):
        lines = content.split(b"\n")
        number = change.file % len(lines)
        lines[number] = _json(lines[number], change)
        return b"\n".join(lines)
    return _json(content, change)


def _json(content: bytes, change: Edit) -> bytes:
    try:
        found = json.loads(content)
    except ValueError:
        return content.replace(b"\n", change.value.encode(), 1)
    except RecursionError:
        return content
    return _edited(found, change, json.dumps).encode("utf-8", "surrogatepass")


def _safetensors(content: bytes, change: Edit) -> bytes:
    size = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + size])
        facts = header.get("__metadata__", {})
        inner = [name for name, text in facts.items() if text[:1] in ("{", "[")]
        if inner and change.file % 2:  # JSON inside
            name = inner[change.place % len(inner)]
            facts[name] = _json(facts[name].encode(), change).decode("utf-8", "replace")
            text = json.dumps(header)
        else:
            text = _edited(header, change, json.dumps)
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        return content
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data + content[8 + size :]


def _npy(content: bytes, change: Edit) -> bytes:
    size = int.from_bytes(content[8:10], "little")
    try:
        header = ast.literal_eval(content[10 : 10 + size].decode("latin1"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return content
    text = _edited(header, change, repr).encode()[:60_000] + b"\n"
    version = bytes([1 + change.place % 3 // 2, 0])
    return content[:6] + version + struct.pack("<H", len(text)) + text + content[10 + size :]


def _edited(value: Any, change: Edit, dump: Callable[[Any], str]) -> str:
    """Return the text of a nested value after a change at one of its places."""
    value = json.loads(json.dumps(value)) if dump is json.dumps else value
    root = [value]
    places = [(root, 0), *_places(value)]
    holder, key = places[change.place % len(places)]
    if change.kind == "delete" and holder is not root:
        del holder[key]
    elif change.kind == "rename" and isinstance(holder, dict):
        holder[f"{key}s"] = holder.pop(key)
    elif change.kind == "swap values":
        other, place = places[change.file % len(places)]
        if place != 0 or other is not root:
            holder[key], other[place] = other[place], holder[key]
    else:
        holder[key] = "@@"
    again = f', "{key}": {change.value}' if change.kind == "twice" else ""
    try:
        text = dump(root[0])
    except (RecursionError, ValueError):  # a value was put into itself
        return change.value
    return text.replace('"@@"', change.value + again).replace("'@@'", change.value + again)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield where each value inside a nested one is; without recursion, as it may be deep."""
    stack = [value]
    while stack:
        outer = stack.pop()
        if isinstance(outer, dict | list):
            for key in outer if isinstance(outer, dict) else range(len(outer)):
                yield outer, key
                stack.append(outer[key])


def repair(files: Files) -> None:
    """Write sums down again as an attacker would, so that checks behind them are reached."""
    for path in files:
        if path.endswith(".safetensors"):
            files[path] = without_sum(files[path])
    for path, content in sorted(files.items()):
        folder, _, name = path.rpartition("/")
        if name not in ("state.json", "corpus.json"):
            continue
        try:
            facts = json.loads(content)
            for each in facts["files"]:
                data = files[f"{folder}/{each}"]
                facts["files"][each] = (
                    hashlib.sha256(data).hexdigest()
                    if name == "corpus.json"
                    else {"bytes": len(data), "crc32": zlib.crc32(data)}
                )
            if name == "state.json":
                facts.pop("crc32", None)
                facts["crc32"] = zlib.crc32(to_json(facts, 1).encode())
            files[path] = to_json(facts, 1).encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue


def without_sum(data: bytes) -> bytes:
    """Return a safetensors file without the sum in its header, where it has one."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
        del header["__metadata__"]["crc32"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]
