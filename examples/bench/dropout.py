"""Dropout, alone and with the residual add, on 64M elements: rows for kernels.py."""

from __future__ import annotations

from typing import Any

from examples.bench.timing import Job, Jobs, random_array
from tensorgrad import Tensor, ops
from tensorgrad.dtypes import bfloat16, float32

SHAPE = (16384, 4096)
P = 0.1


def jobs(torch: Any) -> Jobs:
    """Yield each function in bfloat16 and float32."""
    for dtype in (bfloat16, float32):
        x, residual = (Tensor(random_array(SHAPE, dtype, i)) for i in range(2))
        bias = Tensor(random_array(SHAPE[1:], dtype, 2))
        inputs = (x, residual, bias)
        size = f"64M {'bf16' if dtype == bfloat16 else 'fp32'}"
        once = x.size * dtype.itemsize
        theirs = [_peers(torch, str(dtype), count) for count in (1, 2, 3)]
        leaf = Tensor(x.data, requires_grad=True)
        node = ops.dropout_add(leaf, residual, P).node
        assert node is not None
        yield Job("dropout forward", size, 2 * once, lambda _, x=x: ops.dropout(x, P), theirs[0])  # type: ignore[misc]
        yield Job("dropout backward", size, 2 * once,
                  lambda _, n=node, dy=residual.data: n.backward(dy, n.saved, (True, False)))  # type: ignore[misc]  # fmt: skip
        yield Job("dropout + residual", size, 3 * once,
                  lambda _, i=inputs: ops.dropout_add(i[0], i[1], P), theirs[1])  # type: ignore[misc]  # fmt: skip
        yield Job("bias + dropout + residual", size, 3 * once,
                  lambda _, i=inputs: ops.dropout_add(i[0], i[1], P, i[2]), theirs[2])  # type: ignore[misc]  # fmt: skip


def _peers(torch: Any, dtype: str, count: int) -> dict[str, Any]:
    """Return dropout of the first of so many inputs: x, residual, bias."""
    if torch is None:
        return {}
    options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, dtype)}
    inputs = [torch.randn(SHAPE if i < 2 else SHAPE[1:], **options) for i in range(count)]

    def function(x: Any, residual: Any = 0, bias: Any = None) -> Any:
        dropped = torch.nn.functional.dropout(x if bias is None else x + bias, P)
        return dropped if count == 1 else residual + dropped

    compiled = torch.compile(function)
    return {"eager": lambda _: function(*inputs), "compiled": lambda _: compiled(*inputs)}
