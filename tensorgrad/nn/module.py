"""Module: a layer or a model, made of parameters, buffers and other modules.

A module needs no registration and no call of `super().__init__()`: attributes that are a
`Parameter` are its parameters, attributes that are a `Module` its children, in the order of their
first assignment. They can be replaced only by their kind or None. Names join attributes with dots:
"blocks.0.norm1.weight".

The layers of this package compute in the dtype of their parameters. They accept narrower floats,
and those that autocast narrows, but raise for wider ones: float64 from NumPy would make all later
activations float64. The functions of `tensorgrad.ops` promote as NumPy does.

Fused ops: a layer of your own is called through `forward`, like any other. It can run as one kernel
with the ops around it, as the layers of this package do, if it also can_fuse

    a norm     add(x, residual=None) -> (x + residual, forward(x + residual)), or (x, forward(x));
               used by `add_norm` in norm.py
    a linear   affine() -> (weight, bias or None), where forward(x) is x weight^T + bias;
    layer      used by `FeedForward` and `SwiGLU`
               may_be_overwritten, where nothing but the caller holds what forward returns, nor does
               backward need it; used by `MultiHeadAttention`
    a dropout  drops and p: whether forward(x) is dropout(x, p) now, and not x; used by `SwiGLU`
    a branch   forward(x, residual=None) -> forward(x) + residual; used by `add_branch`

A subclass of such a layer is fused as its base is, unless it overrides `forward` alone.
Tests: tests/nn/test_module.py, tests/nn/test_hooks.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cache, partial
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar
from weakref import ref

import numpy as np

from tensorgrad.autograd import trees
from tensorgrad.core import backend, instrument
from tensorgrad.core.arrays import not_an_operand
from tensorgrad.core.backend import Array
from tensorgrad.core.checks import check_function, check_shape
from tensorgrad.core.dtypes import Dtype, DtypeLike, as_dtype, float64, is_float
from tensorgrad.core.errors import ArgumentError, CheckpointError, DtypeError
from tensorgrad.core.modes import changes, mode
from tensorgrad.core.nodes import assign, edge_of
from tensorgrad.core.operands import tensor_of
from tensorgrad.core.record import no_grad
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn.model_graph import ModelGraph, draw
from tensorgrad.nn.rows import Rows
from tensorgrad.nn.summary import Summary, summarize
from tensorgrad.nn.wrapped_names import by_plain_names

_MOST_NAMES = 20  # in one error message
_CONTAINERS = (list, tuple, dict, set, frozenset)
_Named = TypeVar("_Named")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result", covariant=True)
PreHook = Callable[["Module", tuple[Any, ...]], Any]
Hook = Callable[["Module", tuple[Any, ...], Any], Any]


class Parameter(Tensor):
    """A tensor that an optimizer updates: a leaf of the graph that requires a gradient.

    Args:
        data: an array or a tensor of floats, of any shape, which is not copied.
        requires_grad: False freezes the parameter.

    Raises:
        DtypeError: data is not an array, or not of floats.

    Example:
        >>> tg.nn.Parameter(np.ones(2, "float32"))
        tensor([1., 1.], dtype=float32, requires_grad=True)
    """

    __slots__ = ()
    notes_changes = True

    if not TYPE_CHECKING:  # type checkers would let any attribute be set

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute, on which captured steps may depend."""
            super().__setattr__(name, value)
            changes.note()

    def __init__(self, data: Array | Tensor, requires_grad: bool = True) -> None:
        array = data.data if isinstance(data, Tensor) else data
        if not backend.is_array(array):
            raise not_an_operand("Parameter", "data", data, "an array or a Tensor")
        super().__init__(array, requires_grad)


