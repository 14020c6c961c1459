"""How to call each public function that takes several operands, with literals for some of them.

A call is a function and its operands as words: lengths of the axes ("2x3", "" for a number, "*" for
any shape that broadcasts to (2, 3)), then "+" for numbers above 0, "%" for fractions, "<" for
ascending ones, "." for floats alone, "!" for an operand that is always a tensor, "?" for one that
is float64 beside any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tensorgrad as tg
import tensorgrad.nn.functional as F
from tensorgrad import Tensor, linalg, nn

Call = tuple[Callable[..., Any], str]


def words(text: str) -> list[str]:
    return text.split()


_ZIPS = words("""
    add arctan2 atan2 copysign divide divmod equal floor_divide fmax fmin fmod greater
    greater_equal heaviside hypot less less_equal logaddexp logaddexp2 logical_and
    logical_or logical_xor maximum minimum mod multiply nextafter not_equal pow power
    remainder subtract true_divide xlog1py xlogy bias_gelu elu leaky_relu swiglu
    allclose isclose array_equiv array_equal
""")
_OPERATORS = words("""
    add divmod eq floordiv ge gt le lt mod mul ne pow sub truediv
""")
_REFLECTED = words("""
    radd rdivmod rfloordiv rmod rmul rpow rsub rtruediv
""")
_IN_PLACE = words("""
    iadd ifloordiv imod imul ipow isub itruediv
""")
_LOSSES = words("""
    hinge_embedding_loss huber_loss l1_loss mse_loss poisson_nll_loss smooth_l1_loss
    soft_margin_loss
""")

_ROWS, _IDS = np.array([2, 0]), np.array([[0, 2], [1, 1]])


def _changed(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """Return a copy of x after a change in place."""
    y = x.clone()
    again = change(y)
    return y if again is None else again


def _quantiles(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function, in which an array of fractions stands for its numbers beside float32.

    A float64 array widens the result there. A list does not, nor does a number.
    """

    def call(x: Tensor, q: Any) -> Tensor:
        if isinstance(q, list | tuple) or x.dtype != "float32":
            return function(x, q)
        return tg.stack([function(x, number) for number in q.tolist()])

    return call


def _method(name: str) -> Callable[..., Any]:
    return lambda x, *others: getattr(x, name)(*others)


