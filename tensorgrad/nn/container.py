"""Containers: a list and a dict of modules, and modules called in sequence."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, overload

from tensorgrad.core.checks import check_integer
from tensorgrad.core.errors import ArgumentError, DtypeError, OutOfRangeError
from tensorgrad.core.tensor import Tensor
from tensorgrad.nn.module import Module


class ModuleList(Module):
    """A list of modules; they are children with the names "0", "1" and so on.

    Args:
        modules: the first members; None: there are none yet.

    Example:
        >>> layers = tg.nn.ModuleList(tg.nn.Linear(3, 3) for _ in range(2))
        >>> [name for name, _ in layers.named_parameters()]
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """

    def __init__(self, modules: Iterable[Module] | None = None) -> None:
        self.extend(() if modules is None else modules)

    def append(self, module: Module) -> ModuleList:
        """Add a module at the end; return self."""
        setattr(self, str(len(self)), _checked(self, module))
        return self

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        """Add modules at the end; return self."""
        for module in modules:
            self.append(module)
        return self

    def __len__(self) -> int:
        return sum(name.isdigit() for name in vars(self))

    def __iter__(self) -> Iterator[Module]:
        return (vars(self)[str(i)] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Module: ...
    @overload
    def __getitem__(self, index: slice) -> list[Module]: ...
    def __getitem__(self, index: int | slice) -> Module | list[Module]:
        if isinstance(index, slice):
            return list(self)[index]
        return vars(self)[self._name(index)]  # type: ignore[no-any-return]  # a Module

    def __setitem__(self, index: int, module: Module) -> None:
        setattr(self, self._name(index), _checked(self, module))

    def _name(self, index: int) -> str:
        check_integer(type(self).__name__, "index", index)
        if not -len(self) <= index < len(self):
            raise OutOfRangeError(
                f"{type(self).__name__}: index is {index}, expected {-len(self)} to {len(self) - 1}"
            )
        return str(index % len(self))


class Sequential(ModuleList):
    """Modules called in order, each with the result of the previous one.

    Args:
        modules: in the order of the calls.

    Example:
        >>> model = tg.nn.Sequential(tg.nn.Linear(3, 8), tg.nn.ReLU(), tg.nn.Linear(8, 2))
        >>> model(tg.ones((5, 3))).shape
        (5, 2)
    """

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, x: Any) -> Tensor:
        """Return the result of the last module."""
        for module in self:
            x = module(x)
        result: Tensor = x
        return result


class ModuleDict(Module):
    """Modules by name, in the order of their first assignment; the names are those of the children.

    Args:
        modules: the first members.

    Raises:
        ArgumentError: a name is not text, is empty, has a dot, or is that of an attribute.
        DtypeError: a member is not a module.

    Example:
        >>> heads = tg.nn.ModuleDict({"tags": tg.nn.Linear(8, 5), "words": tg.nn.Linear(8, 100)})
        >>> heads["tags"](tg.ones((2, 8))).shape
        (2, 5)
    """

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        self.update(modules or {})

    def update(self, modules: Mapping[str, Module]) -> ModuleDict:
        """Add or replace members; return self."""
        for name, module in modules.items():
            self[name] = module
        return self

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._children().keys()

    def values(self) -> ValuesView[Module]:
        """Return the modules."""
        return self._children().values()

    def items(self) -> ItemsView[str, Module]:
        """Return pairs of a name and a module."""
        return self._children().items()

    def __len__(self) -> int:
        return len(self._children())

    def __iter__(self) -> Iterator[str]:
        return iter(self._children())

    def __contains__(self, name: object) -> bool:
        return name in self._children()

    def __getitem__(self, name: str) -> Module:
        """Return a member; KeyError where there is none."""
        return self._children()[name]

    def __setitem__(self, name: str, module: Module) -> None:
        taken = isinstance(name, str) and name not in self and hasattr(self, name)
        if not isinstance(name, str) or not name or "." in name or taken:
            raise ArgumentError(
                f"ModuleDict: name is {name!r}, expected text without dots that is not an attribute"
            )
        setattr(self, name, _checked(self, module))

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        delattr(self, name)

    def _children(self) -> dict[str, Module]:
        return dict(self._members(Module))


def _checked(container: Module, module: Module) -> Module:
    if not isinstance(module, Module):
        kind = type(module).__name__
        raise DtypeError(f"{type(container).__name__}: got a {kind}, expected a Module")
    return module
