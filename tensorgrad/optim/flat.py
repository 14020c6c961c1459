"""All parameters of a model in one buffer and all their gradients in another.

Each `parameter.data` and `parameter.grad` becomes a view of its buffer:

    0                                     decayed                                         size
    | tokens.weight | ...qkv.weight | ... | blocks.0.norm1.weight | ...norm1.bias | ... |

An optimizer step is then one pass over contiguous memory, the global gradient norm one reduction,
and what ranks exchange a slice. The layout may have several such buckets in a row: ranks reduce
gradients during backward, and shard parameters, bucket by bucket. The optimizer updates a shard of
each bucket: here the whole bucket; with sharding this rank's part of it.
Tests: tests/optim/test_flat.py.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.backend import Array, Shape, upcast
from tensorgrad.core.checks import check_integer
from tensorgrad.core.dtypes import Dtype, DtypeLike, as_dtype, bfloat16, compute_dtype, is_float
from tensorgrad.core.errors import ArgumentError, DeviceError, DtypeError
from tensorgrad.core.gradient import LeafGradient
from tensorgrad.core.modes import mode
from tensorgrad.core.tensor import Tensor

ALIGNMENT = 64  # elements; 128 bytes of the smallest dtype, so that vector loads fit every slice

NamedParameters = Iterable[tuple[str, Tensor] | Tensor]
Decays = Callable[[str, Tensor], bool]


class Slot(NamedTuple):
    """The place of one parameter in the flat buffers."""

    offset: int
    shape: Shape

    @property
    def span(self) -> slice:
        """The parameter's slice of a flat buffer."""
        return slice(self.offset, self.offset + math.prod(self.shape))


class Bucket(NamedTuple):
    """The slice [begin, end) of the layout; the decay rule selects [begin, decayed)."""

    begin: int
    decayed: int
    end: int
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of elements, with gaps."""
        return self.end - self.begin


class FlatShard(NamedTuple):
    """A contiguous part of the layout that an optimizer updates at once.

    Attributes:
        begin: its first element in the layout.
        offset: its first element in the optimizer's state buffers, which hold only the shards.
        decayed: the number of its first elements that the decay rule selects.
        data, grad: its parameters and gradients, 1-D.
    """

    begin: int
    offset: int
    decayed: int
    data: Array
    grad: Array

    @property
    def state(self) -> slice:
        """Its slice of the optimizer's state buffers."""
        return slice(self.offset, self.offset + self.data.size)

    def grad_of(self, part: ParameterShard) -> Array:
        """Return the gradients of a part of it; float32 of 16 bits."""
        return upcast(self.grad[part.state.start - self.offset : part.state.stop - self.offset])


class ParameterShard(NamedTuple):
    """The contiguous part of one parameter that this rank updates.

    Attributes:
        name: of the parameter.
        values: its slice of the parameter's elements in C order.
        state: its slice of the optimizer's state buffers.
        data: its elements, 1-D.
    """

    name: str
    values: slice
    state: slice
    data: Array


class Boxes:
    """This rank's part of each parameter of the model: here the whole parameter.

    Where ranks share the layers, it has a box. Optimizers that need whole parameters ask for them;
    all ranks then ask for the same in the same order.
    """

    def shape(self, name: str, own: Shape) -> Shape:
        """Return the shape of a whole parameter, given that of what this rank has."""
        return own

    def join(self, name: str, own: Array) -> Array:
        """Return an array of the whole parameter's shape, from what each rank has of it."""
        return own

    def cut(self, name: str, whole: Array) -> Array:
        """Return what this rank has of an array of the whole parameter's shape."""
        return whole

    def add(self, name: str, sums: Array) -> None:
        """Add, in place, the sums over what other ranks have of a parameter."""


