"""A NumPy-style array library with automatic differentiation, on NumPy and CuPy.

Public are the names in `__all__`, with these submodules: amp, autograd, backend, curvature, data,
dtypes, errors, fft, graph, io, kernels, linalg, models, nn, ops, optim, parallel, random, testing
and train, and what each of them lists in its `__all__`. `curvature`, `data`, `models`, `parallel`,
`testing` and `train` are loaded at their first use.
"""

__distribution__ = "tensorgrad-cupy"  # which tensorgrad this is, for distribution.py

# First: whether the files are those of this project; Ctrl-C during the imports below ends quietly.
from tensorgrad.startup import interrupt  # noqa: F401

# isort: split
from importlib import import_module as _import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorgrad import autograd as autograd
from tensorgrad import backend as backend
from tensorgrad import dtypes as dtypes
from tensorgrad import errors as errors
from tensorgrad import fft, graph, linalg, nn, optim, random
from tensorgrad.amp import autocast
from tensorgrad.autograd import functions as _functions
from tensorgrad.autograd import no_grad, on_grad_ready
from tensorgrad.autograd.cuda_kernel import cuda_kernel
from tensorgrad.autograd.function import Function
from tensorgrad.autograd.functions import *
from tensorgrad.autograd.gradcheck import gradcheck
from tensorgrad.autograd.recompute import checkpoint
from tensorgrad.compat import aliases as _aliases
from tensorgrad.compat import array_api as _array_api
from tensorgrad.compat import einops_backend
from tensorgrad.compat.aliases import *
from tensorgrad.compat.array_api import *
from tensorgrad.compat.array_api import __array_api_version__ as __array_api_version__
from tensorgrad.compat.array_api import __array_namespace_info__ as __array_namespace_info__
from tensorgrad.compat.interop import from_dlpack
from tensorgrad.compat.omitted import missing as _missing
from tensorgrad.core.tensor import Tensor
from tensorgrad.io.saving import load, save
from tensorgrad.kernels import arrays as _arrays  # noqa: F401  casts and sums on a GPU, for core/
from tensorgrad.ops import attention as _attention
from tensorgrad.ops import attention_unfused as _attention_unfused
from tensorgrad.ops import creation as _creation
from tensorgrad.ops import cross_entropy as _cross_entropy
from tensorgrad.ops import diagonals as _diagonals
from tensorgrad.ops import dropout as _dropout
from tensorgrad.ops import einsum as _einsum
from tensorgrad.ops import elementwise as _elementwise
from tensorgrad.ops import embedding as _embedding
from tensorgrad.ops import indexing as _indexing
from tensorgrad.ops import linear as _linear
from tensorgrad.ops import linear_cross_entropy as _linear_cross_entropy
from tensorgrad.ops import matmul as _matmul
from tensorgrad.ops import methods as _methods  # noqa: F401  attaches them to Tensor
from tensorgrad.ops import norm as _norm
from tensorgrad.ops import reduce as _reduce
from tensorgrad.ops import rotary as _rotary
from tensorgrad.ops import scatter as _scatter
from tensorgrad.ops import shape as _shape
from tensorgrad.ops import softmax as _softmax
from tensorgrad.ops import sorting as _sorting
from tensorgrad.ops import stacking as _stacking
from tensorgrad.ops import statistics as _statistics
from tensorgrad.ops.attention import *
from tensorgrad.ops.attention_unfused import *
from tensorgrad.ops.creation import *
from tensorgrad.ops.cross_entropy import *
from tensorgrad.ops.diagonals import *
from tensorgrad.ops.dropout import *
from tensorgrad.ops.einsum import *
from tensorgrad.ops.elementwise import *
from tensorgrad.ops.elementwise import activation as _activation
from tensorgrad.ops.elementwise import fuse as _fuse
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
from tensorgrad.ops.scatter import *
from tensorgrad.ops.shape import *
from tensorgrad.ops.softmax import *
from tensorgrad.ops.sorting import *
from tensorgrad.ops.stacking import *
from tensorgrad.ops.statistics import *
from tensorgrad.random import seed as manual_seed

__version__ = "0.9.0"

__all__ = [
    "Function",
    "Tensor",
    "amp",
    "autocast",
    "autograd",
    "backend",
    "checkpoint",
    "cuda_kernel",
    "dtypes",
    "errors",
    "fft",
    "from_dlpack",
    "gradcheck",
    "graph",
    "io",
    "kernels",
    "linalg",
    "load",
    "manual_seed",
    "nn",
    "no_grad",
    "on_grad_ready",
    "ops",
    "optim",
    "random",
    "save",
]
__all__ += _activation.__all__
__all__ += _array_api.__all__
__all__ += _aliases.__all__
__all__ += _diagonals.__all__
__all__ += _stacking.__all__
__all__ += _statistics.__all__
__all__ += _attention.__all__
__all__ += _attention_unfused.__all__
__all__ += _creation.__all__
__all__ += _cross_entropy.__all__
__all__ += _dropout.__all__
__all__ += _einsum.__all__
__all__ += _elementwise.__all__
__all__ += _embedding.__all__
__all__ += _functions.__all__
__all__ += _fuse.__all__
__all__ += _indexing.__all__
__all__ += _linear.__all__
__all__ += _linear_cross_entropy.__all__
__all__ += _matmul.__all__
__all__ += _rotary.__all__
__all__ += _norm.__all__
__all__ += _reduce.__all__
__all__ += _scatter.__all__
__all__ += _shape.__all__
__all__ += _softmax.__all__
__all__ += _sorting.__all__

_LATER = ("curvature", "data", "models", "parallel", "testing", "train")
__all__ += _LATER

if TYPE_CHECKING:
    from tensorgrad import curvature as curvature
    from tensorgrad import data as data
    from tensorgrad import kernels as kernels
    from tensorgrad import models as models
    from tensorgrad import ops as ops
    from tensorgrad import parallel as parallel
    from tensorgrad import testing as testing
    from tensorgrad import train as train
else:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            return _import_module(f"{__name__}.{name}")
        raise _missing(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})


einops_backend.register()

if not Path(__file__).with_name("models").is_dir():
    # A checkout or archive without symbolic links: the folders of the root hold these packages.
    __path__.append(str(Path(__file__).parent.parent))

# Importing a submodule makes it an attribute, and this file imports names of its own: those that
# are not public are removed. The modules stay importable, for the library itself and its tests.
for _name in [name for name in globals() if not name.startswith("_") and name not in __all__]:
    del globals()[_name]
