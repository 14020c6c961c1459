"""Moving, viewing and copying elements, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tensorgrad
import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from tensorgrad.testing import SIZES, Case, Values, check

bfloat16 = tensorgrad.dtypes.bfloat16


def both(name: str, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Case:
    """Return the case that calls our op and NumPy's of that name with the same arguments."""
    ours, numpys = getattr(tg, name), getattr(np, name)
    return Case(
        lambda x: ours(x, *args, **kwargs),
        [shape],
        lambda x: numpys(x, *args, **kwargs),
        name=f"{name}{args}{kwargs or ''}",
        terms=8,
        captured="mode" not in kwargs and name != "repeat",  # their indices are made on the host
    )


CASES = [
    both("copy", (3, 4)),
    both("reshape", (3, 4), (4, 3)),
    both("reshape", (3, 4), (2, -1, 2)),
    both("reshape", (3, 4), 12),
    both("reshape", (1,), ()),
    both("reshape", (), (1, 1)),
    both("reshape", (0, 4), (2, 0, 3)),
    both("ravel", (3, 5)),
    both("ravel", ()),
    both("transpose", (2, 3, 5)),
    both("transpose", (2, 3, 5), (2, 0, 1)),
    both("transpose", (2, 3, 5), (-1, 0, 1)),
    both("transpose", ()),
    both("swapaxes", (2, 3, 5), 0, -1),
    both("swapaxes", (2, 3, 5), 1, 1),
    both("moveaxis", (2, 3, 5, 1), 0, -1),
    both("moveaxis", (2, 3, 5, 1), (0, 2), (-1, 0)),
    both("moveaxis", (2, 3, 5, 1), -1, 1),
    both("expand_dims", (2, 3), 1),
    both("expand_dims", (2, 3), (0, -1)),
    both("expand_dims", (), 0),
    both("squeeze", (1, 3, 1)),
    both("squeeze", (1, 3, 1), 0),
    both("squeeze", (1, 3, 1), (0, -1)),
    both("squeeze", (1, 1)),
    both("broadcast_to", (3, 1), (2, 3, 4)),
    both("broadcast_to", (), (2, 3)),
    both("broadcast_to", (3, 1), (3, 0)),
    both("split", (4, 6), 3, axis=1),
    both("split", (4, 6), 1),
    both("split", (7, 2), [2, 5]),
    both("split", (7, 2), [0, 2, 2, 9]),
    both("repeat", (2, 3), 3),
    both("repeat", (2, 3), 2, axis=1),
    both("repeat", (2, 3), [2, 0, 5], axis=1),
    both("repeat", (2, 3), 0, axis=0),
    both("repeat", (), 4),
    both("tile", (2, 3), 2),
    both("tile", (2, 3), (2, 1, 2)),
    both("tile", (2, 3, 1), (2, 2)),
    both("tile", (3,), 0),
    both("pad", (2, 3), 1),
    both("pad", (2, 3), (1, 2), constant_values=2.5),
    both("pad", (2, 3), ((0, 2), (1, 0))),
    both("pad", (0, 3), ((1, 1), (0, 0))),
    both("pad", (4, 3), ((2, 3), (1, 0)), mode="edge"),
    both("pad", (4, 3), 2, mode="reflect"),
    both("pad", (4, 3), (3, 1), mode="symmetric"),
    both("pad", (4, 3), (3, 1), mode="wrap"),
    both("flip", (2, 3, 5)),
    both("flip", (2, 3, 5), 1),
    both("flip", (2, 3, 5), (0, -1)),
    both("flip", ()),
    both("roll", (3, 5), 2),
    both("roll", (3, 5), -1, axis=1),
    both("roll", (3, 5), (1, 7), axis=(0, 1)),
    both("roll", (3, 5), 2, axis=(0, 1)),
    both("roll", (3, 5), (2, 2, 1), axis=(1, 1, 0)),
    Case(lambda a, b: tg.concatenate([a, b]), [(2, 3), (4, 3)],
         lambda a, b: np.concatenate([a, b]), name="concatenate"),
    Case(lambda a, b, c: tg.concatenate((a, b, c), axis=-1), [(2, 3), (2, 0), (2, 1)],
         lambda a, b, c: np.concatenate((a, b, c), -1), name="concatenate-last"),
    Case(lambda a, b: tg.concatenate([a, b, a], axis=None), [(2, 3), ()],
         lambda a, b: np.concatenate([a, b, a], None), terms=2, name="concatenate-flat"),
    Case(lambda a, b: tg.stack([a, b]), [(2, 3), (2, 3)],
         lambda a, b: np.stack([a, b]), name="stack"),
    Case(lambda a, b: tg.stack([a, b, b], axis=-1), [(2, 3), (2, 3)],
         lambda a, b: np.stack([a, b, b], -1), terms=2, name="stack-last"),
    Case(lambda a: tg.stack([a, a]), [()], lambda a: np.stack([a, a]), terms=2, name="stack-0d"),
    *(both(name, (3, n), *args)
      for name, args in [("flip", ()), ("roll", (1,)), ("repeat", (2,)), ("tile", (2,)),
                         ("pad", (1,))]
      for n in SIZES),
    *(Case(lambda a, b: tg.concatenate([a, b], 1), [(3, n), (3, 2)],
           lambda a, b: np.concatenate([a, b], 1), name="concatenate") for n in SIZES),
    *(Case(lambda a, b: tg.stack([a, b]), [(n, 2), (n, 2)],
           lambda a, b: np.stack([a, b]), name="stack") for n in SIZES),
    *(Case(lambda x: tg.astype(x, "float64"), [(2, n)], lambda x: x, name="astype")
      for n in SIZES),
    Case(lambda x: tg.astype(x, "float64"), [(3, 5)], lambda x: x, name="astype"),
    Case(lambda x: tg.astype(x, "float64", copy=False), [(3, 5)], lambda x: x, name="astype"),
    Case(lambda x: tg.astype(x, int), [(3, 5)], lambda x: x.astype(int), domain=(-9, 9),
         gradient=False, dtypes=[np.dtype("float64")], name="astype-int"),
    Case(lambda x: tg.to(tg.to(x, "cpu"), x.device), [(3, 5)], lambda x: x, captured=False,
         name="to-and-back"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_numpy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: tg.reshape(x, (4, 3, 2)),
        lambda x: tg.ravel(x),
        lambda x: tg.transpose(x),
        lambda x: x.T,
        lambda x: tg.swapaxes(x, 0, 1),
        lambda x: tg.moveaxis(x, 0, 2),
        lambda x: tg.expand_dims(x, 0),
        lambda x: tg.squeeze(x),
        lambda x: tg.broadcast_to(x, (2, 2, 3, 4)),
        lambda x: tg.split(x, 2, axis=2)[1],
        lambda x: tg.flip(x, 1),
        lambda x: x[1:, ..., None],
        lambda x: tg.astype(x, "float32", copy=False),
        lambda x: tg.to(x, "cpu"),
        lambda x: tg.asarray(x),
    ],
)
def test_views_share_memory(view: Any) -> None:
    x = Tensor(np.zeros((2, 3, 4), "float32"))
    assert np.shares_memory(view(x).data, x.data)


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: tg.astype(x, "float32"),
        lambda x: tg.concatenate([x]),
        lambda x: tg.pad(x, 0),
        lambda x: tg.roll(x, 0),
        lambda x: tg.repeat(x, 1, axis=0),
        lambda x: tg.tile(x, 1),
    ],
)
def test_copies_do_not(copy: Any) -> None:
    x = Tensor(np.zeros((2, 3, 4), "float32"))
    assert not np.shares_memory(copy(x).data, x.data)


