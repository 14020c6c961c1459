"""`tensorgrad bench step`: training steps of GPT-2s, eager and captured, beside PyTorch compiled.

A step is forward, backward, clipping at 1.0 and AdamW on random tokens that are on the device
already. It is timed in windows of at least `seconds`: steps in a row without waiting in between,
until the GPU has finished the last one. First eager and captured steps take turns; then the faster
of the two and each mode of PyTorch. Figures are medians of windows. Those of the faster one are of
its turns with PyTorch, so that both sides are equally warm. On a GPU each row has its own process.

The columns are in docs/guides/benchmarks.md. `mfu` counts 3 (L (24 C^2 + 2 T C) + 2 V C) FLOPs of
a token, causal attention as half and V with padding, against the GPU's data sheet; `peak_mb` and
`peer_peak_mb` are reserved memory; `peer_ms` is that of the fastest mode, eager only if nothing
else was measured.

PyTorch runs bfloat16 autocast for each dtype of 16 bits. For float32 and tf32 it has no autocast
and set_float32_matmul_precision("high"), which is TF32. It has scaled_dot_product_attention
(cuDNN's in 16 bits, in float32 the one that it chooses), fused AdamW, and the same clipping,
micro-batches and recomputation. Where PyTorch fails alone, the message of the row says why.

STEP_KINDS has the time of an eager step by kind of kernel: see breakdown.py. The profiler stays
loaded in later rows, so it is a sweep of its own. Tests: tests/bench/test_step.py.
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal

from tensorgrad import graph
from tensorgrad.bench import torch_ddp
from tensorgrad.bench.breakdown import KINDS
from tensorgrad.bench.breakdown import breakdown as by_kind
from tensorgrad.bench.memory import check_fits, is_out_of_memory, release
from tensorgrad.bench.options import PRESET, Device, Peer, Precision, Sizes, is_measured
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.processes import in_new_process
from tensorgrad.bench.steps import Preset, Step, model_case, settings_of
from tensorgrad.bench.sweep import Case, Row, Sweep, together
from tensorgrad.bench.timing import host_seconds, seconds_of, windows_in_turns
from tensorgrad.profile.training_step import TrainingStep, language_step
from tensorgrad.train.times import memory, peak_of

BATCHES = {
    "gpt2-124M": (32, 8, 2), "gpt2-355M": (16,), "gpt2-774M": (8,), "gpt2-1558M": (4,),
    "char": (64,), "llama-124M": (32,),
}  # fmt: skip
ROWS = ("gpt2-124M", "gpt2-355M", "gpt2-1558M", "char")  # by default
MODES = ("eager", "default", "reduce-overhead")  # PyTorch's; two of torch.compile

_MODE_MS = {mode: f"pytorch_{mode.replace('-', '_')}_ms" for mode in MODES}
Times = dict[str, dict[str, float]]  # results of `windows_in_turns`
_HIDDEN = ("layers", "width", "heads", "vocab", "recompute_norms", "grad_dtype")


def eager_step(case: Case, device: str) -> TrainingStep:
    """Return the step of a row.

    Raises:
        MemoryError: parameters, gradients and optimizer state do not fit in the free memory.
    """
    settings, config = settings_of(case)
    fixed = 18 if case["dtype"] == "bfloat16-parameters" else 16  # bytes: AdamW, gradients
    fixed -= 2 * (case["grad_dtype"] == "bfloat16")
    check_fits(fixed * config.parameters, device)
    return language_step(settings, config, device)


def measure_step(case: Case, device: str) -> Row:
    """Return the results of a row."""
    eager = eager_step(case, device)
    captured = graph.capture(eager, device)  # the same model
    row: Row = {
        "first_step_s": seconds_of(captured, device),
        "first_captured_s": seconds_of(captured, device),
    }
    row["host_ms"] = 1e3 * statistics.median(host_seconds(captured, device) for _ in range(20))
    row["peak_mb"] = round(memory(device != "cpu").get("peak_memory_mb", 0))
    steps: dict[str, Step] = {"eager": eager, "captured": captured}
    times = turns_of(case, steps, device)
    faster = min(steps, key=lambda name: times[name]["ms"])
    row |= _beside_peers(case, times, {faster: steps[faster]}, device)
    row |= {f"{name}_ms": timing["ms"] for name, timing in times.items()}
    own = dict(times[faster])
    ms = own.pop("ms")
    row |= own
    config = eager.model.config
    row["tokens_per_second"] = speed = 1e3 * case["batch"] * config.context / ms
    peak = peak_of(device, case["dtype"], 1)
    row["mfu"] = math.nan if peak is None else config.training_flops() * speed / peak
    return row


def measure_alone(measure: Callable[[Case, str], Row], case: Case, device: str) -> Row:
    """Return the results of a row, on a GPU from a new process: PyTorch keeps memory of graphs."""
    if device == "cpu":
        return measure(case, device)
    row: Row = in_new_process(measure, {"case": dict(case), "device": device})
    return row


def _beside_peers(case: Case, times: Times, own: Mapping[str, Step], device: str) -> Row:
    """Return the results of PyTorch; replace our times by those of the turns with it."""
    row: Row = {}
    found: list[tuple[str, Times, Row]] = []
    for mode in case["peer"].split():
        release()
        try:
            found.append((mode, *_beside(mode, case, own, device)))
        except Exception as error:  # our figures of this row are right all the same
            note_failure(row, mode, error)
        finally:
            _reset_torch()
    row |= {_MODE_MS[mode]: turns["PyTorch"]["ms"] for mode, turns, _ in found}
    if not found:
        return row
    _, turns, facts = min(found, key=lambda f: (f[0] == "eager", f[1]["PyTorch"]["ms"]))
    theirs, [faster] = turns["PyTorch"], own
    times[faster] = turns[faster]
    row |= {"ratio": theirs["ms"] / times[faster]["ms"], **facts}
    return row | {f"peer_{name}": reading for name, reading in theirs.items()}


def _beside(mode: str, case: Case, own: Mapping[str, Step], device: str) -> tuple[Times, Row]:
    """Return times of ours and of a mode of PyTorch; its first step and its memory."""
    cuda = None if device == "cpu" else importlib.import_module("torch").cuda
    if cuda is not None:
        cuda.reset_peak_memory_stats()
    compiled = mode != "eager"
    step = torch_ddp.training_step(*settings_of(case), device, compiled=compiled, mode=mode)
    row: Row = {"peer_first_step_s": seconds_of(step, device)}
    for _ in range(3):  # reduce-overhead captures in its second and third step
        seconds_of(step, device)
    if cuda is not None:
        row["peer_peak_mb"] = round(cuda.max_memory_reserved() / 1e6)
    return turns_of(case, {**own, "PyTorch": step}, device), row


def note_failure(row: Row, name: str, error: Exception) -> None:
    """Add to the message of a row why PyTorch failed at something."""
    line = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    why = "out of memory" if is_out_of_memory(error) else line
    row["message"] = f"{row.get('message', '')} PyTorch {name}: {why}".strip()


def turns_of(case: Case, steps: Mapping[str, Step], device: str) -> Times:
    """Return the times of steps that take turns in windows."""
    counts = {}
    for name, step in steps.items():
        seconds_of(step, device)
        least = min(seconds_of(step, device) for _ in range(2))
        counts[name] = max(1, math.ceil(case["seconds"] / least))
    return windows_in_turns(steps, device, case["windows"], counts)


def _reset_torch() -> None:
    """Let PyTorch forget compiled models, whose graphs hold memory."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.compiler.reset()
    release()


