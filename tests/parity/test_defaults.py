"""Names that PyTorch has too: signatures, defaults and results with default arguments.

docs/start/coming-from-pytorch.md lists what differs; it and the tests have to agree. A row that is
missing there is printed by

    PYTHONPATH=.:FOLDER_OF_PYTORCH python -m tests.parity.test_defaults
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, data, nn, optim, random
from tests.parity.calls import arrays, as_tensors, call_of
from tests.parity.peers import REQUIRED, Argument, Peer, arguments, quoted
from tests.source_tree import ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

F, TF = nn.functional, torch.nn.functional
# Parameters of Python's own objects, or any arguments.
WITHOUT_SIGNATURE = {"Tensor", "finfo", "iinfo"}


def their_arguments(name: str, f: Any) -> list[Argument] | None:
    """Return the arguments of PyTorch's function: of Python, of its docstring or of its schema."""
    try:
        return arguments(f)
    except (ValueError, TypeError):
        pass
    first = (f.__doc__ or "").strip().split("\n")[0]
    found = re.match(r"[\w.]*\((.*?)\)\s*(->|$)", first)
    try:
        tree = ast.parse(f"def f({found[1] if found else '?'}): ...").body[0]
    except SyntaxError:
        short = name.rpartition(".")[2]
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{short}"):
            return [
                Argument(a.name, a.default_value if a.has_default_value() else REQUIRED,
                         not a.kwarg_only)
                for a in schema.arguments
            ]  # fmt: skip
        return None
    assert isinstance(tree, ast.FunctionDef)
    places = tree.args.posonlyargs + tree.args.args
    lacking: list[Any] = [None] * (len(places) - len(tree.args.defaults))
    pairs = [
        *((a, d, True) for a, d in zip(places, lacking + tree.args.defaults, strict=True)),
        *((a, d, False) for a, d in zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True)),
    ]
    return [Argument(a.arg, _value(a, default), positional) for a, default, positional in pairs]


def _value(argument: ast.arg, default: ast.expr | None) -> Any:
    if (
        default is None
    ):  # a docstring writes `dim: Optional[int]` for an argument that may be absent
        optional = argument.annotation is not None and "Optional" in ast.unparse(
            argument.annotation
        )
        return None if optional else REQUIRED
    try:
        return ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)


PYTORCH = Peer(
    ROOT / "docs" / "start" / "coming-from-pytorch.md",
    [
        ("nn.functional.", F, TF),
        ("nn.init.", nn.init, torch.nn.init),
        ("nn.", nn, torch.nn),
        ("optim.lr_scheduler.", optim.lr_scheduler, torch.optim.lr_scheduler),
        ("optim.", optim, torch.optim),
        ("optim.", optim, torch.nn.utils),
        ("data.", data, torch.utils.data),
        ("linalg.", tg.linalg, torch.linalg),
        ("fft.", tg.fft, torch.fft),
        ("", tg, torch),
        ("", tg, torch.func),
        ("Tensor.", Tensor, torch.Tensor),
    ],
    their_arguments,
    frozenset({"size_average", "reduce", "inplace", "out", "_stacklevel"}),
    short=("nn.functional.", ""),
)


def test_the_page_lists_what_differs_in_signatures() -> None:
    known = {name for name, *_ in PYTORCH.signatures()}
    assert {name for name, *_ in PYTORCH.pairs()} - known <= WITHOUT_SIGNATURE
    assert PYTORCH.differences() == PYTORCH.page_rows()


RNG = np.random.default_rng(0)
X, Y, Z = (RNG.standard_normal((4, 6)) * 3 for _ in range(3))
X[0, :3] = 21, 25, -25  # beyond softplus's threshold
P, IDS, SIGNS = RNG.random((4, 6)), RNG.integers(0, 6, 4), np.sign(Y)
LOGS = np.log(P / P.sum(1, keepdims=True))
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ["celu", "elu", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
         "leaky_relu", "log_softmax", "logsigmoid", "mish", "normalize", "relu", "relu6", "selu",
         "sigmoid", "silu", "softmax", "softmin", "softplus", "softshrink", "softsign", "tanh",
         "tanhshrink"], (X,)),
    **dict.fromkeys(
        ["cosine_similarity", "huber_loss", "l1_loss", "linear", "mse_loss", "pairwise_distance",
         "smooth_l1_loss"], (X, Y)),
    "binary_cross_entropy": (P, P[::-1].copy()),
    "binary_cross_entropy_with_logits": (X, P, Z),
    "cosine_embedding_loss": (X, Y, SIGNS[:, 0].copy()),
    "cross_entropy": (X, np.array([1, -100, 5, 0])),
    "gaussian_nll_loss": (X, Y, P),
    "group_norm": (X, 2),
    "hinge_embedding_loss": (X, SIGNS),
    "kl_div": (LOGS, P),
    "margin_ranking_loss": (X, Y, SIGNS),
    "nll_loss": (LOGS, np.array([1, -100, 5, 0])),
    "one_hot": (IDS,),
    "poisson_nll_loss": (X, P),
    "prelu": (X, np.array([0.3])),
    "soft_margin_loss": (X, SIGNS),
    "threshold": (X, 0.1, 2.0),
    "triplet_margin_loss": (X, Y, Z),
}  # fmt: skip
# Arguments in another order, of ours and of PyTorch.
REORDERED: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "dropout": ((X, 0.5, False), (X, 0.5, False)),
    "embedding": ((X, IDS % 4), (IDS % 4, X)),
    "layer_norm": ((X / 1e3,), (X / 1e3, (6,))),
    "rms_norm": ((X / 1e7,), (X / 1e7, (6,))),
    "linear_cross_entropy": ((X, Y, IDS % 4), (X, Y, IDS % 4)),
}


