"""`tensorgrad bench matrix` and `bench parallel`: parallel modes, in tokens/s, scaling and memory.

All ranks train a GPT-2 on random tokens. In the mode "none" each trains for itself while the others
do the same, so that all GPUs are equally warm; its figures are those of one GPU. Peers are PyTorch
alone and PyTorch's DDP. Modes of data parallelism give each rank a batch; schedules of a pipeline
and tensor parallelism share one. "idle" is the time that the rank with most to do waits for others,
"most_idle" that of the one with least, and "bubble" the formula for stages of equal time.
"peak_mb" is the memory of arrays; "device_mb" all memory used on a GPU, with NCCL's buffers and the
memory pool's free blocks. Tests: tests/bench/test_matrix.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from tensorgrad.parallel.mesh import Mesh, make_mesh
from tensorgrad.parallel.pipeline import Pipeline
from tensorgrad.parallel.planning.estimate import TrainingJob, estimate
from tensorgrad.parallel.schedule import bubble_fraction
from tensorgrad.parallel.strategy import mesh_ranks
from tensorgrad.parallel.zero import Zero
from tensorgrad.train.ranks import OneProcess, Ranks
from tensorgrad.train.settings import has_narrow_products
from tensorgrad.train.strategy_settings import MODES, ZERO

PEERS = {"none": "pytorch", "ddp": "pytorch-ddp"}  # kinds of `attention` of PyTorch, by mode
SCHEDULES = {"model-parallel": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2}  # chunks of a stage
TENSOR = {"tensor": False, "tensor-sequence": True}  # whether ranks share rows between layers
ALL_MODES = (*MODES, *SCHEDULES, *TENSOR)
PARTS = {
    "data": ("none", *REDUCTIONS),
    "pipeline": ("none", *SCHEDULES),
    "tensor": ("none", *TENSOR),
    "zero": ("overlap", *ZERO),
}
# mode -> the mode that `speed_up` is against
_SLOWER = {
    **dict.fromkeys(REDUCTIONS[1:], REDUCTIONS[0]),
    **dict.fromkeys(list(SCHEDULES)[1:], "model-parallel"),
    **dict.fromkeys(TENSOR, "none"),
}


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
        steps: of a timed window.
        tokens: of an epoch.
        compiled: whether PyTorch compiles its model.
        captured: whether our steps are CUDA graphs.
        windows: number of timed windows; the median counts.
        micro_batches: of a pipeline.
        bucket_mb: size of a bucket of gradients; None: by the number of gradients.
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
    windows: int = 3
    micro_batches: int = 1
    bucket_mb: float | None = None

    @property
    def model(self) -> GPT2Config:
        """The sizes with the width of the feed-forward layers."""
        return replace(self.config, hidden=self.hidden)

    def step(self, attention: str, micro_batches: int) -> StepSettings:
        """Return the settings of a step."""
        return StepSettings(
            self.model, self.batch, self.dtype, attention, micro_batches=micro_batches
        )

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("hidden", "batch", "steps", "tokens", "windows"):
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
        modes: of ALL_MODES: none, naive, flat, overlap, zero1 to zero3, those of a pipeline, and
            of tensor parallelism. Those that do not fit the ranks are skipped.
        peer: whether PyTorch is measured too.
    Raises:
        ArgumentError: a kernel or a mode is unknown.
    """
    for name, values, known in (
        ("kernel", kernels, ATTENTION_KERNELS), ("parallel", modes, ALL_MODES)
    ):  # fmt: skip
        for value in values:
            if value not in known:
                expected = ", ".join(known)
                raise ArgumentError(f"bench matrix: {name} is {value!r}, expected {expected}")
    fits = ("none",) if ranks == 1 else _fitting(settings, ranks)
    chosen = [mode for mode in ALL_MODES if mode in modes and mode in fits]
    for kernel in kernels:
        settings.step(kernel, settings.micro_batches)
    pairs = [(kernel, mode) for kernel in dict.fromkeys(kernels) for mode in chosen]
    if peer:
        pairs += [("sdpa", PEERS["none"])] + [("sdpa", PEERS["ddp"])] * (ranks > 1)
    config = settings.config
    sizes = {
        "layers": config.layers, "width": config.width, "hidden": settings.hidden,
        "heads": config.heads, "context": config.context, "vocab": config.vocab_size,
        "batch": settings.batch, "dtype": settings.dtype, "steps": settings.steps,
        "epoch_tokens": settings.tokens, "windows": settings.windows,
        "micro_batches": settings.micro_batches, "bucket_mb": settings.bucket_mb,
    }  # fmt: skip
    return [
        {
            "attention": kernel, "parallel": mode, "ranks": _ranks_of(mode, ranks), "world": ranks,
            "compiled": settings.compiled and kernel == "sdpa",
            "captured": settings.captured and kernel != "sdpa", **sizes,
        }
        for kernel, mode in pairs
    ]  # fmt: skip


