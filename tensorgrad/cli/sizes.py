"""A language model and its sizes as options of commands; None is what the preset or model has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from cyclopts import Parameter

from tensorgrad.bench.options import Context, Heads, Layers, Vocab, Width
from tensorgrad.models.presets import PRESETS, SIZES


@Parameter(name="*", group="Model")
@dataclass(frozen=True)
class ModelOptions:
    """A language model and its sizes, as of LanguageSettings.

    Args:
        model: gpt2, transformer-lm, or a Python file that defines a model (default: the preset's).
        preset: sizes of the model; small and char are of any model.
        kv_heads: heads of keys and values, if the model has fewer (default: the preset's).
        hidden: hidden width of the blocks (default: the model's).
        head_width: width of an attention head (default: --width / --heads).
        tied: tie the head to the token embedding (default: the model's).
        qkv_bias: biases of queries, keys and values (default: the model's).
        qk_norm: norms of queries and keys (default: the model's).
        vocab_multiple: pad the rows of the token embedding to a multiple of this.
    """

    model: str | None = None
    preset: Literal[(*SIZES, *PRESETS)] | None = None  # type: ignore[valid-type]
    layers: Layers | None = None
    heads: Heads | None = None
    kv_heads: int | None = None
    width: Width | None = None
    hidden: int | None = None
    head_width: int | None = None
    context: Context | None = None
    vocab: Vocab | None = None
    tied: bool | None = None
    qkv_bias: bool | None = None
    qk_norm: bool | None = None
    vocab_multiple: int | None = None


DEFAULT_MODEL = ModelOptions()


def given(*options: Any) -> dict[str, Any]:
    """Return the options of dataclasses that are not None."""
    values = {f.name: getattr(option, f.name) for option in options for f in fields(option)}
    return {name: value for name, value in values.items() if value is not None}
