"""Training on meshes of ranks against training in one process; run by test_mesh_training.py.

mpirun -n 4 python tests/parallel/mesh_training.py cpu
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from tensorgrad import checkpoint, nn, parallel, random
from tensorgrad.core import backend
from tensorgrad.core.backend import Array
from tensorgrad.core.tensor import Tensor
from tensorgrad.errors import ArgumentError, CommError
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.optim import Adafactor, AdamW, Lion, Muon, in_blocks
from tensorgrad.parallel import Comm, make_mesh, mesh_strategy
from tensorgrad.parallel.tensor import TensorParallel, tensor_parallel
from tensorgrad.train.placement import ArrayPiece, Placement
from tensorgrad.train.shards import pieces_of
from tensorgrad.train.strategy import OneProcess, Strategy
from tests.parallel.tensor_ranks import MODELS, T, small_gpt2, small_llama
from tests.parallel.whole_arrays import assemble

STEPS, ROWS, PARTS = 8, 8, 2
EMPTY = 3  # the step of whose batch nothing counts
Values = np.ndarray[Any, Any]

Case = tuple[int, dict[str, int], dict[str, Any]]

# In float64 rounding hides nothing; two ranks have one and two of its heads of keys and values.
TRAINED = (
    *MODELS,
    lambda: small_llama(heads=6, kv_heads=3, width=48).to("float64"),
    lambda: small_gpt2(layers=8),
    # the rank with one head alone would give the first of two stages three blocks, the other two
    lambda: small_llama(heads=6, kv_heads=3, width=48, layers=4, vocab_size=240).to("float64"),
)

FLOAT64 = len(MODELS)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    # eps keeps Adam from making steps of gradients that are nothing but rounding
    "adamw": lambda flat: AdamW(flat, 1e-3, eps=1e-6, weight_decay=0.1),
    "muon": lambda flat: Muon(flat, 1e-3, matrices=in_blocks, match_adamw=True, eps=1e-6),
    "adafactor": lambda flat: Adafactor(flat, 1e-3, weight_decay=0.1),
    "lion": lambda flat: Lion(flat, 1e-4, weight_decay=1.0),
}

# For each number of ranks: which of these, the mesh, and how it trains.
MESHES: dict[int, list[Case]] = {
    2: [
        (number, {"tp": 2}, {"sequence": sequence})
        for number, sequence in ((0, False), (1, True), (2, False), (FLOAT64, True))
    ]
    + [
        (FLOAT64, {"dp": 2}, {"optimizer": "lion"}),
        (FLOAT64, {"dp": 2}, {"zero": 2}),
        (FLOAT64, {"pp": 2}, {"optimizer": "muon"}),
        (FLOAT64, {"tp": 2}, {"optimizer": "muon"}),
        (FLOAT64, {"tp": 2}, {"optimizer": "adafactor"}),
    ],
    4: [
        (0, {"tp": 4}, {"sequence": True}),
        (FLOAT64, {"dp": 2, "tp": 2}, {"sequence": True}),
        (2, {"dp": 2, "tp": 2}, {"zero": 3, "sequence": True}),
        (FLOAT64, {"dp": 2, "tp": 2}, {"bucket_mb": 0.06, "optimizer": "adafactor"}),
        (FLOAT64, {"dp": 2, "tp": 2}, {"bucket_mb": 0.04, "zero": 1, "optimizer": "muon"}),
        (0, {"pp": 2, "tp": 2}, {"sequence": True}),
        (FLOAT64, {"pp": 2, "tp": 2}, {"schedule": "gpipe"}),
        (5, {"pp": 2, "tp": 2}, {}),
        (FLOAT64, {"dp": 4}, {"reduction": "flat"}),
        (FLOAT64, {"dp": 2, "tp": 2}, {"zero": 3, "sequence": True, "optimizer": "muon"}),
    ],
    8: [
        (0, {"dp": 2, "pp": 2, "tp": 2}, {}),
        (FLOAT64, {"dp": 2, "pp": 2, "tp": 2}, {"zero": 1, "sequence": True}),
    ],
}

# And on GPUs what test_pipeline.py compares on CPUs.
PIPELINES: dict[int, list[Case]] = {
    2: [
        (0, {"pp": 2}, {"schedule": "model-parallel"}),
        (0, {"pp": 2}, {"schedule": "gpipe"}),
        (FLOAT64, {"pp": 2}, {"schedule": "1f1b"}),
        (4, {"pp": 2}, {"schedule": "interleaved", "chunks": 2}),
    ],
    4: [
        (4, {"pp": 4}, {"schedule": "gpipe"}),
        (4, {"pp": 4}, {"schedule": "1f1b"}),
        (0, {"dp": 2, "pp": 2}, {"schedule": "1f1b", "zero": 1}),
        (4, {"dp": 2, "pp": 2}, {"schedule": "interleaved", "chunks": 2}),
    ],
}

# Settings that do not fit, and what is said of them.
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"schedule": "2f2b"},
        "mesh_strategy: schedule is '2f2b', expected one of model-parallel, gpipe",
    ),
    ({"chunks": 2}, "mesh_strategy: chunks is 2 with schedule '1f1b', expected 1; more are for"),
    ({"schedule": "interleaved", "chunks": 0}, "mesh_strategy: chunks is 0, expected 1 or more"),
    ({"reduction": "all"}, "reduction is 'all', expected one of naive, flat, overlap"),
    ({"bucket_mb": -1.0}, "bucket_mb is -1.0, expected more than 0"),
)


def cases(ranks: int, device: str) -> list[Case]:
    """Return the training runs for a number of ranks."""
    return MESHES[ranks] + (PIPELINES.get(ranks, []) if device != "cpu" else [])


class Here:
    """The device of this process, set once by the program."""

    device = "cpu"


class Run(NamedTuple):
    """The result of training: loss and norm of each step, and the parameters at the end."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Values]


