"""Ops on random shapes, axes, options and dtypes against NumPy in float64.

The first test draws whole cases and gives them to `tensorgrad.testing.check`: values, gradients,
layouts of memory, equal bits, and the GPU where there is one. The second looks at values that are
not finite or next to the limits of their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.dtypes import FLOATS, float64
from tensorgrad.errors import TensorgradError
from tensorgrad.testing import Case, Ulps, assert_within, check
from tests.fuzz.cases import cases
from tests.ops import (
    test_activation,
    test_attention,
    test_cross_entropy,
    test_einsum,
    test_elementwise,
    test_indexing,
    test_linear,
    test_linear_cross_entropy,
    test_norm,
    test_reduce,
    test_softmax,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]
LENGTHS = st.integers(0, 9)
SOME = st.integers(1, 9)
KINKS = {tg.abs, tg.relu, tg.maximum, tg.minimum, tg.max, tg.min, tg.clip, tg.sort}


def shape(draw: Draw, least: int = 0, most: int = 4, lengths: Any = LENGTHS) -> tuple[int, ...]:
    return tuple(draw(st.lists(lengths, min_size=least, max_size=most)))


def narrowed(draw: Draw, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts to another one."""
    kept = whole[draw(st.integers(0, len(whole))) :]
    return tuple(1 if draw(st.booleans()) and draw(st.booleans()) else n for n in kept)


