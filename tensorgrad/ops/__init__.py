"""Every operation on tensors, one file a family. Each is also `tensorgrad.<name>`."""

from tensorgrad.ops import attention as attention_family  # where an op has the family's name
from tensorgrad.ops import creation, elementwise, indexing, reduce, shape, sorting
from tensorgrad.ops import cross_entropy as cross_entropy_family
from tensorgrad.ops import dropout as dropout_family
from tensorgrad.ops import einsum as einsum_family
from tensorgrad.ops import embedding as embedding_family
from tensorgrad.ops import linear as linear_family
from tensorgrad.ops import linear_cross_entropy as linear_cross_entropy_family
from tensorgrad.ops import matmul as matmul_family
from tensorgrad.ops import norm as norm_family
from tensorgrad.ops import rotary as rotary_family
from tensorgrad.ops import softmax as softmax_family
from tensorgrad.ops.attention import *
from tensorgrad.ops.creation import *
from tensorgrad.ops.cross_entropy import *
from tensorgrad.ops.dropout import *
from tensorgrad.ops.einsum import *
from tensorgrad.ops.elementwise import *
from tensorgrad.ops.elementwise import activation
from tensorgrad.ops.elementwise import fuse as fuse_family
from tensorgrad.ops.elementwise.activation import *
from tensorgrad.ops.elementwise.fuse import *
from tensorgrad.ops.embedding import *
from tensorgrad.ops.indexing import *
from tensorgrad.ops.linear import *
from tensorgrad.ops.linear_cross_entropy import *
from tensorgrad.ops.matmul import *
from tensorgrad.ops.norm import *
from tensorgrad.ops.reduce import *
from tensorgrad.ops.rotary import *
from tensorgrad.ops.shape import *
from tensorgrad.ops.softmax import *
from tensorgrad.ops.sorting import *

__all__: list[str] = []
__all__ += activation.__all__
__all__ += attention_family.__all__
__all__ += creation.__all__
__all__ += cross_entropy_family.__all__
__all__ += dropout_family.__all__
__all__ += einsum_family.__all__
__all__ += elementwise.__all__
__all__ += embedding_family.__all__
__all__ += fuse_family.__all__
__all__ += indexing.__all__
__all__ += linear_family.__all__
__all__ += linear_cross_entropy_family.__all__
__all__ += matmul_family.__all__
__all__ += rotary_family.__all__
__all__ += norm_family.__all__
__all__ += reduce.__all__
__all__ += shape.__all__
__all__ += softmax_family.__all__
__all__ += sorting.__all__
