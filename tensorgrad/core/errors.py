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
    """Base of all exceptions of tensorgrad.

    Example:
        >>> try:
        ...     tg.zeros(3)[5]
        ... except tg.errors.TensorgradError as error:
        ...     print(type(error).__name__)
        OutOfRangeError
    """


class ArgumentError(TensorgradError, ValueError):
    """An argument or option has a value outside its range.

    Example:
        >>> try:
        ...     tg.optim.SGD([tg.ones(2, requires_grad=True)], lr=-1)
        ... except tg.errors.ArgumentError as error:
        ...     print(error)
        SGD: lr is -1, expected a finite number from 0
    """


class OutOfRangeError(ArgumentError, IndexError):
    """An index is outside its axis, or an array lacks an axis.

    Example:
        >>> try:
        ...     tg.zeros(3)[5]
        ... except tg.errors.OutOfRangeError as error:
        ...     print(error)
        getitem: got index 5 for axis 0, expected -3 to 2 (x is (3,))
    """


class ShapeError(TensorgradError, ValueError):
    """Shapes do not fit together.

    Example:
        >>> try:
        ...     tg.zeros((2, 3)) @ tg.zeros((2, 3))
        ... except tg.errors.ShapeError as error:
        ...     print(error)
        matmul: b has shape (2, 3), expected 3 in axis -2 as a has shape (2, 3)
    """


class IndexShapeError(ShapeError, IndexError):
    """An index has more axes than the array, or is a mask of another shape.

    Example:
        >>> try:
        ...     tg.zeros(3)[0, 0]
        ... except tg.errors.IndexShapeError as error:
        ...     print(error)
        getitem: the index has 2 axes, expected at most 1 (x is (3,))
    """


class DtypeError(TensorgradError, TypeError):
    """An array has a dtype that the operation does not support.

    Example:
        >>> try:
        ...     tg.tensor([1, 2], requires_grad=True)
        ... except tg.errors.DtypeError as error:
        ...     print(error)
        tensor: got dtype int64 with requires_grad, expected a float
    """


class DeviceError(TensorgradError, RuntimeError):
    """Arrays of one operation are on different devices, or a device does not exist.

    Example:
        >>> try:
        ...     tg.zeros(3, device="tpu")
        ... except tg.errors.DeviceError as error:
        ...     print(error)
        device: got 'tpu', expected 'cpu', 'cuda' or 'cuda:N'
    """


class GradError(TensorgradError, RuntimeError):
    """A gradient cannot be computed.

    Example:
        >>> try:
        ...     tg.ones(2, requires_grad=True).exp().backward()
        ... except tg.errors.GradError as error:
        ...     print(error)
        backward: dy is missing; only a scalar starts at 1, got (2,)
    """


class GraphError(TensorgradError, RuntimeError):
    """A step cannot be captured into a CUDA graph.

    Example:
        >>> try:  # doctest: +SKIP
        ...     step = tg.graph.capture(lambda x: x * x.item(), "cuda")  # reads the host
        ...     step(x)
        ... except tg.errors.GraphError as error:
        ...     print(error)
    """


class KernelError(TensorgradError, RuntimeError):
    """A CUDA kernel does not compile or launch.

    Example:
        >>> try:
        ...     tg.cuda_kernel("void scale() {}", "scale", reference=np.add)
        ... except tg.errors.KernelError as error:
        ...     print(error)
        cuda_kernel: the source has no `__global__ void scale(...)`, expected that of name
    """


class DataError(TensorgradError, ValueError):
    """Text, tokens or a data set are invalid.

    Example:
        >>> try:
        ...     tg.data.Tokenizer.train([], 260)
        ... except tg.errors.DataError as error:
        ...     print(error)
        Tokenizer.train: documents has no text, expected some
    """


class CheckpointError(TensorgradError, RuntimeError):
    """A checkpoint cannot be written or read, or belongs to another model or run.

    Example:
        >>> model = tg.nn.Linear(2, 3)
        >>> try:
        ...     model.load_state_dict({"weight": tg.zeros((3, 2))})
        ... except tg.errors.CheckpointError as error:
        ...     print(error)
        load_state_dict: missing: bias
    """


class DamagedError(CheckpointError):
    """A checkpoint is damaged: a file is missing or its content has changed.

    Example:
        >>> try:
        ...     tg.train.load_checkpoint("no_such_folder")
        ... except tg.errors.DamagedError as error:
        ...     print(error)
        load: no_such_folder has no state.json, expected a checkpoint
    """


class TrainingError(TensorgradError, ArithmeticError):
    """A loss or gradient is not finite.

    Example:
        >>> try:  # doctest: +SKIP
        ...     trainer.run()
        ... except tg.errors.TrainingError as error:  # names the step and the last good checkpoint
        ...     print(error)
    """


class CommError(TensorgradError, RuntimeError):
    """Ranks cannot start, agree or reach each other.

    Example:
        >>> try:  # doctest: +SKIP
        ...     tg.parallel.world().all_reduce(gradients)  # another rank has exited
        ... except tg.errors.CommError as error:
        ...     print(error)
    """


class WideningWarning(UserWarning):
    """Integers beside float32 or 16-bit floats make a result float64, as in NumPy.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", tg.errors.WideningWarning)
        ...     (tg.ones(2) + tg.arange(2)).dtype
        dtype('float64')
    """


for _name in __all__:
    globals()[_name].__module__ = "tensorgrad.errors"  # which is public