def apart(draw: Draw, which: int, shape: tuple[int, ...]) -> Any:
    """Return different numbers, none of them 0 or beside one of another operand."""
    size, rng = math.prod(shape), np.random.default_rng(draw(st.integers(0, 1 << 32)))
    return ((rng.permutation(size) - size // 2) / 64 + (which + 1) / 512).reshape(shape)


def given_shapes(draw: Draw, op: Any, *shapes: tuple[int, ...]) -> list[Any]:
    """Return inputs of these shapes; where the op has kinks, numbers that keep away from them."""
    if op not in KINKS:
        return list(shapes)
    return [apart(draw, i, each) for i, each in enumerate(shapes)]


def map_case(draw: Draw) -> Case:
    f, reference, domain, gradient = draw(st.sampled_from(test_elementwise.MAPS))
    x = given_shapes(draw, f, shape(draw))[0]
    return test_elementwise.mapped(f, x, reference, domain, gradient)


def activation_case(draw: Draw) -> Case:
    f, reference = draw(st.sampled_from(test_activation.FUNCTIONS))
    return Case(f, given_shapes(draw, f, shape(draw)), reference, values=Ulps(2, "terms"), terms=16,
                magnitudes=lambda x, dy: [abs(x) + 1, abs(dy)])  # fmt: skip


def zip_case(draw: Draw) -> Case:
    f, reference, domain, gradient = draw(st.sampled_from(test_elementwise.ZIPS))
    whole = shape(draw)
    shapes = [whole, narrowed(draw, whole)]
    if draw(st.booleans()):
        shapes.reverse()
    return Case(f, given_shapes(draw, f, *shapes), reference, domain=domain, gradient=gradient,
                gradients=test_elementwise.SUMMED, terms=4 * math.prod(whole) + 1)  # fmt: skip


def where_case(draw: Draw) -> Case:
    whole = shape(draw)
    condition = np.asarray(np.random.default_rng(0).random(narrowed(draw, whole)) < 0.5)
    return Case(tg.where, [condition, whole, narrowed(draw, whole)], np.where,
                gradients=test_elementwise.SUMMED, terms=4 * math.prod(whole) + 1)  # fmt: skip


def reduce_case(draw: Draw) -> Case:
    # Not std: that of nearly equal numbers has no bound.
    rows = [row for row in test_reduce.OPS if "ddof" not in row[2] and row[0] is not tg.std]
    row = draw(st.sampled_from(rows))
    lengths = shape(draw, least=1, lengths=SOME)
    axes = range(-len(lengths), len(lengths))
    axis = draw(st.none() | st.sampled_from(axes))
    if draw(st.booleans()) and row[0] not in (tg.argmax, tg.argmin):
        axis = tuple(draw(st.lists(st.integers(0, len(lengths) - 1), unique=True)))
    op, reference, options, gradient = row
    case = test_reduce.case(op, reference, options, gradient, lengths, axis, draw(st.booleans()))
    case.terms *= 256  # sums may cancel
    summed = range(len(lengths)) if axis is None else axis
    if row[0] is tg.norm and math.prod(lengths[a] for a in np.atleast_1d(summed)) < 2:
        return reduce_case(draw)  # the norm of one number has a kink
    if row[0] in KINKS or row[2].get("ord") == math.inf:
        return replace(case, inputs=[apart(draw, 0, lengths)])
    return case


def softmax_case(draw: Draw) -> Case:
    lengths = shape(draw, least=1)
    axis = draw(st.integers(-len(lengths), len(lengths) - 1))
    op, reference, name = draw(st.sampled_from([
        (tg.softmax, test_softmax.softmax, "softmax"),
        (tg.log_softmax, test_softmax.log_softmax, "log_softmax"),
    ]))  # fmt: skip
    return test_softmax.bounded(
        Case(lambda x: op(x, axis), [lengths], lambda x: reference(x, axis), name=name, axis=axis,
             terms=max(1, lengths[axis]))
    )  # fmt: skip


def norm_case(draw: Draw) -> Case:
    last = (draw(st.integers(2, 9)),)  # a norm of one number is a step, nearly
    x = (*shape(draw, most=3), *last)
    case: Case = draw(st.sampled_from([
        test_norm.bounded(tg.layer_norm, [x, last, last], test_norm.layer_norm),
        test_norm.bounded(test_norm.rms_norm_of_1e6, [x, last], test_norm.rms_norm),
        test_norm.bounded(tg.add_layer_norm, [x, x, last, last], test_norm.add_layer_norm),
        test_norm.bounded(test_norm.add_rms_norm_of_1e6, [x, x, last], test_norm.add_rms_norm),
    ]))  # fmt: skip
    bound = Ulps(4, "terms")  # rows of nearly equal numbers
    inputs = list(case.inputs)
    if len(inputs) > 2 and inputs[1] == x:  # a sum that is exact in every dtype
        rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
        inputs[0] = rng.permuted(np.broadcast_to(np.arange(*last) / 4 - 1, x), axis=-1)
        inputs[1] = np.broadcast_to(rng.integers(-4, 5, (*x[:-1], 1)) / 4, x).copy()
    return replace(case, inputs=inputs, values=bound, gradients=bound)


def matmul_case(draw: Draw) -> Case:
    rows, inner, columns = (draw(LENGTHS) for _ in range(3))
    batch = shape(draw, most=2)
    a, b = (*narrowed(draw, batch), rows, inner), (*narrowed(draw, batch), inner, columns)

    def magnitudes(a: Any, b: Any, dy: Any) -> list[Any]:
        a, b, dy = abs(a), abs(b), abs(dy)
        sums = []
        for like, terms in ((a, dy @ b.swapaxes(-1, -2)), (b, a.swapaxes(-1, -2) @ dy)):
            lead = terms.ndim - like.ndim
            terms = terms.sum(tuple(range(lead)))
            axes = [i for i, n in enumerate(like.shape) if n != terms.shape[i]]
            sums.append(terms.sum(tuple(axes), keepdims=True))
        return [a @ b, *sums]

    return Case(tg.matmul, [a, b], np.matmul, values=Ulps(1.5, "terms"), magnitudes=magnitudes,
                terms=max(1, rows, inner, columns) * math.prod(batch) + 1)  # fmt: skip


def linear_case(draw: Draw) -> Case:
    rows, (k, n) = shape(draw, most=2), (draw(LENGTHS), draw(LENGTHS))
    size = max(1, math.prod(rows), k, n)
    case: Case = draw(st.sampled_from([
        test_linear.plain([(*rows, k), (n, k), (n,)], size),
        test_linear.fused(tg.linear_gelu, [(*rows, k), (n, k), (n,)], test_linear.linear_gelu,
                          4 * size),
        test_linear.fused(tg.gated_linear, [(*rows, k), (n, k), (n, k), (n,), (n,)],
                          test_linear.gated_linear, 4 * size),
    ]))  # fmt: skip
    return case


def einsum_case(draw: Draw) -> Case:
    letters = st.text("abcd", max_size=3)
    first, second = draw(letters), draw(letters)
    seen = sorted({*first, *second})
    out = "".join(draw(st.lists(st.sampled_from(seen), unique=True))) if seen else ""
    lengths = {letter: draw(SOME) for letter in "abcd"}
    shapes = [tuple(lengths[letter] for letter in term) for term in (first, second)]
    case = test_einsum.einsum(f"{first},{second}->{out}", *shapes)
    return replace(
        case, dtypes=[float64], terms=1 << 20
    )  # sums that cancel have no bound in 16 bits


def view_case(draw: Draw) -> Case:
    lengths = shape(draw, least=1, lengths=SOME)
    axis = draw(st.integers(-len(lengths), len(lengths) - 1))
    count = draw(st.integers(0, 3))
    order = draw(st.permutations(range(len(lengths))))
    f, g = draw(st.sampled_from([
        (lambda x: tg.transpose(x, order), lambda x: np.transpose(x, order)),
        (lambda x: tg.flip(x, axis), lambda x: np.flip(x, axis)),
        (lambda x: tg.roll(x, count, axis), lambda x: np.roll(x, count, axis)),
        (lambda x: tg.repeat(x, count, axis), lambda x: np.repeat(x, count, axis)),
        (lambda x: tg.tile(x, count), lambda x: np.tile(x, count)),
        (lambda x: tg.pad(x, count), lambda x: np.pad(x, count)),
        (lambda x: tg.cumsum(x, axis), lambda x: np.cumsum(x, axis)),
        (lambda x: tg.expand_dims(x, axis), lambda x: np.expand_dims(x, axis)),
        (lambda x: tg.moveaxis(x, axis, 0), lambda x: np.moveaxis(x, axis, 0)),
        (lambda x: tg.concatenate([x, x], axis), lambda x: np.concatenate([x, x], axis)),
        (lambda x: tg.stack([x, x], axis), lambda x: np.stack([x, x], axis)),
        (lambda x: tg.tril(x, count - 1) if x.ndim > 1 else x + 0,
         lambda x: np.tril(x, count - 1) if x.ndim > 1 else x + 0),
    ]))  # fmt: skip
    return Case(f, [lengths], g, gradients=Ulps(2, "row"), terms=64, axis=None, captured=False,
                name="view")  # fmt: skip


def index_case(draw: Draw) -> Case:
    lengths = shape(draw, least=1, lengths=SOME)
    key: list[Any] = []
    for length in lengths[: draw(st.integers(0, len(lengths)))]:
        if draw(st.booleans()) and draw(st.booleans()):
            key.append(None)
        place = st.integers(-length, length - 1)
        key.append(draw(st.one_of(
            place, st.slices(length), st.lists(place, min_size=2, max_size=2),
            st.just(np.arange(length) % 2 == 0) if length == 4 else place,
        )))  # fmt: skip
    return replace(test_indexing.pick(tuple(key), lengths), gradients=Ulps(2, "row"), terms=64)


def sort_case(draw: Draw) -> Case:
    lengths = shape(draw, least=1, lengths=SOME)
    axis = draw(st.integers(-len(lengths), len(lengths) - 1))
    return Case(lambda x: tg.sort(x, axis), [apart(draw, 0, lengths)],
                lambda x: np.sort(x, axis), name="sort")  # fmt: skip


def loss_case(draw: Draw) -> Case:
    rows, vocabulary, width = shape(draw, most=2), draw(st.integers(2, 9)), draw(SOME)
    targets = np.random.default_rng(draw(st.integers(0, 99))).integers(0, vocabulary, rows)
    options: dict[str, Any] = {
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        "z_loss": draw(st.sampled_from([0.0, 0.01])),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
    }
    if math.prod(rows) == 0 and options["reduction"] == "mean":
        options["reduction"] = "sum"
    if draw(st.booleans()):
        return test_linear_cross_entropy.case(
            [(*rows, width), (vocabulary, width)], targets, chunk=draw(SOME), **options
        )
    case = test_cross_entropy.case((*rows, vocabulary), targets, **options)
    count = math.prod(rows) if options["reduction"] == "sum" else 1

    def magnitudes(x: Any, targets: Any, dy: Any) -> list[Any]:
        """The loss is a difference of logarithms, which may be small beside them."""
        mean = x.size // x.shape[-1] if options["reduction"] == "mean" else 1
        powers = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
        p = powers / powers.sum(-1, keepdims=True) + np.eye(x.shape[-1])[targets]
        p += options["label_smoothing"] / x.shape[-1]
        dx = 1.2 * p * np.abs(dy).max(initial=0) / max(mean, 1)
        return [np.full(np.shape(dy), 4.0 * max(count, 1)), dx, None]

    return replace(case, values=Ulps(2, "terms"), magnitudes=magnitudes, terms=64)


def attention_case(draw: Draw) -> Case:
    batch, kv_heads, tq, tk, width = (draw(SOME) for _ in range(5))
    heads = kv_heads * draw(st.integers(1, 3))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["causal"] = True
    if draw(st.booleans()):
        options["window"] = draw(SOME)
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(0.1, 0.5))
    case = test_attention.case((batch, heads, tq, width), kv_heads, tk, **options)
    return replace(case, terms=4 * case.terms)


FAMILIES = [
    map_case, activation_case, zip_case, where_case, reduce_case, softmax_case, norm_case,
    matmul_case, linear_case, einsum_case, view_case, index_case, sort_case, loss_case,
    attention_case,
]  # fmt: skip


@cases(1000)
@given(data=st.data())
def test_any_case_agrees_with_numpy(data: Any) -> None:
    case = data.draw(st.sampled_from(FAMILIES))(data.draw)
    if len(case.dtypes) > 1:
        case = replace(case, dtypes=[float64, data.draw(st.sampled_from(FLOATS[1:]))])
    check(case, seed=data.draw(st.integers(0, 1 << 32)))


SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 1e-3, 30.0, -30.0, 88.0, 700.0, -700.0, 1e4, 6e4, 1e5,
    1e30, -1e30, 3e38, 1e300, -1e300, 1e-40, 1e-300, math.inf, -math.inf, math.nan,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # warnings of the reference
@cases(1000)
@given(
    op=st.sampled_from([(f, g, 1) for f, g, *_ in test_elementwise.MAPS]
                       + [(f, g, 2) for f, g, *_ in test_elementwise.ZIPS]),
    values=st.lists(st.sampled_from(SPECIAL), min_size=4, max_size=8),
    dtype=st.sampled_from(FLOATS),
)  # fmt: skip
def test_special_values_are_numpys(op: Any, values: list[float], dtype: Any) -> None:
    """Values next to the limits give what NumPy gives in float64, rounded to the dtype."""
    f, reference, count = op
    with np.errstate(all="ignore"):
        x = np.array(values).astype(dtype)
        inputs = [x, x[::-1].copy()][:count]
        expected = np.asarray(reference(*[a.astype(float64) for a in inputs]))
        try:
            y = f(*map(Tensor, inputs)).numpy()
        except TensorgradError:
            return
        exact = expected.astype(float64) if expected.dtype != bool else expected
        assert_within(y, exact, Ulps(4, "element"), f"{f.__name__} of {inputs}", terms=0)
        assert y.dtype in (dtype, bool), f"{f.__name__} of {dtype} gives {y.dtype}"
