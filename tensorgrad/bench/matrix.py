"""`tensorgrad bench matrix` and `bench parallel`: parallel modes, in tokens/s, scaling and memory.

All ranks train on random tokens: `matrix` a TransformerLM with each attention kernel, `parallel` a
GPT-2. In the mode "none" each trains for itself while the others do the same, so that all GPUs are
equally warm; its figures are those of one GPU. Peers are PyTorch alone, its DDP and its FSDP2, with
the same model. A mode is a way to use all ranks along one axis, or the word of a mesh: "tp2xdp2".
Data parallel ranks have a batch each; stages of a pipeline and tensor parallel ranks share one.
"ratio", of a peer, is its time over that of ours: of "none", "overlap" or "zero3" with the flash
kernel. "idle" is the time that the rank with most to do waits for others, "most_idle" that of the
one with least, and "bubble" the formula for stages of equal time. "planned_ms", of GPUs, and
"planned_mb" are the planner's, at its default speeds. "peak_mb" is the memory of arrays;
"device_mb" all memory used on a GPU, with NCCL's buffers and the memory pool's free blocks.
Tests: tests/bench/test_matrix.py, tests/bench/test_parallel.py.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal

from tensorgrad import graph
from tensorgrad.bench import options, torch_ddp
from tensorgrad.bench.memory import release
from tensorgrad.bench.pictures import bar_figure
from tensorgrad.bench.steps import Preset, RankTimer, Step, settings_of, sized, sizes_of
from tensorgrad.bench.sweep import OK, Case, Row, Sweep, like
from tensorgrad.core.errors import ArgumentError
from tensorgrad.models.presets import model_name
from tensorgrad.models.transformer_lm import TransformerLMConfig
from tensorgrad.nn import ATTENTION_KERNELS
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.mesh import Mesh, make_mesh
from tensorgrad.parallel.planning.estimate import TrainingJob, estimate
from tensorgrad.parallel.schedule import bubble_fraction
from tensorgrad.parallel.strategy import mesh_strategy
from tensorgrad.profile.training_step import language_step
from tensorgrad.train.strategy_settings import MODES, REDUCTIONS, ZERO

PLANNED = {"gpt2"}  # models whose memory the planner has formulas for
# The setting of a published course project; its head is a matrix of its own.
PUBLISHED = TransformerLMConfig(10_000, 256, 24, 16, 16, 512, 4096, tied=False)
# Modes of PyTorch, and ours beside them.
PEERS = {"pytorch": "none", "pytorch-ddp": "overlap", "pytorch-fsdp": "zero3"}
KINDS: dict[str, dict[str, dict[str, Any]]] = {  # axis -> mode -> options of `mesh_strategy`
    "dp": {
        "none": {},
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
PARTS = {
    "data": MODES[:4], "pipeline": ("none", *KINDS["pp"]), "tensor": ("none", *KINDS["tp"]),
    "zero": ("none", *ZERO),
}  # fmt: skip
_OF_MESH: dict[str, Any] = {"schedule": "1f1b"}  # options of a mode that is the word of a mesh
# mode -> the mode that `speed_up` is against
_SLOWER = {
    **dict.fromkeys(REDUCTIONS[1:], REDUCTIONS[0]),
    **dict.fromkeys(list(KINDS["pp"])[1:], "model-parallel"),
    **dict.fromkeys(KINDS["tp"], "none"),
}


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
) -> Iterator[Sweep]:
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
        captured: run steps as CUDA graphs, as training does on a GPU; those of PyTorch where it
            is compiled (reduce-overhead).
    """
    config = TransformerLMConfig(vocab, context, layers, heads, heads, width, hidden, tied=False)
    case: Row = {
        "batch": batch, "dtype": options.precision_on(device, dtype), "steps": steps,
        "epoch_tokens": tokens, "windows": 3, "micro_batches": 1, "bucket_mb": None,
        "compiled": compiled and device != "cpu", "captured": captured and device != "cpu",
    }  # fmt: skip
    cases = matrix_cases(config, case, comm.size, kernels, parallel, options.is_measured(peer))
    with closing(MatrixBench(config, comm, device)) as measure:
        yield table("matrix", cases, measure, device)


