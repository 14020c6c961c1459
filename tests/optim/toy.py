"""Small parameters and losses to try optimizers on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np

from tensorgrad import Tensor
from tensorgrad.autograd import record
from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.optim import Optimizer
from tensorgrad.optim.master import halves
from tensorgrad.parallel.shards import ShardedParameters

# odd sizes, a scalar, an empty array, and one that spans several blocks of the NumPy path
SHAPES = {
    "wte": (37, 11),
    "scale": (),
    "h.0.weight": (150, 257),
    "h.0.bias": (257,),
    "empty": (0, 4),
    "norm": (1,),
}


def parameters(
    dtype: Any = np.float32,
    device: str = "cpu",
    seed: int = 0,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> dict[str, Tensor]:
    """Return parameters with normal random values."""
    rng = np.random.default_rng(seed)
    arrays = {name: np.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    return {
        name: Tensor(backend.to_device(array.astype(dtype), device), requires_grad=True)
        for name, array in arrays.items()
    }


def gradients(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, step: int = 0
) -> dict[str, np.ndarray[Any, Any]]:
    """Return random float64 gradients that differ from step to step."""
    rng = np.random.default_rng([9, step])
    return {name: np.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}


def set_gradients(tensors: dict[str, Tensor], step: int) -> None:
    """Write the gradients of a step into the tensors' own arrays."""
    for name, grad in gradients({n: t.shape for n, t in tensors.items()}, step).items():
        tensor = tensors[name]
        assert tensor.grad is not None
        tensor.grad[...] = backend.asarray_like(grad, tensor.data)


def total(*terms: Tensor) -> Tensor:
    """Return the sum of all elements, in float32 at least."""
    wide = np.promote_types(terms[0].dtype, np.float32)
    y = terms[0].data.sum(dtype=wide)
    for term in terms[1:]:
        y = y + term.data.sum(dtype=wide)

    def backward(dy: Any, saved: Any, needs: Any) -> list[Any]:
        return [backend.namespace(dy).broadcast_to(dy, shape) for shape in saved]

    return record("total", y, terms, backward, tuple([t.shape for t in terms]))


def values(tensors: dict[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Return copies of the values."""
    return {name: np.array(tensor.numpy()) for name, tensor in tensors.items()}


def weights(optimizer: Optimizer) -> np.ndarray[Any, Any]:
    """Return what an optimizer updates, 1-D: of 16-bit parameters the float32 master weights."""
    shards = optimizer.flat.shards
    return np.concatenate([backend.to_numpy(optimizer.values(shard)) for shard in shards])


def rounded(master: np.ndarray[Any, Any], dtype: Any) -> Any:
    """Return 16-bit parameters of master weights; bfloat16 is rounded with ties away from zero."""
    return halves(master)[0] if dtype == bfloat16 else master.astype(dtype)


def same_bits(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether arrays are equal bit for bit."""
    return all(
        backend.to_numpy(a).tobytes() == backend.to_numpy(b).tobytes()
        for a, b in zip(one, two, strict=True)
    )


class Shards(ShardedParameters):
    """Parameters that two ranks shard, which are threads and share the list `met`."""

    def __init__(self, tensors: Mapping[str, Tensor], rank: int, met: list[Any], all_: Barrier):
        super().__init__(tensors.items(), rank, 2, 1, dict.fromkeys(tensors))
        self._met, self._barrier = met, all_

    def gather(self, number: int, part: Any) -> Any:
        """Return what both ranks have of a bucket."""
        self._met[self.rank] = part.copy()
        self._barrier.wait()
        whole = np.concatenate(self._met)
        self._barrier.wait()
        return whole

    def add_shards(self, array: Any) -> None:
        """Add what both ranks have, in place."""
        array[...] = self.gather(0, array.reshape(1, -1)).sum(0).reshape(array.shape)


def on_two_ranks(
    make: Callable[[Any], Optimizer], steps: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> dict[str, Any]:
    """Return parameters after steps of an optimizer of shards, put together from both ranks."""
    met: list[Any] = [None, None]
    barrier = Barrier(2, timeout=60)
    found = {name: np.zeros(shape) for name, shape in shapes.items()}

    def run(rank: int) -> None:
        tensors = parameters(np.float64, shapes=shapes)
        flat = Shards(tensors, rank, met, barrier)
        flat.touched_elsewhere = frozenset(shapes)
        optimizer = make(flat)
        for step in range(steps):
            set_gradients(tensors, step)
            optimizer.step()
        for part in flat.parameter_shards():
            found[part.name].reshape(-1)[part.values] = part.data

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    return found