def _fitting(settings: MatrixSettings, ranks: int) -> tuple[str, ...]:
    """Return the modes that a number of ranks can have."""
    layers, micro = settings.config.layers, settings.micro_batches
    return tuple(
        mode
        for mode in ALL_MODES
        if ranks * SCHEDULES.get(mode, 0) <= layers
        and not (SCHEDULES.get(mode, 1) > 1 and micro % ranks)
    )


def parallel_cases(
    settings: MatrixSettings, ranks: int, parts: Sequence[str] = tuple(PARTS), peer: bool = False
) -> list[Case]:
    """Return the cases of `bench parallel`.

    Args:
        settings: the model and the batch; its micro-batches are those of pipelines.
        ranks: how many there are.
        parts: of PARTS.
        peer: whether PyTorch is measured beside data parallelism.
    Raises:
        ArgumentError: a part is unknown, or the micro-batches do not divide the batch.
    """
    found: list[Case] = []
    for part in dict.fromkeys(parts):
        if part not in PARTS:
            raise ArgumentError(f"bench parallel: part is {part!r}, expected {', '.join(PARTS)}")
        own = settings if part == "pipeline" else replace(settings, micro_batches=1)
        cases = matrix_cases(own, ranks, ["flash"], PARTS[part], peer and part == "data")
        found += [case for case in cases if case not in found]
    if not found:
        raise ArgumentError(
            "bench parallel: got one rank, expected several: start it with `mpirun -n 2 tensorgrad "
            "bench parallel`"
        )
    return found


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
        self._timer = RankTimer(comm, device, settings.windows)
        self._torch: Any = None

    def __call__(self, case: Case) -> Row:
        """Return the results of a case."""
        line = self._peer(case) if case["parallel"] in PEERS.values() else self._ours(case)
        shared = case["parallel"] in (*SCHEDULES, *TENSOR)
        replicas = 1 if shared else case["ranks"]
        tokens = self._settings.batch * self._settings.config.context * replicas
        speed = 1e3 * tokens / line["ms"]
        return {**line, "tokens_per_second": speed, "epoch_s": self._settings.tokens / speed}

    def close(self) -> None:
        """Disconnect PyTorch's ranks."""
        if self._torch is not None:
            self._torch.distributed.destroy_process_group()
            self._torch = None

    def _ours(self, case: Case) -> Row:
        settings, mode = self._settings, case["parallel"]
        step_settings = settings.step(case["attention"], case["micro_batches"])

        def make() -> Step:
            return training_step(
                step_settings, self._strategy(mode), self._device, settings.captured
            )

        step = make()
        row: Row = {"ms": 1e3 * self._timer.seconds(step, settings.steps)}
        if mode in SCHEDULES:
            bubble = bubble_fraction(mode, self._comm.size, case["micro_batches"], SCHEDULES[mode])
            row["bubble"] = 100 * bubble
            if not settings.captured:  # a replay waits on the GPU, unseen
                idle = self._timer.idle(step, settings.steps)
                row |= {"idle": 100 * min(idle), "most_idle": 100 * max(idle)}
        del step
        found: dict[str, Any] = {}
        with self._timer.peak(found):  # of another one: the first case would have all workspaces
            step = make()
            step()
            step()
            self._timer.wait()
        row |= {"peak_mb": found["peak MB"], "device_mb": found.get("device MB")}
        planned = self._planned_mb(case)
        if planned is not None:
            row |= {"planned_mb": planned, "planned_ratio": row["peak_mb"] / planned}
        return row

    def _strategy(self, mode: str) -> Ranks:
        comm = self._comm
        if mode in REDUCTIONS:
            return DataParallel(comm, mode, self._settings.bucket_mb)
        if mode in ZERO:
            return Zero(comm, ZERO[mode])
        if mode in SCHEDULES:
            return Pipeline(comm, mode, SCHEDULES[mode])
        if mode in TENSOR:
            return mesh_ranks(comm, self._mesh(mode), sequence=TENSOR[mode])
        return OneProcess()

    def _mesh(self, mode: str) -> Mesh:
        comm = self._comm
        if mode in SCHEDULES:
            return Mesh(1, comm.size)
        if mode in TENSOR:
            return make_mesh(comm.size, comm.rank, tp=comm.size)
        return Mesh() if mode == "none" else Mesh(comm.size)

    def _planned_mb(self, case: Case) -> float | None:
        """Return the peak memory of arrays by the plan; None where it has no formula."""
        settings, mode = self._settings, case["parallel"]
        if case["attention"] != "flash" or mode in ("naive", "flat"):
            return None
        mesh = self._mesh(mode)
        job = TrainingJob(
            settings.model, mesh, settings.batch * mesh.dp, case["micro_batches"],
            ZERO.get(mode, 0), mode if mode in SCHEDULES else "1f1b", SCHEDULES.get(mode, 1),
            TENSOR.get(mode, False), settings.dtype,
        )  # fmt: skip
        return estimate(job).bytes / 1e6

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
            *(self._torch, settings.model, settings.batch, self._device),
            autocast=has_narrow_products(settings.dtype), several=case["parallel"] == PEERS["ddp"],
            compiled=settings.compiled,
        )  # fmt: skip
        row: Row = {"ms": 1e3 * self._timer.seconds(step, settings.steps)}
        if cuda is not None:
            row["peak_mb"] = self._timer.largest(cuda.max_memory_allocated() / 1e6)
        return row


