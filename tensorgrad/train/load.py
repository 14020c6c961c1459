"""Trained models: from a run, one of its checkpoints, a Hugging Face folder or a merged file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.dtypes import DtypeLike
from tensorgrad.core.errors import ArgumentError, CheckpointError, DataError
from tensorgrad.data import PublishedTokenizer, Tokenizer, split_words
from tensorgrad.data.published_tokenizer import load_tokenizer
from tensorgrad.io.readers import no_link, parse_json
from tensorgrad.io.weights import load_arrays, load_metadata
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.pretrained import from_pretrained, is_pretrained, pretrained_folder
from tensorgrad.models.restore import restore
from tensorgrad.models.sentiment import Classifier, class_probabilities
from tensorgrad.models.translation import TranslationConfig, TranslationModel, generate
from tensorgrad.train import config
from tensorgrad.train.checkpoint import Checkpoint, check_same, load_checkpoint, run_checkpoint
from tensorgrad.train.sentiment import (
    CLASSES,
    MODELS,
    SentimentSettings,
    Vocabulary,
    encode,
    load_vocabulary,
)
from tensorgrad.train.translation import AVERAGED, TranslationSettings
from tensorgrad.train.user_file import is_file, model_class

_log = logging.getLogger(__name__)
AnyTokenizer = Tokenizer | PublishedTokenizer


def load_language_model(
    path: Path,
    checkpoint: str = "best",
    tokenizer: Path | None = None,
    dtype: DtypeLike = "float32",
    *,
    file: str = "",
    download: bool = False,
    revision: str | None = None,
) -> tuple[LanguageModel, AnyTokenizer]:
    """Return a trained or published language model, on the CPU, and its tokenizer.

    Args:
        path, checkpoint, tokenizer, file, download, revision: as for `load_trained`.
        dtype: of the parameters.
    Raises:
        CheckpointError: the path is none of these, or damaged.
        DataError: the tokenizer is missing or damaged.
    """
    path = _downloaded(path, download, revision)
    if run_of(path) is None and is_pretrained(path):
        return from_pretrained(path, dtype), PublishedTokenizer.load(tokenizer or path)
    model, found = load_trained(path, checkpoint, tokenizer, file=file)
    return model.to("cpu", dtype), found


def load_trained(
    path: Path,
    checkpoint: str = "best",
    tokenizer: Path | None = None,
    *,
    file: str | None = "",
    download: bool = False,
    revision: str | None = None,
) -> tuple[LanguageModel, AnyTokenizer]:
    """Return a language model to train or export, on the CPU, and its tokenizer.

    Args:
        path: the folder of a run, of one of its checkpoints, or in Hugging Face's layout; or a
            model file of `tensorgrad.parallel.merge`. With `download`, the name of a model on the
            Hub.
        checkpoint: of a run: "best" by validation loss, or "last".
        tokenizer: a tokenizer.json, or a folder with one; None: the one beside the model.
        file: the Python file of the model, for one that a user has defined: it is executed. None
            refuses such a model.
        download, revision: as for `from_pretrained`.
    Raises:
        ArgumentError: the model is of a Python file, and `file` is not given.
        CheckpointError: the path is none of these, or damaged.
        DataError: the tokenizer is missing or damaged.
    """
    path = _downloaded(path, download, revision)
    run = run_of(path)
    if run is None and is_pretrained(path):
        if is_file(file or ""):
            raise ArgumentError(f"--model: got {file} for {path}, expected none: it has no file")
        return from_pretrained(path), _published_tokenizer(tokenizer or path)
    if run is not None:
        found = run_checkpoint(path, checkpoint) if run == path else load_checkpoint(path)
        no_link(run / "tokenizer.json")
        arrays: Mapping[str, Any] = found.arrays("model")
    elif path.is_file():
        run, found, arrays = path.parent, _merged(path), load_arrays(path)
    else:
        what = "has none of these" if path.is_dir() else "is not a folder"
        raise CheckpointError(
            f"load: {path} {what}, expected one with checkpoints/ (a run of tensorgrad train), "
            "state.json (one of its checkpoints) or model.safetensors (Hugging Face's layout), or "
            "a file of tensorgrad.parallel.merge; a model of the Hugging Face Hub is downloaded "
            "only with --download"
        )
    model = _model_class(found, file)
    sizes, name = found.entry("model"), str(found.path)
    return restore(model, model.Config, sizes, arrays, name), _tokenizer(found, tokenizer or run)


def _merged(path: Path) -> Checkpoint:
    """Return what the header of a file of `tensorgrad.parallel.merge` says of a checkpoint."""
    header, name = load_metadata(path), f"the header of {path}"
    try:
        state = {"model": parse_json(header.get("model", ""), name)}
    except DataError as error:
        raise CheckpointError(
            f"load: {name} lacks the sizes of the model, expected a file of "
            f"tensorgrad.parallel.merge: {error}"
        ) from error
    for entry in ("tokenizer", "settings"):
        state[entry] = parse_json(header.get(entry, "{}"), name)
    return Checkpoint(path, state)


def _published_tokenizer(path: Path) -> AnyTokenizer:
    """Return the tokenizer of a published model: a Tokenizer where it is of GPT-2's kind."""
    found = PublishedTokenizer.load(path)
    try:
        return found if found.adds_space else Tokenizer.load(path)
    except DataError:
        return found


