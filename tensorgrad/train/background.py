"""Writing a checkpoint in a thread while training continues.

The thread has copies of the arrays in host memory, so the files have the bits of the step that they
were copied at. It needs no other rank: those write their own files. When all have, the ranks finish
the checkpoint together between two steps. Tests: tests/train/test_background.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.train.checkpoint import Contents, PendingCheckpoint

# The part of one core that writing may take beside steps that need all cores.
CPU_FRACTION = 0.01


_ALIGNMENT = 64  # bytes


class HostMemory:
    """Memory for copies of arrays, which the copies of the next checkpoint use again.

    The pages of new memory take longer than the copies. It is one block: many small ones would fill
    the gaps in the heap that the arrays of a step use, and then each step would get new pages.
    """

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)

    def copies(self, arrays: Iterable[Array]) -> list[np.ndarray[Any, Any]]:
        """Return copies of arrays of any shape, dtype and device, valid until the next call."""
        arrays = list(arrays)
        lengths = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
        *starts, length = accumulate(lengths, initial=0)
        if length > len(self._block):
            self._block = np.empty(0, np.uint8)  # frees the shorter one first
            self._block = np.empty(length, np.uint8)
        found = []
        for start, array in zip(starts, arrays, strict=True):
            part = self._block[start : start + array.nbytes]
            found.append(backend.copy_to_numpy(array, part.view(array.dtype).reshape(array.shape)))
        return found

    def copied(self, contents: Contents) -> Contents:
        """Return the contents of a checkpoint with copies of its arrays."""
        names, arrays = contents.arrays, self.copies(contents.arrays.values())
        return replace(contents, arrays=dict(zip(names, arrays, strict=True)))


class _AbandonedError(Exception):
    """The checkpoint is not wanted any more."""


class BackgroundSaving:
    """A checkpoint that a thread writes, as fast as other work lets it.

    Args:
        saving: its arrays do not change.
        fraction: of the time of a core that the thread takes, until `finish` waits for it.
    """

    def __init__(self, saving: PendingCheckpoint, fraction: float = 1.0) -> None:
        self._saving, self._fraction = saving, fraction
        self._worked = 0.0  # seconds of the thread, at its last rest
        self._is_waited_for, self._abandoned = threading.Event(), False
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads can be started
            self._is_waited_for.set()
            self._write()

    @property
    def is_written(self) -> bool:
        """Whether all is written, without an error."""
        return self._saving.is_written

    def finish(self) -> Path:
        """Wait for the thread, which hurries, and let the checkpoint appear.

        Raises:
            CheckpointError: it could not be written; earlier ones are unchanged.
        """
        self._join()
        return self._saving.finish()

    def abandon(self) -> None:
        """Stop writing, and delete what was written."""
        self._abandoned = True
        self._join()
        self._saving.abandon()

    def _join(self) -> None:
        self._is_waited_for.set()
        if self._thread.is_alive():
            self._thread.join()

    def _write(self) -> None:
        self._saving.write(self._rest)

    def _rest(self) -> None:
        """Sleep as long as the time since the last rest asks for."""
        if self._abandoned:
            raise _AbandonedError
        worked = time.thread_time()
        if self._fraction < 1:
            self._is_waited_for.wait((worked - self._worked) * (1 / self._fraction - 1))
        self._worked = worked
