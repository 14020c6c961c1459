"""What tensorgrad raises. Every message reads `op: argument has got, expected what`.

Each class is also the built-in exception that a caller would expect, so `except ValueError`
catches a wrong shape.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "CommError",
    "DataError",
    "DeviceError",
    "DtypeError",
    "GradError",
    "KernelError",
    "OutOfRangeError",
    "ShapeError",
    "TensorgradError",
    "TrainingError",
]


class TensorgradError(Exception):
    """Base of every error that tensorgrad raises on purpose."""


class ArgumentError(TensorgradError, ValueError):
    """An argument or option has a value outside its range."""


class OutOfRangeError(ArgumentError, IndexError):
    """An index points outside its axis."""


class ShapeError(TensorgradError, ValueError):
    """Shapes do not fit together."""


class DtypeError(TensorgradError, TypeError):
    """An array has a dtype that the operation does not take."""


class DeviceError(TensorgradError, RuntimeError):
    """Arrays of one operation live on different devices, or the device is missing."""


class GradError(TensorgradError, RuntimeError):
    """The gradient that was asked for does not exist."""


class KernelError(TensorgradError, RuntimeError):
    """A CUDA kernel does not compile or launch."""


class DataError(TensorgradError, ValueError):
    """Text, tokens or a data set cannot be used as they are."""


class CheckpointError(TensorgradError, RuntimeError):
    """A checkpoint cannot be written or read, is damaged, or belongs to another model or run."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written: a file of it is missing or has other content."""


class TrainingError(TensorgradError, ArithmeticError):
    """A loss or gradient is not a finite number."""


class CommError(TensorgradError, RuntimeError):
    """Ranks cannot start, agree or reach each other."""
