"""`tensorgrad bench model`: time of forward, backward and optimizer, and memory beside the plan.

A GPT-2 of five sizes trains on random tokens. Tests: tests/bench/test_model.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

from tensorgrad import graph
from tensorgrad.bench import options
from tensorgrad.bench.memory import check_fits, peak_memory
from tensorgrad.bench.pictures import bar_figure, lines
from tensorgrad.bench.steps import settings_of, step_of
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import phases, seconds_of
from tensorgrad.core.record import no_grad
from tensorgrad.nn import ATTENTION_KERNELS
from tensorgrad.parallel.planning.costs import Costs
from tensorgrad.parallel.planning.estimate import TrainingJob, stage_memory
from tensorgrad.profile.training_step import language_step

# name -> width, layers, heads; the feed-forward layers are four times as wide
SIZES = {
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 36, 20),
    "xl": (1600, 48, 25),
    "2.7B": (2560, 32, 32),
}
_PHASES = ("forward", "backward", "optimizer")
_FIXED = 16  # bytes a parameter, in every precision: parameters, gradients and AdamW's state


def model_sweep(
    *,
    sizes: tuple[Literal[tuple(SIZES)], ...] = tuple(SIZES),  # type: ignore[valid-type]
    precision: tuple[options.Precision, ...] = ("float32", "bfloat16", "bfloat16-parameters"),
    warmup: tuple[int, ...] = (5,),
    steps: int = 10,
    recompute: bool = False,
    captured: bool = False,
    context: options.Context = 512,
    batch: int = 4,
    vocab: options.Vocab = 10000,
    attention: Literal[ATTENTION_KERNELS] = "flash",  # type: ignore[valid-type]
    layers: options.Layers | None = None,
    width: options.Width | None = None,
    heads: options.Heads | None = None,
    device: options.Device = "auto",
) -> Iterator[Sweep]:
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
    cases: list[Case] = []
    for size in dict.fromkeys(sizes):
        own = zip(("width", "layers", "heads"), SIZES[size], (width, layers, heads), strict=True)
        cases += options.crossed(
            size=size, **{name: preset if given is None else given for name, preset, given in own},
            context=context, batch=batch, vocab=vocab, attention=attention, dtype=precision,
            recompute=recompute, captured=captured, warmup=warmup, steps=steps,
        )  # fmt: skip
    for case in cases:
        settings_of(case)
    results = (
        "parameters",
        *(f"{phase}_{what}" for phase in (*_PHASES, "step") for what in ("ms", "std")),
        "tokens_per_second",
        *("forward_mb", "forward_planned_mb", "forward_ratio"),
        *("step_mb", "step_planned_mb", "step_ratio"),
    )
    measure = partial(measure_model, device=device)
    yield Sweep("model", cases, measure, results, draw_model, device)


def measure_model(case: Case, device: str) -> Row:
    """Return the results of a case: milliseconds of each phase, tokens/s and peak memory.

    The host waits for the GPU between the phases, so their sum is a little more than a step of
    training. A captured step has no phases: it is timed as a whole, and the host waits after each.
    Memory is that of eager calls: "forward_mb" of forward alone, without gradients, and "step_mb"
    of a full step. Both have the parameters, and the latter the optimizer state.

    Args:
        case: of `model_sweep`.
        device: "cpu", "cuda" or "cuda:N".
    Raises:
        MemoryError: parameters, gradients and optimizer state do not fit in the free memory.
    """
    _, config = settings_of(case)
    planned = planned_bytes(case)
    check_fits(_FIXED * config.parameters, device)
    row: Row = {"parameters": config.parameters, **times(case, device)}
    row["tokens_per_second"] = 1e3 * case["batch"] * case["context"] / row["step_ms"]
    row |= _memory(case, device)
    for name, size in (planned or {}).items():
        row[f"{name}_planned_mb"] = size / 1e6
        row[f"{name}_ratio"] = row[f"{name}_mb"] / row[f"{name}_planned_mb"]
    return row


def planned_bytes(case: Case) -> dict[str, float] | None:
    """Return the peak memory of forward alone and of a full step, by formulas.

    The step's are those of parallel/planning/estimate.py. With recomputation a block keeps its
    input alone, and one block at a time has its activations. Forward alone needs the parameters and
    the larger of a block and the head:

        block = 3 C + 4 C + C              input, sum with attention, norm; GELU; output
        head = 2 C + a chunk of logits     input and output of the norm

    for each token, in the dtype of activations. In float32 GELU is an op of its own, whose operand
    is another 4 C before there is an output. Under autocast input, sum and norm are float32, and
    there are a 16-bit copy of the norm's output and, to the end of forward, of all weights that are
    multiplied; with recomputation of those of one block and the head.

    Args:
        case: of `model_sweep`.
    Returns:
        Bytes of "forward" and "step". None for attention that keeps scores: there are no formulas.
    """
    if case["attention"] != "flash":
        return None
    job = TrainingJob(
        settings_of(case)[1], batch=case["batch"], micro_batches=1, dtype=case["dtype"]
    )
    costs, tokens, layers = job.costs, job.tokens, case["layers"]
    copies = costs.weight_copies(costs.blocks[: 1 if case["recompute"] else layers], head=True)
    step = stage_memory(job, 0)
    if case["recompute"]:
        step["activations"] = layers * costs.boundary(tokens) + costs.kept_by_blocks(
            range(1), tokens
        )
        step["16-bit copies of weights"] = copies
    forward = _forward_bytes(costs, tokens, case["dtype"] != "float32") + copies
    return {"forward": forward, "step": sum(step.values())}


def _forward_bytes(costs: Costs, tokens: int, fused: bool) -> float:
    """Return the bytes of forward alone without the copies of weights; `fused`: with GELU."""
    width: int = costs.width
    hidden: int = costs.config.hidden_width
    inside = width + hidden if fused else 2 * hidden
    copy = width * costs.item if costs.autocast else 0
    block = 3 * width * costs.wide + copy + inside * costs.item
    head = 2 * width * costs.wide + copy
    most = max(block * tokens, head * tokens + costs.chunk(tokens))
    parameters: int = costs.config.parameters
    return parameters * costs.wide + costs.kept_by_embedding(tokens) + most


def times(case: Case, device: str) -> Row:
    """Return mean and standard deviation of each phase, or of a captured step alone, in ms."""
    step = step_of(case, device)
    series: dict[str, Sequence[float]] = {}
    if case["captured"]:
        captured = graph.capture(step, device)
        series["step"] = [
            seconds_of(captured, device) for _ in range(case["warmup"] + case["steps"])
        ]
    else:
        found = [phases(device, *step.phases()) for _ in range(case["warmup"] + case["steps"])]
        series = dict(zip(_PHASES, zip(*found, strict=True), strict=True))
        series["step"] = list(map(sum, found))
    row: Row = {}
    for name, seconds in series.items():
        timed = seconds[case["warmup"] :]
        row |= {f"{name}_ms": 1e3 * statistics.mean(timed),
                f"{name}_std": 1e3 * statistics.pstdev(timed)}  # fmt: skip
    return row


def _memory(case: Case, device: str) -> Row:
    """Return the peaks of forward alone and of a full step."""
    with peak_memory(device) as peak:
        step = language_step(*settings_of(case), device, lazy=True)
        peak.reset()
        with no_grad():
            step.loss(*step.parts[0])
        forward = peak.bytes
        _ = step.optimizer
        peak.reset()
        step()
        return {"forward_mb": forward / 1e6, "step_mb": peak.bytes / 1e6}


def draw_model(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of a sweep: phases with deviations, warm-up, and memory."""
    settled = [row for row in rows if row["warmup"] == max(other["warmup"] for other in rows)]
    about, names = "GPT-2: {what} (batch {{batch}}, context {{context}})", ("size", "dtype")
    times = [f"{phase}_ms" for phase in (*_PHASES, "step")]
    memory = [f"{part}{kind}_mb" for part in ("forward", "step") for kind in ("", "_planned")]
    title = about.format(what="time of a step")
    figures = {
        "": bar_figure(settled, title, "ms", names, times),
        "-memory": bar_figure(settled, about.format(what="peak memory"), "MB", names, memory),
    }
    if len(settled) < len(rows):
        x, panels = ("warmup", "warm-up steps"), {"step_ms": "time (ms)"}
        by = (*names, "recompute")
        figures["-warmup"] = lines(rows, title, x, panels, by, xscale="linear")
    return figures
