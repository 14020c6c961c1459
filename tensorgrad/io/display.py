"""Tensors as HTML, for notebooks; the text of `repr` of what has settings; sizes of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from tensorgrad.core.tensor import Tensor

_ROWS, _COLUMNS = 20, 10  # more are shown by their first and last ones


def call_text(kind: Any, /, *first: str, **settings: Any) -> str:
    """Return a line like a call: "AdamW(parameters=4, lr=0.001)".

    Args:
        kind: an object, whose class begins the line.
        first: what follows, as it stands.
        settings: shown by their `repr`, up to 200 characters; functions by their names.
    """
    shown = [
        f"{name}={getattr(value, '__name__', repr(value)):.200}" for name, value in settings.items()
    ]
    return f"{type(kind).__name__}({', '.join([*first, *shown])})"


def file_size(path: Path) -> str:
    """Return the size of a file, in kB below 1 MB."""
    size = path.stat().st_size
    return f"{size / 1e3:.0f} kB" if size < 1e6 else f"{size / 1e6:.2f} MB"


def to_html(x: Tensor) -> str:
    """Return shape, dtype and device, and the values: as a table up to two axes, else as text."""
    from html import escape  # which takes milliseconds to import

    grad = ", requires_grad" if x.requires_grad else ""
    title = f"<code>tensor {x.shape}, {x.dtype}, {x.device}{grad}</code>"
    if x.ndim in (1, 2) and x.size:
        return title + _table(x.numpy().reshape(-1 if x.ndim == 2 else 1, x.shape[-1]))
    return f"{title}<pre>{escape(np.array2string(x.numpy()))}</pre>"


def _table(values: np.ndarray[Any, Any]) -> str:
    rows, columns = (
        _shown(n, most) for n, most in zip(values.shape, (_ROWS, _COLUMNS), strict=True)
    )
    lines = [
        "".join(f"<td>{'…' if None in (i, j) else f'{values[i, j]:.4g}'}</td>" for j in columns)
        for i in rows
    ]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _shown(length: int, most: int) -> list[int | None]:
    """Return the indices to show; None stands for those between."""
    if length <= most:
        return list(range(length))
    half = most // 2
    return [*range(half), None, *range(length - half, length)]
