"""`tensorgrad bench matrix` and `bench parallel`: parallel modes, in tokens/s, scaling and memory.

All ranks train on random tokens: `matrix` a TransformerLM with each attention kernel, `parallel` a
GPT-2. In the mode "none" each trains for itself while the others do the same, so that all GPUs are
equally warm; its figures are those of one GPU. Peers are PyTorch alone and PyTorch's DDP, with the
same model. Modes of data parallelism give each rank a batch; schedules of a pipeline and tensor
parallelism share one. "ratio", of a peer, is its time over that of ours: of "none" with the flash
kernel, or of "overlap". "idle" is the time that the rank with most to do waits for others,
"most_idle" that of the one with least, and "bubble" the formula for stages of equal time.
"peak_mb" is the memory of arrays; "device_mb" all memory used on a GPU, with NCCL's buffers and the
memory pool's free blocks. Tests: tests/bench/test_matrix.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from tensorgrad.bench import options, torch_ddp
from tensorgrad.bench.memory import release
from tensorgrad.bench.pictures import bar_figure
from tensorgrad.bench.steps import (
    Preset,
    RankTimer,
    Step,
    StepSettings,
    family,
    sized,
    sizes_of,
    training_step,
)
from tensorgrad.bench.sweep import OK, Case, Measurement, Row, Sweep, like
from tensorgrad.models.transformer_lm import TransformerLMConfig
from tensorgrad.nn import ATTENTION_KERNELS
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.mesh import make_mesh
from tensorgrad.parallel.planning.estimate import TrainingJob, estimate
from tensorgrad.parallel.schedule import bubble_fraction
from tensorgrad.parallel.strategy import mesh_strategy
from tensorgrad.train.settings import has_narrow_products
from tensorgrad.train.strategy import OneProcess, Strategy
from tensorgrad.train.strategy_settings import MODES, REDUCTIONS, ZERO

PLANNED = {"gpt2"}  # models whose memory the planner has formulas for
# The setting of a published course project; its head is a matrix of its own.
PUBLISHED = TransformerLMConfig(10_000, 256, 24, 16, 16, 512, 4096, tied=False)
PEERS = {"pytorch": "none", "pytorch-ddp": "overlap"}  # modes of PyTorch, and ours beside them
KINDS: dict[str, dict[str, dict[str, Any]]] = {  # axis -> mode -> options of `mesh_strategy`
    "dp": {
        **{reduction: {"reduction": reduction} for reduction in REDUCTIONS},
        **{name: {"zero": stage} for name, stage in ZERO.items()},
    },
    "pp": {
        **{name: {"schedule": name} for name in ("model-parallel", "gpipe", "1f1b")},
        "interleaved": {"schedule": "interleaved", "chunks": 2},
    },
    "tp": {"tensor": {}, "tensor-sequence": {"sequence": True}},
}
AXIS = {mode: axis for axis, modes in KINDS.items() for mode in modes}
OPTIONS = {mode: options for modes in KINDS.values() for mode, options in modes.items()}
ALL_MODES = ("none", *OPTIONS)
PARTS = {
    "data": MODES[:4], "pipeline": ("none", *KINDS["pp"]), "tensor": ("none", *KINDS["tp"]),
    "zero": MODES[3:],
}  # fmt: skip
# mode -> the mode that `speed_up` is against
_SLOWER = {
    **dict.fromkeys(REDUCTIONS[1:], REDUCTIONS[0]),
    **dict.fromkeys(list(KINDS["pp"])[1:], "model-parallel"),
    **dict.fromkeys(KINDS["tp"], "none"),
}


@dataclass(frozen=True)
class MatrixSettings:
    """The model, the batch and the timing of a matrix.

    The defaults are a setting with published figures: 24 layers, C 512, feed-forward 4096, 16
    heads, T 256, 8 sequences a GPU, vocabulary 10,000.

    Args:
        config: sizes of the model.
        batch: sequences of a rank.
        dtype: of `options.PRECISIONS`.
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

    config: Any = PUBLISHED
    batch: int = 8
    dtype: str = "bfloat16-parameters"
    steps: int = 20
    tokens: int = 100_000_000
    compiled: bool = False
    captured: bool = False
    windows: int = 3
    micro_batches: int = 1
    bucket_mb: float | None = None

    def step(self, attention: str, micro_batches: int) -> StepSettings:
        """Return the settings of a step."""
        return StepSettings(
            self.config, self.batch, self.dtype, attention, micro_batches=micro_batches
        )

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("batch", "steps", "tokens", "windows"):
            options.check_counts("matrix", **{name: getattr(self, name)})
        options.check_known("matrix", "dtype", [self.dtype], options.PRECISIONS)