def run_of(path: Path) -> Path | None:
    """Return the folder of the run that a path is, or is a checkpoint of; None for other models."""
    if (path / "checkpoints").is_dir():
        return path
    return path.absolute().parents[1] if (path / "state.json").is_file() else None


def _downloaded(path: Path, download: bool, revision: str | None) -> Path:
    """Return the folder of a model of the Hub; a path that exists is returned as it is."""
    if not download or path.exists():
        return path
    return pretrained_folder(path, download=True, revision=revision)


@dataclass(frozen=True)
class Translator:
    """A trained model with its tokenizer, languages and case."""

    model: TranslationModel
    tokenizer: Tokenizer
    source: str
    target: str
    lowercase: bool

    def __call__(
        self, lines: Sequence[str], beams: int = 1, length_penalty: float = 0.6, rows: int = 128
    ) -> list[str]:
        """Return the translations; empty lines stay empty, long ones are cut with a warning."""
        texts = [line.lower() if self.lowercase else line for line in map(str.strip, lines)]
        longest = self.model.context // 2 - 1
        for text, ids in zip(texts, self.tokenizer.encode_batch(texts), strict=True):
            if len(ids) > longest:
                _log.warning(
                    "%r... has %d tokens, expected at most %d; the rest is omitted",
                    *(text[:40], len(ids), longest),
                )
        found = generate(
            self.model,
            [{self.source: text} for text in texts if text],
            *(self.source, self.target, self.tokenizer, self.model.context),
            beams=beams,
            length_penalty=length_penalty,
            rows=rows,
        )
        translations = iter(found)
        return [next(translations) if text else "" for text in texts]


def load_translator(folder: Path, checkpoint: str = "best", device: str = "auto") -> Translator:
    """Load the model of a run.

    Args:
        folder: of the run.
        checkpoint: "best" by validation loss, "last", or "averaged".
        device: "cpu", "cuda", "cuda:N", or "auto": a GPU if there is one.
    Raises:
        CheckpointError: the folder holds no translation run, lacks the checkpoint, or has another
            tokenizer than the checkpoint's.
        DataError: the tokenizer is missing or damaged.
        DeviceError: the device does not exist.
    """
    found = run_checkpoint(folder, checkpoint)
    data, sizes = found.entry("data"), found.entry("model")
    kinds = {"source": str, "target": str, "lowercase": bool}
    if not (isinstance(data, dict) and all(type(data.get(k)) is kinds[k] for k in kinds)):
        raise CheckpointError(
            f"load: {found.path} is a different kind of run, expected translation"
        )
    averaged = folder / AVERAGED
    if checkpoint == "averaged" and not averaged.is_file():
        raise CheckpointError(
            f"load: {averaged} is missing; it comes at the end of a run with --average, "
            "expected that, or 'best' or 'last'"
        )
    arrays = load_arrays(no_link(averaged)) if checkpoint == "averaged" else found.arrays("model")
    device = backend.use_device(device)
    name = str(averaged if checkpoint == "averaged" else found.path)
    model = restore(TranslationModel, TranslationConfig, sizes, arrays, name)
    model.to(device)
    tokenizer = Tokenizer.load(no_link(folder / "tokenizer.json"))
    check_same(found, "tokenizer", {"sha256": tokenizer.digest})
    return Translator(model, tokenizer, data["source"], data["target"], data["lowercase"])


