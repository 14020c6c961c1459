"""The kernels of a decoding step, seen without a GPU: NumPy's arrays stand for CuPy's."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad.core import backend
from tensorgrad.core.tensor import Tensor
from tensorgrad.dtypes import bfloat16
from tensorgrad.kernels import embedding as embedding_cuda
from tensorgrad.kernels import norm as norm_cuda
from tensorgrad.kernels import overlap, structs
from tensorgrad.kernels import sampling as sampling_cuda
from tensorgrad.kernels.attention import decode as decode_cuda
from tensorgrad.kernels.matmul import skinny
from tensorgrad.models.generation.buffers import _step
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.nn import evaluating
from tensorgrad.ops import embedding as embedding_op
from tensorgrad.ops.sampling import Sampling, new_state
from tests.gpu_array import GpuArray, on_gpu


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the kernels that are launched from now on, none of which runs."""
    found: list[str] = []

    def load(file: str, name: str) -> Any:
        return lambda *_: found.append(name.partition("<")[0])

    def data(value: Any) -> Any:
        return value.data if isinstance(value, Tensor) else value

    def launch(kernel: Any, *_: Any, **__: Any) -> None:
        kernel()

    for module in (norm_cuda, embedding_cuda, sampling_cuda, decode_cuda, skinny):
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(skinny, "capability", lambda device: 90)
    monkeypatch.setattr(norm_cuda, "resident_blocks", lambda *_: 1000)
    monkeypatch.setattr(norm_cuda, "_held_rows", norm_cuda._held_rows.__wrapped__)
    monkeypatch.setattr(overlap, "launch", launch)
    monkeypatch.setattr(structs, "_by_value", lambda: lambda value: value)
    monkeypatch.setattr(norm_cuda, "number", lambda dtype, value: value)
    monkeypatch.setattr(decode_cuda, "by_value", lambda value: value)
    monkeypatch.setattr(embedding_op, "integer_array", lambda op, name, value: data(value))
    namespace = SimpleNamespace(
        ndarray=GpuArray,
        empty=lambda shape, dtype: on_gpu(np.empty(shape, dtype)),
        empty_like=lambda array: on_gpu(np.empty_like(array)),
        asarray=on_gpu,
        ascontiguousarray=lambda array: on_gpu(np.ascontiguousarray(array)),
    )
    monkeypatch.setattr(backend, "cupy", namespace)
    return found


@pytest.mark.parametrize("dtype", ["float32", bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_a_block_is_seven_kernels_and_eight_with_a_gate(
    kind: str, dtype: Any, launches: list[str]
) -> None:
    if kind == "gpt2":
        model: Any = GPT2(GPT2Config(61, 40, 2, 2, 64, vocab_multiple=16))
    else:
        model = TransformerLM(TransformerLMConfig(61, 40, 2, 4, 2, 64))
    state = new_state([[1, 2], [3]], 6, [0, 1], [4], None, "cpu")
    caches = model.new_cache(2, 16)
    for parameter in model.parameters():
        parameter.data = on_gpu(parameter.data.astype(dtype))
    for field in fields(state):
        array = getattr(state, field.name)
        setattr(state, field.name, None if array is None else on_gpu(array))
    for cache in caches:
        cache._keys, cache._values = (on_gpu(np.zeros((2, 2, 16, 32), dtype)) for _ in range(2))
        if kind == "modern":
            cache._keys, cache._values = (a[..., :16].copy() for a in cache.arrays)
        cache.lengths, cache.counters = state.lengths, on_gpu(cache.counters)
    launches.clear()
    with evaluating(model):
        _step(weakref.ref(model), caches, state, Sampling(0.0))()
    products = "matmul_skinny" if dtype == bfloat16 else "matmul_skinny_plain"
    attention = "decode_attention" if dtype == bfloat16 else "decode_attention_plain"
    assert Counter(launches) == {
        "embedding_forward": 1,
        "norm_forward_rows": 5,
        products: 2 * (4 if kind == "gpt2" else 5) + 1,
        attention: 2,
        "sample_tokens": 1,
    }
