"""Restoring a model from saved sizes and arrays, which are compared before anything is allocated.

Damaged sizes may ask for a model larger than any memory; the arrays of a file are at most as large
as the file. Tests: tests/models/test_restore.py.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from tensorgrad.core.backend import Array
from tensorgrad.core.errors import ArgumentError, CheckpointError
from tensorgrad.nn import Module
from tensorgrad.nn.init import skipped

__all__ = ["Config", "check_building", "config_of", "restore"]

# Blocks take memory and time besides that of their parameters, which may be few.
_MOST_LAYERS = 1000


class Config(Protocol):
    """The sizes of a model: a dataclass that knows the number of parameters."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def parameters(self) -> int:
        """The number of parameters, each counted once."""


_AnyConfig = TypeVar("_AnyConfig", bound=Config)
_AnyModel = TypeVar("_AnyModel", bound=Module)


def restore(
    make: Callable[[_AnyConfig], _AnyModel],
    kind: type[_AnyConfig],
    sizes: object,
    arrays: Mapping[str, Array],
    name: str,
) -> _AnyModel:
    """Restore a model from saved sizes and arrays, on the CPU.

    Args:
        make: the model's class.
        kind: the class of its sizes.
        sizes: the fields of `kind`, as parsed from JSON.
        arrays: the parameters and buffers by name.
        name: the path of their file, for errors.

    Returns:
        The model, in training mode.

    Raises:
        CheckpointError: the sizes are those of a different kind of model, or do not fit the arrays.

    Example:
        >>> from dataclasses import asdict
        >>> from tensorgrad.models import GPT2, GPT2Config
        >>> from tensorgrad.models.restore import restore
        >>> saved = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
        >>> sizes, arrays = asdict(saved.config), saved.state_dict()
        >>> restore(GPT2, GPT2Config, sizes, arrays, "model.safetensors").config.width
        8
    """
    config = config_of(kind, sizes, name)
    found = sum(array.size for array in arrays.values())
    if found != config.parameters:
        raise CheckpointError(
            f"load: {name} has arrays of {found:,} elements in all, expected "
            f"{config.parameters:,}, as its sizes say: {sizes!r:.300}"
        )
    try:
        check_building(config)
    except ArgumentError as error:
        raise CheckpointError(f"load: {name}: {error}") from error
    with skipped():
        model = make(config)
    try:
        model.load_state_dict(arrays)
    except CheckpointError as error:
        raise CheckpointError(f"load: {name}: {error}") from error
    return model


def check_building(config: Config) -> None:
    """Raise ArgumentError where a model could not be built on this machine.

    Its parameters alone must fit into the memory, and its layers be 1,000 at most.

    Args:
        config: the sizes of a model.

    Example:
        >>> from tensorgrad.models.restore import check_building
        >>> check_building(tg.models.GPT2Config(layers=2000))
        Traceback (most recent call last):
            ...
        tensorgrad.errors.ArgumentError: layers is 2,000, expected at most 1,000
    """
    layers = getattr(config, "layers", 0)
    if layers > _MOST_LAYERS:
        raise ArgumentError(f"layers is {layers:,}, expected at most {_MOST_LAYERS:,}")
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # another system
        return
    if 4 * config.parameters > memory:
        raise ArgumentError(
            f"the model has {config.parameters:,} parameters, which need "
            f"{4 * config.parameters / 1e9:,.0f} GB; expected a model for the {memory / 1e9:,.0f} "
            "GB of this machine"
        )


def config_of(kind: type[_AnyConfig], sizes: object, name: str) -> _AnyConfig:
    """Return the dataclass of sizes that were parsed from JSON.

    Args:
        kind: the dataclass.
        sizes: its fields by name; fields with a default may be missing.
        name: the path of the file, for errors.

    Returns:
        The sizes.

    Raises:
        CheckpointError: a field is missing, unknown, of another type or out of its range.

    Example:
        >>> from tensorgrad.models import GPT2Config, config_of
        >>> config_of(GPT2Config, {"layers": 2, "heads": 2, "width": 64}, "config.json").parameters
        3382080
    """
    if not isinstance(sizes, Mapping):
        raise CheckpointError(f"load: {name} has the sizes {sizes!r:.80}, expected a mapping")
    hints = get_type_hints(kind)
    unknown = [key for key in sizes if key not in hints]
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in sizes]
    if unknown or missing:
        raise CheckpointError(
            f"load: {name} is a different kind of model, expected a "
            f"{kind.__name__.removesuffix('Config')}: its sizes lack {missing} and have "
            f"{unknown!r:.200}"
        )
    nested = {
        key: config_of(found, value, f"{name}: {key}")
        for key, value in sizes.items()
        if isinstance(value, Mapping) and (found := _dataclass_in(hints[key])) is not None
    }
    sizes = {**sizes, **nested}
    for key, value in sizes.items():
        if type(value) not in _types(hints[key]):
            expected = " or ".join(sorted(kind.__name__ for kind in _types(hints[key])))
            raise CheckpointError(f"load: {name}: {key} is {value!r:.80}, expected {expected}")
    try:
        return kind(**sizes)
    except ArgumentError as error:
        raise CheckpointError(f"load: {name}: {error}") from error


def _dataclass_in(hint: Any) -> Any:
    """Return the dataclass that a field may have; None where there is none."""
    return next((kind for kind in _types(hint) if is_dataclass(kind)), None)


def _types(hint: Any) -> set[type[Any]]:
    """Return the types that JSON may have for a field: for a float also int."""
    whole = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    return {*whole, *({int} if float in whole else {})}