def matrix_sweep(
    *,
    comm: Comm,
    kernels: tuple[Literal[ATTENTION_KERNELS], ...] = ATTENTION_KERNELS,  # type: ignore[valid-type]
    parallel: tuple[Literal[MODES], ...] = MODES,  # type: ignore[valid-type]
    layers: options.Layers = PUBLISHED.layers,
    width: options.Width = PUBLISHED.width,
    hidden: int = PUBLISHED.hidden_width,
    heads: options.Heads = PUBLISHED.heads,
    context: options.Context = PUBLISHED.context,
    vocab: options.Vocab = PUBLISHED.vocab_size,
    batch: int = 8,
    dtype: options.Precision | None = None,
    steps: int = 20,
    tokens: int = 100_000_000,
    peer: options.Peer = None,
    compiled: bool = True,
    captured: bool = True,
    device: options.Device = "auto",
) -> Iterator[Measurement]:
    """Measure attention kernels x parallel modes on the ranks that mpirun starts.

    The model is a TransformerLM. The mode none is one GPU: each trains for itself while the others
    do the same.

    Args:
        kernels: of attention.
        parallel: modes, as of training.
        hidden: width of the feed-forward layers.
        batch: sequences of a rank.
        dtype: of matrix products, as in training (default: bfloat16-parameters, on a CPU float32).
        steps: of a timed window; the median of three windows counts.
        tokens: of an epoch.
        peer: measure PyTorch alone and with DistributedDataParallel too.
        compiled: compile PyTorch's model, on a GPU.
        captured: run our steps as CUDA graphs, as training does on a GPU.
    """
    config = TransformerLMConfig(vocab, context, layers, heads, heads, width, hidden, tied=False)
    on_gpu = device != "cpu"
    settings = MatrixSettings(
        config, batch, options.precision_on(device, dtype), steps, tokens, compiled and on_gpu,
        captured and on_gpu,
    )  # fmt: skip
    cases = matrix_cases(settings, comm.size, kernels, parallel, options.is_measured(peer))
    with closing(MatrixBench(settings, comm, device)) as measure:
        yield Measurement(MATRIX, cases, measure, device)


