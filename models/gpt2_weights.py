"""GPT-2 weights from and to the files that Hugging Face transformers reads and writes.

Their names differ from ours, and their linear layers (`Conv1D`) hold the weight as (in, out),
transposed. Nothing is downloaded: give the folder that holds config.json and model.safetensors.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.backend import to_numpy
from tensorgrad.dtypes import DtypeLike
from tensorgrad.errors import CheckpointError
from tensorgrad.files import replacing
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.weights import load_arrays, load_metadata, save_arrays

__all__ = [
    "load_huggingface",
    "save_huggingface",
]

# Theirs, ours, whether the weight is transposed. `#` stands for the number of the block.
_NAMES = (
    ("wte.weight", "tokens.weight", False),
    ("wpe.weight", "positions.weight", False),
    ("h.#.ln_1.weight", "blocks.#.norm1.weight", False),
    ("h.#.ln_1.bias", "blocks.#.norm1.bias", False),
    ("h.#.attn.c_attn.weight", "blocks.#.attention.qkv.weight", True),
    ("h.#.attn.c_attn.bias", "blocks.#.attention.qkv.bias", False),
    ("h.#.attn.c_proj.weight", "blocks.#.attention.proj.weight", True),
    ("h.#.attn.c_proj.bias", "blocks.#.attention.proj.bias", False),
    ("h.#.ln_2.weight", "blocks.#.norm2.weight", False),
    ("h.#.ln_2.bias", "blocks.#.norm2.bias", False),
    ("h.#.mlp.c_fc.weight", "blocks.#.feed_forward.up.weight", True),
    ("h.#.mlp.c_fc.bias", "blocks.#.feed_forward.up.bias", False),
    ("h.#.mlp.c_proj.weight", "blocks.#.feed_forward.down.weight", True),
    ("h.#.mlp.c_proj.bias", "blocks.#.feed_forward.down.bias", False),
    ("ln_f.weight", "norm.weight", False),
    ("ln_f.bias", "norm.bias", False),
)
_SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "context",
    "n_layer": "layers",
    "n_head": "heads",
    "n_embd": "width",
}
_WRITTEN_WITH = "config"  # the entry of the header of weights that has the sizes
_FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}
# Causal masks that old files hold, and the head, which is the table of tokens once more.
_IGNORED = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight")


def load_huggingface(
    folder: str | os.PathLike[str], dtype: DtypeLike = "float32", vocab_multiple: int = 1
) -> GPT2:
    """Return the GPT-2 that a folder of Hugging Face transformers holds.

    Args:
        folder: with config.json and model.safetensors.
        dtype: of the parameters.
        vocab_multiple: see GPT2Config.
    Raises:
        CheckpointError: a file is missing or damaged, or it is not of a GPT-2 as built here.
    """
    folder = Path(folder)
    try:
        theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(theirs, dict):
            raise TypeError(f"it holds a {type(theirs).__name__}, expected a mapping")
        config = _config(theirs, vocab_multiple)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"load_huggingface: {folder}/config.json: {error!r}") from error
    model = GPT2(config).to(dtype)
    found = {
        name.removeprefix("transformer."): array
        for name, array in load_arrays(folder / "model.safetensors").items()
    }
    names = _names(config.layers)
    unknown = [name for name in found if name not in names and not _IGNORED.fullmatch(name)]
    missing = [name for name in names if name not in found]
    if unknown or missing:
        raise CheckpointError(
            f"load_huggingface: {folder} lacks {missing[:3]} and has {unknown[:3]}, which a "
            f"GPT-2 with {config.layers} layers has not"
        )
    head = found.get("lm_head.weight")
    if head is not None and not np.array_equal(head, found["wte.weight"]):
        raise CheckpointError(
            f"load_huggingface: {folder} has a lm_head.weight of its own, expected wte.weight once "
            "more: the head of a GPT-2 is its table of tokens"
        )
    state = model.state_dict()
    for theirs_name, (name, transposed) in names.items():
        array = found[theirs_name].T if transposed else found[theirs_name]
        is_table = name == "tokens.weight"
        shape = (config.vocab_size, config.width) if is_table else state[name].shape
        if array.shape != shape:
            raise CheckpointError(
                f"load_huggingface: {theirs_name} has shape {found[theirs_name].shape}, expected "
                f"that of {name}, {shape}{', transposed' if transposed else ''}"
            )
        if is_table:
            array = np.pad(array, ((0, config.rows - config.vocab_size), (0, 0)))
        found[theirs_name] = array
    _check_written_together(folder, config)
    model.load_state_dict({name: found[theirs] for theirs, (name, _) in names.items()})
    return model


def save_huggingface(model: GPT2, folder: str | os.PathLike[str]) -> None:
    """Write config.json and model.safetensors, which transformers' `GPT2LMHeadModel` loads.

    model.safetensors says which sizes it was written with, so that one beside another config.json
    (a kill came between the two) is an error of `load_huggingface`.

    Args:
        model: a GPT-2; rows beyond its vocabulary are left out.
        folder: created if missing.
    Raises:
        CheckpointError: a file cannot be written. A model that was there is unchanged, unless what
            failed was to rename the new config.json, the last thing that is done.
    """
    folder, config = Path(folder), model.config
    state = {name: to_numpy(tensor.data) for name, tensor in model.state_dict().items()}
    state["tokens.weight"] = state["tokens.weight"][: config.vocab_size]
    arrays = {
        f"transformer.{theirs}": state[name].T if transposed else state[name]
        for theirs, (name, transposed) in _names(config.layers).items()
    }
    values = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **_FIXED}
    values |= _sizes(config)
    values |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "config.json") as file:
            file.write((json.dumps(values, indent=2) + "\n").encode())
            file.flush()  # if there is no room, let nothing be replaced
            os.fsync(file.fileno())
            header = {"format": "pt", _WRITTEN_WITH: json.dumps(_sizes(config))}
            save_arrays(folder / "model.safetensors", arrays, header)
    except OSError as error:
        raise CheckpointError(f"save_huggingface: cannot write {folder}: {error}") from error


def _sizes(config: GPT2Config) -> dict[str, int]:
    """Return the sizes of a model under their names."""
    return {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}


def _check_written_together(folder: Path, config: GPT2Config) -> None:
    """Raise CheckpointError where the weights say that they were written with other sizes."""
    said = load_metadata(folder / "model.safetensors").get(_WRITTEN_WITH)
    expected = json.dumps(_sizes(config))
    if said not in (None, expected):
        raise CheckpointError(
            f"load_huggingface: {folder}/config.json has {expected}, expected {said}, with which "
            "model.safetensors was written"
        )


def _names(layers: int) -> dict[str, tuple[str, bool]]:
    """Return their name -> our name and whether the weight is transposed, for every array."""
    return {
        theirs.replace("#", str(number)): (ours.replace("#", str(number)), transposed)
        for theirs, ours, transposed in _NAMES
        for number in (range(layers) if "#" in theirs else [0])
    }


def _config(theirs: dict[str, Any], vocab_multiple: int) -> GPT2Config:
    """Return the sizes that a config.json gives; fail where it asks for what is not built here."""
    for name, expected in _FIXED.items():
        if theirs.get(name, expected) != expected:
            raise CheckpointError(
                f"load_huggingface: {name} is {theirs[name]!r}, expected {expected!r}"
            )
    sizes = {ours: theirs[name] for name, ours in _SIZES.items()}
    return GPT2Config(**sizes, vocab_multiple=vocab_multiple)
