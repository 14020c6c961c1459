"""`tensorgrad bench precision`: what 16 bits do to sums, to dtypes inside a model, and to training.

Three tables: the error of adding many numbers one after the other; the dtype of everything in a
small GPT-2 under autocast; and loss curves of that model in each precision, with the same weights
and batches. Tests: tests/bench/test_precision.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from tensorgrad.bench.options import Device, crossed
from tensorgrad.bench.pictures import lines, loss_curves
from tensorgrad.bench.sweep import OK, Case, Row, Sweep, like
from tensorgrad.core import backend
from tensorgrad.core.dtypes import as_dtype
from tensorgrad.core.tensor import Tensor
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.ops.reduce import sum as sum_op
from tensorgrad.profile.training_step import TrainingStep, language_step
from tensorgrad.train.language import LanguageSettings

# name -> dtype of the numbers, dtype of the sum
SUMS = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16 into float32": ("float16", "float32"),
    "bfloat16 into float32": ("bfloat16", "float32"),
}
_DTYPES_OF_SUMS = {name: dtype for name, (dtype, _) in SUMS.items()} | {
    f"tensorgrad.sum of {dtype}": dtype for dtype in ("float16", "bfloat16")
}
KINDS = ("float32", "tf32", "float16", "bfloat16", "bfloat16-parameters")
_ADDEND = 0.01
_LEAST = 1e-8  # on a logarithmic axis
_SMALL = GPT2Config(vocab_size=64, context=32, layers=2, heads=4, width=64)
_BATCH, _LR, _NOISE = 16, 1e-2, 0.1


def precision_sweep(
    *,
    parts: tuple[Literal["accumulation", "dtypes", "losses"], ...] = (
        *("accumulation", "dtypes", "losses"),
    ),
    counts: tuple[int, ...] = (100, 1000, 10_000, 100_000),
    steps: int = 300,
    seed: int = 0,
    device: Device = "auto",
) -> Iterator[Sweep]:
    """Measure what 16 bits do to sums, to dtypes inside a model, and to training.

    Args:
        parts: accumulation, errors of sums of many numbers; dtypes, of parameters, activations,
            norms, logits, loss and gradients; losses, loss curves of a small GPT-2.
        counts: numbers of a sum.
        steps: of a loss curve.
        seed: of weights and batches of the loss curves.
    """
    sweeps = {
        "accumulation": Sweep(
            "precision-accumulation",
            [row | {"dtype": _DTYPES_OF_SUMS[row["sum"]]}
             for row in crossed(sum=tuple(_DTYPES_OF_SUMS), count=sorted(counts))],
            partial(measure_accumulation, device=device),
            ("total", "exact", "relative_error"), draw_accumulation, device,
        ),
        "dtypes": Sweep(
            "precision-dtypes", crossed(dtype=KINDS), partial(measure_dtypes, device=device),
            (
                *("parameters", "residual_stream", "norm_output", "linear_output"),
                *("attention_output", "logits", "loss", "gradients", "optimizer_state"),
            ),
            device=device,
        ),
        "losses": Sweep(
            "precision-losses", crossed(dtype=KINDS, steps=steps, seed=seed),
            partial(measure_losses, device=device),
            ("first_loss", "final_loss", "above_float32", "losses"), draw_losses, device,
            with_difference, hidden=("losses",),
        ),
    }  # fmt: skip
    yield from (sweeps[part] for part in dict.fromkeys(parts))


def measure_accumulation(case: Case, device: str) -> Row:
    """Return the sum and its error relative to that in float64."""
    numbers = np.full(case["count"], _ADDEND).astype(as_dtype(case["dtype"]))
    if case["sum"] in SUMS:
        wide = numbers.astype(as_dtype(SUMS[case["sum"]][1]))
        total = float(np.add.accumulate(wide)[-1])  # which rounds after each number
    else:
        total = float(sum_op(Tensor(backend.to_device(numbers, device))).item())
    exact = _ADDEND * case["count"]
    return {"total": total, "exact": exact, "relative_error": abs(total - exact) / exact}


def _step(case: Case, device: str) -> TrainingStep:
    """Return a training step of a small GPT-2."""
    settings = LanguageSettings(
        batch=_BATCH, dtype=case["dtype"], seed=case.get("seed", 0), lr=_LR, weight_decay=0.01
    )
    return language_step(settings, _SMALL, device)


def measure_dtypes(case: Case, device: str) -> Row:
    """Return the dtype of each thing in a training step of a small GPT-2."""
    step = _step(case, device)
    model: Any = step.model
    x, y = map(Tensor, _batch(0, device))
    block, row = model.blocks[0], {"parameters": str(model.tokens.weight.dtype)}
    optimizer = step.optimizer
    with step.settings.precision()():
        stream: Tensor = model.embed(x)
        normed = block.norm1(stream)
        row["residual_stream"] = str(stream.dtype)
        row["norm_output"] = str(normed.dtype)
        row["linear_output"] = str(block.feed_forward.up(normed).dtype)
        row["attention_output"] = str(block.attention(normed).dtype)
        row["logits"] = str(model(x).dtype)
        loss = model(x, y)
    row["loss"] = str(loss.dtype)
    loss.backward()
    numbers = optimizer.numbers()
    state = [
        value
        for name, value in optimizer.state_dict().items()
        if name not in numbers and not name.startswith("low_bits/")  # half of float32 weights
    ]
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for name, arrays in (("gradients", grads), ("optimizer_state", state)):
        row[name] = ", ".join(sorted({str(array.dtype) for array in arrays}))
    return row


def measure_losses(case: Case, device: str) -> Row:
    """Return the losses of a small GPT-2 that trains on synthetic text: a chain with noise."""
    step, first = _step(case, device), case["seed"] + 1
    losses = [step(*_batch(first + number, device)) for number in range(case["steps"])]
    values = [float(loss) for loss in losses]
    last = values[-max(1, len(values) // 10) :]
    return {
        "first_loss": values[0],
        "final_loss": sum(last) / len(last),
        "losses": " ".join(f"{value:.5g}" for value in values),
    }


def _batch(seed: int, device: str) -> tuple[backend.Array, backend.Array]:
    """Return tokens and targets: each token follows from the one before, but for a tenth."""
    follows = np.random.default_rng(0).permutation(_SMALL.vocab_size)
    rng = np.random.default_rng([1, seed])
    shape = _BATCH, _SMALL.context + 1
    tokens = rng.integers(0, _SMALL.vocab_size, shape)
    random_ones = rng.random(shape) < _NOISE
    for i in range(1, shape[1]):
        tokens[:, i] = np.where(random_ones[:, i], tokens[:, i], follows[tokens[:, i - 1]])
    x, y = tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)
    return backend.to_device(x, device), backend.to_device(y, device)


def with_difference(row: Row, before: Sequence[Row]) -> Row:
    """Add the final loss above that in float32 of the same steps and seed."""
    wide = like({**row, "dtype": "float32"}, before, ("dtype", "steps", "seed"))
    if row["status"] != OK or not wide:
        return row
    return {**row, "above_float32": row["final_loss"] - wide[-1]["final_loss"]}


def draw_accumulation(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figure of the errors of sums."""
    shown = [{**row, "relative_error": max(row["relative_error"], _LEAST)} for row in rows]
    panels = {"relative_error": f"relative error (drawn as {_LEAST:g} where smaller)"}
    title = "Adding 0.01 many times: error against float64"
    return {"": lines(shown, title, ("count", "numbers"), panels, ("sum",))}


def draw_losses(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figure of the loss curves, each smoothed, and what they are above float32."""
    title = "Small GPT-2 on synthetic text, seed {seed}, {device}".format(**rows[0])
    curves = {row["dtype"]: [float(x) for x in str(row["losses"]).split()] for row in rows}
    window = max(1, min(map(len, curves.values())) // 20)
    return loss_curves(title, curves, "float32", window)
