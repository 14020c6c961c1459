"""Checkpoints of arrays without a model, for tests."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorgrad.core.backend import Array
from tensorgrad.io.weights import save_arrays
from tensorgrad.train import checkpoint
from tensorgrad.train.checkpoint import Contents, OneWriter
from tensorgrad.train.placement import Placement
from tensorgrad.train.shards import Shards

Groups = Mapping[str, Mapping[str, Array]]


def contents_of(groups: Groups) -> Contents:
    """Return the contents of a checkpoint of one process."""
    held = [
        (Placement(f"{group}/{name}", array.shape).piece, array)
        for group, arrays in groups.items()
        for name, array in arrays.items()
    ]
    return Shards(OneWriter(), held).contents()


def save_checkpoint(
    folder: Path, step: int, groups: Groups, state: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write a checkpoint of one process; return its folder."""
    return checkpoint.save_checkpoint(folder, step, contents_of(groups), state, keep)


def save_shards(
    shards: Shards, folder: Path, step: int, state: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write a checkpoint, together with the other ranks; return its folder."""
    return checkpoint.save_checkpoint(folder, step, shards.contents(), state, keep)


def save_former(folder: Path, step: int, groups: Groups, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint as former versions did: a file for each group, whose header says nothing.

    Returns:
        The checkpoint's folder.
    """
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = {
        f"{group}.safetensors": save_arrays(
            path / f"{group}.safetensors", arrays, None, with_sum=False
        )
        for group, arrays in groups.items()
    }
    content = {"format": 1, "step": step, **state, "files": files}
    crc32 = zlib.crc32(json.dumps(content, indent=1).encode())
    (path / "state.json").write_text(json.dumps({**content, "crc32": crc32}))
    return path
