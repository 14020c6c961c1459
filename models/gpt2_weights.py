"""Loading and saving GPT-2 weights in the format of Hugging Face transformers.

Their names differ from ours, and their linear layers (`Conv1D`) hold the weight as (in, out),
transposed. Nothing is downloaded: give the folder that holds config.json and model.safetensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tensorgrad.backend import Shape, to_numpy
from tensorgrad.dtypes import DtypeLike
from tensorgrad.errors import ArgumentError, CheckpointError, DataError
from tensorgrad.files import replacing
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.readers import read_json
from tensorgrad.weights import ArrayFile, load_arrays, save_arrays

__all__ = ["load_huggingface", "save_huggingface"]

# Theirs, ours, the shape of their weight, whether it is transposed. `#`: the number of the block.
_MODULES = (
    ("wte", "tokens", "V C", False),
    ("wpe", "positions", "T C", False),
    ("h.#.ln_1", "blocks.#.norm1", "C", False),
    ("h.#.attn.c_attn", "blocks.#.attention.qkv", "C 3C", True),
    ("h.#.attn.c_proj", "blocks.#.attention.proj", "C C", True),
    ("h.#.ln_2", "blocks.#.norm2", "C", False),
    ("h.#.mlp.c_fc", "blocks.#.feed_forward.up", "C 4C", True),
    ("h.#.mlp.c_proj", "blocks.#.feed_forward.down", "4C C", True),
    ("ln_f", "norm", "C", False),
)
# The same of each array: a bias has the length of its module's output.
_NAMES = [
    (f"{theirs}.{array}", f"{ours}.{array}", shape, transposed and array == "weight")
    for theirs, ours, letters, transposed in _MODULES
    for array, shape in (("weight", letters), ("bias", letters.split()[-1]))
    if array == "weight" or ours not in ("tokens", "positions")
]
_KNOWN = {theirs for theirs, *_ in _NAMES}
_SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "context",
    "n_layer": "layers",
    "n_head": "heads",
    "n_embd": "width",
}
_WRITTEN_WITH = "config"  # the entry of the weights' header with the sizes
_FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}
# Causal masks in old files, and the head, which is a copy of the token embedding.
_IGNORED = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight")


def load_huggingface(
    folder: str | os.PathLike[str], dtype: DtypeLike = "float32", vocab_multiple: int = 1
) -> GPT2:
    """Load a GPT-2 from a folder in the layout of Hugging Face transformers.

    Args:
        folder: with config.json and model.safetensors.
        dtype: of the parameters.
        vocab_multiple: see GPT2Config.
    Raises:
        CheckpointError: a file is missing or damaged, or not of a GPT-2 with these features.
    """
    folder = Path(folder)
    config, path = _config(folder / "config.json", vocab_multiple), folder / "model.safetensors"
    # First the header of the file: config.json may ask for a model larger than any memory.
    with ArrayFile(path) as file:
        _check_header(path, [(_stem(name), file.shape(name)) for name in file.names], config)
        _check_written_together(path, file.metadata.get(_WRITTEN_WITH), config)
    found = {_stem(name): array for name, array in load_arrays(path).items()}
    head = found.get("lm_head.weight")
    if head is not None and not np.array_equal(head, found["wte.weight"]):
        raise CheckpointError(
            f"load_huggingface: {folder} has a lm_head.weight that differs from wte.weight, "
            "expected the same: the head of a GPT-2 is tied to its token embedding"
        )
    more = config.rows - config.vocab_size
    found["wte.weight"] = np.pad(found["wte.weight"], ((0, more), (0, 0)))
    model = GPT2(config).to(dtype)
    arrays = {
        each.name: found[each.theirs].T if each.transposed else found[each.theirs]
        for each in _expected(config)
    }
    try:
        model.load_state_dict(arrays)
    except CheckpointError as error:
        raise CheckpointError(f"load_huggingface: {path}: {error}") from error
    return model


def save_huggingface(model: GPT2, folder: str | os.PathLike[str]) -> None:
    """Write config.json and model.safetensors, which transformers' `GPT2LMHeadModel` loads.

    model.safetensors records the sizes in its header, so `load_huggingface` finds a config.json of
    another model beside it (after a kill between the two).

    Args:
        model: a GPT-2; the padding rows of its token embedding are omitted.
        folder: created if missing.
    Raises:
        CheckpointError: a file cannot be written. An existing model is unchanged, unless the last
            step failed, which renames the new config.json.
    """
    folder, config = Path(folder), model.config
    state = {name: to_numpy(tensor.data) for name, tensor in model.state_dict().items()}
    state["tokens.weight"] = state["tokens.weight"][: config.vocab_size]
    arrays = {
        f"transformer.{each.theirs}": state[each.name].T if each.transposed else state[each.name]
        for each in _expected(config)
    }
    values = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **_FIXED}
    values |= _sizes(config)
    values |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "config.json") as file:
            file.write((json.dumps(values, indent=2) + "\n").encode())
            file.flush()  # a full disk must fail before anything is replaced
            os.fsync(file.fileno())
            header = {"format": "pt", _WRITTEN_WITH: json.dumps(_sizes(config))}
            save_arrays(folder / "model.safetensors", arrays, header)
    except OSError as error:
        raise CheckpointError(f"save_huggingface: cannot write {folder}: {error}") from error


def _sizes(config: GPT2Config) -> dict[str, int]:
    """Return the sizes of a model by the names of transformers."""
    return {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}


def _check_written_together(path: Path, sizes: str | None, config: GPT2Config) -> None:
    """Raise CheckpointError where the header of the weights has other sizes."""
    expected = json.dumps(_sizes(config))
    if sizes not in (None, expected):
        raise CheckpointError(
            f"load_huggingface: {path.parent}/config.json has {expected}, expected {sizes:.400}, "
            "the sizes in the header of model.safetensors"
        )


class _Expected(NamedTuple):
    theirs: str
    name: str
    shape: Shape  # of theirs
    transposed: bool


def _expected(config: GPT2Config) -> Iterator[_Expected]:
    """Yield the arrays that a file of a GPT-2 has, block by block."""
    sizes = {"V": config.vocab_size, "T": config.context}
    sizes |= {"C": config.width, "3C": 3 * config.width, "4C": 4 * config.width}
    for number in range(-1, config.layers):  # -1: the arrays outside the blocks
        for theirs, name, letters, transposed in _NAMES:
            if ("#" in theirs) == (number >= 0):
                yield _Expected(
                    theirs.replace("#", str(number)),
                    name.replace("#", str(number)),
                    tuple(sizes[letter] for letter in letters.split()),
                    transposed,
                )


def _stem(name: str) -> str:
    return name.removeprefix("transformer.")


def _check_header(path: Path, shapes: Sequence[tuple[str, Shape]], config: GPT2Config) -> None:
    """Raise CheckpointError where names or shapes of a file do not fit the sizes."""
    found = dict(shapes)
    if len(found) < len(shapes):
        raise CheckpointError(
            f"load_huggingface: {path} has arrays both with and without 'transformer.' before "
            "their name, expected each once"
        )
    missing = list(islice((e.theirs for e in _expected(config) if e.theirs not in found), 3))
    unknown = [name for name in found if not _is_known(name, config)]
    if unknown or missing:
        raise CheckpointError(
            f"load_huggingface: {path} lacks {missing} and has {unknown[:3]}, expected the arrays "
            f"of a GPT-2 with {config.layers} layers"
        )
    for each in _expected(config):  # no longer than the file: none is missing
        if found[each.theirs] != each.shape:
            raise CheckpointError(
                f"load_huggingface: {path}: {each.theirs} has shape {found[each.theirs]}, "
                f"expected {each.shape}, as config.json says"
            )


def _is_known(name: str, config: GPT2Config) -> bool:
    block = re.fullmatch(r"h\.(\d{1,9})(\..+)", name)
    if block is not None and int(block[1]) < config.layers:
        return f"h.#{block[2]}" in _KNOWN or _IGNORED.fullmatch(name) is not None
    return (name in _KNOWN and "#" not in name) or _IGNORED.fullmatch(name) is not None


def _config(path: Path, vocab_multiple: int) -> GPT2Config:
    """Return the sizes in a config.json; fail where it asks for an unsupported feature."""
    try:
        theirs = read_json(path)
        for name, expected in _FIXED.items():
            if theirs.get(name, expected) != expected:
                raise CheckpointError(
                    f"load_huggingface: {path}: {name} is {theirs[name]!r:.80}, expected "
                    f"{expected!r}"
                )
        wrong = next((name for name in _SIZES if type(theirs.get(name)) is not int), None)
        if wrong is not None:
            raise CheckpointError(
                f"load_huggingface: {path}: {wrong} is {theirs.get(wrong)!r:.80}, expected an "
                "integer"
            )
        sizes = {ours: theirs[name] for name, ours in _SIZES.items()}
        return GPT2Config(**sizes, vocab_multiple=vocab_multiple)
    except OSError as error:
        raise CheckpointError(f"load_huggingface: cannot read {path}: {error.strerror}") from error
    except (ArgumentError, DataError) as error:
        raise CheckpointError(f"load_huggingface: {path}: {error}") from error