def in_blocks(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix in one of the blocks of a model, by its name.

    Blocks are the members of a `ModuleList`: "blocks.3.attention.qkv.weight" is in one; the
    embeddings and the head are in none. It is a rule for the argument `matrices` of Muon.

    Args:
        name: of the parameter, as `Module.named_parameters()` gives it.
        parameter: of any shape.

    Returns:
        True where it has two axes, and a part of its name but the first and the last is a number.

    Example:
        >>> matrix = tg.zeros((2, 2))
        >>> [tg.optim.in_blocks(name, matrix) for name in ("blocks.3.fc.weight", "tokens.weight")]
        [True, False]
    """
    return parameter.ndim == 2 and any(part.isdecimal() for part in name.split(".")[1:-1])


def decays_matrices(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies as in GPT-2: to matrices, not to biases and norm weights.

    It is a rule for the argument `decay` of optimizers.

    Args:
        name: of the parameter; it does not count.
        parameter: of any shape.

    Returns:
        True where it has two axes or more.

    Example:
        >>> model = tg.nn.Linear(2, 3)
        >>> {name: tg.optim.decays_matrices(name, x) for name, x in model.named_parameters()}
        {'weight': True, 'bias': False}
    """
    return parameter.ndim >= 2


class FlatParameters:
    """Parameters and gradients of a model as views of two 1-D buffers.

    Frozen parameters are skipped. A parameter with two names is taken once, under the first.
    Gradients are float32 (float64 for float64 parameters), so those of 16-bit parameters
    accumulate in float32. Those of bfloat16 parameters may be bfloat16 instead, which saves 2 bytes
    of memory and up to 6 of traffic a parameter. Each is then the rounded gradient of a backward
    pass; the next pass adds to it in bfloat16, so it suits steps of one pass.

    Args:
        named_parameters: pairs (name, tensor), as `Module.named_parameters()` gives them, or
            tensors, as `Module.parameters()` does, whose names are "0", "1" and so on; all of one
            float dtype and on one device.
        decay: (name, tensor) -> whether weight decay applies; these parameters come first in a
            bucket. None: optimizers decide; matrices come first.
        multiple: the length of every bucket is a multiple of this and of 64; with 64 * ranks,
            equal shards are aligned.
        groups: parameter name -> bucket, any hashable value; default: one bucket. Buckets are
            in the order of their first parameters.
        grad_dtype: dtype of the gradients, see above; None: float32 or float64.

    Attributes:
        data: all parameters, 1-D; the gaps between them are always 0.
        grad: all gradients, 1-D.
        parameters: name -> tensor, in the order of the arguments.
        slots: name -> Slot.
        decay: the argument.
        buckets: the buckets of the layout.
        shards: the parts that the optimizer updates.
        grads: the arrays that contain the gradients of the shards, each once.
        memory: the arrays that contain the parameters.
        dtype, grad_dtype: of the parameters and of the gradients.
        touched_elsewhere: the parameters whose gradients come from other ranks alone.
        boxes: what this rank has of each parameter of the model; see Boxes.

    Raises:
        ArgumentError: there is no parameter, two have one name, or two share memory.
        DtypeError, DeviceError: parameters have several dtypes or devices.
        DtypeError: `grad_dtype` is neither the default nor bfloat16 for bfloat16 parameters.

    Example:
        >>> model = tg.nn.Linear(2, 3)
        >>> flat = tg.optim.FlatParameters(model.named_parameters())
        >>> flat.data.fill(0.5)
        >>> model.bias.tolist()
        [0.5, 0.5, 0.5]
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        decay: Decays | None = None,
        multiple: int = ALIGNMENT,
        groups: Callable[[str], Hashable] | None = None,
        grad_dtype: DtypeLike | None = None,
    ) -> None:
        check_integer("FlatParameters", "multiple", multiple, 1)
        found = _distinct(named_parameters)
        _check_alike(found)
        self.parameters, self.decay, self.boxes = found, decay, Boxes()
        self.dtype: Dtype = next(iter(found.values())).dtype
        self.grad_dtype = _checked_grad_dtype(grad_dtype, self.dtype)
        like = backend.empty((0,), self.dtype, next(iter(found.values())).data)
        if backend.is_numpy(like):
            _keep_freed_memory()
        rule, multiple = decay or decays_matrices, math.lcm(multiple, ALIGNMENT)
        self.slots, self.buckets = _lay_out(found, rule, multiple, groups or (lambda _: None))
        self.data: Array
        self.grad: Array
        self.shards: list[FlatShard] = []
        self.grads: list[Array] = []
        self.memory: list[Array] = []
        self._parts: list[tuple[str, Tensor, Array, Array]] = []
        buffers = self._allocate(like)
        for number, (bucket, (data, grad)) in enumerate(zip(self.buckets, buffers, strict=True)):
            for name in bucket.names:
                self._move(bucket, name, found[name], data, grad)
            self._moved(number)
        self._zeroed_in: object = None  # the capture of the last `zero_grad`
        self.touched_elsewhere: frozenset[str] = frozenset()

    def __getstate__(self) -> object:
        """Raise ArgumentError: in a copy the parameters would not be views of the buffers."""
        raise ArgumentError(
            "FlatParameters: an optimizer cannot be copied or pickled, as it would lose its model; "
            "expected a new optimizer for the copied model, and load_state_dict"
        )

    @property
    def size(self) -> int:
        """The length of the layout, gaps included."""
        return self.buckets[-1].end

    @property
    def whole(self) -> bool:
        """Whether the shards cover the layout: nothing is sharded."""
        return sum(int(shard.data.size) for shard in self.shards) == self.size

    def parameter_shards(self) -> Iterator[ParameterShard]:
        """Yield the part of each parameter in each shard, in the order of the layout."""
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            for name in bucket.names:
                part = self.parameter_shard(name, shard)
                if part.data.size:
                    yield part

    def parameter_shard(self, name: str, shard: FlatShard) -> ParameterShard:
        """Return the part of a parameter in the shard of its bucket; it may be empty."""
        slot = self.slots[name]
        begin = max(slot.offset, shard.begin)
        end = max(begin, min(slot.span.stop, shard.begin + shard.data.size))
        place = slice(begin - shard.begin, end - shard.begin)
        return ParameterShard(
            name,
            slice(begin - slot.offset, end - slot.offset),
            slice(shard.offset + place.start, shard.offset + place.stop),
            shard.data[place],
        )

    def gather(self, number: int, part: Array) -> Array:
        """Return what the ranks have of a bucket as one array, 1-D: here `part` itself.

        Args:
            number: of the bucket.
            part: what this rank has, as long as its shard.
        """
        return part

    def add_shards(self, array: Array) -> None:
        """Add, in place, the arrays of ranks that update other shards; here there are none."""

    def views(self, buffer: Array) -> dict[str, Array]:
        """Cut a flat buffer (of parameters, gradients or optimizer state) into named views."""
        return cut(buffer, self.slots)

    def zero_grad(self) -> None:
        """Set all gradients to 0; in a CUDA graph, backward overwrites them instead."""
        for gradient in self._gradients():
            if type(gradient) is not LeafGradient:
                gradient.plain()
            gradient.is_touched = False
        self._zeroed_in = mode.capture
        self._clear_gradients()

    def _gradients(self) -> list[LeafGradient]:
        """Return the gradients of the parameters; `check` finds those that were removed."""
        gradients = [parameter.gradient for parameter in self.parameters.values()]
        return [gradient for gradient in gradients if gradient is not None]

    def _clear_gradients(self) -> None:
        if mode.capture is not None:
            mode.capture.overwrite(self._gradients())
            return
        for grad in self.grads:
            grad.fill(0)

    def untouched(self) -> list[str]:
        """Return the parameters whose gradient no backward has added to since it was 0."""
        pairs = [(name, parameter.gradient) for name, parameter in self.parameters.items()]
        return [name for name, gradient in pairs if gradient is None or not gradient.is_touched]

    def without_gradient(self) -> frozenset[str]:
        """Return the parameters without a gradient: backward added none, and nobody wrote one.

        Only where backward has passed a parameter by, the host reads whether somebody wrote its
        gradient, which then counts until `zero_grad`. In a captured step it does not.
        """
        names = [name for name in self.untouched() if name not in self.touched_elsewhere]
        if mode.capture is not None:
            return frozenset(names if self._zeroed_in is mode.capture else ())
        written = [name for name in names if self._is_written(name)]
        for gradient in (self.parameters[name].gradient for name in written):
            if gradient is not None:
                gradient.is_touched = True
        return frozenset(names) - frozenset(written)

    def _is_written(self, name: str) -> bool:
        grad = self.grad[self.slots[name].span]
        return not grad.size or bool(grad.any())

    def runs(self, shard: FlatShard, without: Collection[str]) -> list[FlatShard]:
        """Return the parts of a shard between some parameters."""
        found: list[FlatShard] = []
        begin, end = shard.begin, shard.begin + int(shard.data.size)
        holes = sorted((self.slots[name].offset, self.slots[name].span.stop) for name in without)
        for start, stop in [*holes, (end, end)]:
            if begin < min(start, end):
                place = slice(begin - shard.begin, min(start, end) - shard.begin)
                decayed = min(max(shard.decayed - place.start, 0), place.stop - place.start)
                data, grad = shard.data[place], shard.grad[place]
                found.append(FlatShard(begin, shard.offset + place.start, decayed, data, grad))
            begin = max(begin, _round_up(stop, ALIGNMENT))
        return found

    def check(self, op: str) -> None:
        """Raise ArgumentError where a parameter was frozen, or is not a view of the buffers."""
        for name, parameter, data, grad in self._parts:
            if parameter.data is not data:
                raise ArgumentError(
                    f"{op}: the data of {name} was replaced after the optimizer took it, expected "
                    "the view of the flat buffer; move or convert the model before building the "
                    "optimizer, and assign with parameter.data[...] = value"
                )
            if parameter.gradient is None or parameter.gradient.array is not grad:
                raise ArgumentError(
                    f"{op}: the grad of {name} was replaced after the optimizer took it, expected "
                    "the view of the flat buffer; clear gradients with zero_grad()"
                )
            if not parameter.requires_grad:
                raise ArgumentError(
                    f"{op}: {name} was frozen after the optimizer took it, expected requires_grad: "
                    "decay and momentum would move it; freeze it before building the optimizer"
                )

    def _allocate(self, like: Array) -> list[tuple[Array, Array]]:
        """Allocate the buffers and shards; return data and grad of each bucket."""
        self.data = zeros(self.size, self.dtype, like)
        self.grad = zeros(self.size, self.grad_dtype, like)
        self.memory, self.grads = [self.data], [self.grad]
        for begin, decayed, end, _ in self.buckets:
            data, grad = self.data[begin:end], self.grad[begin:end]
            self.shards.append(FlatShard(begin, begin, decayed - begin, data, grad))
        return [(shard.data, shard.grad) for shard in self.shards]

    def _moved(self, number: int) -> None:
        """Finish a bucket whose parameters have been moved; sharded parameters override this."""

    def _move(self, bucket: Bucket, name: str, parameter: Tensor, data: Array, grad: Array) -> None:
        """Make the parameter and its gradient views of its bucket's buffers."""
        slot = self.slots[name]
        place = slice(slot.offset - bucket.begin, slot.span.stop - bucket.begin)
        view, grad_view = (array[place].reshape(slot.shape) for array in (data, grad))
        view[...] = backend.asarray_like(parameter.data, view)
        if parameter.gradient is not None:
            grad_view[...] = parameter.gradient.plain()
        parameter.data, parameter.grad = view, grad_view
        self._parts.append((name, parameter, view, grad_view))


def cut(buffer: Array, slots: Mapping[str, Slot]) -> dict[str, Array]:
    """Cut a flat buffer into named views."""
    return {name: buffer[slot.span].reshape(slot.shape) for name, slot in slots.items()}


def slots_of(shapes: Mapping[str, Shape]) -> dict[str, Slot]:
    """Return a slot for each shape, one after the other, aligned."""
    slots: dict[str, Slot] = {}
    end = 0
    for name, shape in shapes.items():
        slots[name] = slot = Slot(end, shape)
        end = _round_up(slot.span.stop, ALIGNMENT)
    return slots


def zeros(length: int, dtype: Dtype, like: Array) -> Array:
    """Return a 1-D array of zeros on the device of `like`."""
    array = backend.empty((length,), dtype, like)
    array.fill(0)
    return array


def _lay_out(
    found: dict[str, Tensor], decay: Decays, multiple: int, groups: Callable[[str], Hashable]
) -> tuple[dict[str, Slot], list[Bucket]]:
    """Give each parameter its slot; in each group those that decay come first."""
    members: dict[Hashable, list[str]] = {}
    for name in found:
        members.setdefault(groups(name), []).append(name)
    slots: dict[str, Slot] = {}
    buckets = []
    end = 0
    for group in members.values():
        begin = end
        decaying = {name for name in group if decay(name, found[name])}
        names = sorted(group, key=lambda name: name not in decaying)
        decayed = begin
        for name in names:
            slots[name] = slot = Slot(end, found[name].shape)
            end = _round_up(slot.span.stop, ALIGNMENT)
            if name in decaying:
                decayed = end
        end = begin + _round_up(end - begin, multiple)
        buckets.append(Bucket(begin, decayed, end, tuple(names)))
    return slots, buckets


def named(parameters: NamedParameters, start: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield pairs (name, tensor); the name of a tensor without one is its number from `start`.

    Raises:
        ArgumentError: there is something else than pairs and tensors.
    """
    expected = (
        "expected pairs (name, tensor) as Module.named_parameters() gives them, or the tensors"
    )
    if not isinstance(parameters, Iterable) or isinstance(parameters, Tensor):
        kind = type(parameters).__name__
        raise ArgumentError(f"FlatParameters: named_parameters is a {kind}, {expected}")
    for number, item in enumerate(parameters, start):
        pair = (str(number), item) if isinstance(item, Tensor) else item
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            kind = type(item).__name__
            raise ArgumentError(f"FlatParameters: named_parameters has a {kind}, {expected}")
        yield pair


def _distinct(named_parameters: NamedParameters) -> dict[str, Tensor]:
    """Return the parameters that require a gradient, each under its first name."""
    found: dict[str, Tensor] = {}
    memory: dict[tuple[int, int], str] = {}
    seen: set[int] = set()
    for name, parameter in named(named_parameters):
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        if parameter.node is not None:
            raise ArgumentError(f"FlatParameters: {name} is the result of an op, expected a leaf")
        if name in found:
            raise ArgumentError(f"FlatParameters: {name} names two parameters, expected one")
        if parameter.size:
            bounds = backend.byte_bounds(parameter.data)
            if bounds in memory:
                raise ArgumentError(
                    f"FlatParameters: {name} shares its memory with {memory[bounds]}, expected "
                    "separate arrays; to tie them, use one and the same parameter"
                )
            memory[bounds] = name
        found[name] = parameter
        seen.add(id(parameter))
    if not found:
        raise ArgumentError("FlatParameters: got no parameter that requires a gradient")
    return found


def _check_alike(found: dict[str, Tensor]) -> None:
    first, example = next(iter(found.items()))
    if not is_float(example.dtype):
        raise DtypeError(f"FlatParameters: {first} has dtype {example.dtype}, expected a float")
    for name, parameter in found.items():
        for what, got, expected, error in (
            ("has dtype", parameter.dtype, example.dtype, DtypeError),
            ("is on", parameter.device, example.device, DeviceError),
        ):
            if got != expected:
                raise error(
                    f"FlatParameters: {name} {what} {got}, expected {expected} like {first}"
                )


def _checked_grad_dtype(wanted: DtypeLike | None, dtype: Dtype) -> Dtype:
    wide = compute_dtype(dtype)
    got = wide if wanted is None else as_dtype(wanted)
    if got not in (wide, dtype if dtype == bfloat16 else wide):
        or_narrow = f" or {dtype}" if dtype == bfloat16 else ""
        raise DtypeError(
            f"FlatParameters: grad_dtype is {got}, expected {wide}{or_narrow} as the parameters "
            f"are {dtype}"
        )
    return got


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@cache
def _keep_freed_memory() -> None:
    """Let glibc keep the memory of freed arrays, which the next training step takes again.

    Otherwise it returns that of large arrays to the system, which has to clear each page anew.
    """
    with suppress(OSError, TypeError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h, in bytes
            mallopt(parameter, 2**30)
