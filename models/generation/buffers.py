"""The memory of a batch that generates, and its CUDA graphs, kept from call to call.

A graph has the addresses of what it works on. So a model keeps the cache, the sequences and the
graph of its latest batches, and the next batch of the same shapes and options begins in the same
memory: capturing takes tens of milliseconds, as long as many steps.
"""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from typing import Any

from tensorgrad import backend, graph
from tensorgrad.engine import mode
from tensorgrad.errors import GraphError
from tensorgrad.models.language_model import Cache, LanguageModel
from tensorgrad.ops.sampling import Sampling, State, extend
from tensorgrad.tensor import Tensor

__all__ = ["BatchBuffers", "give_back", "take"]

_MOST_KEPT = 4  # by one model
_log = logging.getLogger(__name__)
_kept: dict[int, list[BatchBuffers]] = {}  # by the id of a model, the latest first
_lock = threading.Lock()


class _Replayed:
    """A function that is a CUDA graph or, where that is impossible, runs eagerly.

    Args:
        what: the function does, for the log.
        function: see `graph.capture`; returns nothing.
        device: of its arrays.
        captures: whether to try.
    """

    def __init__(self, what: str, function: Any, device: str, captures: bool) -> None:
        self._what, self._function = what, function
        self.captured = graph.capture(function, device) if captures else None

    def __call__(self, *arguments: Any) -> None:
        if self.captured is not None:
            try:
                self.captured(*arguments)
                return
            except (GraphError, MemoryError) as error:
                _log.info("generation: %s are not captured: %s", self._what, error)
            self.captured = None
        self._function(*arguments)


class BatchBuffers:
    """The cache and the sequences of a batch, and what works on them.

    Both functions run under `evaluating` and `no_grad`: `step()` appends a token to each sequence,
    `read(tokens)` fills the cache with the keys and values of tokens (B, T).

    Args:
        model: it is not kept alive.
        state: of the first batch, on the model's device; taken over.
        steps: capacity of the cache.
        how: the sampling options.
    """

    def __init__(self, model: LanguageModel, state: State, steps: int, how: Sampling) -> None:
        self.state = state
        self.cache: Cache = model.new_cache(len(state.latest), steps)
        for cache in self.cache:
            if cache is not None:  # other ranks have this layer
                cache.lengths = state.lengths
        self.key = _key(state, steps, how)
        weak, self._settings = _parts(model)
        self._references = [weakref.ref(each) for each in weak]
        self._released: Any = None
        captures = model.captures and model.device != "cpu"
        own = weakref.ref(model)
        self.step = _Replayed("steps", _step(own, self.cache, state, how), model.device, captures)
        self.read = _Replayed("prompts", _read(own, self.cache), model.device, captures)

    @property
    def is_captured(self) -> bool:
        """Whether steps are a CUDA graph, or will be."""
        return self.step.captured is not None

    def fits(self, model: LanguageModel) -> bool:
        """Whether the model's modules, settings and arrays are still those of the graph."""
        weak, settings = _parts(model)
        return (
            len(weak) == len(self._references)
            and len(settings) == len(self._settings)
            and all(map(operator.is_, map(operator.call, self._references), weak))
            and all(map(operator.is_, self._settings, settings))
        )

    def load(self, state: State) -> None:
        """Begin other sequences, after what was submitted when the buffers were given back."""
        if self._released is not None:
            backend.cupy.cuda.get_current_stream().wait_event(self._released)
        self.state.load(state)

    def release(self) -> None:
        """Note what was submitted, which may be on another stream than the next batch."""
        self._released = backend.cupy.cuda.get_current_stream().record()


def take(model: LanguageModel, state: State, steps: int, how: Sampling) -> BatchBuffers:
    """Return buffers that nobody else uses, in which the sequences of `state` begin.

    Those of a model that has changed are dropped.

    Args:
        model, steps, how: as of BatchBuffers.
        state: on any device.
    """
    key = _key(state, steps, how)
    with _lock:
        kept = _kept.get(id(model), [])
        kept[:] = [each for each in kept if each.fits(model)]
        found = next((each for each in kept if each.key == key), None)
        if found is not None:
            kept.remove(found)
    if found is not None:
        found.load(state)
        return found
    try:
        return BatchBuffers(model, state.on(model.device), steps, how)
    except MemoryError:  # which others may keep for nothing
        with _lock:
            for kept in _kept.values():
                kept.clear()
    return BatchBuffers(model, state.on(model.device), steps, how)


def give_back(model: LanguageModel, buffers: BatchBuffers) -> None:
    """Keep buffers that have a graph for the next batch of the model, as long as it lives."""
    if not buffers.is_captured:
        return
    buffers.release()
    with _lock:
        if id(model) not in _kept:
            _kept[id(model)] = []
            weakref.finalize(model, _kept.pop, id(model), None)
        kept = _kept[id(model)]
        kept.insert(0, buffers)
        del kept[_MOST_KEPT:]


def _step(model: weakref.ref[LanguageModel], cache: Cache, state: State, how: Sampling) -> Any:
    """Return the function that appends a token to each sequence."""

    def step() -> None:
        alive = model()
        assert alive is not None  # who generates has it
        logits = alive.next_logits(Tensor(state.latest[:, None]), cache).data
        logits = logits.astype("float32", copy=False)
        if logits.strides[-1] != logits.itemsize:
            logits = backend.contiguous(logits)
        extend(state, logits, how)

    return step


def _read(model: weakref.ref[LanguageModel], cache: Cache) -> Any:
    """Return the function that fills the cache."""

    def read(tokens: Any) -> None:
        alive = model()
        assert alive is not None  # who generates has it
        parts: Any = [None if each is None else each.part(slice(None)) for each in cache]
        alive.next_logits(Tensor(tokens), parts)

    return read


def _key(state: State, steps: int, how: Sampling) -> tuple[Any, ...]:
    """Return what must be equal for a batch to begin in the memory of another one."""
    shapes = (state.tokens.shape, state.stops.shape, state.seen is None)
    casts = None if mode.autocast is None else mode.autocast.precision
    return (*shapes, steps, how, casts)


def _parts(model: LanguageModel) -> tuple[list[Any], list[Any]]:
    """Return the attributes of all modules and the arrays of their tensors, in order.

    First those that weak references can refer to, then the others, such as numbers. This takes 1 us
    a module; it runs in each call.
    """
    weak: list[Any] = []
    others: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            if name == "training":
                continue
            (weak if type(value).__weakrefoffset__ else others).append(value)
            if isinstance(value, Tensor):
                weak.append(value.data)
    return weak, others
