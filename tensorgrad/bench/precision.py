"""`tensorgrad bench precision`: what 16 bits do to sums, to dtypes inside a model, and to training.

Three tables: the error of adding many numbers one after the other; the dtype of everything in a
small GPT-2 under autocast; and loss curves of that model in each precision, with the same weights
and batches. Tests: tests/bench/test_precision.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tensorgrad import backend, random
from tensorgrad.amp import AUTOCAST, autocast
from tensorgrad.bench.pictures import new_figure, plot_lines
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.checks import check_integer
from tensorgrad.dtypes import as_dtype
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.nn import FeedForward, TransformerBlock
from tensorgrad.ops.reduce import sum as sum_op
from tensorgrad.optim import AdamW, LossScaler, decays_matrices
from tensorgrad.tensor import Tensor

# name -> dtype of the numbers, dtype of the sum
SUMS = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16 into float32": ("float16", "float32"),
    "bfloat16 into float32": ("bfloat16", "float32"),
}
KINDS = ("float32", "tf32", "float16", "bfloat16", "bfloat16-parameters")
_ADDEND = 0.01
_LEAST = 1e-8  # on a logarithmic axis
_SMALL = GPT2Config(vocab_size=64, context=32, layers=2, heads=4, width=64)
_BATCH, _LR, _NOISE = 16, 1e-2, 0.1


def accumulation_cases(counts: Sequence[int] = (100, 1000, 10_000, 100_000)) -> list[Case]:
    """Return the cases of sums of 0.01: each of SUMS one number at a time, and the library's sum.

    Args:
        counts: how many numbers are added.
    Raises:
        ArgumentError: a count is below 1.
    """
    for count in counts:
        check_integer("bench precision", "count", count, 1)
    names = [(name, dtype) for name, (dtype, _) in SUMS.items()]
    names += [(f"tensorgrad.sum of {dtype}", dtype) for dtype in ("float16", "bfloat16")]
    return [
        {"sum": name, "count": count, "dtype": dtype}
        for name, dtype in names
        for count in sorted(set(counts))
    ]


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


def dtype_cases(kinds: Sequence[str] = KINDS) -> list[Case]:
    """Return the cases of the table of dtypes.

    Args:
        kinds: of KINDS; tf32, float16 and bfloat16 are autocast.
    Raises:
        ArgumentError: there is no such kind.
    """
    _check(kinds)
    return [{"dtype": kind} for kind in dict.fromkeys(kinds)]


def measure_dtypes(case: Case, device: str) -> Row:
    """Return the dtype of each thing in a training step of a small GPT-2."""
    model = _model(case["dtype"], device)
    x, y = _batch(0, device)
    block = model.blocks[0]
    assert isinstance(block, TransformerBlock)
    assert isinstance(block.feed_forward, FeedForward)
    row: Row = {"parameters": str(model.tokens.weight.dtype)}
    optimizer = AdamW(model.named_parameters(), _LR)
    with _casts(case["dtype"]):
        stream: Tensor = model.embed(Tensor(x))
        normed = block.norm1(stream)
        row["residual_stream"] = str(stream.dtype)
        row["norm_output"] = str(normed.dtype)
        row["linear_output"] = str(block.feed_forward.up(normed).dtype)
        row["attention_output"] = str(block.attention(normed).dtype)
        row["logits"] = str(model(Tensor(x)).dtype)
        loss = model(Tensor(x), Tensor(y))
    row["loss"] = str(loss.dtype)
    loss.backward()
    row["gradients"] = ", ".join(
        sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
    )
    numbers = optimizer.numbers()
    state = [
        value
        for name, value in optimizer.state_dict().items()
        if name not in numbers and not name.startswith("low_bits/")  # half of float32 weights
    ]
    row["optimizer_state"] = ", ".join(sorted({str(each.dtype) for each in state}))
    return row


def loss_cases(kinds: Sequence[str] = KINDS, steps: int = 300, seed: int = 0) -> list[Case]:
    """Return the cases of the loss curves.

    Args:
        kinds: of KINDS; float16 has a loss scaler.
        steps: of training.
        seed: of weights and batches.
    Raises:
        ArgumentError: there is no such kind, or no step.
    """
    _check(kinds)
    check_integer("bench precision", "steps", steps, 1)
    return [{"dtype": kind, "steps": steps, "seed": seed} for kind in dict.fromkeys(kinds)]


def measure_losses(case: Case, device: str) -> Row:
    """Return the losses of a small GPT-2 that trains on synthetic text: a chain with noise."""
    model = _model(case["dtype"], device, case["seed"])
    optimizer = AdamW(model.named_parameters(), _LR, (0.9, 0.95), decay=decays_matrices)
    scaler = LossScaler() if case["dtype"] == "float16" else None
    losses = []
    for step in range(case["steps"]):
        x, y = _batch(case["seed"] + step + 1, device)
        optimizer.zero_grad()
        with _casts(case["dtype"]):
            loss = model(Tensor(x), Tensor(y))
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step(1.0, scaler)
        losses.append(loss.data)
    values = [float(each) for each in losses]
    last = values[-max(1, len(values) // 10) :]
    return {
        "first_loss": values[0],
        "final_loss": sum(last) / len(last),
        "losses": " ".join(f"{value:.5g}" for value in values),
    }


def _check(kinds: Sequence[str]) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise ArgumentError(f"bench precision: got {kind!r}, expected {', '.join(KINDS)}")


def _model(kind: str, device: str, seed: int = 0) -> GPT2:
    random.seed(seed)
    return GPT2(_SMALL).to(device, "bfloat16" if kind == "bfloat16-parameters" else "float32")


def _casts(kind: str) -> AbstractContextManager[None]:
    return autocast(kind) if kind in AUTOCAST else nullcontext()


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
    if row["status"] != "ok":
        return row
    same = [
        each["final_loss"]
        for each in before
        if each["dtype"] == "float32"
        and each["status"] == "ok"
        and all(str(each[name]) == str(row[name]) for name in ("steps", "seed", "device"))
    ]
    return {**row, "above_float32": row["final_loss"] - same[-1]} if same else row


def draw_accumulation(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figure of the errors of sums."""
    figure = new_figure(1, 1, "Adding 0.01 many times: error against float64", 8.0)
    axes = figure.subplots()
    shown = [{**row, "relative_error": max(row["relative_error"], _LEAST)} for row in rows]
    plot_lines(axes, shown, "count", "relative_error", ("sum",))
    words = f"relative error (drawn as {_LEAST:g} where smaller)"
    axes.set(xscale="log", yscale="log", xlabel="numbers", ylabel=words)
    return {"": figure}


