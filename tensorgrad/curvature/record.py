"""curvature.json of a run: eigenvalues at its checkpoints, and a spectral density.

runs.py makes its content. The file is untrusted when it is read, as every file of a run. Tests:
tests/report/test_curvature.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.core.errors import DataError
from tensorgrad.curvature.estimates import Density
from tensorgrad.io.readers import read_json

FILE = "curvature.json"
MATRICES = {"hessian": "Hessian", "gauss-newton": "Gauss-Newton matrix", "fisher": "Fisher matrix"}
_ROWS, _VALUES = 1000, 20  # checkpoints, and eigenvalues of each, that are read
_NODES = 100_000  # nodes of a density at most
_LARGEST = 2**53  # whole number that JSON has exactly


@dataclass(frozen=True)
class CheckpointCurvature:
    """The eigenvalues at a checkpoint.

    Attributes:
        step: of the checkpoint.
        values, residuals: the largest eigenvalues, the largest first, and how exact they are.
        loss, learning_rate: of the same batches, and of the last step; NaN where unknown.
    """

    step: int
    values: tuple[float, ...]
    residuals: tuple[float, ...]
    loss: float
    learning_rate: float

    @property
    def threshold(self) -> float:
        """2 / learning rate; NaN where that is unknown or 0."""
        return 2 / self.learning_rate if self.learning_rate > 0 else math.nan


@dataclass(frozen=True)
class Curvature:
    """The content of curvature.json.

    Attributes:
        matrix: what it is of, in words.
        batches: the number of batches.
        checkpoints: one or more, by step.
        density: at the last one; None: it was not measured.
        density_step, trace, trace_error: of the density.
    """

    matrix: str
    batches: int
    checkpoints: tuple[CheckpointCurvature, ...]
    density: Density | None = None
    density_step: int = 0
    trace: float = math.nan
    trace_error: float = math.nan


def read_curvature(path: Path) -> Curvature:
    """Return the content of curvature.json.

    Raises:
        DataError: it is not such a file.
        OSError: it is missing or cannot be read.
    """
    found = read_json(path)
    try:
        return _curvature(found)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is damaged, expected a file of tensorgrad curvature: {error!r:.200}"
        ) from error


def _curvature(found: Mapping[str, Any]) -> Curvature:
    if found["format"] != 1:
        raise ValueError(f"format is {found['format']!r:.40}, expected 1")
    checkpoints = [_checkpoint(one) for one in found["checkpoints"][-_ROWS:]]
    if not checkpoints:
        raise ValueError("checkpoints is empty, expected one or more")
    options, density = found["options"], found["density"]
    matrix = MATRICES[options["matrix"]]
    whole = Curvature(matrix, _count(options["batches"]), tuple(checkpoints))
    if density is None:
        return whole
    nodes, weights = (np.array(density[name], np.float64) for name in ("nodes", "weights"))
    is_table = nodes.ndim == 2 and nodes.shape == weights.shape and len(nodes) > 1
    if not is_table or not nodes.size <= _NODES or not np.isfinite([nodes, weights]).all():
        raise ValueError(f"nodes have shape {nodes.shape}, expected finite ones with weights")
    size = _count(found["parameters"])
    return Curvature(
        matrix,
        whole.batches,
        whole.checkpoints,
        Density(nodes, weights, size, nodes.size),
        _count(density["step"]),
        _number(density["trace"]),
        _number(density["trace_error"]),
    )


def _checkpoint(found: Mapping[str, Any]) -> CheckpointCurvature:
    values, residuals = (
        tuple(map(_number, found[name][:_VALUES])) for name in ("values", "residuals")
    )
    if not len(values) == len(residuals) > 0:
        raise ValueError(f"{len(values)} values, expected as many residuals, and one or more")
    numbers = (_number(found[name]) for name in ("loss", "learning_rate"))
    return CheckpointCurvature(_count(found["step"]), values, residuals, *numbers)


def _number(value: Any) -> float:
    """Return a number of JSON; NaN for null."""
    return math.nan if value is None else float(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"got {value!r:.40}, expected a whole number")
    return value
