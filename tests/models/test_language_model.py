from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensorgrad import nn
from tensorgrad.autograd import no_grad
from tensorgrad.core.tensor import Tensor
from tensorgrad.errors import ArgumentError, DtypeError, ShapeError
from tensorgrad.models.gpt2 import GPT2, PRESETS, GPT2Config
from tensorgrad.models.language_model import (
    LanguageModel,
    ModelPart,
    check_tokens,
    checked_prompts,
    model_of,
)
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.nn.shard import Shard

SMALL = GPT2Config(vocab_size=61, context=12, layers=2, heads=2, width=16)
MODERN = TransformerLMConfig(61, context=12, layers=2, heads=4, kv_heads=2, width=16, hidden=24)
MAKERS: dict[str, Callable[[], LanguageModel]] = {
    "gpt2": lambda: GPT2(SMALL),
    "gpt2-padded": lambda: GPT2(replace(SMALL, vocab_multiple=16)),
    "modern": lambda: TransformerLM(MODERN),
    "modern-untied": lambda: TransformerLM(replace(MODERN, tied=False)),
}


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return MAKERS[request.param]()


def tokens(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 61, shape)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-124M", 124_439_808),
        ("gpt2-355M", 354_823_168),
        ("gpt2-774M", 774_030_080),
        ("gpt2-1558M", 1_557_611_200),
    ],
)
def test_the_presets_have_the_published_sizes(
    name: str, parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PRESETS[name].parameters == parameters
    if name == "gpt2-124M":
        for draw in ("normal_", "uniform_"):  # a gigabyte that stays untouched costs no time
            monkeypatch.setattr(nn.init, draw, lambda *_: None)
        assert sum(p.size for p in GPT2(PRESETS[name]).parameters()) == parameters


def test_the_default_sizes() -> None:
    assert repr(GPT2Config()) == (
        "GPT2Config(vocab_size=50257, context=1024, layers=12, heads=12, width=768, dropout=0.0, "
        "vocab_multiple=1, hidden=None)"
    )
    assert repr(TransformerLMConfig(9)) == (
        "TransformerLMConfig(vocab_size=9, context=1024, layers=12, heads=12, kv_heads=4, "
        "width=768, hidden=None, dropout=0.0, attention_dropout=None, activation_dropout=0.0, "
        "tied=True, rope_base=10000.0, head_width=None, rope_scaling=None, window=None, "
        "window_from=0, norm_eps=1e-06, qkv_bias=False, proj_bias=False, feed_forward_bias=False, "
        "qk_norm=False)"
    )


def test_the_count_of_parameters_includes_rows_for_alignment() -> None:
    for multiple, rows in ((1, 61), (16, 64)):
        config = replace(SMALL, vocab_multiple=multiple, hidden=24)
        assert config.rows == rows
        assert sum(p.size for p in GPT2(config).parameters()) == config.parameters
        matrices = rows * 16 + 2 * 16 * (4 * 16 + 2 * 24)
        assert config.training_flops() == 3 * (2 * matrices + 4 * 2 * 16 * 6)
        few = config.training_flops(keys=5, targets=0.5)
        assert few == 3 * (2 * (matrices - rows * 8) + 4 * 2 * 16 * 5)


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True, "qk_norm": True},
        {"proj_bias": True, "feed_forward_bias": True},
        {"tied": False, "head_width": 6, "hidden": None},
    ],
    ids="-".join,
)
def test_the_count_of_parameters_is_that_of_the_model(options: dict[str, Any]) -> None:
    config = replace(MODERN, **options)
    model = TransformerLM(config)
    assert sum(p.size for p in model.parameters()) == config.parameters
    matrices = [p.size for name, p in model.named_parameters() if p.ndim == 2 and "tok" not in name]
    elements = sum(matrices) + 61 * 16 * config.tied
    width = config.heads * config.width_of_head
    assert config.training_flops() == 3 * (2 * elements + 4 * 2 * width * 6)
    few = config.training_flops(keys=5, targets=0.5)
    assert few == 3 * (2 * (elements - 61 * 8) + 4 * 2 * width * 5)


