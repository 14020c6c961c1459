"""Tensors in libraries that dispatch on the array type: einops, opt_einsum, the array API's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor
from tensorgrad.compat import einops_backend


def normal(*shape: int, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape)
    return tg.tensor(values, "float32", requires_grad=True)


PATTERNS: list[tuple[str, str, dict[str, Any]]] = [
    ("rearrange", "b (h d) t -> b h t d", {"h": 3}),
    ("rearrange", "b c t -> t (b c)", {}),
    ("repeat", "b c t -> b c (t n)", {"n": 2}),
    *[("reduce", "b c t -> b t", {"reduction": name}) for name in ("sum", "mean", "max", "min")],
    ("reduce", "b c t -> ", {"reduction": "prod"}),
]


@pytest.mark.parametrize(("function", "pattern", "options"), PATTERNS)
def test_einops(function: str, pattern: str, options: dict[str, Any]) -> None:
    einops = pytest.importorskip("einops")
    x = normal(2, 6, 4)
    y = getattr(einops, function)(x, pattern, **options)
    assert isinstance(y, Tensor)
    expected = getattr(einops, function)(x.numpy(), pattern, **options)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.any()


def test_einops_of_several_tensors() -> None:
    einops = pytest.importorskip("einops")
    a, b = normal(2, 3), normal(4, 3, seed=1)
    packed, shapes = einops.pack([a, b], "* c")
    assert packed.shape == (6, 3)
    assert [each.shape for each in einops.unpack(packed, shapes, "* c")] == [(2, 3), (4, 3)]
    assert einops.rearrange([a, a], "n b c -> b n c").shape == (2, 2, 3)
    y = einops.einsum(a, b, "m c, n c -> m n")
    assert np.array_equal(y.numpy(), (a @ b.T).numpy())
    assert y.requires_grad


def test_the_backend_of_einops_computes_with_our_ops() -> None:
    module: Any = ModuleType("einops._backends")
    module.AbstractBackend = type("AbstractBackend", (), {})
    einops_backend._define(module)
    (kind,) = module.AbstractBackend.__subclasses__()
    assert kind is module.TensorgradBackend
    assert kind.framework_name == "tensorgrad"
    own, x = kind(), normal(2, 3)
    assert own.is_appropriate_type(x)
    assert not own.is_appropriate_type(x.data)
    assert own.from_numpy(x.data).data is x.data
    assert own.to_numpy(x) is x.data
    assert own.arange(1, 4).tolist() == [1, 2, 3]
    assert own.is_float_type(x)
    assert not own.is_float_type(own.arange(0, 1))
    a = x.data
    for y, expected in (
        (own.stack_on_zeroth_dimension([x, x]), np.stack([a, a])),
        (own.add_axis(x, 1), a[:, None]),
        (own.tile(x, [2, 1]), np.tile(a, (2, 1))),
        (own.concat([x, x], 1), np.concatenate([a, a], 1)),
        (own.einsum("ij,ij->i", x, x), np.einsum("ij,ij->i", a, a)),
    ):
        assert y.requires_grad
        np.testing.assert_allclose(y.numpy(), expected, 1e-6)


def test_the_backend_waits_for_einops(monkeypatch: pytest.MonkeyPatch) -> None:
    defined: list[Any] = []
    monkeypatch.setattr(einops_backend, "_define", defined.append)
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setitem(sys.modules, "einops._backends", module := ModuleType("einops._backends"))
    einops_backend.register()
    assert defined == [module]
    assert sys.meta_path == []
    monkeypatch.delitem(sys.modules, "einops._backends")
    for _ in range(2):
        einops_backend.register()
    finders: list[Any] = sys.meta_path
    (finder,) = finders
    assert finder.find_spec("einops") is None
    executed: list[Any] = []
    loader = SimpleNamespace(exec_module=executed.append)
    for spec in (None, SimpleNamespace(loader=None), SimpleNamespace(loader=loader)):
        monkeypatch.setattr(sys, "meta_path", [finder])
        monkeypatch.setattr(einops_backend, "find_spec", lambda name, spec=spec: spec)
        assert finder.find_spec("einops._backends") is spec
        assert sys.meta_path == []
    loader.exec_module(module)
    assert executed == [module]
    assert defined == [module, module]


@pytest.mark.parametrize("first", ["einops, tensorgrad", "tensorgrad, einops"])
def test_einops_may_be_imported_first_or_last(first: str) -> None:
    pytest.importorskip("einops")
    script = (
        f"import {first}, json, sys\n"
        "y = einops.rearrange(tensorgrad.ones((2, 3)), 'a b -> b a')\n"
        "names = [type(each).__module__ for each in sys.meta_path]\n"
        "print(json.dumps([y.shape, names]))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], check=True, capture_output=True, text=True
    )
    shape, finders = json.loads(result.stdout)
    assert shape == [3, 2]
    assert not any(name.startswith("tensorgrad") for name in finders)  # it is there until needed


@pytest.mark.parametrize("formula", ["ij,jk,kl->il", "iab,bc,ca->i", "ij,kj,kl->"])
def test_opt_einsum(formula: str) -> None:
    opt_einsum = pytest.importorskip("opt_einsum")
    lengths = dict(zip("abcijkl", range(2, 9), strict=True))
    operands = formula.partition("->")[0].split(",")
    tensors = [
        normal(*[lengths[letter] for letter in operand], seed=i)
        for i, operand in enumerate(operands)
    ]
    y = opt_einsum.contract(formula, *tensors)
    assert isinstance(y, Tensor)
    expected = np.einsum(formula, *[t.numpy().astype("float64") for t in tensors])
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-5)
    y.sum().backward()
    direct = [t.detach().requires_grad_() for t in tensors]
    tg.einsum(formula, *direct).sum().backward()
    for got, same in zip(tensors, direct, strict=True):
        assert got.grad is not None
        assert same.grad is not None
        np.testing.assert_allclose(got.grad, same.grad, rtol=1e-4, atol=1e-5)


def test_array_api_compat() -> None:
    compat = pytest.importorskip("array_api_compat")
    x = normal(2, 3)
    assert compat.array_namespace(x, 2.0, None) is tg
    assert compat.is_array_api_obj(x)
    assert (compat.device(x), compat.size(x)) == ("cpu", 6)
    assert compat.to_device(x, "cpu").requires_grad


def test_scipy() -> None:
    pytest.importorskip("scipy")
    script = """