def parallel_sweep(
    parts: tuple[Literal[tuple(PARTS)], ...] = tuple(PARTS),  # type: ignore[valid-type]
    /,
    *,
    comm: Comm,
    model: Preset = "gpt2-124M",
    sizes: options.Sizes = options.PRESET,
    batch: int = 32,
    micro_batches: int = 8,
    dtype: options.Precision | None = None,
    steps: int = 10,
    windows: int = 3,
    bucket: float | None = None,
    peer: options.Peer = None,
    compiled: bool = False,
    captured: bool = False,
    device: options.Device = "auto",
) -> Iterator[Measurement]:
    """Measure data, pipeline, tensor and sharded parallelism beside one GPU and PyTorch's DDP.

    Args:
        parts: data, each gradient reduction; pipeline, each schedule; tensor; zero, each stage.
        model: preset.
        batch: sequences of a rank, or of a pipeline.
        micro_batches: of a pipeline.
        dtype: of matrix products, as in training (default: bfloat16-parameters, on a CPU float32).
        steps: of a timed window.
        windows: of which the median counts.
        bucket: MB of a bucket of gradients (default: by the number of gradients).
        compiled: compile PyTorch's model.
        captured: run our steps as CUDA graphs, as training does.
    """
    settings = MatrixSettings(
        sized(model, sizes), batch, options.precision_on(device, dtype), steps, compiled=compiled,
        captured=captured, windows=windows, micro_batches=micro_batches, bucket_mb=bucket,
    )  # fmt: skip
    cases = parallel_cases(settings, comm.size, parts, options.is_measured(peer))
    with closing(MatrixBench(settings, comm, device)) as measure:
        yield Measurement(PARALLEL, cases, measure, device)


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
    options.check_known("matrix", "kernel", kernels, ATTENTION_KERNELS)
    options.check_known("matrix", "parallel", modes, ALL_MODES)
    fits = ("none",) if ranks == 1 else _fitting(settings, ranks)
    chosen = [mode for mode in ALL_MODES if mode in modes and mode in fits]
    for kernel in kernels:
        settings.step(kernel, settings.micro_batches)
    pairs = [(kernel, mode) for kernel in dict.fromkeys(kernels) for mode in chosen]
    if peer:
        pairs += [("sdpa", mode) for mode in tuple(PEERS)[:ranks]]
    sizes = {
        **sizes_of(settings.config), "hidden": settings.config.hidden_width,
        "epoch_tokens": settings.tokens,
        "model": family(settings.config),
        **{name: getattr(settings, name) for name in _SETTINGS},
    }  # fmt: skip
    return [
        {
            "attention": kernel, "parallel": mode,
            "ranks": 1 if mode in ("none", "pytorch") else ranks, "world": ranks, **sizes,
            "compiled": settings.compiled and mode in PEERS,
            "captured": settings.captured and mode not in PEERS,
        }
        for kernel, mode in pairs
    ]  # fmt: skip


