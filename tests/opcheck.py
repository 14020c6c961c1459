"""The one harness for ops: `check(Case(...))` tries an op in every way that it must survive.

A case names a function, the shapes of its inputs and a NumPy reference in float64. `check` runs

- the value against the reference, in float64, float32, float16 and bfloat16;
- the gradient of every float input against numeric differences along random directions
  (float64), then the gradients of the narrower types against those of float64;
- the same on views with strides, on inputs it must leave untouched, and twice for equal bits;
- on the GPU, where there is one, against the CPU.

Tolerances follow from the dtype and the number of terms that are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorgrad import Tensor, backend
from tensorgrad.dtypes import FLOATS, bfloat16, float16, float32, float64, is_float
from tensorgrad.gradcheck import gradcheck

Values = np.ndarray[Any, Any]
EPSILON = {float64: 2.0**-52, float32: 2.0**-23, float16: 2.0**-10, bfloat16: 2.0**-7}


@dataclass
class Case:
    """One op with inputs to try it on.

    Args:
        function: takes one Tensor per input, returns a Tensor (or a sequence of Tensors).
        inputs: per input a shape (normal random values), or an array to use as it is (integers,
            bool: no gradient; floats: cast to each dtype).
        reference: the same in NumPy, of float64 arrays; its shape and values must agree.
        domain: random floats are drawn uniformly from this interval instead.
        terms: how many numbers are summed for one output element; widens the tolerance.
        slack: further factor on the tolerance, for ops that amplify rounding.
        gradient: False for ops without one.
        dtypes: the float dtypes to try.
        name: for the test's id; default: the function's name.
    """

    function: Callable[..., Any]
    inputs: Sequence[Any]
    reference: Callable[..., Any]
    domain: tuple[float, float] | None = None
    terms: int = 1
    slack: float = 1.0
    gradient: bool = True
    dtypes: Sequence[Any] = field(default=FLOATS)
    name: str = ""

    def __str__(self) -> str:
        name = self.name or getattr(self.function, "__name__", str(self.function))
        shapes = "-".join(
            "x".join(map(str, i.shape if isinstance(i, np.ndarray) else i)) or "scalar"
            for i in self.inputs
        )
        return f"{name}-{shapes}"


def check(case: Case, seed: int = 0) -> None:
    """Try the case in every way; raise AssertionError at the first that fails."""
    rng = np.random.default_rng(seed)
    exact = [_draw(case, spec, rng) for spec in case.inputs]
    if case.gradient and float64 in case.dtypes and any(is_float(a.dtype) for a in exact):
        gradcheck(case.function, exact, tolerance=2e-6 * case.slack, seed=seed)
    for dtype in case.dtypes:
        inputs = [a.astype(dtype) if is_float(a.dtype) else a for a in exact]
        tolerance = case.slack * EPSILON[dtype] * (4 + 2 * case.terms**0.5)
        y, grads = _run(case, inputs)
        wide = [a.astype(float64) if is_float(a.dtype) else a for a in inputs]
        _compare(y, _outputs(case.reference(*wide)), tolerance, f"{case} value in {dtype}")
        _, exact_grads = _run(case, wide)
        _compare(grads, exact_grads, tolerance * 4, f"{case} gradient in {dtype}")
        for array, grad in zip(inputs, grads, strict=True):
            assert grad is None or (grad.dtype == array.dtype and grad.shape == array.shape)
        again = _run(case, inputs)
        for one, two in zip([*y, *grads], [*again[0], *again[1]], strict=True):
            same = (
                one is None if two is None else one is not None and one.tobytes() == two.tobytes()
            )
            assert same, f"{case}: two runs differ"
        strided = _run(case, [_strided(a) for a in inputs])
        _compare(strided[0], y, tolerance, f"{case} value of views in {dtype}")
        _compare(strided[1], grads, tolerance * 4, f"{case} gradient of views in {dtype}")
        if backend.gpu_count():
            gpu = _run(case, [backend.to_device(a, "cuda") for a in inputs])
            _compare(gpu[0], y, tolerance, f"{case} GPU value in {dtype}")
            _compare(gpu[1], grads, tolerance * 4, f"{case} GPU gradient in {dtype}")


def _draw(case: Case, spec: Any, rng: np.random.Generator) -> Values:
    if isinstance(spec, np.ndarray):
        return spec.astype(float64) if is_float(spec.dtype) else spec
    low, high = case.domain or (0.0, 0.0)
    drawn: Values = rng.uniform(low, high, spec) if case.domain else rng.standard_normal(spec)
    return drawn


def _outputs(y: Any) -> list[Any]:
    return list(y) if isinstance(y, (list, tuple)) else [y]


def _weights(shape: tuple[int, ...], index: int) -> Values:
    """Return the fixed dy of output `index`."""
    return np.random.default_rng([77, index]).uniform(-1, 1, shape)


def _run(case: Case, arrays: Sequence[Any]) -> tuple[list[Values], list[Values | None]]:
    """Return the values and the gradients for the fixed dy, as NumPy arrays."""
    before = [backend.to_numpy(a).copy() for a in arrays]
    leaves = [Tensor(a, requires_grad=case.gradient and is_float(a.dtype)) for a in arrays]
    outputs = _outputs(case.function(*leaves))
    for y in outputs:
        assert backend.device_of(y.data) == backend.device_of(arrays[0]), f"{case}: wrong device"
    if case.gradient:
        for i, y in enumerate(outputs):
            if y.requires_grad:
                y.backward(_weights(y.shape, i).astype(y.dtype), retain_graph=True)
    for array, copy in zip(arrays, before, strict=True):
        assert backend.to_numpy(array).tobytes() == copy.tobytes(), f"{case} changed an input"
    grads = [None if t.grad is None else backend.to_numpy(t.grad) for t in leaves]
    return [y.numpy() for y in outputs], grads


def _strided(array: Values) -> Values:
    """Return equal values in memory with gaps and, where there are two axes, transposed."""
    if array.ndim == 0:
        return array
    room = np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
    view = room[..., ::2]
    if array.ndim >= 2:
        view = np.zeros(array.shape[::-1], array.dtype).T
    view[...] = array
    return view


def _compare(got: Sequence[Any], expected: Sequence[Any], tolerance: float, what: str) -> None:
    assert len(got) == len(expected), f"{what}: {len(got)} results, expected {len(expected)}"
    for one, two in zip(got, expected, strict=True):
        if one is None and two is None:
            continue
        a, b = np.asarray(one), np.asarray(two)
        assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
        if not is_float(a.dtype):
            np.testing.assert_array_equal(a, b, err_msg=what)
            continue
        a, b = a.astype(float64), b.astype(float64)
        scale = float(np.abs(b[np.isfinite(b)]).max(initial=1e-2))  # exact zeros may come rounded
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale, err_msg=what)
