"""Dynamic loss scaling for float16. Tests: tests/optim/test_scaler.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, is_numpy
from tensorgrad.core.checks import check_integer, check_number
from tensorgrad.core.dtypes import compute_dtype
from tensorgrad.core.errors import ArgumentError, CheckpointError
from tensorgrad.core.tensor import Tensor
from tensorgrad.io.display import call_text
from tensorgrad.ops.elementwise import multiply

_SCALE, _STREAK = 0, 1
_LEAST, _MOST = 2.0**-126, 2.0**127  # the scale stays a normal float32


class LossScaler:
    """Scale the loss dynamically, so that gradients stay in the range of float16.

    A step whose gradients are not finite is skipped, and scale *= backoff. After `interval` finite
    steps in a row, scale *= growth.

    The scale is on the device of the loss, and the host never waits for it.

    Args:
        scale: the first scale, 2^-126 to 2^127.
        growth: at least 1.
        backoff: above 0, below 1.
        interval: finite steps before the scale grows, at least 1.

    Raises:
        ArgumentError: an option is outside its range.

    Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.2.

    Example:
        >>> w = tg.tensor([1.0, -2.0], requires_grad=True, dtype="float16")
        >>> optimizer, scaler = tg.optim.SGD([w], lr=0.25), tg.optim.LossScaler(scale=1024.0)
        >>> scaler.scale((w * w).sum()).backward()
        >>> float(optimizer.step(scaler=scaler))  # the norm of [2, -4]
        4.47213595499958
        >>> w.data
        array([ 0.5, -1. ], dtype=float16)
    """

    def __init__(
        self,
        scale: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        for name, value in (("scale", scale), ("growth", growth), ("backoff", backoff)):
            check_number("LossScaler", name, value)
        check_integer("LossScaler", "interval", interval, 1)
        for name, value, good, expected in (
            ("scale", scale, _LEAST <= scale <= _MOST, "a number from 2^-126 to 2^127"),
            ("growth", growth, 1 <= growth < math.inf, "a number from 1"),
            ("backoff", backoff, 0 < backoff < 1, "a number between 0 and 1"),
        ):
            if not good:
                raise ArgumentError(f"LossScaler: {name} is {value}, expected {expected}")
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self._state: Array = np.array([scale, 0.0])

    def __repr__(self) -> str:
        options = {name: getattr(self, name) for name in ("growth", "backoff", "interval")}
        return call_text(self, **options)  # without the scale, which may be on a GPU

    def scale(self, loss: Tensor) -> Tensor:
        """Return loss * scale; a 16-bit loss becomes float32."""
        scale = self.scale_on(loss.data).astype(compute_dtype(loss.dtype))
        return multiply(loss, Tensor(scale))

    def scale_on(self, like: Array) -> Array:
        """Move the scale to the device of `like`, and return it as a 0-d float64 array."""
        if is_numpy(self._state) != is_numpy(like):
            self._state = backend.to_device(self._state, backend.device_of(like))
        return self._state[_SCALE : _SCALE + 1].reshape(())

    def reduce(self, largest: Callable[[Array], None]) -> None:
        """Do nothing: ranks that share a batch have the same scale."""

    def update(self, factor: Array) -> None:
        """Adapt the scale after a step; `Optimizer.step` calls this.

        Args:
            factor: the gradient factor of the step, one element; 0 if the norm was not finite.
        """
        if not is_numpy(factor):
            kernel = _update_kernel()
            kernel(factor, self.growth, self.backoff, np.int64(self.interval), self._state, size=1)
            return
        state = self._state
        if factor[0] == 0:
            state[:] = max(state[_SCALE] * self.backoff, _LEAST), 0
        elif state[_STREAK] + 1 < self.interval:
            state[_STREAK] += 1
        else:
            state[:] = min(state[_SCALE] * self.growth, _MOST), 0

    def state_dict(self) -> dict[str, Any]:
        """Return {"scale": ..., "streak": finite steps since the scale changed}."""
        scale, streak = backend.to_numpy(self._state).tolist()
        return {"scale": scale, "streak": int(streak)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`; nothing changes on an error.

        Raises:
            CheckpointError: an entry is missing, unknown or outside its range.
        """
        known = isinstance(state, Mapping) and set(state) == {"scale", "streak"}
        scale, streak = (state["scale"], state["streak"]) if known else (None, None)
        if (
            not isinstance(scale, int | float)
            or not _LEAST <= scale <= _MOST
            or not isinstance(streak, int)
            or not 0 <= streak < 2**53
        ):
            raise CheckpointError(
                f"LossScaler.load_state_dict: got {state!r:.200}, expected a scale from "
                "2^-126 to 2^127 and a streak from 0"
            )
        self._state[0:1].fill(scale)
        self._state[1:2].fill(streak)


@cache
def _update_kernel() -> Any:
    return backend.cupy.ElementwiseKernel(
        "raw float64 factor, float64 growth, float64 backoff, int64 interval",
        "raw float64 state",
        f"""
        const bool finite = factor[0] != 0;
        const bool grows = finite && state[1] + 1 >= interval;
        if (!finite) state[0] = max(state[0] * backoff, {_LEAST!r});
        if (grows) state[0] = min(state[0] * growth, {_MOST!r});
        state[1] = finite && !grows ? state[1] + 1 : 0;
        """,
        "update_loss_scale",
    )
