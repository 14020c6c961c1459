"""No public function loses a gradient in silence: it gives it, or refuses what requires one.

Every parameter of every public function that could hold floats gets a tensor that requires a
gradient. The values of the gradients are checked elsewhere, by each op's cases.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.dtypes import is_float
from tensorgrad.errors import GradError, TensorgradError

MODULES = (tg, tg.nn.functional, tg.linalg, tg.fft, tg.random)
MATRIX = np.array([[0.3, 0.1, 0.05], [0.1, 0.4, 0.02], [0.05, 0.02, 0.5]])
VECTOR = np.array([0.2, 0.5, 0.7])
ROW, ONES, FIRST = np.ones((1, 3)), np.ones((3, 3)), np.array([[0, 1, 0]])
HEADS = np.ones((1, 2, 3, 4))
TOKENS = np.ones((5, 2, 4))
ANGLES = np.ones((3, 1, 2))
# Parameters of other annotations are numbers or tensors.
NOT_TENSORS = (
    "int", "bool", "str", "Axis", "Never", "None", "Dtype", "Literal", "Shape", "Cuts",
    "Sequence[int]", "Callable", "Norm", "Lengths", "PadMode", "QuantileMethod", "Order",
)  # fmt: skip
# Functions of something else than tensors, and those that change their operand in place.
OTHERS = {
    "autocast", "broadcast_shapes", "can_cast", "checkpoint", "cuda_kernel", "finfo", "from_dlpack",
    "functional_call", "fuse", "ggnvp", "grad", "gradcheck", "get_state", "hessian", "hvp", "iinfo",
    "isdtype", "jacobian", "jvp", "linearize", "load", "next_key", "no_grad", "on_grad_ready",
    "promote_types", "put_along_axis", "result_type", "save", "seed", "set_state", "value_and_grad",
    "vjp",
}  # fmt: skip
INTEGERS = {"bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift", "right_shift"}
# The gradient is 0, or the operand gives its shape alone.
STEPS = {
    ("ceil", "x"), ("empty_like", "x"), ("floor", "x"), ("floor_divide", "a"),
    ("floor_divide", "b"), ("full_like", "x"), ("imag", "x"), ("ones_like", "x"), ("rint", "x"),
    ("round", "x"), ("sign", "x"), ("trunc", "x"), ("where", "condition"), ("zeros_like", "x"),
}  # fmt: skip
# Arguments for a parameter of this name where it is needed.
ARGUMENTS: dict[str, Any] = {
    "x": MATRIX, "a": MATRIX, "b": MATRIX + 0.1, "y": MATRIX / 2, "q": HEADS, "k": HEADS,
    "v": HEADS, "weight": MATRIX, "bias": VECTOR, "residual": MATRIX, "gate": MATRIX, "up": MATRIX,
    "down": MATRIX, "target": MATRIX / 2, "targets": [0, 1, 2], "logits": MATRIX, "anchor": MATRIX,
    "positive": MATRIX + 0.1, "negative": MATRIX - 0.1, "var": ONES, "values": ROW, "src": ROW,
    "source": ROW, "index": FIRST, "indices": FIRST, "ids": [0, 1], "key": 0, "axis": 0, "n": 2,
    "shape": (3, 3), "fill_value": 2.0, "value": 1.5, "shift": 1, "repeats": 2, "reps": 2,
    "destination": 1, "axis1": 0, "axis2": 1, "condition": MATRIX > 0.1, "start": 1.0, "stop": 3.0,
    "dtype": "float64", "pad_width": 1, "indices_or_sections": 3, "size": 3, "step": 1.0,
    "num_classes": 3, "rows": 3, "heads": 2, "cos": ANGLES, "sin": ANGLES, "device": "cpu",
    "tensors": [MATRIX, MATRIX], "matrices": [MATRIX, MATRIX], "qkv": np.ones((1, 3, 24)),
    "sorted_sequence": VECTOR, "probability": 0.5, "p": 0.5, "num_groups": 1, "weights": MATRIX,
    "rtol": 0.1, "mask": np.zeros((3, 3)), "threshold": 0.1, "bins": VECTOR, "max": 0.4,
    "aweights": VECTOR, "fweights": VECTOR, "angles": (ANGLES, ANGLES), "low": 0.5, "high": 2.0,
    "pos_weight": VECTOR, "up_bias": VECTOR, "gate_bias": VECTOR, "down_bias": VECTOR,
    "positions": MATRIX, "max_length": 5, "starts": [0, 5], "scale": 2.0, "groups": 3,
    "negative_slope": 0.1, "min": 0.1, "eps": 0.01,
}  # fmt: skip
# Arguments for one function instead, or besides what it needs.
IN_FUNCTION: dict[str, dict[str, Any]] = {
    "attention_varlen": {"q": TOKENS, "k": TOKENS, "v": TOKENS},
    "arccosh": {"x": MATRIX + 1}, "bincount": {"x": [0, 1, 1], "weights": VECTOR},
    "cosine_embedding_loss": {"target": [1.0, -1.0, 1.0]},
    "cross_entropy": {"weight": VECTOR}, "cumulative_prod": {"axis": 0},
    "cumulative_sum": {"axis": 0}, "diagonal_scatter": {"src": VECTOR}, "diff": {"axis": 0},
    "dsplit": {"x": HEADS, "indices_or_sections": 1}, "expand_dims": {"axis": 0},
    "geomspace": {"start": 1.0}, "glu": {"x": np.ones((3, 4))},
    "group_norm": {"weight": VECTOR, "bias": VECTOR}, "index_add": {"index": [0]},
    "index_copy": {"index": [0]}, "index_fill": {"index": [0]},
    "index_put": {"indices": ([0],), "values": VECTOR}, "layer_norm": {"weight": VECTOR},
    "add_layer_norm": {"weight": VECTOR}, "add_rms_norm": {"weight": VECTOR},
    "rms_norm": {"weight": VECTOR}, "logspace": {"base": 10.0}, "matvec": {"b": VECTOR},
    "moveaxis": {"source": 0}, "nll_loss": {"weight": VECTOR}, "prelu": {"weight": VECTOR[:1]},
    "reshape": {"shape": 9}, "rotary": {"x": np.ones((3, 2, 4))}, "select_scatter": {
        "src": VECTOR, "index": 0}, "slice_scatter": {"start": 0, "stop": 1, "step": 1},
    "tensorinv": {"ind": 1}, "tensorsolve": {"b": VECTOR}, "vander": {"x": VECTOR},
    "vecmat": {"a": VECTOR}, "topk": {"k": 1}, "scatter": {"axis": 0},
    "einsum": {"subscripts": "ij,jk", "operands": (MATRIX, MATRIX)},
    "meshgrid": {"axes": (VECTOR, VECTOR)},
    "broadcast_arrays": {"tensors": (MATRIX, VECTOR)}, "choice": {"a": VECTOR},
    "quantile": {"q": 0.5}, "nanquantile": {"q": 0.5}, "percentile": {"q": 50.0},
    "nanpercentile": {"q": 50.0}, "fftfreq": {"d": 0.5}, "rfftfreq": {"d": 0.5},
    "embedding": {"positions": MATRIX, "start": 0},
    "integers": {"low": 0, "high": 3}, "hinge_embedding_loss": {"target": 1 - 2 * (MATRIX > 0.1)},
    "average": {"weights": MATRIX}, "linear_cross_entropy": {"bias": VECTOR},
    "lerp": {"weight": 0.5}, "clip": {"min": 0.1, "max": 0.4}, "arange": {
        "start": 0.0, "stop": 3.0},
    "pad": {"constant_values": 1.0},
}  # fmt: skip


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    seen = set()
    for module in MODULES:
        for name in module.__all__:
            f = getattr(module, name)
            if inspect.isroutine(f) and f not in seen and f.__name__ not in OTHERS | INTEGERS:
                seen.add(f)
                yield f"{module.__name__}.{name}", f


def tensors(value: Any) -> Any:
    """Return a value with tensors in place of arrays."""
    if isinstance(value, list | tuple) and any(isinstance(v, np.ndarray) for v in value):
        return type(value)([tensors(v) for v in value])
    return Tensor(value.copy()) if isinstance(value, np.ndarray) else value


def arguments(f: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that a function needs, by name."""
    own = IN_FUNCTION.get(f.__name__, {})
    taken = {
        name: own.get(name, ARGUMENTS.get(name))
        for name, parameter in inspect.signature(f).parameters.items()
        if name in own or (parameter.default is parameter.empty and parameter.annotation != "Never")
    }
    return {name: tensors(value) for name, value in taken.items()}


