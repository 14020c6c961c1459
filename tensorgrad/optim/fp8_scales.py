"""Delayed scaling for products in 8 bits. Tests: tests/optim/test_fp8_scales.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, is_numpy
from tensorgrad.core.checks import check_integer
from tensorgrad.core.errors import CheckpointError
from tensorgrad.core.modes import mode
from tensorgrad.core.nodes import latest_version
from tensorgrad.core.tensor import Tensor
from tensorgrad.io.display import call_text
from tensorgrad.kernels import fp8 as fp8_cuda
from tensorgrad.kernels.fp8 import MULTIPLE, Fp8Operand, float8_e4m3, float8_e5m2
from tensorgrad.ops.fp8 import (
    CLIPPED,
    INVERSE,
    LIMITS,
    PEAK,
    SCALE,
    LinearScales,
    measure,
    new_scales,
    quantize,
    update_scales,
)
from tensorgrad.optim.flat import NamedParameters, in_blocks
from tensorgrad.optim.scaler import LossScaler

Layers = Callable[[str, Tensor], bool]
_FORMATS = (float8_e4m3, float8_e4m3, float8_e5m2)  # x, weight and dy


class Fp8Scales(LossScaler):
    """The scales of the linear layers of a model, chosen from the peaks of earlier steps.

    Each layer has three: of its input, its weight and the gradient of its output. A step reports
    the largest magnitudes that it has rounded, and `update` chooses the scales of the next step
    from those of the last `history` steps, so that no tensor is read twice. The first step measures
    each tensor before it is rounded.

    It takes the place of a loss scaler: given to `Optimizer.step`, it skips a step in which a
    tensor held NaN or infinity, which 8 bits would hide, and is updated there. The loss is not
    scaled.

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
        >>> scales.update()  # or optimizer.step(scaler=scales)
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
        self._operands: list[tuple[Fp8Operand, Fp8Operand]] = []
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
            return new_scales(weight.data)  # a forward alone has no part in the scales
        version = latest_version()
        if casts.rounded_at != version:
            casts.rounded_at = version
            self._round_weights()
        return LinearScales(
            *self._states[place], not self.updates, mode.grad_enabled, self._operands[place]
        )

    def __repr__(self) -> str:
        return call_text(self, layers=len(self.names), history=len(self._history))

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss as it is."""
        return loss

    def scale_on(self, like: Array) -> Array:
        """Return 1, or NaN where a tensor of this step held NaN or infinity; 0-d float64."""
        with np.errstate(invalid="ignore"):
            zero = (self._scales[:, PEAK] * 0).sum(dtype=np.float64)
        return backend.asarray_like(zero + 1, self._scales)

    def update(self, factor: Array | None = None) -> None:
        """Choose the scales of the next step, after the backward pass of this one.

        Args:
            factor: of the optimizer, which does not count.
        """
        if self.names:
            update_scales(self._scales, self._history, self._turn, self._limits)
        self.updates += 1

    def reduce(self, largest: Callable[[Array], None]) -> None:
        """Let the scales of ranks that share a batch follow the peaks of all of them.

        Args:
            largest: replaces an int32 array by its largest elements over the ranks, in place.
        """
        peaks = self._scales[:, PEAK].copy().view(np.int32)  # in the order of the numbers
        largest(peaks)
        self._scales[:, PEAK] = peaks.view(np.float32)

    def clipped(self) -> dict[str, tuple[int, int, int]]:
        """Return how many elements of x, weight and dy were beyond the format so far, by weight."""
        counts = self._counts(backend.to_numpy(self._scales))
        return {
            name: (counts[3 * i], counts[3 * i + 1], counts[3 * i + 2])
            for i, name in enumerate(self.names)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of updates and the scales, clipped elements and peaks, by weight."""
        scales, history = (backend.to_numpy(array) for array in (self._scales, self._history))
        own = [scales[:, SCALE].tolist(), self._counts(scales), history.T.tolist()]
        return {
            "updates": int(backend.to_numpy(self._turn)[0]),
            "layers": {
                name: [values[3 * i : 3 * i + 3] for values in own]
                for i, name in enumerate(self.names)
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`; nothing changes on an error.

        Raises:
            CheckpointError: it is of other layers, or of another history.
        """
        scales, history = np.zeros(self._scales.shape, np.float32), np.zeros(self._history.shape)
        try:
            updates = int(state["updates"])
            layers = dict(state["layers"])
            if tuple(layers) != self.names:
                raise ValueError(f"layers {', '.join(layers)}")
            for i, (scale, clipped, peaks) in enumerate(layers.values()):
                own = slice(3 * i, 3 * i + 3)
                scales[own, SCALE] = scale
                scales[own, CLIPPED] = np.array(clipped, np.uint32).view(np.float32)
                history[:, own] = np.array(peaks).T
            if not (np.isfinite(scales[:, SCALE]) & (scales[:, SCALE] > 0)).all() or updates < 0:
                raise ValueError("a scale that is no power of two")
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise CheckpointError(
                f"Fp8Scales.load_state_dict: got {error!s:.200}, expected the scales and "
                f"{len(self._history)} peaks of {len(self.names)} layers"
            ) from error
        scales[:, INVERSE] = 1 / scales[:, SCALE]
        self._scales[...] = backend.asarray_like(scales, self._scales)
        self._history[...] = backend.asarray_like(history.astype(np.float32), self._history)
        self._turn[...] = updates
        self.updates = updates

    @staticmethod
    def _counts(scales: Any) -> list[int]:
        """Return the numbers of clipped elements in a state on the CPU."""
        counts: list[int] = scales[:, CLIPPED].copy().view(np.uint32).tolist()
        return counts

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
