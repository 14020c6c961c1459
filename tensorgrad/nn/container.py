"""Containers: a list of modules, and modules called in sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, overload

from tensorgrad.checks import check_integer
from tensorgrad.errors import DtypeError, OutOfRangeError
from tensorgrad.nn.module import Module


class ModuleList(Module):
    """A list of modules; they are children with the names "0", "1" and so on.

    Args:
        modules: the first members.
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self.extend(modules)

    def append(self, module: Module) -> ModuleList:
        """Add a module at the end; return self."""
        setattr(self, str(len(self)), self._checked(module))
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
        setattr(self, self._name(index), self._checked(module))

    def _checked(self, module: Module) -> Module:
        if not isinstance(module, Module):
            kind = type(module).__name__
            raise DtypeError(f"{type(self).__name__}: got a {kind}, expected a Module")
        return module

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
    """

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, x: Any) -> Any:
        """Return the result of the last module."""
        for module in self:
            x = module(x)
        return x
