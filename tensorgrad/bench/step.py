"""Training steps of GPT-2s on one device, eager and captured, beside PyTorch compiled.

    python -m examples.bench.train_step --json train_step.json
    python -m examples.bench.train_step --preset gpt2-124M --batch 32 8 --breakdown --no-peer
    python -m examples.bench.train_step --preset char --batch 2 --layers 1 --heads 2 --width 16 \
        --context 16 --vocab 64 --seconds 0.01 --windows 2 --device cpu

A step is forward, backward, clipping at 1.0 and AdamW on random tokens that are on the device
already. It is timed in windows of at least --seconds: steps in a row without waiting in between,
until the GPU has finished the last one. First eager and captured steps take
turns; then the faster of the two and each mode of PyTorch. Figures are medians of windows. Those of
the faster one are of its turns with PyTorch, so that both sides are equally warm.

host_ms                 a captured step until the call returns; the GPU is idle when it begins
first_step_s            the first step, which compiles kernels that are not on disk yet
first_captured_s        the step that is captured, the second one
tokens_per_second, mfu  of the faster one
mfu                     FLOPs of the model / peak FLOP/s of the GPU's data sheet. FLOPs of a token
                        are 3 (L (24 C^2 + 2 T C) + 2 V C), causal attention counted as half, and
                        V with padding; see GPT2Config.training_flops
peak_mb                 memory reserved for arrays once steps are captured; on a CPU the process's
clock_mhz, watts        means in windows of the faster one; NaN without the package nvidia-ml-py
peer_ms                 PyTorch compiled, the fastest of the modes that were measured; eager only if
                        nothing else was. peer_peak_mb is what it reserves
ratio                   peer_ms / ms of the faster one

PyTorch runs bfloat16 autocast for each --dtype of 16 bits. For float32 and tf32 it has no autocast
and set_float32_matmul_precision("high"), which is TF32. It has scaled_dot_product_attention
(cuDNN's in 16 bits, in float32 the one that it chooses), fused AdamW, and the same clipping,
micro-batches and recomputation. A finished row is in OUT/train_step.csv at once, and the same
command resumes. A row without enough memory says so; where PyTorch fails alone, the message of the
row says why.

--breakdown adds the time of an eager step by kind of kernel: see breakdown.py. The profiler stays
loaded in later rows, so take the other columns from a run without it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.bench import breakdown as parts
from tensorgrad import __version__, backend, graph
from tensorgrad.bench import torch_ddp
from tensorgrad.bench.memory import check_fits, is_out_of_memory, release
from tensorgrad.bench.steps import PRECISIONS, Step, StepSettings, training_step
from tensorgrad.bench.sweep import OK, Case, Row, Sweep, run_sweep, to_markdown
from tensorgrad.bench.timing import synchronize
from tensorgrad.command import command
from tensorgrad.errors import ArgumentError
from tensorgrad.files import write_json
from tensorgrad.gpu import GpuMonitor, clock_and_watts, name_of
from tensorgrad.models.gpt2 import PRESETS, GPT2Config
from tensorgrad.train.ranks import OneProcess
from tensorgrad.train.settings import has_narrow_products
from tensorgrad.train.times import memory, peak_of

MODELS = {**PRESETS, "char": GPT2Config(10000, 256, 6, 6, 384)}
BATCHES = {
    "gpt2-124M": (32, 8, 2), "gpt2-355M": (16,), "gpt2-774M": (8,), "gpt2-1558M": (8,),
    "char": (64,),
}  # fmt: skip
ROWS = ("gpt2-124M", "gpt2-355M", "gpt2-1558M", "char")  # by default
MODES = ("eager", "default", "reduce-overhead")  # of PyTorch; the last two of torch.compile
MFU = "3 (L (24 C^2 + 2 T C) + 2 V C) tokens/s / peak FLOP/s of the data sheet"

_SIZES = ("layers", "width", "heads", "context", "vocab")
_MODE_MS = {mode: f"pytorch_{mode.replace('-', '_')}_ms" for mode in MODES}
_PARTS = {kind: (f"{kind} ms", f"{kind} floor ms") for kind in parts.KINDS}
TABLE = Sweep(
    "train_step",
    (
        *("preset", *_SIZES, "batch", "micro_batches", "recompute", "recompute_norms", "dtype"),
        *("grad_dtype", "peer", "breakdown", "seconds", "windows"),
    ),
    (
        *("eager_ms", "captured_ms", "host_ms", "first_step_s", "first_captured_s"),
        *("tokens_per_second", "mfu", "peak_mb"),
        *(*_MODE_MS.values(), "peer_ms", "ratio"),
        *("peer_peak_mb", "peer_clock_mhz", "peer_watts", "peer_first_step_s"),
        *(name for pair in _PARTS.values() for name in pair),
    ),
    draw=lambda rows: {},
    hidden=(
        *("layers", "width", "heads", "vocab", "breakdown", "recompute_norms", "grad_dtype"),
        *(name for pair in _PARTS.values() for name in pair),
    ),
)


@dataclass(frozen=True)
class Timing:
    """What windows of one kind of step gave: medians, and means of the GPU's readings."""

    ms: float
    clock_mhz: float
    watts: float


