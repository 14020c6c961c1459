"""Steps as CUDA graphs: a step runs once, its launches are recorded, and a replay repeats them.

    step = graph.capture(train_step)
    for x, y in batches:
        loss = step(x, y)

A replay costs the host one launch, however many kernels and lines of Python the step has. It
repeats launches with the same addresses: arguments are copied into buffers, intermediate results
stay in a memory pool that the graphs of a function share, and what differs from step to step is on
the GPU (learning rate, step count, loss scale), with random numbers counted on by each replay. So
eager steps and replays give equal bits. Tests: tests/test_graph.py.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from operator import attrgetter, is_
from typing import Any

import numpy as np

from tensorgrad import random
from tensorgrad.core import backend, instrument, nodes
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_integer
from tensorgrad.core.errors import ArgumentError, GraphError
from tensorgrad.core.gradient import LeafGradient
from tensorgrad.core.modes import changes, mode, replaced
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.capturing import capturing
from tensorgrad.startup.callers import line_of, user_line
from tensorgrad.startup.interrupt import uninterrupted

__all__ = ["Captured", "capture", "on_replay"]

_log = logging.getLogger(__name__)

_CAPTURE_ERRORS = range(900, 912)  # cudaErrorStreamCapture... and those of graphs


def capture(function: Callable[..., Any], device: str = "auto", most: int = 8) -> Captured:
    """Return a function that does the same, as a CUDA graph from the third call on.

    The first call of each shape runs eagerly, which compiles kernels; the second is captured and
    launched; further ones are replays. The function may compute gradients, accumulate and clip
    them, scale the loss, draw from the default generator, take optimizer steps and call collectives
    on NCCL.

    What a replay repeats is decided at the capture. So a new graph is captured when arguments have
    other shapes, dtypes or values, when a module is in another mode or a parameter in another
    array, and in another autocast or no_grad block. The function may not read values of the GPU on
    the host, compute on the CPU, or set a learning rate. Anything else in Python (prints, counters,
    `if`) takes place at the capture alone.

    Args:
        function: takes arrays and tensors, which it gets as buffers on the GPU, and other hashable
            values; returns arrays and tensors, nested in tuples, lists and dicts, or None. What it
            uses besides must stay where it is: assign with `array[...] = value`.
        device: "cpu" calls the function as it is, as "auto" does without a GPU. "cuda" or "cuda:N"
            is the current GPU.
        most: the number of graphs to keep; calls that need further ones run eagerly.

    Returns:
        The function that replays; its results are copies, and its tensors have no autograd graph.

    Raises:
        ArgumentError: `most` is not positive.
        DeviceError: the GPU does not exist, or is not the current one.

    Example:
        >>> step = tg.graph.capture(lambda x: 2 * x)
        >>> step(tg.tensor([1.0, 2.0])).tolist()
        [2.0, 4.0]
    """
    return Captured(function, device, most)


def on_replay(key: object, call: Callable[[], None]) -> None:
    """Let each replay of the step that is being captured call a function after its launch.

    Args:
        key: any hashable value; of several functions with one key, the last is called.
        call: runs on the host. Outside a capture it is ignored.

    Example:
        >>> replays = []
        >>> def step(x):
        ...     tg.graph.on_replay("count", lambda: replays.append(1))
        ...     return 2 * x
        >>> step = tg.graph.capture(step, device="cpu")  # on a GPU each replay would append 1
        >>> step(tg.tensor([1.0, 2.0])).tolist(), replays
        ([2.0, 4.0], [])
    """
    if mode.capture is not None:
        mode.capture.calls[key] = call


class Captured:
    """A function and its CUDA graphs; see `capture`.

    Args:
        function, device, most: as for `capture`.

    Attributes:
        graphs: the number of graphs that have been captured.

    Example:
        >>> step = tg.graph.Captured(lambda x: 2 * x, device="cpu")
        >>> step(tg.tensor([1.0, 2.0])).tolist(), step.graphs
        ([2.0, 4.0], 0)
    """

    def __init__(self, function: Callable[..., Any], device: str = "auto", most: int = 8) -> None:
        check_integer("graph.capture", "most", most, 1)
        if device == "auto":
            device = "cuda" if backend.gpu_count() else "cpu"
        self._on_gpu = backend.gpu_index(device) is not None
        self._function, self._most = function, most
        self._variants: list[_Variant] = []
        self._arena: _Arena | None = None
        self._lock = threading.Lock()
        if self._on_gpu:
            self._stream = backend.cupy.cuda.Stream(non_blocking=True)  # warm-ups and captures
            self._done = backend.cupy.cuda.Event(disable_timing=True)  # the call before
        self._told = False

    @property
    def graphs(self) -> int:
        """The number of graphs that have been captured."""
        return sum(variant.graph is not None for variant in self._variants)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, or replay its graph.

        Returns:
            What the function returns, in arrays of the caller's own; tensors have no graph.
        Raises:
            GraphError: the step cannot be captured; the message names the op and the line.
            ArgumentError: an argument requires a gradient, or is not hashable.
        """
        if mode.capture is not None:  # a part of another step
            return self._function(*arguments)
        if not self._on_gpu:
            return _mapped(_detached, _checked(self._function(*arguments)))
        with self._lock:
            return self._call([_moved(i, argument) for i, argument in enumerate(arguments)])

    def _call(self, arguments: list[Any]) -> Any:
        key = _key(arguments)
        found = (variant for variant in self._variants if variant.key == key and variant.holds())
        variant = next(found, None)
        if instrument.observer is not None or (variant is None and self._is_full()):
            return _mapped(_detached, _checked(self._function(*arguments)))
        with self._in_turn():
            if variant is None:
                variant = _Variant(key, arguments)
                result = variant.warm_up(self._function, self._stream)
                self._variants.append(variant)
                return result
            variant.load(arguments)
            if variant.graph is None:
                try:
                    self._capture(variant)
                except _UnlikeWarmUp:
                    return variant.warm_up(self._function, self._stream)
            return variant.replay()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Let the GPU run the `with` block after the call before, which shares memory with it."""
        stream = backend.cupy.cuda.get_current_stream()
        stream.wait_event(self._done)
        try:
            yield
        finally:
            self._done.record(stream)

    def _capture(self, variant: _Variant) -> None:
        """Capture a variant in the memory that graphs share.

        If the step leaves arrays there, such as the gradient of a leaf, a replay of another graph
        would overwrite them. So this variant keeps the arena, and the others are captured again,
        in a new one, when they are called.
        """
        if self._arena is None:
            self._arena = _Arena()
        variant.capture(self._function, self._stream, self._arena)
        if self._arena.is_used():
            for other in self._variants:
                if other is not variant and other.arena is self._arena:
                    other.drop()
            self._arena = None

    def _is_full(self) -> bool:
        if len(self._variants) < self._most:
            return False
        if not self._told:
            self._told = True
            _log.info("graph: %d graphs are captured; other shapes run eagerly", self._most)
        return True


class _Arena:
    """The memory of graphs that never run at the same time.

    They share it for intermediate results, so what outlives a step must not lie here. A warm-up,
    which may allocate what a layer keeps, such as a table, does that elsewhere; what a capture
    leaves is found by `is_used`. The memory stays reserved as long as the arena lives, whatever
    the pool gives back.
    """

    def __init__(self) -> None:
        self._memory: list[Any] = []
        # Nothing refers to the arena, so that its memory is free as soon as nobody uses it.
        self.pool = backend.cupy.cuda.MemoryPool(partial(_allocate, self._memory))
        backend.add_pool(self)

    def used_bytes(self) -> int:
        """Return the bytes of arrays."""
        return int(self.pool.used_bytes())

    def total_bytes(self) -> int:
        """Return the bytes reserved."""
        return int(sum(block.size for block in self._memory))

    def is_used(self) -> bool:
        """Whether there are arrays; those in reference cycles are deleted first."""
        if self.used_bytes():
            gc.collect()
        return self.used_bytes() > 0

    def owns(self, array: Array) -> bool:
        """Whether an array lies in this memory."""
        address = array.data.ptr
        return any(block.ptr <= address < block.ptr + block.size for block in self._memory)


def _allocate(kept: list[Any], size: int) -> Any:
    """Return memory for a pool, and keep it; what the default pool does not use makes space."""
    cuda = backend.cupy.cuda
    try:
        memory = cuda.Memory(size)
    except cuda.runtime.CUDARuntimeError:
        backend.cupy.get_default_memory_pool().free_all_blocks()
        memory = cuda.Memory(size)
    kept.append(memory)
    return cuda.MemoryPointer(memory, 0)


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    """Run the `with` block on a stream, after what was submitted before it."""
    around = backend.cupy.cuda.get_current_stream()
    stream.wait_event(around.record())
    try:
        with stream:
            yield
    finally:
        around.wait_event(stream.record())


class _UnlikeWarmUp(BaseException):
    """A step takes another way than in its warm-up, so that its kernels may not be compiled."""


_Attributes = dict[str, tuple[list[Any], list[Any]]]  # the owners and values of a name


class _Guards:
    """The state that a replay needs as it is: attributes of tensors, modes and members of modules.

    Assignments to attributes of parameters, to modes and to members leave a note in
    `modes.changes`. So these are compared after a new note alone, and modes, which each call of
    generation sets, apart: thousands of objects are seldom in a cache of the CPU.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], Any] = {}
        self._noted: _Attributes = {}
        self._others: _Attributes = {}
        self._modules: list[weakref.ref[Any]] = []
        self._modes: list[object] = []
        self._members: list[object] = []
        self._gone: list[Any] = []  # modules, which may die before the graph does
        self._compared_modes: object = None  # `changes.modes` at the comparison
        self._compared_attributes: object = None

    def add(self, owner: Tensor, name: str, value: Any) -> None:
        """Guard an attribute."""
        if self._known.get((id(owner), name), self) is not value:
            self._known[id(owner), name] = value
            attributes = self._noted if owner.notes_changes else self._others
            owners, values = attributes.setdefault(name, ([], []))
            owners.append(owner)
            values.append(value)

    def add_module(self, module: Any) -> None:
        """Guard the mode and the members of a module, and its life."""
        self._modules.append(weakref.ref(module, self._gone.append))
        self._modes.append(_mode_of(module))
        self._members.append(_members_of(module))

    def hold(self) -> bool:
        """Whether all are as they were."""
        current, attributes = changes.modes, changes.attributes
        if self._gone or not _are_kept(self._others):
            return False
        if self._compared_modes is not current:
            if [_mode_of(module()) for module in self._modules] != self._modes:
                return False
            self._compared_modes = current
        if self._compared_attributes is not attributes:
            if [_members_of(module()) for module in self._modules] != self._members:
                return False
            if not _are_kept(self._noted):
                return False
            self._compared_attributes = attributes
        return True


