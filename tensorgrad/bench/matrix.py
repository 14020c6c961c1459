"""`tensorgrad bench matrix`: attention kernels x parallel modes, in tokens/s, scaling and memory.

All ranks train a GPT-2 on random tokens. In the mode "none" each trains for itself while the others
do the same, so that all GPUs are equally warm; its figures are those of one GPU. Peers are PyTorch
alone and PyTorch's DDP. Tests: tests/bench/test_matrix.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorgrad.bench import torch_ddp
from tensorgrad.bench.memory import release
from tensorgrad.bench.pictures import new_figure
from tensorgrad.bench.steps import PRECISIONS, RankTimer, Step, StepSettings, training_step
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.nn import ATTENTION_KERNELS
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.data import REDUCTIONS, DataParallel
from tensorgrad.parallel.train_gpt2 import MODES, ZERO
from tensorgrad.parallel.zero import Zero
from tensorgrad.train.ranks import OneProcess, Ranks
from tensorgrad.train.settings import has_narrow_products

PEERS = {"none": "pytorch", "ddp": "pytorch-ddp"}  # kinds of `attention` of PyTorch, by mode


@dataclass(frozen=True)
class MatrixSettings:
    """The model, the batch and the timing of a matrix.

    The defaults are a setting with published figures: 24 layers, C 512, feed-forward 4096, 16
    heads, T 256, 8 sequences a GPU, vocabulary 10,000.

    Args:
        config: sizes of the model.
        hidden: width of the feed-forward layers.
        batch: sequences of a rank.
        dtype: of `steps.PRECISIONS`.
        steps: of a timed window; three windows are timed.
        tokens: of an epoch.
        compiled: whether PyTorch compiles its model.
        captured: whether our steps are CUDA graphs.
    Raises:
        ArgumentError: a number is out of its range.
    """

    config: GPT2Config = GPT2Config(10000, 256, 24, 16, 512)  # noqa: RUF009  frozen
    hidden: int = 4096
    batch: int = 8
    dtype: str = "bfloat16-parameters"
    steps: int = 20
    tokens: int = 100_000_000
    compiled: bool = False
    captured: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("hidden", "batch", "steps", "tokens"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"bench matrix: {name} is {getattr(self, name)}, expected > 0")
        if self.dtype not in PRECISIONS:
            expected = ", ".join(PRECISIONS)
            raise ArgumentError(f"bench matrix: dtype is {self.dtype!r}, expected {expected}")


def matrix_cases(
    settings: MatrixSettings,
    ranks: int,
    kernels: Sequence[str] = ATTENTION_KERNELS,
    modes: Sequence[str] = MODES,
    peer: bool = False,
) -> list[Case]:
    """Return the cases of a sweep; "none" comes first, as others are compared with it.

    Args:
        settings: the model and the batch.
        ranks: how many there are. On one rank "none" is the only mode.
        kernels: of ATTENTION_KERNELS.
        modes: of MODES: none, naive, flat, overlap, zero1 to zero3.
        peer: whether PyTorch is measured too.
    Raises:
        ArgumentError: a kernel or a mode is unknown.
    """
    for name, values, known in (
        ("kernel", kernels, ATTENTION_KERNELS), ("parallel", modes, MODES)
    ):  # fmt: skip
        for value in values:
            if value not in known:
                expected = ", ".join(known)
                raise ArgumentError(f"bench matrix: {name} is {value!r}, expected {expected}")
    chosen = [mode for mode in MODES if mode in modes and (ranks > 1 or mode == "none")]
    pairs = [(kernel, mode) for kernel in dict.fromkeys(kernels) for mode in chosen]
    if peer:
        pairs += [("sdpa", PEERS["none"])] + [("sdpa", PEERS["ddp"])] * (ranks > 1)
    config = settings.config
    sizes = {
        "layers": config.layers, "width": config.width, "hidden": settings.hidden,
        "heads": config.heads, "context": config.context, "vocab": config.vocab_size,
        "batch": settings.batch, "dtype": settings.dtype, "steps": settings.steps,
        "epoch_tokens": settings.tokens,
    }  # fmt: skip
    return [
        {
            "attention": kernel, "parallel": mode, "ranks": _ranks_of(mode, ranks), "world": ranks,
            "compiled": settings.compiled and kernel == "sdpa",
            "captured": settings.captured and kernel != "sdpa", **sizes,
        }
        for kernel, mode in pairs
    ]  # fmt: skip


def _ranks_of(mode: str, ranks: int) -> int:
    return 1 if mode in ("none", PEERS["none"]) else ranks


class MatrixBench:
    """Measures the cases of a matrix; all ranks make one and call it in the same order.

    Args:
        settings: the model and the batch.
        comm: the ranks.
        device: of this rank.
    """

    def __init__(self, settings: MatrixSettings, comm: Comm, device: str) -> None:
        self._settings, self._comm, self._device = settings, comm, device
        self._timer = RankTimer(comm, device, 3)
        self._torch: Any = None

    def __call__(self, case: Case) -> Row:
        """Return the results of a case."""
        line = self._peer(case) if case["parallel"] in PEERS.values() else self._ours(case)
        tokens = self._settings.batch * self._settings.config.context * case["ranks"]
        speed = 1e3 * tokens / line["ms"]
        return {**line, "tokens_per_second": speed, "epoch_s": self._settings.tokens / speed}

    def close(self) -> None:
        """Disconnect PyTorch's ranks."""
        if self._torch is not None:
            self._torch.distributed.destroy_process_group()
            self._torch = None

    def _ours(self, case: Case) -> Row:
        settings = self._settings
        step_settings = StepSettings(
            settings.config, settings.batch, settings.dtype, settings.hidden, case["attention"]
        )

        def make() -> Step:
            ranks = self._strategy(case["parallel"])
            return training_step(step_settings, ranks, self._device, settings.captured)

        step = make()
        ms = 1e3 * self._timer.seconds(step, settings.steps)
        del step
        found: dict[str, Any] = {}
        with self._timer.peak(found):  # of another one: the first case would have all workspaces
            step = make()
            step()
            step()
            self._timer.wait()
        return {"ms": ms, "peak_mb": found["peak MB"], "device_mb": found.get("device MB")}

    def _strategy(self, mode: str) -> Ranks:
        if mode in REDUCTIONS:
            return DataParallel(self._comm, mode)
        return Zero(self._comm, ZERO[mode]) if mode in ZERO else OneProcess()

    def _peer(self, case: Case) -> Row:
        """Return time and memory of PyTorch."""
        settings = self._settings
        if self._torch is None:
            self._torch = importlib.import_module("torch")
            torch_ddp.join(self._torch, self._comm, self._device)
        cuda = None if self._device == "cpu" else self._torch.cuda
        release()
        if cuda is not None:
            cuda.reset_peak_memory_stats()
        step = torch_ddp.training_step(
            *(self._torch, settings.config, settings.batch, self._device),
            autocast=has_narrow_products(settings.dtype), several=case["parallel"] == PEERS["ddp"],
            compiled=settings.compiled, hidden=settings.hidden,
        )  # fmt: skip
        row: Row = {"ms": 1e3 * self._timer.seconds(step, settings.steps)}
        if cuda is not None:
            row["peak_mb"] = self._timer.largest(cuda.max_memory_allocated() / 1e6)
        return row