CALLS: dict[str, Call] = {
    **{name: (getattr(tg, name), "* *") for name in _ZIPS},
    **{f"Tensor.__{name}__": (_method(f"__{name}__"), "*! *") for name in _OPERATORS},
    **{f"Tensor.__{name}__": (_method(f"__{name}__"), "*! *") for name in _REFLECTED},
    **{
        f"Tensor.__{name}__": (
            lambda x, y, name=name: _changed(x, lambda z: getattr(z, f"__{name}__")(y)),
            "2x3! *",
        )
        for name in _IN_PLACE
    },
    **{f"F.{name}": (getattr(F, name), "2x3 2x3+") for name in _LOSSES},
    "Tensor.__imatmul__": (lambda x, y: _changed(x, lambda z: z.__imatmul__(y)), "3x3! 3x3"),
    "Tensor.__matmul__": (_method("__matmul__"), "2x3! 3x2"),
    "Tensor.__rmatmul__": (_method("__rmatmul__"), "2x3! 3x2"),
    "Tensor.__setitem__": (lambda x, v: _changed(x, lambda y: y.__setitem__(0, v)), "2x3! 3"),
    "Tensor.fill": (lambda x, v: _changed(x, lambda y: y.fill(v)), "2x3! "),
    "Tensor.clip": (_method("clip"), "*! * *"),
    "Tensor.dot": (_method("dot"), "3! 3"),
    "Tensor.index_add": (lambda x, v: x.index_add(0, _ROWS, v), "3x2! 2x2"),
    "Tensor.masked_fill": (lambda x, v: x.masked_fill(x.data > 0.5, v), "2x3! "),
    "Tensor.scatter": (lambda x, v: x.scatter(0, _IDS, v), "3x2! 2x2"),
    "Tensor.scatter_add": (lambda x, v: x.scatter_add(0, _IDS, v), "3x2! 2x2"),
    "Tensor.searchsorted": (_method("searchsorted"), "5<! *"),
    "add_layer_norm": (tg.add_layer_norm, "2x3 2x3 3 3"),
    "add_rms_norm": (tg.add_rms_norm, "2x3 2x3 3"),
    "append": (tg.append, "2x3 *"),
    "attention": (tg.attention, "1x1x2x2 1x1x2x2 1x1x2x2 2x2."),
    "attention_unfused": (tg.attention_unfused, "1x1x2x2 1x1x2x2 1x1x2x2 2x2."),
    "attention_packed": (lambda x, mask: tg.attention_packed(x, 1, mask=mask), "1x2x6 2x2."),
    "attention_packed, angles": (
        lambda x, *angles: tg.attention_packed(x, 1, angles=angles), "1x2x6 2x1x1 2x1x1",
    ),
    "attention_varlen": (
        lambda q, k, v: tg.attention_varlen(q, k, v, [0, 1, 3]), "3x1x2 3x1x2 3x1x2",
    ),
    "average": (lambda x, w: tg.average(x, weights=w), "2x3 2x3+"),
    "average, one axis": (lambda x, w: tg.average(x, 1, w), "2x3 3+"),
    "block_diag": (tg.block_diag, "2x3 3 "),
    "broadcast_arrays": (tg.broadcast_arrays, "2x3 * *"),
    "clip": (tg.clip, "* * *"),
    "column_stack": (lambda *x: tg.column_stack(x), "3 3x2 3"),
    "concat": (lambda *x: tg.concat(x), "3 3 2"),
    "concatenate": (lambda *x: tg.concatenate(x, None), "2x3 3 2x2"),
    "corrcoef": (tg.corrcoef, "2x3 2x3"),
    "cov": (tg.cov, "2x3 3"),
    "cross": (tg.cross, "2x3 3"),
    "cross_entropy": (lambda x, w: tg.cross_entropy(x, [2, 0], weight=w), "2x3 3+"),
    "cross_entropy, smoothed": (
        lambda x, w: tg.cross_entropy(x, [2, 0], label_smoothing=0.1, weight=w), "2x3 3+",
    ),
    "cross_entropy, probabilities": (
        lambda x, p, w: tg.cross_entropy(x, p, weight=w), "2x3 2x3%! 3+",
    ),
    "diagonal_scatter": (tg.diagonal_scatter, "3x3 3"),
    "diff": (lambda x, before, after: tg.diff(x, prepend=before, append=after), "2x3  2x1"),
    "digitize": (tg.digitize, "2x3 4<"),
    "dot": (tg.dot, "2x3 3"),
    "dot, a number": (tg.dot, "2x3 "),
    "dropout_add": (lambda x, y, b: tg.dropout_add(x, y, p=0.0, bias=b), "2x3 2x3 3"),
    "dstack": (lambda *x: tg.dstack(x), "2x3 2x3"),
    "einsum": (lambda *x: tg.einsum("ij,jk,k->i", *x), "2x3 3x2 2"),
    "embedding": (lambda w, p: tg.embedding(w, [[2, 0]], p), "3x2 2x2"),
    "feed_forward": (tg.feed_forward, "2x3 4x3 4 3x4 3 2x3"),
    "full_like": (tg.full_like, "2x3! "),
    "gated_linear": (tg.gated_linear, "2x3 4x3 4x3 4 4"),
    "group_norm": (lambda x, w, b: tg.group_norm(x, 2, w, b), "2x4x3 4 4"),
    "hstack": (lambda *x: tg.hstack(x), "3 2 "),
    "index_add": (lambda x, v: tg.index_add(x, 0, _ROWS, v, alpha=0.1), "3x2 2x2"),
    "index_copy": (lambda x, v: tg.index_copy(x, 0, _ROWS, v), "3x2 2x2"),
    "index_fill": (lambda x, v: tg.index_fill(x, 0, _ROWS, v), "3x2 "),
    "index_put": (lambda x, v: tg.index_put(x, (_ROWS, [0, 1]), v), "3x2 2"),
    "inner": (tg.inner, "2x3 4x3"),
    "intersect1d": (tg.intersect1d, "5 4"),
    "isin": (tg.isin, "2x3 4"),
    "kron": (tg.kron, "2x3 2x2"),
    "layer_norm": (tg.layer_norm, "2x3 3 3"),
    "lerp": (tg.lerp, "* * *"),
    "linear": (lambda x, w, b, r: tg.linear(x, w, b, residual=r), "2x3 4x3 4 2x4"),
    "linear_cross_entropy": (
        lambda x, w, b: tg.linear_cross_entropy(x, w, [2, 0], bias=b), "2x3 4x3 4",
    ),
    "linear_gelu": (tg.linear_gelu, "2x3 4x3 4"),
    "linear_gelu, exact": (
        lambda x, w, b: tg.linear_gelu(x, w, b, approximate="none"), "2x3 4x3 4",
    ),
    "matmul": (tg.matmul, "2x3 3x2"),
    "matvec": (tg.matvec, "2x3 3"),
    "max": (lambda x, v: tg.max(x, initial=v.item() if hasattr(v, "item") else v), "2x3! "),
    "meshgrid": (tg.meshgrid, "2 3 4"),
    "nan_to_num": (
        lambda x, nan, high, low: tg.nan_to_num(x / 0, nan=nan, posinf=high, neginf=low), "2x3!   ",
    ),
    "nanpercentile": (_quantiles(tg.nanpercentile), "2x3! 2%?"),
    "nanquantile": (_quantiles(tg.nanquantile), "2x3! 2%?"),
    "nll_loss": (lambda x, w: tg.nll_loss(x, [2, 0], w), "2x3 3+"),
    "outer": (tg.outer, "2 3"),
    "pad": (lambda x, v: tg.pad(x, 1, "constant", constant_values=v), "2x3! "),
    "percentile": (_quantiles(tg.percentile), "2x3! 2%?"),
    "put_along_axis": (
        lambda x, v: _changed(x, lambda y: tg.put_along_axis(y, _IDS, v, 0)), "3x2! 2x2",
    ),
    "quantile": (_quantiles(tg.quantile), "2x3! 2%?"),
    "rms_norm": (tg.rms_norm, "2x3 3"),
    "rotary": (tg.rotary, "2x1x4 2x1x2 2x1x2"),
    "scatter": (lambda x, v: tg.scatter(x, 0, _IDS, v), "3x2 2x2"),
    "scatter_add": (lambda x, v: tg.scatter_add(x, 0, _IDS, v), "3x2 2x2"),
    "searchsorted": (tg.searchsorted, "5< *"),
    "searchsorted, sorter": (
        lambda x, v: tg.searchsorted(x, v, "right", [4, 3, 2, 1, 0]), "5 *",
    ),
    "select_scatter": (lambda x, v: tg.select_scatter(x, v, 0, 1), "2x3 3"),
    "setdiff1d": (tg.setdiff1d, "5 4"),
    "setxor1d": (tg.setxor1d, "5 4"),
    "slice_scatter": (lambda x, v: tg.slice_scatter(x, v, 0, 1), "3x3 2x3"),
    "softmax": (lambda x, mask: tg.softmax(x, mask=mask), "2x3 2x3."),
    "stack": (lambda *x: tg.stack(x), "3 3 3"),
    "tensordot": (lambda a, b: tg.tensordot(a, b, 1), "2x3 3x2"),
    "trapezoid": (tg.trapezoid, "2x3 3<"),
    "union1d": (tg.union1d, "5 4"),
    "vdot": (tg.vdot, "2x3 2x3"),
    "vecdot": (tg.vecdot, "2x3 3"),
    "vecmat": (tg.vecmat, "2 2x3"),
    "vstack": (lambda *x: tg.vstack(x), "3 2x3"),
    "where": (lambda a, b: tg.where([True, False, True], a, b), "* *"),
    "linalg.cross": (linalg.cross, "2x3 3"),
    "linalg.matmul": (linalg.matmul, "2x3 3x2"),
    "linalg.matrix_rank": (lambda x, rtol: linalg.matrix_rank(x, rtol=rtol), "2x3x3! 2%"),
    "linalg.multi_dot": (lambda *x: linalg.multi_dot(x), "2x3 3x2 2"),
    "linalg.outer": (linalg.outer, "2 3"),
    "linalg.pinv": (lambda x, rtol: linalg.pinv(x, rtol=rtol), "2x3x3! 2%"),
    "linalg.solve": (linalg.solve, "3x3 3"),
    "linalg.tensordot": (lambda a, b: linalg.tensordot(a, b, 1), "2x3 3x2"),
    "linalg.tensorsolve": (linalg.tensorsolve, "2x1x2 2x1"),
    "linalg.vecdot": (linalg.vecdot, "2x3 3"),
    "F.binary_cross_entropy": (F.binary_cross_entropy, "2x3% 2x3% 3+"),
    "F.binary_cross_entropy_with_logits": (
        lambda x, y, w, p: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=p),
        "2x3 2x3% 3+ 3+",
    ),
    "F.cdist": (F.cdist, "2x3 4x3"),
    "F.cosine_embedding_loss": (F.cosine_embedding_loss, "2x3 2x3 2"),
    "F.cosine_similarity": (F.cosine_similarity, "2x3 2x3"),
    "F.gaussian_nll_loss": (F.gaussian_nll_loss, "2x3 2x3 2x3+"),
    "F.kl_div": (F.kl_div, "2x3 2x3%"),
    "F.margin_ranking_loss": (F.margin_ranking_loss, "2x3 2x3 2x3"),
    "F.pairwise_distance": (F.pairwise_distance, "2x3 2x3"),
    "F.prelu": (F.prelu, "2x3 3"),
    "F.triplet_margin_loss": (F.triplet_margin_loss, "2x3 2x3 2x3"),
    "nn.BCEWithLogitsLoss": (
        lambda x, y, w: nn.BCEWithLogitsLoss(w, pos_weight=w)(x, y), "2x3! 2x3% 3+",
    ),
    "nn.CrossEntropyLoss": (lambda x, w: nn.CrossEntropyLoss(w)(x, [2, 0]), "2x3! 3+"),
    "nn.NLLLoss": (lambda x, w: nn.NLLLoss(w)(x, [2, 0]), "2x3! 3+"),
    "NumPy's functions": (lambda x, y: np.concatenate([np.add(x, y), x]), "3! 3"),
}  # fmt: skip

# Functions whose other operands are not numbers beside the first: what they are, and the names.
OTHERWISE = {
    "where holds bools": words("""
        all any amax amin max mean min prod std sum var
    """),
    "integers": words("""
        bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift left_shift
        right_shift Tensor.__and__ Tensor.__or__ Tensor.__xor__ Tensor.__lshift__
        Tensor.__rshift__ Tensor.__rand__ Tensor.__ror__ Tensor.__rxor__ Tensor.__rlshift__
        Tensor.__rrshift__ Tensor.__iand__ Tensor.__ior__ Tensor.__ixor__ Tensor.__ilshift__
        Tensor.__irshift__
    """),
    "lengths, counts or indices": words("""
        bincount broadcast_shapes getitem repeat take take_along_axis Tensor.__getitem__
        Tensor.gather Tensor.permute Tensor.repeat Tensor.reshape Tensor.take Tensor.transpose
        Tensor.view
    """),
    "not operands": words("""
        functional_call ggnvp gradcheck hvp jvp linearize result_type vjp
        Tensor.backward Tensor.to Tensor.to_device
    """),
}
