"""Errors of names that the library lacks: what is there instead, or why nothing is.

docs/guides/not-supported.md lists what is omitted on purpose.
"""

from __future__ import annotations

import sys
from types import MemberDescriptorType

import numpy as np

__all__ = ["missing", "missing_method"]

_PAGE = "docs/guides/not-supported.md says why"
_ON_PURPOSE = {
    "convolutions, pooling and recurrent layers": (
        "conv", "pool", "lstm", "gru", "rnn", "batchnorm", "batch_norm", "instancenorm",
        "instance_norm", "upsample", "pixel", "grid_sample", "fold",
    ),
    "sparse tensors": ("sparse", "coalesce", "_coo", "_csr", "_csc", "_bsr", "_bsc", "smm", "spmm"),
    "quantized numbers": ("quantize", "fbgemm", "q_scale", "q_zero", "q_per", "int_repr"),
}  # fmt: skip
# PyTorch's names of what is here under another one, which is NumPy's where NumPy has it.
_NAMED = {
    "as_tensor": "asarray", "bmm": "matmul", "broadcast_tensors": "broadcast_arrays",
    "bucketize": "searchsorted", "cartesian_prod": "meshgrid", "cat": "concatenate",
    "chain_matmul": "linalg.multi_dot", "chunk": "array_split", "clamp": "clip",
    "clamp_max": "minimum", "clamp_min": "maximum", "compile": "graph.capture",
    "dist": "linalg.norm", "div": "divide", "eq": "equal",
    "expand": "broadcast_to", "expand_as": "broadcast_to", "expand_copy": "broadcast_to",
    "flatten": "ravel", "from_numpy": "asarray", "ge": "greater_equal", "ger": "outer",
    "gt": "greater", "histc": "histogram", "index_select": "take", "inference_mode": "no_grad",
    "inverse": "linalg.inv", "kthvalue": "sort", "le": "less_equal", "logdet": "linalg.slogdet",
    "lt": "less", "masked_scatter": "where", "mm": "matmul", "movedim": "moveaxis",
    "msort": "sort", "mul": "multiply", "multinomial": "random.categorical", "mv": "matmul",
    "narrow_copy": "take", "ne": "not_equal", "neg": "negative", "new_empty": "empty",
    "new_full": "full", "new_ones": "ones", "new_tensor": "tensor", "new_zeros": "zeros",
    "pinverse": "linalg.pinv", "rand": "random.random", "rand_like": "random.random",
    "randint": "random.integers", "randint_like": "random.integers",
    "randn": "random.standard_normal", "randn_like": "random.standard_normal",
    "randperm": "random.permutation", "range": "arange", "register_hook": "on_grad_ready",
    "register_post_accumulate_grad_hook": "on_grad_ready", "repeat_interleave": "repeat",
    "scalar_tensor": "tensor", "scatter_reduce": "scatter_add", "set_grad_enabled": "no_grad",
    "sgn": "sign", "shuffle": "random.permutation", "solve_triangular": "linalg.solve",
    "split_with_sizes": "split", "sub": "subtract", "swapdims": "swapaxes",
    "symeig": "linalg.eigh", "take_along_dim": "take_along_axis", "tensor_split": "array_split",
    "trapz": "trapezoid", "triangular_solve": "linalg.solve", "unbind": "unstack",
    "unflatten": "reshape", "unique_consecutive": "unique", "unsafe_chunk": "array_split",
    "unsafe_split": "split", "unsqueeze": "expand_dims",
    "scaled_dot_product_attention": "nn.functional.attention",
    "gumbel_softmax": "random.categorical", "MultiheadAttention": "nn.MultiHeadAttention",
    "DataParallel": "parallel.DataParallel", "Transformer": "nn.TransformerBlock",
    "TransformerEncoder": "nn.TransformerBlock", "TransformerDecoder": "nn.TransformerBlock",
    "TransformerEncoderLayer": "nn.TransformerBlock",
    "BCELoss": "nn.functional.binary_cross_entropy", "GradScaler": "optim.LossScaler",
    "TransformerDecoderLayer": "nn.TransformerBlock", "ParameterList": "nn.ModuleList",
    "clip_grad_norm_": "optim.clip_grad_norm", "Generator": "random.Generator",
    "LinAlgError": "errors.ArgumentError",
}  # fmt: skip
# Names of PyTorch and NumPy of what an expression gives; x is the tensor.
_WRITTEN = {
    "H": "conj(x.mT)", "mH": "conj(x.mT)", "adjoint": "conj(x.mT)", "addbmm": "y + sum(a @ b, 0)",
    "addcdiv": "x + value * a / b", "addcmul": "x + value * a * b", "addmm": "y + a @ b",
    "addmv": "y + a @ b", "addr": "x + outer(a, b)", "aminmax": "x.min(), x.max()",
    "baddbmm": "y + a @ b", "bool": "x.astype('bool')", "byte": "x.astype('uint8')",
    "char": "x.astype('int8')", "contiguous": "x.copy()", "copy_": "x[...] = y",
    "data_ptr": "x.data.ctypes.data, or x.data.data.ptr on a GPU", "detach_": "x.detach()",
    "device": "the name itself, 'cpu' or 'cuda:0'", "dim": "x.ndim", "element_size": "x.itemsize",
    "eig": "linalg.eigh, of symmetric matrices",
    "eigvals": "linalg.eigvalsh, of symmetric matrices",
    "exponential": "-log(random.random(size))",
    "get_device": "x.device", "get_default_dtype": "'float32'", "grad_fn": "x.is_leaf",
    "int": "x.astype('int32')", "is_complex": "isdtype(x.dtype, 'complex floating')",
    "is_contiguous": "x.data.flags.c_contiguous", "is_cpu": "x.device == 'cpu'",
    "is_cuda": "x.device != 'cpu'", "is_floating_point": "isdtype(x.dtype, 'real floating')",
    "is_tensor": "isinstance(x, Tensor)", "long": "x.astype('int64')",
    "lstsq": "linalg.pinv(a) @ b",
    "masked_select": "x[mask]", "narrow": "x[start : start + length]", "ndimension": "x.ndim",
    "nelement": "x.size", "numel": "x.size", "numpy_": "x.numpy()",
    "reshape_as": "x.reshape(y.shape)", "retain_grad": "tensorgrad.grad, of a function of x",
    "retains_grad": "tensorgrad.grad, of a function of x", "rsub": "y - x",
    "select": "x[index], or x[:, index]", "set_default_dtype": "dtype=... where it is created",
    "short": "x.astype('int16')", "size": "x.shape", "std_mean": "x.std(), x.mean()",
    "storage": "x.data", "stride": "x.data.strides", "t": "x.T",
    "to_dlpack": "x itself, which has __dlpack__", "type": "x.astype(dtype)",
    "type_as": "x.astype(y.dtype)", "untyped_storage": "x.data", "values": "x.numpy()",
    "var_mean": "x.var(), x.mean()", "view_as": "x.reshape(y.shape)",
    "zero_": "x.fill(0)", "zero_grad": "optimizer.zero_grad(), or x.grad = None",
}  # fmt: skip
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "int": "int32",
    "short": "int16", "char": "int8", "byte": "uint8", "cfloat": "complex64",
    "cdouble": "complex128", "FloatTensor": "float32", "DoubleTensor": "float64",
    "HalfTensor": "float16", "BFloat16Tensor": "bfloat16", "LongTensor": "int64",
    "IntTensor": "int32", "BoolTensor": "bool", "ByteTensor": "uint8",
}  # fmt: skip
_PLACES = ("", ".nn", ".nn.functional", ".linalg", ".fft", ".random", ".optim")


