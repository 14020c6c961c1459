"""Ops in PyTorch's own test table that the library has: values, first and second derivatives.

An entry of the table is an op with samples of its arguments. It is served where the library has it
under PyTorch's name, or under NumPy's in one call, and does most of its samples; the others must
be refused. A sample that gives another value or gradient fails the test.

    PYTHONPATH=.:FOLDER_OF_PYTORCH python -m tests.parity.test_op_db [SAMPLES [NAME ...]]

prints the entries that are not served, and why.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("expecttest", reason="PyTorch's table of ops needs expecttest")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_utils import set_rng_seed

F, linalg = nn.functional, tg.linalg
SAMPLES = 4  # samples of an entry
SERVED = 310  # entries at least
Function = Callable[..., Any]


def _sum_of_axes(f: Function) -> Function:
    """Return variance or deviation with PyTorch's divisor, n - 1, and its positional flag."""

    def call(x: Any, axis: Any = None, unbiased: bool = True, keepdims: bool = False,
             correction: Any = None) -> Any:  # fmt: skip
        if isinstance(axis, bool):
            axis, unbiased = None, axis
        ddof = int(unbiased) if correction is None else correction
        return f(x, axis, ddof=ddof, keepdims=keepdims)

    return call


def _matrix_norm(x: Any, ord: Any = "fro", axis: Any = (-2, -1), keepdims: bool = False) -> Any:
    return linalg.norm(x, ord, axis, keepdims)


def _norm(x: Any, p: Any = "fro", axis: Any = None, keepdims: bool = False) -> Any:
    if p in ("fro", "nuc"):
        return linalg.norm(x, p, axis, keepdims)
    return tg.norm(x, axis, ord=p, keepdims=keepdims)


def _solve(a: Any, b: Any) -> Any:
    if b.ndim == a.ndim - 1 and b.ndim > 1:
        raise TypeError("solve: a batch of vectors, which NumPy takes for a matrix")
    return linalg.solve(a, b)


def _svd(x: Any, full_matrices: bool = True) -> Any:
    if full_matrices and x.shape[-1] != x.shape[-2]:
        raise TypeError("svd: any basis of the rest is right")
    return map(abs, linalg.svd(x, full_matrices))


def _with_columns(u: Any, s: Any, vh: Any) -> Any:
    return u, s, tg.matrix_transpose(vh)


def _cross_entropy(x: Any, target: Any, **options: Any) -> Any:
    return F.cross_entropy(x, target, axis=min(1, x.ndim - 1), **options)


def _nll_loss(x: Any, target: Any, **options: Any) -> Any:
    return F.nll_loss(x, target, axis=min(1, x.ndim - 1), **options)


def _attention(q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False,
               dropout_p: float = 0.0, scale: Any = None) -> Any:  # fmt: skip
    if dropout_p or (is_causal and q.shape[-2] != k.shape[-2]):
        raise TypeError("attention: random, and the last query sees the last key")
    return tg.attention(q, k, v, attn_mask, causal=is_causal, scale=scale)


def _pad(x: Any, widths: Any, value: float = 0.0) -> Any:
    return tg.pad(x, _widths(x, widths), "constant", constant_values=value)


def _widths(x: Any, widths: Any) -> Any:
    pairs = [tuple(widths[i : i + 2]) for i in range(0, len(widths), 2)][::-1]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs


def _masked(f: Function) -> Function:
    def call(x: Any, axis: Any = None, keepdims: bool = False, mask: Any = None) -> Any:
        return f(x, axis, keepdims=keepdims, where=mask)

    return call


def _masked_variance(f: Function) -> Function:
    def call(x: Any, axis: Any = None, unbiased: bool = True, keepdims: bool = False,
             mask: Any = None, correction: Any = None) -> Any:  # fmt: skip
        ddof = int(unbiased) if correction is None else correction
        return f(x, axis, ddof=ddof, keepdims=keepdims, where=mask)

    return call


