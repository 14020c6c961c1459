from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensorgrad import random
from tensorgrad.errors import ArgumentError, DtypeError, OutOfRangeError, ShapeError
from tensorgrad.models.sentiment import (
    Classifier,
    ClassifierConfig,
    MeanClassifier,
    MeanConfig,
    TransformerClassifier,
    TransformerConfig,
    class_probabilities,
)
from tensorgrad.optim import AdamW

MEAN = MeanConfig(30, classes=3, width=8, hidden=6, layers=2, dropout=0.2, word_dropout=0.3)
TRANSFORMER = TransformerConfig(
    30, classes=3, width=8, context=9, layers=2, heads=2, dropout=0.2, word_dropout=0.3
)
MAKERS: dict[str, Callable[[], Classifier]] = {
    "mean": lambda: MeanClassifier(MEAN),
    "transformer": lambda: TransformerClassifier(TRANSFORMER),
}
TOKENS = np.array([[3, 4, 5, 6, 7], [8, 9, 0, 0, 0], [0, 0, 0, 0, 0]])
LENGTHS = np.array([5, 2, 0])


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest) -> Classifier:
    random.seed(5)
    return MAKERS[request.param]()


def test_a_config_counts_parameters_and_products(model: Classifier) -> None:
    config: Any = model.config
    assert config.parameters == sum(p.size for p in model.parameters())
    if isinstance(config, TransformerConfig):
        blocks = 2 * (12 * 8**2 * 2 + 2 * 2 * 11 * 8)  # FLOPs of a token, which attends to 11
        assert config.training_flops(9, 11) == 3 * (9 * blocks + 2 * 8 * 3)
    else:
        products = 2 * (8 * 6 + 6 * 6 + 6 * 3)
        assert config.training_flops(9, 11) == config.training_flops(90, 1) == 3 * products


def test_the_default_sizes() -> None:
    assert repr(MeanConfig(9)) == (
        "MeanConfig(vocab_size=9, classes=2, width=100, dropout=0.3, word_dropout=0.3, layers=1, "
        "hidden=100)"
    )
    assert repr(TransformerConfig(9)) == (
        "TransformerConfig(vocab_size=9, classes=2, width=128, dropout=0.3, word_dropout=0.3, "
        "context=64, layers=2, heads=4)"
    )
    for layers in (0, 1, 3):
        config = MeanConfig(9, classes=3, width=5, hidden=4, layers=layers)
        assert config.parameters == sum(p.size for p in MeanClassifier(config).parameters())
    with pytest.raises(NotImplementedError):
        ClassifierConfig(9).training_flops(1, 1)
    with pytest.raises(NotImplementedError):
        Classifier().features(TOKENS, TOKENS)


def test_word_vectors_start_at_random_with_mean_0() -> None:
    random.seed(0)
    model = TransformerClassifier(TransformerConfig(400, context=300))
    for values, std in ((model.words.weight.numpy(), 0.1), (model.positions.numpy(), 0.02)):
        assert abs(values.mean()) < 0.05 * std
        assert values.std() == pytest.approx(std, rel=0.05)
    assert model.device == "cpu"


def test_padding_has_no_influence(model: Classifier) -> None:
    model.eval()
    logits = model(TOKENS, LENGTHS).numpy()
    assert logits.shape == (3, 3)
    filled = TOKENS.copy()
    filled[1, 2:], filled[2] = 11, 12
    np.testing.assert_array_equal(model(filled, LENGTHS).numpy(), logits)
    alone = model(TOKENS[1:2, :2], LENGTHS[1:2]).numpy()
    np.testing.assert_allclose(alone[0], logits[1], rtol=1e-5, atol=1e-6)
    longer = model(TOKENS, np.array([5, 3, 0])).numpy()
    assert not np.allclose(longer[1], logits[1])


def test_padding_gets_no_gradient(model: Classifier) -> None:
    filled = TOKENS.copy()
    filled[1, 2:], filled[2] = 11, 12
    model.forward(filled, LENGTHS, np.array([0, 1, 2])).backward()
    gradient = model.words.weight.grad
    assert gradient is not None
    model.eval()
    assert not gradient[11:13].any()
    model.zero_grad()
    model.forward(filled, LENGTHS, np.array([0, 1, 2])).backward()
    assert {int(row) for row in np.flatnonzero(gradient.any(1))} == {*range(3, 10)}


def bias(model: Classifier) -> Any:
    assert model.output.bias is not None
    return model.output.bias.data


def test_the_mean_is_that_of_the_words() -> None:
    model = MeanClassifier(MeanConfig(30, width=4, layers=0)).eval()
    mean = model.words.weight.data[TOKENS[0]].mean(0)
    expected = (model.output.weight @ mean).numpy() + bias(model)
    np.testing.assert_allclose(model(TOKENS, LENGTHS).numpy()[0], expected, rtol=1e-5)


def test_order_counts_for_the_transformer_alone() -> None:
    for name, same in (("mean", True), ("transformer", False)):
        model = MAKERS[name]().eval()
        one, other = (model(words, LENGTHS[:1]).numpy() for words in (TOKENS[:1], TOKENS[:1, ::-1]))
        assert np.allclose(one, other, rtol=1e-5, atol=1e-6) == same


