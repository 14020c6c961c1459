"""Every operation on tensors, one file a family. Each is also `tensorgrad.<name>`."""

from tensorgrad.ops import activation, elementwise
from tensorgrad.ops.activation import *
from tensorgrad.ops.elementwise import *

__all__: list[str] = []
__all__ += activation.__all__
__all__ += elementwise.__all__
