"""Dropout, alone, with the residual add and of SwiGLU, on 64M elements: rows for kernels.py."""

from __future__ import annotations

from typing import Any

import tensorgrad as tg
from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor
from tensorgrad.bench.timing import random_array
from tensorgrad.dtypes import Dtype, bfloat16, float32
from tensorgrad.ops.dropout import swiglu_dropout

SHAPE = (16384, 4096)
P = 0.1


def jobs(torch: Any) -> Jobs:
    """Yield each function in bfloat16 and float32."""
    for dtype in (bfloat16, float32):
        yield from _dropout(torch, dtype)


def _dropout(torch: Any, dtype: Dtype) -> Jobs:
    x, residual = (Tensor(random_array(SHAPE, dtype, i)) for i in range(2))
    bias = Tensor(random_array(SHAPE[1:], dtype, 2))
    size = f"64M {'bf16' if dtype == bfloat16 else 'fp32'}"
    once = x.size * dtype.itemsize
    theirs = [_peers(torch, str(dtype), count) for count in (1, 2, 3)]
    leaf, dy = Tensor(x.data, requires_grad=True), residual.data
    node = tg.dropout_add(leaf, residual, P).node
    assert node is not None
    backward, saved = node.backward, node.saved or ()
    yield Job("dropout forward", size, 2 * once, lambda _: tg.dropout(x, P), theirs[0])
    yield Job("dropout backward", size, 2 * once, lambda _: backward(dy, saved, (True, False)))
    yield Job("dropout + residual", size, 3 * once,
              lambda _: tg.dropout_add(x, residual, P), theirs[1])  # fmt: skip
    yield Job("bias + dropout + residual", size, 3 * once,
              lambda _: tg.dropout_add(x, residual, P, bias), theirs[2])  # fmt: skip
    gate, up = leaf, Tensor(residual.data, requires_grad=True)
    inner = swiglu_dropout(gate, up, P).node
    assert inner is not None
    of_both, kept = inner.backward, inner.saved or ()
    yield Job("swiglu + dropout", size, 3 * once, lambda _: swiglu_dropout(gate, up, P))
    yield Job(
        "swiglu + dropout backward", size, 5 * once, lambda _: of_both(dy, kept, (True, True))
    )


def _peers(torch: Any, dtype: str, count: int) -> dict[str, Any]:
    """Return dropout of the first `count` inputs of x, residual, bias."""
    if torch is None:
        return {}
    options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, dtype)}
    inputs = [torch.randn(SHAPE if i < 2 else SHAPE[1:], **options) for i in range(count)]

    def function(x: Any, residual: Any = 0, bias: Any = None) -> Any:
        dropped = torch.nn.functional.dropout(x if bias is None else x + bias, P)
        return dropped if count == 1 else residual + dropped

    compiled = torch.compile(function)
    return {"eager": lambda _: function(*inputs), "compiled": lambda _: compiled(*inputs)}
