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
from tensorgrad.curvature.operators import Values
from tensorgrad.io.readers import read_json

FILE = "curvature.json"
MATRICES = {"hessian": "Hessian", "gauss-newton": "Gauss-Newton matrix", "fisher": "Fisher matrix"}
_NUMBERS = 100_000  # that are read of each kind
_LARGEST = 2**53  # whole number that JSON has exactly
_SMALLEST = 1e-30  # absolute value of a node that is not taken for 0


@dataclass(frozen=True)
class Curvature:
    """The content of curvature.json; what it does not know is NaN.

    Attributes:
        matrix: the name of the matrix.
        batches: the number of batches.
        steps: (C,), of the checkpoints, one or more.
        values, residuals: (C, k), the largest eigenvalues, the largest first, and their errors.
        losses, thresholds: (C,), the loss of the batches, and 2 / learning rate.
        density: at the last checkpoint; None: it was not measured.
        density_step, trace, trace_error: of the density.
    """

    matrix: str
    batches: int
    steps: np.ndarray[Any, np.dtype[np.int64]]
    values: Values
    residuals: Values
    losses: Values
    thresholds: Values
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
    content = read_json(path)
    try:
        return _curvature(content)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is damaged, expected a file of tensorgrad curvature: {error!r:.200}"
        ) from error


def _curvature(content: Mapping[str, Any]) -> Curvature:
    if content["format"] != 1:
        raise ValueError(f"format is {content['format']!r:.40}, expected 1")
    options, density, checkpoints = content["options"], content["density"], content["checkpoints"]
    names = "values", "residuals", "loss", "learning_rate"
    values, residuals, losses, rates = (
        _numbers([one[name] for one in checkpoints], 2 - (place > 1))
        for place, name in enumerate(names)
    )
    steps = np.array([_whole(one["step"]) for one in checkpoints])
    thresholds = np.where(rates > 0, 2 / np.where(rates > 0, rates, 1), np.nan)
    if values.shape != residuals.shape:
        raise ValueError(f"values have shape {values.shape} and residuals {residuals.shape}")
    known = MATRICES[options["matrix"]], _whole(options["batches"]), steps, values, residuals
    if density is None:
        return Curvature(*known, losses, thresholds)
    nodes, weights = _numbers(density["nodes"], 2), _numbers(density["weights"], 2)
    limits = _SMALLEST, 1 / _SMALLEST  # so that squares and quotients are finite too
    nodes[np.abs(nodes) < limits[0]] = 0
    is_finite = nodes.shape == weights.shape and (np.abs([nodes, weights]) < limits[1]).all()
    if len(nodes) < 2 or not is_finite:
        raise ValueError(f"nodes have shape {nodes.shape}, expected finite ones with weights")
    trace, error = _numbers([density["trace"], density["trace_error"]], 1).tolist()
    whole = Density(nodes, weights, _whole(content["parameters"]), nodes.size)
    return Curvature(*known, losses, thresholds, whole, _whole(density["step"]), trace, error)


def _numbers(values: Any, axes: int) -> Values:
    """Return numbers of JSON as an array with so many axes; null becomes NaN."""
    array = np.array(values, np.float64)
    if array.ndim != axes or not 0 < array.size <= _NUMBERS:
        raise ValueError(f"numbers have shape {array.shape}, expected {axes} axes")
    array[~np.isfinite(array)] = np.nan
    return array


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"got {value!r:.40}, expected a whole number")
    return value
