"""Rounding errors against float64, beside PyTorch's: `python -m examples.bench.errors`.

The error is |y - exact| / |exact| in the Euclidean norm over all elements, for inputs already
rounded to the dtype; the ratio is ours over PyTorch's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import tensorgrad as tg
from tensorgrad import Tensor, backend
from tensorgrad.bench.timing import random_array
from tensorgrad.dtypes import bfloat16, float16, float32

SHAPE = (4096, 1000)


def main() -> None:
    """Print a line for each op and dtype, for values and gradients."""
    torch = importlib.import_module("torch")
    f = torch.nn.functional
    targets = backend.cupy.arange(SHAPE[0]) % SHAPE[1]
    theirs = torch.from_dlpack(targets)
    cases: tuple[tuple[str, Callable[..., Tensor], Callable[..., Any]], ...] = (
        ("softmax", tg.softmax, lambda x: torch.softmax(x, -1)),
        ("log_softmax", tg.log_softmax, lambda x: torch.log_softmax(x, -1)),
        ("layer_norm", tg.layer_norm, lambda x: f.layer_norm(x, SHAPE[1:])),
        ("rms_norm", tg.rms_norm, lambda x: f.rms_norm(x, SHAPE[1:])),
        ("sum rows", lambda x: tg.sum(x, -1), lambda x: x.sum(-1)),
        ("sum columns", lambda x: tg.sum(x, 0), lambda x: x.sum(0)),
        ("sum all", tg.sum, lambda x: x.sum()),
        ("mean rows", lambda x: tg.mean(x, -1), lambda x: x.mean(-1)),
        ("var rows", lambda x: tg.var(x, -1), lambda x: x.var(-1, correction=0)),
        ("var all", tg.var, lambda x: x.var(correction=0)),
        ("logsumexp", lambda x: tg.logsumexp(x, -1), lambda x: x.logsumexp(-1)),
        ("cross_entropy", lambda x: tg.cross_entropy(x, targets),
         lambda x: f.cross_entropy(x, theirs)),
    )  # fmt: skip
    print(f"{'':14} {'dtype':9} {'value':>9} {'PyTorch':>9} {'ratio':>6}   "
          f"{'gradient':>9} {'PyTorch':>9} {'ratio':>6}")  # fmt: skip
    for dtype in (float32, float16, bfloat16):
        x = (2 * random_array(SHAPE)).astype(dtype)
        dy = random_array(SHAPE, dtype, 1)
        for name, ours, peer in cases:
            found = [*_ours(ours, x, dy), *_theirs(torch, peer, x, dy)]
            exact = _theirs(torch, peer, x.astype("float64"), dy.astype("float64"))
            value, gradient, their_value, their_gradient = (
                _error(a, b) for a, b in zip(found, [*exact, *exact], strict=True)
            )
            print(f"{name:14} {dtype!s:9} {value:9.1e} {their_value:9.1e} "
                  f"{_ratio(value, their_value):6.2f}   {gradient:9.1e} {their_gradient:9.1e} "
                  f"{_ratio(gradient, their_gradient):6.2f}")  # fmt: skip


def _ours(function: Callable[..., Tensor], x: Any, dy: Any) -> list[Any]:
    leaf = Tensor(x, requires_grad=True)
    y = function(leaf)
    y.backward(dy.reshape(-1)[: y.size].reshape(y.shape))
    return [y.data.astype("float64"), None if leaf.grad is None else leaf.grad.astype("float64")]


def _theirs(torch: Any, function: Callable[..., Any], x: Any, dy: Any) -> list[Any]:
    leaf, weight = (_to_torch(torch, a) for a in (x, dy))
    leaf.requires_grad_(True)
    y = function(leaf)
    y.backward(weight.reshape(-1)[: y.numel()].reshape(y.shape))
    return [backend.cupy.from_dlpack(a.detach().double()) for a in (y, leaf.grad)]


def _to_torch(torch: Any, x: Any) -> Any:
    if x.dtype.name != "bfloat16":
        return torch.from_dlpack(x.copy())
    return torch.from_dlpack(x.view("int16").copy()).view(torch.bfloat16)


def _error(found: Any, exact: Any) -> float:
    norm = backend.cupy.linalg.norm
    return float(norm((found - exact).reshape(-1)) / norm(exact.reshape(-1)))


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else float(ours > 0)


if __name__ == "__main__":
    main()
