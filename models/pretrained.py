"""Models in folders as Hugging Face transformers writes them: config.json and safetensors files.

GPT-2, Llama 2 and 3, Mistral, Qwen 2 and 3, and SmolLM, which is a Llama. Tests:
tests/models/test_pretrained.py and, against transformers, tests/parity/test_pretrained.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.core.backend import Array, Shape, to_numpy
from tensorgrad.core.checks import check_integer
from tensorgrad.core.dtypes import DtypeLike, as_dtype, is_float
from tensorgrad.core.errors import ArgumentError, CheckpointError, DataError
from tensorgrad.io.files import replacing
from tensorgrad.io.readers import needed, parse_json, read_json
from tensorgrad.io.weights import ArrayFile, load_arrays, save_arrays
from tensorgrad.models.architecture import Architecture, PublishedSettings
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.gpt2_weights import GPT2_ARCHITECTURE
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.llama_weights import LLAMA_ARCHITECTURES
from tensorgrad.models.restore import check_building
from tensorgrad.models.transformer_lm import OF_PUBLISHED, TransformerLM
from tensorgrad.nn import init
from tensorgrad.nn.wrapped_names import unwrapped

__all__ = ["from_pretrained", "is_pretrained", "pretrained_folder", "save_pretrained"]

ARCHITECTURES = (GPT2_ARCHITECTURE, *LLAMA_ARCHITECTURES)

_CONFIG, _ONE_FILE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_WRITTEN_WITH = "config"  # the entry of the weights' header with the sizes
# Without these entries transformers takes those of its default vocabulary. The tokenizer's files
# have the token that ends a text.
_NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
# Weights in other formats, which are not read; those of PyTorch may run any code.
_OTHER_WEIGHTS = ("pytorch_model*.bin*", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
_DOWNLOADED = ("*.json", "model*.safetensors", "*.jinja", "merges.txt")  # some have weights twice


def from_pretrained(
    name: str | os.PathLike[str],
    dtype: DtypeLike = "float32",
    *,
    vocab_multiple: int = 1,
    download: bool = False,
    revision: str | None = None,
) -> GPT2 | TransformerLM:
    """Load a model from a folder in the layout of Hugging Face transformers, on the CPU.

    Names and shapes in the headers of the weights are compared with config.json before memory for
    the model is allocated. "module." and "_orig_mod." in names, which PyTorch's wrappers add, are
    dropped. An entry of config.json that may change the mathematics, and that is not known here, is
    an error.

    Args:
        name: a folder with config.json and model.safetensors, or model.safetensors.index.json and
            the files that it lists; or, with `download`, the name of a model on the Hub.
        dtype: the float dtype of the parameters.
        vocab_multiple: as for GPT2Config; other models have no padding rows.
        download: whether a name that is not a folder is downloaded, by huggingface_hub, into its
            cache, as "HuggingFaceTB/SmolLM2-135M". Default: never.
        revision: the branch, tag or commit of a download; default: the main branch.

    Returns:
        A GPT2 or TransformerLM, in evaluation mode; `train()` turns its dropout on.

    Raises:
        CheckpointError: there is no such folder; a file is missing or damaged; or the model has
            an architecture, a setting or arrays that are not supported. The message names it.
        DtypeError: the dtype is not a float.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config, from_pretrained, save_pretrained
        >>> config = GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8)
        >>> save_pretrained(GPT2(config), "gpt2-tiny")
        >>> model = from_pretrained("gpt2-tiny", "bfloat16")
        >>> model.config == config, model.tokens.weight.dtype
        (True, dtype(bfloat16))
    """
    folder = pretrained_folder(name, download=download, revision=revision)
    dtype = as_dtype(dtype)
    architecture, theirs, config = _read_config(folder / _CONFIG)
    if vocab_multiple != 1:
        if not isinstance(config, GPT2Config):
            raise ArgumentError(
                f"from_pretrained: vocab_multiple is {vocab_multiple} for a "
                f"{architecture.name}, expected 1: only a GPT-2 has padding rows"
            )
        config = replace(config, vocab_multiple=vocab_multiple)
    files = _weight_files(folder)
    _check_headers(files, architecture, theirs, config)
    try:
        check_building(config)
        with init.skipped():
            model: GPT2 | TransformerLM = architecture.model(config)
    except ArgumentError as error:
        raise CheckpointError(f"from_pretrained: {theirs.name}: {error}") from error
    for parameter in model.parameters():
        parameter.data = np.zeros(parameter.shape, dtype)
    _load(model, files, architecture, config)
    return model.eval()


def save_pretrained(
    model: LanguageModel, folder: str | os.PathLike[str], *, max_file_bytes: int = 5 * 10**9
) -> None:
    """Write config.json and safetensors files that transformers and `from_pretrained` load.

    Up to `max_file_bytes` the weights are in model.safetensors, which is replaced if it exists.
    Its header records the sizes, so `from_pretrained` finds a config.json of another model beside
    it (after a kill between the two). Larger models are several files and
    model.safetensors.index.json, which are written only where there are no weights yet.

    Args:
        model: a GPT2 or TransformerLM; the padding rows of a token embedding are omitted. Dropout
            that the architecture does not have is not written.
        folder: the folder to write; created if missing.
        max_file_bytes: the largest number of bytes of the arrays in a file; a larger array has its
            own file.

    Raises:
        ArgumentError: the model has another class, or none of the architectures has its settings.
        CheckpointError: a file cannot be written, or the folder has the files of other weights. An
            existing model is unchanged, unless the last step failed, which renames the new
            config.json.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.models import GPT2, GPT2Config, save_pretrained
        >>> config = GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8)
        >>> save_pretrained(GPT2(config), "gpt2-tiny")
        >>> sorted(path.name for path in Path("gpt2-tiny").iterdir())
        ['config.json', 'model.safetensors']
    """
    check_integer("save_pretrained", "max_file_bytes", max_file_bytes, 1)
    folder, config = Path(folder), getattr(model, "config", None)
    architecture, written = _architecture_of(model, config)
    arrays = _arrays_of(model, architecture, config)
    files = _files_of(arrays, max_file_bytes)
    dtype = next(iter(arrays.values())).dtype.name
    values = {"architectures": [architecture.name], "model_type": architecture.model_type}
    header = {"format": "pt", _WRITTEN_WITH: json.dumps(_sizes(written))}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_free(folder, len(files))
        with replacing(folder / _CONFIG) as file:
            file.write(_json({**values, **written, **_NO_TOKENS, "torch_dtype": dtype}))
            file.flush()  # a full disk must fail before anything is replaced
            os.fsync(file.fileno())
            for name, part in files.items():
                save_arrays(folder / name, part, header)
            if len(files) > 1:
                _write_index(folder / _INDEX, files)
    except OSError as error:
        raise CheckpointError(f"save_pretrained: cannot write {folder}: {error}") from error


def is_pretrained(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder has weights in the layout of Hugging Face transformers.

    Args:
        folder: any path.

    Returns:
        True also for weights of other formats, such as PyTorch's, that `from_pretrained` refuses.

    Example:
        >>> from tensorgrad.models import is_pretrained
        >>> is_pretrained("no such folder")
        False
    """
    folder = Path(folder)
    if any((folder / name).is_file() for name in (_ONE_FILE, _INDEX)):
        return True
    return (folder / _CONFIG).is_file() and _other_weights(folder) is not None


