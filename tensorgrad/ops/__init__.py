"""Every operation on tensors, one file a family. Each is also `tensorgrad.<name>`."""

from tensorgrad.ops import activation, creation, elementwise, indexing, shape
from tensorgrad.ops import matmul as matmul_family  # `matmul` is the op
from tensorgrad.ops.activation import *
from tensorgrad.ops.creation import *
from tensorgrad.ops.elementwise import *
from tensorgrad.ops.indexing import *
from tensorgrad.ops.matmul import *
from tensorgrad.ops.shape import *

__all__: list[str] = []
__all__ += activation.__all__
__all__ += creation.__all__
__all__ += elementwise.__all__
__all__ += indexing.__all__
__all__ += matmul_family.__all__
__all__ += shape.__all__
