"""Tensors in einops: its backend for them, which exists once einops is imported.

einops finds backends among the subclasses of its own class, and has no other registry. So where it
is imported after this library, a hook of the import system defines the subclass. Nothing here
imports einops. Tests: tests/parity/test_friends.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from tensorgrad.core.dtypes import is_float
from tensorgrad.core.tensor import Tensor

_BACKENDS = "einops._backends"


def register() -> None:
    """Let einops know tensors, now or when it is imported."""
    if _BACKENDS in sys.modules:
        _define(sys.modules[_BACKENDS])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds modules as the others do, and adds the backend to that of einops."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None for any other module, which lets the next finder look."""
        if name != _BACKENDS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _define(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _define(module: ModuleType) -> None:
    """Define the backend, a subclass of einops's, which is how einops finds it."""
    base: Any = module.AbstractBackend

    class TensorgradBackend(base):  # type: ignore[misc]
        framework_name = "tensorgrad"

        def is_appropriate_type(self, tensor: object) -> bool:
            return isinstance(tensor, Tensor)

        def from_numpy(self, x: Any) -> Tensor:
            return Tensor(x)

        def to_numpy(self, x: Tensor) -> Any:
            return x.numpy()

        def arange(self, start: int, stop: int) -> Tensor:
            return _functions().arange(start, stop)  # type: ignore[no-any-return]

        def stack_on_zeroth_dimension(self, tensors: Sequence[Tensor]) -> Tensor:
            return _functions().stack(tensors)  # type: ignore[no-any-return]

        def add_axis(self, x: Tensor, new_position: int) -> Tensor:
            return x.unsqueeze(new_position)

        def tile(self, x: Tensor, repeats: Sequence[int]) -> Tensor:
            return _functions().tile(x, tuple(repeats))  # type: ignore[no-any-return]

        def concat(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
            return _functions().concatenate(tensors, axis)  # type: ignore[no-any-return]

        def is_float_type(self, x: Tensor) -> bool:
            return is_float(x.dtype)

        def einsum(self, pattern: str, *x: Tensor) -> Tensor:
            return _functions().einsum(pattern, *x)  # type: ignore[no-any-return]

    module.TensorgradBackend = TensorgradBackend  # type: ignore[attr-defined]  # or it is collected


def _functions() -> Any:
    return sys.modules["tensorgrad"]
