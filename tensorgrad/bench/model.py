"""`tensorgrad bench model`: time of forward, backward and optimizer, and memory beside the plan.

A GPT-2 of five sizes trains on random tokens. Tests: tests/bench/test_model.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tensorgrad.autograd import no_grad
from tensorgrad.bench.memory import check_fits, peak_memory
from tensorgrad.bench.pictures import new_figure, plot_lines
from tensorgrad.bench.steps import StepSettings, training_step
from tensorgrad.bench.sweep import Case, Row, Sweep
from tensorgrad.bench.timing import synchronize
from tensorgrad.checks import check_integer
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import Optimizer
from tensorgrad.parallel.planning.costs import Costs
from tensorgrad.parallel.planning.estimate import TrainingJob, stage_memory
from tensorgrad.tensor import Tensor
from tensorgrad.train.ranks import Batch, OneProcess

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


def model_cases(
    sizes: Sequence[str] = tuple(SIZES),
    precisions: Sequence[str] = ("float32", "bfloat16", "bfloat16-parameters"),
    warmups: Sequence[int] = (5,),
    recompute: Sequence[bool] = (False,),
    *,
    captured: bool = False,
    context: int = 512,
    batch: int = 4,
    vocab: int = 10000,
    steps: int = 10,
    attention: str = "flash",
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
) -> list[Case]:
    """Return the cases of a sweep, small models first.

    Args: see `tensorgrad bench model --help`.
    Raises:
        ArgumentError: a size is unknown, or a number is out of its range.
    """
    for name in sizes:
        if name not in SIZES:
            raise ArgumentError(f"bench model: size is {name!r}, expected {', '.join(SIZES)}")
    check_integer("bench model", "steps", steps, 1)
    for warmup in warmups:
        check_integer("bench model", "warmup", warmup, 0)
    cases: list[Case] = [
        {
            "size": name,
            "layers": SIZES[name][1] if layers is None else layers,
            "width": SIZES[name][0] if width is None else width,
            "heads": SIZES[name][2] if heads is None else heads,
            **{"context": context, "batch": batch, "vocab": vocab, "attention": attention},
            **{"dtype": dtype, "recompute": again, "captured": captured},
            **{"warmup": warmup, "steps": steps},
        }
        for name in dict.fromkeys(sizes)
        for dtype in dict.fromkeys(precisions)
        for again in dict.fromkeys(recompute)
        for warmup in dict.fromkeys(warmups)
    ]
    for case in cases:
        settings_of(case)
    return cases


def settings_of(case: Case) -> StepSettings:
    """Return the model and the batch of a case.

    Raises:
        ArgumentError: a size is out of its range.
    """
    config = GPT2Config(
        case["vocab"], case["context"], case["layers"], case["heads"], case["width"]
    )
    return StepSettings(
        config, case["batch"], case["dtype"], attention=case["attention"],
        recompute=case["recompute"],
    )  # fmt: skip


def measure_model(case: Case, device: str) -> Row:
    """Return the results of a case: milliseconds of each phase, tokens/s and peak memory.

    The host waits for the GPU between the phases, so their sum is a little more than a step of
    training. A captured step has no phases: it is timed as a whole, and the host waits after each.
    Memory is that of eager calls: "forward_mb" of forward alone, without gradients, and "step_mb"
    of a full step. Both have the parameters, and the latter the optimizer state.

    Args:
        case: of `model_cases`.
        device: "cpu", "cuda" or "cuda:N".
    Raises:
        MemoryError: parameters, gradients and optimizer state do not fit in the free memory.
    """
    settings = settings_of(case)
    planned = planned_bytes(settings)
    check_fits(_FIXED * settings.config.parameters, device)
    row: Row = {"parameters": settings.config.parameters}
    times = _captured_times if case["captured"] else _times
    row |= times(settings, device, case["warmup"], case["steps"])
    row["tokens_per_second"] = 1e3 * settings.tokens / row["step_ms"]
    row |= _memory(settings, device)
    for name, size in (planned or {}).items():
        row[f"{name}_planned_mb"] = size / 1e6
        row[f"{name}_ratio"] = row[f"{name}_mb"] / row[f"{name}_planned_mb"]
    return row


def planned_bytes(settings: StepSettings) -> dict[str, float] | None:
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
        settings: the model and the batch.
    Returns:
        Bytes of "forward" and "step". None for attention that keeps scores: there are no formulas.
    """
    if settings.attention != "flash":
        return None
    job = TrainingJob(
        settings.config, batch=settings.batch, micro_batches=settings.micro_batches,
        dtype=settings.precision,
    )  # fmt: skip
    costs, tokens, layers = job.costs, job.tokens, settings.config.layers
    copies = costs.weight_copies(costs.blocks[: 1 if settings.recompute else layers], head=True)
    step = stage_memory(job, 0)
    if settings.recompute:
        step["activations"] = layers * costs.boundary(tokens) + costs.kept_by_blocks(
            range(1), tokens
        )
        step["16-bit copies of weights"] = copies
    forward = _forward_bytes(costs, tokens, settings.precision != "float32") + copies
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


