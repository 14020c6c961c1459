from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorgrad import no_grad, random
from tensorgrad.core import backend
from tensorgrad.data import PairLoader, Tokenizer, encode_pairs, language_token, train_tokenizer
from tensorgrad.errors import ArgumentError, DataError, ShapeError
from tensorgrad.models.generation import generate_batch
from tensorgrad.models.translation import TranslationConfig, TranslationModel, generate, prefix_mask
from tensorgrad.optim import AdamW

WORDS = {"eins": "one", "zwei": "two", "rot": "red", "blau": "blue"}


def make(label_smoothing: float = 0.0, **options: Any) -> TranslationModel:
    random.seed(0)
    sizes: dict[str, Any] = {"context": 48, "layers": 1, "heads": 2, "kv_heads": 2, "width": 32}
    sizes = {"vocab_size": 300, **sizes, **options}
    return TranslationModel(TranslationConfig(**sizes, label_smoothing=label_smoothing))


def batch() -> tuple[Any, Any]:
    pairs = [([5, 6, 7], [8, 9]), ([5] * 9, [4] * 3), ([3, 4], [5] * 11)]
    return PairLoader(pairs, 1, 0, 64, 48).batch(0)


def test_the_loss_is_that_of_the_target_alone() -> None:
    model = make().eval()
    tokens, targets = batch()
    logits = model(tokens).numpy().astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    first = tokens.shape[1] - targets.shape[1]
    rows, columns = np.nonzero(targets != -100)
    expected = -log_p[rows, columns + first, targets[rows, columns]].mean()
    assert model(tokens, targets).item() == pytest.approx(expected, rel=1e-5)
    # Any token where the loss does not count: it is not a target.
    other = np.concatenate([np.full((len(tokens), first), -100), targets], axis=1)
    assert model(tokens, other).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("prefix", [False, True])
def test_the_loss_is_that_of_one_token_after_another(prefix: bool, device: str) -> None:
    model = make(layers=2, prefix=prefix).eval()
    rng = np.random.default_rng(0)
    for parameter in model.parameters():  # far from uniform, so that a wrong mask shows
        parameter.data[...] += rng.normal(0, 0.2, parameter.shape)
    model.to(device)
    pairs = [([5, 6, 7], [8, 9]), ([5, 8, 2, 4, 3, 9], [4] * 3), ([3, 4], [5] * 11)]
    total, count = 0.0, 0
    for source, target in pairs:
        prompt, cache = backend.to_device(np.array([[*source, 1]]), device), model.new_cache(1)
        with no_grad():
            for token in [*target, 0]:
                logits = model.next_logits(prompt, cache).numpy()[0].astype(np.float64)
                total, count = total + np.log(np.exp(logits).sum()) - logits[token], count + 1
                prompt = backend.to_device(np.array([[token]]), device)
    tokens, targets = (
        backend.to_device(array, device) for array in PairLoader(pairs, 1, 0, 64, 48).batch(0)
    )
    assert model(tokens, targets).item() == pytest.approx(total / count, rel=1e-5)
    other = make(layers=2, prefix=not prefix).to(device)
    other.load_state_dict(model.state_dict())
    assert other.eval()(tokens, targets).item() != pytest.approx(total / count, rel=1e-3)


def test_prefixes_end_where_the_first_target_is_asked_for(device: str) -> None:
    targets = np.array([[-100, 5, 6], [7, 8, -100], [-100, -100, -100]], np.int32)
    mask = prefix_mask(backend.to_device(targets, device), 5).numpy()
    assert mask.shape == (3, 1, 5, 5)
    assert mask.dtype == np.float32
    assert set(np.unique(mask)) == {0, -np.inf}
    for seen, prefix in zip(mask[:, 0] == 0, (4, 3, 3), strict=True):
        columns = np.arange(5)
        np.testing.assert_array_equal(seen, columns <= np.maximum(columns[:, None], prefix - 1))