def test_a_modern_model_has_no_biases_unless_asked() -> None:
    names = [name for name, _ in TransformerLM(MODERN).named_parameters()]
    assert not any("bias" in name or "q_norm" in name for name in names)
    given: Any = {"qkv_bias": True, "proj_bias": True, "feed_forward_bias": True}
    model = TransformerLM(replace(MODERN, **given))
    assert sum("bias" in name for name, _ in model.named_parameters()) == 2 * (2 + 3)


def test_the_loss_starts_at_that_of_a_uniform_guess(model: LanguageModel) -> None:
    loss = model(tokens(4, 12), tokens(4, 12, seed=1))
    assert loss.shape == ()
    assert loss.dtype == np.float32
    assert abs(loss.item() - math.log(61)) < 0.05


def test_the_loss_is_the_mean_over_the_targets_that_count(model: LanguageModel) -> None:
    x, y = tokens(2, 5), tokens(2, 5, seed=1)
    logits = model(x).numpy()
    assert logits.shape == (2, 5, 61)
    log_total = np.log(np.exp(logits).sum(-1))
    each = log_total - np.take_along_axis(logits, y[..., None], -1)[..., 0]
    np.testing.assert_allclose(model(x, y).item(), each.mean(), rtol=1e-5)
    y[0] = -100
    np.testing.assert_allclose(model(x, y).item(), each[1].mean(), rtol=1e-5)


def test_gradients_agree_with_numeric_differences(model: LanguageModel) -> None:
    model.to("float64")
    x, y = tokens(2, 7), tokens(2, 7, seed=1)
    model(x, y).backward()
    rng = np.random.default_rng(2)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        direction = rng.standard_normal(parameter.shape)
        direction /= np.linalg.norm(direction)
        start, losses = parameter.data.copy(), []
        for step in (-2e-4, -1e-4, 1e-4, 2e-4):
            parameter.data[...] = start + step * direction
            losses.append(model(x, y).item())
        parameter.data[...] = start
        # an error of fourth order: the third derivative does not count
        numeric = (8 * (losses[2] - losses[1]) - (losses[3] - losses[0])) / 12e-4
        np.testing.assert_allclose(
            (parameter.grad * direction).sum(), numeric, rtol=1e-6, atol=5e-10, err_msg=name
        )


def test_a_token_attends_only_to_earlier_ones(model: LanguageModel) -> None:
    x = tokens(1, 12)
    before = model(x).numpy()
    x[0, 8] = (x[0, 8] + 1) % 61
    after = model(x).numpy()
    np.testing.assert_array_equal(before[:, :8], after[:, :8])
    assert np.abs(before[:, 8:] - after[:, 8:]).max(-1).min() > 1e-6


def test_the_order_of_tokens_matters(model: LanguageModel) -> None:
    x = np.array([[3, 5, 7, 9]])
    turned = np.array([[5, 3, 7, 9]])
    assert np.abs(model(x).numpy()[0, -1] - model(turned).numpy()[0, -1]).max() > 1e-6


def test_a_cache_changes_no_logits(model: LanguageModel) -> None:
    x = tokens(3, 12)
    with no_grad():
        whole = model(x).numpy()
        cache = model.new_cache(3)
        parts = [model(x[:, :5], cache=cache).numpy()]
        parts += [model(x[:, i : i + 1], cache=cache).numpy() for i in range(5, 12)]
        np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-6)
        np.testing.assert_allclose(model.next_logits(x).numpy(), whole[:, -1], atol=1e-6)
        with pytest.raises(ShapeError, match=r"got 13 tokens, expected at most 12"):
            model(x[:, :1], cache=cache)


def test_rows_for_alignment_change_nothing() -> None:
    plain, padded = MAKERS["gpt2"](), MAKERS["gpt2-padded"]()
    state = plain.state_dict()
    table = np.full((64, 16), 9.0, np.float32)  # would win every softmax
    table[:61] = state["tokens.weight"].numpy()
    padded.load_state_dict({**state, "tokens.weight": table})
    x, y = tokens(2, 9), tokens(2, 9, seed=1)
    one, two = plain(x, y), padded(x, y)
    np.testing.assert_allclose(one.item(), two.item(), rtol=1e-6)
    one.backward()
    two.backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), padded.named_parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        np.testing.assert_allclose(p.grad, q.grad[: len(p.grad)], atol=1e-6, err_msg=name)
        assert not q.grad[len(p.grad) :].any()


