"""`tensorgrad bench errors`: rounding errors against float64, beside PyTorch's.

The error is |y - exact| / |exact| in the Euclidean norm over all elements, for inputs already
rounded to the dtype; exact values are PyTorch's in float64. The ratio is ours over PyTorch's, so
below 1 ours are nearer. Tests: tests/bench/test_small.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tensorgrad.bench.options import Device, crossed, is_measured
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import random_array, to_torch
from tensorgrad.core import backend
from tensorgrad.core.dtypes import as_dtype
from tensorgrad.core.tensor import Tensor
from tensorgrad.ops import reduce
from tensorgrad.ops.cross_entropy import cross_entropy
from tensorgrad.ops.norm import layer_norm, rms_norm
from tensorgrad.ops.softmax import log_softmax, softmax

_PARTS = ("value", "gradient")
DTYPES = ("float32", "float16", "bfloat16")
OPS: dict[str, tuple[Callable[..., Tensor], Callable[[Any, Any], Any]]] = {
    "softmax": (softmax, lambda torch, x: torch.softmax(x, -1)),
    "log_softmax": (log_softmax, lambda torch, x: torch.log_softmax(x, -1)),
    "layer_norm": (layer_norm, lambda torch, x: torch.nn.functional.layer_norm(x, x.shape[1:])),
    "rms_norm": (rms_norm, lambda torch, x: torch.nn.functional.rms_norm(x, x.shape[1:])),
    "sum rows": (lambda x: reduce.sum(x, -1), lambda torch, x: x.sum(-1)),
    "sum columns": (lambda x: reduce.sum(x, 0), lambda torch, x: x.sum(0)),
    "sum all": (reduce.sum, lambda torch, x: x.sum()),
    "mean rows": (lambda x: reduce.mean(x, -1), lambda torch, x: x.mean(-1)),
    "var rows": (lambda x: reduce.var(x, -1), lambda torch, x: x.var(-1, correction=0)),
    "var all": (reduce.var, lambda torch, x: x.var(correction=0)),
    "logsumexp": (lambda x: reduce.logsumexp(x, -1), lambda torch, x: x.logsumexp(-1)),
    "cross_entropy": (
        lambda x: cross_entropy(x, backend.to_device(_targets(x.shape), x.device)),
        lambda torch, x: torch.nn.functional.cross_entropy(
            x, torch.from_numpy(_targets(x.shape)).to(x.device)
        ),
    ),
}


def _targets(shape: tuple[int, int]) -> Any:
    return np.arange(shape[0]) % shape[1]


def errors_sweep(
    *, rows: int = 4096, columns: int = 1000, device: Device = "auto"
) -> Iterator[Sweep]:
    """Measure rounding errors against float64, divided by PyTorch's.

    Args:
        rows: of the input of each op.
        columns: of it.
    """
    is_measured(True)
    cases = crossed(dtype=DTYPES, op=tuple(OPS), rows=rows, columns=columns)
    cases = [{"op": case["op"], **case} for case in cases]  # the first column
    results = tuple(
        f"{part}_{what}" for part in _PARTS for what in ("error", "peer_error", "ratio")
    )
    draw = bars("Error / PyTorch's", "", ("op", "dtype"), ("value_ratio", "gradient_ratio"))
    yield Sweep("errors", cases, partial(measure_errors, device=device), results, draw, device)


def measure_errors(case: Case, device: str) -> Row:
    """Return the errors of value and gradient, ours and PyTorch's."""
    torch = importlib.import_module("torch")
    ours, theirs = OPS[case["op"]]
    shape, dtype = (case["rows"], case["columns"]), as_dtype(case["dtype"])
    x = (2 * random_array(shape, device=device)).astype(dtype)
    dy = random_array(shape, dtype, 1, device)
    leaf = Tensor(x, requires_grad=True)
    y = ours(leaf)
    y.backward(dy.reshape(-1)[: y.size].reshape(y.shape))
    found = [backend.to_device(a, "cpu").astype(np.float64) for a in (y.data, leaf.grad)]
    peer = _theirs(torch, theirs, x, dy)
    exact = _theirs(torch, theirs, x.astype("float64"), dy.astype("float64"))
    row: Row = {}
    for number, part in enumerate(_PARTS):
        errors = [_error(y[number], exact[number]) for y in (found, peer)]
        row |= {f"{part}_error": errors[0], f"{part}_peer_error": errors[1]}
        row[f"{part}_ratio"] = errors[0] / errors[1] if errors[1] else float(errors[0] > 0)
    return row


def _theirs(torch: Any, function: Callable[[Any, Any], Any], x: Any, dy: Any) -> list[Any]:
    leaf, weight = to_torch(torch, x).clone().requires_grad_(True), to_torch(torch, dy)
    y = function(torch, leaf)
    y.backward(weight.reshape(-1)[: y.numel()].reshape(y.shape))
    return [tensor.detach().double().cpu().numpy() for tensor in (y, leaf.grad)]


def _error(found: Any, exact: Any) -> float:
    return float(np.linalg.norm((found - exact).reshape(-1)) / np.linalg.norm(exact.reshape(-1)))
