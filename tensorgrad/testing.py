"""The one harness for ops: `check(Case(...))` tries an op in every way that it must survive.

    from tensorgrad.testing import Case, check, sized

    for case in sized(my_op, lambda n: [(3, n)], my_reference):
        check(case)

A case names a function, the shapes of its inputs and a NumPy reference in float64. `check` runs

- the value against the reference, in float64, float32, float16 and bfloat16;
- the gradient of every float input against numeric differences along random directions
  (float64), then the gradients of the narrower types against those of float64;
- the same on views with strides, on memory that is not aligned, on inputs it must leave
  untouched, and twice for equal bits;
- the same on the GPU, where there is one, and captured into a CUDA graph for the eager bits;
- operands on two devices, for an error that says so, and complex numbers, for one or for what
  the real ones give.

`sized` makes the same case at the lengths where kernels go wrong. A bound is a number of units in
the last place of the result's dtype (`Ulps`); tests/test_testing.py breaks each family of ops on
purpose and sees that `check` fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from tensorgrad.autograd.gradcheck import gradcheck
from tensorgrad.core import backend
from tensorgrad.core.dtypes import (
    FLOATS,
    bfloat16,
    compute_dtype,
    float16,
    float32,
    float64,
    is_float,
)
from tensorgrad.core.errors import DeviceError, TensorgradError
from tensorgrad.core.record import record
from tensorgrad.core.tensor import Tensor

__all__ = [
    "SIZES", "Capture", "Case", "CaseResult", "Ulps", "assert_within", "check", "sized", "spacing",
]  # fmt: skip

Values = np.ndarray[Any, Any]
PRECISION = {float64: 53, float32: 24, float16: 11, bfloat16: 8}  # bits of the significand
EPSILON = {dtype: 2.0 ** (1 - bits) for dtype, bits in PRECISION.items()}
SMALLEST = {float64: -1022, float32: -126, float16: -14, bfloat16: -126}  # normal exponents
LARGEST_TOLERANCE = 0.05
SIZES = (0, 1, 31, 33, 1023, 1025)


@dataclass(frozen=True)
class Ulps:
    """How far a result may be from the exact one, rounded to the result's dtype.

    Args:
        count: units in the last place.
        of: the unit's number. "element": each element. "row": the largest element of its row, for
            what is computed from a whole row or cancels. "terms": the sum of the absolute values of
            what the element is a sum of; see `Case.magnitudes`.
        stored: the units are those of the inputs' dtype, in which the op keeps what it computes a
            wider result from.
        why: the reason for a count above 4.

    Example:
        >>> bound = tg.testing.Ulps(2)
        >>> exact = np.array([1.0, 1000.0])
        >>> bound.tolerance(exact, tg.float16, terms=1, axis=-1, size=None).round(4)
        array([0.0022, 1.0002])
    """

    count: float = 2
    of: Literal["element", "row", "terms"] = "element"
    _: KW_ONLY
    stored: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        assert self.count <= 4 or self.why, f"a bound of {self.count} ulps needs its reason"

    def tolerance(self, exact: Values, dtype: Any, terms: int, axis: Any, size: Any) -> Values:
        """Return the largest allowed difference of each element.

        Sums of `terms` numbers may also be off by the rounding of the type that they are added up
        in, relative to the largest element of the row or the sum of absolute values.
        """
        inside = EPSILON[compute_dtype(dtype)] * 2 * terms**0.5
        relative = self.count * EPSILON[dtype] + inside
        assert relative <= LARGEST_TOLERANCE, f"a bound of {relative:.3g} in {dtype}"
        row = _largest_of_row(exact, axis)
        measure = {"element": np.abs(exact), "row": row, "terms": size}[self.of]
        whole = row if size is None else np.maximum(size, row)
        tolerance = self.count * spacing(measure, dtype) + inside * np.maximum(whole, 1e-2)
        return np.broadcast_to(tolerance, exact.shape)


@dataclass
class Case:
    """An op with inputs to try it on.

    Args:
        function: takes one Tensor per input, returns a Tensor (or a sequence of Tensors).
        inputs: per input a shape (normal random values), or an array to use as it is (integers,
            bool: no gradient; floats: cast to each dtype).
        reference: the same in NumPy, of float64 arrays; its shape and values must agree.
        domain: random floats are drawn uniformly from this interval instead.
        values: the bound of the values.
        gradients: the bound of the gradients; default: that of the values.
        terms: how many numbers are summed for one element, in the result or in a gradient.
        axis: what a row is, for bounds of rows.
        magnitudes: `magnitudes(*inputs, *dys)` in float64 returns, for each output and then for
            each input, the sums of the absolute values of its terms. Default: gradients are summed
            over the axes that inputs were broadcast along, and nothing else is a sum.
        gradient: False for ops without one.
        dtypes: the float dtypes to try.
        captured: False where the op reads values on the host, which a CUDA graph cannot.
        name: for the test's id; default: the function's name.

    Example:
        >>> case = tg.testing.Case(tg.add, [(2, 3), (3,)], np.add)
        >>> str(case)
        'add-2x3-3'
        >>> tg.testing.check(case)
    """

    function: Callable[..., Any]
    inputs: Sequence[Any]
    reference: Callable[..., Any]
    _: KW_ONLY
    domain: tuple[float, float] | None = None
    values: Ulps = Ulps()
    gradients: Ulps | None = None
    terms: int = 1
    axis: int | tuple[int, ...] | None = -1
    magnitudes: Callable[..., Sequence[Values]] | None = None
    gradient: bool = True
    dtypes: Sequence[Any] = field(default=FLOATS)
    captured: bool = True
    name: str = ""

    def __str__(self) -> str:
        name = self.name or _name_of(self.function)
        shapes = "-".join(
            "x".join(map(str, i.shape if isinstance(i, np.ndarray) else i)) or "scalar"
            for i in self.inputs
        )
        return f"{name}-{shapes}"


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function; of the `apply` of a `tg.Function` that of its class."""
    owner = getattr(function, "__self__", None)
    return getattr(owner if isinstance(owner, type) else function, "__name__", str(function))