class Trainee:
    """A model, its optimizer and a batch."""

    def __init__(self, settings: StepSettings, device: str) -> None:
        self._settings, self._device = settings, device
        self._model: GPT2 = settings.model(device)
        self._part: Batch = settings.parts(device)[0]
        self._optimizer: Optimizer | None = None
        self._scaler = settings.scaler()

    def prepare(self) -> None:
        """Make the optimizer."""
        self._optimizer = self._settings.optimizer(self._model.named_parameters())

    def forward_alone(self) -> None:
        """Compute the loss without gradients."""
        with no_grad():
            self._loss()

    def step(self) -> list[float]:
        """Train one step; return the seconds of each phase."""
        assert self._optimizer is not None
        self._optimizer.zero_grad()
        moments = [self._moment()]
        loss = self._loss()
        moments.append(self._moment())
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        moments.append(self._moment())
        self._optimizer.step(1.0, self._scaler)
        moments.append(self._moment())
        return [after - before for before, after in pairwise(moments)]

    def _loss(self) -> Tensor:
        with self._settings.casts():
            x, y = map(Tensor, self._part)
            return self._model.forward(x, y)

    def _moment(self) -> float:
        synchronize(self._device)
        return time.perf_counter()


def _times(settings: StepSettings, device: str, warmup: int, steps: int) -> Row:
    """Return mean and standard deviation of each phase, in ms."""
    trainee = Trainee(settings, device)
    trainee.prepare()
    for _ in range(warmup):
        trainee.step()
    found = [trainee.step() for _ in range(steps)]
    row: Row = {}
    series = {name: [each[i] for each in found] for i, name in enumerate(_PHASES)}
    for name, seconds in {**series, "step": [sum(each) for each in found]}.items():
        row |= _mean_and_deviation(name, seconds)
    return row


def _captured_times(settings: StepSettings, device: str, warmup: int, steps: int) -> Row:
    """Return mean and standard deviation of a captured step, in ms."""
    step = training_step(settings, OneProcess(), device, captured=True)
    seconds = []
    for _ in range(warmup + steps):
        began = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return _mean_and_deviation("step", seconds[warmup:])


def _mean_and_deviation(name: str, seconds: Sequence[float]) -> Row:
    mean, deviation = statistics.mean(seconds), statistics.pstdev(seconds)
    return {f"{name}_ms": 1e3 * mean, f"{name}_std": 1e3 * deviation}


def _memory(settings: StepSettings, device: str) -> Row:
    """Return the peaks of forward alone and of a full step."""
    with peak_memory(device) as peak:
        trainee = Trainee(settings, device)
        peak.reset()
        trainee.forward_alone()
        forward = peak.bytes
        trainee.prepare()
        peak.reset()
        trainee.step()
        return {"forward_mb": forward / 1e6, "step_mb": peak.bytes / 1e6}


