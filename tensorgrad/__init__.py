"""A NumPy-style array library with automatic differentiation, on NumPy and CuPy."""

from pathlib import Path

from tensorgrad import nn, ops, optim
from tensorgrad.autograd import grad, no_grad, on_grad_ready, value_and_grad
from tensorgrad.ops import *
from tensorgrad.recompute import checkpoint
from tensorgrad.tensor import Tensor

__all__ = [
    "Tensor",
    "checkpoint",
    "grad",
    "nn",
    "no_grad",
    "on_grad_ready",
    "optim",
    "value_and_grad",
]
__all__ += ops.__all__

if not Path(__file__).with_name("models").is_dir():
    # A checkout or archive without symbolic links: the folders of the root hold these packages.
    __path__.append(str(Path(__file__).parent.parent))