@pytest.mark.parametrize("prefix", [False, True])
def test_padding_changes_neither_loss_nor_gradient(prefix: bool) -> None:
    model = make(prefix=prefix)
    tokens, targets = batch()
    found: list[tuple[float, list[Any]]] = []
    for fill in (0, 9):
        filled = tokens.copy()
        for row, wanted in zip(filled, targets, strict=True):
            last = np.flatnonzero(wanted != -100)[-1]
            row[len(row) - len(wanted) + last + 1 :] = fill
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(filled, targets)
        loss.backward()
        found.append((loss.item(), [p.grad for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    for one, two in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-7)
    tokens[0, 0] += 1  # the source does matter
    assert model(tokens, targets).item() != found[0][0]


@pytest.mark.parametrize("prefix", [False, True])
def test_rows_of_padding_change_neither_loss_nor_gradient(prefix: bool) -> None:
    pairs = [([5, 6, 7], [8, 9] * 4), ([], [4] * 9), ([3, 4], [5] * 11)]
    loader = PairLoader([*pairs, *pairs, *pairs[:1]], 1, 0, 64, 48)  # 7 rows in batches of 4
    padded = min(map(loader.batch, range(2)), key=lambda batch: (batch[1] != -100).any(1).sum())
    full = tuple(array[(padded[1] != -100).any(1)] for array in padded)
    assert (len(full[0]), len(padded[0])) == (3, 4)
    model = make(0.1, prefix=prefix, layers=2)
    found: list[tuple[float, list[Any]]] = []
    for arrays in (full, padded):
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(*arrays)
        loss.backward()
        found.append((loss.item(), [p.grad for p in model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, two in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-6 * max(1, np.abs(one).max()))


def test_labels_are_smooth_in_training_only() -> None:
    tokens, targets = batch()
    plain, smooth = make(), make(0.2)
    assert smooth(tokens, targets).item() > plain(tokens, targets).item()
    assert smooth.eval()(tokens, targets).item() == plain.eval()(tokens, targets).item()


def test_the_head_is_the_table_of_tokens_or_not() -> None:
    names = {name for name, _ in make(tied=False).named_parameters()}
    assert names - {name for name, _ in make().named_parameters()} == {"output.weight"}


def test_bad_sizes_and_targets_are_named() -> None:
    assert repr(TranslationConfig(9)).endswith("qk_norm=False, label_smoothing=0.0, prefix=False)")
    assert [make(smoothing).config.label_smoothing for smoothing in (0, 1)] == [0, 1]
    assert not TranslationModel.loss_of_any_rows
    with pytest.raises(ArgumentError, match=r"label_smoothing is 1\.5"):
        make(1.5)
    with pytest.raises(ArgumentError, match="heads is 2, expected a multiple of 3"):
        make(kv_heads=3)
    for prefix in (False, True):
        model, tokens = make(prefix=prefix), np.ones((2, 3), int)
        for shape in ((2, 4), (3,), (3, 2), (2, 0)):
            with pytest.raises(ShapeError, match=r"targets have shape .*, expected \(2, n\)"):
                model(tokens, np.ones(shape, int))
        assert model(tokens, [[1, 2], [3, 4]]).item() > 0


@pytest.fixture(scope="module", params=[False, True], ids=["causal", "prefix"])
def trained(request: pytest.FixtureRequest) -> tuple[TranslationModel, Tokenizer]:
    """Return a model that translates two words, turning them round."""
    pairs = [(f"{a} {b}", f"{WORDS[b]} {WORDS[a]}") for a in WORDS for b in WORDS]
    tokenizer = train_tokenizer(pairs, 300, ("de", "en"))
    asks = language_token(tokenizer, "en")
    loader = PairLoader(encode_pairs(tokenizer, pairs), asks, tokenizer.end_of_text, 512, 48)
    model = make(layers=2, prefix=request.param)
    optimizer = AdamW(model.named_parameters(), 1e-2, (0.9, 0.98))
    for step in range(80):
        optimizer.zero_grad()
        model(*loader.batch(step)).backward()
        optimizer.step(1.0)
    return model, tokenizer


def examples(texts: list[str]) -> list[dict[str, str]]:
    return [{"de": text, "en": ""} for text in texts]


def test_it_translates(trained: tuple[TranslationModel, Tokenizer]) -> None:
    model, tokenizer = trained
    texts = [f"{a} {b}" for a in WORDS for b in WORDS]
    expected = [f"{WORDS[b]} {WORDS[a]}" for a in WORDS for b in WORDS]
    for options in ({}, {"rows": 7}, {"beams": 3}, {"beams": 3, "rows": 8, "length_penalty": 0.0}):
        found = generate(model, examples(texts), "de", "en", tokenizer, 48, "test", **options)
        right = sum(a == b for a, b in zip(found, expected, strict=True))
        assert right >= 15, options
    lazily: Any = iter(examples(texts[:3]))
    assert len(generate(model, lazily, "de", "en", tokenizer, 48, "test")) == 3
    assert generate(model, [], "de", "en", tokenizer, 48, None, "nothing") == []
    one = generate(model, examples(texts[:1]), "de", "en", tokenizer, 48, "a backend", "one")
    assert one == generate(model, examples(texts[:1]), "de", "en", tokenizer, 48, desc="one")


@pytest.mark.parametrize("beams", [1, 3])
def test_special_tokens_are_no_text(beams: int) -> None:
    pairs = [(f"{a} {b}", f"{b} {a}") for a in WORDS for b in WORDS.values()]
    tokenizer = train_tokenizer(pairs, 270, ("de", "en"))
    model = make(vocab_size=tokenizer.vocab_size)
    special = language_token(tokenizer, "en")
    rows = model.tokens.weight.data
    rows[:] = 0
    rows[special] = 1  # the logit of `<|en|>` is the largest of all, or the smallest
    shown = set()
    assert model.norm.weight is not None
    for sign in (1, -1):
        model.norm.weight.data[:] = sign
        (tokens,) = generate_batch(model, [[special]], 3, temperature=0.0)
        shown.update(tokens)
        (text,) = generate(model, examples(["rot"]), "de", "en", tokenizer, 16, beams=beams)
        assert "<|" not in text
    assert special in shown
    assert tokenizer.decode([special, 70], skip_special_tokens=True) == tokenizer.decode([70])


def test_long_and_empty_sources_are_cut_and_kept(
    trained: tuple[TranslationModel, Tokenizer],
) -> None:
    model, tokenizer = trained
    long = "eins zwei drei vier " * 20
    found = generate(model, examples(["rot blau", long, ""]), "de", "en", tokenizer, 48, "test")
    assert len(found) == 3
    assert found[0] == "blue red"
    assert max(len(tokenizer.encode(text)) for text in found) <= 24


def test_bad_calls_are_named(trained: tuple[TranslationModel, Tokenizer]) -> None:
    model, tokenizer = trained
    some = examples(["rot"])
    with pytest.raises(ArgumentError, match="model_max_length is 49, expected 4 to 48"):
        generate(model, some, "de", "en", tokenizer, 49, "test")
    with pytest.raises(ArgumentError, match=r"example 0 has \['de', 'en'\], expected 'fr'"):
        generate(model, some, "fr", "en", tokenizer, 48, "test")
    with pytest.raises(DataError, match=r"expected '<\|fr\|>' among them"):
        generate(model, some, "de", "fr", tokenizer, 48, "test")
    for wrong in ("de", None, ["de"]):
        with pytest.raises(ArgumentError, match=r"example 0 has .*, expected 'de'"):
            generate(model, [wrong], "de", "en", tokenizer, 48, "test")  # type: ignore[list-item]
    nothing: Any = [{"de": "rot"}, {"de": None}]
    with pytest.raises(ArgumentError, match="example 1 has a NoneType under 'de', expected a text"):
        generate(model, nothing, "de", "en", tokenizer, 48, "test")
    with pytest.raises(ArgumentError, match=r"beams is 1\.5, expected an integer"):
        generate(model, some, "de", "en", tokenizer, 48, "test", beams=1.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="model attends to later tokens, expected causal"):
        generate_batch(make(prefix=True), [[1, 2]], 3)
    wrong_searches: list[dict[str, Any]] = [{"beams": 0}, {"beams": 4, "rows": 3}]
    for options in wrong_searches:
        with pytest.raises(ArgumentError, match="expected 1 or more and as many rows"):
            generate(model, some, "de", "en", tokenizer, 48, "test", **options)
