"""The tiles of attention's tangent: each has a kernel, each kernel has tiles, and all fit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tensorgrad.kernels import loader
from tensorgrad.kernels.attention import sm80, tangent, tangent_sm80, tangent_sm90
from tests.gpu_array import on_gpu

DTYPES = (("__half", "__nv_bfloat16"), ("float",))  # 16 bits and TF32, as in the tables


def kernels_sm80() -> Iterator[str]:
    """Yield the kernels that tangent_sm80.py loads."""
    for i, dtypes in enumerate(DTYPES):
        for dtype in dtypes:
            for width, tiles in tangent_sm80._FORWARD_TILES[i].items():
                yield f"attention_tangent<{dtype}, {width}, {tiles[0]}, {tiles[1]}>"
            for name, tables in tangent_sm80._BACKWARD_TILES.items():
                for width, tiles in tables[i].items():
                    types = f"{dtype}, {width}, {tiles[0]}, {tiles[1]}, {name}"
                    yield f"attention_tangent_backward<{types}>"
            yield f"attention_tangent_rows<{dtype}, 0>"
            if i == 0:
                yield f"attention_tangent_rows<{dtype}, {tangent_sm90._STATISTICS}>"


def kernels_sm90() -> Iterator[str]:
    """Yield the kernels that tangent_sm90.py loads."""
    for dtype in DTYPES[0]:
        for part, table in tangent_sm90._TILES.items():
            for width, (groups, columns) in table.items():
                types = f"{dtype}, {width}, {groups}, {columns}, {part}"
                yield f"attention_tangent_tiles<{types}>"


def test_every_tile_has_a_kernel_and_every_kernel_a_tile() -> None:
    files = ("tangent_forward_sm80.cu", "tangent_backward_sm80.cu")
    listed = [k for file in files for k in loader.read(loader.FOLDER / "attention" / file).kernels]
    assert sorted(listed) == sorted(kernels_sm80())
    source = loader.read(loader.FOLDER / "attention/tangent_sm90.cu")
    assert sorted(source.kernels) == sorted(kernels_sm90())


@pytest.mark.parametrize("width", [1, 32, 33, 64, 65, 96, 97, 128])
def test_16_bits_fit_the_shared_memory_of_every_gpu(width: int) -> None:
    q = on_gpu(np.empty((1, 1, 1, width), np.float16))
    padded, units, columns = sm80.tiles_for(q, tangent_sm80._FORWARD_TILES)
    most = sm80.shared_memory(q, padded, 2 * 64 * units, 4 * columns)
    parts = tangent_sm80._parts(q)
    assert max(most, *(tangent_sm80._backward_tiles(part, q)[3] for part in parts)) <= 99 * 1024


def test_gradients_are_written_in_place_where_one_layout_has_rows_of_16_bytes() -> None:
    packed = on_gpu(np.zeros((2, 5, 8 * 64), np.float16)).reshape(2, 5, 8, 64).swapaxes(1, 2)
    like, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    assert tangent._one_layout([k, None, v], like)
    assert not tangent._one_layout([k, v.copy()], like)
    assert not tangent._one_layout([k.astype(np.float32)], like)
    assert not tangent._one_layout([packed[..., 1:33]], like[..., :32])
    assert tangent._one_layout([packed[..., 1:31]], like[..., :30])
    assert tangent._one_layout([None, None], like)