def _masked_extremum(f: Function, initial: float) -> Function:
    def call(x: Any, axis: Any = None, keepdims: bool = False, mask: Any = None) -> Any:
        return f(x, axis, keepdims=keepdims, initial=initial, where=mask)

    return call


def _split(x: Any, sizes: Any, axis: int = 0) -> Any:
    if isinstance(sizes, int):
        return tg.split(x, list(range(sizes, x.shape[axis], sizes)), axis)
    return tg.split(x, list(itertools.accumulate(sizes))[:-1], axis)


def _layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5) -> Any:
    if len(shape) > 1:
        raise TypeError("layer_norm: takes one axis")
    return F.layer_norm(x, weight, bias, eps=eps)


def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    if len(shape) > 1:
        raise TypeError("rms_norm: takes one axis")
    return F.rms_norm(x, weight, eps=eps)


def _divide(a: Any, b: Any, rounding_mode: str) -> Any:
    if rounding_mode != "floor":
        raise TypeError("divide: no such mode")
    return tg.floor_divide(a, b)


# PyTorch's name: one call of ours. Without a line an op has the same name in both.
CALLS: dict[str, Function] = {
    "__rdiv__": lambda x, other: tg.divide(other, x),
    "__rpow__": lambda x, other: tg.power(other, x),
    "__rsub__": lambda x, other: tg.subtract(other, x),
    "alias_copy": tg.positive,
    "broadcast_tensors": tg.broadcast_arrays,
    "cat": lambda xs, axis=0: tg.concatenate(xs, axis),
    "bmm": tg.matmul,
    "cdist": lambda x, y, p=2.0, compute_mode=None: F.cdist(x, y, p=p),
    "chunk": lambda x, parts, axis=0: _split(x, max(1, -(-x.shape[axis] // parts)), axis),
    "cholesky": linalg.cholesky,
    "contiguous": tg.copy,
    "clamp": lambda x, min=None, max=None: tg.clip(x, min, max),
    "clamp_max": tg.minimum,
    "clamp_min": tg.maximum,
    "conj_physical": tg.conj,
    "constant_pad_nd": _pad,
    "cov": lambda x, correction=1, fweights=None, aweights=None: _no_weights(
        fweights, aweights, tg.cov(x, ddof=correction)),
    "diagonal_copy": tg.diagonal,
    "div/floor_rounding": _divide,
    "div/no_rounding_mode": tg.divide,
    "einsum": lambda xs, subscripts: tg.einsum(subscripts, *xs),
    "expand": lambda x, *shape: tg.broadcast_to(x, _whole_shape(x, shape)),
    "expand_copy": lambda x, *shape: tg.broadcast_to(x, _whole_shape(x, shape)),
    "expand_as": lambda x, other: tg.broadcast_to(x, other.shape),
    "float_power": tg.power,
    "fft.fftshift": lambda x, axis=None: tg.fft.fftshift(x, axis),
    "fft.ifftshift": lambda x, axis=None: tg.fft.ifftshift(x, axis),
    "H": tg.transpose,
    "mH": tg.matrix_transpose,
    "index_select": lambda x, axis, index: tg.take(x, index, axis),
    "logsumexp": lambda x, axis, keepdims=False: tg.logsumexp(x, axis, keepdims=keepdims),
    "linalg.matrix_norm": _matrix_norm,
    "linalg.solve": _solve,
    "linalg.svd": _svd,
    "linalg.tensorsolve": lambda a, b, axis=None: linalg.tensorsolve(a, b, axis),
    "linalg.vander": lambda x, N=None: tg.vander(x, N, increasing=True),
    "masked.amax": _masked_extremum(tg.max, -np.inf),
    "masked.amin": _masked_extremum(tg.min, np.inf),
    "masked.mean": _masked(tg.mean),
    "masked.prod": _masked(tg.prod),
    "masked.std": _masked_variance(tg.std),
    "masked.sum": _masked(tg.sum),
    "masked.var": _masked_variance(tg.var),
    "max/binary": tg.maximum,
    "min/binary": tg.minimum,
    "meshgrid/list_of_tensors": lambda xs, indexing="ij": tg.meshgrid(*xs, indexing=indexing),
    "mm": tg.matmul,
    "movedim": tg.moveaxis,
    "msort": lambda x: tg.sort(x, 0),
    "mul": tg.multiply,
    "mv": tg.matmul,
    "nanquantile": lambda x, q, axis=None, keepdims=False, interpolation="linear": tg.nanquantile(
        x, q, axis, method=interpolation, keepdims=keepdims),
    "narrow": lambda x, axis, start, length: x[_place(x, axis, slice(start, start + length))],
    "narrow_copy": lambda x, axis, start, length: x[_place(x, axis, slice(start, start + length))],
    "neg": tg.negative,
    "nn.functional.cross_entropy": _cross_entropy,
    "nn.functional.layer_norm": _layer_norm,
    "nn.functional.nll_loss": _nll_loss,
    "nn.functional.pad/circular": lambda x, widths, mode: tg.pad(x, _widths(x, widths), "wrap"),
    "nn.functional.pad/reflect": lambda x, widths, mode: tg.pad(x, _widths(x, widths), "reflect"),
    "nn.functional.pad/replicate": lambda x, widths, mode: tg.pad(x, _widths(x, widths), "edge"),
    "nn.functional.pad/constant": lambda x, widths, mode="constant", value=0.0: _pad(
        x, widths, value or 0.0),
    "nn.functional.rms_norm": _rms_norm,
    "nn.functional.scaled_dot_product_attention": _attention,
    "norm": _norm,
    "permute_copy": tg.permute_dims,
    "pinverse": linalg.pinv,
    "pow": tg.power,
    "qr": linalg.qr,
    "quantile": lambda x, q, axis=None, keepdims=False, interpolation="linear": tg.quantile(
        x, q, axis, method=interpolation, keepdims=keepdims),
    "repeat_interleave": lambda x, repeats, axis=None: tg.repeat(x, repeats, axis),
    "repeat": tg.tile,
    "reshape_as": lambda x, other: tg.reshape(x, other.shape),
    "resolve_conj": tg.positive,
    "resolve_neg": tg.positive,
    "rsub": lambda x, other: tg.subtract(other, x),
    "select": lambda x, axis, index: tg.take(x, index, axis),
    "sgn": tg.sign,
    "slice": lambda x, axis=0, start=None, end=None, step=1: x[
        _place(x, axis, slice(start, end, step))],
    "special.entr": tg.entr,
    "special.ndtr": tg.ndtr,
    "special.xlog1py": tg.xlog1py,
    "split": _split,
    "split/list_args": _split,
    "split_with_sizes": _split,
    "split_with_sizes_copy": _split,
    "squeeze_copy": tg.squeeze,
    "std": _sum_of_axes(tg.std),
    "sub": tg.subtract,
    "linalg.eigh": lambda x, UPLO="L": map(abs, linalg.eigh(x, UPLO)),
    "svd": lambda x, some=True: _with_columns(*_svd(x, not some)),
    "t": tg.transpose,
    "t_copy": tg.transpose,
    "take_along_dim": lambda x, index, axis=None: tg.take_along_axis(x, index, axis),
    "tensor_split": lambda x, cuts, axis=0: tg.array_split(x, _cuts(cuts), axis),
    "tensordot": lambda x, y, axis=2: tg.tensordot(x, y, axis),
    "transpose": tg.swapaxes,
    "transpose_copy": tg.swapaxes,
    "trapz": tg.trapezoid,
    "topk": lambda x, k, axis=-1, largest=True: tg.topk(x, k, axis, largest=largest),
    "unbind": lambda x, axis=0: tg.unstack(x, axis=axis),
    "unbind_copy": lambda x, axis=0: tg.unstack(x, axis=axis),
    "unflatten": lambda x, axis, sizes: tg.reshape(x, _unflattened(x, axis, sizes)),
    "unfold_copy": Tensor.unfold,
    "unsafe_chunk": lambda x, parts, axis=0: _split(x, max(1, -(-x.shape[axis] // parts)), axis),
    "unsafe_split": _split,
    "unsqueeze": tg.expand_dims,
    "unsqueeze_copy": tg.expand_dims,
    "var": _sum_of_axes(tg.var),
    "view_as": lambda x, other: tg.reshape(x, other.shape),
    "view_copy": lambda x, *shape: tg.reshape(x, *shape),
    "where": lambda x, condition, other: tg.where(condition, x, other),
}  # fmt: skip
# Names that mean another thing in NumPy, random numbers, and what no float64 result shows.
OTHERS = {
    "max/reduction_with_dim", "min/reduction_with_dim", "median", "nanmedian", "sort",
    "nextafter", "bfloat16", "half", "float", "nn.functional.dropout", "linalg.inv_ex", "fill",
    "linalg.pinv/singular", "nn.functional.linear_cross_entropy/chunked", "to",
    "nn.functional.linear_cross_entropy/chunked_none", "nn.functional.linear_cross_entropy",
}  # fmt: skip
# Vectors are right with either sign: magnitudes are compared.
WITH_SIGNS = {"svd", "linalg.svd", "linalg.eigh"}
# Name: why second derivatives differ.
FIRST_ONLY = {
    "linalg.norm/subgradients_at_zero": "a norm has none at 0, where ours is 0 and PyTorch's NaN"
}
KEYWORDS = {"dim": "axis", "keepdim": "keepdims", "dims": "axis"}


def _no_weights(fweights: Any, aweights: Any, result: Any) -> Any:
    if fweights is not None or aweights is not None:
        raise TypeError("cov: takes no weights")
    return result


def _whole_shape(x: Any, shape: Any) -> Any:
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    lengths = (1,) * (len(shape) - x.ndim) + tuple(x.shape)
    return tuple(n if n != -1 else known for n, known in zip(shape, lengths, strict=True))


def _place(x: Any, axis: int, key: Any) -> Any:
    return (slice(None),) * (axis % x.ndim) + (key,)


def _cuts(cuts: Any) -> Any:
    return cuts.numpy().tolist() if isinstance(cuts, Tensor) else cuts


def _unflattened(x: Any, axis: int, sizes: Any) -> Any:
    axis %= x.ndim
    return (*x.shape[:axis], *sizes, *x.shape[axis + 1 :])


def name_of(op: Any) -> str:
    """Return the name of an entry."""
    return str(op.name) + (f"/{op.variant_test_name}" if op.variant_test_name else "")


def function_of(op: Any) -> Function | None:
    """Return the library's function for an entry."""
    name = name_of(op)
    if name in OTHERS:
        return None
    if name in CALLS or op.name in CALLS:
        return CALLS.get(name) or CALLS[op.name]
    *module, last = op.name.split(".")
    place: Any = {"linalg": linalg, "nn.functional": F, "": tg}.get(".".join(module))
    found = getattr(place, last, None)
    if found is None and place is tg:
        found = getattr(Tensor, last, None)
        found = found.fget if isinstance(found, property) else found
    return found if callable(found) and not inspect.isclass(found) else None


def converted(value: Any, leaves: dict[int, tuple[Any, Tensor]]) -> Any:
    """Return arguments of ours for those of PyTorch; tensors are collected."""
    if isinstance(value, torch.Tensor):
        if id(value) not in leaves:
            array = value.detach().numpy().copy()
            leaves[id(value)] = value, Tensor(array, requires_grad=bool(value.requires_grad))
        return leaves[id(value)][1]
    if isinstance(value, (list, tuple)):
        items = [converted(each, leaves) for each in value]
        return items if isinstance(value, list) else tuple(items)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def flat(values: Any) -> Iterator[Any]:
    """Yield nested results."""
    if isinstance(values, (list, tuple, map)):
        for each in values:
            yield from flat(each)
    else:
        yield values


def outcome(op: Any, f: Function, sample: Any, twice: bool = True) -> tuple[str, str]:
    """Return "right", "refused" or "wrong" for a sample, and why.

    Args:
        op: an entry; sample: one of its samples.
        f: the library's function.
        twice: whether second derivatives are compared.
    """
    leaves: dict[int, tuple[Any, Tensor]] = {}
    name = name_of(op)
    theirs = list(flat(op(sample.input, *sample.args, **sample.kwargs)))
    if any(each.is_complex() for each in theirs):
        return "refused", "complex"
    if name in WITH_SIGNS:
        theirs = list(map(abs, theirs))
    try:
        ours = results(f, sample, leaves)
    except Exception as error:
        return "refused", f"{type(error).__name__}: {error}"
    if [y.shape for y in ours] != [tuple(y.shape) for y in theirs]:
        return "wrong", f"shapes {[y.shape for y in ours]}"
    rng, their_loss = np.random.default_rng(0), torch.zeros((), dtype=torch.float64)
    weights: dict[int, Any] = {}  # by the place of the result
    for place, (y, expected) in enumerate(zip(ours, theirs, strict=True)):
        values, right = y.numpy().astype("float64"), expected.detach().numpy().astype("float64")
        if not np.allclose(values, right, 1e-6, 1e-8, equal_nan=True):
            return "wrong", f"value {abs(values - right).max()}"
        if expected.requires_grad:
            weights[place] = np.asarray(rng.standard_normal(y.shape))
            their_loss = their_loss + (expected * torch.tensor(weights[place])).sum()
    loss = weighted(ours, weights)
    pairs = [(x, mine) for x, mine in leaves.values() if x.requires_grad]
    if not their_loss.requires_grad or not pairs:
        return "right", ""
    xs = [x for x, _ in pairs]
    undefined = any(y.isnan().any() for y in theirs)  # such as the mean of no elements
    twice = twice and op.supports_gradgrad and name not in FIRST_ONLY and not undefined
    grads = torch.autograd.grad(their_loss, xs, allow_unused=True, create_graph=twice)
    if loss.requires_grad:
        try:
            loss.backward()
        except tg.errors.GradError as error:
            return "refused", str(error)
    for (x, mine), grad in zip(pairs, grads, strict=True):
        found = np.zeros(x.shape) if mine.grad is None else np.asarray(mine.grad)
        right = np.zeros(x.shape) if grad is None else grad.numpy(force=True)
        if not np.allclose(found, right, 1e-5, 1e-7, equal_nan=True):
            return "wrong", f"gradient {abs(found - right).max()}"
    if not twice:
        return "right", ""
    why = second(f, sample, weights, pairs, grads)
    return ("wrong", why) if why else ("right", "")


def results(f: Function, sample: Any, leaves: dict[int, tuple[Any, Tensor]]) -> list[Tensor]:
    """Return what our function returns for a sample, flat."""
    args = [converted(each, leaves) for each in (sample.input, *sample.args)]
    options = {k: v for k, v in sample.kwargs.items() if k != "memory_format"}
    options = {KEYWORDS.get(k, k): converted(v, leaves) for k, v in options.items()}
    found = flat(f(*args, **options))
    return [y if isinstance(y, Tensor) else Tensor(np.asarray(y)) for y in found]


def weighted(ys: Sequence[Tensor], weights: dict[int, Any]) -> Tensor:
    """Return the sum of some results, each element with its weight."""
    parts = [(ys[place] * weight).sum() for place, weight in weights.items()]
    return sum(parts, Tensor(np.zeros(())))


def second(f: Function, sample: Any, weights: Any, pairs: Any, grads: Any) -> str:
    """Return what is wrong with the tangent or a product with the Hessian; "" for nothing.

    The products are reverse over forward, reverse over reverse and forward over reverse.
    """
    rng = np.random.default_rng(1)
    directions = [np.asarray(rng.standard_normal(mine.shape)) for _, mine in pairs]

    def loss(*xs: Tensor) -> Tensor:
        leaves = {id(x): (x, mine) for (x, _), mine in zip(pairs, xs, strict=True)}
        return weighted(results(f, sample, leaves), weights)

    slope = sum(
        (g * torch.tensor(v)).sum() for g, v in zip(grads, directions, strict=True) if g is not None
    )
    products = [None] * len(pairs)
    if isinstance(slope, torch.Tensor) and slope.requires_grad:
        products = torch.autograd.grad(slope, [x for x, _ in pairs], allow_unused=True)
    right = [
        np.zeros(x.shape) if h is None else h.numpy(force=True)
        for (x, _), h in zip(pairs, products, strict=True)
    ]
    leaves = [Tensor(mine.data, requires_grad=True) for _, mine in pairs]
    tangents = [Tensor(v) for v in directions]
    _, ours = tg.jvp(loss, leaves, tangents)
    if not np.isclose(ours.item(), float(slope), 1e-5, 1e-7, equal_nan=True):
        return f"tangent {ours.item()}, expected {float(slope)}"

    gradient = tg.grad(loss, tuple(range(len(leaves))))

    def product(*xs: Tensor) -> Tensor:
        parts = [(g * v).sum() for g, v in zip(gradient(*xs), tangents, strict=True)]
        return sum(parts[1:], parts[0])

    if ours.requires_grad:
        ours.backward()
    found = {
        "reverse over forward": [np.zeros(x.shape) if x.grad is None else x.grad for x in leaves],
        "reverse over reverse": tg.grad(product, tuple(range(len(leaves))))(*leaves),
        "forward over reverse": tg.jvp(gradient, leaves, tangents)[1],
    }
    for mode, each in found.items():
        for mine, theirs in zip(each, right, strict=True):
            values = np.asarray(mine)
            if not np.allclose(values, theirs, 1e-5, 1e-6, equal_nan=True):
                return f"Hessian-vector product {mode}: {abs(values - theirs).max()}"
    return ""


def entries(samples: int) -> Iterator[tuple[str, Counter[str], dict[str, str]]]:
    """Yield name, outcomes and reasons of each differentiable entry that has a function."""
    for op in op_db:
        if not op.supports_autograd or torch.float64 not in op.dtypes:
            continue
        f = function_of(op)
        if f is None:
            continue
        set_rng_seed(0)
        counts: Counter[str] = Counter()
        reasons: dict[str, str] = {}
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):  # others: once only
            warnings.simplefilter("ignore")
            # A seed for each sample takes longer than all else.
            drawn = op.sample_inputs("cpu", torch.float64, requires_grad=True, set_seed=False)
            found = list(drawn)
            for place, sample in enumerate(found[:: -(-len(found) // samples)]):  # evenly spread
                twice = samples > SAMPLES or place % 2 == 0  # half of a few, for the time
                kind, why = outcome(op, f, sample, twice)
                counts[kind] += 1
                reasons.setdefault(kind, why)
        yield name_of(op), counts, reasons


def is_served(counts: Counter[str]) -> bool:
    """Whether most samples are right, and none is wrong."""
    return counts["right"] > 0 and not counts["wrong"] and counts["refused"] <= counts["right"]


@pytest.mark.parametrize(
    "samples", [SAMPLES, pytest.param(1000, id="all", marks=pytest.mark.nightly)]
)
def test_values_and_derivatives_are_pytorchs(samples: int) -> None:
    found = list(entries(samples))
    assert {name: reasons["wrong"] for name, counts, reasons in found if counts["wrong"]} == {}
    assert sum(is_served(counts) for _, counts, _ in found) >= SERVED


def main() -> None:
    """Print the entries that are not served, and the number of those that are."""
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else SAMPLES
    served = wrong = 0
    for name, counts, reasons in entries(samples):
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        served += is_served(counts)
        wrong += counts["wrong"] > 0
        if not is_served(counts):
            why = {kind: text[:200] for kind, text in reasons.items() if text}
            print(name, dict(counts), why)
    print(f"{served} served, {wrong} wrong")


if __name__ == "__main__":
    main()
