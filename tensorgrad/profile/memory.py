"""Memory over time, by kind, and what is allocated at the peak.

Arrays are followed with weak references from where the library sees them first: parameters,
gradients and optimizer state, then the output of each op and what it saves for backward, and the
gradients that backward returns. So each has an op, a layer and a line of user code. What an op
needs only while it runs is its peak above what is alive after it, by the allocator: `tracemalloc`
for NumPy's arrays, a memory hook for CuPy's. Tests: tests/profile/test_memory.py.
"""

from __future__ import annotations

import time
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, is_array
from tensorgrad.core.nodes import Node, Output

KINDS = (
    *("parameters", "optimizer", "gradients", "activations", "activation gradients"),
    *("other", "workspace"),
)
_BEFORE = -1  # the place of an array that is older than the recording


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory after an op.

    Attributes:
        time: in ns of `time.perf_counter_ns`.
        op, phase, layer, line: what ran; the line of user code as "file.py:12".
        used: bytes in use after the op.
        peak: the most bytes in use since the sample before.
        kinds: bytes by kind, in the order of KINDS; they sum up to the peak.
    """

    time: int
    op: str
    phase: str
    layer: str
    line: str
    used: int
    peak: int
    kinds: tuple[int, ...]


@dataclass(slots=True)
class Allocation:
    """An array that the recording followed.

    Attributes:
        nbytes: its size, with padding and whatever else its buffer holds.
        kind: one of KINDS.
        op, phase, layer, line: where it was seen first.
        shape, dtype: of the array that was seen; a buffer may be larger.
        born, died: the indices of the samples at which it was there first, and was not any more;
            None where it was there until the end.
    """

    nbytes: int
    kind: str
    op: str
    phase: str
    layer: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    born: int
    died: int | None = None


@dataclass(frozen=True)
class MemoryRecording:
    """The memory of a recording.

    Attributes:
        samples: one after each op, forward and backward, and each phase without ops.
        allocations: the arrays that were followed.
        device: "cpu" or the name of the GPU.
    """

    samples: Sequence[Sample]
    allocations: Sequence[Allocation]
    device: str = "cpu"

    @property
    def peak(self) -> Sample | None:
        """The sample with the highest peak; None where nothing was recorded."""
        return max(self.samples, key=lambda sample: sample.peak, default=None)

    def alive_at(self, sample: Sample) -> list[Allocation]:
        """Return the arrays that were alive after a sample, the largest first."""
        place = self.samples.index(sample)
        alive = [
            allocation
            for allocation in self.allocations
            if allocation.born <= place and (allocation.died is None or allocation.died > place)
        ]
        return sorted(alive, key=lambda each: -each.nbytes)

    def peak_by_line(self) -> list[tuple[str, int]]:
        """Return the bytes at the peak by line of user code, the most first.

        Workspace counts for the line that ran then. What has no line is under its kind.
        """
        peak = self.peak
        if peak is None:
            return []
        lines: Counter[str] = Counter()
        for allocation in self.alive_at(peak):
            lines[allocation.line or allocation.kind] += allocation.nbytes
        lines[peak.line or "workspace"] += peak.kinds[KINDS.index("workspace")]
        lines["other"] += peak.kinds[KINDS.index("other")]
        return [(line, size) for line, size in lines.most_common() if size]

    def largest(self, count: int = 20) -> list[Allocation]:
        """Return the largest arrays of all."""
        return sorted(self.allocations, key=lambda each: -each.nbytes)[:count]


class Allocator:
    """How much memory is in use: of NumPy and Python, by `tracemalloc`."""

    def start(self) -> None:
        """Begin to count; a trace that runs already stays as it is."""
        self._stops = not tracemalloc.is_tracing()
        if self._stops:
            tracemalloc.start(1)
        tracemalloc.reset_peak()
        self._base = tracemalloc.get_traced_memory()[0]

    def read(self) -> tuple[int, int]:
        """Return the bytes allocated since the start, and the most since the last read."""
        used, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        return used - self._base, peak - self._base

    def stop(self) -> None:
        """Stop the trace if `start` began it."""
        if self._stops:
            tracemalloc.stop()


class GpuAllocator(Allocator):
    """Memory of CuPy's pool, by a memory hook.

    Args:
        cuda: `cupy.cuda`.
    """

    def __init__(self, cuda: Any) -> None:
        self.used = self.most = 0
        allocator = self

        class Hook(cuda.MemoryHook):  # type: ignore[misc]
            name = "tensorgrad.profile"

            def malloc_postprocess(self, **facts: Any) -> None:
                allocator.used += facts["mem_size"]
                allocator.most = max(allocator.most, allocator.used)

            def free_postprocess(self, **facts: Any) -> None:
                allocator.used -= facts["mem_size"]

        self._hook = Hook()

    def start(self) -> None:
        """Register the hook."""
        self._hook.__enter__()

    def read(self) -> tuple[int, int]:
        """Return the bytes allocated since the start, and the most since the last read."""
        most, self.most = self.most, self.used
        return self.used, most

    def stop(self) -> None:
        """Remove the hook."""
        self._hook.__exit__(None, None, None)


_Place = tuple[str, str, str, str]  # op, phase, layer, line
_NOWHERE: _Place = "", "", "", ""


class MemoryTracker:
    """Follows arrays; the profiler calls it.

    Args:
        allocator: of the device.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._tracked: list[Allocation] = []
        self._alive: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        self._samples: list[tuple[int, _Place, int, int]] = []
        self._leaves: dict[int, weakref.ref[Any]] = {}

    def start(self, model: Any, optimizer: Any) -> None:
        """Begin, with the arrays of a model and an optimizer, or None."""
        if optimizer is not None:
            for piece in optimizer.flat.shards:
                self._follow(piece.data, "parameters", _NOWHERE, _BEFORE)
                self._follow(piece.grad, "gradients", _NOWHERE, _BEFORE)
            for array in (*optimizer.state.values(), optimizer.hyper):
                self._follow(array, "optimizer", _NOWHERE, _BEFORE)
        if model is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                self._follow(tensor.data, "parameters", _NOWHERE, _BEFORE)
                if tensor.grad is not None:
                    self._follow(tensor.grad, "gradients", _NOWHERE, _BEFORE)
        self._allocator.start()

    def op(
        self, place: tuple[str, str, str], line: str, output: Any, inputs: Any, saved: Any
    ) -> None:
        """Follow the output of an op and what it saved; take a sample."""
        there = (*place, line)
        for tensor in inputs:
            if getattr(tensor, "requires_grad", False) and tensor.node is None:
                if id(tensor) not in self._leaves:
                    self._leaves[id(tensor)] = weakref.ref(tensor)
                self._follow(tensor.data, "parameters", _NOWHERE, _BEFORE)
            elif tensor is not None and is_array(tensor.data):
                self._skip(tensor.data)
        for array in (output, *_arrays(saved)):
            self._follow(array, "activations", there, len(self._samples))
        self._sample(there)

    def further_outputs(self, outputs: Sequence[Any]) -> None:
        """Follow the other outputs of the op that was sampled last."""
        for array in outputs:
            self._follow(array, "activations", self._samples[-1][1], len(self._samples) - 1)

    def backward(
        self, place: tuple[str, str, str], line: str, edges: Sequence[Any], found: Any
    ) -> None:
        """Follow the gradients that a backward returned; take a sample."""
        there = (*place, line)
        for edge, array in zip(edges, found or (), strict=False):
            recorded = isinstance(edge, Node | Output)
            kind = "activation gradients" if recorded else "gradients"
            if edge is not None and array is not None:
                self._follow(array, kind, there, len(self._samples))
        self._sample(there)

    def phase(self, name: str, layer: str) -> None:
        """Take a sample after a phase; after backward gradients of leaves may be new arrays."""
        place = name, name, layer, ""
        for reference in list(self._leaves.values()) if name == "backward" else ():
            leaf = reference()
            if leaf is not None and leaf.grad is not None:
                self._follow(leaf.grad, "gradients", place, len(self._samples))
        self._sample(place)

    def stop(self, device: str) -> MemoryRecording:
        """Stop, and return what was recorded."""
        self._allocator.stop()
        base = sum(allocation.nbytes for allocation in self._tracked if allocation.born == _BEFORE)
        changes: list[Counter[str]] = [Counter() for _ in range(len(self._samples) + 1)]
        for allocation in self._tracked:
            changes[max(allocation.born, 0)][allocation.kind] += allocation.nbytes
            if allocation.died is not None:
                changes[max(allocation.died, 0)][allocation.kind] -= allocation.nbytes
        samples, sizes = [], Counter[str]()
        for (when, place, used, peak), change in zip(self._samples, changes, strict=False):
            sizes.update(change)
            known = sum(sizes.values())
            used, peak = max(base + used, known), max(base + peak, base + used, known)
            bytes_of = {**sizes, "other": used - known, "workspace": peak - used}
            kinds = tuple([bytes_of.get(kind, 0) for kind in KINDS])
            op, phase, layer, line = place
            samples.append(Sample(when, op, phase, layer, line, used, peak, kinds))
        return MemoryRecording(samples, self._tracked, device)

    def _sample(self, place: _Place) -> None:
        self._samples.append((time.perf_counter_ns(), place, *self._allocator.read()))

    def _follow(self, array: Any, kind: str, place: _Place, born: int) -> None:
        """Follow the buffer of an array, unless it is known already."""
        if not is_array(array) or not array.size:
            return
        tracked = self._remember(array, kind, place, born)
        if tracked is not None:
            self._tracked.append(tracked)

    def _skip(self, array: Array) -> None:
        """Remember a buffer that no op made, such as a batch: it counts as other."""
        self._remember(array, "other", _NOWHERE, _BEFORE)

    def _remember(self, array: Array, kind: str, place: _Place, born: int) -> Allocation | None:
        """Return what is to follow of the buffer of an array; None where it is known already."""
        owner = _owner(array)
        known = self._alive.get(id(owner))
        if known is not None and known[0]() is owner:
            return None
        facts = array.shape, str(array.dtype), born
        tracked = Allocation(int(owner.nbytes), kind, *place, *facts)

        def freed(_: object) -> None:
            tracked.died = len(self._samples)

        self._alive[id(owner)] = weakref.ref(owner, freed), tracked
        return tracked


def _owner(array: Array) -> Array:
    """Return the array that owns the memory of a view."""
    while is_array(base := getattr(array, "base", None)):
        array = base
    return array


def _arrays(saved: Iterable[Any], depth: int = 2) -> Iterator[Array]:
    """Yield the arrays in what an op saved, in containers and in the `arrays` of objects too."""
    for value in saved:
        if is_array(value):
            yield value
        elif depth:
            held = value if isinstance(value, tuple | list) else getattr(value, "arrays", None)
            yield from _arrays(held or (), depth - 1)


def allocator_of(device: str) -> Allocator:
    """Return the allocator of a device."""
    return Allocator() if device == "cpu" else GpuAllocator(backend.cupy.cuda)