def parallel_sweep(
    parts: tuple[Literal[(*PARTS, "mesh")], ...] = tuple(PARTS),  # type: ignore[valid-type]
    /,
    *,
    comm: Comm,
    modes: tuple[Literal[(*OPTIONS, *PEERS)], ...] = (),  # type: ignore[valid-type]
    meshes: tuple[str, ...] = (),
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
) -> Iterator[Sweep]:
    """Measure parallelism on one axis or several, beside one GPU, PyTorch's DDP and FSDP.

    Args:
        parts: data, each gradient reduction; pipeline, each schedule; tensor; zero, each stage;
            mesh, those of --meshes.
        modes: of the parts, that are measured (default: all).
        meshes: of all ranks, by the sizes of dp, pp and tp, such as tp2xdp2 pp4.
        model: preset.
        batch: sequences of a data parallel rank, which is a pipeline or tensor parallel ranks.
        micro_batches: of a pipeline, and of each mesh of --meshes.
        dtype: of matrix products, as in training (default: bfloat16-parameters, on a CPU float32).
        steps: of a timed window.
        windows: of which the median counts.
        bucket: MB of a bucket of gradients (default: by the number of gradients).
        compiled: compile PyTorch's model.
        captured: run our steps as CUDA graphs, as training does.
    """
    case: Row = {
        "batch": batch, "dtype": options.precision_on(device, dtype), "steps": steps,
        "epoch_tokens": 100_000_000, "windows": windows, "micro_batches": micro_batches,
        "bucket_mb": bucket, "compiled": compiled, "captured": captured,
    }  # fmt: skip
    config = sized(model, sizes)
    cases = parallel_cases(config, case, comm.size, parts, options.is_measured(peer), meshes, modes)
    with closing(MatrixBench(config, comm, device)) as measure:
        yield table("parallel", cases, measure, device)


def matrix_cases(
    config: Any,
    shared: Case,
    ranks: int,
    kernels: Sequence[str] = ATTENTION_KERNELS,
    modes: Sequence[str] = MODES,
    peer: bool = False,
) -> list[Case]:
    """Return the cases of a sweep; "none" comes first, as others are compared with it.

    Args:
        config: sizes of the model.
        shared: the parameters that all cases have: batch of a rank, dtype, steps of a window and
            windows, tokens of an epoch, micro-batches of a pipeline, MB of a bucket of gradients,
            whether PyTorch compiles its model and whether our steps are CUDA graphs.
        ranks: how many there are. On one rank "none" is the only mode.
        kernels: of ATTENTION_KERNELS.
        modes: of OPTIONS: none, naive, flat, overlap, zero1 to zero3, those of a pipeline, and
            of tensor parallelism; those that do not fit the ranks are skipped. Or words of meshes.
        peer: whether PyTorch is measured too, beside the modes of PEERS.
    Raises:
        ArgumentError: the micro-batches do not divide the batch, or the dtype is unknown.
    """
    settings_of(shared, config)
    fits = partial(_fits, config.layers, shared["micro_batches"], ranks)
    chosen = [mode for mode in dict.fromkeys((*OPTIONS, *modes)) if mode in modes and fits(mode)]
    pairs = [(kernel, mode) for kernel in dict.fromkeys(kernels) for mode in chosen]
    if peer:
        pairs += [("sdpa", mode) for mode, ours in PEERS.items() if ours in chosen]
    sizes = {"model": model_name(config), **sizes_of(config), "hidden": config.hidden_width}
    return [
        {
            "attention": kernel, "parallel": mode,
            "ranks": 1 if PEERS.get(mode, mode) == "none" else ranks, "world": ranks, **sizes,
            **shared, "compiled": shared["compiled"] and mode in PEERS,
            "captured": shared["captured"]
            and (mode not in PEERS or (shared["compiled"] and mode != "pytorch-fsdp")),
        }
        for kernel, mode in pairs
    ]  # fmt: skip


def _sizes(mode: str, ranks: int) -> dict[str, int]:
    """Return the sizes of the mesh of a mode by axis; unless a word says them, it has all ranks."""
    return {AXIS[mode]: ranks} if mode in AXIS else _sizes_in(mode)


def _sizes_in(word: str) -> dict[str, int]:
    """Return the sizes in a word such as "tp2xdp2" by axis.

    Raises:
        ArgumentError: the word has something else than different axes with their sizes.
    """
    parts = [re.fullmatch(r"(dp|pp|tp)([1-9]\d*)", part) for part in word.split("x")]
    sizes = {part[1]: int(part[2]) for part in parts if part is not None}
    if len(sizes) != len(parts):
        raise ArgumentError(
            f"--meshes: got {word!r}, expected sizes of dp, pp and tp, such as tp2xdp2"
        )
    return sizes


