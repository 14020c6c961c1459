"""The options that sweeps share: types for the command line, choices, and cases of a product.

The options of a sweep are the arguments of a function that yields its measurements:

    def softmax_sweep(*, rows: tuple[int, ...] = (16, 64), device: Device = "auto"):
        yield Measurement(SOFTMAX, crossed(rows=rows, dtype="float32"), measure, device)

`tensorgrad.cli.bench` makes a command of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tensorgrad.core import backend
from tensorgrad.core.errors import ArgumentError, DeviceError
from tensorgrad.train.settings import DTYPES

_FROM_ZERO = ("warmup", "seed", "load")  # options that may be 0


def _option(words: str) -> Parameter:
    return Parameter(help=words, show_default=_shown)


def _shown(default: Any) -> str:
    return "the preset's" if default is None else str(default)


Layers = Annotated[int, _option("transformer blocks.")]
Heads = Annotated[int, _option("attention heads.")]
Width = Annotated[int, _option("width of the model.")]
Context = Annotated[int, _option("context length in tokens.")]
Vocab = Annotated[int, _option("size of the vocabulary.")]
Device = Annotated[str, Parameter(help="cpu, cuda, cuda:N, or auto: a GPU if there is one")]
Peer = Annotated[
    bool | None,
    Parameter(help="measure PyTorch too", show_default=lambda _: "where it is installed"),
]
Precision = Literal[DTYPES]  # type: ignore[valid-type]


@Parameter(name="*")
@dataclass(frozen=True)
class Sizes:
    """Sizes that replace those of a preset."""

    layers: Layers | None = None
    width: Width | None = None
    heads: Heads | None = None
    context: Context | None = None
    vocab: Vocab | None = None

    def given(self) -> dict[str, int]:
        """Return the sizes that replace others, by name."""
        return {name: size for name, size in asdict(self).items() if size is not None}


PRESET = Sizes()


def precision_on(device: str, dtype: str | None) -> str:
    """Return a dtype of training; None: float32 on a CPU, bfloat16-parameters on a GPU."""
    return dtype or ("float32" if device == "cpu" else "bfloat16-parameters")


def is_measured(peer: bool | None, package: str = "torch") -> bool:
    """Return whether a peer is measured; None: where it is installed.

    Raises:
        ArgumentError: it is asked for, and is not installed.
    """
    there = find_spec(package) is not None
    if peer and not there:
        name = "PyTorch" if package == "torch" else package
        raise ArgumentError(f"--peer: {name} is not installed; run `pip install {package}`")
    return there if peer is None else peer


def check_gpu(name: str) -> None:
    """Raise DeviceError without a GPU."""
    if not backend.gpu_count():
        raise DeviceError(f"bench {name}: no GPU was found, expected one to measure on")


def check_ranks(name: str, ranks: int) -> None:
    """Raise ArgumentError where one rank is alone."""
    if ranks == 1:
        raise ArgumentError(
            f"bench {name}: got one rank, expected several: start it with `mpirun -n 2 tensorgrad "
            f"bench {name}`"
        )


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError unless the numbers of a sweep's options are above 0; a few may be 0."""
    for name, value in options.items():
        for number in value if isinstance(value, tuple) else (value,):
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            low = 0 if name in _FROM_ZERO else 1
            if is_number and not (0 < number < math.inf or number == low):
                least = "more than 0" if isinstance(number, float) and low else f"{low} or more"
                raise ArgumentError(f"--{name.replace('_', '-')}: got {number}, expected {least}")


def crossed(**values: Any) -> list[dict[str, Any]]:
    """Return a case for each combination of values, the last one varying fastest.

    Args:
        values: by parameter; a list or a tuple has several, of which equal ones count once.
    """
    lists = [dict.fromkeys(v) if isinstance(v, tuple | list) else (v,) for v in values.values()]
    return [dict(zip(values, combination, strict=True)) for combination in product(*lists)]
