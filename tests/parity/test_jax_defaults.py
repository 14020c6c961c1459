"""Names that JAX, Equinox and optax have too: signatures, defaults and results of equal calls.

docs/start/coming-from-jax-and-equinox.md lists what differs; it and the tests have to agree. A row
that is missing there is printed by

    PYTHONPATH=.:FOLDER_OF_JAX python -m tests.parity.test_jax_defaults
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, nn, optim
from tests.parity.calls import NOT_CALLED, X, Y, arrays, as_tensors, call_of
from tests.parity.peers import Argument, Peer, arguments, quoted
from tests.source_tree import ROOT

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # its first array takes most of a GPU's memory
jax: Any = pytest.importorskip("jax", reason="JAX is not installed")
eqx: Any = pytest.importorskip("equinox", reason="Equinox is not installed")
optax: Any = pytest.importorskip("optax", reason="optax is not installed")
jnp: Any = jax.numpy


def signature(name: str, f: Any) -> list[Argument] | None:
    """Return the arguments of a function; None where it does not tell."""
    try:
        found = arguments(f)
    except (ValueError, TypeError):
        return None
    for place, argument in enumerate(found):
        if argument.name in ("keepdims", "density") and argument.default is None:
            found[place] = argument._replace(default=False)
    return found


def spelled(ours: Any, theirs: Any, spelling: Callable[[str], str]) -> SimpleNamespace:
    """Return functions of another library under our names."""
    names = {name: getattr(theirs, spelling(name), None) for name in ours.__all__}
    return SimpleNamespace(**{name: f for name, f in names.items() if f is not None})


OPTAX = SimpleNamespace(**vars(optax), muon=optax.contrib.muon)
JAX = Peer(
    ROOT / "docs" / "start" / "coming-from-jax-and-equinox.md",
    [
        ("nn.functional.", nn.functional, jax.nn),
        ("nn.functional.", nn.functional, optax),
        ("nn.init.", nn.init, spelled(nn.init, jax.nn.initializers, lambda n: n.rstrip("_"))),
        ("nn.", nn, eqx.nn),
        ("optim.", optim, spelled(optim, OPTAX, str.casefold)),
        ("random.", tg.random, jax.random),
        ("linalg.", tg.linalg, jnp.linalg),
        ("fft.", tg.fft, jnp.fft),
        ("", tg, jnp),
        ("", tg, jax),
        ("Tensor.", Tensor, type(jnp.zeros(1))),
    ],
    signature,
    frozenset(
        {"out", "order", "kind", "device", "out_sharding", "precision", "preferred_element_type"}
    ),
    short=("nn.functional.", ""),
)
# Methods of arrays whose signature Python does not know.
WITHOUT_SIGNATURE = {"Tensor.clone"}


def test_the_page_lists_what_differs_in_signatures() -> None:
    known = {name for name, *_ in JAX.signatures()}
    assert {name for name, *_ in JAX.pairs()} - known <= WITHOUT_SIGNATURE
    assert JAX.differences() == JAX.page_rows()


CALLS: dict[str, tuple[Any, ...]] = {
    "cosine_similarity": (X[:, :, None], Y[:, :, None]),
    "huber_loss": (X, Y),
    "isin": (X, X[0].copy()),
    "one_hot": (np.array([1, 0, 2]), 3),
    "permute_dims": (X, (1, 0)),
}
# Functions of functions, of files, or with arguments of another kind.
OF_FUNCTIONS = {"checkpoint", "grad", "value_and_grad"}
FLOAT32 = {"empty", "eye", "fft.fftfreq", "fft.rfftfreq", "geomspace", "identity", "linspace",
           "logspace", "ones", "zeros"}  # fmt: skip
OF_64_BITS = {*FLOAT32, "digitize", "histogram", "nn.functional.one_hot", "searchsorted"}
OTHER_VALUES = {"nn.functional.cosine_similarity", "nn.functional.gelu", "nn.functional.huber_loss"}


def functions() -> list[tuple[str, Any, Any]]:
    """Return the functions of arrays that both have."""
    left_out = ("Tensor.", "random.", "nn.init.", "optim.")
    return [
        (name, f, peer)
        for name, f, peer in JAX.pairs()
        if not isinstance(f, type) and not name.startswith(left_out)
        and name not in NOT_CALLED | OF_FUNCTIONS
    ]  # fmt: skip


def of_jax(value: Any) -> Any:
    """Return an argument of JAX for one of NumPy."""
    if isinstance(value, list):
        return [of_jax(part) for part in value]
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


@pytest.mark.nightly  # JAX compiles each
@pytest.mark.filterwarnings("ignore")
def test_results_with_default_arguments() -> None:
    dtypes, values = set(), set()
    with jax.enable_x64(True):
        for name, f, peer in functions():
            short = name.removeprefix("nn.functional.")
            call = CALLS.get(short) or call_of(short, f)
            found = arrays(f(*as_tensors(call)))
            expected = arrays(peer(*(of_jax(value) for value in call)))
            assert len(found) == len(expected), name
            if [a.dtype for a in found] != [a.dtype for a in expected]:
                dtypes.add(name)
            elif name not in ("empty_like",):
                for a, b in zip(found, expected, strict=True):
                    if a.dtype != object and not (
                        a.shape == b.shape and np.allclose(a, b, 1e-11, 1e-12, equal_nan=True)
                    ):
                        values.add(name)
    assert (dtypes, values) == (OF_64_BITS, OTHER_VALUES)


def _int32(*results: Any) -> bool:
    return all(result.dtype == np.int32 for result in results)


def _int64(*results: Any) -> bool:
    return all(result.dtype == np.int64 for result in results)


def _float64(*results: Any) -> bool:
    return all(result.dtype == np.float64 for result in results)


def _float32(*results: Any) -> bool:
    return all(result.dtype == np.float32 for result in results)


def _of_64_bits() -> bool:
    with jax.enable_x64(True):
        return _float64(jnp.zeros(3), jnp.linspace(0, 1)) and _float32(tg.zeros(3))


def _raises(f: Callable[[], Any], name: str) -> bool:
    with pytest.raises(Exception) as caught:  # noqa: PT011  its name is compared
        f()
    return type(caught.value).__name__ == name


def _assigned(x: Any) -> Any:
    x[0] = 5
    return x


def _gradients(name: str, *more: Any) -> tuple[float, float]:
    """Return the first element of both gradients at zero."""
    found = []
    for module in (tg, jnp):
        f: Any = module
        for part in name.split("."):
            f = getattr(f, part)
        ours = module is tg
        x = tg.zeros(2) if ours else jnp.zeros(2)
        grad = (tg if ours else jax).grad(lambda x, f=f: f(x, *more).sum())
        found.append(float(grad(x)[0]))
    return found[0], found[1]


ONES, KEY = np.ones(2, np.float32), jax.random.key(0)
RESULTS: dict[str, Callable[[], Any]] = {
    "arange(3)": lambda: (
        _int64(tg.arange(3), tg.array([1]), tg.argmax(X))
        and _int32(jnp.arange(3), jnp.array([1]), jnp.argmax(X))
    ),
    "asarray(np.zeros(3))": lambda: (
        _float64(tg.asarray(np.zeros(3))) and _float32(jnp.asarray(np.zeros(3)))
    ),
    "zeros(3)": _of_64_bits,
    "sin(arange(3))": lambda: all(
        _float64(getattr(tg, name)(tg.arange(3))) and _float32(getattr(jnp, name)(jnp.arange(3.0)))
        for name in ("sin", "mean", "var", "cov")
    ),
    "arange(3) * ones(3)": lambda: (
        _float64(tg.arange(3) * tg.ones(3)) and _float32(jnp.arange(3) * jnp.ones(3))
    ),
    "sum(x)": lambda: all(
        _int64(getattr(tg, name)(np.ones(2, np.int8)))
        and _int32(getattr(jnp, name)(np.ones(2, np.int8)))
        for name in ("sum", "prod")
    ),
    "digitize": lambda: {"digitize", "searchsorted"} <= OF_64_BITS,
    "histogram(x)": lambda: "histogram" in OF_64_BITS,
    "one_hot(ids, 3)": lambda: (
        _int64(tg.one_hot([1], 3)) and _float32(jax.nn.one_hot(jnp.array([1]), 3))
    ),
    "gelu(x)": lambda: np.allclose(
        tg.gelu(X.astype("float32"), approximate="tanh").numpy(), jax.nn.gelu(X), atol=1e-5
    ),
    "huber_loss(x, y)": lambda: np.allclose(
        nn.functional.huber_loss(X, Y, reduction="none").numpy(), optax.huber_loss(X, Y), 1e-5
    ),
    "cosine_similarity(x, y)": lambda: np.allclose(
        nn.functional.cosine_similarity(ONES, ONES, axis=-1).numpy(),
        optax.cosine_similarity(jnp.asarray(ONES), jnp.asarray(ONES)),
    ),
    "x[5]": lambda: _raises(lambda: tg.ones(2)[5], "OutOfRangeError") and jnp.ones(2)[5] == 1,
    "take(x, [5])": lambda: (
        _raises(lambda: tg.take(ONES, [5]), "OutOfRangeError")
        and np.isnan(jnp.take(jnp.ones(2), jnp.array([5])))
    ),
    "x[0] = 1": lambda: (
        _assigned(tg.ones(2))[0].item() == 5
        and _raises(lambda: _assigned(jnp.ones(2)), "TypeError")
    ),
    "x + [1, 2]": lambda: (
        (tg.ones(2) + [1, 2]).tolist() == tg.add(ONES, [1, 2]).tolist() == [2, 3]  # noqa: RUF005
        and _raises(lambda: jnp.ones(2) + [1, 2], "TypeError")  # noqa: RUF005
    ),
    "uint8 + 300": lambda: (
        _raises(lambda: tg.ones(1, dtype="uint8") + 300, "ArgumentError")
        and jnp.ones(1, jnp.uint8) + 300 == 45
    ),
    "1 // 0": lambda: (
        ((tg.tensor([1]) // tg.tensor([0])).item(), (jnp.array([1]) // jnp.array([0])).item())
        == (0, -2)
    ),
    "abs": lambda: _gradients("abs") == (0, 1),
    "linalg.norm": lambda: str(_gradients("linalg.norm")) == "(0.0, nan)",
    "clip": lambda: _gradients("clip", 0, 1) == (1, 0.5),
    "nn.Linear(3, 2)(x)": lambda: (
        nn.Linear(3, 2)(tg.ones((5, 3))).shape == (5, 2)
        and _raises(lambda: eqx.nn.Linear(3, 2, key=KEY)(jnp.ones((5, 3))), "TypeError")
        and _raises(lambda: eqx.nn.LayerNorm(3)(jnp.ones((5, 3))), "ValueError")
    ),
    "nn.RMSNorm(4)": lambda: (
        [name for name, _ in nn.RMSNorm(4).named_parameters()] == ["weight"]
        and eqx.nn.RMSNorm(4).bias is not None
    ),
    "nn.Dropout()(x)": lambda: (
        nn.Dropout()(tg.ones(2)).shape == (2,)
        and _raises(lambda: eqx.nn.Dropout()(jnp.ones(2)), "RuntimeError")
    ),
    "nn.Sequential(a, b)": lambda: nn.Sequential(nn.Identity(), nn.Identity()) is not None,
    "grad(f)(x)": lambda: (
        _float64(tg.grad(tg.sum)(np.ones(2))) and _float32(jax.grad(jnp.sum)(np.ones(2)))
    ),
}


def test_the_page_lists_other_results() -> None:
    assert [quoted(row[0])[0] for row in JAX.table("Results of equal calls")] == [*RESULTS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", RESULTS)
def test_results_that_the_page_lists(call: str) -> None:
    assert RESULTS[call]()


@pytest.mark.parametrize("name", ["adam", "adamw", "lion", "sgd"])
def test_optimizers_take_the_steps_of_optax(name: str) -> None:
    settings = {"sgd": {"momentum": 0.9, "nesterov": True}}.get(name, {})
    decay = {"weight_decay": 0.1} if name in ("adamw", "lion") else {}
    kind = {f.casefold(): getattr(optim, f) for f in optim.__all__}[name]
    ours = Tensor(X.astype(np.float32), requires_grad=True)
    optimizer = kind([ours], lr=0.01, **settings, **decay)
    transform = getattr(optax, name)(0.01, **settings, **decay)
    theirs = jnp.asarray(X, jnp.float32)
    state = transform.init(theirs)
    for step in range(3):
        optimizer.zero_grad()
        ((ours - step) ** 2).sum().backward()
        optimizer.step()
        updates, state = transform.update(2 * (theirs - step), state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5)


if __name__ == "__main__":
    JAX.print_missing_rows()