def _fitting(settings: MatrixSettings, ranks: int) -> tuple[str, ...]:
    """Return the modes that a number of ranks can have."""
    layers, micro = settings.config.layers, settings.micro_batches
    chunks = {mode: options.get("chunks", 1) for mode, options in KINDS["pp"].items()}
    return tuple(
        mode
        for mode in ALL_MODES
        if ranks * chunks.get(mode, 0) <= layers and not (chunks.get(mode, 1) > 1 and micro % ranks)
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
    options.check_ranks("parallel", ranks)
    options.check_known("parallel", "part", parts, PARTS)
    found: list[Case] = []
    for part in dict.fromkeys(parts):
        own = settings if part == "pipeline" else replace(settings, micro_batches=1)
        cases = matrix_cases(own, ranks, ["flash"], PARTS[part], peer and part == "data")
        found += [case for case in cases if case not in found]
    return found


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
        line = self._peer(case) if case["parallel"] in PEERS else self._ours(case)
        shared = AXIS.get(case["parallel"]) in ("pp", "tp")
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
        if AXIS.get(mode) == "pp":
            chunks = OPTIONS[mode].get("chunks", 1)
            bubble = bubble_fraction(mode, self._comm.size, case["micro_batches"], chunks)
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

    def _strategy(self, mode: str) -> Strategy:
        if mode == "none":
            return OneProcess()
        arguments = dict(OPTIONS[mode])
        if "reduction" in arguments:
            arguments["bucket_mb"] = self._settings.bucket_mb
        return mesh_strategy(self._comm, make_mesh(**self._mesh(mode)), **arguments)

    def _mesh(self, mode: str) -> dict[str, int]:
        """Return the arguments of `make_mesh`."""
        size = self._comm.size
        if mode == "none":
            return {"ranks": 1}
        return {"ranks": size, "rank": self._comm.rank, "dp": 1} | {AXIS[mode]: size}

    def _planned_mb(self, case: Case) -> float | None:
        """Return the peak memory of arrays by the plan; None where it has no formula."""
        settings, mode = self._settings, case["parallel"]
        if case["model"] not in PLANNED or case["attention"] != "flash":
            return None
        if mode in ("naive", "flat"):
            return None
        mesh, arguments = make_mesh(**self._mesh(mode)), dict(OPTIONS.get(mode, {}))
        arguments.pop("reduction", None)
        job = TrainingJob(
            settings.config, mesh, settings.batch * mesh.dp, case["micro_batches"],
            dtype=settings.dtype, **arguments,
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
            *(self._torch, settings.config, settings.batch, self._device),
            autocast=has_narrow_products(settings.dtype), compiled=settings.compiled,
            several=case["parallel"] == "pytorch-ddp",
        )  # fmt: skip
        row: Row = {"ms": 1e3 * self._timer.seconds(step, settings.steps)}
        if cuda is not None:
            row["peak_mb"] = self._timer.largest(cuda.max_memory_allocated() / 1e6)
        return row


def with_scaling(row: Row, before: Sequence[Row]) -> Row:
    """Add scaling efficiency (%) and memory overhead (%), against one GPU with the same attention.

    scaling = 100 tokens/s / (ranks * tokens/s of one),  overhead = 100 (peak / peak of one - 1)

    The speed-up is against the slowest mode of the same kind, the ratio of a peer against ours.
    """
    if row["status"] != OK:
        return row
    mode, names = str(row.get("parallel")), ("attention", "world", *_SIZES, "compiled", "captured")
    beside = like(row, before, names)
    row = dict(row)
    for other in beside:
        if other["parallel"] == _SLOWER.get(mode):
            row["speed_up"] = other["ms"] / row["ms"]
        if other["ranks"] == 1 and row["ranks"] > 1:
            speed = row["tokens_per_second"]
            row["scaling"] = 100 * speed / (row["ranks"] * other["tokens_per_second"])
            if row.get("peak_mb") and other["peak_mb"]:
                row["memory_overhead"] = 100 * (row["peak_mb"] / other["peak_mb"] - 1)
    if mode in PEERS:
        ours = like({**row, "attention": "flash"}, before, names[:-2])
        times = [other["ms"] for other in ours if other["parallel"] == PEERS[mode]]
        row |= {"ratio": row["ms"] / times[-1]} if times else {}
    return row


def draw_matrix(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures: tokens/s with scaling, time of an epoch, peak memory with overhead."""
    about = "{layers} layers, C {width}, T {context}, batch {batch} a GPU, {dtype}, {world} ranks"
    draw = partial(bar_figure, rows, names=("parallel", "attention"))
    return {
        "": draw(about, "tokens/s of all ranks", columns=["tokens_per_second"], note="scaling"),
        "-time": draw(about, "time of an epoch (s)", columns=["epoch_s"]),
        "-memory": draw(about, "memory of the fullest rank (MB)", columns=["peak_mb"],
                        note="memory_overhead"),
    }  # fmt: skip


_SETTINGS = ("batch", "dtype", "steps", "windows", "micro_batches", "bucket_mb")
_SIZES = (
    *("model", "layers", "width", "heads", "context", "vocab", "hidden", "epoch_tokens"),
    *_SETTINGS,
)
MATRIX = Sweep(
    "matrix",
    ("attention", "parallel", "ranks", "world", *_SIZES, "compiled", "captured"),
    (
        *("ms", "tokens_per_second", "scaling", "speed_up", "ratio", "peak_mb", "memory_overhead"),
        *("device_mb", "planned_mb", "planned_ratio", "idle", "most_idle", "bubble", "epoch_s"),
    ),
    draw_matrix,
    with_scaling,
    percents=("scaling", "memory_overhead", "idle", "most_idle", "bubble"),
)
PARALLEL = replace(MATRIX, name="parallel")