def test_a_cast_may_move_too() -> None:
    x = Tensor(np.ones(2))
    assert tg.astype(x, "float64", copy=False, device="cpu") is x
    assert tg.astype(x, "float64").data is not x.data
    with pytest.raises(DeviceError, match="device: got 'tpu'"):
        tg.astype(x, "float64", device="tpu")


def test_reshape_copies_as_asked() -> None:
    x = Tensor(np.arange(6.0).reshape(2, 3))
    for source, copying, shares in ((x, True, False), (x, False, True), (x.T, True, False)):
        y = tg.reshape(source, 6, copy=copying)
        np.testing.assert_array_equal(y.numpy(), source.numpy().reshape(6))
        assert np.shares_memory(y.data, x.data) is shares


@given(data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_shapes_follow_numpy(data: Any) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
    x = np.arange(int(np.prod(shape)), dtype="float64").reshape(shape)
    ndim = len(shape)
    axis = st.integers(-ndim, ndim - 1)
    axes = tuple(data.draw(st.permutations(range(ndim))))
    some = tuple(data.draw(st.lists(axis, unique_by=lambda a: a % ndim)))
    targets = tuple(data.draw(st.lists(axis, min_size=len(some), max_size=len(some),
                                       unique_by=lambda a: a % ndim)))  # fmt: skip
    reps = data.draw(st.lists(st.integers(0, 3), max_size=5))
    widths = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)),
                                min_size=ndim, max_size=ndim))  # fmt: skip
    shift = data.draw(st.integers(-9, 9))
    for name, args in [
        ("transpose", (axes,)),
        ("moveaxis", (some, targets)),
        ("flip", (some,)),
        ("tile", (reps,)),
        ("pad", (widths,)),
        ("roll", (shift, data.draw(st.none() | axis))),
        ("repeat", (data.draw(st.integers(0, 3)), data.draw(st.none() | axis))),
        ("reshape", (data.draw(st.permutations(shape)),)),
    ]:
        got, expected = getattr(tg, name)(Tensor(x), *args), getattr(np, name)(x, *args)
        np.testing.assert_array_equal(got.numpy(), expected, err_msg=f"{name} {shape} {args}")