def draw_model(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of a sweep: phases with deviations, warm-up, and memory."""
    most = max(row["warmup"] for row in rows)
    settled = [row for row in rows if row["warmup"] == most]
    figures = {"": _draw_phases(settled), "-memory": _draw_memory(settled)}
    if len({row["warmup"] for row in rows}) > 1:
        figures["-warmup"] = _draw_warmup(rows)
    return figures


def _about(rows: Sequence[Row]) -> str:
    first = rows[0]
    return f"batch {first['batch']}, context {first['context']}, {first['device']}"


def _name(row: Row) -> str:
    return f"{row['size']}\n{row['dtype']}" + ("\nrecompute" if row["recompute"] else "")


def _draw_phases(rows: Sequence[Row]) -> Any:
    figure = new_figure(1, 1, f"GPT-2: time of a training step ({_about(rows)})", _wide(rows))
    axes = figure.subplots()
    base = [0.0] * len(rows)
    places = list(range(len(rows)))
    captured = rows[0]["captured"]
    for phase in ("step",) if captured else _PHASES:
        values = [row[f"{phase}_ms"] for row in rows]
        deviations = [row[f"{phase}_std"] for row in rows]
        label = "captured step" if captured else phase
        axes.bar(places, values, bottom=base, yerr=deviations, capsize=3, label=label)
        base = [a + b for a, b in zip(base, values, strict=True)]
    axes.set_xticks(places, [_name(row) for row in rows], fontsize=7)
    axes.set(ylabel="time (ms), with standard deviation")
    axes.grid(alpha=0.3, axis="y")
    axes.margins(y=0.2)  # for the legend
    axes.legend(ncols=3, loc="upper center")
    return figure


def _draw_memory(rows: Sequence[Row]) -> Any:
    figure = new_figure(1, 1, f"GPT-2: peak memory ({_about(rows)})", _wide(rows))
    axes = figure.subplots()
    for number, (what, words) in enumerate((("forward", "forward alone"), ("step", "full step"))):
        places = [i + 0.4 * number - 0.2 for i in range(len(rows))]
        axes.bar(places, [row[f"{what}_mb"] / 1e3 for row in rows], 0.38, label=words)
        planned = [
            (place, row[f"{what}_planned_mb"] / 1e3)
            for place, row in zip(places, rows, strict=True)
            if row[f"{what}_planned_mb"] != ""
        ]
        if planned:
            label = "formula" if number == 0 else None
            axes.plot(*zip(*planned, strict=True), "k_", markersize=16, label=label)
    axes.set_xticks(range(len(rows)), [_name(row) for row in rows], fontsize=7)
    axes.set(ylabel="memory (GB)")
    axes.grid(alpha=0.3, axis="y")
    axes.margins(y=0.2)  # for the legend
    axes.legend(ncols=3, loc="upper center")
    return figure


def _draw_warmup(rows: Sequence[Row]) -> Any:
    title = f"GPT-2: mean time of a step by warm-up\n({_about(rows)})"
    figure = new_figure(1, 1, title, 8.0)
    axes = figure.subplots()
    plot_lines(axes, rows, "warmup", "step_ms", ("size", "dtype", "recompute"))
    axes.set(xlabel="warm-up steps", ylabel="time (ms)", yscale="log")
    axes.get_legend().set_title("size, precision, recomputation", {"size": 8})
    return figure


def _wide(rows: Sequence[Row]) -> float:
    return max(6.4, 1.1 * len(rows))


MODEL = Sweep(
    "model",
    (
        *("size", "layers", "width", "heads", "context", "batch", "vocab", "attention", "dtype"),
        *("recompute", "captured", "warmup", "steps"),
    ),
    (
        "parameters",
        *(f"{phase}_{what}" for phase in (*_PHASES, "step") for what in ("ms", "std")),
        "tokens_per_second",
        *("forward_mb", "forward_planned_mb", "forward_ratio"),
        *("step_mb", "step_planned_mb", "step_ratio"),
    ),
    draw_model,
)