def step_sweep(
    *,
    preset: tuple[Preset, ...] = ROWS,
    batch: tuple[int, ...] = (),
    sizes: Sizes = PRESET,
    dtype: Precision = "bfloat16-parameters",
    grad_dtype: Literal["float32", "bfloat16"] = "float32",
    micro_batches: int = 1,
    recompute: bool = False,
    recompute_norms: bool = False,
    peer: Peer = None,
    peer_modes: tuple[Literal[MODES], ...] = MODES[1:],  # type: ignore[valid-type]
    breakdown: bool = False,
    seconds: float = 1.0,
    windows: int = 5,
    device: Device = "auto",
) -> Iterator[Sweep]:
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
    fits = micro_batches == 1  # the graph of reduce-overhead overwrites gradients
    modes = [mode for mode in dict.fromkeys(peer_modes) if fits or mode != "reduce-overhead"]
    options: Row = {
        "micro_batches": micro_batches, "recompute": recompute,
        "recompute_norms": recompute_norms, "grad_dtype": grad_dtype,
    }  # fmt: skip
    models: list[Row] = [
        {**model_case(name, sequences, dtype, sizes), **options}
        for name in dict.fromkeys(preset)
        for sequences in dict.fromkeys(batch or BATCHES[name])
    ]
    for case in models:
        settings_of(case)
    names = " ".join(modes) if is_measured(peer) else ""
    windowed = {"peer": names, "seconds": seconds, "windows": windows}
    results = (
        *("eager_ms", "captured_ms", "host_ms", "first_step_s", "first_captured_s"),
        *("tokens_per_second", "mfu", "peak_mb"),
        *(*_MODE_MS.values(), "peer_ms", "ratio"),
        *("peer_peak_mb", "peer_clock_mhz", "peer_watts", "peer_first_step_s"),
    )
    shown = "eager_ms", "captured_ms", "peer_ms"
    draw = bars("Training step", "ms", ("preset", "batch"), shown)
    cases = [{**case, **windowed} for case in models]
    measure = partial(measure_alone, measure_step, device=device)
    yield Sweep("step", cases, measure, results, draw, device, hidden=_HIDDEN)
    if breakdown:
        kinds = [{**case, "kind": kind} for case in models for kind in KINDS]
        both = together("kind", partial(measure_kinds, device=device))
        percents, results = ("of_step", "of_floor"), ("ms", "of_step", "floor_ms", "of_floor")
        draw = bars("Kernels of an eager step", "ms", ("kind", "preset"), ("ms", "floor_ms"))
        yield Sweep("step-kinds", kinds, both, results, draw, device, percents=percents)


def measure_kinds(case: Case, device: str) -> dict[str, Row]:
    """Return the results of all kinds of kernels; no floor where it is not known."""
    kinds = by_kind(eager_step(case, device), device)
    total = sum(ms for ms, _ in kinds.values())
    found: dict[str, Row] = {}
    for kind, (ms, floor) in kinds.items():
        found[kind] = {"ms": ms, "of_step": 100 * ms / total}
        if floor is not None and ms:
            found[kind] |= {"floor_ms": floor, "of_floor": 100 * floor / ms}
    return found