def _fits(layers: int, micro_batches: int, ranks: int, mode: str) -> bool:
    """Whether a number of ranks can have a mode."""
    stages = _sizes(mode, ranks).get("pp", 1)
    chunks = OPTIONS.get(mode, _OF_MESH).get("chunks", 1)
    uneven = chunks > 1 and micro_batches % stages
    return mode == "none" or (ranks > 1 and stages * chunks <= layers and not uneven)


def _check_meshes(meshes: Sequence[str], ranks: int, layers: int) -> None:
    """Raise ArgumentError unless each mesh has all ranks, and a layer for each stage."""
    for word in meshes:
        sizes = _sizes_in(word)
        size, stages = math.prod(sizes.values()), sizes.get("pp", 1)
        if size != ranks:
            raise ArgumentError(f"--meshes: got {word}, {size} ranks, expected the {ranks} started")
        if stages > layers:
            raise ArgumentError(
                f"--meshes: got {word}, {stages} stages, expected at most the {layers} layers"
            )


def parallel_cases(
    config: Any,
    shared: Case,
    ranks: int,
    parts: Sequence[str] = tuple(PARTS),
    peer: bool = False,
    meshes: Sequence[str] = (),
    modes: Sequence[str] = (),
) -> list[Case]:
    """Return the cases of `bench parallel`.

    Args:
        config, shared: as for `matrix_cases`; the micro-batches are those of pipelines and meshes.
        ranks: how many there are.
        parts: of PARTS, or mesh.
        peer: whether PyTorch is measured beside data parallelism and ZeRO.
        meshes: words of the part mesh.
        modes: of the parts, beside meshes, that are measured; none: all.
    Raises:
        ArgumentError: as for `matrix_cases`, there is one rank, meshes do not fit the ranks, or a
            mode is of no part.
    """
    options.check_ranks("parallel", ranks)
    if bool(meshes) != ("mesh" in parts):
        raise ArgumentError(
            f"--meshes: got {' '.join(meshes) or 'none'} with the parts {', '.join(parts)}, "
            "expected meshes such as tp2xdp2 and the part mesh, or neither"
        )
    _check_meshes(meshes, ranks, config.layers)
    found: list[Case] = []
    for part in dict.fromkeys(parts):
        own = shared if part in ("pipeline", "mesh") else {**shared, "micro_batches": 1}
        of_part = PARTS.get(part, ("none", *meshes))
        beside = peer and part in ("data", "zero")
        cases = matrix_cases(config, own, ranks, ["flash"], of_part, beside)
        found += [case for case in cases if case not in found]
    there = dict.fromkeys(case["parallel"] for case in found)
    if not set(modes).issubset(there):
        raise ArgumentError(f"--modes: got {' '.join(modes)}, expected some of {' '.join(there)}")
    return [case for case in found if not modes or case["parallel"] in (*modes, *meshes)]


