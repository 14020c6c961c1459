"""Functions of scalars, whose derivatives tensorgrad computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import minitorch
import tensorgrad as tg
from minitorch.autodiff import Context, Recording
from minitorch.tensor_ops import OPS

__all__ = [
    "EQ",
    "LT",
    "Add",
    "Exp",
    "Inv",
    "Log",
    "Mul",
    "Neg",
    "ReLU",
    "ScalarFunction",
    "Sigmoid",
]


class ScalarFunction:
    """A function of scalars: subclasses have static methods `forward` and `backward`."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    @classmethod
    def _backward(cls, ctx: Context, d_out: float) -> tuple[Any, ...]:
        derivatives = cls.backward(ctx, d_out)
        return derivatives if isinstance(derivatives, tuple) else (derivatives,)

    @classmethod
    def apply(cls, *vals: Any) -> Any:
        """Return the result for scalars or numbers, with its history."""
        scalar = minitorch.Scalar
        scalars = [v if isinstance(v, scalar) else scalar(v) for v in vals]
        ctx = Context()
        result = cls.forward(ctx, *[s.data for s in scalars])
        return scalar(result, minitorch.ScalarHistory(cls, ctx, scalars))


class Computed(ScalarFunction):
    """A function of scalars that is an op of tensorgrad, in float64."""

    op: str

    @classmethod
    def forward(cls, ctx: Context, *values: float) -> float:
        """Return the result of the op."""
        recording = Recording(OPS[cls.op], [tg.Tensor(np.array(v, np.float64)) for v in values])
        ctx.save_for_backward(recording)
        return float(recording.output)

    @classmethod
    def backward(cls, ctx: Context, d_output: float) -> tuple[float, ...]:
        """Return the derivative of each argument."""
        (recording,) = ctx.saved_values
        return tuple(map(float, recording.gradients(tg.Tensor(np.array(d_output, np.float64)))))


class Add(Computed):
    """a + b."""

    op = "add_zip"


class Mul(Computed):
    """a b."""

    op = "mul_zip"


class Inv(Computed):
    """1 / a."""

    op = "inv_map"


class Neg(Computed):
    """-a."""

    op = "neg_map"


class Log(Computed):
    """log(a + 1e-6)."""

    op = "log_map"


class Exp(Computed):
    """exp(a)."""

    op = "exp_map"


class Sigmoid(Computed):
    """1 / (1 + exp(-a))."""

    op = "sigmoid_map"


class ReLU(Computed):
    """max(a, 0)."""

    op = "relu_map"


class LT(Computed):
    """1.0 where a < b, otherwise 0.0; its derivatives are 0."""

    op = "lt_zip"


class EQ(Computed):
    """1.0 where a equals b, otherwise 0.0; its derivatives are 0."""

    op = "eq_zip"
