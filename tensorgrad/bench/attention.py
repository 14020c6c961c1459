"""`tensorgrad bench attention`: time and memory of attention kernels over sequence length.

Kernels are those of `nn.ATTENTION_KERNELS`, and PyTorch's scaled_dot_product_attention as a peer.
Operands are (B, H, T, D). Tests: tests/bench/test_attention.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from tensorgrad.bench.memory import check_fits, peak_memory
from tensorgrad.bench.pictures import new_figure, plot_lines, powers_of_two
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import milliseconds_on, random_array
from tensorgrad.checks import check_integer
from tensorgrad.dtypes import as_dtype
from tensorgrad.errors import ArgumentError
from tensorgrad.nn import ATTENTION_KERNELS
from tensorgrad.ops.attention import attention
from tensorgrad.ops.attention_unfused import attention_unfused
from tensorgrad.tensor import Tensor

PEER = "pytorch"
_MASKS = {True: "causal", False: "full"}
# Score matrices (B, H, T, T) that are alive at once in backward, at least.
_SCORES = {"unfused": 5, "fused-softmax": 2}


def operations(shape: tuple[int, int, int, int], causal: bool) -> float:
    """Return the usual count of floating-point operations forward; backward has 2.5 times that.

    4 B H T^2 D, and half of it for a causal mask

    Args:
        shape: (B, H, T, D).
        causal: whether there is a causal mask.
    """
    batch, heads, length, width = shape
    return 4 * batch * heads * length**2 * width * (0.5 if causal else 1)


def attention_cases(
    lengths: Sequence[int],
    widths: Sequence[int],
    kernels: Sequence[str],
    causal: Sequence[bool] = (True,),
    *,
    batch: int = 1,
    heads: int = 16,
    dtype: str = "bfloat16",
) -> list[Case]:
    """Return the cases of a sweep, short sequences first.

    Args: see `tensorgrad bench attention --help`.
    Raises:
        ArgumentError: a size is below 1, or there is no such kernel.
        DtypeError: there is no such dtype.
    """
    sizes = {"lengths": lengths, "widths": widths, "batch": [batch], "heads": [heads]}
    for name, values in sizes.items():
        for value in values:
            check_integer("bench attention", name, value, 1)
    for kernel in kernels:
        if kernel not in (*ATTENTION_KERNELS, PEER):
            expected = ", ".join((*ATTENTION_KERNELS, PEER))
            raise ArgumentError(f"bench attention: kernel is {kernel!r}, expected {expected}")
    as_dtype(dtype)
    return [
        {
            "kernel": kernel, "length": length, "width": width, "causal": masked,
            "batch": batch, "heads": heads, "dtype": dtype,
        }
        for length in sorted(set(lengths))
        for width in dict.fromkeys(widths)
        for masked in dict.fromkeys(causal)
        for kernel in dict.fromkeys(kernels)
    ]  # fmt: skip


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
    passes = _PeerPasses if case["kernel"] == PEER else _Passes
    row = _times(passes(shape, case, device), device)
    amount = operations(shape, case["causal"])
    row["forward_tflops"] = amount / row["forward_ms"] / 1e9
    row["backward_tflops"] = 2.5 * amount / row["backward_ms"] / 1e9
    return row | passes.memory(shape, case, device)  # last: the first call allocates workspaces


def _times(run: _Passes | _PeerPasses, device: str) -> Row:
    return {
        "forward_ms": milliseconds_on(device, lambda _: run.forward()),
        "backward_ms": _backward_milliseconds(run, device),
        "both_ms": milliseconds_on(device, lambda _: run.backward(run.forward())),
    }


def _backward_milliseconds(run: _Passes | _PeerPasses, device: str) -> float:
    y: Any = run.forward()
    return milliseconds_on(device, lambda _: run.backward(y))


class _Passes:
    """Forward and backward of one of our kernels."""

    def __init__(self, shape: tuple[int, int, int, int], case: Case, device: str) -> None:
        self._operands = [
            Tensor(random_array(shape, case["dtype"], i, device), requires_grad=True)
            for i in range(3)
        ]
        self._dy = random_array(shape, case["dtype"], 3, device)
        self._kernel, self._causal = case["kernel"], case["causal"]

    def forward(self) -> Tensor:
        """Return the result, with what backward needs."""
        q, k, v = self._operands
        if self._kernel == "flash":
            return attention(q, k, v, causal=self._causal)
        fused = self._kernel == "fused-softmax"
        return attention_unfused(q, k, v, causal=self._causal, fused_softmax=fused)

    def backward(self, y: Tensor) -> None:
        """Compute the gradients of q, k and v; what forward kept stays."""
        for tensor in self._operands:
            tensor.grad = None
        y.backward(self._dy, retain_graph=True)

    @classmethod
    def memory(cls, shape: tuple[int, int, int, int], case: Case, device: str) -> Row:
        """Return the peaks of forward, and of forward and backward."""
        with peak_memory(device) as peak:
            run = cls(shape, case, device)
            peak.reset()  # the random numbers were float32
            y = run.forward()
            forward = peak.bytes
            run.backward(y)
            return {"forward_mb": forward / 1e6, "peak_mb": peak.bytes / 1e6}


class _PeerPasses:
    """The same of PyTorch."""

    def __init__(self, shape: tuple[int, int, int, int], case: Case, device: str) -> None:
        self._torch = torch = importlib.import_module("torch")
        options = {"device": device, "dtype": getattr(torch, case["dtype"])}
        self._operands = [torch.randn(shape, requires_grad=True, **options) for _ in range(3)]
        self._dy = torch.randn(shape, **options)
        self._causal = case["causal"]

    def forward(self) -> Any:
        """Return the result."""
        attend: Callable[..., Any] = self._torch.nn.functional.scaled_dot_product_attention
        return attend(*self._operands, is_causal=self._causal)

    def backward(self, y: Any) -> None:
        """Compute the gradients of q, k and v."""
        self._torch.autograd.grad(y, self._operands, self._dy, retain_graph=True)

    @classmethod
    def memory(cls, shape: tuple[int, int, int, int], case: Case, device: str) -> Row:
        """Return the peaks by PyTorch's allocator; nothing on a CPU."""
        run = cls(shape, case, device)
        if device == "cpu":
            return {}
        cuda = run._torch.cuda
        cuda.reset_peak_memory_stats()
        y = run.forward()
        forward = cuda.max_memory_allocated()
        run.backward(y)
        return {"forward_mb": forward / 1e6, "peak_mb": cuda.max_memory_allocated() / 1e6}


