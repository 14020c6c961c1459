"""The time of a training step by kind of kernel, and the fraction of its floor that each reaches.

The floor of an op is the larger of FLOPs / FLOP/s of a large product and bytes / bandwidth of a
copy, both measured on the device: see profile/ceilings.py. Bytes are operands and results, each
once. With CUPTI every kernel is counted; with CUDA events, and on a CPU, every op is, and what one
op does counts as one kind.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping

from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.profile import Profiler
from tensorgrad.profile.ceilings import Ceilings, measure_ceilings
from tensorgrad.profile.recording import Range, Recording
from tensorgrad.profile.tables import TimeSpan, op_table, spans
from tensorgrad.profile.training_step import TrainingStep

_PRODUCT_OPS = ("matmul", "linear", "linear_gelu", "feed_forward", "gated_linear", "einsum")
# Names of our kernels of products and of cuBLAS's.
_PRODUCT_KERNELS = re.compile(r"matmul|gemm|nvjet|cutlass|xmma|split_?k|cublas", re.IGNORECASE)
_BIAS = "bias gradients"
KINDS = (
    *("matrix products, forward", "matrix products, backward"),
    *("attention, forward", "attention, backward", "norms", "head and loss", "embedding"),
    *("elementwise", _BIAS, "optimizer", "zeroing", "copies", "gaps"),
)


def profile(step: TrainingStep, device: str, steps: int = 3) -> Recording:
    """Return a recording of some eager steps, after one with the profiler."""
    source = "host" if device == "cpu" else None
    for count in (1, steps):
        with Profiler(source=source) as profiler:
            for _ in range(count):
                step()
    return profiler.recording


def breakdown(step: TrainingStep, device: str) -> dict[str, tuple[float, float | None]]:
    """Return (ms of a step, ms of its floor; None: unknown) for each kind of KINDS.

    Kinds overlap where streams do; "gaps" is when nothing runs.
    """
    recording = profile(step, device)
    dtypes = {span.dtype for span in recording.ranges if span.flops}
    ceilings = measure_ceilings(device, dtypes)
    return summed(recording, ceilings, own_bytes(step.model.config))


def own_bytes(config: GPT2Config) -> dict[str, float]:
    """Return the bytes that a step of AdamW with clipping, and zeroing of the gradients, move.

    AdamW: float32 parameter (or master weight) and two moments both ways, the float32 gradient
    twice, once for its norm. See docs/chapters/optimizer.md.
    """
    count = config.parameters
    return {"optimizer": 32.0 * count, "zeroing": 4.0 * count}


def summed(
    recording: Recording, ceilings: Ceilings, known: Mapping[str, float]
) -> dict[str, tuple[float, float | None]]:
    """Return (ms, ms of the floor) of a step by kind.

    Args:
        recording: of eager steps.
        ceilings: of the device.
        known: bytes of a step by kind, for kinds without ops.
    """
    ranges = {span.number: span for span in recording.ranges}
    seconds: dict[str, float] = defaultdict(float)
    floors = {kind: recording.steps * size / ceilings.bandwidth for kind, size in known.items()}
    counted: set[tuple[int, str]] = set()
    for span in spans(recording):
        around = ranges.get(span.number)
        kind = kind_of(span, around)
        seconds[kind] += span.seconds
        if around is not None and around.is_op and (around.number, kind) not in counted:
            counted.add((around.number, kind))
            floors[kind] = floors.get(kind, 0.0) + _floor(around, kind, ceilings)
    seconds["gaps"] = op_table(recording).gaps * recording.steps
    scale = 1e3 / recording.steps
    return {
        kind: (scale * seconds[kind], scale * floors[kind] if floors.get(kind) else None)
        for kind in KINDS
    }


def kind_of(span: TimeSpan, around: Range | None) -> str:
    """Return the kind of a kernel, or of an op where ops are counted.

    Args:
        span: the kernel.
        around: the op that launched it; None: none.
    """
    name, op = span.name.lower(), span.op
    direction = "backward" if around is not None and around.kind == "backward" else "forward"
    if span.phase == "optimizer":
        return "optimizer"
    if span.phase == "zero gradients" or name == "memset":
        return "zeroing"
    if name == "memcpy" or name.startswith("cupy_copy"):
        return "copies"
    if op.startswith("attention"):
        return f"attention, {direction}"
    if "norm" in op:
        return "norms"
    if "cross_entropy" in op:
        return "head and loss"
    if op == "embedding":
        return "embedding"
    if op in _PRODUCT_OPS:
        if span.name == op or _PRODUCT_KERNELS.search(name):
            return f"matrix products, {direction}"
        if direction == "backward" and re.search("reduce_|sum_parts", name):
            return _BIAS
    return "elementwise"


def _floor(op: Range, kind: str, ceilings: Ceilings) -> float:
    """Return the least seconds of the kernels of one kind that an op launches."""
    if op.name in _PRODUCT_OPS and not kind.startswith("matrix products"):
        return 0.0  # biases: other kernels may have added up the rows
    peak = ceilings.flops.get(op.dtype, math.inf)
    return max(op.flops / peak, op.nbytes / ceilings.bandwidth)