class _HasForward(Protocol[_Arguments, _Result]):
    """A module that is called, as a type checker sees it."""

    def forward(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result: ...


class Module:
    """Base of layers and models: define `forward` and assign parameters and modules.

    Attributes of every module:
        training: whether layers such as Dropout are in training mode; see `train` and `eval`.
        captures: whether generation may capture its calls into a CUDA graph.

    Example:
        >>> class Scale(tg.nn.Module):
        ...     def __init__(self, width: int) -> None:
        ...         self.factor = tg.nn.Parameter(2 * np.ones(width, "float32"))
        ...
        ...     def forward(self, x: tg.Tensor) -> tg.Tensor:
        ...         return x * self.factor
        >>> Scale(3)(tg.ones((1, 3)))
        tensor([[2., 2., 2.]], dtype=float32, requires_grad=True)
    """

    training = True
    captures = True
    forward: Callable[..., Any]

    if not TYPE_CHECKING:  # type checkers would let any attribute be set

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute; replace a parameter, module or buffer only by its kind or None.

            Raises:
                DtypeError: the value has another type, and training would no longer see it.
            """
            kind = self._kind_of(name)
            if kind is not None and value is not None and not isinstance(value, kind):
                hint = f"; for values: {name}[...] = value, under no_grad()"
                raise DtypeError(
                    f"{type(self).__name__}: {name} is set to a {type(value).__name__}, expected "
                    f"a {kind.__name__} or None{'' if kind is Module else hint}"
                )
            super().__setattr__(name, value)
            if name == "training":
                changes.note_mode()
            elif kind is not None or isinstance(value, Parameter | Module):
                changes.note()

    def __call__(
        self: _HasForward[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Return `forward(...)`, whose types a type checker sees."""
        if instrument.observer is not None:
            result: _Result = instrument.observer.layer(self, args, kwargs)
            return result
        return self.forward(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules that are attributes of this one, each once, with their names."""
        return _once(self._members(Module))

    def saved_bytes(self, rows: Rows) -> float:
        """Return the bytes that a forward pass saves for backward, but parameters, by a formula.

        Here the sum over the modules in it: a layer that saves something of its own says so.

        Args:
            rows: that pass through.
        """
        return sum(child.saved_bytes(rows) for child in self.children())

    def children(self) -> Iterator[Module]:
        """Yield the modules that are attributes of this one, each once."""
        return (child for _, child in self.named_children())

    def register_forward_pre_hook(self, hook: PreHook) -> Callable[[], None]:
        """Call `hook(module, args)` before each forward.

        Args:
            hook: returns None, or what the positional arguments become: a tuple, or the only one.

        Returns:
            A function that removes the hook. See `register_forward_hook`.
        """
        return self._hooked().add(hook, first=True)

    def register_forward_hook(self, hook: Hook) -> Callable[[], None]:
        """Call `hook(module, args, y)` after each forward.

        A module with hooks runs through its `forward`, not as part of a fused op, so the hook sees
        exactly `forward(*args)`. In a captured step hooks run while it is captured, not in replays.

        Args:
            hook: returns None, or what the module returns instead of y.

        Returns:
            A function that removes the hook.
        """
        return self._hooked().add(hook, first=False)

    def _hooked(self) -> _HookedForward:
        """Return the forward that calls hooks; it becomes an attribute of the instance."""
        if not isinstance(vars(self).get("forward"), _HookedForward):
            vars(self)["forward"] = _HookedForward(self, vars(self).get("forward"))
        found: _HookedForward = vars(self)["forward"]
        return found

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module (named `prefix`) and its descendants, each once, parents first."""
        return _once(self._walk(prefix))

    def modules(self) -> Iterator[Module]:
        """Yield this module and its descendants, each once, parents first."""
        seen: set[int] = set()
        waiting: list[Module] = [self]
        while waiting:
            module = waiting.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield module
                children = [value for value in vars(module).values() if isinstance(value, Module)]
                waiting += reversed(children)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield every parameter once, with its name; a shared one under its first name."""
        return _once(self._all_parameters())

    def parameters(self) -> Iterator[Parameter]:
        """Yield every parameter once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every buffer once, with its name."""
        return _once(self._all_buffers())

    def buffers(self) -> Iterator[Tensor]:
        """Yield every buffer once."""
        return (buffer for _, buffer in self.named_buffers())

    def register_buffer(self, name: str, value: Tensor, persistent: bool = True) -> None:
        """Set an attribute that is not a parameter but moves with the module.

        Args:
            name: of the attribute.
            value: the tensor.
            persistent: whether it is part of `state_dict`.
        Raises:
            ArgumentError: the name is taken or not an identifier.
            DtypeError: the value is not a tensor.
        """
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise DtypeError(f"register_buffer: value is a {kind}, expected a Tensor")
        if not name.isidentifier() or hasattr(self, name):
            raise ArgumentError(
                f"register_buffer: name is {name!r}, expected an identifier that is not taken"
            )
        self.__dict__.setdefault("_buffers", {})[name] = persistent
        setattr(self, name, value)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers by name, detached from the graph.

        The tensors share the module's memory. A parameter with several names has one entry, under
        the first.
        """
        return {names[0]: tensor.detach() for names, tensor in self._state()}

    def load_state_dict(
        self, state: Mapping[str, Tensor | Array], strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Copy values into the parameters and persistent buffers, or change nothing.

        Values are converted to the dtype and device of the module. A shared parameter may have
        any of its names. "module." and "_orig_mod." in names, which PyTorch's wrappers add, are
        dropped where the module has the rest.

        Args:
            state: tensors or arrays by name, as from `state_dict`.
            strict: whether missing and unexpected names are errors.

        Returns:
            The missing names, and those that the module does not have.

        Raises:
            CheckpointError: names are missing or unexpected (when strict); or a value has another
                shape or kind of dtype, or integers that the dtype cannot represent. The message
                lists up to 20 names of each problem.
        """
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise CheckpointError(f"load_state_dict: state is a {kind}, expected arrays by name")
        own = self._state()
        by_name = {name: tensor for names, tensor in own for name in names}
        state = by_plain_names(state, by_name)
        arrays = {name: _array_of(state[name]) for name in state if name in by_name}
        missing = [names[0] for names, _ in own if not any(name in arrays for name in names)]
        unexpected = [name for name in state if name not in by_name]
        wrong = [
            f"{name} is {array.dtype}{list(array.shape)}, "
            f"expected {by_name[name].dtype}{list(by_name[name].shape)}"
            for name, array in arrays.items()
            if not _fits(array, by_name[name])
        ]
        torn = [
            f"{' and '.join(given)} share one parameter but differ"
            for names, _ in own
            if len(given := [name for name in names if name in arrays]) > 1
            and any(not _equal(arrays[given[0]], arrays[name]) for name in given[1:])
        ]
        problems = [*_listed("missing", missing), *_listed("unexpected", unexpected)]
        problems = (problems if strict else []) + _listed("wrong", wrong) + _listed("torn", torn)
        if problems:
            raise CheckpointError(f"load_state_dict: {'; '.join(problems)}")
        with no_grad():
            for name, array in arrays.items():
                tensor = by_name[name]
                assign(tensor, ..., backend.to_device(array, tensor.device))
        return missing, unexpected

    def train(self, mode: bool = True) -> Self:
        """Set training mode, or evaluation mode if not `mode`, in all modules; return self."""
        for module in _all_modules(self):
            vars(module)["training"] = mode  # which `__setattr__` would do, in more time
        changes.note_mode()
        return self

    def eval(self) -> Self:
        """Set evaluation mode, without dropout, in all modules; return self."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Set existing gradients to 0, in place: they are views of an optimizer's buffer."""
        for parameter in self.parameters():
            if parameter.gradient is not None:
                parameter.gradient.plain()[...] = 0

    def to(self, device: DtypeLike | None = None, dtype: DtypeLike | None = None) -> Self:
        """Move all parameters and buffers, and convert those of floats; return self.

        The `Parameter` objects stay the same but get new arrays: call it before building an
        optimizer. A single argument may be a device or a dtype: `to("cuda")`, `to("bfloat16")`.

        Args:
            device: "cpu", "cuda" or "cuda:N".
            dtype: a float dtype.

        Raises:
            DeviceError: the device does not exist.
            DtypeError: dtype is not a float dtype.
        """
        if dtype is None and not backend.is_device(device):
            device, dtype = None, device
        target = None if dtype is None else as_dtype(dtype)
        if target is not None and not is_float(target):
            raise DtypeError(f"to: dtype is {target}, expected a float")
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data = _moved(tensor.data, device, target)
            if tensor.gradient is not None:
                tensor.grad = _moved(tensor.gradient.plain(), device, target)
        return self

    def apply(self, function: Callable[[Module], object]) -> Self:
        """Call `function` on every module, children before their parents; return self."""
        for module in reversed(list(self.modules())):
            function(module)
        return self

    def summary(self, *inputs: Any) -> Summary:
        """Return parameters, shapes, memory and FLOPs, layer by layer; `print` shows a table.

            print(model.summary(tg.zeros((1, 8))))

        Args:
            inputs: what the model is called with, once, without dropout and gradients. Without
                inputs the model is not called: shapes and FLOPs are missing.

        Returns:
            The summary; see `Summary` for its attributes.
        """
        with evaluating(self):
            return summarize(self, inputs)

    def graph(self, *inputs: Any) -> ModelGraph:
        """Return the layers and ops of a call as Graphviz text.

            model.graph(tg.zeros((1, 8))).save("model.dot")

        Args:
            inputs: what the model is called with, once, without dropout and gradients.

        Returns:
            The graph; see `ModelGraph`.

        Raises:
            ArgumentError: there are no inputs.
        """
        with evaluating(self):
            return draw(self, inputs)

    def extra_repr(self) -> str:
        """Return the settings that `repr` shows in the brackets."""
        return ""

    def __repr__(self) -> str:
        children = [f"\n({name}): {child!r}" for name, child in self._members(Module)]
        inside = "".join(children).replace("\n", "\n  ") + "\n" * bool(children)
        return f"{type(self).__name__}({self.extra_repr()}{inside})"

    def _kind_of(self, name: str) -> type | None:
        """Return the class that an attribute must keep; None for any."""
        old = vars(self).get(name)
        for kind in (Parameter, Module):
            if isinstance(old, kind):
                return kind
        return Tensor if name in vars(self).get("_buffers", ()) else None

    def _members(self, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of one class; raise where a list or the like holds some."""
        for name, value in vars(self).items():
            if isinstance(value, kind):
                yield name, value
            elif isinstance(value, _CONTAINERS) and _holds_modules(value):
                raise ArgumentError(
                    f"{type(self).__name__}: {name} is a {type(value).__name__} that holds "
                    "modules or parameters, expected a ModuleList or one attribute each"
                )

    def _walk(self, name: str, above: tuple[Module, ...] = ()) -> Iterator[tuple[str, Module]]:
        """Yield every path to a module that visits none twice."""
        yield name, self
        for key, child in self._members(Module):
            if child is not self and child not in above:
                yield from child._walk(_join(name, key), (*above, self))

    def _all_parameters(self) -> Iterator[tuple[str, Parameter]]:
        for name, module in self._walk(""):
            for key, parameter in module._members(Parameter):
                yield _join(name, key), parameter

    def _all_buffers(self, transient: bool = True) -> Iterator[tuple[str, Tensor]]:
        for name, module in self._walk(""):
            for key, persistent in vars(module).get("_buffers", {}).items():
                buffer = vars(module).get(key)  # None where it was deleted or set to None
                if buffer is not None and (persistent or transient):
                    yield _join(name, key), buffer

    def _with(self, tensors: Mapping[int, Tensor], stands_in: bool = True) -> Self:
        """Return a copy with other tensors in the place of some; nothing else is copied.

        Args:
            tensors: by the id of the parameter or buffer.
            stands_in: whether the copy computes for this module: a captured step that calls it
                depends on this module instead.

        Raises:
            ArgumentError: a module has another forward, which would use the tensors of this one.
        """
        copies: dict[int, Any] = dict(tensors)
        modules = _all_modules(self)
        for module in modules:
            copies[id(module)] = object.__new__(type(module))
        for module in modules:
            _check_forward(module, tensors)
            attributes = {name: for_copies(value, copies) for name, value in vars(module).items()}
            if stands_in:
                attributes["_copy_of"] = attributes.get("_copy_of", ref(module))
            vars(copies[id(module)]).update(attributes)
        copy: Self = copies[id(self)]
        return copy

    def _with_named(self, op: str, tensors: Any) -> Self:
        """Return a copy with other tensors in the place of some parameters and buffers.

        Args:
            op: for errors.
            tensors: by name, or several such dictionaries.

        Raises:
            ArgumentError: the module has no such name, or a parameter gets two tensors.
            ShapeError, DeviceError: a tensor has another shape, or is on another device.
        """
        own = dict(chain[tuple[str, Tensor]](self._all_parameters(), self._all_buffers()))
        replaced: dict[int, Tensor] = {}
        for each in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            if not isinstance(each, Mapping):
                kind = type(each).__name__
                raise ArgumentError(f"{op}: parameters is a {kind}, expected tensors by name")
            for name, value in each.items():
                if name not in own:
                    raise ArgumentError(
                        f"{op}: parameters has {name!r}, expected names of the parameters and "
                        f"buffers of the {type(self).__name__}"
                    )
                old, x = own[name], tensor_of(op, f"parameters[{name!r}]", value)
                check_shape(op, f"parameters[{name!r}]", x, old.shape)
                backend.same_device(op, ("the model", f"parameters[{name!r}]"), (old.data, x.data))
                if replaced.setdefault(id(old), x) is not x:
                    raise ArgumentError(
                        f"{op}: parameters has two tensors for {name!r}, which shares its "
                        "parameter with another name, expected one"
                    )
        by_id = {id(old): old for old in own.values()}
        return self._with({key: _in_place_of(by_id[key], x) for key, x in replaced.items()})

    def _state(self) -> list[tuple[list[str], Tensor]]:
        """Return the parameters and persistent buffers, each with all its names."""
        found: dict[int, tuple[list[str], Tensor]] = {}
        buffers = self._all_buffers(transient=False)
        for name, tensor in chain[tuple[str, Tensor]](self._all_parameters(), buffers):
            found.setdefault(id(tensor), ([], tensor))[0].append(name)
        return list(found.values())


def _check_forward(module: Module, tensors: Mapping[int, Tensor]) -> None:
    """Raise ArgumentError where a copy with other parameters would run a forward without them."""
    forward = vars(module).get("forward")
    own = forward.own if isinstance(forward, _HookedForward) else forward
    is_method = own is None or isinstance(own, MethodType) or hasattr(own, "for_copies")
    if not is_method and any(id(p) in tensors for p in module.parameters()):
        raise ArgumentError(
            f"{type(module).__name__}: forward was replaced by a function, expected a method: a "
            "copy with other parameters would not use them; override forward in a subclass"
        )


def for_copies(value: Any, copies: Mapping[int, Any]) -> Any:
    """Return the attribute of a module for its copy, which refers to copies of what there are.

    Args:
        value: the attribute; a method `for_copies(copies)` of it decides for itself.
        copies: by the id of what they are copies of.
    """
    if hasattr(value, "for_copies"):
        return value.for_copies(copies)
    if isinstance(value, MethodType) and id(value.__self__) in copies:
        return MethodType(value.__func__, copies[id(value.__self__)])
    return copies.get(id(value), value)


class _HookedForward:
    """The `forward` of one module with hooks; `can_fuse` sees it and does not fuse the module."""

    def for_copies(self, copies: Mapping[int, Any]) -> _HookedForward:
        """Return the forward, with the same hooks, of the copy of the module."""
        other = _HookedForward(copies[id(self._module)], for_copies(self.own, copies))
        other._first, other._last = self._first, self._last
        return other

    def __init__(self, module: Module, own: Callable[..., Any] | None) -> None:
        self._module, self.own = module, own  # own: a forward that the instance already had
        self._first: list[PreHook] = []
        self._last: list[Hook] = []

    def add(self, hook: Any, first: bool) -> Callable[[], None]:
        """Add a hook; return a function that removes it, and the whole after the last one."""
        check_function("register_forward_pre_hook" if first else "register_forward_hook", hook)
        name, own = "_first" if first else "_last", partial(hook)  # the same may be there twice
        setattr(self, name, [*getattr(self, name), own])

        def remove() -> None:
            setattr(self, name, [hook for hook in getattr(self, name) if hook is not own])
            if not (self._first or self._last) and vars(self._module).get("forward") is self:
                del vars(self._module)["forward"]
                if self.own is not None:
                    vars(self._module)["forward"] = self.own

        return remove

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for before in self._first:
            given = before(self._module, args)
            if given is not None:
                args = given if isinstance(given, tuple) else (given,)
        forward = self.own or type(self._module).forward.__get__(self._module)
        y = forward(*args, **kwargs)
        for after in self._last:
            result = after(self._module, args, y)
            y = y if result is None else result
        return y


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Disable dropout and gradients in the `with` block; restore each module's mode after it.

    Args:
        model: the modules in it change their mode.

    Example:
        >>> model = tg.nn.Sequential(tg.nn.Linear(3, 2), tg.nn.Dropout(0.1))
        >>> with tg.nn.evaluating(model):
        ...     y = model(tg.ones((1, 3)))
        >>> y.requires_grad, model.training
        (False, True)
    """
    before = [(module, module.training) for module in _all_modules(model)]
    for module, _ in before:
        vars(module)["training"] = False
    changes.note_mode()
    try:
        with no_grad():
            yield
    finally:
        for module, training in before:
            vars(module)["training"] = training
        changes.note_mode()


def _all_modules(root: Module) -> list[Module]:
    """Return what `root.modules()` yields, in another order and in a third of the time."""
    found, seen = [root], {id(root)}
    for module in found:  # which grows meanwhile
        for value in vars(module).values():
            if isinstance(value, Module) and id(value) not in seen:
                seen.add(id(value))
                found.append(value)
    return found


def check_input(layer: Module, weight: Tensor, **inputs: Any) -> None:
    """Raise DtypeError for an input wider than the weight: it would widen later activations."""
    casts = mode.autocast is not None and mode.autocast.dtype is not None
    for name, x in inputs.items():
        dtype = getattr(x, "dtype", None)
        if dtype is weight.data.dtype or not isinstance(dtype, np.dtype) or not is_float(dtype):
            continue
        narrowed = casts and dtype != float64  # by the products
        if dtype.itemsize > weight.dtype.itemsize and not narrowed:
            raise DtypeError(
                f"{type(layer).__name__}: {name} has dtype {dtype}, expected {weight.dtype} as the "
                f'layer; convert it, {name}.astype("{weight.dtype}"), or the layer, .to("{dtype}")'
            )


def can_fuse(layer: Module, name: str) -> bool:
    """Whether a layer has a method, or a class attribute, that fused ops use beside its `forward`.

    False for a subclass that overrides `forward` alone: the inherited one fits another function.
    """
    return "forward" not in vars(layer) and _has_own(type(layer), name)  # type: ignore[arg-type]


@cache
def _has_own(kind: Any, name: str) -> bool:
    defining = (base for base in kind.__mro__ if vars(base).keys() & {name, "forward"})
    return name in vars(next(defining, object))


def add_branch(layer: Module, x: Any, residual: Any, dropout: Any = None) -> Tensor:
    """Return residual + dropout(layer(x)), fused where `forward` takes a `residual`."""
    y: Tensor
    if dropout is not None and dropout.drops:
        y = dropout.add(layer(x), residual)
    elif residual is None:
        y = layer(x)
    elif _takes_residual(getattr(layer.forward, "__func__", layer.forward)):
        y = layer(x, residual=residual)
    else:
        y = residual + layer(x)
    return y


@cache
def _takes_residual(forward: Callable[..., Any]) -> bool:
    return "residual" in inspect.signature(forward).parameters


def _holds_modules(value: Any) -> bool:
    """Whether a container holds a module or a parameter, at any depth."""
    inside = value.values() if isinstance(value, dict) else value
    return any(
        isinstance(one, (Module, Parameter))
        or (isinstance(one, _CONTAINERS) and _holds_modules(one))
        for one in inside
    )


def _once(named: Iterable[tuple[str, _Named]]) -> Iterator[tuple[str, _Named]]:
    seen: set[int] = set()
    for name, value in named:
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _trainable(module: Module) -> dict[str, Parameter]:
    """Return the parameters that a derivative by the module takes for its arguments."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _built(module: Module, tensors: Mapping[str, Tensor], how: trees.How) -> Any:
    """Return a module that holds tensors for its trainable parameters; see `trees.Container`.

    Results have zeros for frozen parameters; those of any shape are a dictionary.
    """
    if how == "plain":
        return dict(tensors)
    own = _trainable(module)
    by_id = {id(own[name]): x for name, x in tensors.items()}
    if how == "results":
        frozen = [p for p in module.parameters() if not p.requires_grad]
        by_id |= {id(p): Tensor(_zeros_like(p.data)) for p in frozen}
    return with_tensors(module, by_id, stands_in=how == "build")


def with_tensors(module: Module, tensors: Mapping[int, Tensor], stands_in: bool = False) -> Module:
    """Return a copy of a module that holds other tensors, by the id of each parameter.

    With `stands_in` it computes for the module, see `_with`, and its tensors require a gradient.
    """
    own = {id(p): p for p in module.parameters()}
    others = {key: _as_parameter(x, own[key]) for key, x in tensors.items() if key in own}
    for parameter in others.values():
        parameter.requires_grad |= stands_in
    return module._with(others, stands_in)


def _as_parameter(x: Tensor, like: Parameter) -> Parameter:
    """Return a tensor as a parameter of the class, with the attributes, of another one."""
    twin = copy(like)
    twin.data, twin.requires_grad, twin.node = x.data, x.requires_grad, x.node
    twin.gradient = twin.recompute = twin.hooks = None
    if hasattr(x, "tangents"):
        twin.tangents = x.tangents
    return twin


def _in_place_of(old: Tensor, x: Tensor) -> Tensor:
    """Return a tensor as a parameter where it replaces one; gradients of it go to the tensor."""
    if not isinstance(old, Parameter) or isinstance(x, Parameter):
        return x
    twin = _as_parameter(x, old)
    twin.node = edge_of(x) if x.requires_grad else None
    return twin


def _zeros_like(array: Array) -> Array:
    """Return zeros that take no memory."""
    xp = backend.namespace(array)
    return xp.broadcast_to(xp.zeros((), array.dtype), array.shape)


def _tensors_for(other: Any, module: Module) -> Mapping[str, Any] | None:
    """Return the tensors that stand for the trainable parameters of a module, by name.

    They are the parameters of another module, or those of a dictionary, where a parameter with
    several names may have any of them.
    """
    own, first = dict(module._all_parameters()), dict[int, str]()
    if isinstance(other, Module):
        frozen = {name for name, p in own.items() if not p.requires_grad}
        given = {name: x for name, x in other._all_parameters() if name not in frozen}
    elif isinstance(other, Mapping):
        given = dict(other)
    else:
        return None
    names = {name: first.setdefault(id(p), name) for name, p in own.items() if p.requires_grad}
    return {names.get(name, name): x for name, x in given.items()}


trees.register(Module, trees.Container(_trainable, _built, _tensors_for))


def _moved(array: Array, device: DtypeLike | None, dtype: Dtype | None) -> Array:
    if dtype is not None and is_float(array.dtype):
        array = array.astype(dtype, copy=False)
    return array if device is None else backend.to_device(array, str(device))


def _array_of(value: Any) -> Array:
    value = value.data if isinstance(value, Tensor) else value
    if backend.is_array(value):
        return value
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.asarray(None)


def _fits(array: Array, tensor: Tensor) -> bool:
    alike = is_float(array.dtype) == is_float(tensor.dtype) and array.dtype.kind not in "cOSUMm"
    if not alike or array.shape != tensor.shape:
        return False
    return is_float(array.dtype) or bool((array.astype(tensor.dtype) == array).all())


def _equal(one: Array, other: Array) -> bool:
    return np.array_equal(backend.to_numpy(one), backend.to_numpy(other))


def _listed(kind: str, names: list[str]) -> list[str]:
    """Return the clause of an error message that lists names; none without names."""
    if not names:
        return []
    more = len(names) - _MOST_NAMES
    listed = ", ".join(map(str, names[:_MOST_NAMES])) + (f" and {more} more" if more > 0 else "")
    return [f"{kind}: {listed}"]
