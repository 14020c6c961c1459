"""A NumPy-style array library with automatic differentiation, on NumPy and CuPy."""

from tensorgrad import ops, optim
from tensorgrad.autograd import grad, no_grad, on_grad_ready, value_and_grad
from tensorgrad.ops import *
from tensorgrad.tensor import Tensor

__all__ = ["Tensor", "grad", "no_grad", "on_grad_ready", "optim", "value_and_grad"]
__all__ += ops.__all__
