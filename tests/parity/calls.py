"""Calls of array functions with their default arguments, for every name that NumPy has too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad import Tensor
from tests.parity.peers import REQUIRED, arguments

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((2, 4, 6)) * 3
V, SQUARE, CUBE = X[0].copy(), X[:, :4] + 9 * np.eye(4), RNG.standard_normal((2, 3, 6))
SYMMETRIC = SQUARE @ SQUARE.T
IDS, BITS, SHIFTS = (RNG.integers(0, 6, (4, 6)) for _ in range(3))
EDGES = np.array([-2.0, -0.5, 0.0, 1.5])

CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["bitwise_invert", "bitwise_not", "invert"], (BITS,)),
    **dict.fromkeys(["bitwise_and", "bitwise_or", "bitwise_xor"], (BITS, IDS)),
    **dict.fromkeys(
        ["bitwise_left_shift", "bitwise_right_shift", "left_shift", "right_shift"], (BITS, SHIFTS)
    ),
    **dict.fromkeys(
        ["column_stack", "concat", "concatenate", "dstack", "hstack", "stack", "vstack"], ([X, Y],)
    ),
    **dict.fromkeys(["array_split", "dsplit", "hsplit", "split", "vsplit"], (CUBE, 2)),
    **dict.fromkeys(["array_split", "hsplit", "dsplit"], (CUBE, 3)),
    **dict.fromkeys(["nanpercentile", "percentile"], (X, 30.0)),
    **dict.fromkeys(["nanquantile", "quantile"], (X, 0.3)),
    **dict.fromkeys(["empty", "ones", "zeros"], ((2, 3),)),
    **dict.fromkeys(["eye", "identity", "tri", "tril_indices", "triu_indices"], (3,)),
    **dict.fromkeys(["cumulative_prod", "cumulative_sum", "vander"], (V,)),
    **dict.fromkeys(["cross", "linalg.cross"], (X[:, :3], Y[:, :3])),
    **dict.fromkeys(["dot", "matmul", "linalg.matmul"], (X, Y.T)),
    **dict.fromkeys(["fft.fftfreq", "fft.rfftfreq"], (5,)),
    **dict.fromkeys(
        ["linalg.det", "linalg.eigh", "linalg.eigvalsh", "linalg.inv", "linalg.cholesky",
         "linalg.slogdet"], (SYMMETRIC,)),
    "append": (X, Y),
    "arange": (5,),
    "asarray": ([1, 2],),
    "array": ([1, 2],),
    "astype": (X, "float32"),
    "bincount": (IDS[0],),
    "broadcast_arrays": (V, X),
    "broadcast_shapes": ((6,), (4, 1)),
    "broadcast_to": (V, (4, 6)),
    "can_cast": ("float64", "float32"),
    "digitize": (X, EDGES),
    "einsum": ("ij,kj->ik", X, Y),
    "expand_dims": (X, 1),
    "full": ((2,), 3),
    "full_like": (X, 3),
    "geomspace": (1, 8),
    "indices": ((2, 3),),
    "isdtype": (np.dtype("float32"), "real floating"),
    "isin": (IDS, [1, 2]),
    "linalg.matrix_power": (SQUARE, 3),
    "linalg.multi_dot": ([X, Y.T, X],),
    "linalg.outer": (V, Y[0].copy()),
    "linalg.solve": (SQUARE, X),
    "linalg.tensorinv": (SQUARE.reshape(2, 2, 4),),
    "linalg.tensorsolve": (SQUARE, V[:4].copy()),
    "linspace": (0, 1),
    "logspace": (0, 1),
    "matvec": (X, V),
    "meshgrid": (V, EDGES),
    "moveaxis": (CUBE, 0, 1),
    "pad": (X, 1),
    "permute_dims": (CUBE,),
    "promote_types": ("int8", "float16"),
    "repeat": (X, 2),
    "reshape": (X, (3, 8)),
    "result_type": ("int64", "float32"),
    "roll": (X, 2),
    "rollaxis": (CUBE, 2),
    "searchsorted": (EDGES, X),
    "swapaxes": (CUBE, 0, 2),
    "take": (X, IDS[0] % 4),
    "take_along_axis": (X, IDS),
    "tile": (X, 2),
    "vecmat": (V[:4].copy(), X),
    "where": (X > 0, X, Y),
}  # fmt: skip
# These read or write files, or describe dtypes, or assign in place.
NOT_CALLED = {"finfo", "iinfo", "load", "save", "put_along_axis"}


def call_of(name: str, f: Any) -> tuple[Any, ...]:
    """Return arguments for a call: of CALLS, else one or two arrays of (4, 6).

    Raises:
        KeyError: the function takes something else.
    """
    if name in CALLS:
        return CALLS[name]
    required = [a.name for a in arguments(f) if a.default is REQUIRED]
    return {("x",): (X,), ("y",): (X,), ("a", "b"): (X, Y)}[tuple(required)]


def arrays(result: Any) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of a result, which may be one or a sequence of them."""
    if isinstance(result, (list, tuple)):
        return [array for part in result for array in arrays(part)]
    return [result.numpy() if isinstance(result, Tensor) else np.asarray(result)]


def as_tensors(arguments: Sequence[Any]) -> list[Any]:
    """Return arguments of ours for those of NumPy."""
    return [Tensor(a) if isinstance(a, np.ndarray)
            else as_tensors(a) if isinstance(a, list) else a for a in arguments]  # fmt: skip