def batches() -> tuple[Values, Values]:
    """Return tokens and targets of each step, (STEPS, ROWS, T); few of the first rows' count."""
    tokens = np.random.default_rng(4).integers(0, 37, (STEPS, ROWS, T + 1))
    tokens[::3, 0, 3:] = 36  # so that some steps have larger gradients than others
    x, y = tokens[..., :-1], tokens[..., 1:].copy()
    y[:, 1:4, 2:] = -100
    y[1::4, :4] = -100  # all of a rank
    y[EMPTY] = -100
    return x, y


def train(
    strategy: Strategy,
    make: Callable[[], LanguageModel],
    everyone: Comm,
    parts: int = PARTS,
    optimizer_name: str = "adamw",
) -> Run:
    """Train for some steps with clipping, weight decay and accumulation."""
    x, y = (backend.to_device(array, Here.device) for array in batches())
    model = make().to(Here.device)
    optimizer = strategy.prepare(model, OPTIMIZERS[optimizer_name])
    strategy.begin(0, [])
    random.seed(5)

    def loss(x: Array, y: Array) -> Tensor:
        value: Tensor = model(x, y)
        return value

    totals, norms = [], []
    share = ROWS // strategy.ranks
    mine = slice(strategy.rank * share, (strategy.rank + 1) * share)
    for arrays in zip(x, y, strict=True):
        cut = (array[mine].reshape(parts, -1, T) for array in arrays)
        optimizer.zero_grad()
        total = strategy.compute_gradients(loss, list(zip(*cut, strict=True)))
        norm = optimizer.step(1.0, None, strategy.reduce_norm)
        strategy.after_step()
        totals.append(float(total) / parts)
        assert norm is not None
        norms.append(float(norm))
    sums = strategy.sum(totals)
    boxes = strategy.parts.placements if isinstance(strategy, TensorParallel) else {}
    held = [
        (piece, array)
        for piece, array in pieces_of(model, optimizer, boxes)
        if piece.placement.name.startswith("model/")
    ]
    return Run([each / strategy.ranks for each in sums], norms, whole(held, everyone))