def settings_of(case: Case) -> StepSettings:
    """Return the model and the batch of a row.

    Raises:
        ArgumentError: a size is out of its range.
    """
    config = GPT2Config(
        *(case["vocab"], case["context"], case["layers"], case["heads"], case["width"]),
        vocab_multiple=128,
    )
    return StepSettings(
        config, case["batch"], case["dtype"], recompute=case["recompute"],
        recompute_norms=case["recompute_norms"], micro_batches=case["micro_batches"],
        grad_dtype=case["grad_dtype"],
    )  # fmt: skip


class TrainStepBench:
    """Measures rows; `monitor` is running."""

    def __init__(self, device: str, monitor: GpuMonitor) -> None:
        self._device, self._monitor = device, monitor

    def __call__(self, case: Case) -> Row:
        """Return the results of a row."""
        settings, device = settings_of(case), self._device
        fixed = 18 if case["dtype"] == "bfloat16-parameters" else 16  # bytes: AdamW, gradients
        fixed -= 2 * (case["grad_dtype"] == "bfloat16")
        check_fits(fixed * settings.config.parameters, device)
        eager = training_step(settings, OneProcess(), device)
        captured = graph.capture(eager, device)  # the same model
        row: Row = {"first_step_s": self._call(captured), "first_captured_s": self._call(captured)}
        row["host_ms"] = 1e3 * statistics.median(self._host_seconds(captured) for _ in range(20))
        row["peak_mb"] = round(memory(device != "cpu").get("peak_memory_mb", 0))
        steps: dict[str, Step] = {"eager": eager, "captured": captured}
        times = self._turns(case, steps)
        _say("eager {:.3f} ms, captured {:.3f} ms", times["eager"].ms, times["captured"].ms)
        faster = min(steps, key=lambda name: times[name].ms)
        row |= self._beside_peers(case, settings, times, faster, steps[faster])
        own = times[faster]
        row |= {f"{name}_ms": timing.ms for name, timing in times.items()}
        row |= {"clock_mhz": own.clock_mhz, "watts": own.watts}
        speed = 1e3 * settings.tokens / own.ms
        peak = peak_of(device, case["dtype"], 1)
        row["tokens_per_second"] = round(speed)
        row["mfu"] = math.nan if peak is None else settings.config.training_flops * speed / peak
        if case["breakdown"]:  # last, as CUPTI stays loaded
            for kind, found in parts.breakdown(eager, settings, device).items():
                row |= zip(_PARTS[kind], found, strict=True)
        return row

    def _beside_peers(
        self, case: Case, settings: StepSettings, times: dict[str, Timing], faster: str, own: Step
    ) -> Row:
        """Return the results of PyTorch; replace our times by those of the turns with it."""
        row: Row = {}
        found: list[tuple[str, Timing, Timing, Row]] = []
        for mode in case["peer"].split():
            try:
                found.append((mode, *self._beside(mode, case, settings, faster, own)))
            except Exception as error:  # our figures of this row are right all the same
                line = str(error).strip().partition("\n")[0][:200] or type(error).__name__
                why = "out of memory" if is_out_of_memory(error) else line
                row["message"] = f"{row.get('message', '')} PyTorch {mode}: {why}".strip()
                _say("PyTorch {}: {}", mode, why)
            finally:
                _reset_torch()
        row |= {_MODE_MS[mode]: theirs.ms for mode, _, theirs, _ in found}
        if not found:
            return row
        _, times[faster], theirs, facts = min(found, key=lambda f: (f[0] == "eager", f[2].ms))
        row |= {"peer_ms": theirs.ms, "ratio": theirs.ms / times[faster].ms, **facts}
        return row | {"peer_clock_mhz": theirs.clock_mhz, "peer_watts": theirs.watts}

    def _beside(
        self, mode: str, case: Case, settings: StepSettings, faster: str, own: Step
    ) -> tuple[Timing, Timing, Row]:
        """Return our times and those of a mode of PyTorch, and facts about the latter."""
        release()
        peer, facts = self._peer(mode, settings)
        times = self._turns(case, {faster: own, "PyTorch": peer})
        ours, theirs = times[faster], times["PyTorch"]
        _say("PyTorch {} {:.3f} ms, tensorgrad {:.3f} ms", mode, theirs.ms, ours.ms)
        return ours, theirs, facts

    def _peer(self, mode: str, settings: StepSettings) -> tuple[Step, Row]:
        """Return a training step of PyTorch that has run, the time of its first and its memory."""
        torch = importlib.import_module("torch")
        cuda = None if self._device == "cpu" else torch.cuda
        if cuda is not None:
            cuda.reset_peak_memory_stats()
        step = torch_ddp.training_step(
            *(torch, settings.config, settings.batch, self._device),
            autocast=has_narrow_products(settings.precision), several=False,
            compiled=mode != "eager", mode=mode, micro_batches=settings.micro_batches,
            recompute=settings.recompute,
        )  # fmt: skip
        row: Row = {"peer_first_step_s": self._call(step)}
        for _ in range(3):  # reduce-overhead captures in its second and third step
            self._call(step)
        if cuda is not None:
            row["peer_peak_mb"] = round(cuda.max_memory_reserved() / 1e6)
        return step, row

    def _turns(self, case: Case, steps: Mapping[str, Step]) -> dict[str, Timing]:
        """Return the times of steps that take turns in windows."""
        counts, windows = {}, {name: list[tuple[float, dict[str, float]]]() for name in steps}
        for name, step in steps.items():
            self._call(step)
            least = min(self._call(step) for _ in range(2))
            counts[name] = max(1, math.ceil(case["seconds"] / least))
        for _ in range(case["windows"]):
            for name, step in steps.items():
                self._monitor.take()
                seconds = self._call(step, counts[name]) / counts[name]
                windows[name].append((seconds, self._monitor.take()))
        return {name: _timing(found) for name, found in windows.items()}

    def _call(self, step: Step, count: int = 1) -> float:
        """Return the seconds of some steps, with the GPU's work."""
        synchronize(self._device)
        began = time.perf_counter()
        for _ in range(count):
            step()
        synchronize(self._device)
        return time.perf_counter() - began

    def _host_seconds(self, step: Step) -> float:
        """Return the seconds until a step returns."""
        synchronize(self._device)
        began = time.perf_counter()
        step()
        return time.perf_counter() - began