def of_ours(arguments: tuple[Any, ...]) -> list[Any]:
    return [Tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]


def of_torch(arguments: tuple[Any, ...]) -> list[Any]:
    return [torch.tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]


def test_every_function_is_called_with_its_defaults() -> None:
    both = {name for name in F.__all__ if hasattr(TF, name)}
    assert both <= {*FUNCTIONS, *REORDERED}


@pytest.mark.filterwarnings("ignore:Implicit dimension choice", "ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", [n for n in (*FUNCTIONS, *REORDERED) if hasattr(TF, n)])
def test_results_with_default_arguments(name: str) -> None:
    ours, theirs = REORDERED.get(name) or (FUNCTIONS[name],) * 2
    y = getattr(F, name)(*of_ours(ours))
    expected = getattr(TF, name)(*of_torch(theirs)).numpy()
    assert y.dtype == expected.dtype
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-12, atol=1e-13)


# Array functions whose results differ, or whose call with default arguments PyTorch refuses.
LISTED = {"equal", "histogram", "median", "meshgrid", "nanmedian", "nonzero", "sort", "split",
          "std", "var"}  # fmt: skip
REFUSED = {"can_cast", "clip", "cumprod", "cumsum", "dot", "flip", "imag", "isin", "linspace",
           "logspace", "logsumexp", "outer", "promote_types", "result_type", "tile", "transpose",
           "tril_indices", "triu_indices", "vdot"}  # fmt: skip
ARBITRARY = {"empty", "empty_like", "linalg.eigh"}  # memory, signs of vectors


def in_torch(value: Any) -> Any:
    """Return an argument of PyTorch for one of NumPy."""
    if isinstance(value, list):
        return [in_torch(part) for part in value]
    if isinstance(value, np.dtype):
        return getattr(torch, str(value))
    return torch.tensor(value) if isinstance(value, np.ndarray) else value


