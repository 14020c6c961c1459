"""Exceptions of tensorgrad. Messages read `op: argument has got, expected what`.

Each class also derives from the matching built-in exception: `except ValueError` catches a
ShapeError.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError", "CheckpointError", "CommError", "DamagedError", "DataError", "DeviceError",
    "DtypeError", "GradError", "GraphError", "IndexShapeError", "KernelError", "OutOfRangeError",
    "ShapeError", "TensorgradError", "TrainingError", "WideningWarning",
]  # fmt: skip


class TensorgradError(Exception):
    """Base of all exceptions of tensorgrad."""


class ArgumentError(TensorgradError, ValueError):
    """An argument or option has a value outside its range."""


class OutOfRangeError(ArgumentError, IndexError):
    """An index is outside its axis, or an array lacks an axis."""


class ShapeError(TensorgradError, ValueError):
    """Shapes do not fit together."""


class IndexShapeError(ShapeError, IndexError):
    """An index has more axes than the array, or is a mask of another shape."""


class DtypeError(TensorgradError, TypeError):
    """An array has a dtype that the operation does not support."""


class DeviceError(TensorgradError, RuntimeError):
    """Arrays of one operation are on different devices, or a device does not exist."""


class GradError(TensorgradError, RuntimeError):
    """A gradient cannot be computed."""


class GraphError(TensorgradError, RuntimeError):
    """A step cannot be captured into a CUDA graph."""


class KernelError(TensorgradError, RuntimeError):
    """A CUDA kernel does not compile or launch."""


class DataError(TensorgradError, ValueError):
    """Text, tokens or a data set are invalid."""


class CheckpointError(TensorgradError, RuntimeError):
    """A checkpoint cannot be written or read, or belongs to another model or run."""


class DamagedError(CheckpointError):
    """A checkpoint is damaged: a file is missing or its content has changed."""


class TrainingError(TensorgradError, ArithmeticError):
    """A loss or gradient is not finite."""


class CommError(TensorgradError, RuntimeError):
    """Ranks cannot start, agree or reach each other."""


class WideningWarning(UserWarning):
    """Integers beside float32 or 16-bit floats make a result float64, as in NumPy."""


for _name in __all__:
    globals()[_name].__module__ = "tensorgrad.errors"  # which is public