def _timing(windows: Sequence[tuple[float, Mapping[str, float]]]) -> Timing:
    """Return the median time, and the mean of each reading."""
    ms = 1e3 * statistics.median(seconds for seconds, _ in windows)
    means = clock_and_watts(*(found for _, found in windows))
    return Timing(ms, means.get("clock_mhz", math.nan), means.get("watts", math.nan))


def _reset_torch() -> None:
    """Let PyTorch forget compiled models, whose graphs hold memory."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.compiler.reset()
    release()


def _say(words: str, *values: object) -> None:
    print("   ", words.format(*values), file=sys.stderr, flush=True)


def progress(done: int, total: int, case: Case | None) -> None:
    """Print a line before each row."""
    if case is not None:
        print(f"[{done + 1}/{total}] {case['preset']} batch {case['batch']}", file=sys.stderr,
              flush=True)  # fmt: skip


def cases_of(given: argparse.Namespace) -> list[Case]:
    """Return the rows that the options ask for.

    Raises:
        ArgumentError: an option is out of its range, or a mode cannot run.
    """
    modes = [] if given.no_peer else list(dict.fromkeys(given.peer_modes))
    if given.micro_batches > 1 and "reduce-overhead" in modes:
        modes.remove("reduce-overhead")  # its next graph overwrites gradients that it adds to
    if given.seconds <= 0 or given.windows < 1:
        raise ArgumentError(
            f"--seconds, --windows: got {given.seconds} and {given.windows}, expected more than 0"
        )
    found: list[Case] = []
    for preset in dict.fromkeys(given.preset or ROWS):
        model = MODELS[preset]
        usual = dict(zip(_SIZES, (model.layers, model.width, model.heads, model.context,
                                  model.vocab_size), strict=True))  # fmt: skip
        asked = {name: getattr(given, name) for name in _SIZES}
        sizes = {name: size if asked[name] is None else asked[name] for name, size in usual.items()}
        found += [
            {
                "preset": preset, **sizes, "batch": batch, "micro_batches": given.micro_batches,
                "recompute": given.recompute, "recompute_norms": given.recompute_norms,
                "dtype": given.dtype, "grad_dtype": given.grad_dtype, "peer": " ".join(modes),
                "breakdown": given.breakdown, "seconds": given.seconds, "windows": given.windows,
            }
            for batch in dict.fromkeys(given.batch or BATCHES[preset])
        ]  # fmt: skip
    for case in found:
        settings_of(case)
    return found


def breakdowns(rows: Sequence[Row]) -> str:
    """Return a table for each row that has times by kind of kernel."""
    text = ""
    for row in rows:
        if row["status"] == OK and row["breakdown"]:
            found = {
                kind: (float(row[ms]), None if row[floor] == "" else float(row[floor]))
                for kind, (ms, floor) in _PARTS.items()
            }
            title = f"{row['preset']}, batch {row['batch']}, an eager step with the profiler"
            text += f"\n{title}:\n\n{parts.to_markdown(found)}"
    return text


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    rows = "; ".join(f"{name}: {' '.join(map(str, BATCHES[name]))}" for name in MODELS)
    add("--preset", nargs="+", choices=tuple(MODELS), help=f"models (default: {', '.join(ROWS)})")
    add("--batch", nargs="+", type=int, help=f"sequences of a step (default: {rows})")
    add("--dtype", choices=PRECISIONS, default="bfloat16-parameters", help="as in training")
    add("--grad-dtype", choices=("float32", "bfloat16"), default="float32",
        help="bfloat16: with --dtype bfloat16-parameters")  # fmt: skip
    add("--micro-batches", type=int, default=1, help="parts of a batch (default: 1)")
    add("--recompute", action="store_true", help="compute blocks again in backward")
    add("--recompute-norms", action="store_true", help="compute outputs of norms again in backward")
    add("--no-peer", action="store_true", help="without PyTorch, which is then not imported")
    add("--peer-modes", nargs="+", choices=MODES, default=MODES[1:],
        help="of PyTorch (default: default reduce-overhead, both compiled; the latter is not "
        "measured with --micro-batches)")  # fmt: skip
    add("--breakdown", action="store_true",
        help="time of an eager step by kind of kernel, by CUPTI where it is installed")  # fmt: skip
    add("--seconds", type=float, default=1.0, help="least length of a window (default: 1)")
    add("--windows", type=int, default=5, help="of each side (default: 5)")
    for name in _SIZES:
        add(f"--{name}", type=int, help="of each model (default: the preset's)")
    add("--device", default="auto", help="cpu, cuda, cuda:N, or auto: a GPU if there is one")
    add("--out", type=Path, default=Path("runs/bench"), help="folder (default: runs/bench)")
    add("--json", type=Path, help="file to write, with all columns")
    return parser


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write what was measured."""
    given = options().parse_args(arguments)
    cases = cases_of(given)
    if cases[0]["peer"] and importlib.util.find_spec("torch") is None:
        raise ArgumentError("--peer-modes: PyTorch is not installed, expected --no-peer")
    device = backend.use_device(given.device)
    index = backend.gpu_index(device)
    name = "cpu" if index is None else name_of(index)
    try:
        with GpuMonitor(index, 0.2) as monitor:
            found = run_sweep(
                TABLE, cases, TrainStepBench(device, monitor), given.out, device=name,
                version=__version__, progress=progress, monitor=monitor,
            )  # fmt: skip
    except KeyboardInterrupt as stop:
        stop.add_note(f"finished rows are in {given.out}; the same command resumes")
        raise
    print(f"{to_markdown(TABLE, found.rows)}{breakdowns(found.rows)}")
    if found.skipped:
        print(f"{found.skipped} of {len(cases)} rows were in {given.out} before")
    if given.json is not None:
        rows = [{key: _for_json(value) for key, value in row.items()} for row in found.rows]
        facts: dict[str, Any] = {"device": name, "version": __version__, "mfu": MFU, "rows": rows}
        write_json(given.json, facts, 1)
    return int(found.failed > 0)


def _for_json(value: Any) -> Any:
    """Return a value of a row; None for NaN and for what was not measured."""
    if value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


if __name__ == "__main__":
    sys.exit(main())