@given(shapes=hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=3))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_broadcasting_follows_numpy(shapes: Any) -> None:
    small, _ = shapes.input_shapes
    x = Tensor(np.random.default_rng(0).standard_normal(small), requires_grad=True)
    y = tg.broadcast_to(x, shapes.result_shape)
    np.testing.assert_array_equal(y.numpy(), np.broadcast_to(x.data, shapes.result_shape))
    y.backward(np.ones(shapes.result_shape))
    copies = y.size // x.size if x.size else 0
    np.testing.assert_array_equal(x.grad, np.full(small, copies))


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "float16", "bfloat16"])
def test_every_dtype_moves(dtype: str) -> None:
    x = np.array([[1, 0, 1], [0, 1, 1]]).astype(tensorgrad.dtypes.as_dtype(dtype))
    t = Tensor(x)
    for got, expected in [
        (tg.concatenate([t, t], axis=1), np.concatenate([x, x], axis=1)),
        (tg.stack([t, t]), np.stack([x, x])),
        (tg.pad(t, 1), np.pad(x, 1)),
        (tg.roll(t, 1), np.roll(x, 1)),
        (tg.tile(t, 2), np.tile(x, 2)),
        (tg.repeat(t, [1, 2], axis=0), np.repeat(x, [1, 2], axis=0)),
        (tg.flip(t, 1), np.flip(x, 1)),
        (tg.astype(t, "float32"), x.astype("float32")),
    ]:
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got.numpy(), expected)


