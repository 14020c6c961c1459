"""All parameters of a model in one buffer and all their gradients in another.

Each `parameter.data` and `parameter.grad` becomes a view of its buffer:

    0                                  decayed                                size
    | wte.weight | h.0.attn.weight ... | h.0.ln_1.weight | h.0.attn.bias ... |

So an optimizer step is one pass over contiguous memory, the norm of all gradients one reduction,
and what ranks exchange is a slice. Tests: tests/optim/test_flat.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tensorgrad import backend
from tensorgrad.backend import Array, Shape
from tensorgrad.dtypes import compute_dtype, is_float
from tensorgrad.errors import ArgumentError, DeviceError, DtypeError
from tensorgrad.tensor import Tensor

ALIGNMENT = 64  # elements; 128 bytes of the smallest dtype, so that vector loads fit every slice

NamedParameters = Iterable[tuple[str, Tensor]]


class Slot(NamedTuple):
    """Where one parameter lies in the flat buffers."""

    offset: int
    shape: Shape

    @property
    def piece(self) -> slice:
        """The part of a flat buffer that belongs to the parameter."""
        return slice(self.offset, self.offset + math.prod(self.shape))


def decays_matrices(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies as in GPT-2: to matrices, not to biases and gains."""
    return parameter.ndim >= 2


class FlatParameters:
    """Parameters and gradients of a model as views of two 1-D buffers.

    Parameters that require no gradient stay as they are. A parameter that occurs under two names
    is taken once, under the first. Gradients are float32 (float64 for float64 parameters), so
    gradients of 16-bit parameters accumulate without loss.

    Args:
        named_parameters: pairs (name, tensor), as `Module.named_parameters()` gives them; all of
            one float dtype and on one device.
        decay: rule (name, tensor) -> whether weight decay applies; default: `decays_matrices`.
        multiple: the length of the buffers is a multiple of this and of 64; with 64 * ranks,
            equal shards are aligned.

    Attributes:
        data: all parameters; the gaps between them are and stay 0.
        grad: all gradients.
        slots: name -> Slot.
        decayed: weight decay applies to the elements [0, decayed).

    Raises:
        ArgumentError: no parameter, the same name for two, or two that share memory.
        DtypeError, DeviceError: parameters of several dtypes or devices.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        decay: Callable[[str, Tensor], bool] = decays_matrices,
        multiple: int = ALIGNMENT,
    ) -> None:
        if multiple < 1:
            raise ArgumentError(f"FlatParameters: multiple is {multiple}, expected at least 1")
        found = _distinct(named_parameters)
        _check_alike(found)
        like = next(iter(found.values())).data
        with_decay = [name for name, parameter in found.items() if decay(name, parameter)]
        without = [name for name in found if name not in set(with_decay)]
        self.slots: dict[str, Slot] = {}
        end = 0
        for name in with_decay:
            end = self._place(name, found[name], end)
        self.decayed = end
        for name in without:
            end = self._place(name, found[name], end)
        size = _round_up(end, math.lcm(multiple, ALIGNMENT))
        self.data: Array = backend.empty((size,), like.dtype, like)
        self.grad: Array = backend.empty((size,), compute_dtype(like.dtype), like)
        self.data.fill(0)
        self.grad.fill(0)
        grads = self.views(self.grad)
        self._parts: list[tuple[str, Tensor, Array, Array]] = []
        for name, view in self.views(self.data).items():
            parameter, grad = found[name], grads[name]
            view[...] = parameter.data
            if parameter.grad is not None:
                grad[...] = parameter.grad
            parameter.data, parameter.grad = view, grad
            self._parts.append((name, parameter, view, grad))

    @property
    def size(self) -> int:
        """The length of the buffers, gaps included."""
        return int(self.data.size)

    def views(self, buffer: Array) -> dict[str, Array]:
        """Cut a flat buffer (of parameters, gradients or optimizer state) into named views."""
        return {name: buffer[slot.piece].reshape(slot.shape) for name, slot in self.slots.items()}

    def zero_grad(self) -> None:
        """Set all gradients to 0."""
        self.grad.fill(0)

    def check(self, op: str) -> None:
        """Make sure that the parameters still are the views that were made of them.

        Raises:
            ArgumentError: the data or grad of a parameter was replaced.
        """
        for name, parameter, data, grad in self._parts:
            if parameter.data is not data:
                raise ArgumentError(
                    f"{op}: the data of {name} was replaced after the optimizer took it, expected "
                    "the view of the flat buffer; move or convert the model before building the "
                    "optimizer, and assign with parameter.data[...] = value"
                )
            if parameter.grad is not grad:
                raise ArgumentError(
                    f"{op}: the grad of {name} was replaced after the optimizer took it, expected "
                    "the view of the flat buffer; clear gradients with zero_grad()"
                )

    def _place(self, name: str, parameter: Tensor, end: int) -> int:
        """Give the parameter the next place; return where the one after it may begin."""
        self.slots[name] = slot = Slot(end, parameter.shape)
        return _round_up(slot.piece.stop, ALIGNMENT)


def _distinct(named_parameters: NamedParameters) -> dict[str, Tensor]:
    """Return the parameters that require a gradient, each under its first name."""
    found: dict[str, Tensor] = {}
    names: dict[Tensor, str] = {}
    memory: dict[tuple[int, int], str] = {}
    for item in named_parameters:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor)):
            raise ArgumentError(
                f"FlatParameters: named_parameters has a {type(item).__name__}, expected pairs "
                "(name, tensor) as Module.named_parameters() gives them"
            )
        name, parameter = item
        if not parameter.requires_grad or parameter in names:
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
        names[parameter] = name
    if not found:
        raise ArgumentError("FlatParameters: got no parameter that requires a gradient")
    return found


def _check_alike(found: dict[str, Tensor]) -> None:
    first, example = next(iter(found.items()))
    if not is_float(example.dtype):
        raise DtypeError(f"FlatParameters: {first} has dtype {example.dtype}, expected a float")
    for name, parameter in found.items():
        if parameter.dtype != example.dtype:
            raise DtypeError(
                f"FlatParameters: {name} has dtype {parameter.dtype}, expected {example.dtype} "
                f"like {first}"
            )
        if parameter.device != example.device:
            raise DeviceError(
                f"FlatParameters: {name} is on {parameter.device}, expected {example.device} "
                f"like {first}"
            )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