def missing(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module does not have.

    Args:
        module: full name of the module.
        name: that it lacks.

    Returns:
        The error, whose message names what to use instead or says why there is nothing.

    Example:
        >>> from tensorgrad.compat.omitted import missing
        >>> missing("tensorgrad", "bmm").args[0]
        "module 'tensorgrad' has no attribute 'bmm': it is named as in NumPy, matmul"
    """
    said = f"module {module!r} has no attribute {name!r}"
    if not name.startswith("_"):
        dtype = module == "tensorgrad" and _DTYPES.get(name)
        said += f": it is the dtype {dtype!r}, a name" if dtype else _instead(name, module)
    return AttributeError(said, name=name, obj=sys.modules.get(module))


def missing_method(name: str) -> AttributeError:
    """Return the error for an attribute that a tensor does not have.

    Args:
        name: that a tensor lacks.

    Returns:
        The error, whose message names what to use instead or says why there is nothing.

    Example:
        >>> from tensorgrad.compat.omitted import missing_method
        >>> missing_method("numel").args[0]
        "'Tensor' object has no attribute 'numel': write x.size"
    """
    said = f"'Tensor' object has no attribute {name!r}"
    if not name.startswith("_"):
        said += _instead(name, "")
    return AttributeError(said, name=name)


def _instead(name: str, module: str) -> str:
    """Return the end of a message: what is there instead of a public name."""
    for what, parts in _ON_PURPOSE.items():
        if any(part in name.lower() for part in parts):
            return f": {what} are omitted on purpose; {_PAGE}"
    if name in _NAMED:
        ours = _NAMED[name]
        as_in_numpy = ours in np.__all__ or ours.startswith(("linalg.", "random."))
        words = "it is named as in NumPy, " if as_in_numpy else "here it is tensorgrad."
        return f": {words}{ours}"
    if name in _WRITTEN:
        return f": write {_WRITTEN[name]}"
    place = _place_of(name)
    if place and not (module == "tensorgrad.random" and name in np.random.__all__):
        return f": here it is {place}"
    if name.endswith("_") and (name[:-1] in _NAMED or _place_of(name[:-1])):
        return ": a tensor changes by assignment, x[...] = y, where no gradient is recorded"
    if module == "tensorgrad" and name in np.__all__:
        return f": this function of NumPy is omitted on purpose; {_PAGE}"
    if not module and hasattr(np.ndarray, name):
        return f": write x.numpy().{name}"
    return "; docs/guides/not-supported.md lists what is omitted"


def _place_of(name: str) -> str:
    """Return the full name of a function, class or method of this name; "" for none."""
    for place in _PLACES:
        owner = sys.modules.get(f"tensorgrad{place}")
        if owner is not None and name in getattr(owner, "__all__", ()):
            return f"tensorgrad{place}.{name}"
    root = sys.modules.get("tensorgrad")
    member = vars(vars(root).get("Tensor", object)).get(name) if root is not None else None
    if member is not None and not isinstance(member, MemberDescriptorType):
        return f"a method, x.{name}"
    functions = sys.modules.get("tensorgrad.nn.functional")
    plain = name.lower()
    for function in getattr(functions, "__all__", ()):  # a class, such as nn.SmoothL1Loss
        if name != plain and function.replace("_", "") == plain:
            return f"a function, tensorgrad.nn.functional.{function}"
    return ""
