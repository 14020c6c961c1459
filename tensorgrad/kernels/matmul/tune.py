"""The cases of matrix products that `python -m tensorgrad.kernels.tune` measures."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.dtypes import bfloat16, float16, float32
from tensorgrad.kernels import matmul as matmul_cuda
from tensorgrad.kernels.matmul.problem import problem
from tensorgrad.kernels.tuned import TuningCase

_LENGTHS = {"s": 128, "m": 1024, "l": 4096}  # typical of the classes of matmul_cuda.case
_CANDIDATES = ("cublas", "tiled", "wgmma")  # kernels of equal accuracy


def cases(lengths: dict[str, int] | None = None) -> Iterator[TuningCase]:
    """Yield a case for each dtype, layout and class of sizes."""
    sizes = _LENGTHS if lengths is None else lengths
    for dtype, tf32 in ((bfloat16, False), (float16, False), (float32, False), (float32, True)):
        normal = backend.cupy.random.standard_normal(
            max(sizes.values()) ** 2, dtype=float32
        ).astype(dtype)
        gelus = (False, True) if tf32 or dtype.itemsize == 2 else (False,)
        for layout, classes, gelu in product(
            ("nn", "nt", "tn", "tt"), product(sizes, repeat=3), gelus
        ):
            rows, width, columns = (sizes[name] for name in classes)
            a = _matrix(normal, rows, width, layout[0])
            b = _matrix(normal, width, columns, layout[1])
            y = backend.cupy.empty((rows, columns), dtype)
            p = problem(a, b, y, tf32=tf32)
            if gelu:
                p = p._replace(before_gelu=backend.cupy.empty_like(y), bias=normal[:columns])
            runs = {
                name: partial(kernel.multiply, p)
                for name, kernel in matmul_cuda.KERNELS.items()
                if name in _CANDIDATES and kernel.refusal(p) is None
            }
            kind = matmul_cuda.TF32 if tf32 else dtype
            name = matmul_cuda.case(kind, layout, rows, width, columns, gelu)
            yield TuningCase("matmul", name, matmul_cuda.DEFAULT, runs)


def _matrix(numbers: Array, rows: int, columns: int, layout: str) -> Array:
    """Return a matrix of the numbers, in C ("n") or Fortran ("t") order."""
    flat = numbers[: rows * columns]
    return flat.reshape(rows, columns) if layout == "n" else flat.reshape(columns, rows).T
