"""Arguments of launches that are not arrays: structs, numbers and pointers.

Each struct that crosses from Python to CUDA is declared once here, with the names and types of the
C++ one. The loader appends `static_asserts` to the sources that define it, so that a kernel whose
struct has another layout does not compile.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np

from tensorgrad.core import backend

NULL = np.uintp(0)
Fields = tuple[tuple[str, Any], ...]


def pointer(array: Any) -> Any:
    """Return an array, or a null pointer for None, as an argument of a launch."""
    return NULL if array is None else array


def address(array: Any) -> int:
    """Return the address of an array, or 0 for None, as a field of a struct."""
    return 0 if array is None else int(array.data.ptr)


def by_value(value: Any) -> Any:
    """Return a struct, a NumPy number or a NumPy array as an argument of many launches.

    CuPy takes numbers and arrays as they are too, but converts them at each launch, which takes
    longer than the launch itself.
    """
    return _by_value()(value)


@lru_cache(maxsize=4096)
def number(dtype: str, value: float) -> Any:
    """Return a number that is the same in many launches, as `by_value` does."""
    return by_value(np.dtype(dtype).type(value))


@cache
def _by_value() -> Any:
    """Return the class of such arguments, once CuPy is there."""

    class ByValue(backend.cupy.cuda.function.CPointer):  # type: ignore[misc]  # CuPy has no types
        def __init__(self, value: Any) -> None:
            if isinstance(value, Struct):
                memory = ctypes.addressof(value)
            else:
                value = np.asarray(value)
                memory = value.ctypes.data
            super().__init__(memory)
            self.value = value  # keeps the memory

    return ByValue


def _fields(c_type: Any, names: str) -> Fields:
    """Return fields of one type."""
    return tuple((name, c_type) for name in names.split())


class Struct(ctypes.Structure):
    """A struct of CUDA sources.

    Attributes:
        sources: the files of this folder that define it.
        cuda_name: where it is not the name of the class.
    """

    sources: ClassVar[tuple[str, ...]]
    cuda_name: ClassVar[str] = ""


class Strides(Struct):
    """In elements; the elements of the last axis are contiguous."""

    sources = ("attention/arguments.cuh", "attention/sm90.cuh")
    _fields_ = _fields(c_int64, "batch head row")


class AttentionArguments(Struct):
    """Sizes, rule and layouts of one attention."""

    sources = ("attention/arguments.cuh",)
    _fields_ = (
        *_fields(c_int, "heads kv_heads queries keys width window_left window_right sequences"),
        *_fields(c_int, "aligned by_head"),
        *_fields(c_float, "scale_log2 inverse_scale inverse_keep"),
        *_fields(c_double, "scale keep_probability"),
        *_fields(Strides, "q k v y dq dk dv sums"),
        ("bias", c_int64 * 4),
    )


class AttentionTangentArguments(Struct):
    """Layouts of what the tangent of an attention has beside AttentionArguments."""

    sources = ("attention/tangent.cuh",)
    _fields_ = _fields(Strides, "tq tk tv y dtq dtk dtv")


class AttentionDropout(Struct):
    """Where the bits of dropout come from."""

    sources = ("attention/arguments.cuh",)
    _fields_ = (
        *_fields(c_uint64, "seed draw stream"),
        ("offset", c_void_p),
        ("threshold", c_int64),
    )


class AttentionSm90Arguments(Struct):
    """Sizes and rule of one attention on Hopper, and the order of its tiles."""

    sources = ("attention/sm90.cuh",)
    _fields_ = (
        *_fields(c_int, "heads kv_heads queries keys width window_left"),
        *_fields(c_int, "window_right together heads_total"),
        ("scale", c_float),
    )


class BackwardTeams(Struct):
    """How blocks of threads share the work of backward on Hopper."""

    sources = ("attention/backward_ordered_sm90.cu",)
    _fields_ = _fields(c_int, "size rotate")


class ColumnSums(Struct):
    """Where sums over rows of gradients go."""

    sources = ("attention/sm90.cuh",)
    _fields_ = (("first", c_void_p), ("pitch", c_int))


class AttentionSm90Extras(Struct):
    """Mask, dropout and sequences of unequal length."""

    sources = ("attention/sm90.cuh",)
    _fields_ = (
        *_fields(c_void_p, "key_tiles key_bits"),
        ("bias", c_void_p),
        *_fields(c_int64, "bias_batch bias_head bias_query bias_key"),
        *_fields(c_void_p, "query_starts key_starts"),
        *_fields(c_uint64, "seed draw stream"),
        ("offset", c_void_p),
        *_fields(c_int, "length columns"),
        ("threshold", c_uint32),
        ("inverse_keep", c_float),
    )


class CacheStrides(Struct):
    """Strides of cached keys or values, in elements."""

    sources = ("attention/decode.cu",)
    _fields_ = _fields(c_int64, "sequence head key")


class DecodeAttentionArguments(Struct):
    """Sizes and rule of the attention of one new token a sequence."""

    sources = ("attention/decode.cu",)
    _fields_ = (
        *_fields(CacheStrides, "key_at value_at"),
        *_fields(c_int, "heads kv_heads width window interleaved"),
        ("scale", c_float),
    )


class MatmulOperand(Struct):
    """Matrices in memory and their strides in elements."""

    sources = ("matmul/arguments.cuh",)
    _fields_ = (("data", c_void_p), *_fields(c_int64, "batch row column"))


class MatmulArguments(Struct):
    """A matrix product and its epilogue."""

    sources = ("matmul/arguments.cuh",)
    _fields_ = (
        *_fields(MatmulOperand, "a b"),
        *_fields(c_void_p, "y bias before_gelu residual gelu_of"),
        *_fields(c_int, "rows width columns a_vectors b_vectors y_vectors"),
        *_fields(c_int, "wide bias_wide add gelu"),
    )


class MatmulSm90Arguments(Struct):
    """A matrix product on Hopper, whose arrays are tensor maps, and the order of its tiles."""

    sources = ("matmul/sm90.cuh",)
    _fields_ = (
        *_fields(c_uint64, "bias residual derivative column_sums"),
        *_fields(c_int, "rows columns terms matrices a_step b_step"),
        *_fields(c_int, "band split_steps wide_bias add overlaps"),
    )


class PartialSums(Struct):
    """Several sums of rows."""

    sources = ("reduce.cu",)
    MOST = 48
    _fields_ = (
        *_fields(c_uint64 * MOST, "totals parts"),
        *_fields(c_int * MOST, "columns rows pitch add first_block"),
        *_fields(c_int, "count overlaps"),
    )


class ScoreArguments(Struct):
    """The scores that softmax is taken of: x * scale + mask."""

    sources = ("scores.cuh",)
    _fields_ = (
        ("scale", c_double),
        ("mask", c_void_p),
        ("kind", c_int64),
        ("lengths", c_int64 * 2),
        ("strides", c_int64 * 4),
        ("queries", c_int64),
    )


class Targets(Struct):
    """The targets of cross-entropy and the options of the loss."""

    sources = ("cross_entropy.cu",)
    _fields_ = (
        ("ids", c_void_p),
        *_fields(c_int64, "ignored ignores"),
        *_fields(c_double, "target each z_loss"),
    )


class GradientScale(Struct):
    """The factor of the gradient of a row: dy / count."""

    sources = ("cross_entropy.cu",)
    cuda_name = "GradientScale<float>"
    _fields_ = (*_fields(c_void_p, "dy count"), ("stride", c_int64))


class Peers(Struct):
    """Where ranks count their meetings, by rank."""

    sources = ("peer_copies.cu",)
    MOST = 8
    _fields_ = (
        *_fields(c_uint64 * MOST, "met"),
        *_fields(c_uint64, "meetings"),
        *_fields(c_int, "rank ranks"),
    )


def static_asserts(source: str) -> list[str]:
    """Return lines of C++ that fail to compile where a struct of a source has another size.

    NVRTC has no offsetof: tests/kernels/test_structs.py compares the order of the fields.
    """
    found = [struct for struct in Struct.__subclasses__() if source in struct.sources]
    return [
        f"static_assert(sizeof({struct.cuda_name or struct.__name__}) == {ctypes.sizeof(struct)}, "
        f'"structs.py declares another {struct.__name__}");'
        for struct in found
    ]