def arrays_of(result: Any) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of one result of PyTorch, or of several."""
    if isinstance(result, (list, tuple)):
        return [array for part in result for array in arrays_of(part)]
    return [result.resolve_conj().numpy() if isinstance(result, torch.Tensor) else np.array(result)]


@pytest.mark.filterwarnings("ignore")
def test_results_of_array_functions_with_default_arguments() -> None:
    differing, refused = set(), set()
    for name, f, peer in PYTORCH.pairs():
        of_arrays = name.startswith(("linalg.", "fft.")) or "." not in name
        if not of_arrays or isinstance(f, type):
            continue
        try:
            call = call_of(name, f)
        except KeyError:  # it takes other arguments than NumPy's functions
            continue
        try:
            expected = arrays_of(peer(*(in_torch(value) for value in call)))
        except (TypeError, RuntimeError):
            refused.add(name)
            continue
        found = arrays(f(*as_tensors(call)))
        same = [(a.shape, a.dtype) for a in found] == [(b.shape, b.dtype) for b in expected]
        if name not in ARBITRARY and not (
            same and all(a.dtype == object or np.allclose(a, b, 1e-6, 1e-6, equal_nan=True)
                         for a, b in zip(found, expected, strict=True))
        ):  # fmt: skip
            differing.add(name)
    assert (differing, refused) == (LISTED, REFUSED)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("embedding", (IDS % 4, X)), ("layer_norm", (X, (6,))), ("rms_norm", (X, (6,)))],
)
def test_another_order_of_arguments_is_an_error(name: str, arguments: tuple[Any, ...]) -> None:
    getattr(TF, name)(*of_torch(arguments))
    with pytest.raises(tg.errors.TensorgradError):
        getattr(F, name)(*of_ours(arguments))


def test_dropout_scales_by_the_keep_probability() -> None:
    for y in (F.dropout(tg.ones(100)), nn.Dropout()(tg.ones(100))):
        assert set(y.tolist()) == {0.0, 2.0}


def test_layers_start_as_those_of_pytorch() -> None:
    random.seed(0)
    for ours, theirs in (
        (nn.Linear(300, 400), torch.nn.Linear(300, 400)),
        (nn.Embedding(300, 400), torch.nn.Embedding(300, 400)),
        (nn.LayerNorm(4), torch.nn.LayerNorm(4)),
        (nn.RMSNorm(4), torch.nn.RMSNorm(4)),
        (nn.GroupNorm(2, 4), torch.nn.GroupNorm(2, 4)),
    ):
        names = [name for name, _ in theirs.named_parameters()]
        assert [name for name, _ in ours.named_parameters()] == names
        for (name, p), (_, q) in zip(
            ours.named_parameters(), theirs.named_parameters(), strict=True
        ):
            mine, peer = p.numpy(), q.detach().numpy()
            assert mine.shape == peer.shape
            few = 0.1 if "bias" in name else 0.01
            assert math.isclose(mine.std(), peer.std(), rel_tol=few)
            assert math.isclose(abs(mine).max(), abs(peer).max(), rel_tol=20 * few)
    for name in ("uniform_", "normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
                 "kaiming_normal_"):  # fmt: skip
        mine = getattr(nn.init, name)(tg.empty((200, 300))).numpy()
        peer = getattr(torch.nn.init, name)(torch.empty(200, 300)).numpy()
        assert math.isclose(mine.std(), peer.std(), rel_tol=0.02), name
        assert abs(mine.mean() - peer.mean()) < 0.02 * peer.std(), name


def _values_and_indices(name: str) -> Callable[[], bool]:
    def check() -> bool:
        x = np.array([[1.0, 4.0], [3.0, 2.0]])
        ours, theirs = getattr(Tensor(x), name)(0), getattr(torch.tensor(x), name)(0)
        return np.array_equal(ours.numpy(), theirs.values.numpy())

    return check


def _norm_of_infinity() -> bool:
    x, y = Tensor(np.ones(2), requires_grad=True), torch.ones(2, requires_grad=True)
    x.grad, y.grad = np.array([np.inf, 1.0]), torch.tensor([math.inf, 1.0])
    optim.clip_grad_norm([x], 1.0)
    torch.nn.utils.clip_grad_norm_([y], 1.0)
    return bool(x.grad.tolist() == [math.inf, 1.0] and y.grad[1] == 0)


def _classes() -> bool:
    x, ids = RNG.standard_normal((2, 5, 5)), RNG.integers(0, 5, (2, 5))
    ours, theirs = F.cross_entropy(Tensor(x), ids), TF.cross_entropy(*of_torch((x, ids)))
    same = F.cross_entropy(Tensor(x), ids, axis=1)
    return bool(abs(ours.item() - theirs) > 1e-3 and abs(same.item() - theirs) < 1e-12)


def _seeds() -> bool:
    orders = [next(iter(data.DataLoader(list(range(9)), 9, shuffle=True))) for _ in range(2)]
    return bool((orders[0] == orders[1]).all()) and orders[0].tolist() != list(range(9))


ONE = np.array([[1.0, 2.0], [5.0, 9.0]])
T, U = Tensor(ONE), torch.tensor(ONE)
OTHER_RESULTS: dict[str, Callable[[], bool]] = {
    "nn.functional.cross_entropy(logits, targets)": _classes,
    "std(x)": lambda: (
        abs(tg.std(T).item() - torch.std(U, correction=0).item()) < 1e-12
        and tg.std(T, correction=1).item() == pytest.approx(torch.std(U).item())
        and tg.var(T, ddof=1).item() == pytest.approx(torch.var(U).item())
    ),
    "x.max(0)": lambda: _values_and_indices("max")() and _values_and_indices("min")(),
    "sort(x)": lambda: (tg.sort(T).numpy() == torch.sort(U)[0].numpy()).all(),
    "median(x)": lambda: all(
        (getattr(tg, name)(T).item(), getattr(torch, name)(U).item()) == (3.5, 2.0)
        for name in ("median", "nanmedian")
    ),
    "histogram(x)": lambda: (
        tg.histogram(T)[0].dtype == np.int64 and torch.histogram(U, 10)[0].dtype == torch.float64
    ),
    "split(x, 2)": lambda: len(tg.split(tg.ones(6), 2)) == 2 and len(torch.ones(6).split(2)) == 3,
    "x.repeat(2)": lambda: (
        (Tensor(ONE[0]).repeat(2).tolist() == [1, 1, 2, 2])
        and torch.tensor(ONE[0]).repeat(2).tolist() == [1, 2, 1, 2]
    ),
    "nonzero(x)": lambda: len(tg.nonzero(T)) == 2 and torch.nonzero(U).shape == (4, 2),
    "equal(x, y)": lambda: tg.equal(T, T).shape == (2, 2) and torch.equal(U, U) is True,
    "int64 x float32": lambda: (
        (tg.arange(2) * tg.ones(2)).dtype == "float64"
        and (torch.arange(2) * torch.ones(2)).dtype == torch.float32
    ),
    "optim.clip_grad_norm(parameters, 1.0)": _norm_of_infinity,
    "data.DataLoader(dataset, shuffle=True)": _seeds,
}


def test_the_page_lists_other_results() -> None:
    assert [quoted(row[0])[0] for row in PYTORCH.table("Other results of equal calls")] == [
        *OTHER_RESULTS
    ]


@pytest.mark.filterwarnings("ignore::tensorgrad.errors.WideningWarning")
@pytest.mark.parametrize("call", OTHER_RESULTS)
def test_results_that_the_page_lists(call: str) -> None:
    assert OTHER_RESULTS[call]()


if __name__ == "__main__":
    PYTORCH.print_missing_rows()