def _mode_of(module: Any) -> object:
    """Return whether a module is in training mode."""
    return None if module is None else module.training  # None: it is gone


def _members_of(module: Any) -> object:
    """Return the ids of the parameters, buffers and modules of a module."""
    if module is None:
        return None
    buffers = vars(module).get("_buffers", ())
    tensors = [
        id(value)
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and (value.notes_changes or name in buffers)
    ]
    return tensors, [id(child) for child in module.children()]


def _are_kept(attributes: _Attributes) -> bool:
    return all(
        all(map(is_, map(attrgetter(name), owners), values))
        for name, (owners, values) in attributes.items()
    )


class _Watch(instrument.Observer):
    """Observes a step (core/instrument.py): which modules and leaves it uses, and which op runs.

    Args:
        before: what the warm-up of the step has observed.
        arena: of the capture; None in the warm-up.
    Attributes:
        guards: what a replay needs as it is.
        used: the leaves among the operands, by id.
        leaves: those that get a gradient, with the gradient at their first use.
        kept: arrays from outside that the step reads: they live as long as the graph.
        running: the op that began last.
    """

    def __init__(self, before: _Watch | None = None, arena: _Arena | None = None) -> None:
        self.kept: dict[int, Array] = {}
        self._arena = arena
        self.guards = _Guards()
        self.used: dict[int, Tensor] = {}
        self.leaves: dict[int, tuple[Tensor, LeafGradient | None]] = {}
        self.running = ""
        self._modules: set[int] = set()
        self._thread = threading.get_ident()  # others may run ops of their own
        self._expected = {} if before is None else before.leaves

    def layer(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Note the modes of a module and those in it, and the arrays of parameters and buffers."""
        if id(module) not in self._modules:
            for inner in module.modules():  # a fused op reads those that nobody calls
                self._note(inner)
        return module.forward(*args, **kwargs)

    def _note(self, module: Any) -> None:
        if "_copy_of" in vars(module):  # a copy that a derivative has made for this call
            module = vars(module)["_copy_of"]()
        if module is not None and id(module) not in self._modules:
            self._modules.add(id(module))
            self.guards.add_module(module)
            for value in vars(module).values():
                if isinstance(value, Tensor):
                    self.guards.add(value, "data", value.data)

    def enter(self, op: str) -> None:
        """Note the op that begins."""
        self.running = op

    def op(self, name: str, output: Any, inputs: Any, node: Any, saved: tuple[Any, ...]) -> None:
        """Note the leaves among the inputs; raise GraphError where the op ran on the CPU."""
        if threading.get_ident() != self._thread:
            return
        if backend.is_numpy(output):
            raise GraphError(
                f"graph.capture: {name} at {user_line()} computes on the CPU, expected arrays on "
                "the GPU, or capture(..., device='cpu')"
            )
        for operand in inputs:
            if isinstance(operand, Tensor) and operand.requires_grad and operand.node is None:
                self.used[id(operand)] = operand
                if node is not None:
                    self._leaf(operand)
        if self._arena is not None:
            arrays = [getattr(operand, "data", None) for operand in inputs]
            for array in (*arrays, *saved):
                on_gpu = backend.is_array(array) and not backend.is_numpy(array)
                if on_gpu and not self._arena.owns(array):
                    self.kept[id(array)] = array

    def _leaf(self, tensor: Tensor) -> None:
        """Note a leaf; raise where its gradient is new, and was added to before, or vice versa."""
        if id(tensor) in self.leaves:
            return
        self.leaves[id(tensor)] = tensor, tensor.gradient
        _, gradient = self._expected.get(id(tensor), (tensor, tensor.gradient))
        if (gradient is None) != (tensor.gradient is None):
            raise _UnlikeWarmUp

    def backward(self, node: Any, dy: Any, saved: tuple[Any, ...], needs: Any) -> Any:
        """Note the op whose gradient is computed."""
        self.running = f"backward of {node.name}"
        return node.backward(dy, saved, needs)

    def transfer(self, call: str, nbytes: int) -> Callable[[], None]:
        """Note the collective."""
        self.running = call
        return lambda: None


class _CaptureNotes:
    """The notes of the library while a step is captured (`modes.mode.capture`).

    Attributes:
        assigned: arrays of tensors that the step assigns to.
        calls: what replays call, by key.
    """

    def __init__(self) -> None:
        self.assigned: list[Array] = []
        self.calls: dict[object, Callable[[], None]] = {}
        self._gradients: dict[LeafGradient, None] = {}  # that count as zeros until they are written

    def overwrite(self, gradients: Iterable[LeafGradient]) -> None:
        """Let gradients count as zeros without writing them, until the first is added or `settle`.

        What is added first overwrites, which saves writing zeros and reading them.
        """
        for gradient in gradients:
            gradient.beta = 0
            self._gradients[gradient] = None

    def settle(self) -> None:
        """Write the zeros of gradients that nothing was added to."""
        for gradient in self._gradients:
            gradient.settle()

    def end(self) -> None:
        """Take gradients as they are again: the step is captured, or has failed."""
        for gradient in self._gradients:
            gradient.beta, gradient.loan, gradient.waiting = 1, None, None
        self._gradients = {}


class _Variant:
    """A graph, and what must hold for it.

    Args:
        key: of the arguments and the state of the library; see `_key`.
        arguments: on the GPU.
    Attributes:
        graph: None before it is captured.
        arena: of the graph.
    """

    def __init__(self, key: Any, arguments: list[Any]) -> None:
        self.key = key
        self.graph: Any = None
        self.arena: _Arena | None = None
        self._arguments = [_mapped(_copy, argument) for argument in arguments]
        self._offset: Array = backend.cupy.zeros(1, np.uint64)  # see Generator.offset
        self._watch = _Watch()
        self._notes = _CaptureNotes()
        self._draw = self._drawn = 0  # the generator's first draw, and how many
        self._seeded: tuple[int, int] | None = None  # seed and stream of what it draws, if it does
        self._result: Any = None
        self._gradients: list[tuple[Tensor, LeafGradient | None]] = []  # that the step replaces

    def holds(self) -> bool:
        """Whether a replay would do what the function does now."""
        if self._seeded not in (None, _seeded(random.get_state())):
            return False
        return self._watch.guards.hold()

    def load(self, arguments: list[Any]) -> None:
        """Copy arguments into the buffers."""
        for buffer, value in zip(self._arguments, arguments, strict=True):
            if isinstance(buffer, Tensor):
                buffer.data[...] = value.data
            elif backend.is_array(buffer):
                buffer[...] = value

    def drop(self) -> None:
        """Forget the graph: the next call captures it again."""
        self.graph = self.arena = self._result = None

    def warm_up(self, function: Callable[..., Any], stream: Any) -> Any:
        """Call the function eagerly, on the stream of the capture."""
        watch = _Watch()
        with _on_stream(stream), replaced(instrument, observer=watch), _casts_of_its_own():
            result = _mapped(_copy, _checked(function(*self._arguments)))
        for tensor in watch.used.values():
            watch.guards.add(tensor, "data", tensor.data)
        self._watch = watch
        return result

    def capture(self, function: Callable[..., Any], stream: Any, arena: _Arena) -> None:
        """Record the launches of a call; nothing runs on the GPU.

        Raises:
            GraphError: a line of the function cannot be captured.
        """
        cuda, notes, before = backend.cupy.cuda, _CaptureNotes(), random.get_state()
        watch = _Watch(self._watch, arena)
        gradients = {key: tensor.gradient for key, (tensor, _) in self._watch.leaves.items()}
        elsewhere = cuda.get_allocator()  # for the results
        backend.cupy.get_default_memory_pool().free_all_blocks()  # the warm-up's, mostly
        try:
            with (
                _on_stream(stream),
                cuda.using_allocator(arena.pool.malloc),
                _captured(stream, watch) as graphs,
                capturing(),
                replaced(instrument, observer=watch),
                replaced(mode, capture=notes),
                replaced(random.default, offset=self._offset),
                _casts_of_its_own(),
            ):
                result = _checked(function(*self._arguments))
                for leaf, _ in watch.leaves.values():
                    if leaf.gradient is not None and type(leaf.gradient) is not LeafGradient:
                        leaf.gradient.plain()  # a replay repeats no history
                notes.settle()
                with cuda.using_allocator(elsewhere):
                    self._result = _mapped(_copy, result)
            after = random.get_state()
        except BaseException:
            for key, (tensor, gradient) in watch.leaves.items():
                tensor.gradient = gradients.get(key, gradient)
                if tensor.gradient is not None:
                    tensor.gradient.waiting = None  # for kernels that never run
            raise
        finally:
            notes.end()
            random.set_state(before)  # the replay that follows counts the draws
        if {**after, "draw": 0} != {**before, "draw": 0}:
            raise GraphError(
                "graph.capture: the step seeds the default generator, expected that before the call"
            )
        self._draw, self._drawn = before["draw"], (after["draw"] - before["draw"]) % 2**64
        self._seeded = _seeded(before) if self._drawn else None
        self._watch, self._notes = watch, notes
        self._guard_leaves(gradients)
        (self.graph,), self.arena = graphs, arena

    def replay(self) -> Any:
        """Launch the graph on the current stream; return copies of its results."""
        state = random.get_state()
        with uninterrupted():
            if self._drawn:
                self._offset.fill(np.uint64((state["draw"] - self._draw) % 2**64))
                random.set_state({**state, "draw": (state["draw"] + self._drawn) % 2**64})
            self.graph.launch(backend.cupy.cuda.get_current_stream())
            for call in self._notes.calls.values():
                call()
            for tensor, gradient in self._gradients:
                tensor.gradient = gradient
            for tensor, _ in self._watch.leaves.values():
                if tensor.gradient is not None:
                    tensor.gradient.is_touched = True
            for array in self._notes.assigned:
                nodes.mark_assigned(array)
        return _mapped(_copy, self._result)

    def _guard_leaves(self, gradients: Mapping[int, LeafGradient | None]) -> None:
        """Guard the arrays of leaves, and the gradients that the step adds to.

        Args:
            gradients: of the leaves when the capture began.
        """
        guards = self._watch.guards
        for tensor in self._watch.used.values():
            guards.add(tensor, "data", tensor.data)
        for key, (tensor, used) in self._watch.leaves.items():
            if tensor.gradient is not used:
                self._gradients.append((tensor, tensor.gradient))
            if gradients.get(key) is used:  # otherwise the step itself clears it
                guards.add(tensor, "grad", None if used is None else used.array)


@contextmanager
def _captured(stream: Any, watch: _Watch) -> Iterator[list[Any]]:
    """Capture what the `with` block launches; the list it yields gets the graph.

    Raises:
        GraphError: the block does what cannot be captured.
    """
    graphs: list[Any] = []
    stream.begin_capture()
    try:
        yield graphs
        graphs.append(stream.end_capture())
    except BaseException as error:
        if stream.is_capturing():
            with suppress(Exception):  # the capture is invalid; this ends it
                stream.end_capture()
        if _is_of_capture(error):
            line, called = line_of(error)
            where = f" at {line}" if line else ""
            raise GraphError(
                f"graph.capture: {called or watch.running or 'the step'}{where} cannot be captured "
                f"into a CUDA graph: {_reason(error)}"
            ) from error
        raise


def _is_of_capture(error: BaseException) -> bool:
    said = str(error)  # CuPy checks some of it before CUDA does
    return (
        getattr(error, "status", 0) in _CAPTURE_ERRORS
        or "stream capture" in said
        or "stream is capturing" in said
    )


def _reason(error: BaseException) -> str:
    if "cuBLAS" in str(error):
        return "it calls cuBLAS through CuPy, expected an op of this library"
    return (
        "it copies between host and GPU, or the host waits for the GPU; expected arrays that are "
        "on the GPU, and values that are read after the call"
    )


@contextmanager
def _casts_of_its_own() -> Iterator[None]:
    """Inside `autocast`, cast again: a replay must cast what parameters hold by then."""
    casts = mode.autocast
    with nullcontext() if casts is None else replaced(mode, autocast=casts.again()):
        yield


def _key(arguments: list[Any]) -> tuple[Any, ...]:
    """Return what decides, besides what `_Variant.holds` compares, what a replay does."""
    found: list[Any] = []
    for argument in arguments:
        array = argument.data if isinstance(argument, Tensor) else argument
        is_array = backend.is_array(array)
        found.append(
            (type(argument), array.shape, array.dtype) if is_array else (type(argument), argument)
        )
    casts = mode.autocast
    precision = None if casts is None else (casts.precision, id(casts.scales))
    return (*found, mode.grad_enabled, precision)


def _seeded(state: Mapping[str, int]) -> tuple[int, int]:
    """Return what decides, besides the number of a draw, what a generator draws."""
    return state["seed"], state["stream"]


def _moved(number: int, value: Any) -> Any:
    """Return an argument, on the GPU if it is an array or a tensor.

    Raises:
        ArgumentError: it requires a gradient, or is not hashable.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ArgumentError(
                f"graph.capture: argument {number} requires a gradient, expected a leaf that the "
                "function has from elsewhere, or detach()"
            )
        return Tensor(backend.cupy.asarray(value.data))
    if backend.is_array(value):
        return backend.cupy.asarray(value)
    try:
        hash(value)
    except TypeError as error:
        raise ArgumentError(
            f"graph.capture: argument {number} is a {type(value).__name__}, expected an array, a "
            "tensor or a hashable value"
        ) from error
    return value


def _checked(result: Any) -> Any:
    """Return the result; raise GraphError where a replay could not repeat a part of it."""
    if isinstance(result, tuple | list):
        for item in result:
            _checked(item)
    elif isinstance(result, dict):
        _checked(list(result.values()))
    elif result is not None and not isinstance(result, Tensor) and not backend.is_array(result):
        raise GraphError(
            f"graph.capture: the function returned a {type(result).__name__}, expected arrays and "
            "tensors: a replay does not run Python"
        )
    return result


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Return nested values with a function applied to each array and tensor."""
    if isinstance(values, dict):
        return {name: _mapped(function, value) for name, value in values.items()}
    if isinstance(values, tuple | list):
        found = [_mapped(function, value) for value in values]
        named = hasattr(values, "_fields")
        return type(values)(*found) if named else type(values)(found)
    return function(values) if isinstance(values, Tensor) or backend.is_array(values) else values


def _detached(value: Any) -> Any:
    return Tensor(value.data) if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    return Tensor(value.data.copy()) if isinstance(value, Tensor) else value.copy()