def test_dropout_acts_in_training_alone() -> None:
    for model in (GPT2(replace(SMALL, dropout=0.5)), TransformerLM(replace(MODERN, dropout=0.5))):
        x = tokens(2, 9)
        assert np.abs(model(x).numpy() - model(x).numpy()).max() > 1e-3
        model.eval()
        np.testing.assert_array_equal(model(x).numpy(), model(x).numpy())


def test_matrices_start_small_and_those_that_end_a_branch_smaller() -> None:
    model = GPT2(replace(SMALL, width=64, layers=8))
    for name, parameter in model.named_parameters():
        values = parameter.numpy()
        if name.endswith(("proj.weight", "down.weight")):
            np.testing.assert_allclose(values.std(), 0.02 / 4, rtol=0.1, err_msg=name)
        elif parameter.ndim == 2:
            np.testing.assert_allclose(values.std(), 0.02, rtol=0.1, err_msg=name)
        else:
            assert (values == ("norm" in name and name.endswith("weight"))).all(), name


def test_grouped_heads_share_keys() -> None:
    model = TransformerLM(MODERN)
    assert model.state_dict()["blocks.0.attention.qkv.weight"].shape == (16 + 2 * 8, 16)
    assert "output.weight" not in model.state_dict()
    assert MAKERS["modern-untied"]().state_dict()["output.weight"].shape == (61, 16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_parameters_give_close_logits(model: LanguageModel, dtype: str) -> None:
    x, y = tokens(2, 9), tokens(2, 9, seed=1)
    exact = model(x).numpy()
    model.to(dtype)
    loss = model(x, y)
    assert loss.dtype == np.float32
    assert np.abs(model(x).numpy().astype(np.float32) - exact).max() < 0.01
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (np.zeros(3, int), ShapeError, r"tokens have shape \(3,\), expected \(B, T\)"),
        (np.zeros((2, 0), int), ShapeError, r"tokens have shape \(2, 0\)"),
        (np.zeros((1, 13), int), ShapeError, "got 13 tokens, expected at most 12"),
        (np.full((1, 3), 64), ArgumentError, "64"),
        (np.zeros((1, 3)), DtypeError, "integer"),
        (Tensor(np.full((1, 3), -1)), ArgumentError, "-1"),
    ],
)
def test_bad_tokens_are_named(
    model: LanguageModel, given: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model(given)


def test_padding_rows_are_not_targets() -> None:
    with pytest.raises(ArgumentError, match="61"):
        MAKERS["gpt2-padded"]()(tokens(1, 3), np.full((1, 3), 61))


TEXT: Any = "x"
HALF: Any = 1.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(SMALL, width=15), "width is 15, expected a multiple of heads, 2"),
        (lambda: replace(SMALL, layers=0), "layers is 0, expected 1 or more"),
        (lambda: replace(SMALL, hidden=0), "hidden is 0, expected 1 or more"),
        (lambda: replace(SMALL, vocab_multiple=0), "vocab_multiple is 0, expected 1 or more"),
        (lambda: replace(MODERN, window=0), "window is 0, expected 1 or more"),
        (lambda: replace(MODERN, window_from=-1), "window_from is -1, expected 0 or more"),
        (lambda: replace(MODERN, norm_eps=-1.0), "norm_eps is -1.0"),
        (lambda: replace(MODERN, head_width=3), "head_width is 3, expected a multiple of 2"),
        (lambda: replace(SMALL, layers=HALF), "layers is 1.5, expected an integer"),
        (lambda: replace(MODERN, heads=TEXT), "heads is 'x', expected an integer"),
        (lambda: replace(MODERN, dropout=TEXT), "dropout is 'x', expected a number"),
        (lambda: replace(SMALL, dropout=1.0), "dropout is 1.0"),
        (lambda: replace(MODERN, width=20), "width is 20, expected a multiple of 8"),
        (lambda: replace(MODERN, kv_heads=3), "heads is 4, expected a multiple of 3"),
        (lambda: replace(MODERN, hidden=0), "hidden is 0, expected 1 or more"),
        (lambda: replace(MODERN, dropout=-0.1), "dropout is -0.1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_the_device_is_that_of_the_parameters(device: str) -> None:
    model = GPT2(SMALL)
    x, y = tokens(2, 9), tokens(2, 9, seed=1)
    on_cpu = model(x, y).item()
    model.to(device)
    assert model.device == device
    inputs, targets = (Tensor(array).to(device) for array in (x, y))
    np.testing.assert_allclose(model(inputs, targets).item(), on_cpu, rtol=1e-5)


@pytest.mark.parametrize(("given", "expected"), [(None, 0.3), (0.0, 0.0), (0.1, 0.1)])
def test_attention_weights_may_have_a_dropout_of_their_own(given: Any, expected: float) -> None:
    model = TransformerLM(replace(MODERN, dropout=0.3, attention_dropout=given))
    for block in model.blocks:
        assert isinstance(block, nn.TransformerBlock)
        assert block.attention.dropout == expected
        assert block.dropout.p == 0.3


def test_activations_inside_feed_forward_layers_may_be_dropped() -> None:
    model = TransformerLM(replace(MODERN, activation_dropout=0.3))
    for block in model.blocks:
        assert isinstance(block, nn.TransformerBlock)
        assert isinstance(block.feed_forward, nn.SwiGLU)
        assert block.feed_forward.dropout.p == 0.3
        assert block.dropout.p == 0


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_a_dropout_that_is_not_a_probability_is_refused(name: str) -> None:
    options: dict[str, Any] = {name: 1.0}
    with pytest.raises(ArgumentError, match=f"{name} is 1.0, expected 0 <= {name} < 1"):
        TransformerLMConfig(61, **options)


def test_ranks_learn_which_layers_they_can_share_or_divide() -> None:
    tied, untied = MAKERS["modern"](), MAKERS["modern-untied"]()
    assert tied.shards() == [Shard("tokens", "vocabulary")]
    assert untied.shards() == [Shard("tokens", "vocabulary"), Shard("output", "vocabulary")]
    assert tied.stage_table() == {"tokens": "ends", "norm": "last", "output": "last"}
    assert untied.stage_table() == {"tokens": "first", "norm": "last", "output": "last"}
    assert tied.head() is tied.tokens.weight
    assert untied.output is not None
    assert untied.head() is untied.output.weight


def test_a_stage_runs_its_part_of_a_model(model: LanguageModel) -> None:
    x, y = tokens(2, 5), tokens(2, 5, seed=1)
    expected, loss = model(x).numpy(), model(x, y).item()
    model.part = ModelPart(range(1), None, False)
    middle = model(x)
    assert middle.shape == (2, 5, 16)
    model.part = ModelPart(range(1, 2), middle, True)
    np.testing.assert_array_equal(model(x).numpy(), expected)
    assert model(x, y).item() == loss


class Others:
    """The ranks of a pipeline."""

    def next_logits(self, tokens: Any, cache: Any, mask: Any) -> Any:
        return tokens, cache, mask


class Sharing:
    """A region of one rank, which says what it was asked."""

    def enter(self, x: Tensor) -> Tensor:
        return x * 2

    def logits(self, x: Tensor, weight: Tensor, dtype: Any) -> Any:
        return x @ weight.T

    def cross_entropy(self, x: Tensor, weight: Tensor, targets: Any, **options: Any) -> Any:
        return x, weight, targets, options


def test_layers_on_other_ranks_are_asked(model: LanguageModel) -> None:
    x: Any = tokens(2, 5)
    plain = model(x).numpy()
    assert not model.is_shared
    shared: Any = Sharing()
    model.region = shared
    assert model.is_shared
    np.testing.assert_allclose(model(x).numpy(), 2 * plain, rtol=1e-5)
    features, weight, targets, options = model(x, x)
    assert features.shape == (2, 5, 16)
    assert weight is model.head()
    assert targets is x
    assert options == {"vocab_size": 61}
    model.region, model.stages = None, Others()
    assert model.is_shared
    assert model.next_logits(x, [None], x) == (x, [None], x)
    with pytest.raises(ArgumentError, match="this rank has some of the layers, expected to be cal"):
        model(x)


def test_a_model_knows_its_attention_and_class(model: LanguageModel) -> None:
    layers = model.attention_layers()
    assert layers == [block.attention for block in model.blocks]  # type: ignore[attr-defined]
    assert model.causal
    layers[1].causal = False
    assert not model.causal
    assert model_of(model.config) is type(model)
    assert model_of(object()) is None
    caches = model.new_cache(3, 7)
    assert [cache.steps for cache in caches] == [7, 7]
    model.blocks[0] = nn.Identity()
    assert model.new_cache(3)[0] is None
    assert model.new_cache(3)[1].steps == 12
    assert model.attention_layers() == layers[1:]


def test_norms_that_run_again_change_no_bits(model: LanguageModel) -> None:
    x, y = tokens(2, 5), tokens(2, 5, seed=1)
    found = []
    for norms, blocks in ((False, False), (True, False), (False, True), (True, True)):
        model.recompute_norms, model.recompute = norms, blocks
        model.zero_grad()
        loss = model(x, y)
        loss.backward()
        found.append([loss.numpy(), *(np.array(p.grad) for p in model.parameters())])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_model_says_what_its_embedding_should_return() -> None:
    class Own(LanguageModel):
        def __init__(self) -> None:
            self.blocks, self.answer = nn.ModuleList(), tokens(2, 3)

        def embed(self, tokens: Any, cache: Any = None) -> Any:
            return self.answer

    for answer, got in ((tokens(2, 3), "ndarray"), (Tensor(np.ones((2, 3))), r"shape \(2, 3\)")):
        own: Any = Own()
        own.answer = answer
        with pytest.raises(ShapeError, match=rf"Own: embed returned {got}, expected \(B, T, C\)"):
            own(tokens(2, 3))
    with pytest.raises(NotImplementedError):
        LanguageModel.embed(own, tokens(2, 3))


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("abc", DtypeError, "prompts has type str, expected a list of prompts"),
        (3, DtypeError, "prompts has type int, expected a list of prompts"),
        (["abc"], DtypeError, "the prompt has type str, expected a tokenizer's tokens"),
        ([[1], "abc"], DtypeError, "prompt 1 has type str"),
        ([[[1]]], ShapeError, "the prompt has 2 axes, expected one"),
        ([[]], ArgumentError, r"the prompt has 0 tokens, expected 1 to 12 \(the context\)"),
        ([[1] * 13], ArgumentError, "the prompt has 13 tokens, expected 1 to 12"),
        ([[1.0]], DtypeError, "the prompt has dtype float64, expected integers"),
        ([[1], [3, 61, -1]], ArgumentError, "prompt 1 has the token 61, expected 0 to 60"),
        ([[-1]], ArgumentError, r"the prompt has the token -1, .* 60 \(a vocabulary of 61\)"),
    ],
)
def test_prompts_that_do_not_fit(prompts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"op: {message}"):
        checked_prompts("op", prompts, MAKERS["gpt2"]())


