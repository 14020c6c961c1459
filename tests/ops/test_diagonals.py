"""Diagonals, triangles and products of vectors, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.errors import ArgumentError, ShapeError
from tensorgrad.testing import Case, Ulps, check


def of_one(name: str, shape: tuple[int, ...], *arguments: Any, **options: Any) -> Case:
    return Case(
        lambda x: getattr(tg, name)(x, *arguments, **options),
        [shape],
        lambda x: getattr(np, name)(x, *arguments, **options),
        terms=4,
        values=Ulps(2, "row"),
        name=name,
    )


CASES = [
    *(of_one("diagonal", (3, 5), offset) for offset in (-4, -1, 0, 2, 6)),
    of_one("diagonal", (2, 3, 4), 1, 2, 0),
    of_one("trace", (4, 4)),
    of_one("trace", (3, 2, 4), 1, 0, 2),
    *(of_one("diag", shape, k) for shape in [(3,), (0,), (3, 4)] for k in (-2, 0, 1)),
    of_one("diagflat", (2, 2), 1),
    Case(lambda x: x * tg.tri(3, 4, 1, "float64", device=x.device).astype(x.dtype), [(3, 4)],
         lambda x: x * np.tri(3, 4, 1), name="tri"),
    Case(lambda x: x[tg.tril_indices(3, 1, 4)], [(3, 4)], lambda x: x[np.tril_indices(3, 1, 4)],
         name="tril_indices", captured=False),
    Case(lambda x: x[tg.triu_indices(3, 1, 4)], [(3, 4)], lambda x: x[np.triu_indices(3, 1, 4)],
         name="triu_indices", captured=False),
    Case(tg.inner, [(2, 3), (4, 3)], np.inner, terms=4, values=Ulps(2, "row")),
    Case(tg.inner, [(), (3,)], np.inner, terms=4, gradients=Ulps(2, "row")),
    Case(tg.vdot, [(2, 3), (2, 3)], np.vdot, terms=6, values=Ulps(2, "row")),
    Case(tg.vecdot, [(2, 5), (3, 1, 5)], np.vecdot, terms=8, values=Ulps(2, "row")),
    Case(tg.matvec, [(2, 3, 4), (4,)], lambda a, b: a @ b, terms=8, values=Ulps(2, "row")),
    Case(tg.vecmat, [(4,), (2, 4, 3)], lambda a, b: b.swapaxes(1, 2) @ a, terms=8,
         values=Ulps(2, "row")),
    Case(tg.kron, [(2, 3), (3, 2)], np.kron, terms=6, gradients=Ulps(2, "row")),
    Case(tg.kron, [(2,), (2, 2)], np.kron, terms=6, gradients=Ulps(2, "row")),
    Case(tg.cross, [(4, 3), (4, 3)], np.cross, values=Ulps(4, "row"), terms=4),
    Case(tg.diag_embed, [(2, 3)], lambda x: x[..., None] * np.eye(3), name="diag_embed"),
    Case(lambda x: tg.diag_embed(x, -2, 0, 2), [(2, 3)],
         lambda x: np.stack([np.diag(row, -2) for row in x], 1), name="diag_embed"),
    Case(lambda x: tg.diag_embed(x, 1), [(0,)], lambda x: np.zeros((1, 1)), name="diag_embed"),
    Case(tg.block_diag, [(2, 1), (3,), ()],
         lambda a, b, c: np.block([[a, np.zeros((2, 4))],
                                   [np.zeros((1, 1)), b[None], np.zeros((1, 1))],
                                   [np.zeros((1, 4)), c.reshape(1, 1)]])),
    of_one("vander", (4,), 3),
    of_one("diagonal", (3, 5)),
    of_one("diagonal", (2, 3, 4)),
    of_one("trace", (3, 4, 2)),
    of_one("diag", (3,)),
    of_one("diagflat", (3,)),
    Case(lambda a, b: tg.cross(a, b, axis=0), [(3, 2), (3, 2)], lambda a, b: np.cross(a, b, axis=0),
         values=Ulps(4, "row"), terms=4, name="cross-axis0"),
    Case(lambda a, b: tg.vecdot(a, b, axis=0), [(5, 2), (5, 3, 2)],
         lambda a, b: (a[:, None] * b).sum(0), terms=8, values=Ulps(2, "row"), name="vecdot-axis0"),
    Case(lambda x: tg.diag_embed(x, -1), [(2, 3)],
         lambda x: np.stack([np.diag(row, -1) for row in x]), name="diag_embed"),
    of_one("vander", (4,), increasing=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "uint64", "float16", "complex64"])
def test_vander_has_the_dtype_of_numpys(dtype: str) -> None:
    for values in ([0, 1, 1], [1, 2, 100], []):
        x = np.array(values).astype(dtype)
        for columns in (None, 0, 5):
            y, expected = tg.vander(x, columns).numpy(), np.vander(x, columns)
            assert y.dtype == expected.dtype
            np.testing.assert_allclose(y, expected, rtol=1e-12)


def test_indices_of_triangles_are_numpys() -> None:
    for name in ("tril_indices", "triu_indices"):
        for arguments in ((3,), (3, -1), (2, 1, 4)):
            expected = getattr(np, name)(*arguments)
            for rows, numpys in zip(getattr(tg, name)(*arguments), expected, strict=True):
                assert rows.dtype == np.int64
                np.testing.assert_array_equal(rows.numpy(), numpys)
    assert tg.tri(2).dtype == np.float32
    np.testing.assert_array_equal(tg.tri(2).numpy(), np.tri(2))
    two: Any = np.uint8(2)
    far: list[Any] = [2**63 - 1, -(2**63), np.int8(-128)]
    for k in far:
        below, above = tg.tri(two, 3, k), tg.triu_indices(two, k, 3)[0]
        assert (below.sum().item(), len(above)) == ((6, 0) if k > 0 else (0, 6))
    assert tg.block_diag().shape == (1, 0)
    assert tg.block_diag().dtype == np.float32


def test_complex_vectors_are_conjugated() -> None:
    a, b = np.array([1 + 2j, 3j]), np.array([2 - 1j, 1.0])
    assert tg.vdot(a, b).item() == np.vdot(a, b)
    assert tg.vecdot(a, b).item() == np.vecdot(a, b)
    assert tg.trace(np.ones((2, 2), "int8"), dtype="float32").dtype == np.float32


def test_errors_name_argument_and_expectation() -> None:
    x = Tensor(np.ones((2, 3)))
    with pytest.raises(ArgumentError, match="diag_embed: axis2 is 0, expected another axis"):
        tg.diag_embed(x, 0, 0, 0)
    with pytest.raises(ShapeError, match=r"diag_embed: x has shape \(\), expected \(\.\.\., N\)"):
        tg.diag_embed(1.0)
    with pytest.raises(ShapeError, match=r"block_diag: matrices\[1\] has shape \(1, 2, 3\)"):
        tg.block_diag(x, x[None])
    with pytest.raises(ShapeError, match=r"diagonal: x has shape \(3,\), expected two axes"):
        tg.diagonal(x[0])
    with pytest.raises(ArgumentError, match="diagonal: axis2 is -2, expected another axis"):
        tg.diagonal(x, 0, 0, -2)
    with pytest.raises(ShapeError, match="cross: a has length 2 along the axis, expected 3"):
        tg.cross(x.T, x)
    with pytest.raises(
        ShapeError, match=r"diag: x has shape \(1, 2, 3\), expected a vector or a m"
    ):
        tg.diag(x[None])
    with pytest.raises(ArgumentError, match="diag: k is"):
        tg.diag(x[0], 0.5)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"vander: x has shape \(2, 3\), expected \(N,\)"):
        tg.vander(x)
    with pytest.raises(ArgumentError, match="tri: rows is -1, expected 0 or more"):
        tg.tri(-1)
    with pytest.raises(ArgumentError, match="tril_indices: columns is -1, expected 0 or more"):
        tg.tril_indices(2, columns=-1)
    with pytest.raises(ShapeError, match="cross: b has length 2 along the axis, expected 3"):
        tg.cross(x, x.T)
    with pytest.raises(ShapeError, match="vecdot: b has length 2 along the axis, expected 3"):
        tg.vecdot(x, x.T)
