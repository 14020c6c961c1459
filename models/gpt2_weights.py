"""GPT-2 as Hugging Face transformers stores it: see architecture.py and pretrained.py.

Names differ from ours, and linear layers (`Conv1D`) hold the weight as (in, out), transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tensorgrad.models.architecture import Architecture, PublishedSettings, StoredArray
from tensorgrad.models.gpt2 import GPT2, GPT2Config

__all__ = ["GPT2_ARCHITECTURE"]

# Theirs, ours, the shape of their weight, whether it is transposed. `#`: the number of the block.
_MODULES = (
    ("wte", "tokens", "V C", False),
    ("wpe", "positions", "T C", False),
    ("h.#.ln_1", "blocks.#.norm1", "C", False),
    ("h.#.attn.c_attn", "blocks.#.attention.qkv", "C 3C", True),
    ("h.#.attn.c_proj", "blocks.#.attention.proj", "C C", True),
    ("h.#.ln_2", "blocks.#.norm2", "C", False),
    ("h.#.mlp.c_fc", "blocks.#.feed_forward.up", "C H", True),
    ("h.#.mlp.c_proj", "blocks.#.feed_forward.down", "H C", True),
    ("ln_f", "norm", "C", False),
)
# The same of each array: a bias has the length of its module's output.
_NAMES = [
    (f"{theirs}.{array}", f"{ours}.{array}", shape, transposed and array == "weight")
    for theirs, ours, letters, transposed in _MODULES
    for array, shape in (("weight", letters), ("bias", letters.split()[-1]))
    if array == "weight" or ours not in ("tokens", "positions")
]
_SIZES = {
    "vocab_size": "vocab_size",
    "n_positions": "context",
    "n_layer": "layers",
    "n_head": "heads",
    "n_embd": "width",
}
# Other names of the sizes that transformers takes, and prefers.
_ALIASES = {
    "n_positions": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
}
# The values that are supported, the default first. All of these GELUs are the one of GPT-2.
_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": (
        *("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"),
    ),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "tie_word_embeddings": (True,),
}


def _read(theirs: PublishedSettings) -> GPT2Config:
    sizes = {ours: _size(theirs, name) for name, ours in _SIZES.items()}
    theirs.only(_FIXED)
    hidden = theirs.integer("n_inner", None)
    theirs.check_all_known("GPT2LMHeadModel")
    return GPT2Config(**sizes, hidden=None if hidden == 4 * sizes["width"] else hidden)


def _size(theirs: PublishedSettings, name: str) -> int:
    """Return a size, which may have its other name."""
    alias = _ALIASES.get(name, name)
    if alias not in theirs.values:
        return int(theirs.integer(name))
    size: int = theirs.integer(alias)
    theirs.only({name: (size,)})
    return size


def _write(config: GPT2Config) -> dict[str, Any]:
    fixed = {name: values[0] for name, values in _FIXED.items()}
    values = {**fixed, **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}}
    values["n_inner"] = config.hidden
    return values | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout)


def _stored(config: GPT2Config) -> Iterator[StoredArray]:
    """Yield the arrays, block by block."""
    sizes = {"V": config.vocab_size, "T": config.context}
    sizes |= {"C": config.width, "3C": 3 * config.width, "H": config.hidden_width}
    for number in range(-1, config.layers):  # -1: the arrays outside the blocks
        for theirs, ours, letters, transposed in _NAMES:
            if ("#" in theirs) == (number >= 0):
                yield StoredArray(
                    theirs.replace("#", str(number)),
                    ours.replace("#", str(number)),
                    tuple(sizes[letter] for letter in letters.split()),
                    transposed=transposed,
                )


GPT2_ARCHITECTURE = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    model=GPT2,
    config=GPT2Config,
    prefix="transformer.",
    tokens="wte.weight",
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),  # causal masks in old files
    read=_read,
    write=_write,
    stored=_stored,
)