@dataclass(frozen=True)
class SentenceClassifier:
    """A trained model with its vocabulary.

    Attributes:
        context: the context length in tokens: longer sentences are cut.
    """

    model: Classifier
    vocabulary: Vocabulary
    context: int

    def __call__(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        """Return the class of each sentence and its probability.

        Raises:
            ArgumentError: a sentence has no word.
        """
        for text in texts:
            if not split_words(text):
                raise ArgumentError(f"classify: got {text!r}, expected a sentence")
        tokens = encode(self.vocabulary, texts)
        found = class_probabilities(self.model, tokens, self.context)
        return [(CLASSES[int(row.argmax())], float(row.max())) for row in found]


def load_classifier(folder: Path, checkpoint: str = "best") -> SentenceClassifier:
    """Load the model of a run that trained a classifier, on the CPU.

    Args:
        folder: of the run.
        checkpoint: "best" by validation loss, or "last".
    Raises:
        CheckpointError, DataError: the run has no undamaged checkpoint or vocabulary.
    """
    settings = config.load(SentimentSettings, folder)
    found = run_checkpoint(folder, checkpoint)
    sizes, arrays = found.entry("model"), found.arrays("model")
    sizes = {**sizes} if isinstance(sizes, dict) else {}
    make, kind = MODELS["mean" if sizes.pop("kind", None) == "mean" else "transformer"]
    model: Classifier = restore(make, kind, sizes, arrays, str(found.path))
    vocabulary = load_vocabulary(settings, folder)
    check_same(found, "vocabulary", {"sha256": vocabulary.digest})
    return SentenceClassifier(model, vocabulary, settings.context)


def _model_class(checkpoint: Checkpoint, file: str | None) -> Any:
    """Return the class of a checkpoint's model.

    Args:
        checkpoint: whose settings name the model; without a name it is a GPT-2.
        file: the Python file that the user has named; None: models of a file are refused.
    """
    settings, path = checkpoint.settings("settings"), checkpoint.path
    name, task = str(settings.get("model") or "gpt2"), settings.get("task")
    if task in (SentimentSettings.task, TranslationSettings.task):
        raise CheckpointError(f"load: {path} is of a {task} run, expected a language model")
    if is_file(name) and file is None:
        raise CheckpointError(
            f"load: {path} is of a model in {name}, expected a model of tensorgrad"
        )
    if is_file(name) and not file:
        raise ArgumentError(
            f"--model: got none, expected the Python file of the model of {path}, which is "
            f"executed: {name}"
        )
    if file and is_file(file) and not is_file(name):
        raise ArgumentError(
            f"--model: got {file} for {path}, expected none: its model is {name}, of no file"
        )
    return model_class(file if file and is_file(file) else name)


def _tokenizer(checkpoint: Checkpoint, path: Path) -> AnyTokenizer:
    """Return a tokenizer; fail if the model was trained with another one."""
    tokenizer = load_tokenizer(path)
    if checkpoint.state.get("tokenizer"):
        check_same(checkpoint, "tokenizer", {"sha256": tokenizer.digest})
    return tokenizer