def test_prompts_become_arrays() -> None:
    found = checked_prompts("op", [[0], (60,) * 12, np.arange(2, dtype="uint8")], MAKERS["gpt2"]())
    assert [prompt.tolist() for prompt in found] == [[0], [60] * 12, [0, 1]]
    assert {prompt.dtype for prompt in found} == {np.dtype("int64")}
    check_tokens("op", "x", [0, 60], 61)


def test_a_step_reads_the_head_once_and_no_keys_outside_of_a_window() -> None:
    config = replace(MODERN, window=3, window_from=1, tied=False)
    model = TransformerLM(config)
    blocks = sum(p.data.nbytes for block in model.blocks for p in block.parameters())
    assert model.output is not None
    assert model.norm.weight is not None
    weights = blocks + model.norm.weight.data.nbytes + model.output.weight.data.nbytes
    row = 2 * 4 * config.kv_heads * config.width_of_head  # bytes of a key and a value
    assert model.step_bytes(5, 10) == weights + 5 * (10 + 3) * row


def test_windows_begin_with_a_block() -> None:
    model = TransformerLM(replace(MODERN, window=3, window_from=1, rope_base=50.0, norm_eps=0.5))
    assert [layer.window for layer in model.attention_layers()] == [None, 3]
    assert [layer.rotary.base for layer in model.modules() if hasattr(layer, "rotary")] == [50, 50]
    norms = [layer.eps for layer in model.modules() if isinstance(layer, nn.RMSNorm)]
    assert norms == [0.5] * 5
