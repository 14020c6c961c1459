"""The `repr` of objects with settings: their class, sizes and settings, in a line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import data, nn, optim
from tensorgrad.io.display import call_text, to_html
from tensorgrad.optim import lr_scheduler, schedule


def layer() -> nn.Linear:
    return nn.Linear(3, 4)


def adamw() -> optim.Optimizer:
    return optim.AdamW(layer().parameters(), lr=0.1)


def groups() -> optim.Optimizer:
    model = layer()
    assert model.bias is not None
    return optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1)


def tokenizer() -> data.Tokenizer:
    return data.Tokenizer.train(["hello world"] * 10, 260)


ADAMW = "parameters=2, elements=16, lr=0.1, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-08"
ROWS = np.ones((10, 3), "float32")
MADE: list[tuple[Callable[[], Any], str]] = [
    (adamw, f"AdamW({ADAMW})"),
    (
        groups,
        "SGD(parameters=2, elements=16, groups=2, lr=0.1, weight_decay=0.0, momentum=0.0, "
        "dampening=0.0, nesterov=False)",
    ),
    (
        lambda: optim.Muon([layer().weight]),
        "Muon(parameters=1, elements=12, lr=0.001, weight_decay=0.1, betas=(0.9, 0.999), "
        "eps=1e-08, momentum=0.95, nesterov=True, "
        "iterations=5, match_adamw=False)",
    ),
    (
        lambda: optim.Scheduler(adamw(), schedule.cosine, steps=10, warmup=2),
        "Scheduler(cosine, last_step=0, lr=0.1, steps=10, warmup=2)",
    ),
    (
        lambda: lr_scheduler.StepLR(adamw(), 3),
        "Scheduler(stepwise, last_step=0, lr=0.1, step_size=3, gamma=0.1)",
    ),
    (
        lambda: lr_scheduler.LambdaLR(adamw(), lambda step: 0.5),
        "Scheduler(scaled, last_step=0, lr=0.1, lr_lambda=<lambda>)",
    ),
    (optim.LossScaler, "LossScaler(growth=2.0, backoff=0.5, interval=2000)"),
    (lambda: optim.WeightAverage(adamw()), f"WeightAverage(decay=0.999, optimizer=AdamW({ADAMW}))"),
    (
        lambda: data.TokenLoader(np.arange(1000), 4, 8, rank=1, ranks=2),
        "TokenLoader(tokens=1000, windows=123, batch=4, context=8, seed=0, rank=1, ranks=2)",
    ),
    (lambda: data.TensorDataset(ROWS), "TensorDataset(float32 (10, 3))"),
    (
        lambda: data.DataLoader(data.TensorDataset(ROWS), 3, shuffle=True),
        "DataLoader(items=10, batches=4, batch_size=3, shuffle=True, epoch=0, seed=0)",
    ),
    (
        lambda: data.PairLoader([([3, 4], [5, 6])] * 10, 1, 2, 64, 16),
        "PairLoader(pairs=10, shapes=1, batches=2, tokens=50, skipped=0, cut=0, seed=0)",
    ),
    (
        lambda: data.LabelledLoader([[1, 2]] * 9, [0] * 9, 4),
        "LabelledLoader(texts=9, batches=3, widths=1, batch=4, longest=None, seed=0)",
    ),
    (tokenizer, "Tokenizer(vocab_size=260, special_tokens=['<|endoftext|>'])"),
    (
        lambda: data.PublishedTokenizer.of(tokenizer()),
        "PublishedTokenizer('the tokenizer', vocab_size=260, special_tokens=1, end_tokens=(0,), "
        "chat_template=False)",
    ),
    (lambda: data.WordVocabulary(["a", "b"]), "WordVocabulary(words=2)"),
    (
        lambda: data.TokenFile(Path("a.npy"), np.arange(5, dtype="uint16"), 10),
        "TokenFile('a.npy', tokens=5, vocab_size=10)",
    ),
    (
        lambda: data.LabelledTexts(["a"] * 3, np.array([0, 1, 0], "int32")),
        "LabelledTexts(texts=3, classes=2)",
    ),
    (
        lambda: data.PairCorpus([("a", "b")] * 9, [], []),
        "PairCorpus(train=9, validation=0, test=0)",
    ),
]


@pytest.mark.parametrize(("make", "expected"), MADE, ids=[text.split("(")[0] for _, text in MADE])
def test_a_line_says_what_an_object_is(make: Callable[[], Any], expected: str) -> None:
    assert repr(make()) == expected


@pytest.mark.parametrize("kind", [optim.Adam, optim.Lion, optim.Adafactor, optim.SGD, optim.AdamW])
def test_every_optimizer_begins_with_its_class(kind: type[optim.Optimizer]) -> None:
    shown = repr(kind([layer().weight], lr=0.1))  # type: ignore[call-arg]
    assert shown.startswith(f"{kind.__name__}(parameters=1, elements=12, lr=0.1, weight_decay=")
    assert "array" not in shown


def test_a_long_setting_is_cut() -> None:
    assert len(call_text(layer(), kind=list(range(1000)))) < 220
    assert call_text(layer(), "a", f=abs, x=None) == "Linear(a, f=abs, x=None)"
    assert call_text(layer(), text="x" * 198) == f"Linear(text={'x' * 198!r})"


def cells(html: str) -> list[list[str]]:
    rows = re.findall("<tr>(.*?)</tr>", html)
    return [re.findall("<td>(.*?)</td>", row) for row in rows]


def test_small_tensors_are_tables() -> None:
    row = to_html(tg.tensor([1.0, 0.12345678], requires_grad=True))
    assert row == (
        "<code>tensor (2,), float32, cpu, requires_grad</code>"
        "<table><tr><td>1</td><td>0.1235</td></tr></table>"
    )
    table = to_html(tg.arange(6).reshape(2, 3))
    assert table.startswith("<code>tensor (2, 3), int64, cpu</code><table>")
    assert cells(table) == [["0", "1", "2"], ["3", "4", "5"]]
    for values in (tg.zeros(()), tg.zeros((0, 3)), tg.zeros((1, 1, 2))):
        shown = to_html(values)
        assert "<table>" not in shown
        assert shown.endswith(f"<pre>{np.array2string(values.numpy())}</pre>")


def test_of_large_tensors_the_ends_are_shown() -> None:
    assert all("…" not in row for row in cells(to_html(tg.zeros((20, 10)))))
    found = cells(to_html(tg.arange(21 * 11).reshape(21, 11)))
    columns = [0, 1, 2, 3, 4, None, 6, 7, 8, 9, 10]
    rows = [*range(10), None, *range(11, 21)]
    assert found == [["…" if None in (i, j) else str(11 * i + j) for j in columns] for i in rows]
