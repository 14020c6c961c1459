"""The harness itself: it fails on every op that is broken on purpose, and on bounds too wide.

Each family of ops is broken in one dtype and one place at a time: a result or a gradient is
replaced by zeros, by values 3 % off, or by those of the row beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.autograd import record
from tensorgrad.dtypes import FLOATS, bfloat16, float16, float32, float64, is_float
from tensorgrad.errors import GradError
from tensorgrad.testing import Case, Ulps, assert_within, check, spacing
from tests.ops.test_coverage import ALL_CASES

Change = Callable[[Any], Any]
CHANGES: dict[str, Change] = {
    "zeros": lambda a: a * 0,
    "3 % off": lambda a: (a.astype(float64) * 1.03).astype(a.dtype),
    "the row beside": lambda a: np.roll(a, 1, 0) if a.ndim else a,
}


def family(case: Case) -> str:
    """Name the function that a case tries, in the variant that its name gives."""
    name = case.name or getattr(case.function, "__name__", "")
    return name if name.startswith("getitem") else name.split("-")[0].split("(")[0].split(" ")[0]


def families() -> dict[str, list[Case]]:
    """Return the cases of each family that have values, small ones first."""
    found: dict[str, list[Case]] = {}
    for case in ALL_CASES:
        found.setdefault(family(case), []).append(case)
    return {name: sorted(cases, key=elements) for name, cases in found.items()}


def elements(case: Case) -> tuple[bool, int]:
    """Return what cases are sorted by: those with rows to mistake first, then by their size."""
    shapes = [given.shape if isinstance(given, np.ndarray) else given for given in case.inputs]
    size = sum(int(np.prod(shape)) for shape in shapes)
    return size < 12, size


FAMILIES = families()


def run(case: Case) -> tuple[list[Any], list[Any]]:
    """Return the values and gradients of a case in float64."""
    rng = np.random.default_rng(0)
    low, high = case.domain or (-1.0, 1.0)
    arrays = [
        given if isinstance(given, np.ndarray) else rng.uniform(low, high, given)
        for given in case.inputs
    ]
    leaves = [Tensor(a, case.gradient and is_float(a.dtype)) for a in arrays]
    y = case.function(*leaves)
    outputs = list(y) if isinstance(y, list | tuple) else [y]
    wanted = [y for y in outputs if y.requires_grad]
    for y in wanted:
        y.backward(rng.uniform(-1, 1, y.shape), retain_graph=True)
    return [y.data for y in outputs], [leaf.grad for leaf in leaves]


def places(case: Case) -> Iterator[tuple[str, int, Any]]:
    """Yield the float results and gradients of a case, with what they are."""
    values, gradients = run(case)
    for kind, arrays in (("value", values), ("gradient", gradients)):
        for index, array in enumerate(arrays):
            if array is not None and is_float(array.dtype):
                yield kind, index, array


def changes_something(array: Any, change: Change) -> bool:
    """Whether a change shows by far more than rounding: not for zeros or for equal rows."""
    scale = np.abs(array).max(initial=0)
    with np.errstate(invalid="ignore"):
        moved = np.abs(change(array) - array)
    return bool(array.size and np.isfinite(scale) and moved.max(initial=0) > 0.02 * scale > 0)


def broken(case: Case, kind: str, index: int, change: Change, dtype: Any) -> Case:
    """Return the case with an op that is wrong in one place, in one dtype."""

    def changed(tensor: Tensor, value: Change, gradient: Change) -> Tensor:
        return record("broken", value(tensor.data), (tensor,), lambda dy, *_: (gradient(dy),), ())

    def same(array: Any) -> Any:
        return array

    def function(*inputs: Tensor) -> Any:
        tensors = list(inputs)
        if {dtype} != ({x.dtype for x in inputs if is_float(x.dtype)} or {dtype}):
            return case.function(*inputs)  # the exact one, which the broken one is compared with
        if kind == "gradient":
            tensors[index] = changed(tensors[index], same, change)
        y = case.function(*tensors)
        if kind == "gradient":
            return y
        outputs: Sequence[Tensor] = list(y) if isinstance(y, list | tuple) else [y]
        return [changed(y, change, same) if i == index else y for i, y in enumerate(outputs)]

    return replace(case, function=function, dtypes=[d for d in case.dtypes if d == dtype])


def fails(case: Case) -> bool:
    try:
        check(case)
    except (AssertionError, GradError):
        return True
    return False


def survivors(name: str, dtype: Any) -> list[str]:
    """Return the changes that no case of a family notices."""
    alive: dict[str, bool] = {}
    for case in FAMILIES[name]:
        if dtype not in case.dtypes:
            continue
        for kind, index, array in places(case):
            for text, change in CHANGES.items():
                what = f"{kind} {index}: {text}"
                if not alive.get(what, True) or not changes_something(array, change):
                    continue
                alive[what] = not fails(broken(case, kind, index, change, dtype))
        if alive and not any(alive.values()):
            break
    return [what for what, lives in alive.items() if lives]


@pytest.mark.filterwarnings("ignore::tensorgrad.errors.WideningWarning")
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[pytest.mark.nightly] * (dtype in (float16, float64)))
        for dtype in FLOATS
    ],
    ids=str,
)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_is_broken_is_noticed(name: str, dtype: Any) -> None:
    assert survivors(name, dtype) == []


def test_a_wrong_gradient_is_noticed_unless_a_case_has_none() -> None:
    def wrong(x: Any) -> Any:
        return tg.asarray(x) * 2 + tg.asarray(x).detach()

    check(Case(wrong, [(3,)], lambda x: x * 3, gradient=False))
    with pytest.raises(GradError, match="the gradient of input 0"):
        check(Case(wrong, [(3,)], lambda x: x * 3))


def test_no_bound_is_wide_or_without_a_reason() -> None:
    with pytest.raises(AssertionError, match="a bound of 5 ulps needs its reason"):
        Ulps(5)
    wide = Ulps(7, why="for this test")
    assert_within(np.ones(3, "float16"), np.ones(3), wide)
    with pytest.raises(AssertionError, match=r"a bound of 0\.0547 in bfloat16"):
        assert_within(np.ones(3, bfloat16), np.ones(3), wide)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bound_counts_units_in_the_last_place(dtype: Any) -> None:
    exact = np.array([[1.0, 0.5, 3.0], [1e-3, 0.0, 2e-3]]).astype(dtype).astype(float64)
    unit = spacing(exact, dtype)
    row = unit.max(1, keepdims=True)
    assert_within((exact + 2 * unit).astype(dtype), exact, Ulps(2), terms=0)
    assert_within((exact + 2 * row).astype(dtype), exact, Ulps(2, "row"), terms=0)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_within((exact + 2 * row).astype(dtype), exact, Ulps(1.5, "row"), terms=0)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_within((exact + 2 * row).astype(dtype), exact, Ulps(2), terms=0)


def test_units_of_subnormal_numbers_and_of_zero() -> None:
    small = np.array([0.0, 2.0**-24, 2.0**-14])
    np.testing.assert_array_equal(spacing(small, float16), [2.0**-24] * 3)
    np.testing.assert_array_equal(spacing(np.array([1.0, 1.99, 2.0]), float32),
                                  [2.0**-23, 2.0**-23, 2.0**-22])  # fmt: skip


def test_nan_and_infinities_must_agree() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert_within(values.astype("float32"), values, Ulps())
    for wrong in ([1.0, np.inf, -np.inf, 1.0], [np.nan, -np.inf, -np.inf, 1.0], [np.nan] * 4):
        with pytest.raises(AssertionError, match="elements are wrong"):
            assert_within(np.array(wrong, "float32"), values, Ulps())


def test_a_case_of_a_function_class_has_its_name() -> None:
    class Twice(tg.Function):
        """Return 2 x."""

    assert str(Case(Twice.apply, [(3,)], lambda x: 2 * x)) == "Twice-3"
    assert str(Case(partial(pow, 2), [(3,)], lambda x: 2**x, name="power")) == "power-3"


def test_an_op_that_writes_into_an_input_or_takes_anything_is_noticed() -> None:
    def writes(x: Tensor) -> Tensor:
        x.data[...] = 0
        return x

    def magnitude_of_complex(x: Any) -> Tensor:
        return x if isinstance(x, Tensor) else Tensor(abs(x))

    with pytest.raises(AssertionError, match="changed an input"):
        check(Case(writes, [(3,)], lambda x: x * 0, gradient=False))
    with pytest.raises(AssertionError, match="of complex input 0"):
        check(Case(magnitude_of_complex, [(3,)], lambda x: x, gradient=False))