def sized(
    function: Callable[..., Any],
    shapes: Callable[[int], Sequence[Any]],
    reference: Callable[..., Any],
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> list[Case]:
    """Return a case for each length: none, one, odd ones, and one beside a power of two.

    Args:
        function: takes one Tensor per input, returns a Tensor (or a sequence of Tensors).
        shapes: takes a length, and returns the inputs of a `Case`.
        reference: the same in NumPy, of float64 arrays.
        sizes: the lengths; default: `SIZES`, no element, one, odd numbers, and one beside a power
            of two.
        options: further arguments of `Case`.

    Returns:
        A case for each length.

    Example:
        >>> cases = tg.testing.sized(tg.exp, lambda n: [(3, n)], np.exp)
        >>> [str(case) for case in cases]
        ['exp-3x0', 'exp-3x1', 'exp-3x31', 'exp-3x33', 'exp-3x1023', 'exp-3x1025']
    """
    return [Case(function, shapes(size), reference, **options) for size in sizes]


@dataclass
class CaseResult:
    """Hold the results of one run of a case: values, and gradients for a fixed dy, on the CPU.

    Args:
        values: the results of the function, NumPy arrays.
        gradients: one for each input, NumPy arrays; None for an input without a gradient.
        magnitudes: of expected results: for each value and then each gradient the sums of the
            absolute values of its terms, or None.

    Example:
        >>> result = tg.testing.CaseResult([np.exp([0.0])], [np.array([1.0])])
        >>> result.values, result.gradients
        ([array([1.])], [array([1.])])
    """

    values: list[Values]
    gradients: list[Values | None]
    magnitudes: Sequence[Values | None] = ()


def check(case: Case, seed: int = 0) -> None:
    """Try the case in every way; raise AssertionError at the first that fails.

    Args:
        case: what to try; on the GPU too, where there is one.
        seed: seed of the inputs and of `gradcheck`.

    Raises:
        AssertionError: values or gradients are outside of their bounds; runs differ.
        GradError: as `gradcheck`.

    Example:
        >>> def cube(x):
        ...     return x * x * x
        >>> tg.testing.check(tg.testing.Case(cube, [(3,)], lambda x: x**3))
        >>> try:
        ...     tg.testing.check(tg.testing.Case(cube, [(3,)], lambda x: x**2))
        ... except AssertionError as error:
        ...     print(error)
        cube-3 value 0 in float64: 3 of 3 elements are wrong; at [...] got ..., expected ... +- ...
    """
    rng = np.random.default_rng(seed)
    exact = [_draw(case, spec, rng) for spec in case.inputs]
    if case.gradient and float64 in case.dtypes and any(is_float(a.dtype) for a in exact):
        gradcheck(case.function, exact, seed=seed)
    for dtype in case.dtypes:
        inputs = [a.astype(dtype) if is_float(a.dtype) else a for a in exact]
        got = _run(case, inputs)
        expected = _expected(case, inputs, got)
        _check_runs(case, inputs, got, expected, dtype, "")
        for array, grad in zip(inputs, got.gradients, strict=True):
            assert grad is None or (grad.dtype == array.dtype and grad.shape == array.shape)
        if backend.gpu_count():
            on_gpu = [backend.cupy.asarray(a) for a in inputs]
            eager = _run(case, on_gpu)
            _check_runs(case, on_gpu, eager, expected, dtype, ", GPU")
            if case.captured:
                what = f"{case} in {dtype}, GPU: captured and eager differ"
                _check_bits(eager, _captured(case, on_gpu), what)
    _check_refusals(case, exact)


def _check_runs(
    case: Case, inputs: Sequence[Any], got: CaseResult, expected: CaseResult, dtype: Any, place: str
) -> None:
    """Check a run, another one, and those on other layouts of the inputs."""
    _check_values(case, got, expected, dtype, place)
    _check_bits(got, _run(case, inputs), f"{case} in {dtype}{place}: two runs differ")
    for name, layout in LAYOUTS.items():
        laid_out = _run(case, [layout(a, backend.namespace(a)) for a in inputs])
        _check_values(case, laid_out, expected, dtype, f"{place}, {name}")


def assert_within(
    got: Any, exact: Any, bound: Ulps, what: str = "", terms: int = 1, axis: Any = -1,
    size: Any = None, dtype: Any = None,
) -> None:  # fmt: skip
    """Raise AssertionError unless an array is within a bound of the exact one.

    Args:
        got: the array; integers and bool must be equal to the exact ones.
        exact: the same shape, float64.
        bound: how far an element may be off.
        what: begins the message.
        terms: how many numbers are summed for one element.
        axis: what a row is, for bounds of rows.
        size: the sums of the absolute values of the terms, for bounds of terms; the shape of exact.
        dtype: whose units count; default: that of the array.

    Raises:
        AssertionError: shapes differ, or an element is outside of the bound; names the worst.

    Example:
        >>> exact = np.array([1.0, 2.0]) / 3
        >>> tg.testing.assert_within(exact.astype("float32"), exact, tg.testing.Ulps(1))
        >>> try:
        ...     tg.testing.assert_within(exact.round(3), exact, tg.testing.Ulps(1), "thirds")
        ... except AssertionError as error:
        ...     print(error)
        thirds: 2 of 2 elements are wrong; at [...] got ..., expected ... +- ...
    """
    got, exact = np.asarray(got), np.asarray(exact)
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, expected {exact.shape}"
    if not is_float(got.dtype):
        np.testing.assert_array_equal(got, exact, err_msg=what)
        return
    with np.errstate(over="ignore"):
        rounded = exact.astype(got.dtype).astype(float64)
    wide = got.astype(float64)
    tolerance = bound.tolerance(rounded, dtype or got.dtype, terms, axis, size)
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(wide - rounded) <= tolerance) | (wide == rounded))
    wrong &= ~(np.isnan(wide) & np.isnan(rounded))
    if wrong.any():
        with np.errstate(invalid="ignore"):
            worst = np.unravel_index(
                np.argmax(np.where(wrong, np.abs(wide - rounded) / tolerance, -1)), got.shape
            )
        raise AssertionError(
            f"{what}: {wrong.sum()} of {got.size} elements are wrong; at {[*map(int, worst)]} "
            f"got {wide[worst]:.9g}, expected {rounded[worst]:.9g} +- {tolerance[worst]:.3g}"
        )