def draw_losses(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figure of the loss curves, each smoothed, and what they are above float32."""
    first = rows[0]
    figure = new_figure(2, 1, f"Small GPT-2 on synthetic text, seed {first['seed']}, "
                        f"{first['device']}")  # fmt: skip
    curves, above = figure.subplots(1, 2)
    series = {row["dtype"]: [float(x) for x in str(row["losses"]).split()] for row in rows}
    for name, losses in series.items():
        curves.plot(range(1, len(losses) + 1), losses, linewidth=1, label=name)
    curves.set(xlabel="step", ylabel="loss (nats)", title="training loss")
    reference = series.get("float32", [])
    count = max(1, len(reference) // 20)
    kernel = np.full(count, 1 / count)
    for name, losses in series.items():
        if name != "float32" and len(losses) == len(reference):
            difference = np.convolve(np.subtract(losses, reference), kernel, "valid")
            above.plot(range(count, len(losses) + 1), difference, linewidth=1, label=name)
    above.axhline(0, color="black", linewidth=0.6)
    above.set(
        xlabel="step",
        ylabel="loss above float32 (nats)",
        title=f"difference, mean of {count} steps",
    )
    for axes in (curves, above):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    return {"": figure}


ACCUMULATION = Sweep(
    "precision-accumulation",
    ("sum", "count", "dtype"),
    ("total", "exact", "relative_error"),
    draw_accumulation,
)
DTYPES = Sweep(
    "precision-dtypes",
    ("dtype",),
    (
        *("parameters", "residual_stream", "norm_output", "linear_output", "attention_output"),
        *("logits", "loss", "gradients", "optimizer_state"),
    ),
    lambda rows: {},
)
LOSSES = Sweep(
    "precision-losses",
    ("dtype", "steps", "seed"),
    ("first_loss", "final_loss", "above_float32", "losses"),
    draw_losses,
    with_difference,
    hidden=("losses",),
)
