"""Matrix products x W^T of GPT-2's sizes, by every kernel; jobs for kernels.py.

In TF32 "chosen" is what `autocast("tf32")` takes. PyTorch may use TF32 there.
"""

from __future__ import annotations

from typing import Any

import tensorgrad as tg
from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor, backend
from tensorgrad.bench.timing import Call, random_array
from tensorgrad.dtypes import Dtype, bfloat16, float32
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels.matmul.problem import MatmulProblem, problem

SHAPES = (  # rows, columns, terms of each sum
    (8192, 8192, 8192),
    (32768, 2304, 768),
    (32768, 768, 768),
    (32768, 3072, 768),
    (32768, 768, 3072),
    (32768, 50304, 768),
    (16384, 6400, 1600),
)
_WAYS: tuple[tuple[Dtype, bool, tuple[str | None, ...]], ...] = (  # dtype, TF32, kernels
    (bfloat16, False, ("wgmma", "tiled", "cublas")),
    (float32, True, (None, "tiled")),  # what autocast takes, and mma.sync
    (float32, False, ("tiled", "cublas")),
)


def jobs(torch: Any) -> Jobs:
    """Yield a job for each kernel, dtype and size."""
    for dtype, tf32, kernels in _WAYS:
        for rows, columns, terms in SHAPES:
            x, w = random_array((rows, terms), dtype), random_array((columns, terms), dtype, 1)
            p = problem(x, w.T, backend.cupy.empty((rows, columns), dtype), tf32=tf32)
            peers = {} if torch is None else {"eager": _eager(torch, p, tf32)}
            for name in kernels:
                if name is None or matmul_cuda.KERNELS[name].refusal(p) is None:
                    yield Job(
                        f"matmul {'tf32' if tf32 else dtype} {name or 'chosen'}",
                        f"{rows} x {columns} x {terms}",
                        2 * rows * columns * terms,
                        _call(p, name),
                        peers,
                        "TFLOP/s",
                    )
        if dtype == bfloat16:
            yield from _kept_derivative_jobs()
    yield from _gelu_jobs()


def _gelu_jobs() -> Jobs:
    """Yield the two products of a feed-forward block that end with GELU, beside GELU as an op."""
    rows, hidden, width = 16384, 3072, 768
    size, amount = f"{rows} x {hidden} x {width}", 2 * rows * hidden * width
    arrays = [
        random_array(shape, float32, i)
        for i, shape in enumerate(((rows, width), (hidden, width), (hidden,), (rows, hidden)))
    ]
    x, up, bias, before = [Tensor(array, requires_grad=True) for array in arrays]

    def fused(_: int) -> Tensor:
        with tg.autocast("tf32"):
            return tg.linear_gelu(x, up, bias)

    def unfused(_: int) -> Tensor:
        with tg.autocast("tf32"):
            return tg.gelu(tg.linear(x, up, bias), "tanh")

    yield Job("tf32 gelu, forward", size, amount, fused, {"unfused": unfused}, "TFLOP/s")
    node = tg.gelu(before, "tanh").node
    assert node is not None
    saved, dx = node.saved or (), backend.cupy.empty((rows, hidden), float32)
    down = backend.contiguous(up.data.T)
    p = problem(x.data, down, dx)
    derivative = p._replace(gelu_of=before.data)

    def separate(_: int) -> None:
        matmul_cuda.run(p, "tf32")
        node.backward(dx, saved, (True,))

    yield Job("tf32 gelu, backward", size, amount, _call(derivative, "tf32"),
              {"unfused": separate}, "TFLOP/s")  # fmt: skip


def _kept_derivative_jobs() -> Jobs:
    """Yield the two of a feed-forward block that end with GELU, or with its kept derivative."""
    rows, hidden, width = 32768, 3072, 768
    size, amount = f"{rows} x {hidden} x {width}", 2 * rows * hidden * width
    x, up, bias, down = (
        random_array(shape, bfloat16, i)
        for i, shape in enumerate(((rows, width), (hidden, width), (hidden,), (width, hidden)))
    )
    y = backend.cupy.empty((rows, hidden), bfloat16)
    p = problem(x, up.T, y, bias=bias, gelu=True)
    kept = matmul_cuda.derivative_for(p)
    if kept is None:  # this GPU keeps the operand of GELU
        return
    forward = _call(p._replace(derivative=kept), None)
    forward(0)
    yield Job("bfloat16 gelu", size, amount, forward, unit="TFLOP/s")
    yield Job("bfloat16 gelu, backward", size, amount,
              lambda _: matmul_cuda.times_derivative(x, down, kept), unit="TFLOP/s")  # fmt: skip


def _call(p: MatmulProblem, kernel: str | None) -> Call:
    return lambda _: matmul_cuda.run(p, kernel)


def _eager(torch: Any, p: MatmulProblem, tf32: bool) -> Call:
    """Return PyTorch's product of the same arrays."""
    x, w, y = (torch.from_dlpack(_bits(array)) for array in (p.a.array, p.b.array.T, p.y))
    if p.y.dtype == bfloat16:
        x, w, y = (array.view(torch.bfloat16) for array in (x, w, y))

    def call(_: int) -> None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.mm(x, w.T, out=y)

    return call


def _bits(array: Any) -> Any:
    """Return the array as integers where DLPack of this CuPy does not know its dtype."""
    return array.view("int16") if array.dtype == bfloat16 else array