def spacing(values: Values, dtype: Any) -> Values:
    """Return the unit in the last place of numbers in a dtype.

    Args:
        values: numbers, of any shape.
        dtype: one of FLOATS: float64, float32, float16 or bfloat16.

    Returns:
        float64, the shape of values.

    Example:
        >>> tg.testing.spacing(np.array([1.0, 1000.0]), tg.float16).tolist()  # 2^-10 and 2^-1
        [0.0009765625, 0.5]
    """
    exponent = np.where(values == 0, SMALLEST[dtype], np.frexp(np.abs(values))[1] - 1)
    least = np.maximum(exponent, SMALLEST[dtype]) - PRECISION[dtype] + 1
    unit: Values = np.ldexp(1.0, least.astype(int))
    return unit


def _largest_of_row(exact: Values, axis: Any) -> Values:
    finite = np.where(np.isfinite(exact), np.abs(exact), 0)
    if exact.ndim == 0:
        return finite
    if isinstance(axis, int) and not -exact.ndim <= axis < exact.ndim:
        axis = None
    return finite.max(axis, keepdims=True, initial=0)  # type: ignore[no-any-return]


def _check_values(case: Case, got: CaseResult, expected: CaseResult, dtype: Any, what: str) -> None:
    count = len(expected.values)
    assert len(got.values) == count, f"{case}: {len(got.values)} results, expected {count}"
    names = [f"value {i}" for i in range(count)]
    names += [f"gradient {i}" for i in range(len(got.gradients))]
    everything = zip(
        names,
        [*got.values, *got.gradients],
        [*expected.values, *expected.gradients],
        [case.values] * count + [case.gradients or case.values] * len(got.gradients),
        expected.magnitudes or [None] * len(names),
        strict=True,
    )
    for name, one, two, bound, size in everything:
        label = f"{case} {name} in {dtype}{what}"
        units = dtype if bound.stored else None
        assert (one is None) == (two is None), f"{label}: one is missing"
        if one is not None:
            assert_within(one, two, bound, label, case.terms, case.axis, size, units)


