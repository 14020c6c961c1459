"""Reference for pieces: cutting whole arrays and assembling them, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad.train.placement import ArrayPiece, copies, cut_box

Values = np.ndarray[Any, Any]


def cut(full: Values, piece: ArrayPiece) -> Values:
    """Return the elements of a piece of the full array, 1-D."""
    box = cut_box(full, piece.placement)
    elements: Values = box.reshape(-1)[piece.start : piece.stop]
    return elements


def assemble(target: ArrayPiece, parts: Sequence[tuple[ArrayPiece, Values]]) -> Values:
    """Return a piece, 1-D, assembled from others that together have all its elements."""
    out = np.empty(target.size, parts[0][1].dtype)
    plan = copies(target, [piece for piece, _ in parts])
    for number, source, place, length in plan.tolist():
        out[place : place + length] = parts[number][1][source : source + length]
    return out
