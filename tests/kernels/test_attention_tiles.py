"""The tiles of attention on Hopper: each has a kernel, and options choose the kernels meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensorgrad.kernels import loader
from tensorgrad.kernels.attention import sm90
from tensorgrad.kernels.attention.options import AttentionOptions, Sequences
from tensorgrad.kernels.random import Key

DTYPES = ("__half", "__nv_bfloat16")
OPTIONS = ("KEY_MASK", "DROPOUT", "DROPOUT + KEY_MASK")


def forward_kernels(dtype: str) -> Iterator[str]:
    """Yield the kernels for a dtype that sm90.py loads from forward_sm90.cu."""
    plain = sm90._FORWARD_TILES[False]
    long = plain | sm90._LONG_TILES
    tables: list[tuple[dict[int, tuple[int, int]], str]] = [
        (plain, "PLAIN"), (sm90._LONG_TILES, "PLAIN"), (sm90._FORWARD_TILES[True], "EXTRAS"),
        (sm90._MASKED_TILES, OPTIONS[0]), *((sm90._DROPOUT_TILES, name) for name in OPTIONS[1:]),
        ({width: long[width] for width in sm90._CLUSTERS}, "PLAIN, 2"),
    ]  # fmt: skip
    for table, options in tables:
        for width, (groups, columns) in table.items():
            yield f"attention_forward<{dtype}, {width}, {groups}, {columns}, {options}>"


def backward_kernels(dtype: str) -> Iterator[str]:
    """Yield the kernels for a dtype that sm90.py loads from backward_sm90.cu."""
    yield f"attention_backward_rows<{dtype}>"
    for extras in (False, True):
        last = "true" if extras else "false"
        for width, (groups, columns) in sm90._KEYS_TILES[extras].items():
            both = width <= sm90._BOTH_GRADIENTS[extras]
            for part in ("BOTH",) if both else ("KEYS", "VALUES"):
                yield f"attention_backward<{dtype}, {width}, {groups}, {columns}, {part}, {last}>"
        for width, (groups, columns) in sm90._QUERIES_TILES[extras].items():
            yield f"attention_backward<{dtype}, {width}, {groups}, {columns}, QUERIES, {last}>"


def ordered_kernels(dtype: str) -> Iterator[str]:
    """Yield the kernels for a dtype that sm90.py loads from backward_ordered_sm90.cu."""
    for width, rows in sm90._ORDERED_TILES.items():
        yield f"attention_backward_ordered<{dtype}, {width}, {rows}>"


@pytest.mark.parametrize(
    ("file", "kernels"),
    [
        ("forward_sm90.cu", forward_kernels),
        ("backward_sm90.cu", backward_kernels),
        ("backward_ordered_sm90.cu", ordered_kernels),
    ],
)
def test_every_tile_has_a_kernel_and_every_kernel_a_tile(file: str, kernels: Any) -> None:
    source = loader.read(loader.FOLDER / "attention" / file)
    expected = {kernel for dtype in DTYPES for kernel in kernels(dtype)}
    assert set(source.kernels) == expected


MASK = np.zeros((2, 1, 1, 8), np.float32)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "PLAIN"),
        ({"bias": np.broadcast_to(MASK, (2, 3, 5, 8))}, "KEY_MASK"),
        ({"bias": np.broadcast_to(MASK[:, :, :, :1], (2, 3, 5, 8))}, "KEY_MASK"),
        ({"bias": np.zeros((2, 1, 1, 8), np.float32)}, "KEY_MASK"),  # a single query
        ({"bias": np.broadcast_to(MASK, (2, 3, 5, 8)), "adds": True}, "EXTRAS"),
        ({"bias": np.zeros((2, 3, 5, 8), np.float32)}, "EXTRAS"),
        ({"bias": np.broadcast_to(np.zeros((2, 3, 1, 8), np.float32), (2, 3, 5, 8))}, "EXTRAS"),
        ({"dropout": 0.1, "key": Key(1, 2)}, "DROPOUT"),
        (
            {"dropout": 0.1, "key": Key(1, 2), "bias": np.broadcast_to(MASK, (2, 3, 5, 8))},
            "DROPOUT + KEY_MASK",
        ),
        ({"sequences": Sequences(np.array([0, 5]), np.array([0, 8]), (5, 8))}, "EXTRAS"),
        ({"scale": -1.0}, "EXTRAS"),
    ],
)
def test_options_choose_kernels(options: dict[str, Any], expected: str) -> None:
    assert sm90._forward_options(AttentionOptions(**{"scale": 0.1, **options})) == expected
