"""`tensorgrad bench`: benchmarks that write a table and pictures, and resume where they stopped."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from tqdm import tqdm

from tensorgrad import __version__, backend, gpu
from tensorgrad.bench import attention as attention_bench
from tensorgrad.bench import buckets as bucket_bench
from tensorgrad.bench import comm as comm_bench
from tensorgrad.bench import matrix as matrix_bench
from tensorgrad.bench import model as model_bench
from tensorgrad.bench import precision as precision_bench
from tensorgrad.bench.steps import PRECISIONS, StepSettings
from tensorgrad.bench.sweep import Case, Row, Sweep, run_sweep, to_markdown
from tensorgrad.cli.sizes import Context, Heads, Layers, Vocab, Width
from tensorgrad.command import aligned, printable, status_and_line
from tensorgrad.distribution import install
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.nn import ATTENTION_KERNELS
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.launch import launched_ranks
from tensorgrad.parallel.comm.mpi_nccl import world
from tensorgrad.parallel.train_gpt2 import MODES
from tensorgrad.train.command_line import STYLE
from tensorgrad.train.folder import check_new_folder

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 10.0
_TIMEOUT = 120.0  # seconds to wait for a rank that failed alone

Many = Parameter(consume_multiple=True)  # values one after the other: --lengths 128 256
Device = Annotated[str, Parameter(help="cpu, cuda, cuda:N, or auto: a GPU if there is one")]
Out = Annotated[Path, Parameter(help="folder of the files; finished rows in it are kept")]
_OUT = Path("runs/bench")

bench = App(
    name="bench",
    help="Measure, and write a table as CSV and Markdown, and pictures. Every finished row is kept "
    "at once: the same command resumes.",
    version_flags=(),
    **STYLE,
)


@bench.command
def attention(
    *,
    lengths: Annotated[tuple[int, ...], Many] = (),
    widths: Annotated[tuple[int, ...], Many] = (64, 128),
    kernels: Annotated[tuple[Literal[ATTENTION_KERNELS], ...], Many] = ATTENTION_KERNELS,  # type: ignore[valid-type]
    causal: bool = True,
    batch: int = 1,
    heads: int = 16,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    peer: bool = False,
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
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
    device = backend.use_device(device)
    on_host = device == "cpu"
    chosen = lengths or tuple(2**n for n in range(7, 11 if on_host else 17))
    names: Sequence[str] = kernels
    if peer:
        _check_torch()
        names = (*kernels, attention_bench.PEER)
    cases = attention_bench.attention_cases(
        chosen, widths, names, (causal,),
        batch=batch, heads=heads, dtype=dtype or ("float32" if on_host else "bfloat16"),
    )  # fmt: skip
    return _sweep(
        attention_bench.ATTENTION,
        cases,
        partial(attention_bench.measure_attention, device=device),
        out,
        device,
    )


@bench.command
def model(
    *,
    sizes: Annotated[tuple[Literal[tuple(model_bench.SIZES)], ...], Many] = tuple(  # type: ignore[valid-type]
        model_bench.SIZES
    ),
    precision: Annotated[tuple[Literal[PRECISIONS], ...], Many] = (  # type: ignore[valid-type]
        *("float32", "bfloat16", "bfloat16-parameters"),
    ),
    warmup: Annotated[tuple[int, ...], Many] = (5,),
    steps: int = 10,
    recompute: bool = False,
    captured: bool = False,
    context: Context = 512,
    batch: int = 4,
    vocab: Vocab = 10000,
    attention: Literal[ATTENTION_KERNELS] = "flash",  # type: ignore[valid-type]
    layers: Layers | None = None,
    width: Width | None = None,
    heads: Heads | None = None,
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
    """Measure forward, backward and optimizer of GPT-2s of five sizes, and their memory.

    Args:
        sizes: presets of the models; --layers, --width and --heads replace theirs.
        precision: float32; tf32 and bfloat16, autocast; bfloat16-parameters, with float32 copies in
            the optimizer; float16, autocast with a loss scaler.
        warmup: steps before the timed ones; several numbers are compared.
        steps: to time; the table has mean and standard deviation.
        recompute: compute each block again in backward.
        captured: run steps as CUDA graphs, as training does; they are timed as a whole.
        batch: sequences of a step.
        attention: kernels of attention.
    """
    device = backend.use_device(device)
    cases = model_bench.model_cases(
        sizes, precision, warmup, (recompute,), captured=captured, context=context, batch=batch,
        vocab=vocab, steps=steps, attention=attention, layers=layers, width=width, heads=heads,
    )  # fmt: skip
    return _sweep(
        model_bench.MODEL, cases, partial(model_bench.measure_model, device=device), out, device
    )


_PUBLISHED = matrix_bench.MatrixSettings()


@bench.command
def matrix(
    *,
    kernels: Annotated[tuple[Literal[ATTENTION_KERNELS], ...], Many] = ATTENTION_KERNELS,  # type: ignore[valid-type]
    parallel: Annotated[tuple[Literal[MODES], ...], Many] = MODES,  # type: ignore[valid-type]
    layers: Layers = _PUBLISHED.config.layers,
    width: Width = _PUBLISHED.config.width,
    hidden: int = _PUBLISHED.hidden,
    heads: Heads = _PUBLISHED.config.heads,
    context: Context = _PUBLISHED.config.context,
    vocab: Vocab = _PUBLISHED.config.vocab_size,
    batch: int = _PUBLISHED.batch,
    dtype: Literal[PRECISIONS] | None = None,  # type: ignore[valid-type]
    steps: int = _PUBLISHED.steps,
    tokens: int = _PUBLISHED.tokens,
    peer: bool = False,
    compiled: bool = False,
    captured: bool = False,
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
    """Measure attention kernels x parallel modes on the ranks that mpirun starts.

    The mode none is one GPU: each trains for itself while the others do the same.

    Args:
        kernels: of attention.
        parallel: modes, as of training.
        hidden: width of the feed-forward layers.
        batch: sequences of a rank.
        dtype: of matrix products, as in training (default: bfloat16-parameters, on a CPU float32).
        steps: of a timed window; the median of three windows counts.
        tokens: of an epoch.
        peer: measure PyTorch alone and with DistributedDataParallel too.
        compiled: compile PyTorch's model.
        captured: run our steps as CUDA graphs, as training does.
    """
    comm, device = _ranks(device)
    if peer:
        _check_torch()
    config = GPT2Config(vocab, context, layers, heads, width)
    kind = dtype or ("float32" if device == "cpu" else _PUBLISHED.dtype)
    settings = replace(
        _PUBLISHED, config=config, hidden=hidden, batch=batch, dtype=kind, steps=steps,
        tokens=tokens, compiled=compiled, captured=captured,
    )  # fmt: skip
    cases = matrix_bench.matrix_cases(settings, comm.size, kernels, parallel, peer)
    measure = matrix_bench.MatrixBench(settings, comm, device)
    try:
        return _sweep(matrix_bench.MATRIX, cases, measure, out, device, comm)
    finally:
        measure.close()


@bench.command
def comm(
    *,
    sizes: Annotated[tuple[float, ...], Many] = (1, 4, 16, 64, 256, 1024),
    ranks: Annotated[tuple[int, ...], Many] = (),
    backends: Annotated[tuple[Literal[comm_bench.BACKENDS], ...], Many] = (),  # type: ignore[valid-type]
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
    """Measure all-reduce over sizes, ranks and backends: time, algorithm and bus bandwidth.

    Args:
        sizes: MB (10^6 bytes) on each rank.
        ranks: how many of the ranks take part; several numbers are compared (default: all).
        backends: mpi, arrays of the host; nccl, arrays of GPUs (default: both, on a CPU mpi).
        dtype: of the arrays.
    """
    group, device = _ranks(device)
    names: Sequence[str] = backends or (("mpi",) if device == "cpu" else comm_bench.BACKENDS)
    if "nccl" in names and device == "cpu":
        raise ArgumentError("--backends: got nccl without a GPU, expected mpi")
    cases = comm_bench.comm_cases(group, sizes, ranks, names, dtype)
    return _sweep(comm_bench.COMM, cases, comm_bench.CommBench(group, device), out, device, group)


@bench.command
def precision(
    *,
    parts: Annotated[tuple[Literal["accumulation", "dtypes", "losses"], ...], Many] = (
        *("accumulation", "dtypes", "losses"),
    ),
    counts: Annotated[tuple[int, ...], Many] = (100, 1000, 10_000, 100_000),
    steps: int = 300,
    seed: int = 0,
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
    """Measure what 16 bits do to sums, to dtypes inside a model, and to training.

    Args:
        parts: accumulation, errors of sums of many numbers; dtypes, of parameters, activations,
            norms, logits, loss and gradients; losses, loss curves of a small GPT-2.
        counts: numbers of a sum.
        steps: of a loss curve.
        seed: of weights and batches of the loss curves.
    """
    device = backend.use_device(device)
    each = precision_bench
    sweeps: dict[str, tuple[Sweep, list[Case], Callable[..., Row]]] = {
        "accumulation": (
            *(each.ACCUMULATION, each.accumulation_cases(counts), each.measure_accumulation),
        ),
        "dtypes": (each.DTYPES, each.dtype_cases(), each.measure_dtypes),
        "losses": (each.LOSSES, each.loss_cases(steps=steps, seed=seed), each.measure_losses),
    }
    status = 0
    for part in dict.fromkeys(parts):
        sweep, cases, measure = sweeps[part]
        found = _sweep(sweep, cases, partial(measure, device=device), out, device)
        status = max(status, found)
    return status


@bench.command
def buckets(
    *,
    sizes: Annotated[tuple[float, ...], Many] = (1, 2, 5, 10, 25, 50, 100, 200, 400),
    layers: Layers = 12,
    width: Width = 768,
    heads: Heads = 12,
    context: Context = 1024,
    vocab: Vocab = 50304,
    batch: int = 8,
    dtype: Literal[PRECISIONS] | None = None,  # type: ignore[valid-type]
    steps: int = 10,
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
    """Measure what gradient buckets add to a step, by size, beside the formula and its optimum.

    The model is a GPT-2, by default of 124M parameters, on the ranks that mpirun starts.

    Args:
        sizes: of a bucket of gradients, MB (10^6 bytes).
        batch: sequences of a rank.
        dtype: of matrix products, as in training (default: bfloat16-parameters, on a CPU float32).
        steps: of a timed window; the median of three windows counts.
    """
    group, device = _ranks(device)
    config = GPT2Config(vocab, context, layers, heads, width)
    kind = dtype or ("float32" if device == "cpu" else _PUBLISHED.dtype)
    settings = StepSettings(config, batch, kind)
    cases = bucket_bench.bucket_cases(settings, group, sizes, steps)
    measure = bucket_bench.BucketBench(settings, group, device, steps)
    return _sweep(bucket_bench.BUCKETS, cases, measure, out, device, group)


def _ranks(device: str) -> tuple[Comm, str]:
    """Return the ranks, and the device of this one."""
    comm = world(_TIMEOUT) if launched_ranks() > 1 else Comm()
    return comm, comm.select_device(device)


def _check_torch() -> None:
    if find_spec("torch") is None:
        raise ArgumentError("--peer: PyTorch is not installed; run `pip install torch`")


def _sweep(
    sweep: Sweep,
    cases: Sequence[Case],
    measure: Callable[[Case], Row],
    out: Path,
    device: str,
    comm: Comm | None = None,
) -> int:
    """Run a sweep, print its table on rank 0; return the exit status, 1 after an error in a row."""
    index = backend.gpu_index(device)
    main = comm is None or comm.rank == 0
    try:
        if main:
            sweeps = tuple(path.stem for path in out.glob("*.csv"))
            check_new_folder(out, is_own=lambda path: path.name.startswith(sweeps))
        with (
            SweepProgress(sweep.name, main) as progress,
            gpu.GpuMonitor(index if main else None, 0.2, busy=True) as monitor,
        ):
            found = run_sweep(
                sweep, cases, measure, out, device="cpu" if index is None else gpu.name_of(index),
                version=__version__, comm=comm, progress=progress.show, monitor=monitor,
            )  # fmt: skip
    except KeyboardInterrupt as stop:
        stop.add_note(f"bench {sweep.name}: finished rows are in {out}; the same command resumes")
        raise
    except BaseException as error:
        known = status_and_line(error)
        if comm is not None and comm.size > 1 and known is not None:
            comm.abort(*known)  # the other ranks wait for this one
        raise
    if main:
        print(printable(aligned(to_markdown(sweep, found.rows))))
        if found.skipped:
            print(f"{found.skipped} of {len(cases)} rows were in {out} before")
        if not found.pictures:
            print(f"no pictures: run {install('plot')} to draw them")
        print(f"in {out}: {', '.join(path.name for path in found.paths)}")
        if found.failed:
            _log.error("bench %s: %d of %d cases failed", sweep.name, found.failed, len(cases))
    status = int(found.failed > 0)
    return status if comm is None else int(comm.broadcast_object(status))


@dataclass
class SweepProgress:
    """The progress of a sweep: a bar on a terminal; elsewhere a line of the log at times.

    Args:
        name: of the sweep.
        shown: whether to show anything: one rank does.
    """

    name: str
    shown: bool = True

    def __enter__(self) -> SweepProgress:
        self._bar: tqdm | None = None
        if self.shown and sys.stderr is not None and sys.stderr.isatty():
            self._bar = tqdm(desc=self.name, unit="case", dynamic_ncols=True, leave=False)
        self._last = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int, total: int, case: Case | None) -> None:
        """Show how many cases are done, and the one that begins."""
        words = "" if case is None else " ".join(map(str, list(case.values())[:4]))
        if self._bar is not None:
            self._bar.total, self._bar.n = total, done
            self._bar.set_postfix_str(words)
        elif self.shown and case and time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            _log.info("bench %s: case %d of %d: %s", self.name, done + 1, total, words)
