"""Checks of collectives on every rank; run by test_collectives.py, alone and through mpirun.

mpirun -n 4 python tests/parallel/comm/collectives.py cpu
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import Tensor, dtypes, nn, optim, parallel, random
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, CommError, DtypeError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.parallel import Comm
from tensorgrad.parallel.comm import messages
from tests.parallel.comm import pieces
from tests.parallel.comm.arrays import DTYPES, Array, same, values

SHAPES = ((), (1,), (31,), (33,), (1025,), (0,), (3, 0, 2), (5, 7))
LAYOUTS_OF = (dtypes.float32, dtypes.bfloat16, dtypes.bool_)  # they differ in how they are sent


def layouts(array: Array) -> Iterator[Array]:
    """Yield views of new memory with the array's values: dense, strided, reversed, transposed."""
    xp = backend.namespace(array)
    yield array.copy()
    if array.dtype not in LAYOUTS_OF:
        return
    if array.ndim:
        strided = xp.zeros((2 * array.shape[0] + 1, *array.shape[1:]), array.dtype)[1::2]
        strided[...] = array
        yield strided
        backward = array[::-1].copy()[::-1]
        yield backward
    if array.ndim > 1:
        yield array.T.copy().T


def check_reductions(comm: Comm, device: str) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            ranks = np.stack([values(rank, shape, dtype) for rank in range(comm.size)])
            expected = {"max": ranks.astype("float32").max(0).astype(dtype)}
            if dtype != dtypes.bool_:
                expected["sum"] = ranks.astype("float64").sum(0).astype(dtype)
            if dtypes.is_float(dtype):
                mean = ranks.astype("float64").sum(0) / comm.size
                expected["mean"] = mean.astype(dtypes.compute_dtype(dtype)).astype(dtype)
            mine = backend.to_device(ranks[comm.rank, ...], device)
            for op, result in expected.items():
                for array in layouts(mine):
                    comm.all_reduce(array, op)
                    if op == "mean" and device != "cpu":  # NCCL divides before it adds
                        found = backend.to_numpy(array).astype("float64")
                        tolerance = 4 * float(dtypes_eps(dtype))
                        np.testing.assert_allclose(found, result.astype("float64"), tolerance)
                    else:
                        same(array, result)


def dtypes_eps(dtype: Any) -> float:
    return {"float64": 2e-16, "float32": 1e-7, "float16": 1e-3, "bfloat16": 8e-3}[str(dtype)]


def check_moves(comm: Comm, device: str) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            ranks = np.stack([values(rank, shape, dtype) for rank in range(comm.size)])
            mine = backend.to_device(ranks[comm.rank, ...], device)
            for array in layouts(mine):
                same(comm.all_gather(array), ranks)
                same(array, ranks[comm.rank, ...])
            for root in {0, comm.size - 1}:
                for array in layouts(mine):
                    comm.broadcast(array, root)
                    same(array, ranks[root, ...])


def check_what_lies_beside_a_view_stays(comm: Comm, device: str) -> None:
    whole = backend.to_device(np.ones((4, 6), "float32"), device)
    comm.all_reduce(whole[1:3, ::2])
    expected = np.ones((4, 6), "float32")
    expected[1:3, ::2] = comm.size
    same(whole, expected)


