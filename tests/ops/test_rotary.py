"""Rotary positions against complex multiplication."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.core.arrays import sum_to_shape
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.testing import SIZES, Case, Ulps, check

RNG = np.random.default_rng(7)


def reference(x: Any, angles: Any, heads: int | None = None, interleaved: bool = False) -> Any:
    heads, half = x.shape[-2] if heads is None else heads, x.shape[-1] // 2
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :half] + 1j * x[..., half:]
    turned = pairs * np.exp(1j * angles)
    y = np.empty(x.shape)
    if interleaved:
        y[..., 0::2], y[..., 1::2] = turned.real, turned.imag
    else:
        y[..., :half], y[..., half:] = turned.real, turned.imag
    y[..., heads:, :] = x[..., heads:, :]
    return y


def case(shape: tuple[int, ...], angles: tuple[int, ...], **options: Any) -> Case:
    values = RNG.uniform(-9, 9, angles)

    @cache
    def tables(dtype: str, device: str) -> list[Tensor]:
        return [Tensor(f(values)).astype(dtype).to(device) for f in (np.cos, np.sin)]

    def function(x: Tensor) -> Tensor:
        cos, sin = tables(wide(x), x.device)
        return tg.rotary(x, cos, sin, **options)

    return Case(
        function, [shape], lambda x: reference(x, values, **options),
        name="rotary-" + "-".join(options),
    )  # fmt: skip


def learned(cos: tuple[int, ...], heads: int, interleaved: bool) -> Case:
    """Cosines and sines that have gradients; they need not be those of an angle."""

    def halves(x: Any) -> Any:
        x = x[..., :heads, :]
        return (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, -1)

    def turned(x: Any, cos: Any, sin: Any, sign: int = -1) -> Any:
        a, b = halves(x)
        y = np.stack([a * cos + sign * b * sin, b * cos + a * sin], -1 if interleaved else -2)
        return np.concatenate([y.reshape(*a.shape[:-1], 8), x[..., heads:, :]], -2)

    def magnitudes(x: Any, cos: Any, sin: Any, dy: Any) -> list[Any]:
        x, cos, sin, dy = np.abs(x), np.abs(cos), np.abs(sin), np.abs(dy)
        (a, b), (da, db) = halves(x), halves(dy)
        angles = (a * da + b * db, cos), (a * db + b * da, sin)
        return [turned(x, cos, sin, 1), turned(dy, cos, sin, 1),
                *(sum_to_shape(terms, like.shape) for terms, like in angles)]  # fmt: skip

    return Case(lambda x, cos, sin: tg.rotary(x, cos, sin, heads=heads, interleaved=interleaved),
                [(2, 5, 3, 8), cos, (5, 1, 4)], turned,
                magnitudes=magnitudes, values=Ulps(2, "terms"), terms=60,
                name="rotary-learned")  # fmt: skip


def wide(x: Tensor) -> str:
    return "float64" if x.dtype == np.float64 else "float32"


CASES = [
    *(case((2, n, 3, 8), (n, 1, 4)) for n in SIZES),
    case((2, 5, 3, 8), (5, 1, 4)),
    case((2, 5, 3, 8), (2, 5, 1, 4), interleaved=True),
    case((2, 5, 6, 8), (5, 1, 4), heads=4),
    case((2, 5, 6, 2), (5, 1, 1), heads=0, interleaved=True),
    case((3, 2), (1,)),
    case((33, 129, 3, 34), (129, 1, 17), heads=2),
    case((2, 5, 6, 64), (5, 1, 32), heads=4),
    case((2, 5, 6, 64), (2, 5, 1, 32), interleaved=True, heads=5),
    case((2, 3, 4, 32), (2, 1, 4, 16)),
    case((2, 3, 4, 32), (2, 1, 1, 1), interleaved=True),
    case((2, 3, 4, 32), (1, 3, 1, 1)),
    case((3, 70, 34), (70, 17), heads=70),
    case((0, 5, 3, 8), (5, 1, 4)),
    case((2, 0, 3, 8), (0, 1, 4)),
    *(
        learned((5, 1, 4), heads, interleaved)
        for heads, interleaved in ((3, False), (2, True), (0, False))
    ),
    learned((2, 1, 1, 1), 3, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_complex_numbers(case: Case) -> None:
    check(case)


def test_arguments_that_do_not_fit() -> None:
    x, angle = Tensor(np.ones((2, 3, 4), "float32")), Tensor(np.ones(2, "float32"))
    with pytest.raises(
        ShapeError, match=r"x has shape \(2, 3, 5\), expected \(..., H, D\), D even"
    ):
        tg.rotary(Tensor(np.ones((2, 3, 5))), angle, angle)
    with pytest.raises(ShapeError, match=r"cos has shape \(3,\), .* broadcasts to \(2, 3, 2\)"):
        tg.rotary(x, Tensor(np.ones(3, "float32")), angle)
    with pytest.raises(ShapeError, match=r"sin has shape \(3,\), .* broadcasts to \(2, 3, 2\)"):
        tg.rotary(x, angle, Tensor(np.ones(3, "float32")))
    with pytest.raises(ShapeError, match=r"x has shape \(4,\), expected \(..., H, D\)"):
        tg.rotary(x[0, 0], angle, angle)
    for heads in (4, -1):
        with pytest.raises(ArgumentError, match=f"heads is {heads}, expected 0 to 3"):
            tg.rotary(x, angle, angle, heads=heads)
    with pytest.raises(ArgumentError, match=r"heads is 1\.5, expected an integer"):
        tg.rotary(x, angle, angle, heads=1.5)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="sin has dtype int64, expected a float"):
        tg.rotary(x, angle, Tensor(np.ones(2, "int64")))