def whole(held: list[tuple[ArrayPiece, Array]], everyone: Comm) -> dict[str, Values]:
    """Return the parameters of the whole model, assembled from those of all ranks."""
    found: dict[str, list[tuple[ArrayPiece, Values]]] = {}
    for one in everyone.all_gather_objects([[p.to_json(), data.tolist()] for p, data in held]):
        for described, data in one:
            piece = ArrayPiece.from_json(described)
            found.setdefault(piece.placement.name, []).append((piece, np.array(data)))
    shapes = {name: parts[0][0].placement.shape for name, parts in found.items()}
    return {
        name: assemble(Placement(name, shapes[name]).piece, parts).reshape(shapes[name])
        for name, parts in found.items()
    }


def compare(name: str, found: Run, expected: Run, most: float) -> None:
    """Ask for so much relative in losses and the vector of all parameters, thrice in norms.

    Terms of small gradients cancel, so that their rounding is more than that of what they are of.
    """
    for what, allowed in (("losses", most), ("norms", 3 * most)):
        a, b = np.array(getattr(found, what)), np.array(getattr(expected, what))
        assert a[EMPTY] == b[EMPTY] == 0, name
        worst = np.abs(np.delete(a, EMPTY) / np.delete(b, EMPTY) - 1).max()
        assert worst <= allowed, f"{name}: {what} differ by {worst:.1e}"
    assert found.parameters.keys() == expected.parameters.keys(), name
    differences, sizes = 0.0, 0.0
    for key, b in expected.parameters.items():
        a = found.parameters[key]
        if key.endswith("qkv.bias"):
            # A bias of all keys alike changes no attention: its gradient is rounding alone, which
            # Adam scales up to steps that differ.
            a, b = np.delete(a.reshape(3, -1), 1, 0), np.delete(b.reshape(3, -1), 1, 0)
        differences += float(np.sum((a - b) ** 2))
        sizes += float(np.sum(b**2))
    assert differences**0.5 <= most * sizes**0.5, f"{name}: {(differences / sizes) ** 0.5:.1e}"


def in_one_process(comm: Comm, wanted: set[tuple[int, str]]) -> dict[tuple[int, str], Run]:
    """Train models in one process, each on one of the ranks, and return all runs on all."""
    runs = {}
    mine = {
        case: train(OneProcess(), TRAINED[case[0]], Comm(), 1, case[1])
        for place, case in enumerate(sorted(wanted))
        if place % comm.size == comm.rank
    }
    for place, case in enumerate(sorted(wanted)):
        run = mine.get(case)
        told = None
        if run is not None:
            arrays = {name: array.tolist() for name, array in run.parameters.items()}
            told = [run.losses, run.norms, arrays]
        losses, norms, arrays = comm.broadcast_object(told, place % comm.size)
        runs[case] = Run(losses, norms, {name: np.array(a) for name, a in arrays.items()})
    return runs


def check_one_rank_that_differs(comm: Comm) -> None:
    """It has sequence parallelism, or freezes parameters, unlike the others."""
    mesh = make_mesh(comm.size, comm.rank, tp=comm.size)
    strategy = mesh_strategy(comm, mesh, sequence=comm.rank == 1)
    with pytest.raises(CommError, match=r"sequence is False on ranks 0, 2-3, True on rank 1; exp"):
        strategy.prepare(small_gpt2(heads=4), AdamW)
    model = small_gpt2(heads=4)
    model.positions.weight.requires_grad = comm.rank != 1
    with pytest.raises(CommError, match=r"positions.weight is .* frozen' on rank 1; expected the"):
        mesh_strategy(comm, mesh).prepare(model, AdamW)


def check_shared_parameters(comm: Comm) -> None:
    """A head that was assigned the token embedding would be sharded twice."""
    model = small_llama(tied=False)
    assert model.output is not None
    model.output.weight = model.tokens.weight
    with pytest.raises(ArgumentError, match=r"output.weight is tokens.weight too, expected layers"):
        mesh_strategy(comm, make_mesh(comm.size, comm.rank, tp=comm.size)).prepare(model, AdamW)


