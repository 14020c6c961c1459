"""The module in which the course has the functions of scalars; those of tensors serve here too."""

from minitorch.scalar import ScalarFunction
from minitorch.tensor_functions import EQ, LT, Add, Exp, Inv, Log, Mul, Neg, ReLU, Sigmoid

__all__ = [
    "EQ", "LT", "Add", "Exp", "Inv", "Log", "Mul", "Neg", "ReLU", "ScalarFunction", "Sigmoid",
]  # fmt: skip