def pretrained_folder(
    name: str | os.PathLike[str], *, download: bool = False, revision: str | None = None
) -> Path:
    """Return the folder of a model, which is downloaded if that is asked for.

    Args:
        name, download, revision: as for `from_pretrained`.

    Returns:
        The folder itself, or the one in the cache of huggingface_hub.

    Raises:
        CheckpointError: it is not a folder and not to be downloaded, huggingface_hub is not
            installed, or the download fails.

    Example:
        >>> from tensorgrad.models import pretrained_folder
        >>> pretrained_folder(".").exists()
        True
    """
    if Path(name).is_dir():
        return Path(name)
    if not download:
        raise CheckpointError(
            f"from_pretrained: {os.fspath(name)} is not a folder, expected one with config.json "
            "and safetensors files; the name of a model on the Hugging Face Hub is downloaded "
            "only with download=True (--download)"
        )
    try:
        hub = needed("huggingface_hub", "from_pretrained: download is True, which", "hub")
    except DataError as error:
        raise CheckpointError(str(error)) from error
    try:
        found = hub.snapshot_download(
            os.fspath(name), revision=revision, allow_patterns=list(_DOWNLOADED)
        )
    except Exception as error:  # errors of the network, the Hub, the name or the disk
        raise CheckpointError(
            f"from_pretrained: {os.fspath(name)} cannot be downloaded: "
            f"{' '.join(str(error).split()):.400}"
        ) from error
    return Path(found)


