"""Pieces out of whole arrays and back: the plain way, to compare with what checkpoints do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorgrad.parallel.placement import ArrayPiece, copies, cut_box

Values = np.ndarray[Any, Any]


def cut(full: Values, piece: ArrayPiece) -> Values:
    """Return the elements of a piece, 1-D, out of the full array."""
    box = cut_box(full, piece.placement)
    elements: Values = box.reshape(-1)[piece.start : piece.stop]
    return elements


def assemble(target: ArrayPiece, parts: Sequence[tuple[ArrayPiece, Values]]) -> Values:
    """Return a piece, 1-D, made of others that together have all its elements."""
    out = np.empty(target.size, parts[0][1].dtype)
    plan = copies(target, [piece for piece, _ in parts])
    for number, source, place, length in plan.tolist():
        out[place : place + length] = parts[number][1][source : source + length]
    return out
