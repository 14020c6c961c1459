"""The profiler: records phases, layers, ops and kernels, and memory, inside a `with` block.

    with Profiler(model, optimizer) as profiler:
        for _ in range(3):
            with profiler.step():
                optimizer.zero_grad()
                model(x, y).backward()
                optimizer.step()
    print(to_markdown(op_table(profiler.recording)))

It never waits for a GPU before the end of the block. Tests: tests/profile/test_profiler.py.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Self

from tensorgrad.core import backend, instrument
from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.gradient import unwrapped
from tensorgrad.kernels import gpu
from tensorgrad.nn import Module
from tensorgrad.ops.work import (
    backward_bytes,
    backward_flops,
    forward_bytes,
    forward_flops,
    nbytes,
    product_dtype,
)
from tensorgrad.optim import Optimizer
from tensorgrad.profile import memory as memory_module
from tensorgrad.profile.memory import MemoryRecording, MemoryTracker
from tensorgrad.profile.nvtx import nvtx_functions
from tensorgrad.profile.recording import CONTAINERS, Kind, Range, Recording, Transfer
from tensorgrad.profile.sources import TimeSource, choose
from tensorgrad.startup.callers import user_line

_HOLDS_PHASES = ("", "step")  # a layer outside any other phase is forward


class _Open:
    """A range that has not ended. An op is pending until it is recorded, which may never happen."""

    __slots__ = ("kind", "name", "number", "pending", "start")

    def __init__(self, number: int, kind: Kind, name: str, start: int, pending: bool) -> None:
        self.number, self.kind, self.name, self.start = number, kind, name, start
        self.pending = pending


_Facts = tuple[tuple[Any, ...], Any, float, int]  # shapes, dtype, FLOPs, bytes
_Ended = tuple[_Open, int, int, tuple[int, str, str], _Facts]  # parent, end; thread, phase, layer
_NO_FACTS: _Facts = (), None, 0.0, 0


class _Thread(threading.local):
    """The open ranges of a thread."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.number = next(numbers)
        self.stack: list[_Open] = []
        self.last = -1  # the number of the range that ended last
        self.phase = ""
        self.layer = ""