def test_joining_promotes_as_numpy_does() -> None:
    wide, narrow = Tensor(np.ones(2, "float32"), True), Tensor(np.ones(2, bfloat16), True)
    y = tg.concatenate([wide, narrow])
    assert y.dtype == np.float32
    y.backward(np.arange(4, dtype="float32"))
    assert narrow.grad is not None
    assert narrow.grad.dtype == bfloat16
    np.testing.assert_array_equal(narrow.grad, [2, 3])
    with pytest.raises(DtypeError, match=r"stack: tensors\[0\] has dtype bfloat16, tensors\[1\] h"):
        tg.stack([narrow, Tensor(np.ones(2, "float16"))])


def test_split_gives_each_piece_its_gradient() -> None:
    x = Tensor(np.arange(12.0).reshape(2, 6), requires_grad=True)
    first, _, last = tg.split(x, 3, axis=1)
    (first * 2 + last * last).backward(np.ones((2, 2)))
    np.testing.assert_array_equal(x.grad, [[2, 2, 0, 0, 8, 10], [2, 2, 0, 0, 20, 22]])


def test_casts_to_integers_carry_no_gradient() -> None:
    x = Tensor(np.array([1.5, -2.5]), requires_grad=True)
    assert not tg.astype(x, "int32").requires_grad
    assert tg.astype(x, "float32").requires_grad
    assert tg.astype(x, "float64", copy=False) is x
    assert tg.to(x, "cpu") is x


@pytest.mark.gpu
def test_gradients_cross_devices() -> None:
    x = Tensor(np.array([1.0, 2.0]), requires_grad=True)
    y = tg.to(x, "cuda") * 3
    assert y.device.startswith("cuda")
    tg.to(y, "cpu").backward(np.ones(2))
    assert isinstance(x.grad, np.ndarray)
    np.testing.assert_array_equal(x.grad, [3, 3])


