"""Reductions of 1 GB: rows for kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tensorgrad as tg
from examples.bench.timing import Job, Jobs
from tensorgrad import Tensor
from tensorgrad.bench.timing import random_array
from tensorgrad.dtypes import bfloat16, float32

BYTES = 2**30
# The reduction, its axis, and the shape (0: the length that makes 1 GB).
LINES: tuple[tuple[str, int | None, tuple[int, ...]], ...] = (
    ("sum", None, (0,)),
    ("sum", -1, (0, 1024)),
    ("sum", -1, (0, 50257)),
    ("sum", -1, (0, 33)),
    ("sum", 0, (0, 1024)),
    ("sum", 0, (0, 1000)),
    ("sum", 1, (0, 512, 1024)),
    ("sum", 1, (0, 512, 33)),
    ("mean", -1, (0, 1024)),
    ("max", -1, (0, 1024)),
    ("max", None, (0,)),
    ("argmax", -1, (0, 1024)),
    ("argmax", None, (0,)),
    ("argmax", 0, (0, 1024)),
    ("var", -1, (0, 1024)),
    ("var", None, (0,)),
    ("var", 0, (0, 1024)),
    ("norm", None, (0,)),
    ("logsumexp", -1, (0, 1024)),
)
PEERS = {"max": "amax", "norm": "linalg.vector_norm"}


def jobs(torch: Any) -> Jobs:
    """Yield each reduction in float32 and bfloat16."""
    for dtype in (float32, bfloat16):
        for name, axis, lengths in LINES:
            yield _job(torch, name, axis, lengths, dtype)


def _job(torch: Any, name: str, axis: int | None, lengths: tuple[int, ...], dtype: Any) -> Job:
    count = BYTES // dtype.itemsize
    shape = tuple(n or count // max(1, int(np.prod([k for k in lengths if k]))) for n in lengths)
    x = Tensor(random_array(shape, dtype))
    function: Callable[..., Any] = getattr(tg, name)
    peers = {} if torch is None else {"eager": _peer(torch, name, axis, x.data)}
    size = f"{'x'.join(map(str, shape))} axis {axis} {dtype}"
    return Job(name, size, x.data.nbytes, lambda _: function(x, axis), peers)


def _peer(torch: Any, name: str, axis: int | None, x: Any) -> Callable[[int], Any]:
    theirs = torch.from_dlpack(x.view("uint16" if x.itemsize == 2 else x.dtype))
    theirs = theirs.view(torch.bfloat16) if x.itemsize == 2 else theirs
    function = torch
    for part in PEERS.get(name, name).split("."):
        function = getattr(function, part)
    if axis is None and name == "logsumexp":
        axis = 0
    return lambda _: function(theirs) if axis is None else function(theirs, dim=axis)
