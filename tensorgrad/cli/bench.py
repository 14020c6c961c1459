"""`tensorgrad bench`: benchmarks that write a table and pictures, and resume where they stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from cyclopts import App, Parameter

from tensorgrad import backend
from tensorgrad.bench import attention as attention_bench
from tensorgrad.bench import buckets as bucket_bench
from tensorgrad.bench import comm as comm_bench
from tensorgrad.bench import cpu as cpu_bench
from tensorgrad.bench import decode as decode_bench
from tensorgrad.bench import errors as error_bench
from tensorgrad.bench import first_use as first_use_bench
from tensorgrad.bench import kernels as kernel_bench
from tensorgrad.bench import loss_curve as loss_bench
from tensorgrad.bench import matrix as matrix_bench
from tensorgrad.bench import model as model_bench
from tensorgrad.bench import overhead as overhead_bench
from tensorgrad.bench import precision as precision_bench
from tensorgrad.bench import profiler as profiler_bench
from tensorgrad.bench import proposals as proposal_bench
from tensorgrad.bench import step as step_bench
from tensorgrad.bench import translation as translation_bench
from tensorgrad.bench.kernel_jobs import FAMILIES
from tensorgrad.bench.steps import MODELS, PRECISIONS, StepSettings, sized
from tensorgrad.bench.sweep import Case, Row, Sweep, Together
from tensorgrad.cli.sizes import Context, Heads, Layers, Vocab, Width
from tensorgrad.cli.sweeps import ranks_of, sweep_cases
from tensorgrad.errors import ArgumentError, DeviceError
from tensorgrad.models.gpt2 import PRESETS, GPT2Config
from tensorgrad.nn import ATTENTION_KERNELS
from tensorgrad.train.command_line import STYLE, read_command_line
from tensorgrad.train.device import choose_device
from tensorgrad.train.strategy_settings import MODES
from tensorgrad.train.translation import TranslationSettings

Many = Parameter(consume_multiple=True)  # values one after the other: --lengths 128 256
Words = Parameter(allow_leading_hyphen=True)
Device = Annotated[str, Parameter(help="cpu, cuda, cuda:N, or auto: a GPU if there is one")]
Out = Annotated[Path, Parameter(help="folder of the files; finished rows in it are kept")]
Peer = Annotated[
    bool | None,
    Parameter(help="measure PyTorch too", show_default=lambda _: "where it is installed"),
]
_OUT = Path("runs/bench")
_ON_GPU, _ON_CPU = "bfloat16-parameters", "float32"  # default precisions


@Parameter(name="*")
@dataclass(frozen=True)
class Sizes:
    """Sizes that replace those of a preset."""

    layers: Layers | None = None
    width: Width | None = None
    heads: Heads | None = None
    context: Context | None = None
    vocab: Vocab | None = None


_PRESET = Sizes()

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
    if _measures(peer):
        names = (*kernels, attention_bench.PEER)
    cases = attention_bench.attention_cases(
        chosen, widths, names, (causal,),
        batch=batch, heads=heads, dtype=dtype or ("float32" if on_host else "bfloat16"),
    )  # fmt: skip
    return sweep_cases(
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
    return sweep_cases(
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
    comm, device = ranks_of(device)
    _measures(peer)
    config = GPT2Config(vocab, context, layers, heads, width)
    kind = dtype or _precision(device)
    settings = replace(
        _PUBLISHED, config=config, hidden=hidden, batch=batch, dtype=kind, steps=steps,
        tokens=tokens, compiled=compiled, captured=captured,
    )  # fmt: skip
    cases = matrix_bench.matrix_cases(settings, comm.size, kernels, parallel, peer)
    with closing(matrix_bench.MatrixBench(settings, comm, device)) as measure:
        return sweep_cases(matrix_bench.MATRIX, cases, measure, out, device, comm)


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
    group, device = ranks_of(device)
    names: Sequence[str] = backends or (("mpi",) if device == "cpu" else comm_bench.BACKENDS)
    if "nccl" in names and device == "cpu":
        raise ArgumentError("--backends: got nccl without a GPU, expected mpi")
    cases = comm_bench.comm_cases(group, sizes, ranks, names, dtype)
    return sweep_cases(
        comm_bench.COMM, cases, comm_bench.CommBench(group, device), out, device, group
    )


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
        found = sweep_cases(sweep, cases, partial(measure, device=device), out, device)
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
    group, device = ranks_of(device)
    config = GPT2Config(vocab, context, layers, heads, width)
    kind = dtype or _precision(device)
    settings = StepSettings(config, batch, kind)
    cases = bucket_bench.bucket_cases(settings, group, sizes, steps)
    measure = bucket_bench.BucketBench(settings, group, device, steps)
    return sweep_cases(bucket_bench.BUCKETS, cases, measure, out, device, group)


@bench.command
def parallel(
    parts: Annotated[tuple[Literal[tuple(matrix_bench.PARTS)], ...], Many] = tuple(  # type: ignore[valid-type]
        matrix_bench.PARTS
    ),
    /,
    *,
    model: Literal[tuple(MODELS)] = "gpt2-124M",  # type: ignore[valid-type]
    sizes: Sizes = _PRESET,
    batch: int = 32,
    micro_batches: int = 8,
    dtype: Literal[PRECISIONS] | None = None,  # type: ignore[valid-type]
    steps: int = 10,
    windows: int = 3,
    bucket: float | None = None,
    peer: Peer = None,
    compiled: bool = False,
    captured: bool = False,
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
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
    comm, device = ranks_of(device)
    config = sized(model, **asdict(sizes))
    settings = matrix_bench.MatrixSettings(
        config, 4 * config.width, batch, dtype or _precision(device), steps, compiled=compiled,
        captured=captured, windows=windows, micro_batches=micro_batches, bucket_mb=bucket,
    )  # fmt: skip
    cases = matrix_bench.parallel_cases(settings, comm.size, parts, _measures(peer))
    with closing(matrix_bench.MatrixBench(settings, comm, device)) as measure:
        return sweep_cases(matrix_bench.PARALLEL, cases, measure, out, device, comm)


@bench.command
def step(
    *,
    preset: Annotated[tuple[Literal[tuple(MODELS)], ...], Many] = step_bench.ROWS,  # type: ignore[valid-type]
    batch: Annotated[tuple[int, ...], Many] = (),
    sizes: Sizes = _PRESET,
    dtype: Literal[PRECISIONS] = _ON_GPU,  # type: ignore[valid-type]
    grad_dtype: Literal["float32", "bfloat16"] = "float32",
    micro_batches: int = 1,
    recompute: bool = False,
    recompute_norms: bool = False,
    peer: Peer = None,
    peer_modes: Annotated[tuple[Literal[step_bench.MODES], ...], Many] = step_bench.MODES[1:],  # type: ignore[valid-type]
    breakdown: bool = False,
    seconds: float = 1.0,
    windows: int = 5,
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
    """Measure training steps on one device, eager and captured, beside PyTorch compiled.

    Args:
        preset: models.
        batch: sequences of a step (default: by the model, from 2 to 64).
        dtype: as in training.
        grad_dtype: bfloat16 with --dtype bfloat16-parameters.
        micro_batches: parts of a batch.
        recompute: compute blocks again in backward.
        recompute_norms: compute the outputs of norms again in backward.
        peer_modes: of PyTorch; the last two are compiled, and reduce-overhead is not measured with
            --micro-batches.
        breakdown: measure an eager step by kind of kernel too, by CUPTI where it is installed.
        seconds: least length of a timed window.
        windows: of each side, of which the median counts.
    """
    modes = peer_modes if _measures(peer) else ()
    cases = step_bench.step_cases(
        preset, batch, dtype=dtype, grad_dtype=grad_dtype, micro_batches=micro_batches,
        recompute=recompute, recompute_norms=recompute_norms, modes=modes, seconds=seconds,
        windows=windows, **asdict(sizes),
    )  # fmt: skip
    device = backend.use_device(device)
    status = sweep_cases(step_bench.STEP, cases, step_bench.TrainStepBench(device), out, device)
    if breakdown:
        measure = Together("kind", partial(step_bench.measure_kinds, device=device))
        kinds = step_bench.kind_cases(cases)
        status |= sweep_cases(step_bench.STEP_KINDS, kinds, measure, out, device)
    return status


@bench.command
def cpu(
    *,
    layers: Layers = 6,
    width: Width = 384,
    heads: Heads = 6,
    context: Context = 256,
    batch: int = 8,
    vocab: Vocab = 4096,
    steps: int = 6,
    turns: int = 3,
    peer: Peer = None,
    out: Out = _OUT,
) -> int:
    """Measure a training step of a GPT-2 on the CPU in float32, beside PyTorch eager.

    Args:
        batch: sequences of a step.
        steps: timed steps in each turn.
        turns: of each library, each in a new process.
    """
    sizes = {"layers": layers, "width": width, "heads": heads, "context": context,
             "batch": batch, "vocab": vocab, "steps": steps}  # fmt: skip
    cases = cpu_bench.cpu_cases(sizes, turns, _measures(peer))
    return sweep_cases(cpu_bench.CPU, cases, Together("part", cpu_bench.measure_cpu), out, "cpu")


@bench.command
def kernels(
    families: Annotated[tuple[Literal[tuple(FAMILIES)], ...], Many] = tuple(FAMILIES),  # type: ignore[valid-type]
    /,
    *,
    peer: Peer = None,
    compiled: bool = False,
    load: float = 1.0,
    scale: int | None = None,
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
    """Measure kernels beside their floor and PyTorch: time, GB/s or TFLOP/s, ratio, energy.

    Args:
        families: of kernels.
        compiled: measure torch.compile too, which takes seconds a line.
        load: seconds for which ours is repeated on a GPU, for clock, power and energy.
        scale: divides numbers of rows (default: 1, on a CPU 64).
    """
    device = backend.use_device(device)
    rows = scale if scale is not None else 64 if device == "cpu" else 1
    jobs = kernel_bench.kernel_jobs(FAMILIES, families, device, rows)
    measure = kernel_bench.KernelBench(jobs, device, load, peer=_measures(peer), compiled=compiled)
    return sweep_cases(kernel_bench.KERNELS, measure.cases(), measure, out, device)


@bench.command
def decode(
    *,
    models: Annotated[tuple[Literal[tuple(PRESETS)], ...], Many] = ("gpt2-124M", "gpt2-1558M"),  # type: ignore[valid-type]
    batches: Annotated[tuple[int, ...], Many] = (1, 32),
    peer: Peer = None,
    static: bool = False,
    kernels: bool = False,
    out: Out = _OUT,
) -> int:
    """Measure greedy generation on a GPU: tokens a second, beside transformers.

    Args:
        models: presets, with random weights in bfloat16.
        batches: sequences.
        static: measure transformers compiled too, with a cache of fixed size.
        kernels: measure what each kernel of a step takes instead.
    """
    _check_gpu("decode")
    if kernels:
        cases = decode_bench.decode_kernel_cases(models, batches)
        measure: Callable[[Case], Row] = Together("kernel", decode_bench.measure_decode_kernels)
        return sweep_cases(decode_bench.DECODE_KERNELS, cases, measure, out, "cuda")
    peers = ("eager", "static")[: 1 + static] if _measures(peer, "transformers") else ()
    cases = decode_bench.decode_cases(models, batches, peers)
    return sweep_cases(decode_bench.DECODE, cases, decode_bench.measure_decode, out, "cuda")


@bench.command
def overhead(*, length: int = 1000, repeats: int = 60, out: Out = _OUT) -> int:
    """Measure what an op takes on the CPU beyond NumPy's own work, in microseconds.

    Args:
        length: ops in a chain.
        repeats: of a chain; the fastest one counts.
    """
    cases = overhead_bench.overhead_cases(length, repeats)
    return sweep_cases(overhead_bench.OVERHEAD, cases, overhead_bench.measure_overhead, out, "cpu")


@bench.command
def first_use(
    *,
    preset: Literal[tuple(MODELS)] = "gpt2-124M",  # type: ignore[valid-type]
    sizes: Sizes = _PRESET,
    batch: int = 4,
    dtype: Literal[PRECISIONS] | None = None,  # type: ignore[valid-type]
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
    """Measure the first training step of a process, with empty and with filled kernel caches.

    Args:
        preset: of the model.
        batch: sequences of a step.
        dtype: as in training (default: bfloat16-parameters, on a CPU float32).
    """
    device = backend.use_device(device)
    kind = dtype or _precision(device)
    cases = first_use_bench.first_use_cases(preset, batch, kind, **asdict(sizes))
    with closing(first_use_bench.FirstUseBench(device)) as measure:
        return sweep_cases(first_use_bench.FIRST_USE, cases, measure, out, device)


@bench.command
def errors(
    *, rows: int = 4096, columns: int = 1000, device: Device = "auto", out: Out = _OUT
) -> int:
    """Measure rounding errors against float64, divided by PyTorch's.

    Args:
        rows: of the input of each op.
        columns: of it.
    """
    _measures(True)
    device = backend.use_device(device)
    measure = partial(error_bench.measure_errors, device=device)
    return sweep_cases(
        error_bench.ERRORS, error_bench.error_cases(rows, columns), measure, out, device
    )


@bench.command
def profiler(
    *,
    preset: Literal[tuple(MODELS)] = "gpt2-124M",  # type: ignore[valid-type]
    sizes: Sizes = _PRESET,
    batch: int = 8,
    dtype: Literal[PRECISIONS] | None = None,  # type: ignore[valid-type]
    steps: int = 20,
    rounds: int = 5,
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
    """Measure what the profiler costs, by source of its times, and how well they sum up to a step.

    Args:
        preset: of the model.
        batch: sequences of a step.
        dtype: as in training (default: bfloat16-parameters, on a CPU float32).
        steps: of a round.
        rounds: without and with the profiler, in turns; the median counts.
    """
    device = backend.use_device(device)
    kind = dtype or _precision(device)
    cases = profiler_bench.profiler_cases(
        preset, batch, kind, steps, rounds, device, **asdict(sizes)
    )
    measure = profiler_bench.ProfilerBench(device)
    return sweep_cases(profiler_bench.PROFILER, cases, measure, out, device)


@bench.command
def proposals(
    *,
    preset: Literal[tuple(MODELS)] = "gpt2-124M",  # type: ignore[valid-type]
    batch: int = 32,
    dtype: Literal["bfloat16", "float16"] = "bfloat16",
    grad_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    seconds: float = 0.3,
    out: Out = _OUT,
) -> int:
    """Measure each kernel that cuBLASLt proposes for the products of a GPT-2, under load.

    Args:
        preset: of the model.
        batch: sequences of 1,024 tokens.
        dtype: of activations and parameters.
        grad_dtype: of the gradients of blocks.
        seconds: for each proposal.
    """
    products, cases = proposal_bench.proposal_cases(preset, batch, dtype, grad_dtype, seconds)
    _check_gpu("proposals")
    measure = proposal_bench.ProposalBench(products, "cuda")
    return sweep_cases(proposal_bench.PROPOSALS, cases, measure, out, "cuda")


@bench.command
def loss(
    *,
    data: str,
    preset: Literal[tuple(PRESETS)] = "gpt2-124M",  # type: ignore[valid-type]
    sizes: Sizes = _PRESET,
    dtype: Literal[loss_bench.DTYPES] = loss_bench.DTYPES[0],  # type: ignore[valid-type]
    grad_dtype: Literal["float32", "bfloat16"] = "float32",
    steps: int = 1000,
    batch: int = 8,
    lr: float = 6e-4,
    warmup: int | None = None,
    seed: int = 0,
    window: int = 50,
    most: float = 0.03,
    compiled: bool = True,
    device: Device = "auto",
    out: Out = _OUT,
) -> int:
    """Train a GPT-2 here and in PyTorch, from equal weights on equal batches; compare the losses.

    Args:
        data: a folder of `tensorgrad prepare`, or a .npy file of tokens.
        preset: of the model; --vocab is 50304 by default.
        dtype: as in training.
        grad_dtype: of ours; bfloat16 with --dtype bfloat16-parameters.
        steps: of training.
        batch: sequences of a step.
        lr: peak learning rate.
        warmup: steps (default: 5 % of --steps).
        seed: of weights and batches.
        window: steps of a running mean.
        most: largest difference of running means, in nats; above it the exit status is 1.
        compiled: compile PyTorch's model, on a GPU.
    """
    _measures(True)
    device = backend.use_device(device)
    given = {name: size for name, size in asdict(sizes).items() if size is not None}
    cases = loss_bench.loss_cases(
        data, preset, dtype=dtype, grad_dtype=grad_dtype, steps=steps, batch=batch, lr=lr,
        warmup=warmup, seed=seed, window=window, compiled=compiled, **given,
    )  # fmt: skip

    def problem(row: Row) -> str:
        apart = row["largest_difference"]
        near = isinstance(apart, (int, float)) and apart <= most
        return "" if near else f"running means differ by {apart} nats, expected {most:g} or less"

    measure = partial(loss_bench.measure_loss, device=device)
    return sweep_cases(loss_bench.LOSS, cases, measure, out, device, problem=problem)


@bench.command
def translation(
    *options: Annotated[str, Words],
    timed: int = 100,
    turns: int = 3,
    peer: Peer = None,
    out: Out = _OUT,
) -> int:
    """Measure training of a translation model, captured, beside the same model in PyTorch eager.

    Args:
        options: --data, --preset, --dtype, --device and the others of `tensorgrad train
            translation`; weights are new.
        timed: batches.
        turns: of each library.
    """
    with TemporaryDirectory() as folder:  # for the tokenizer
        own = [] if any(word.startswith("--resume") for word in options) else ["--out", folder]
        given, _, _ = read_command_line(TranslationSettings, None, [*own, *options])
        settings, device = choose_device(given)
        cases = translation_bench.translation_cases(settings, timed, turns, _measures(peer))
        measure = partial(
            translation_bench.measure_translation, settings=settings, folder=Path(folder),
            device=device,
        )  # fmt: skip
        return sweep_cases(translation_bench.TRANSLATION, cases, measure, out, device)


def _precision(device: str) -> str:
    return _ON_CPU if device == "cpu" else _ON_GPU


def _measures(peer: bool | None, package: str = "torch") -> bool:
    """Return whether a peer is measured; None: where it is installed."""
    there = find_spec(package) is not None
    if peer and not there:
        name = "PyTorch" if package == "torch" else package
        raise ArgumentError(f"--peer: {name} is not installed; run `pip install {package}`")
    return there if peer is None else peer


def _check_gpu(name: str) -> None:
    if not backend.gpu_count():
        raise DeviceError(f"bench {name}: no GPU was found, expected one to measure on")