def with_scaling(row: Row, before: Sequence[Row]) -> Row:
    """Add scaling efficiency (%) and memory overhead (%), against one GPU with the same attention.

    scaling = 100 tokens/s / (ranks * tokens/s of one),  overhead = 100 (peak / peak of one - 1)

    The speed-up is against the slowest mode of the same kind.
    """
    if row["status"] != "ok" or row["ranks"] == 1:
        return row
    same = "attention", "world", *_SIZES, "device", "commit"
    beside = [
        each
        for each in before
        if each["status"] == "ok"
        and all(str(each.get(name) or "") == str(row.get(name) or "") for name in same)
    ]
    slower = [each for each in beside if each["parallel"] == _SLOWER.get(row["parallel"])]
    alone = [each for each in beside if each["ranks"] == 1]
    if slower:
        row = {**row, "speed_up": slower[-1]["ms"] / row["ms"]}
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
    *("epoch_tokens", "compiled", "captured", "windows", "micro_batches", "bucket_mb"),
)
MATRIX = Sweep(
    "matrix",
    ("attention", "parallel", "ranks", "world", *_SIZES),
    (
        *("ms", "tokens_per_second", "scaling", "speed_up", "peak_mb", "memory_overhead"),
        *("device_mb", "planned_mb", "planned_ratio", "idle", "most_idle", "bubble", "epoch_s"),
    ),
    draw_matrix,
    with_scaling,
    percents=("scaling", "memory_overhead", "idle", "most_idle", "bubble"),
)
PARALLEL = replace(MATRIX, name="parallel")
