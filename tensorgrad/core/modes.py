"""The modes of the current thread, and what a captured step compares again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Mode(threading.local):
    """The modes of the current thread."""

    grad_enabled = True
    inside_grad = False
    arguments: frozenset[Any] = frozenset()  # gradients that run end there: autograd/second.py
    forward: Any = None  # records tangents; see autograd/tangents.py
    autocast: Any = None  # casts the operands of matrix products; see amp.py
    recompute_norms = False  # backward of what takes their outputs; see ops/norm.py
    capture: Any = None  # notes of a step that becomes a CUDA graph; see graph.py


mode = _Mode()


@contextmanager
def replaced(target: object, **values: object) -> Iterator[None]:
    """Set attributes of an object in the `with` block, and restore them after it."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


class Changes:
    """Whether an attribute of a parameter, or the mode or a member of a module, was assigned to.

    A captured step depends on them, and compares them again after a note.

    Attributes:
        modes, attributes: another object after each note about a mode, or about the others; unlike
            with a counter, none is lost between threads.
    """

    def __init__(self) -> None:
        self.modes, self.attributes = object(), object()

    def note_mode(self) -> None:
        """Note that modes were set."""
        self.modes = object()

    def note(self) -> None:
        """Note an assignment to another attribute that has taken place."""
        self.attributes = object()


changes = Changes()
