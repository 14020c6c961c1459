"""Disks that are full or fail, for tests of what is lost then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes; writing more raises OSError."""
    resource = pytest.importorskip("resource", reason="the system has no file size limits")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def flip(path: Path) -> None:
    """Change one bit of a file, as a disk may that fails."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
