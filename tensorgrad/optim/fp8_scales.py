"""Delayed scaling for products in 8 bits. Tests: tests/optim/test_fp8_scales.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, is_numpy
from tensorgrad.core.checks import check_integer
from tensorgrad.core.dtypes import float8_e4m3, float8_e5m2
from tensorgrad.core.errors import CheckpointError
from tensorgrad.core.modes import mode
from tensorgrad.core.nodes import latest_version
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels import fp8 as fp8_cuda
from tensorgrad.kernels.fp8 import MULTIPLE, Operand
from tensorgrad.ops.fp8 import (
    CLIPPED,
    LIMITS,
    PEAK,
    LinearScales,
    measure,
    new_scales,
    quantize,
    update_scales,
)
from tensorgrad.optim.flat import NamedParameters, in_blocks

Layers = Callable[[str, Tensor], bool]
_FORMATS = (float8_e4m3, float8_e4m3, float8_e5m2)  # of x, weight and dy


class Fp8Scales:
    """The scales of the linear layers of a model, chosen from the peaks of earlier steps.

    Each layer has three: of its input, its weight and the gradient of its output. A step reports
    the largest magnitudes that it has rounded, and `update` chooses the scales of the next step
    from those of the last `history` steps, so that no tensor is read twice. The first step measures
    each tensor before it is rounded.

    All state is on the device of the weights, and the host never waits for it.

    Args:
        named_parameters: as for an optimizer.
        layers: (name, parameter) -> whether it is the weight of a layer that computes in 8 bits;
            default: matrices in blocks, but not in the first and the last block. Weights whose
            lengths are not multiples of 16 are left out.
        history: steps, from 1.

    Attributes:
        names: of the weights.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; delayed scaling as in NVIDIA's Transformer
        Engine.

    Example:
        >>> layer = tg.nn.Linear(16, 32)
        >>> scales = tg.optim.Fp8Scales(layer.named_parameters(), lambda name, parameter: True)
        >>> with tg.autocast("fp8", scales=scales):
        ...     layer(tg.ones((16, 16))).sum().backward()
        >>> scales.update()
        >>> scales.names
        ('weight',)
    """

    def __init__(
        self, named_parameters: NamedParameters, layers: Layers | None = None, history: int = 16
    ) -> None:
        check_integer("Fp8Scales", "history", history, 1)
        found = [
            pair if isinstance(pair, tuple) else (str(i), pair)
            for i, pair in enumerate(named_parameters)
        ]
        chosen = inner_blocks(name for name, _ in found) if layers is None else layers
        weights = {
            name: weight
            for name, weight in found
            if weight.ndim == 2 and all(n and n % MULTIPLE == 0 for n in weight.shape)
            and chosen(name, weight)
        }  # fmt: skip
        self.names = tuple(weights)
        self._weights = list(weights.values())
        self._places = {id(weight): i for i, weight in enumerate(self._weights)}
        count, self.updates = 3 * len(weights), 0
        self._scales: Array = np.zeros((count, 4), np.float32)
        self._scales[:, :PEAK] = 1
        self._history: Array = np.zeros((history, count), np.float32)
        self._turn: Array = np.zeros(1, np.int32)
        self._limits: Array = np.tile(
            np.array([LIMITS[dtype] for dtype in _FORMATS], np.float32), len(weights)
        )
        self._operands: list[tuple[Operand, Operand]] = []
        self._matrices: fp8_cuda.Matrices | None = None
        self._cut()

    def of(self, weight: Tensor, casts: Any) -> LinearScales | None:
        """Return the scales of the layer with this weight; None where it has none.

        Args:
            weight: the parameter itself.
            casts: of the enclosing `autocast`, in which the weights are rounded once.
        """
        place = self._places.get(id(weight))
        if place is None:
            return None
        if not mode.grad_enabled and not self.updates:
            return new_scales(weight.data)  # what is not a step has no part in the scales
        version = latest_version()
        if casts.rounded_at != version:
            casts.rounded_at = version
            self._round_weights()
        return LinearScales(
            *self._states[place], not self.updates, mode.grad_enabled, self._operands[place]
        )

    def update(self) -> None:
        """Choose the scales of the next step, after the backward pass of this one."""
        if self._weights:
            update_scales(self._scales, self._history, self._turn, self._limits)
        self.updates += 1

    def clipped(self) -> dict[str, tuple[int, int, int]]:
        """Return how many elements of x, weight and dy were beyond the format so far, by weight."""
        counts = backend.to_numpy(self._scales)[:, CLIPPED].copy().view(np.uint32).reshape(-1, 3)
        return {
            name: (int(x), int(weight), int(dy))
            for name, (x, weight, dy) in zip(self.names, counts, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state: arrays "scales", "history" and "turn"."""
        return {
            "scales": backend.to_numpy(self._scales).copy(),
            "history": backend.to_numpy(self._history).copy(),
            "turn": backend.to_numpy(self._turn).copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`; nothing changes on an error.

        Raises:
            CheckpointError: an entry is missing, or of another shape or dtype.
        """
        arrays = {"scales": self._scales, "history": self._history, "turn": self._turn}
        for name, array in arrays.items():
            value = state.get(name) if isinstance(state, Mapping) else None
            shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
            if shape != array.shape or dtype != array.dtype:
                raise CheckpointError(
                    f"Fp8Scales.load_state_dict: {name} has shape {shape} and dtype {dtype}, "
                    f"expected {array.shape} and {array.dtype}"
                )
        for name, array in arrays.items():
            array[...] = backend.asarray_like(state[name], array)
        self.updates = int(state["turn"][0])

    def _round_weights(self) -> None:
        """Write all weights in 8 bits, and transposed, with their scales."""
        arrays = [weight.data for weight in self._weights]
        self._move_to(arrays[0])
        scales = [weight for _, weight, _ in self._states]
        if not self.updates:
            for array, scale in zip(arrays, scales, strict=True):
                measure(array, float8_e4m3, scale)
        if is_numpy(arrays[0]):
            pairs = []
            for array, scale in zip(arrays, scales, strict=True):
                rows, columns, _ = quantize(array, float8_e4m3, scale)
                assert rows is not None, "wanted"
                assert columns is not None, "wanted"
                pairs.append((rows, columns))
            self._operands = pairs
            return
        if self._matrices is None or not self._matrices.are(arrays):
            self._matrices = fp8_cuda.Matrices(arrays, scales)
            self._operands = list(zip(self._matrices.rows, self._matrices.columns, strict=True))
        self._matrices.quantize()

    def _move_to(self, like: Array) -> None:
        """Move the state to the device of an array."""
        if is_numpy(self._scales) == is_numpy(like):
            return
        device = backend.device_of(like)
        self._scales = backend.to_device(self._scales, device)
        self._history = backend.to_device(self._history, device)
        self._turn = backend.to_device(self._turn, device)
        self._limits = backend.to_device(self._limits, device)
        self._cut()

    def _cut(self) -> None:
        """Cut the state into those of x, weight and dy of each layer."""
        states = [self._scales[i] for i in range(len(self._scales))]
        self._states = [(states[i], states[i + 1], states[i + 2]) for i in range(0, len(states), 3)]


def inner_blocks(names: Any) -> Layers:
    """Return a rule for the matrices in blocks but the first and the last, by the names of all.

    Args:
        names: of all parameters of a model, in their order.

    Example:
        >>> rule = tg.optim.fp8_scales.inner_blocks(f"blocks.{i}.up.weight" for i in range(3))
        >>> [rule(f"blocks.{i}.up.weight", tg.zeros((2, 2))) for i in range(3)]
        [False, True, False]
    """
    blocks = [block for block in map(_block_of, names) if block]
    ends = set(blocks[:1] + blocks[-1:])
    return lambda name, weight: in_blocks(name, weight) and _block_of(name) not in ends


def _block_of(name: str) -> tuple[str, ...]:
    """Return the name of a block up to its number, () for what is in none."""
    parts = name.split(".")[:-1]
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return tuple(parts[: numbers[0] + 1]) if numbers else ()
