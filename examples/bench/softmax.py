"""softmax and log_softmax of the last axis: rows for kernels.py."""

from __future__ import annotations

from typing import Any

from examples.bench.timing import Job, Jobs, random_array
from tensorgrad import Tensor, ops
from tensorgrad.dtypes import bfloat16

SHAPES = ((32, 12, 1024, 1024), (8192, 50304), (8192, 50257))


def jobs(torch: Any) -> Jobs:
    """Yield forward and backward for each shape, in bfloat16."""
    for shape in SHAPES:
        size = " x ".join(map(str, shape)) + " bf16"
        x = Tensor(random_array(shape, bfloat16), requires_grad=True)
        dy = random_array(shape, bfloat16, 1)
        bytes_once = 2 * x.size
        node = ops.softmax(x).node
        assert node is not None
        peers: list[dict[str, Any]] = [{}, {}]
        if torch is not None:
            theirs = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            dtheirs = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            y = torch.softmax(theirs, -1)

            def forward(_: int, x: Any = theirs) -> Any:
                return torch.softmax(x, -1)

            def backward(_: int, y: Any = y, x: Any = theirs, dy: Any = dtheirs) -> Any:
                return torch.autograd.grad(y, x, dy, retain_graph=True)

            peers = [{"eager": forward}, {"eager": backward}]
        yield Job("softmax forward", size, 2 * bytes_once,
                  lambda _, x=x: ops.softmax(x), peers[0])  # type: ignore[misc]  # fmt: skip
        yield Job("softmax backward", size, 3 * bytes_once,
                  lambda _, n=node, dy=dy: n.backward(dy, n.saved, (True,)), peers[1])  # type: ignore[misc]  # fmt: skip