def draw_attention(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of a sweep: times, ratio of flash to unfused, and memory."""
    figures = {"": _draw_times(rows), "-memory": _draw_memory(rows)}
    ratio = _draw_ratio(rows)
    return figures if ratio is None else {**figures, "-ratio": ratio}


def _by_mask(rows: Sequence[Row]) -> dict[bool, list[Row]]:
    """Return the rows with and without a causal mask."""
    kinds = sorted({row["causal"] for row in rows}, reverse=True)
    return {kind: [row for row in rows if row["causal"] == kind] for kind in kinds}


def _about(rows: Sequence[Row]) -> str:
    first = rows[0]
    return f"batch {first['batch']}, {first['heads']} heads, {first['dtype']}, {first['device']}"


def _draw_times(rows: Sequence[Row]) -> Any:
    groups = _by_mask(rows)
    figure = new_figure(2, len(groups), f"Attention: time by sequence length ({_about(rows)})")
    grid = figure.subplots(len(groups), 2, squeeze=False)
    for line, (masked, members) in zip(grid, groups.items(), strict=True):
        for axes, part in zip(line, ("forward", "backward"), strict=True):
            plot_lines(axes, members, "length", f"{part}_ms", ("kernel", "width"))
            powers_of_two(axes)
            axes.set(
                title=f"{part}, {_MASKS[masked]}", xlabel="sequence length (tokens)",
                ylabel="time (ms)", yscale="log",
            )  # fmt: skip
            axes.get_legend().set_title("kernel, head width", {"size": 8})
    return figure


def _draw_memory(rows: Sequence[Row]) -> Any:
    groups = _by_mask(rows)
    figure = new_figure(len(groups), 1, f"Attention: peak memory, forward and backward\n"
                        f"({_about(rows)})")  # fmt: skip
    grid = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (masked, members) in zip(grid, groups.items(), strict=True):
        plot_lines(axes, members, "length", "peak_mb", ("kernel", "width"))
        powers_of_two(axes)
        axes.set(
            title=_MASKS[masked], xlabel="sequence length (tokens)", ylabel="memory (MB)",
            yscale="log",
        )  # fmt: skip
    return figure


def _draw_ratio(rows: Sequence[Row]) -> Any:
    """Return the heat map of time of unfused / time of flash; None where one is missing."""
    times = {(r["causal"], r["width"], r["length"], r["kernel"]): r["both_ms"] for r in rows}
    groups = _by_mask(rows)
    lengths = sorted({row["length"] for row in rows})
    widths = sorted({row["width"] for row in rows})

    def ratio(masked: bool, width: int, length: int) -> float:
        pair = (times.get((masked, width, length, kernel)) for kernel in ("unfused", "flash"))
        unfused, flash = pair
        return unfused / flash if unfused and flash else float("nan")

    maps = {
        masked: [[ratio(masked, width, length) for length in lengths] for width in widths]
        for masked in groups
    }
    known = [x for table in maps.values() for line in table for x in line if x == x]
    if not known:
        return None
    figure = new_figure(1, 1, f"Attention: how many times faster flash is than unfused\n"
                        f"(forward and backward, {_about(rows)})", 9.0)  # fmt: skip
    grid = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, (masked, table) in zip(grid, maps.items(), strict=True):
        picture = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=max(known))
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        axes.set_yticks(range(len(widths)), widths)
        axes.set(title=_MASKS[masked], xlabel="sequence length (tokens)", ylabel="head width")
        for y, line in enumerate(table):
            for x, value in enumerate(line):
                words = f"{value:.1f}" if value == value else "-"
                color = "black" if value > 0.6 * max(known) else "white"
                axes.text(x, y, words, ha="center", va="center", color=color, fontsize=8)
        figure.colorbar(picture, ax=axes, label="time of unfused / time of flash")
    return figure


ATTENTION = Sweep(
    "attention",
    ("kernel", "length", "width", "causal", "batch", "heads", "dtype"),
    (
        *("forward_ms", "backward_ms", "both_ms", "forward_tflops", "backward_tflops"),
        *("forward_mb", "peak_mb"),
    ),
    draw_attention,
)
