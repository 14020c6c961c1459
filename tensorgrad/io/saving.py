"""`save` and `load`: (nested) dictionaries of tensors and settings in one safetensors file.

Tests: tests/io/test_saving.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.errors import ArgumentError, DamagedError, DataError, DtypeError
from tensorgrad.core.tensor import Tensor
from tensorgrad.io.files import to_json
from tensorgrad.io.readers import JSON_DEPTH, parse_json

__all__ = ["load", "save"]
_TREE = "tensorgrad"  # the header entry with all that is not an array


def save(values: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write tensors and settings to a safetensors file, which is replaced atomically.

    Other programs read the tensors of nested dictionaries as "model/0.weight" and so on.

    Args:
        values: tensors, arrays, numbers, texts, None and dictionaries of them by name.
        path: the file; its folder must exist.

    Raises:
        ArgumentError: values is not a dictionary (the path comes second), a name is not text, two
            names lead to the same path, or a number is not finite or does not fit 64 bits.
        DtypeError: a value has another type.
        CheckpointError: the file cannot be written; an existing one is unchanged.

    Example:
        >>> model = tg.nn.Linear(2, 3)
        >>> tg.save({"model": model.state_dict(), "step": 100}, "run.safetensors")
        >>> tg.load("run.safetensors")["step"]
        100
    """
    from tensorgrad.io.weights import save_arrays

    if not isinstance(values, Mapping):
        raise ArgumentError(
            f"save: values is a {type(values).__name__}, expected a dictionary, such as "
            "model.state_dict(), and then the path"
        )
    _check_path("save", path)
    arrays: dict[str, Any] = {}
    try:
        tree = to_json(_split(values, "", arrays), op="save")
    except RecursionError as error:
        raise ArgumentError(
            f"save: values is nested more than {JSON_DEPTH} deep, expected less"
        ) from error
    save_arrays(path, arrays, {_TREE: tree})


def load(path: str | os.PathLike[str], device: str = "cpu") -> dict[str, Any]:
    """Return what `save` wrote, or all tensors of another safetensors file by name.

    Args:
        path: the file. Nothing in it is run.
        device: the device of the tensors: "cpu", "cuda" or "cuda:N".

    Returns:
        The dictionary given to `save`, with tensors in place of arrays.

    Raises:
        DamagedError: the file is truncated, not a safetensors file, or has another CRC-32.
        CheckpointError: it is missing or cannot be read.
        DeviceError: there is no such device here.

    Example:
        >>> tg.save({"mean": tg.tensor([1.0, 2.0]), "count": 9}, "statistics.safetensors")
        >>> tg.load("statistics.safetensors")
        {'mean': tensor([1., 2.], dtype=float32), 'count': 9}
    """
    from tensorgrad.io.weights import load_arrays, load_metadata

    _check_path("load", path)

    tensors = {
        name: Tensor(backend.to_device(array, device)) for name, array in load_arrays(path).items()
    }
    text = load_metadata(path).get(_TREE)
    if text is None:
        return tensors
    try:
        return {
            name: _join(item, tensors) for name, item in parse_json(text, os.fspath(path)).items()
        }
    except (DataError, KeyError, TypeError) as error:
        raise DamagedError(f"load: {path}: its tree is damaged: {error!s:.80}") from error


def _check_path(op: str, path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"{op}: path is {path!r:.80}, expected a str or a Path")


def _split(value: Any, path: str, arrays: dict[str, Any]) -> Any:
    """Put the arrays of a tree into a flat dictionary; return the tree with [path] for each."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ArgumentError(
                    f"save: {path or 'values'} has the name {name!r}, expected text"
                )
        return {
            name: _split(item, f"{path}/{name}" if path else name, arrays)
            for name, item in value.items()
        }
    if isinstance(value, Tensor) or backend.is_array(value):
        if path in arrays:
            raise ArgumentError(f"save: two tensors have the path {path!r}, expected one")
        arrays[path] = value.data if isinstance(value, Tensor) else value
        return [path]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise DtypeError(
        f"save: {path} has type {type(value).__name__}, expected a tensor, array, number, text or "
        "dictionary of them"
    )


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a tree with the tensors in the places of their paths."""
    if isinstance(value, dict):
        return {name: _join(item, tensors) for name, item in value.items()}
    return tensors[value[0]] if isinstance(value, list) else value