def test_gradients_are_those_of_the_loss(model: Classifier) -> None:
    model.to("float64").eval()
    labels = np.array([0, 1, 2])
    model.forward(TOKENS, LENGTHS, labels).backward()
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        direction = rng.standard_normal(parameter.shape)
        assert parameter.grad is not None, name
        expected = float((parameter.grad * direction).sum())
        losses = []
        for step in (1e-5, -2e-5):
            parameter.data += step * direction
            losses.append(model.forward(TOKENS, LENGTHS, labels).item())
        parameter.data += 1e-5 * direction
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(expected, rel=1e-5, abs=1e-8), name


def test_a_dropped_word_is_out_of_the_mean() -> None:
    random.seed(0)
    model = MeanClassifier(MeanConfig(30, width=4, layers=0, dropout=0.0, word_dropout=0.5))
    model.output.weight.data[...] = np.eye(2, 4)
    model.words.weight.data[...] = np.arange(30)[:, None]
    bias(model)[...] = 0
    tokens = np.tile(np.array([2, 4, 16]), (300, 1))
    found = {float(x) for x in model(tokens, np.full(300, 3)).numpy()[:, 0].round(4)}
    subsets = [0, 2, 4, 16, 3, 9, 10, 22 / 3]
    assert sorted(found) == pytest.approx(sorted(subsets), abs=1e-3)
    model.eval()
    assert model(tokens, np.full(300, 3)).numpy()[:, 0] == pytest.approx(22 / 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types_are_near(model: Classifier, dtype: str) -> None:
    model.eval()
    logits = model(TOKENS, LENGTHS).numpy()
    other = model.to(dtype)(TOKENS, LENGTHS)
    assert other.dtype == dtype
    np.testing.assert_allclose(other.numpy().astype("float32"), logits, atol=0.05)


def test_probabilities_of_many_texts(model: Classifier) -> None:
    rows = [[3, 4, 5], [], [8] * 20, [6], [29]]
    found = class_probabilities(model, rows, longest=9, batch=2)
    assert model.training
    assert found.shape == (5, 3)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    one = class_probabilities(model, [[8] * 9])
    np.testing.assert_allclose(one[0], found[2], rtol=1e-5)
    assert class_probabilities(model, []).shape == (0, 3)
    for options in ({"batch": 0}, {"batch": -1}, {"longest": 0}, {"longest": -1}):
        with pytest.raises(ArgumentError, match=r"(batch|longest) is .*, expected 1 or more"):
            class_probabilities(model, rows, **options)
    with pytest.raises(DtypeError, match="rows has dtype float64, expected integers"):
        class_probabilities(model, [[1.5]])  # type: ignore[list-item]


def test_vectors_replace_rows(model: Classifier) -> None:
    before = model.words.weight.data.copy()
    model.use_vectors([3, 7], np.ones((2, 8), np.float32))
    changed = np.flatnonzero((model.words.weight.data != before).any(1))
    assert changed.tolist() == [3, 7]
    assert (model.words.weight.data[[3, 7]] == 1).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TOKENS[0], LENGTHS), ShapeError, r"expected \(B, T\) and \(B,\)"),
        ((TOKENS, LENGTHS[:2]), ShapeError, r"lengths \(2,\)"),
        ((TOKENS / 2, LENGTHS), DtypeError, "tokens"),
        ((TOKENS, LENGTHS / 2), DtypeError, "lengths"),
        ((TOKENS + 24, LENGTHS), OutOfRangeError, "expected 0 to 29"),
        ((TOKENS, LENGTHS, np.array([0, 1, 3])), OutOfRangeError, "expected 0 to 2"),
        ((TOKENS, LENGTHS, np.array([0, 1])), ShapeError, "targets"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Classifier, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model(*arguments)


def test_a_text_beyond_the_context_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"tokens have 10 columns, expected at most 9 \(the con"):
        MAKERS["transformer"]()(np.zeros((1, 10), int), np.array([10]))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (MeanConfig, {"vocab_size": 0}, "MeanConfig: vocab_size is 0, expected 1 or more"),
        (MeanConfig, {"dropout": 1.0}, "MeanConfig: dropout is 1.0, expected 0 <= dropout < 1"),
        (MeanConfig, {"word_dropout": -0.1}, "word_dropout is -0.1"),
        (MeanConfig, {"hidden": 1.5}, "hidden is 1.5, expected an integer"),
        (MeanConfig, {"layers": -1}, "layers is -1, expected 0 or more"),
        (TransformerConfig, {"context": 0}, "TransformerConfig: context is 0"),
        (TransformerConfig, {"heads": 3}, "width is 128, expected a multiple of heads, 3"),
    ],
)
def test_sizes_out_of_range_are_refused(
    kind: type[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        kind(**{"vocab_size": 30, **options})


def test_it_learns(model: Classifier) -> None:
    model.config = replace(model.config, word_dropout=0.0)
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 30, (32, 4))
    lengths, labels = rng.integers(1, 5, 32), rng.integers(0, 3, 32)
    tokens[:, 0] = labels  # the first word says it
    optimizer = AdamW(model.named_parameters(), 3e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model.forward(tokens, lengths, labels).backward()
        optimizer.step()
    model.eval()
    assert (model(tokens, lengths).numpy().argmax(1) == labels).mean() > 0.9