def check_parts(comm: Comm, device: str) -> None:
    """Arrays of several parts: at the real size, and with parts of 64 bytes."""
    long = (messages._PART_BYTES // 4 * 2 + 3,)
    check_long(comm, device, long, "float32")
    usual, messages._PART_BYTES = messages._PART_BYTES, 64
    for dtype in (dtypes.bfloat16, dtypes.float64, dtypes.int8):
        for length in (7, 8, 63, 64, 65, 200):
            check_long(comm, device, (length,), dtype)
    messages._PART_BYTES = usual


def check_long(comm: Comm, device: str, shape: tuple[int, ...], dtype: Any) -> None:
    ranks = np.stack([values(rank, shape, dtype) for rank in range(comm.size)])
    array = backend.to_device(ranks[comm.rank, ...].copy(), device)
    same(comm.all_gather(array), ranks)
    comm.all_reduce(array)
    same(array, ranks.astype("float64").sum(0).astype(dtype))
    comm.broadcast(array, comm.size - 1)
    same(array, ranks.astype("float64").sum(0).astype(dtype))


def check_equal_bits(comm: Comm, device: str) -> None:
    """Inexact sums are the same on all ranks, and the same when repeated."""
    for dtype in (dtypes.float32, dtypes.float64, dtypes.bfloat16):
        for shape in ((7,), (1025,), (300_001,)):
            host = np.random.default_rng(comm.rank).standard_normal(shape).astype(dtype)
            once, again = (backend.to_device(host.copy(), device) for _ in range(2))
            comm.all_reduce(once, "mean")
            comm.all_reduce(again, "mean")
            for found in (again, *comm.all_gather(once)):
                same(found, backend.to_numpy(once))


def check_sixteen_bits_are_rounded_once(comm: Comm, device: str) -> None:
    """256 + 1 is 256 in bfloat16, so adding ones one by one would lose them."""
    array = np.full(9, 256 if comm.rank == 0 else 1, dtypes.bfloat16)
    comm.all_reduce(array)
    same(array, np.full(9, 255 + comm.size).astype(dtypes.bfloat16))
    large = np.full(3, 60000, "float16")
    comm.all_reduce(large)
    same(large, np.full(3, np.inf if comm.size > 1 else 60000, "float16"))
    large = np.full(3, 60000, "float16")
    comm.all_reduce(large, "mean")
    same(large, np.full(3, 60000, "float16"))


def check_not_finite(comm: Comm, device: str) -> None:
    array = backend.to_device(np.array([np.nan if comm.rank == 0 else 1, np.inf, 1]), device)
    comm.all_reduce(array)
    assert np.isnan(float(array[0]))
    same(array[1:], np.array([np.inf, comm.size]))


def check_objects(comm: Comm, device: str) -> None:
    mine = {"rank": comm.rank, "text": "é" * comm.rank, "list": [None, 1.5, True]}
    everyone = [
        {"rank": rank, "text": "é" * rank, "list": [None, 1.5, True]} for rank in range(comm.size)
    ]
    last = comm.size - 1
    assert comm.all_gather_objects(mine) == everyone
    assert comm.gather_objects(mine, last) == (everyone if comm.rank == last else None)
    assert comm.broadcast_object(mine if comm.rank == last else object(), last) == everyone[last]
    assert comm.all_gather_objects((1, 2)) == [[1, 2]] * comm.size
    comm.barrier()


def check_trees(comm: Comm, device: str) -> None:
    mean = (comm.size - 1) / 2
    halves = backend.to_device(np.full((2, 2), comm.rank, dtypes.bfloat16), device)
    wide = backend.to_device(np.full(3, comm.rank, "float64"), device)
    value: dict[str, Any] = {"a": [Tensor(halves), None], "b": (Tensor(wide), Tensor(halves[:0]))}
    found = parallel.all_reduce_tree(value, comm)
    same(found["a"][0].data, np.full((2, 2), mean, dtypes.bfloat16))
    same(found["b"][0].data, np.full(3, mean))
    assert found["a"][1] is None
    assert found["b"][1].shape == (0, 2)
    assert found["a"][0].dtype == dtypes.bfloat16
    same(wide, np.full(3, float(comm.rank)))
    each = [np.random.default_rng(rank).standard_normal(5, "float32") for rank in range(comm.size)]
    narrow = [x.astype(dtypes.bfloat16) for x in each]
    total = np.sum([x.astype("float32") for x in narrow], 0, dtype="float32")
    averaged = parallel.all_reduce_tree(Tensor(backend.to_device(narrow[comm.rank], device)), comm)
    same(averaged.data, (total / np.float32(comm.size)).astype(dtypes.bfloat16))  # rounded once
    if comm.size > 1:
        with pytest.raises(DtypeError, match="array is int16, expected floats"):
            parallel.all_reduce_tree(Tensor(backend.to_device(np.ones(2, "int16"), device)), comm)
    layer = nn.Linear(1, 1, bias=False).to(device)
    parallel.broadcast_parameters([layer.weight.data], comm)
    broadcast_weight = layer.weight.numpy()
    x = Tensor(backend.to_device(np.full((1, 1), 1.0 + comm.rank, "float32"), device))
    product = tg.hvp(lambda layer: (layer(x) ** 2).sum(), (layer,), (layer,))
    (mean_product,) = parallel.all_reduce_tree(product, comm)
    factor = np.mean([2 * (1.0 + rank) ** 2 for rank in range(comm.size)])
    np.testing.assert_allclose(mean_product.weight.numpy(), factor * broadcast_weight, rtol=1e-6)


def check_products_under_zero(comm: Comm, device: str) -> None:
    config = GPT2Config(vocab_size=19, context=8, layers=2, heads=2, width=16)
    rng = np.random.default_rng(comm.rank)
    x, y = (Tensor(backend.to_device(t, device)) for t in rng.integers(0, 19, (2, 2, 8), np.int32))
    for stage in (1, 2, 3):
        random.seed(0)
        model = GPT2(config).to(device)
        vector = {n: Tensor(p.data.copy()) for n, p in model.named_parameters()}

        def loss(p: Any, model: GPT2 = model) -> Tensor:
            value: Tensor = tg.functional_call(model, p, x, y)
            return value

        right = tg.hvp(loss, (dict(model.named_parameters()),), (vector,))[0]
        strategy = parallel.Zero(comm, stage)
        optimizer = strategy.prepare(model, optim.SGD)
        whole = strategy.gather_parameters()
        found = tg.hvp(loss, (whole,), (vector,))[0]
        for name, product in right.items():
            same(found[name].data, backend.to_numpy(product.data))
        if stage == 3:
            message = "is in shards in ZeRO 3, expected functional_call with the strategy's gather"
            with pytest.raises(ArgumentError, match=message):
                tg.hvp(lambda model: model(x, y), (model,), (vector,))
        strategy.compute_gradients(model, [(x.data, y.data)])
        optimizer.step()
        strategy.after_step()
        strategy.begin(0, [])


def check_data_parallel(comm: Comm, device: str) -> None:
    arrays = [
        backend.to_device(np.full(3, comm.rank, "float32"), device),
        backend.to_device(np.full((2, 2), comm.rank, dtypes.bfloat16), device),
    ]
    parallel.broadcast_parameters(arrays, comm)
    same(arrays[0], np.zeros(3, "float32"))
    same(arrays[1], np.zeros((2, 2), dtypes.bfloat16))
    grad = backend.to_device(np.arange(5, dtype="float32") * comm.rank, device)
    parallel.all_reduce_gradients(grad, comm)
    np.testing.assert_allclose(
        backend.to_numpy(grad), np.arange(5) * (comm.size - 1) / 2, rtol=1e-6
    )
    check_trees(comm, device)
    strategy = parallel.DataParallel(comm)
    assert (strategy.rank, strategy.ranks, strategy.is_main) == (
        comm.rank,
        comm.size,
        comm.rank == 0,
    )
    assert strategy.sum([comm.rank, 0.5]) == [comm.size * (comm.size - 1) / 2, comm.size / 2]
    assert strategy.sum([]) == []
    arrays = [backend.to_device(np.full(3, comm.rank + 1.0), device) for _ in range(2)]
    strategy.begin(7, arrays)
    for array in arrays:
        same(array, np.ones(3))
    with pytest.raises(ArgumentError, match="was not called"):
        strategy.reduce_gradients()
    optimizer = strategy.prepare(nn.Linear(3, 2).to(device), optim.SGD)
    optimizer.flat.grad.fill(comm.rank)
    strategy.reduce_gradients()
    same(optimizer.flat.grad, np.full(optimizer.flat.size, (comm.size - 1) / 2, "float32"))


def check_disagreements(comm: Comm, device: str) -> None:
    """Each is an error on all ranks, and all ranks can continue."""
    if comm.size == 1:
        return
    odd = comm.rank == 1
    x = backend.to_device(np.ones(60 + odd, "float32"), device)  # sizes that were not used before
    here = "the CPU" if device == "cpu" else "a GPU"
    fails(
        lambda: comm.all_reduce(x),
        rf"all_reduce\(sum\): .* \(60,\) on {here} on rank.*float32 \(61,\) on {here} on rank 1",
    )
    fails(lambda: comm.all_gather(x[: 53 - odd]), r"float32 \(52,\) on .* on rank 1")
    fails(
        lambda: comm.broadcast(x[:53].astype("float64" if odd else "float32")),
        "float64 .* on rank 1",
    )
    fails(lambda: comm.all_reduce(x[:54], "max" if odd else "sum"), r"all_reduce\(max\) .* rank 1")
    fails(lambda: comm.broadcast(x[:55], int(odd)), r"broadcast\(root=1\) .* on rank 1")
    fails(lambda: comm.all_reduce(x[:56]) if odd else comm.barrier(), "barrier on rank")
    fails(lambda: comm.broadcast_object(1) if odd else comm.barrier(), "barrier on rank")
    fails(
        lambda: comm.agree("options", {"lr": 0.1 + odd, "seed": 1, f"only {odd}": 2}),
        r"options: lr is 0\.1 on rank.*, 1\.1 on rank 1; only False is 2 on .*, missing on rank 1",
    )
    fails(
        lambda: parallel.broadcast_parameters([x[:3]] * (1 + odd), comm),
        r"broadcast_parameters: arrays is \['float32 \(3,\)'\] on rank",
    )
    fails(
        lambda: parallel.DataParallel(comm).begin(0 if odd else 20, []),
        "train: step is 20 on rank.*, 0 on rank 1; expected the same on all ranks",
    )
    facts = {"lr": 0.1 + odd}
    strategies = (parallel.DataParallel, partial(parallel.Zero, stage=1), parallel.Pipeline)
    for strategy in (*strategies, parallel.TensorParallel):
        fails(
            partial(strategy(comm).begin, 7, [], facts),
            r"train: lr is 0\.1 on rank.*, 1\.1 on rank 1; expected the same on all ranks",
        )
    comm.agree("options", {"lr": 0.1})
    y = backend.to_device(np.ones(4, "float32"), device)
    comm.all_reduce(y)
    same(y, np.full(4, comm.size, "float32"))


def fails(call: Callable[[], object], message: str) -> None:
    with pytest.raises(CommError, match=message):
        call()


def check_arguments(comm: Comm, device: str) -> None:
    """Errors on every rank, or before anything is sent."""
    x = backend.to_device(np.ones(3, "float32"), device)
    whole = backend.to_device(np.ones(3, "int32"), device)
    with pytest.raises(ArgumentError, match="op is 'prod', expected one of sum, mean, max"):
        comm.all_reduce(x, "prod")
    with pytest.raises(ArgumentError, match="array is a list, expected a NumPy or CuPy array"):
        comm.all_reduce([1.0])
    with pytest.raises(ArgumentError, match="share: array is a view with gaps, expected an array"):
        comm.share(x[::2])
    assert device != "cpu" or comm.share(np.ones(4)) is None
    with pytest.raises(ArgumentError, match=f"root is {comm.size}, expected 0 to {comm.size - 1}"):
        comm.broadcast(x, comm.size)
    with pytest.raises(DtypeError, match="array is int32, expected floats"):
        comm.all_reduce(whole, "mean")
    with pytest.raises(DtypeError, match="array is bool, expected numbers"):
        comm.all_reduce(whole.astype(bool))
    with pytest.raises(DtypeError, match="all_gather: array is complex64, expected one of fl"):
        comm.all_gather(x.astype("complex64"))
    with pytest.raises(ArgumentError, match="expected what JSON can hold"):
        comm.all_gather_objects(object())
    if device == "cpu":
        with pytest.raises(ArgumentError, match="read-only"):
            comm.all_reduce(np.broadcast_to(np.float32(1), (3,)))
        with pytest.raises(DtypeError, match=r"all_reduce: array is >f4, expected one of float64,"):
            comm.all_reduce(x.astype(">f4"))

        class Other(np.ndarray[Any, Any]):
            """Stands for numpy.memmap, which is a subclass too."""

        comm.all_reduce(x.view(Other))
        same(x, np.full(3, comm.size, "float32"))


CHECKS = (
    tuple(
        check
        for name, check in sorted(globals().items())
        if name.startswith("check_") and check is not check_long
    )
    + pieces.CHECKS
)


def main() -> None:
    comm = parallel.world()
    device = comm.select_device(sys.argv[1])
    for check in CHECKS:
        check(comm, device)
        comm.barrier()
    if comm.rank == 0:
        print(f"{len(CHECKS)} checks on {comm.size} ranks, {device}")


if __name__ == "__main__":
    main()
