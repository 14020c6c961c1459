"""Matrix products x W^T of GPT-2's sizes, by every kernel; jobs for kernels.py."""

from __future__ import annotations

from typing import Any

from examples.bench.timing import Job, Jobs
from tensorgrad import backend
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