import json, tensorgrad as tg
from scipy import special, stats
x = tg.tensor([[1.0, 2.0], [3.0, 5.0]], "float64")
results = special.logsumexp(x, axis=1), stats.zscore(x)
print(json.dumps([[type(y).__name__ for y in results], *[y.tolist() for y in results]]))
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        check=True, capture_output=True, text=True, env={**os.environ, "SCIPY_ARRAY_API": "1"},
    )  # fmt: skip
    kinds, sums, scores = json.loads(result.stdout)
    x = np.array([[1.0, 2.0], [3.0, 5.0]])
    assert kinds == ["Tensor", "Tensor"]
    np.testing.assert_allclose(sums, np.log(np.exp(x).sum(1)))
    np.testing.assert_allclose(scores, (x - x.mean(0)) / x.std(0))


def test_scikit_learn() -> None:
    """Estimators and metrics on tensors give what they give on NumPy's arrays."""
    pytest.importorskip("sklearn")
    script = """
import json
import numpy as np, sklearn, tensorgrad as tg
from sklearn import decomposition, discriminant_analysis, linear_model, metrics, mixture
from sklearn import preprocessing
sklearn.set_config(array_api_dispatch=True)
rng = np.random.default_rng(0)
X, noise = rng.standard_normal((40, 5)), rng.random(40)
labels, values = (X[:, 0] > 0).astype("int64"), X @ np.arange(5.0)
found = {}
def compare(name, call):
    ours, theirs = call(tg.asarray), call(lambda array: array)
    kind = type(ours).__name__
    ours = ours.numpy() if isinstance(ours, tg.Tensor) else np.asarray(ours)
    found[name] = [kind, bool(np.allclose(abs(ours), abs(np.asarray(theirs)), 1e-6, 1e-8))]
for name in ("accuracy_score", "f1_score", "roc_auc_score"):
    compare(name, lambda c: getattr(metrics, name)(c(labels), c((noise < 0.7) ^ labels)))
for name in ("mean_squared_error", "r2_score"):
    compare(name, lambda c: getattr(metrics, name)(c(values), c(values + noise)))
for name in ("cosine_similarity", "euclidean_distances", "rbf_kernel"):
    compare(name, lambda c: getattr(metrics.pairwise, name)(c(X), c(X + 1)))
for name in ("StandardScaler", "MinMaxScaler", "PolynomialFeatures"):
    compare(name, lambda c: getattr(preprocessing, name)().fit_transform(c(X)))
compare("PCA", lambda c: decomposition.PCA(3, svd_solver="full").fit_transform(c(X)))
compare("Ridge", lambda c: linear_model.Ridge(solver="svd").fit(c(X), c(values)).predict(c(X)))
compare("LDA", lambda c: discriminant_analysis.LinearDiscriminantAnalysis().fit(
    c(X), c(labels)).predict_proba(c(X)))
compare("GaussianMixture", lambda c: mixture.GaussianMixture(
    2, init_params="random_from_data", random_state=0).fit(c(X)).predict_proba(c(X)))
print(json.dumps(found))
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        check=True, capture_output=True, text=True, env={**os.environ, "SCIPY_ARRAY_API": "1"},
    )  # fmt: skip
    found = json.loads(result.stdout)
    assert {name for name, (_, alike) in found.items() if not alike} == set()
    assert {found[name][0] for name in ("PCA", "LDA", "Ridge", "GaussianMixture")} == {"Tensor"}
