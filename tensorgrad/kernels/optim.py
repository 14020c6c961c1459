"""Steps of optimizers: launches optim.cu, one thread for the scalars, then all elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import compute_dtype
from tensorgrad.kernels.loader import load
from tensorgrad.kernels.structs import by_value, pointer

_THREADS = 256  # the kernels' __launch_bounds__


class Update:
    """A step of an optimizer, whose arguments are cached until an address or option changes."""

    def __init__(self) -> None:
        self._key: Any = None
        self._launches: list[Any] = []

    def __call__(
        self,
        pieces: Sequence[Any],
        state: Mapping[str, Array],
        states_of: Callable[[Any], Mapping[str, Array]],
        hyper: Array,
        prepare: str,
        options: tuple[float, ...],
        step: str,
        scalars: tuple[float, ...],
    ) -> None:
        """Launch the kernel `prepare`, then `step` for each piece.

        Args:
            pieces: of the flat parameters; see optim/flat.py.
            state: name -> flat buffer; of float16 parameters "master" has the float32 master
                weights, of bfloat16 parameters "low_bits" their low 16 bits.
            states_of: returns the elements that these buffers have of a piece.
            hyper: the scalars of a step, float64.
            prepare: computes the rest of `hyper` from the options.
            options: of the optimizer.
            step: updates parameters and state.
            scalars: of `step`.
        """
        arrays = [array for piece in pieces for array in (piece.data, piece.grad)]
        addresses = [array.data.ptr for array in (*arrays, *state.values())]
        key = (prepare, options, step, scalars, *addresses)
        if key != self._key:
            self._key = key
            self._launches = [
                self._arguments(piece, states_of(piece), hyper, scalars)
                for piece in pieces
                if piece.data.size
            ]
        begin, kernel = load("optim.cu", prepare), load("optim.cu", step)  # before either runs
        begin((1,), (1,), (hyper, *map(np.float64, options)))
        for launch in self._launches:
            kernel(*launch)

    def _arguments(
        self, piece: Any, state: Mapping[str, Array], hyper: Array, scalars: tuple[float, ...]
    ) -> tuple[Any, ...]:
        """Return grid, block and arguments for a piece and its state."""
        master = state.get("master", state.get("low_bits"))
        buffers = [array for array in state.values() if array is not master]
        numbers = [np.int64(piece.data.size), np.int64(piece.decayed), *map(np.float64, scalars)]
        vector = 16 // compute_dtype(piece.data.dtype).itemsize
        return (
            (-(-piece.data.size // (_THREADS * vector)),),
            (_THREADS,),
            (piece.data, pointer(master),
             *(buffers or [pointer(None)]), piece.grad, hyper, *map(by_value, numbers)),
        )  # fmt: skip
