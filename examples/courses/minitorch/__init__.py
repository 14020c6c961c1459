"""The names of 11-868's minitorch, computed by tensorgrad: docs/guides/courses.md says how to run.

Put `examples/courses` first on PYTHONPATH, and `import minitorch` in the course's checkout finds
this package instead of the course's.
"""

from minitorch import cuda_ops, operators, scalar_functions
from minitorch.autodiff import *
from minitorch.fast_conv import *
from minitorch.module import *
from minitorch.modules_basic import *
from minitorch.modules_transformer import *
from minitorch.nn import *
from minitorch.operators import prod
from minitorch.optim import *
from minitorch.scalar import *
from minitorch.tensor import *
from minitorch.tensor_data import *
from minitorch.tensor_functions import *
from minitorch.tensor_ops import *
from minitorch.testing import MathTest, MathTestVariable

__all__ = ["MathTest", "MathTestVariable", "cuda_ops", "operators", "prod", "scalar_functions"]
