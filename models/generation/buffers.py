"""The memory of a batch that generates, and its CUDA graphs, kept from call to call.

A graph has the addresses of what it works on. So a model keeps the cache, the sequences and the
graph of its latest batches, and the next batch of the same shapes and options begins in the same
memory: capturing takes tens of milliseconds, as long as many steps.
"""

from __future__ import annotations

import logging
import threading
import weakref
from itertools import chain, compress
from operator import attrgetter, call
from typing import Any

from tensorgrad import graph
from tensorgrad.core import backend
from tensorgrad.core.errors import GraphError
from tensorgrad.core.modes import mode
from tensorgrad.core.tensor import Tensor
from tensorgrad.models.language_model import Cache, LanguageModel
from tensorgrad.ops.sampling import Sampling, State, extend

__all__ = ["BatchBuffers", "give_back", "take"]

_MOST_KEPT = 4  # by one model
_MODE = "training"  # the attribute that `evaluating` sets
_log = logging.getLogger(__name__)
_kept: dict[int, list[BatchBuffers]] = {}  # by the id of a model, the latest first
_lock = threading.Lock()


class _Replayed:
    """A function that is a CUDA graph or, where that is impossible, runs eagerly.

    Args:
        what: the function does, for the log.
        function: see `graph.capture`; returns nothing.
        device: the device of its arrays.
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


class _Parts:
    """The modules, attributes and arrays of a model, by references that keep none alive.

    Args:
        model: that graphs are made for.
    """

    def __init__(self, model: LanguageModel) -> None:
        modules = list(model.modules())
        attributes = [attribute for module in modules for attribute in vars(module).items()]
        values = [value for name, value in attributes if name != _MODE]
        tensors = [value for value in values if isinstance(value, Tensor)]
        arrays = [tensor.data for tensor in tensors]
        self._gone: list[Any] = []
        self._names = [name for name, _ in attributes]
        self._compared = [name != _MODE for name in self._names]
        self._modules = [weakref.ref(module) for module in modules]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._values, self._arrays = list(map(id, values)), list(map(id, arrays))
        self._references = [_reference(value, self._gone) for value in (*values, *arrays)]

    def hold(self) -> bool:
        """Whether the model has the same ones still.

        Each call of generation asks this of thousands, so the loops over them run in C.
        """
        if self._gone:  # it was replaced; and its id may be another's
            return False
        attributes = list(map(vars, map(call, self._modules)))
        if not self._have_names(list(chain.from_iterable(attributes))):
            return False
        values = compress(chain.from_iterable(map(dict.values, attributes)), self._compared)
        arrays = map(attrgetter("data"), map(call, self._tensors))
        return list(map(id, values)) == self._values and list(map(id, arrays)) == self._arrays

    def _have_names(self, names: list[str]) -> bool:
        """Whether the attributes have their names still; the first call may add the mode."""
        if names == self._names:
            return True
        compared = [name != _MODE for name in names]
        if list(compress(names, compared)) != list(compress(self._names, self._compared)):
            return False
        self._names, self._compared = names, compared
        return True


class BatchBuffers:
    """The cache and the sequences of a batch, and the functions that work on them.

    Both functions run under `evaluating`: `step()` appends a token to each sequence,
    `read(count)` fills the cache with the keys and values of the first `count` tokens of each.

    Args:
        model: the language model, which the buffers do not keep alive.
        state: the sequences of the first batch, on the model's device; taken over.
        steps: the capacity of the cache in tokens.
        how: the sampling options.
        parts: the parts of the model from other buffers, shared if the model still has them.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config
        >>> from tensorgrad.models.generation.buffers import BatchBuffers
        >>> from tensorgrad.ops.sampling import Sampling, new_state
        >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> state = new_state([[1]], 7, seeds=[0], stops=[], vocabulary=None, device="cpu")
        >>> buffers = BatchBuffers(model, state, 8, Sampling(), None)
        >>> with tg.nn.evaluating(model):
        ...     buffers.step()
        >>> state.counts.tolist()
        [2]
    """

    def __init__(
        self, model: LanguageModel, state: State, steps: int, how: Sampling, parts: _Parts | None
    ) -> None:
        self.state = state
        self.cache: Cache = model.new_cache(len(state.latest), steps)
        for cache in self.cache:
            if cache is not None:  # other ranks have this layer
                cache.lengths = state.lengths
        if parts is None or not parts.hold():  # say, as the cache has rotations
            parts = _Parts(model)
        self.parts = parts
        self.key = _key(state, steps, how)
        self._released: Any = None
        captures = model.captures and not model.is_shared and model.device != "cpu"
        own = weakref.ref(model)
        self.step = _Replayed("steps", _step(own, self.cache, state, how), model.device, captures)
        self.read = _Replayed("prompts", _read(own, self.cache, state), model.device, captures)

    @property
    def is_captured(self) -> bool:
        """Whether steps are a CUDA graph, or will be."""
        return self.step.captured is not None

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

    Buffers of a model that has changed are dropped.

    Args:
        model: as for `BatchBuffers`.
        state: the sequences, on any device.
        steps, how: as for `BatchBuffers`.

    Returns:
        Buffers given back before, where their shapes and options are the same, or new ones.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config
        >>> from tensorgrad.models.generation.buffers import take
        >>> from tensorgrad.ops.sampling import Sampling, new_state
        >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> state = new_state([[1, 2]], 6, seeds=[0], stops=[], vocabulary=None, device="cpu")
        >>> buffers = take(model, state, 8, Sampling())
        >>> len(buffers.cache), buffers.is_captured
        (1, False)
    """
    key = _key(state, steps, how)
    with _lock:
        kept = _kept.get(id(model), [])
        current = [parts for parts in {entry.parts for entry in kept} if parts.hold()]
        kept[:] = [entry for entry in kept if entry.parts in current]
        found = next((entry for entry in kept if entry.key == key), None)
        if found is not None:
            kept.remove(found)
    if found is not None:
        found.load(state)
        return found
    parts = current[0] if current else None
    try:
        return BatchBuffers(model, state.on(model.device), steps, how, parts)
    except MemoryError:  # which others may keep for nothing
        with _lock:
            for kept in _kept.values():
                kept.clear()
    return BatchBuffers(model, state.on(model.device), steps, how, parts)


