"""Lines of user code: those outside the library, and those of its models, which users change."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np

_PACKAGE = Path(__file__).parent.parent
_MODELS = str(_PACKAGE / "models"), str((_PACKAGE / "models").resolve())
_LIBRARY = (
    *(str(_PACKAGE), str(_PACKAGE.resolve()), str((_PACKAGE / "parallel").resolve())),
    str(Path(np.__file__).parent),  # its errstate wraps the walk of backward
    *("<frozen", "<string"),
)
_STANDARD = str(Path(weakref.__file__).parent)


def user_line() -> str:
    """Return the innermost line of user code that is running, as "file.py:12"; "" for none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return _shown(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def user_level() -> int:
    """Return the `stacklevel` with which the caller warns of the innermost line of user code."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def line_of(error: BaseException) -> tuple[str, str]:
    """Return the innermost line of user code that an error passed, and the function it called.

    Returns:
        "file.py:12", "" where there is none; and the name of the function, such as "Tensor.item",
        "" where the line itself raised the error.
    """
    line = called = ""
    for frame, number in _frames(error.__traceback__):
        if is_user_code(frame.f_code.co_filename):
            line, called = _shown(frame.f_code.co_filename, number), ""
        elif not called:
            called = frame.f_code.co_qualname
    return line, called


def _frames(trace: TracebackType | None) -> Iterable[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


@cache
def is_user_code(filename: str) -> bool:
    """Whether a file is outside the library and Python's own, or one of the models."""
    if filename.startswith(_MODELS):
        return True
    if filename.startswith(_LIBRARY) or "cupy" in Path(filename).parts:
        return False
    return not filename.startswith(_STANDARD) or "site-packages" in filename


@cache
def _shown(filename: str, line: int) -> str:
    """Return a line, with a path relative to the working directory or the library's folder."""
    for folder in (Path.cwd(), _PACKAGE.parent):
        if Path(filename).is_relative_to(folder):
            return f"{Path(filename).relative_to(folder)}:{line}"
    return f"{filename}:{line}"