def _read_config(path: Path) -> tuple[Architecture, PublishedSettings, Any]:
    """Return the architecture, the settings and our sizes of a config.json."""
    try:
        theirs = PublishedSettings(read_json(path, links=True), str(path))
        kinds = {architecture.model_type: architecture for architecture in ARCHITECTURES}
        kind = str(theirs.values.get("model_type"))
        if kind not in kinds:
            theirs.refuse("model_type", f"one of {', '.join(kinds)}")
        return kinds[kind], theirs, kinds[kind].read(theirs)
    except OSError as error:
        raise CheckpointError(f"from_pretrained: cannot read {path}: {error.strerror}") from error
    except (ArgumentError, DataError) as error:
        raise CheckpointError(f"from_pretrained: {path}: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights, one or several."""
    index = folder / _INDEX
    if (folder / _ONE_FILE).exists() or not index.exists():
        if not (folder / _ONE_FILE).exists():
            _refuse_other_weights(folder)
        return [folder / _ONE_FILE]
    try:
        places = read_json(index, links=True).get("weight_map")
    except (OSError, DataError) as error:
        raise CheckpointError(f"from_pretrained: {index}: {error}") from error
    names = sorted(set(map(str, places.values()))) if isinstance(places, dict) else []
    wrong = [name for name in names if name != Path(name).name or not name.endswith(".safetensors")]
    if wrong or not names:
        raise CheckpointError(
            f"from_pretrained: {index}: weight_map has {wrong[0] if wrong else places!r:.80}, "
            "expected the name of a safetensors file in the same folder for each array"
        )
    return [folder / name for name in names]


def _other_weights(folder: Path) -> str | None:
    """Return the first name of a file with weights that is not read; None without any."""
    patterns = (*_OTHER_WEIGHTS, "model-*.safetensors")
    names = (path.name for pattern in patterns for path in sorted(folder.glob(pattern)))
    return next(names, None)


def _refuse_other_weights(folder: Path) -> None:
    """Raise CheckpointError where a folder has weights in another format or without an index."""
    name = _other_weights(folder)
    if name is None:
        return
    if name.endswith(".safetensors"):
        raise CheckpointError(f"from_pretrained: {folder} has {name}, expected {_INDEX} beside it")
    danger = "" if name.endswith((".h5", ".msgpack", ".gguf")) else ", which may run any code"
    raise CheckpointError(
        f"from_pretrained: {folder} has {name}{danger}, expected {_ONE_FILE}: transformers "
        "converts it, by from_pretrained and save_pretrained"
    )


def _stem(name: str, architecture: Architecture) -> str:
    """Return the name of an array without the prefix and the parts of PyTorch's wrappers."""
    return unwrapped(name).removeprefix(architecture.prefix)


def _check_headers(
    files: list[Path], architecture: Architecture, theirs: PublishedSettings, config: Any
) -> None:
    """Raise CheckpointError where names or shapes in the files do not fit the sizes."""
    found: dict[str, tuple[Path, Shape]] = {}
    headers = {}
    for path in files:
        with ArrayFile(path) as file:
            headers[path] = file.metadata.get(_WRITTEN_WITH)
            for name in file.names:
                stem = _stem(name, architecture)
                if stem in found:
                    raise CheckpointError(
                        f"from_pretrained: {path} has {name} a second time, or both with and "
                        f"without {architecture.prefix!r} before it, expected each array once"
                    )
                found[stem] = path, file.shape(name)
    where = files[0] if len(files) == 1 else files[0].parent
    _check_names(str(where), set(found), architecture, config)
    for weight in architecture.stored(config):  # no more than the files have: none is missing
        path, shape = found[weight.theirs]
        if shape != weight.shape:
            raise CheckpointError(
                f"from_pretrained: {path}: {weight.theirs} has shape {shape}, expected "
                f"{weight.shape}, as config.json says"
            )
    for path, header in headers.items():
        _check_written_together(path, header, theirs)


def _check_names(where: str, found: set[str], architecture: Architecture, config: Any) -> None:
    """Raise CheckpointError where arrays are missing or unknown, naming the first three."""
    # The third ends the search: config.json may ask for more blocks than any memory holds.
    missing = list(
        islice((e.theirs for e in architecture.stored(config) if e.theirs not in found), 3)
    )
    unknown = []
    if len(missing) < 3:
        known = {weight.theirs for weight in architecture.stored(config)} | {_HEAD}
        unknown = sorted(n for n in found - known if not architecture.ignored.fullmatch(n))
    if missing or unknown:
        raise CheckpointError(
            f"from_pretrained: {where} lacks {missing} and has {unknown[:3]}, expected the arrays "
            f"of a {architecture.name} with {config.layers} layers"
        )


def _check_written_together(path: Path, header: str | None, theirs: PublishedSettings) -> None:
    """Raise CheckpointError where the header of the weights has other sizes than config.json."""
    if header is None:
        return
    try:
        written = parse_json(header, f"the header of {path}")
    except DataError as error:
        raise CheckpointError(f"from_pretrained: {error}") from error
    given = {key: theirs.values.get(key) for key in written}
    if given != written:
        raise CheckpointError(
            f"from_pretrained: {theirs.name} has {json.dumps(given):.400}, expected "
            f"{json.dumps(written):.400}, the sizes in the header of {path.name}"
        )


def _load(model: Any, files: list[Path], architecture: Architecture, config: Any) -> None:
    """Copy the arrays of the files into the parameters."""
    state, head = model.state_dict(), None
    for path in files:
        arrays = load_arrays(path)
        found = {_stem(name, architecture): array for name, array in arrays.items()}
        for weight in architecture.stored(config):
            array = found.get(weight.theirs)
            if array is None:  # in another file
                continue
            if not is_float(array.dtype):
                raise CheckpointError(
                    f"from_pretrained: {path}: {weight.theirs} has dtype {array.dtype}, expected a "
                    "float"
                )
            state[weight.ours].data[weight.rows] = array.T if weight.transposed else array
        head = found.get(_HEAD, head)
    tied = model.output is None
    tokens = state["tokens.weight"].data[: config.vocab_size]
    if tied and head is not None and not np.array_equal(head.astype(tokens.dtype), tokens):
        raise CheckpointError(
            f"from_pretrained: {files[0].parent} has a {_HEAD} that differs from "
            f"{architecture.tokens}, expected the same: the head is tied to the token embedding"
        )


def _sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the entries of a config.json that the header of the weights repeats."""
    return {key: value for key, value in values.items() if type(value) is int}


def _architecture_of(model: Any, config: Any) -> tuple[Architecture, dict[str, Any]]:
    """Return the first architecture that has all settings of a model, and its config.json."""
    kinds = [architecture for architecture in ARCHITECTURES if type(config) is architecture.config]
    if not kinds or not isinstance(model, kinds[0].model):
        raise ArgumentError(
            f"save_pretrained: model is a {type(model).__name__}, expected a GPT2 or TransformerLM"
        )
    for architecture in kinds:
        written = architecture.write(config)
        if _loadable(architecture.read(PublishedSettings(written, _CONFIG))) == _loadable(config):
            return architecture, written
    names = ", ".join(architecture.name for architecture in kinds)
    settings = {key: value for key, value in asdict(config).items() if key in OF_PUBLISHED}
    raise ArgumentError(f"save_pretrained: model has {settings}, expected those of {names}")


def _loadable(config: Any) -> Any:
    """Return the sizes as `from_pretrained` would make them, without what training alone needs."""
    if isinstance(config, GPT2Config):
        return replace(config, hidden=config.hidden_width, dropout=0.0, vocab_multiple=1)
    return replace(
        config,
        hidden=config.hidden_width,
        head_width=config.width_of_head,
        window_from=0 if config.window is None else config.window_from,
        dropout=0.0,
        attention_dropout=None,
        activation_dropout=0.0,
    )


def _arrays_of(model: LanguageModel, architecture: Architecture, config: Any) -> dict[str, Array]:
    """Return the arrays of a model by their names and in their shapes, as views where possible."""
    state = {name: to_numpy(tensor.data) for name, tensor in model.state_dict().items()}
    arrays = {}
    for weight in architecture.stored(config):
        array = state[weight.ours][weight.rows]
        array = array.T if weight.transposed else array
        if array.shape != weight.shape:
            raise ArgumentError(
                f"save_pretrained: {weight.ours} has shape {array.shape} for {weight.theirs}, "
                f"expected {weight.shape}: the whole model, on one rank"
            )
        prefix = "" if weight.theirs == _HEAD else architecture.prefix
        arrays[prefix + weight.theirs] = array
    return arrays


def _files_of(arrays: Mapping[str, Array], max_bytes: int) -> dict[str, dict[str, Array]]:
    """Return the arrays of each file, in order, with as many in a file as fit."""
    parts: list[dict[str, Array]] = [{}]
    size = 0
    for name, array in arrays.items():
        if parts[-1] and size + array.nbytes > max_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size += array.nbytes
    if len(parts) == 1:
        return {_ONE_FILE: parts[0]}
    count = len(parts)
    return {f"model-{n:05}-of-{count:05}.safetensors": part for n, part in enumerate(parts, 1)}


def _check_free(folder: Path, files: int) -> None:
    """Raise CheckpointError where old files would be mixed with new ones."""
    old = [folder / _INDEX] if files == 1 else [folder / _INDEX, *folder.glob("*.safetensors")]
    found = next((path for path in old if path.exists()), None)
    if found is not None:
        raise CheckpointError(
            f"save_pretrained: {found} exists, expected a folder without it: weights in several "
            "files are not replaced; delete them or choose another folder"
        )


def _write_index(path: Path, files: Mapping[str, Mapping[str, Array]]) -> None:
    size = sum(array.nbytes for part in files.values() for array in part.values())
    places = {array: name for name, part in files.items() for array in part}
    with replacing(path) as file:
        file.write(_json({"metadata": {"total_size": size}, "weight_map": places}))


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
