"""Arguments of a wrong kind are named, whichever op gets them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError, TensorgradError
from tensorgrad.ops import (
    creation,
    diagonals,
    indexing,
    reduce,
    scatter,
    shape,
    sorting,
    stacking,
    statistics,
)
from tensorgrad.ops.methods import METHODS

X = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
W = Tensor(np.ones((5, 3), np.float32))
Q = Tensor(np.ones((1, 2, 3, 4), np.float32))
ROWS = Tensor(np.ones((5, 2, 4), np.float32))
ANGLES = np.ones((3, 1, 2), np.float32)
LOSS: Any = tg.linear_cross_entropy
anything: Any = tg


def put(value: Any) -> None:
    Tensor(np.zeros(3, np.int8))[0] = value


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: anything.expand_dims(X, None), ArgumentError, "expand_dims: axis is None, expec"),
        (lambda: anything.eye(2, k=0.5), ArgumentError, "eye: k is 0.5, expected an integer"),
        (lambda: anything.rot90(X, 1.5), ArgumentError, "rot90: k is 1.5, expected an integer"),
        (lambda: anything.rot90(X, 1, None), ArgumentError, "rot90: axes is None, expected two"),
        (lambda: anything.tensordot(X, X, None), ArgumentError, "tensordot: axes is None, expecte"),
        (lambda: anything.tensordot(X, X, (1,)), ArgumentError, r"tensordot: axes is \(1,\), expe"),
        (lambda: anything.concatenate(None), DtypeError, "concatenate: tensors is a NoneType, exp"),
        (lambda: anything.stack(3), DtypeError, "stack: tensors is a int, expected a list"),
        (lambda: anything.split(X, 1.5), ArgumentError, "split: indices_or_sections is 1.5, exp"),
        (lambda: anything.split(X, [0.5], 1), ArgumentError, r"split: indices_or_.* is \[0.5\], e"),
        (lambda: anything.roll(X, 1.5, 0), ArgumentError, "roll: shift is 1.5, expected integers"),
        (lambda: anything.roll(X, (1.5,)), ArgumentError, r"roll: shift is \(1.5,\), expected int"),
        (lambda: anything.pad(X, 1, constant_values="a"), DtypeError, "pad: constant_values is"),
        (lambda: tg.pad(np.zeros(2, np.int8), 1, constant_values=300), ArgumentError,
         "pad: constant_values is 300, expected int8"),
        (lambda: tg.pad(np.zeros(2, int), 1, constant_values=float("nan")), DtypeError,
         "pad: constant_values has dtype float64, expected integers for int64"),
        (lambda: anything.clip(X, "a", 1), DtypeError, "clip: min is a str, expected a tensor"),
        (lambda: tg.clip(X, None, np.ones(9)), ShapeError, r"clip: x has .*, max has shape \(9,\)"),
        (lambda: tg.swiglu([[1], [2, 3]], X), ShapeError, "swiglu: gate is .*equal lengths"),
        (lambda: anything.can_cast(3, "int8"), DtypeError, "can_cast: source: got 3, expected one"),
        (lambda: anything.topk(X, 1.5), ArgumentError, "topk: k is 1.5, expected an integer"),
        (lambda: anything.var(X, ddof="a"), ArgumentError, "var: ddof is 'a', expected a number"),
        (lambda: anything.norm(X, ord=[1]), ArgumentError, r"norm: ord is \[1\], expected 1, 2"),
        (lambda: anything.norm(X, ord={1}), ArgumentError, r"norm: ord is \{1\}, expected 1, 2"),
        (lambda: anything.norm(X, ord=([],)), ArgumentError, r"norm: ord is \(\[\],\), expected"),
        (lambda: X[[[0], [1, 0]]], ShapeError, "getitem: the index is .*, expected equal lengths"),
        (lambda: anything.repeat(X, [[1], [2, 3]]), ShapeError, "repeat: repeats is .*equal leng"),
        (lambda: put(300), ArgumentError, "assignment: the value is 300, expected int8"),
        (lambda: anything.einsum(3, X), ArgumentError, "einsum: subscripts is 3, expected a str"),
        (lambda: anything.arange("a"), ArgumentError, "arange: start is 'a', expected a number"),
        (lambda: anything.linspace(0, 1, 2.5), ArgumentError, "linspace: num is 2.5, expected an"),
        (lambda: anything.tril(X, "a"), ArgumentError, "tril: k is 'a', expected an integer"),
        (lambda: anything.one_hot([0], 2.5), ArgumentError, "one_hot: num_classes is 2.5, expecte"),
        (lambda: anything.one_hot([[0], [1, 2]], 3), ShapeError, "one_hot: indices is .*equal len"),
        (lambda: tg.full(2, float("nan"), "int32"), ArgumentError, "full: fill_value does not fit"),
        (lambda: tg.cross_entropy(X, [[0], [1, 2]]), ShapeError, "cross_entropy: targets is .*eq"),
        (lambda: LOSS(X, W, [0, 1], chunk=1.5), ArgumentError, "chunk is 1.5, expected an integer"),
        (lambda: LOSS(X, W, [0, 1], vocab_size=2.5), ArgumentError, "vocab_size is 2.5, expected"),
        (lambda: anything.embedding(W, [[0]], W, start=1.5), ArgumentError, "start is 1.5, expec"),
        (lambda: anything.rotary(Q, ANGLES, ANGLES, heads=1.5), ArgumentError, "heads is 1.5, exp"),
        (lambda: anything.softmax(X, scale="a"), ArgumentError, "softmax: scale is 'a', expected"),
        (lambda: anything.attention(Q, Q, Q, window=1.5), ArgumentError, "window is 1.5, expected"),
        (lambda: anything.attention(Q, Q, Q, scale="a"), ArgumentError, "attention: scale is 'a'"),
        (lambda: anything.attention_packed(Q.data[0], 1.0), ArgumentError, "heads is 1.0, expecte"),
        (lambda: anything.attention_varlen(ROWS, ROWS, ROWS, [0, 5], max_length=5.5), ArgumentError,
         "attention_varlen: max_length is 5.5, expected an integer"),
    ],
)  # fmt: skip
def test_what_has_a_wrong_kind_is_named(
    call: Callable[[], Any], error: type[TensorgradError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda n=name: getattr(tg, n)(2, 3), rf"{name}: dtype is 3, .* such as shape=\(2, 3\)")
          for name in ("ones", "zeros", "empty")),
        (lambda: anything.full(2, 3, 1.0), r"full: dtype is 1.0, .* such as shape=\(2, 3\)"),
        *((lambda n=name: getattr(tg.random, n)(2, 3), rf"{name}: dtype is 3, .*size=\(2, 3\)")
          for name in ("random", "standard_normal")),
        (lambda: anything.random.integers(0, 9, 2, 3), r"integers: dtype is 3, .*size=\(2, 3\)"),
        *((lambda n=name: getattr(tg, n)(X, 0, True), f"{name}: dtype is True, .*keepdims and ddof")
          for name in ("sum", "mean", "prod", "var", "std", "cumsum", "cumprod")),
        (lambda: anything.ones(3).sum(0, True), "sum: dtype is True, expected a dtype; keepdims"),
        *((lambda n=name: getattr(tg, n)(X, 0, keepdims="a"), f"{name}: keepdims is 'a', expected")
          for name in ("sum", "max", "any", "argmax", "logsumexp", "median", "count_nonzero")),
        (lambda: anything.quantile(X, 0.5, keepdims="a"), "quantile: keepdims is 'a', expec"),
        *((lambda n=name: getattr(tg, n)(X, ddof="a"), f"{name}: ddof is 'a'.")
          for name in ("var", "std", "nanvar", "nanstd")),
    ],
)  # fmt: skip
def test_positions_of_others_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("value", [[1, 2], 2.0, X, None, "text"])
def test_a_tensor_is_made_of_an_array(value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(DtypeError, match=f"Tensor: data is a {kind}, expected a NumPy or CuPy arr"):
        Tensor(value)
    with pytest.raises(TypeError, match="data"):
        Tensor()  # type: ignore[call-arg]


def test_arrays_of_other_libraries_are_named() -> None:
    theirs: Any = type("Tensor", (), {"__module__": "torch"})()
    series: Any = type("Series", (), {"__module__": "pandas.core.series"})()
    parts = {"shape": (1,), "dtype": "torch.int64", "__index__": lambda _: 0}
    single: Any = type("Tensor", (), {"__module__": "torch", **parts})()
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: X + theirs, r"add: b is a torch.Tensor, .*; give tensorgrad.from_dlpack\(t.det"),
        (lambda: theirs * X, "multiply: a is a torch.Tensor, expected a tensor, array, number or"),
        (lambda: series @ X, r"matmul: a is a pandas.Series, .*; give t.to_numpy\(\)"),
        (lambda: tg.sum(theirs), "sum: x is a torch.Tensor, expected a tensor, array, number or l"),
        (lambda: tg.stack(theirs), "stack: tensors is a torch.Tensor, expected a list or tuple"),
        (lambda: X[theirs], "getitem: the index is a torch.Tensor, expected an integer"),
        (lambda: tg.cross_entropy(X, theirs), "cross_entropy: targets is a torch.Tensor, expect"),
        (lambda: Tensor(series), "Tensor: data is a pandas.Series, expected a NumPy or CuPy arr"),
        (lambda: tg.nn.Parameter(theirs), "Parameter: data is a torch.Tensor, expected an array"),
        (lambda: X[:, single], "getitem: the index is a torch.Tensor, expected an integer"),
        (lambda: tg.nn.Linear(2, 2)(single), "linear: x is a torch.Tensor, expected a tensor"),
    ]
    for call, message in calls:
        with pytest.raises(DtypeError, match=message):
            call()


def test_integers_of_numpy_are_integers() -> None:
    one = np.int64(1)
    np.testing.assert_array_equal(anything.roll(X, one, 0), np.roll(X.data, 1, 0))
    np.testing.assert_array_equal(anything.roll(X, one), np.roll(X.data, 1))
    np.testing.assert_array_equal(anything.transpose(X[0], np.int64(0)), X.data[0])


def test_an_axis_is_all_that_python_indexes_with() -> None:
    for one in (1, np.int8(1), np.array(1), tg.tensor(1)):
        assert tg.swapaxes(X, 0, one).shape == (3, 2)
        assert tg.stack([X, X], one).shape == (2, 2, 3)
        assert tg.concatenate([X, X], one).shape == tg.append(X, X, one).shape == (2, 6)
        assert tg.take(X, range(2), one).shape == (2, 2)
        assert tg.vecdot(X, X, axis=one).shape == tg.diagonal(X, 0, 0, one).shape == (2,)
        assert tg.select_scatter(X, [8, 9], one, one)[:, 1].tolist() == [8, 9]
        assert tg.eye(one).tolist() == [[1]]
        assert tg.argmax(X, one).shape == tg.nanargmin(X, one).shape == (2,)
        assert (
            tg.cumsum(X, one).shape == tg.sort(X, one).shape == tg.argsort(X, one).shape == (2, 3)
        )
        assert tg.softmax(X, one).shape == tg.log_softmax(X, one).shape == (2, 3)
        assert tg.topk(X, 1, one)[0].shape == (2, 1)
        assert tg.diff(X, 1, one).shape == (2, 2)
    assert tg.slice_scatter(X, 0, step=None).sum().item() == 0


def test_a_loss_of_features_without_width() -> None:
    x = Tensor(np.zeros((2, 0), np.float32), requires_grad=True)
    weight = Tensor(np.zeros((5, 0), np.float32), requires_grad=True)
    loss = tg.linear_cross_entropy(x, weight, [0, 1])
    loss.backward()
    assert loss.item() == pytest.approx(np.log(5))
    assert (x.grad.shape, weight.grad.shape) == ((2, 0), (5, 0))  # type: ignore[union-attr]


DIM: list[Callable[[Tensor], Any]] = [  # beside the functions, which their own files test
    *(lambda x, f=name: getattr(x, f)(dim=1)
      for name in ("sum", "mean", "var", "std", "max", "min", "prod", "any", "all", "argmax",
                   "argmin", "cumsum", "cumprod", "squeeze", "sort", "argsort")),
    lambda x: anything.nn.functional.softmax(x, dim=1),
]  # fmt: skip


@pytest.mark.parametrize("call", DIM)
def test_dim_is_named_axis(call: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ArgumentError, match=r"^\w+: got dim=1, expected axis=1$"):
        call(Tensor(np.ones((2, 2))))


@pytest.mark.parametrize("name", ["gather", "unsqueeze"])
def test_where_an_axis_is_needed_its_name_is_said(name: str) -> None:
    with pytest.raises(TypeError, match="axis"):
        getattr(Tensor(np.ones((2, 2))), name)(dim=1)


FAMILIES = (creation, diagonals, indexing, reduce, scatter, shape, sorting, stacking, statistics)
# The names that NumPy has for some of ours.
SYNONYMS = {
    "b": {"a2", "ar2", "x2"}, "values": {"v", "test_elements"}, "rows": {"N", "n"},
    "columns": {"M", "m", "N"},
}  # fmt: skip
# The arguments by position of functions that NumPy does not have.
BY_POSITION = {
    "diag_embed": "x offset axis1 axis2", "diagonal_scatter": "x src offset axis1 axis2",
    "getitem": "x key", "index_add": "x axis index source", "index_copy": "x axis index source",
    "index_fill": "x axis index value", "index_put": "x indices values", "logsumexp": "x axis",
    "norm": "x axis", "one_hot": "indices num_classes", "block_diag": "",
    "scatter": "x axis index src",
    "scatter_add": "x axis index src", "select_scatter": "x src axis index",
    "slice_scatter": "x src axis start end step", "tensor": "value dtype", "to": "x device",
    "topk": "x k axis",
}  # fmt: skip


def positional(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that may be given by position, one by one."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]


def test_positions_are_numpys() -> None:
    uncompared = set()
    for family in FAMILIES:
        for name in family.__all__:
            ours = positional(getattr(family, name))
            if name in BY_POSITION:
                assert ours == BY_POSITION[name].split(), name
                continue
            try:
                theirs = positional(getattr(np, name))
            except (AttributeError, ValueError):  # an older NumPy lacks it, or its signature
                uncompared.add(name)
                continue
            assert len(ours) <= max(len(theirs), 1), name  # beside `*arys`
            for our, their in zip(ours[1:], theirs[1:], strict=False):  # operands have other names
                assert their in {our, *SYNONYMS.get(our, ())}, name
    assert not uncompared or tuple(map(int, np.__version__.split(".")[:2])) < (2, 4)


def test_positions_of_methods_are_numpys() -> None:
    for name in METHODS.keys() & set(dir(np.ndarray)):
        try:
            theirs = positional(getattr(np.ndarray, name))
        except ValueError:
            continue
        ours = positional(METHODS[name])
        if not name.startswith("_"):
            assert len(ours) <= len(theirs), name
            for our, their in zip(ours[1:], theirs[1:], strict=False):
                assert their in {our, *SYNONYMS.get(our, ())}, name


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "var", "std", "cumsum"])
def test_the_dtype_is_numpys_third_argument(name: str) -> None:
    expected = getattr(np, name)(X.data, 0, np.float64)
    found = getattr(tg, name)(X, 0, np.float64), getattr(X, name)(0, "float64")
    for y in (*found, getattr(np, name)(X, 0, np.float64)):
        assert y.dtype == np.float64
        np.testing.assert_array_equal(y, expected)


def test_functions_with_an_axis_name_it_where_dim_is_given() -> None:
    for family in FAMILIES:
        for name in family.__all__:
            parameters = inspect.signature(getattr(family, name)).parameters
            assert ("axis" in parameters) == ("unknown" in parameters), name
    with pytest.raises(ArgumentError, match=r"^cross: got dim=1, expected axis=1$"):
        anything.cross(X, X, dim=1)


# Arguments that PyTorch's function of a name takes by position, under our names; those that it
# deprecates, or that concern its own memory (`inplace`), do not count. `embedding` and the norms
# differ: see docs/start/coming-from-pytorch.md.
PYTORCH = {
    **dict.fromkeys(
        ["gelu", "hardsigmoid", "hardswish", "logsigmoid", "mish", "relu", "relu6", "selu",
         "sigmoid", "silu", "softsign", "tanh", "tanhshrink"], "x"),
    **dict.fromkeys(["l1_loss", "mse_loss", "soft_margin_loss"], "x target reduction"),
    **dict.fromkeys(["glu", "log_softmax", "softmax", "softmin"], "x axis"),
    **dict.fromkeys(["cosine_embedding_loss", "margin_ranking_loss"],
                    "x y target margin reduction"),
    **dict.fromkeys(["celu", "elu"], "x alpha"),
    **dict.fromkeys(["hardshrink", "softshrink"], "x lambd"),
    "attention": "q k v mask",  # here and below: a function that PyTorch lacks, its operands
    "attention_packed": "qkv heads",
    "attention_varlen": "q k v starts k_starts",
    "binary_cross_entropy": "x target weight reduction",
    "binary_cross_entropy_with_logits": "logits target weight reduction pos_weight",
    "cdist": "x y",
    "cosine_similarity": "x y axis eps",
    "cross_entropy": "logits targets weight ignore_index reduction label_smoothing",
    "dropout": "x p training",
    "embedding": "weight ids positions",
    "gaussian_nll_loss": "x target var full eps reduction",
    "group_norm": "x num_groups weight bias eps",
    "hardtanh": "x min_val max_val",
    "hinge_embedding_loss": "x target margin reduction",
    "huber_loss": "x target reduction delta",
    "kl_div": "x target reduction log_target",
    "layer_norm": "x weight bias",
    "leaky_relu": "x negative_slope",
    "linear": "x weight bias",
    "linear_cross_entropy": "x weight targets bias",
    "nll_loss": "x targets weight ignore_index reduction",
    "normalize": "x p axis eps",
    "pairwise_distance": "x y p eps keepdims",
    "poisson_nll_loss": "x target log_input full eps reduction",
    "prelu": "x weight",
    "rms_norm": "x weight",
    "rotary": "x cos sin",
    "smooth_l1_loss": "x target reduction beta",
    "softplus": "x beta threshold",
    "threshold": "x threshold value",
    "triplet_margin_loss": "anchor positive negative margin p eps swap reduction",
}  # fmt: skip


def test_nn_functional_takes_by_position_what_pytorch_does() -> None:
    functional = tg.nn.functional
    by_position = {}
    for name in {*functional.__all__} - {"logsumexp", "one_hot"}:
        by_position[name] = " ".join(positional(getattr(functional, name)))
    assert by_position == PYTORCH


AXES: list[tuple[Callable[..., Any], str]] = [
    *((getattr(tg.nn.functional, name), "dim")
      for name in ("glu", "log_softmax", "normalize", "softmax", "softmin")),
    *((getattr(tg.linalg, name), "dim") for name in ("norm", "vector_norm")),
    *((getattr(tg.linalg, name), "keepdim") for name in ("matrix_norm", "norm", "vector_norm")),
    (partial(tg.nn.functional.cosine_similarity, X), "dim"),
    (partial(tg.nn.functional.pairwise_distance, X), "keepdim"),
    (partial(tg.nn.functional.nll_loss, X), "dim"),
    (partial(tg.cross_entropy, X), "dim"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "name"), AXES)
def test_names_of_pytorch_are_answered(function: Callable[..., Any], name: str) -> None:
    expected = {"dim": "axis", "keepdim": "keepdims"}[name]
    with pytest.raises(ArgumentError, match=rf"^\w+: got {name}=1, expected {expected}=1$"):
        function(X, **{name: 1})
    with pytest.raises(TypeError, match=r"\w+\(\) got an unexpected keyword argument 'rows'"):
        function(X, rows=1)


def test_positions_of_linear_algebra_are_numpys() -> None:
    for name in tg.linalg.__all__:
        function, numpys = getattr(tg.linalg, name), getattr(np.linalg, name, None)
        if function.__module__ == tg.linalg.__name__ and numpys is not None:
            ours, theirs = positional(function), positional(numpys)
            assert ours[1:] == theirs[1 : len(ours)], name


def test_type_checkers_know_operands() -> None:
    with pytest.raises(DtypeError, match="sum: x is a NoneType, expected a tensor"):
        tg.sum(None)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="add: b is a dict, expected a tensor"):
        tg.add(1.0, {})  # type: ignore[arg-type]
    assert tg.add([1, [2][0]], np.float32(1)).tolist() == [2, 3]