def check_layers_of_others(comm: Comm) -> None:
    """A user's layers without a table are whole on each rank; a row with its own forward is not."""

    class Twice(nn.Linear):
        def forward(self, x: Any) -> Tensor:  # type: ignore[override]
            return super().forward(x) * 2

    def put_gate(model: Any) -> None:
        model.blocks[1].feed_forward.gate = Twice(32, 24, bias=False)

    def put_embedding(model: Any) -> None:
        model.output = nn.Sequential(nn.Linear(32, 40))

    def put_linear(model: Any) -> None:
        model.blocks[1].feed_forward = nn.Linear(32, 32)

    def put_recomputed(model: Any) -> None:
        model.blocks[0].forward = checkpoint(model.blocks[0].forward)

    for put, message in (
        (put_gate, "blocks.1.feed_forward.gate is a Twice with a forward of its own, expected nn"),
        (put_embedding, "output is a Sequential, expected nn.Embedding or nn.Linear, not sharded"),
    ):
        model = small_llama()
        put(model)
        with pytest.raises(ArgumentError, match=message):
            tensor_parallel(model, comm)
        assert model.region is None
    x, y = np.split(np.random.default_rng(0).integers(0, 40, (2, 2, 8)), 2)
    for put in (put_linear, put_recomputed):
        for sequence in (False, True):
            losses = []
            for shared in (False, True):
                random.seed(1)
                put(changed := small_llama())
                parts = tensor_parallel(changed, comm if shared else Comm(), sequence=sequence)
                loss = changed(x[0], y[0])
                loss.backward()
                grad: Any = dict(changed.named_parameters())["blocks.1.norm1.weight"].grad
                if shared and "blocks.1.norm1.weight" in parts.summed:
                    comm.all_reduce(grad)
                losses.append((loss.item(), grad))
            np.testing.assert_allclose(losses[1][0], losses[0][0], rtol=1e-5)
            np.testing.assert_allclose(losses[1][1], losses[0][1], rtol=1e-3, atol=1e-6)


def check_options(comm: Comm) -> None:
    """Options are checked on every mesh, even where an axis of one rank ignores them."""
    for axis in ("dp", "pp", "tp"):
        mesh = make_mesh(comm.size, comm.rank, **{"dp": 1, axis: comm.size})
        for options, message in WRONG:
            with pytest.raises(ArgumentError, match=message):
                mesh_strategy(comm, mesh, **options)


def check_overflow(comm: Comm) -> None:
    """With infinite gradients, as of float16, no rank steps, and none warns."""
    strategy = mesh_strategy(comm, make_mesh(comm.size, comm.rank, pp=2, tp=2))
    model = small_gpt2().to(Here.device)
    optimizer = strategy.prepare(model, AdamW)
    before = optimizer.flat.data.copy()
    for piece in optimizer.flat.shards:
        piece.grad.fill(np.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm = optimizer.step(1.0, None, strategy.reduce_norm)
    assert norm is not None
    assert not np.isfinite(float(norm))
    assert bool((optimizer.flat.data == before).all())


def main() -> None:
    comm = parallel.world()
    Here.device = comm.select_device(sys.argv[1])
    found = cases(comm.size, Here.device)
    named = [options.get("optimizer", "adamw") for *_, options in found]
    expected = in_one_process(
        comm, {(case[0], name) for case, name in zip(found, named, strict=True)}
    )
    for (number, sizes, options), name in zip(found, named, strict=True):
        mesh = make_mesh(comm.size, comm.rank, **sizes)
        ranks = mesh_strategy(comm, mesh, **{k: v for k, v in options.items() if k != "optimizer"})
        run = train(ranks, TRAINED[number], comm, optimizer_name=name)
        most = 1e-12 if number == FLOAT64 else 1e-6
        compare(f"model {number}, {sizes}, {options}", run, expected[number, name], most)
    check_options(comm)
    if comm.size == 4:
        check_overflow(comm)
        check_shared_parameters(comm)
        check_layers_of_others(comm)
        check_one_rank_that_differs(comm)
    if comm.rank == 0:
        print(f"{len(found)} runs on {comm.size} ranks, {Here.device}")


if __name__ == "__main__":
    main()