class Profiler:
    """Records what runs in its `with` block.

    Args:
        model: gives layers their names, and memory its parameters; default: a layer that is called
            outside of others is named by its class.
        optimizer: gives memory its gradients and optimizer state.
        memory: record memory instead of times: following arrays takes time.
        nvtx: also show every range as an NVTX range, for Nsight Systems.
        source: the measurement of a GPU: "cupti" (each kernel), "events" (CUDA events around each
            op) or "host" (nothing); default: "cupti" where cupti-python is installed, else
            "events"; "host" without a GPU.
        rank: the rank of this process, for traces of several.

    Attributes:
        recording: the ranges and kernels, after the block.
        memory: the memory, after the block; None unless asked for.

    Raises:
        ArgumentError: the source is unknown; in `with`, another profiler is active; or nvtx, but
            neither CuPy nor the package nvtx is installed.
        DeviceError: the source is not available here.

    Example:
        >>> from tensorgrad.profile import Profiler
        >>> model = tg.nn.Linear(2, 3)
        >>> with Profiler(model) as profiler:
        ...     y = model(tg.ones((4, 2)))
        >>> [(span.kind, span.name, span.flops) for span in profiler.recording.ranges]
        [('op', 'linear', 48.0), ('layer', 'Linear', 0.0), ('phase', 'forward', 0.0)]
    """

    recording: Recording

    def __init__(
        self,
        model: Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        memory: bool = False,
        nvtx: bool = False,
        source: str | None = None,
        rank: int = 0,
    ) -> None:
        if source not in (None, "host", "cupti", "events"):
            raise ArgumentError(
                f"Profiler: source is {source!r}, expected 'cupti', 'events', 'host' or None"
            )
        self.memory: MemoryRecording | None = None
        self._model, self._optimizer, self._rank = model, optimizer, rank
        self._device = _device_of(model)
        if memory or (source is None and self._device == "cpu"):
            source = "host"
        self._source: TimeSource = choose(source)
        self._tracker = MemoryTracker(memory_module.allocator_of(self._device)) if memory else None
        self._nvtx = nvtx_functions() if nvtx else None
        self._numbers = itertools.count()
        self._threads = itertools.count()
        self._thread = _Thread(self._threads)
        self._unrecorded: dict[int, int] = {}  # the range around a pending op
        self._more_bytes: dict[int, int] = {}  # bytes of further outputs, by the number of the op
        self._ended: list[_Ended] = []
        self._transfers: list[Transfer] = []
        self._names: dict[int, tuple[str, Module]] = {}
        self._recorded: dict[int, tuple[str, float, str]] = {}  # layer, FLOPs, line by node
        if model is not None:
            self._name(model)

    def __enter__(self) -> Self:
        if instrument.observer is not None:
            raise ArgumentError("Profiler: another one is active, expected one at a time")
        self._source.start()
        if self._tracker is not None:
            self._tracker.start(self._model, self._optimizer)
        self._epoch, self._began = time.time_ns(), time.perf_counter_ns()
        instrument.observer = self
        return self

    def __exit__(self, *_: object) -> None:
        instrument.observer = None
        if self._thread.stack:  # ops that began and were not recorded
            self._pop(self._thread, self._thread.stack[0], keep=False)
        kernels = self._source.stop()
        window = self._began, time.perf_counter_ns()
        device = _device_name(self._device)
        if self._tracker is not None:
            self.memory = self._tracker.stop(device)
        found = list(map(self._range, self._ended))
        names = {span.number: span.name for span in found}
        linked = [replace(kernel, range=self._kept(kernel.range)) for kernel in kernels]
        named = [
            kernel if kernel.name else replace(kernel, name=names[kernel.range])
            for kernel in linked
        ]
        self.recording = Recording(
            *(found, window, named, self._transfers, self._epoch, self._rank, device),
            self._source.name,
        )

    def step(self) -> AbstractContextManager[None]:
        """Return a context for one step: tables show times a step."""
        return self.phase("step")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context for a phase."""
        thread = self._thread
        before, thread.phase = thread.phase, name
        opened = self._begin(thread, "phase", name, holds=name in CONTAINERS)
        try:
            yield
        finally:
            thread.phase = before
            self._end(thread, opened)
            if self._tracker is not None and name != "step":
                self._tracker.phase(name, thread.layer)

    def layer(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return `module.forward(*args, **kwargs)`."""
        thread = self._thread
        if thread.phase in _HOLDS_PHASES:
            with self.phase("forward"):
                return self.layer(module, args, kwargs)
        before = thread.layer
        thread.layer = self._name_of(module, before)
        opened = self._begin(thread, "layer", thread.layer, holds=True)
        try:
            return module.forward(*args, **kwargs)
        finally:
            self._end(thread, opened)
            thread.layer = before

    def enter(self, op: str) -> None:
        """Note that an op begins."""
        thread = self._thread
        found = _pending(thread.stack, op)
        if found is not None:
            if found is thread.stack[-1]:
                return
            self._pop(thread, found, keep=False)  # it failed, or is not recorded
        self._begin(thread, "op", op, pending=True)

    def op(
        self, name: str, output: Any, inputs: Sequence[Any], node: Any, saved: tuple[Any, ...]
    ) -> None:
        """Note that an op has computed its output."""
        thread = self._thread
        opened = _pending(thread.stack, name)
        if opened is None:  # none of its operands was checked
            opened = self._begin(thread, "op", name)
        opened.name = name
        self._unrecorded.pop(opened.number, None)
        end = time.perf_counter_ns()
        shapes = tuple([() if operand is None else _shape(operand) for operand in inputs])
        flops = forward_flops(name, inputs, output, saved)
        dtype = product_dtype(output, inputs, saved) if flops else output.dtype
        facts = shapes, dtype, flops, forward_bytes(name, output, inputs)
        line = "" if self._tracker is None else user_line()
        if node is not None:
            self._recorded[id(node)] = thread.layer, flops, line
        self._end(thread, opened, end, facts)
        if self._tracker is not None:
            self._tracker.op((name, thread.phase, thread.layer), line, output, inputs, saved)

    def further_outputs(self, outputs: Sequence[Any]) -> None:
        """Note the other outputs of the op that this thread noted last."""
        self._more_bytes[self._thread.last] = nbytes(outputs)
        if self._tracker is not None:
            self._tracker.further_outputs(outputs)

    def backward(self, node: Any, dy: Any, saved: tuple[Any, ...], needs: Sequence[Any]) -> Any:
        """Return `node.backward(dy, saved, needs)`."""
        thread = self._thread
        layer, flops, line = self._recorded.pop(id(node), ("", 0.0, ""))
        before, thread.layer = thread.layer, layer
        opened = self._begin(thread, "backward", node.name)
        end, facts, arrays = 0, _NO_FACTS, None
        try:
            found = node.backward(dy, saved, needs)
            end = time.perf_counter_ns()
            dy, arrays = unwrapped(dy), [unwrapped(dx) for dx in found]
            several = isinstance(dy, list)
            first = next(gradient for gradient in dy if gradient is not None) if several else dy
            moved = backward_bytes(node.name, dy if several else (dy,), saved, arrays)
            flops = backward_flops(node.name, flops, needs)
            dtype = product_dtype(first, (), saved) if flops else first.dtype
            facts = (first.shape,), dtype, flops, moved
            return found
        finally:
            self._end(thread, opened, end, facts)
            if self._tracker is not None:
                place = f"{node.name} backward", thread.phase, layer
                self._tracker.backward(place, line, node.edges, arrays)
            thread.layer = before

    def transfer(self, call: str, nbytes: int) -> Callable[[], None]:
        """Note that a collective begins; return what to call once it is done."""
        start = time.perf_counter_ns()

        def done() -> None:
            self._transfers.append(Transfer(call, start, time.perf_counter_ns(), nbytes))

        return done

    def _begin(
        self, thread: _Thread, kind: Kind, name: str, holds: bool = False, pending: bool = False
    ) -> _Open:
        number = next(self._numbers)
        if self._nvtx is not None:
            self._nvtx.push(f"{name} backward" if kind == "backward" else name)
        if pending:
            self._unrecorded[number] = thread.stack[-1].number if thread.stack else -1
        opened = _Open(number, kind, name, time.perf_counter_ns(), pending)
        thread.stack.append(opened)
        self._source.begin(number, holds)
        return opened

    def _end(self, thread: _Thread, opened: _Open, end: int = 0, facts: _Facts = _NO_FACTS) -> None:
        """End a range, at a time or now, and add it to the recording."""
        self._pop(thread, opened)
        parent = thread.stack[-1].number if thread.stack else -1
        thread.last = opened.number
        place = thread.number, thread.phase, thread.layer
        self._ended.append((opened, parent, end or time.perf_counter_ns(), place, facts))

    def _range(self, ended: _Ended) -> Range:
        """Return a range as part of the recording."""
        opened, parent, end, place, (shapes, dtype, flops, moved) = ended
        return Range(
            *(opened.number, self._kept(parent), opened.kind, opened.name, opened.start, end),
            *(*place, shapes, str(dtype or ""), flops),
            moved + self._more_bytes.get(opened.number, 0),
        )

    def _pop(self, thread: _Thread, opened: _Open, keep: bool = True) -> None:
        """Remove a range from the stack, and those above it, which were never recorded."""
        while True:
            last = thread.stack.pop()
            kept = keep and last is opened
            self._source.end(last.number, kept)
            if self._nvtx is not None:
                self._nvtx.pop()
            if last is opened:
                break

    def _kept(self, number: int) -> int:
        """Return the number of the innermost recorded range around a place."""
        while number in self._unrecorded:
            number = self._unrecorded[number]
        return number

    def _name_of(self, module: Module, around: str) -> str:
        known = self._names.get(id(module))
        if known is None:
            if around:
                self._name(module, f"{around}.{type(module).__name__}")
            else:
                self._name(module)
            known = self._names[id(module)]
        return known[0]

    def _name(self, root: Module, prefix: str = "") -> None:
        """Name a module and those inside it, which the table keeps alive for their ids."""
        for path, module in root.named_modules(prefix):
            self._names.setdefault(id(module), (path or type(root).__name__, module))


def _shape(tensor: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = getattr(tensor.data, "shape", ())  # a Python number has none
    return found


def _pending(stack: list[_Open], name: str) -> _Open | None:
    """Return the pending op of a name that holds nothing but pending ops."""
    for opened in reversed(stack):
        if not opened.pending:
            return None
        if opened.name == name:
            return opened
    return None


def _device_of(model: Module | None) -> str:
    """Return the device of a model, else the GPU where there is one."""
    parameter = None if model is None else next(model.parameters(), None)
    if parameter is not None:
        return parameter.device
    return "cuda" if backend.gpu_count() else "cpu"


def _device_name(device: str) -> str:
    """Return "cpu", or the name of the GPU."""
    return device if device == "cpu" else gpu.name_of(backend.cupy.cuda.Device().id)