class MatrixBench:
    """Measures the cases of a matrix; all ranks make one and call it in the same order.

    Args:
        config: sizes of the model.
        comm: the ranks.
        device: of this rank.
    """

    def __init__(self, config: Any, comm: Comm, device: str) -> None:
        self._config, self._comm, self._device = config, comm, device
        self._torch: Any = None

    def __call__(self, case: Case) -> Row:
        """Return the results of a case."""
        timer = RankTimer(self._comm, self._device, case["windows"])
        row = (self._peer if case["parallel"] in PEERS else self._ours)(case, timer)
        tokens = case["batch"] * self._config.context * self._mesh(case).dp
        speed = 1e3 * tokens / row["ms"]
        return {**row, "tokens_per_second": speed, "epoch_s": case["epoch_tokens"] / speed}

    def close(self) -> None:
        """Disconnect PyTorch's ranks."""
        if self._torch is not None:
            self._torch.distributed.destroy_process_group()
            self._torch = None

    def _ours(self, case: Case, timer: RankTimer) -> Row:
        def make() -> Step:
            step = self._step(case)
            return graph.capture(step, self._device) if case["captured"] else step

        step = make()
        row: Row = {"ms": 1e3 * timer.seconds(step, case["steps"])}
        stages, given = self._mesh(case).pp, OPTIONS.get(case["parallel"], _OF_MESH)
        if stages > 1:
            pipeline = given["schedule"], stages, case["micro_batches"], given.get("chunks", 1)
            row["bubble"] = 100 * bubble_fraction(*pipeline)
            if not case["captured"]:  # a replay waits on the GPU, unseen
                idle = timer.idle(step, case["steps"])
                row |= {"idle": 100 * min(idle), "most_idle": 100 * max(idle)}
        del step
        with timer.peak(row):  # the peak of another step: the first case would have all workspaces
            step = make()
            step()
            step()
        row |= self._planned(case)
        if "planned_mb" in row:
            row["planned_ratio"] = row["peak_mb"] / row["planned_mb"]
        return row

    def _step(self, case: Case) -> Step:
        """Return a training step with the strategy of a mode."""
        mode, mesh, strategy = case["parallel"], self._mesh(case), None
        if mode != "none":
            given = OPTIONS.get(mode, _OF_MESH)
            strategy = mesh_strategy(self._comm, mesh, bucket_mb=case["bucket_mb"], **given)
        settings, config = settings_of({**case, "batch": case["batch"] * mesh.dp}, self._config)
        return language_step(settings, config, self._device, strategy)

    def _mesh(self, case: Case) -> Mesh:
        """Return the mesh of a mode, or of ours beside a peer."""
        mode: str = case["parallel"]
        ranks: int = case["ranks"]
        sizes = _sizes(PEERS.get(mode, mode), ranks)
        return make_mesh(ranks, self._comm.rank % ranks, **{"dp": 1, **sizes})

    def _planned(self, case: Case) -> Row:
        """Return memory and, on a GPU, time by the plan; nothing where it has no formula."""
        mode, mesh = case["parallel"], self._mesh(case)
        formula = case["model"] in PLANNED and case["attention"] == "flash"
        if not formula or mode in ("naive", "flat"):
            return {}
        given = {**OPTIONS.get(mode, _OF_MESH)}
        given.pop("reduction", None)
        job = TrainingJob(
            self._config, mesh, case["batch"] * mesh.dp, case["micro_batches"],
            dtype=case["dtype"], **given,
        )  # fmt: skip
        plan = estimate(job, bucket=None if case["bucket_mb"] is None else 1e6 * case["bucket_mb"])
        row: Row = {"planned_mb": plan.bytes / 1e6}
        return row if self._device == "cpu" else {**row, "planned_ms": 1e3 * plan.seconds}

    def _peer(self, case: Case, timer: RankTimer) -> Row:
        """Return time and memory of PyTorch."""
        if self._torch is None:
            self._torch = importlib.import_module("torch")
            torch_ddp.join(self._torch, self._comm, self._device)
        cuda = None if self._device == "cpu" else self._torch.cuda
        release()
        if cuda is not None:
            cuda.reset_peak_memory_stats()
        settings, config = settings_of({**case, "attention": "flash"}, self._config)
        step = torch_ddp.training_step(
            settings, config, self._device, compiled=case["compiled"],
            mode="reduce-overhead" if case["captured"] else "default",
            together=case["parallel"].partition("-")[2],
        )  # fmt: skip
        row: Row = {"ms": 1e3 * timer.seconds(step, case["steps"])}
        if cuda is not None:
            row["peak_mb"] = timer.largest(cuda.max_memory_allocated() / 1e6)
        return row


def with_scaling(row: Row, before: Sequence[Row]) -> Row:
    """Add scaling efficiency (%) and memory overhead (%), against one GPU with the same attention.

    scaling = 100 tokens/s / (ranks * tokens/s of one),  overhead = 100 (peak / peak of one - 1)

    The speed-up is against the slowest mode of the same kind, the ratio of a peer against ours.
    """
    if row["status"] != OK:
        return row
    mode = row["parallel"]
    shared = ("world", *sizes_of(PUBLISHED), "hidden", "model", *_SHARED)
    beside = like(row, before, ("attention", *shared, "compiled", "captured"))
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
        ours = like({**row, "attention": "flash"}, before, ("attention", *shared))
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


def table(name: str, cases: Sequence[Case], measure: MatrixBench, device: str) -> Sweep:
    """Return the sweep of a matrix."""
    results = (
        *("ms", "tokens_per_second", "scaling", "speed_up", "ratio", "planned_ms"),
        *("peak_mb", "memory_overhead", "device_mb", "planned_mb", "planned_ratio"),
        *("idle", "most_idle", "bubble", "epoch_s"),
    )
    percents = "scaling", "memory_overhead", "idle", "most_idle", "bubble"
    return Sweep(
        name, cases, measure, results, draw_matrix, device, with_scaling, percents=percents
    )


_SHARED = ("batch", "dtype", "steps", "windows", "micro_batches", "bucket_mb", "epoch_tokens")