def _check_bits(one: CaseResult, two: CaseResult, what: str) -> None:
    pairs = zip([*one.values, *one.gradients], [*two.values, *two.gradients], strict=True)
    for a, b in pairs:
        assert a is b or (a is not None and b is not None and a.tobytes() == b.tobytes()), what


def _check_refusals(case: Case, exact: Sequence[Values]) -> None:
    """See that the op names an error for inputs that no op takes."""
    places = [i for i, a in enumerate(exact) if is_float(a.dtype)]
    for i in places:
        _check_complex(case, exact, i)
        if backend.gpu_count() and len(places) > 1:
            given = [backend.to_device(a, "cpu" if j == i else "cuda") for j, a in enumerate(exact)]
            try:
                case.function(*map(Tensor, given))
            except DeviceError as error:
                if "is on c" not in str(error):
                    raise AssertionError(f"{case}: the error names no device: {error}") from error
            else:
                raise AssertionError(f"{case} takes input {i} from another device than the others")


def _check_complex(case: Case, exact: Sequence[Values], i: int) -> None:
    """See that the op names an error for complex numbers, or that x + 0j gives what x gives."""
    given: list[Any] = [Tensor(a) for a in exact]
    given[i] = exact[i].astype("complex128")
    try:
        found = case.function(*given)
    except TensorgradError:
        return
    expected = case.function(*map(Tensor, exact))
    for one, two in zip(_outputs(found), _outputs(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(one), np.asarray(two), 1e-9, 1e-9, err_msg=f"{case} of complex input {i}"
        )


def _draw(case: Case, spec: Any, rng: np.random.Generator) -> Values:
    if isinstance(spec, np.ndarray):
        return spec.astype(float64) if is_float(spec.dtype) else spec
    low, high = case.domain or (0.0, 0.0)
    drawn: Values = rng.uniform(low, high, spec) if case.domain else rng.standard_normal(spec)
    return drawn


def _outputs(y: Any) -> list[Any]:
    return list(y) if isinstance(y, (list, tuple)) else [y]


def _dy(y: Tensor, index: int, narrow: Any) -> Any:
    """Return the fixed dy of output `index`: numbers that `narrow` has, in the dtype of y."""
    drawn = np.random.default_rng([77, index]).uniform(-1, 1, y.shape)
    return backend.asarray_like(drawn.astype(narrow).astype(y.dtype), y.data)


def _leaves(case: Case, arrays: Sequence[Any]) -> list[Tensor]:
    return [Tensor(a, requires_grad=case.gradient and is_float(a.dtype)) for a in arrays]


def _differentiate(outputs: Sequence[Tensor], dys: Sequence[Any]) -> None:
    """Run one backward for all outputs."""
    wanted = [(y, dy) for y, dy in zip(outputs, dys, strict=True) if y.requires_grad]
    if len(wanted) == 1:
        wanted[0][0].backward(wanted[0][1])
    elif wanted:
        tensors, each = zip(*wanted, strict=True)
        joined = record("joined", np.zeros(()), tensors, lambda dy, saved, needs: each, ())
        joined.backward()


def _run(case: Case, arrays: Sequence[Any], narrow: Any = None) -> CaseResult:
    """Return the values and the gradients for the fixed dy.

    narrow: the dtypes of the results of the run to compare with this one.
    """
    before = [backend.to_numpy(a).copy() for a in arrays]
    leaves = _leaves(case, arrays)
    outputs = _outputs(case.function(*leaves))
    for y in outputs:
        assert backend.device_of(y.data) == backend.device_of(arrays[0]), f"{case}: wrong device"
    narrow = narrow or [y.dtype for y in outputs]
    if case.gradient:
        _differentiate(outputs, [_dy(y, i, narrow[i]) for i, y in enumerate(outputs)])
    for array, copy in zip(arrays, before, strict=True):
        assert backend.to_numpy(array).tobytes() == copy.tobytes(), f"{case} changed an input"
    grads = [None if t.grad is None else backend.to_numpy(t.grad) for t in leaves]
    return CaseResult([y.numpy() for y in outputs], grads)


def _expected(case: Case, inputs: Sequence[Values], got: CaseResult) -> CaseResult:
    """Return the reference's values and the op's own gradients in float64."""
    narrow = [y.dtype for y in got.values]
    wide = [a.astype(float64) if is_float(a.dtype) else a for a in inputs]
    values = [np.asarray(y) for y in _outputs(case.reference(*wide))]
    gradients = _run(case, wide, narrow).gradients
    if "terms" not in {case.values.of, (case.gradients or case.values).of}:
        return CaseResult(values, gradients)
    dys = [_dy(Tensor(y), i, narrow[i]) for i, y in enumerate(values)]
    magnitudes = case.magnitudes or partial(_sums_of_broadcast, case)
    return CaseResult(values, gradients, magnitudes(*wide, *dys))


def _sums_of_broadcast(case: Case, *arrays: Values) -> list[Values | None]:
    """Return the absolute values, and the sums of the absolute gradients of broadcast inputs."""
    inputs = arrays[: len(case.inputs)]
    shape = np.broadcast_shapes(*[a.shape for a in inputs])
    whole = _run(case, [np.broadcast_to(a, shape).copy() for a in inputs], [float64] * len(arrays))
    sums: list[Values | None] = [np.abs(y) for y in whole.values]
    for array, dx in zip(inputs, whole.gradients, strict=True):
        lead = len(shape) - array.ndim
        axes = [i for i, n in enumerate(shape) if i < lead or array.shape[i - lead] != n]
        sums.append(None if dx is None else np.abs(dx).sum(tuple(axes)).reshape(array.shape))
    return sums


def _captured(case: Case, arrays: Sequence[Any]) -> CaseResult:
    """Return what a CUDA graph of the op's forward and backward gives."""
    leaves = _leaves(case, arrays)
    outputs = _outputs(case.function(*leaves))
    dys = [_dy(y, i, y.dtype) for i, y in enumerate(outputs)]

    def step() -> tuple[list[Any], list[Any]]:
        for leaf in leaves:
            leaf.grad = None
        outputs = _outputs(case.function(*leaves))
        if case.gradient:
            _differentiate(outputs, dys)
        return [y.data for y in outputs], [leaf.grad for leaf in leaves]

    launch = Capture(step)
    launch()
    values, grads = launch.result
    return CaseResult(
        [backend.to_numpy(y) for y in values],
        [None if g is None else backend.to_numpy(g) for g in grads],
    )


class Capture:
    """A step as a CUDA graph: runs `step` once, captures it once, and launches it when called.

    Args:
        step: takes nothing, launches kernels on the current stream, and returns arrays.

    Attributes:
        result: what `step` returned while it was captured; a launch writes into its arrays.

    Example:
        >>> x = tg.ones(3, device="cuda")  # doctest: +SKIP
        >>> launch = tg.testing.Capture(lambda: (x * 2).data)  # doctest: +SKIP
        >>> launch()  # doctest: +SKIP
        >>> launch.result  # doctest: +SKIP
        array([2., 2., 2.], dtype=float32)
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        cupy = backend.cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pool = cupy.cuda.MemoryPool()  # its own: what the graph uses must not be reused
        cupy.cuda.runtime.deviceSynchronize()
        with ExitStack() as stack:
            stack.enter_context(cupy.cuda.using_allocator(self.pool.malloc))
            stack.enter_context(self.stream)
            step()
            self.stream.begin_capture()
            try:
                self.result = step()
            finally:
                self.graph = self.stream.end_capture()
        self.stream.synchronize()

    def __call__(self) -> None:
        """Launch the graph and wait for it."""
        backend.cupy.cuda.runtime.deviceSynchronize()
        self.graph.launch(self.stream)
        self.stream.synchronize()


def _strided(array: Any, namespace: Any) -> Any:
    """Return equal values in memory with gaps and, where there are two axes, transposed."""
    if array.ndim == 0:
        return array
    if array.ndim >= 2:
        view = namespace.zeros(array.shape[::-1], array.dtype).T
    else:
        view = namespace.zeros(array.size * 2, array.dtype)[::2]
    view[...] = array
    return view


def _misaligned(array: Any, namespace: Any) -> Any:
    """Return equal values, contiguous, one element past where an array begins."""
    room = namespace.zeros(array.size + 1, array.dtype)
    room[1:] = array.reshape(-1)
    return room[1:].reshape(array.shape)


LAYOUTS = {"strided": _strided, "misaligned": _misaligned}
