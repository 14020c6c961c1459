"""What was assigned to since an op ran: its backward must not use arrays that were overwritten."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tensorgrad.backend import Array, byte_bounds, is_array
from tensorgrad.errors import GradError


class Assignments:
    """Which memory was assigned to, and when; so that backward never uses overwritten arrays.

    `tick` counts assignments. A node remembers the tick it was recorded at; only when the count
    has moved since does the walk compare the node's saved arrays with what was assigned.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self.tick = 0
        self.log: list[tuple[int, tuple[int, int], weakref.ref[Any]]] = []

    def note(self, array: Array) -> None:
        """Remember that the elements of `array` changed."""
        owner = array
        while getattr(owner, "base", None) is not None and is_array(owner.base):
            owner = owner.base
        bounds, reference = byte_bounds(array), weakref.ref(owner)
        with self._lock:
            others = [
                entry for entry in self.log if entry[2]() is not None and entry[1] != bounds
            ]  # one entry for memory that is assigned to again and again, as optimizers do
            self.log = [*others, (self.tick + 1, bounds, reference)]
            self.tick += 1

    def advance(self) -> int:
        """Begin a new tick and return it."""
        with self._lock:
            self.tick += 1
            return self.tick

    def check(self, node: Any) -> None:
        """Raise GradError when an array that the node saved was assigned to since."""
        recent = [
            bounds for tick, bounds, owner in self.log if tick > node.tick and owner() is not None
        ]
        if not recent:
            return
        for saved in node.saved or ():
            if is_array(saved) and saved.size:
                begin, end = byte_bounds(saved)
                if any(low < end and begin < high for low, high in recent):
                    raise GradError(
                        f"backward: {node.name} needs an array of shape {saved.shape} that was "
                        "assigned to after the op ran; assign to a copy instead"
                    )