def call(f: Callable[..., Any], given: dict[str, Any]) -> Any:
    named = dict(given)
    several = [
        p.name for p in inspect.signature(f).parameters.values() if p.kind == p.VAR_POSITIONAL
    ]
    before: list[Any] = []
    for name in inspect.signature(f).parameters:
        if name in several:
            return f(*before, *named.pop(name), **named)
        if several:
            before.append(named.pop(name))
    return f(**named)


def floats(result: Any) -> list[Tensor]:
    if isinstance(result, list | tuple):
        return [y for part in result for y in floats(part)]
    return [result] if isinstance(result, Tensor) and is_float(result.dtype) else []


def leaves(f: Callable[..., Any], given: dict[str, Any]) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield parameters, leaves, and what the parameter gets so that the leaf is in it."""
    for name, parameter in inspect.signature(f).parameters.items():
        annotation = parameter.annotation
        if annotation.startswith(NOT_TENSORS):
            continue
        default = None if parameter.default is parameter.empty else parameter.default
        value = given.get(name, tensors(ARGUMENTS.get(name, default)))
        parts = value if isinstance(value, list | tuple) else []
        places = [i for i, part in enumerate(parts) if isinstance(part, Tensor)]
        for i in places:
            leaf = Tensor(parts[i].data.copy(), requires_grad=is_float(parts[i].dtype))
            yield name, leaf, type(value)([*parts[:i], leaf, *parts[i + 1 :]])
        if not places:
            array = value.data if isinstance(value, Tensor) else np.asarray(value or 1.0)
            if array.dtype.kind in "fiub":
                leaf = Tensor(array.astype("float64"), requires_grad=True)
                yield name, leaf, leaf


def kept(f: Callable[..., Any], name: str, leaf: Tensor, given: dict[str, Any]) -> bool:
    try:
        results = floats(call(f, given))
    except GradError as error:
        return name in str(error)
    except TensorgradError:
        return True  # another kind than the function takes
    recorded = [y for y in results if y.requires_grad]
    if recorded:
        tg.concatenate([tg.astype(y, "float64") for y in recorded], None).sum().backward()
    return not results or leaf.grad is not None or (f.__name__, name) in STEPS


@pytest.mark.filterwarnings("ignore")
def test_every_operand_of_every_public_function() -> None:
    tried, lost = set(), []
    for label, f in functions():
        given = arguments(f)
        call(f, given)  # without leaves it works
        for name, leaf, value in leaves(f, given):
            tried.add((f.__name__, name))
            if not kept(f, name, leaf, {**given, name: value}):
                lost.append(f"{label}: {name}")
    assert lost == []
    assert len(tried) > 500
    assert tried >= {("rotary", "cos"), ("average", "weights"), ("tensor", "value")}
    assert tried >= STEPS
