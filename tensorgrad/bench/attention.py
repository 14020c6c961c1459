"""`tensorgrad bench attention`: time and memory of attention kernels over sequence length.

Kernels are those of `nn.ATTENTION_KERNELS`, and PyTorch's scaled_dot_product_attention as a peer.
Operands are (B, H, T, D). Tests: tests/bench/test_attention.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from tensorgrad.bench.kernel_jobs import operations, whole_backward
from tensorgrad.bench.memory import check_fits, peak_memory
from tensorgrad.bench.options import Device, crossed, is_measured
from tensorgrad.bench.pictures import lines, new_figure
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import milliseconds_on, random_array, to_torch
from tensorgrad.core.dtypes import as_dtype
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn import ATTENTION_KERNELS
from tensorgrad.ops.attention import attention
from tensorgrad.ops.attention_unfused import attention_unfused

PEER = "pytorch"
Shape = tuple[int, int, int, int]
Forward = Callable[[], Any]
Backward = Callable[[Any], object]
# Score matrices (B, H, T, T) that are alive at once in backward, at least.
_SCORES = {"unfused": 5, "fused-softmax": 2}


def attention_sweep(
    *,
    lengths: tuple[int, ...] = (),
    widths: tuple[int, ...] = (64, 128),
    kernels: tuple[Literal[ATTENTION_KERNELS], ...] = ATTENTION_KERNELS,  # type: ignore[valid-type]
    causal: bool = True,
    batch: int = 1,
    heads: int = 16,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    peer: bool = False,
    device: Device = "auto",
) -> Iterator[Sweep]:
    """Measure attention kernels over sequence length and head width: time and memory.

    Args:
        lengths: tokens of a sequence (default: 128 to 65536, on a CPU to 1024).
        widths: of a head.
        kernels: flash, one kernel; fused-softmax and unfused keep the matrix of scores.
        causal: whether there is a causal mask.
        batch: sequences.
        heads: attention heads.
        dtype: of queries, keys and values (default: bfloat16, on a CPU float32).
        peer: measure PyTorch's scaled_dot_product_attention too.
    """
    on_host = device == "cpu"
    lengths = lengths or tuple(2**n for n in range(7, 11 if on_host else 17))
    chosen = as_dtype(dtype or ("float32" if on_host else "bfloat16"))
    names = (*kernels, PEER) if is_measured(peer) and peer else kernels
    cases = crossed(
        length=sorted(lengths), width=widths, kernel=names, causal=causal, batch=batch,
        heads=heads, dtype=chosen.name,
    )  # fmt: skip
    parts = "forward_ms", "backward_ms", "both_ms", "forward_tflops", "backward_tflops"
    measure = partial(measure_attention, device=device)
    results = *parts, "forward_mb", "peak_mb"
    cases = [{"kernel": case["kernel"], **case} for case in cases]  # the first column
    yield Sweep("attention", cases, measure, results, draw_attention, device)


def measure_attention(case: Case, device: str) -> Row:
    """Return the results of a case: milliseconds, TFLOP/s and peak memory.

    "peak_mb" is the most memory of arrays during forward and backward, with q, k, v and their
    gradients; "forward_mb" that of forward, which keeps what backward needs.

    Args:
        case: of `attention_cases`.
        device: "cpu", "cuda" or "cuda:N".
    Raises:
        MemoryError: the scores do not fit in the memory that is free.
    """
    shape = case["batch"], case["heads"], case["length"], case["width"]
    if case["kernel"] in _SCORES:
        scores = case["batch"] * case["heads"] * case["length"] ** 2
        size = _SCORES[case["kernel"]] * scores * as_dtype(case["dtype"]).itemsize
        check_fits(size, device)
    torch = importlib.import_module("torch") if case["kernel"] == PEER else None
    make = partial(_passes, shape, case, device, torch)
    forward, backward = make()
    y = forward()
    row: Row = {
        "forward_ms": milliseconds_on(device, lambda _: forward()),
        "backward_ms": milliseconds_on(device, lambda _: backward(y)),
        "both_ms": milliseconds_on(device, lambda _: backward(forward())),
    }
    amount = operations(shape, case["causal"])
    row["forward_tflops"] = amount / row["forward_ms"] / 1e9
    row["backward_tflops"] = 2.5 * amount / row["backward_ms"] / 1e9
    del forward, backward, y
    if torch is not None and device == "cpu":
        return row
    with peak_memory(device, torch) as peak:  # last: the first call allocates workspaces
        forward, backward = make()
        peak.reset()  # the random numbers were float32
        y = forward()
        row["forward_mb"] = peak.bytes / 1e6
        backward(y)
    return row | {"peak_mb": peak.bytes / 1e6}


def _passes(shape: Shape, case: Case, device: str, torch: Any) -> tuple[Forward, Backward]:
    """Return forward, and backward of its result, of one of our kernels or of PyTorch's."""
    *arrays, dy = (random_array(shape, case["dtype"], i, device) for i in range(4))
    if torch is not None:
        operands = [to_torch(torch, array).clone().requires_grad_() for array in arrays]
        weight, causal = to_torch(torch, dy), case["causal"]
        attend = torch.nn.functional.scaled_dot_product_attention
        gradients = partial(torch.autograd.grad, retain_graph=True)
        return (
            lambda: attend(*operands, is_causal=causal),
            lambda y: gradients(y, operands, weight),
        )
    q, k, v = leaves = [Tensor(array, requires_grad=True) for array in arrays]
    forward = partial(attention, q, k, v, causal=case["causal"])
    if case["kernel"] != "flash":
        fused = case["kernel"] == "fused-softmax"
        forward = partial(attention_unfused, q, k, v, causal=case["causal"], fused_softmax=fused)
    return forward, partial(whole_backward, leaves, dy)


def draw_attention(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of a sweep: times, ratio of flash to unfused, and memory."""
    about = "(causal {causal}, batch {batch}, {heads} heads, {dtype}, {device})"
    x, by = ("length", "sequence length (tokens)"), ("kernel", "width")
    parts = {f"{part}_ms": f"{part} (ms)" for part in ("forward", "backward")}
    memory = {"peak_mb": "peak memory, forward and backward (MB)"}
    figures = {
        "": lines(rows, f"Attention: time {about}", x, parts, by),
        "-memory": lines(rows, f"Attention: memory {about}", x, memory, by),
    }
    ratio = _draw_ratio(rows, about.format(**rows[0]))
    return figures if ratio is None else {**figures, "-ratio": ratio}


def _draw_ratio(rows: Sequence[Row], about: str) -> Any:
    """Return the heat map of time of unfused / time of flash; None where one is missing."""
    times = {(row["width"], row["length"], row["kernel"]): row["both_ms"] for row in rows}
    widths, lengths = (sorted({row[name] for row in rows}) for name in ("width", "length"))
    unfused, flash = (
        np.array([[times.get((w, n, kernel), np.nan) for n in lengths] for w in widths])
        for kernel in ("unfused", "flash")
    )
    table = unfused / flash
    if np.isnan(table).all():
        return None
    figure = new_figure(1, 1, f"Attention: time of unfused / time of flash\n{about}", 9.0)
    axes = figure.subplots()
    picture = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(widths)), widths)
    axes.set(xlabel="sequence length (tokens)", ylabel="head width")
    for (y, x), value in np.ndenumerate(table):
        color = "black" if value > 0.6 * np.nanmax(table) else "white"
        axes.text(x, y, f"{value:.1f}", ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(picture, ax=axes)
    return figure