def with_scaling(row: Row, before: Sequence[Row]) -> Row:
    """Add scaling efficiency (%) and memory overhead (%), against one GPU with the same attention.

    scaling = 100 tokens/s / (ranks * tokens/s of one),  overhead = 100 (peak / peak of one - 1)
    """
    if row["status"] != "ok" or row["ranks"] == 1:
        return row
    same = "attention", "world", *_SIZES, "device"
    alone = [
        each
        for each in before
        if each["ranks"] == 1
        and each["status"] == "ok"
        and all(str(each[name]) == str(row[name]) for name in same)
    ]
    if not alone:
        return row
    one, speed = alone[-1], row["tokens_per_second"]
    row = {**row, "scaling": 100 * speed / (row["ranks"] * one["tokens_per_second"])}
    if row.get("peak_mb") and one["peak_mb"]:
        row["memory_overhead"] = 100 * (row["peak_mb"] / one["peak_mb"] - 1)
    return row


def draw_matrix(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figure of a matrix: tokens/s with scaling, and peak memory with overhead."""
    first = rows[0]
    title = (
        f"GPT-2, {first['layers']} layers, C {first['width']}, T {first['context']}, batch "
        f"{first['batch']} a GPU, {first['dtype']}, {first['world']} ranks, {first['device']}"
    )
    figure = new_figure(1, 2, title, 11.0)
    speeds, memories = figure.subplots(2, 1)
    _draw_bars(speeds, rows, "tokens_per_second", "scaling")
    speeds.set(ylabel="tokens/s", title="throughput of all ranks, with scaling efficiency")
    _draw_bars(memories, [row for row in rows if row["peak_mb"] != ""], "peak_mb",
               "memory_overhead")  # fmt: skip
    memories.set(ylabel="peak memory (MB)", title="memory of the fullest rank, and more than alone")
    return {"": figure}


def _draw_bars(axes: Any, rows: Sequence[Row], value: str, note: str) -> None:
    """Draw a group of bars for each mode, one for each attention kernel."""
    modes = list(dict.fromkeys(row["parallel"] for row in rows))
    kernels = list(dict.fromkeys(row["attention"] for row in rows))
    width = 0.8 / max(1, len(kernels))
    for number, kernel in enumerate(kernels):
        own = [row for row in rows if row["attention"] == kernel]
        places = [modes.index(row["parallel"]) + (number - (len(kernels) - 1) / 2) * width
                  for row in own]  # fmt: skip
        bars = axes.bar(places, [row[value] for row in own], 0.95 * width, label=kernel)
        words = ["" if row[note] == "" else f"{row[note]:+.1f} %".lstrip("+" * (note == "scaling"))
                 for row in own]  # fmt: skip
        axes.bar_label(bars, words, fontsize=7)
    axes.set_xticks(range(len(modes)), modes)
    axes.grid(alpha=0.3, axis="y")
    if kernels:
        axes.legend(title="attention")


_SIZES = (
    *("layers", "width", "hidden", "heads", "context", "vocab", "batch", "dtype", "steps"),
    *("epoch_tokens", "compiled", "captured"),
)
MATRIX = Sweep(
    "matrix",
    ("attention", "parallel", "ranks", "world", *_SIZES),
    (*("ms", "tokens_per_second", "scaling", "peak_mb", "memory_overhead", "device_mb"), "epoch_s"),
    draw_matrix,
    with_scaling,
    percents=("scaling", "memory_overhead"),
)