def give_back(model: LanguageModel, buffers: BatchBuffers) -> None:
    """Keep buffers that have a graph for the next batch of the model, as long as it lives.

    Args:
        model: the model of the buffers.
        buffers: the buffers, which the caller no longer uses.

    Example:
        >>> from tensorgrad.models import GPT2, GPT2Config
        >>> from tensorgrad.models.generation.buffers import give_back, take
        >>> from tensorgrad.ops.sampling import Sampling, new_state
        >>> model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> state = new_state([[1]], 7, seeds=[0], stops=[], vocabulary=None, device="cpu")
        >>> buffers = take(model, state, 8, Sampling())
        >>> give_back(model, buffers)
        >>> take(model, state, 8, Sampling()) is buffers  # without a GPU there is no graph
        False
    """
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


def _read(model: weakref.ref[LanguageModel], cache: Cache, state: State) -> Any:
    """Return the function that fills the cache."""

    def read(count: int) -> None:
        alive = model()
        assert alive is not None  # who generates has it
        parts: Any = [None if layer is None else layer.part(slice(None)) for layer in cache]
        alive.next_logits(Tensor(state.tokens[:, :count]), parts)

    return read


def _key(state: State, steps: int, how: Sampling) -> tuple[Any, ...]:
    """Return what must be equal for a batch to begin in the memory of another one."""
    shapes = (state.tokens.shape, state.stops.shape, state.seen is None)
    casts = None if mode.autocast is None else mode.autocast.precision
    return (*shapes, steps, how, casts)


def _reference(value: Any, gone: list[Any]) -> Any:
    """Return a weak reference, which a list gets once its value is gone, or the value itself."""
    try:
        return weakref.ref(value, gone.append)
    except TypeError:  # a number, a string, a tuple
        return value