X: Any = Tensor(np.zeros((2, 3)))
MIRROR: Any = "mirror"
HALF: Any = 0.5
TWO: Any = [1, 2]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tg.reshape(X, (4, 2)), ShapeError, r"reshape: x has shape \(2, 3\), expected 6"),
        (lambda: tg.reshape(X, (-1, -1)), ShapeError, r"reshape: x has shape"),
        (lambda: tg.transpose(X, (0, 0)), ArgumentError, r"transpose: axes is \(0, 0\), expected"),
        (lambda: tg.transpose(X, (0,)), ArgumentError, r"transpose: axes is \(0,\), expected all"),
        (lambda: tg.swapaxes(X, 0, 2), ArgumentError, "swapaxes: axis2 is 2, expected -2 to 1"),
        (lambda: tg.moveaxis(X, (0, 1), 0), ArgumentError, "moveaxis: destination has 1 axes"),
        (lambda: tg.expand_dims(X, 4), ArgumentError, "expand_dims: axis is 4, expected -3 to 2"),
        (lambda: tg.squeeze(X, 1), ShapeError, "squeeze: axis 1 of x has length 3, expected 1"),
        (lambda: tg.broadcast_to(X, (3, 2)), ShapeError, r"broadcast_to: x has shape \(2, 3\)"),
        (lambda: tg.broadcast_to(X, (-1, 3)), ShapeError, r"broadcast_to: shape is \(-1, 3\)"),
        (lambda: tg.concatenate([]), ArgumentError, "concatenate: tensors is empty"),
        (lambda: tg.concatenate(X), DtypeError, "concatenate: tensors is a Tensor, expected a li"),
        (lambda: tg.concatenate([X, X.T]), ShapeError,
         r"concatenate: tensors\[1\] has shape \(3, 2\), expected \(any, 3\)"),
        (lambda: tg.concatenate([X, np.ones(2)], 1), ShapeError, r"shape \(2,\), expected \(2, a"),
        (lambda: tg.concatenate([X, "no"]), DtypeError, r"concatenate: tensors\[1\] is a str"),
        (lambda: tg.stack([X, X.T]), ShapeError, r"stack: tensors\[1\] has shape \(3, 2\)"),
        (lambda: tg.stack([X], axis=3), ArgumentError, "stack: axis is 3, expected -3 to 2"),
        (lambda: tg.split(X, 2, axis=1), ArgumentError, "split: axis 1 of x has length 3"),
        (lambda: tg.split(X, 0), ArgumentError, "split: axis 0 of x has length 2"),
        (lambda: tg.repeat(X, -1), ArgumentError, "repeat: repeats is -1, expected integers"),
        (lambda: tg.repeat(X, [1, 2], axis=1), ShapeError, r"repeat: repeats has shape \(2,\)"),
        (lambda: tg.tile(X, -1), ShapeError, r"tile: reps is \(-1,\), expected"),
        (lambda: tg.pad(X, -1), ArgumentError, "pad: pad_width is -1, expected integers"),
        (lambda: tg.pad(X, 0.5), ArgumentError, "pad: pad_width is 0.5, expected integers"),
        (lambda: tg.pad(X, ((1, 1),) * 3), ShapeError, "pad: pad_width is .* or 2 such pairs"),
        (lambda: tg.pad(X, [[1, 2], [3]]), ShapeError, "pad: pad_width is .* or 2 such pairs"),
        (lambda: tg.pad(X, 1, mode=MIRROR), ArgumentError, "pad: mode is 'mirror', expected"),
        (lambda: tg.pad(tg.zeros((0, 2)), 1, "edge"), ShapeError, "pad: axis 0 of x is empty"),
        (lambda: tg.flip(X, 2), ArgumentError, "flip: axis is 2, expected -2 to 1"),
        (lambda: tg.roll(X, (1, 2), axis=0), ArgumentError, r"roll: shift is \(1, 2\), expected"),
        (lambda: tg.astype(X, "float8"), DtypeError, "dtype: got 'float8', expected one of"),
        (lambda: tg.astype("text", "float32"), DtypeError, "astype: x is a str, expected a tens"),
        (lambda: tg.to(X, "tpu"), DeviceError, "device: got 'tpu', expected 'cpu', 'cuda' or"),
        (lambda: tg.ravel(Tensor(np.zeros(()))).swapaxes(0, 1), ArgumentError,
         "swapaxes: axis2 is 1, expected -1 to 0"),
        (lambda: tg.flip(Tensor(np.zeros(())), 0), ArgumentError, "flip: axis is 0, expected no"),
        (lambda: tg.reshape(X.T, 6, copy=False), ArgumentError, "reshape: copy is False, expect"),
        (lambda: tg.swapaxes(X, 2, 0), ArgumentError, "swapaxes: axis1 is 2, expected -2 to 1"),
        (lambda: tg.split(X, [HALF]), ArgumentError, r"split: indices_or_sections is \[0.5\], exp"),
        (lambda: tg.roll(X, HALF), ArgumentError, "roll: shift is 0.5, expected integers"),
        (lambda: tg.pad(X, 1, constant_values=TWO), ShapeError,
         r"pad: constant_values has shape \(2,\), expected one number"),
    ],
)  # fmt: skip
def test_errors_name_argument_and_expectation(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_arrays_and_subclasses_of_arrays_are_taken(tmp_path: Any) -> None:
    mapped: Values = np.memmap(tmp_path / "values", np.float32, "w+", shape=(2, 3))
    mapped[...] = 1
    y = tg.transpose(mapped)
    assert type(y.data) is np.ndarray
    assert np.shares_memory(y.data, mapped)
    assert (y * 2).numpy().sum() == 12


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (tg.expand_dims, (X, 1)),
        (tg.squeeze, (X,)),
        (tg.concatenate, ([X, X],)),
        (tg.stack, ([X, X],)),
        (tg.split, (X, 1)),
        (tg.repeat, (X, 2)),
        (tg.flip, (X,)),
        (tg.roll, (X, 1)),
    ],
)
def test_dim_is_named_axis(op: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError, match=rf"^{op.__name__}: got dim=1, expected axis=1$"):
        op(*arguments, dim=1)
