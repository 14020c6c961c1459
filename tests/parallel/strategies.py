"""Data parallelism and ZeRO against one process; run by test_strategies.py through mpirun.

mpirun -n 4 python tests/parallel/strategies.py FOLDER cpu
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tensorgrad import Tensor, autocast, checkpoint, graph, nn, optim, parallel, random
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, CommError, GradError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.optim import LossScaler, Optimizer
from tensorgrad.parallel import Comm, DataParallel, Zero
from tensorgrad.parallel.shards import ShardedParameters
from tensorgrad.train.loop import mean_loss
from tensorgrad.train.strategy import Batch, OneProcess, Strategy
from tests.optim import toy
from tests.train.tiny_run import make_trainer

# No size is a multiple of the ranks.
ODD = GPT2Config(vocab_size=37, context=7, layers=3, heads=2, width=18)
ROWS = 8
Array = np.ndarray[Any, Any]
Make = Callable[[Comm], Strategy]
Check = Callable[[Comm, Path], None]
STRATEGIES: dict[str, Make] = {
    "naive": lambda comm: DataParallel(comm, "naive"),
    "flat": lambda comm: DataParallel(comm, "flat"),
    "overlap": lambda comm: DataParallel(comm, "overlap", bucket_mb=0.015),
    "one bucket": lambda comm: DataParallel(comm),
    "zero 1": lambda comm: Zero(comm, 1, bucket_mb=0.015),
    "zero 2": lambda comm: Zero(comm, 2),
    "zero 3": lambda comm: Zero(comm, 3),
}
OVERLAPPING = ("overlap", "zero 1", "zero 2", "zero 3")


class Here:
    """The device of this process, set once by the program."""

    device = "cpu"


class Run(NamedTuple):
    """The result of a few steps of training."""

    model: nn.Module
    optimizer: Optimizer
    strategy: Strategy
    losses: list[float]
    norms: list[float]


class Extended(GPT2):
    """A GPT-2 with parameters that no loss depends on, one of them in a block, and a frozen one."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.unused = nn.Parameter(np.ones((3, 5), "float32"))
        vars(self.blocks[1])["unused"] = nn.Parameter(np.ones(11, "float32"))
        self.positions.weight.requires_grad = False


def adamw(parameters: Any) -> Optimizer:
    return optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def adafactor(parameters: Any) -> Optimizer:
    return optim.Adafactor(parameters, lr=1e-2, weight_decay=0.1)


def muon(parameters: Any) -> Optimizer:
    return optim.Muon(parameters, lr=1e-2, matrices=optim.in_blocks)


def lion(parameters: Any) -> Optimizer:
    return optim.Lion(parameters, lr=3e-4, weight_decay=1.0)


def batch(step: int, config: GPT2Config) -> tuple[Array, Array]:
    """Return the rows of all ranks together, on the device."""
    rng = np.random.default_rng([5, step])
    tokens = rng.integers(0, config.vocab_size, (ROWS, config.context + 1))
    tokens[:, 1::2] = (5 * tokens[:, 0:-1:2] + 3) % config.vocab_size  # something to learn
    x, y = tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)
    return backend.to_device(x, Here.device), backend.to_device(y, Here.device)


def parts_of(whole: Sequence[Array], strategy: Strategy, accumulate: int) -> list[Batch]:
    """Return this rank's rows in equal parts."""
    rows = len(whole[0]) // (strategy.ranks * accumulate)
    first = strategy.rank * accumulate
    return [
        tuple(a[(first + k) * rows : (first + k + 1) * rows] for a in whole)
        for k in range(accumulate)
    ]


def train(
    strategy: Strategy,
    *,
    kind: type[GPT2] = GPT2,
    config: GPT2Config = ODD,
    steps: int,
    accumulate: int = 1,
    clip: float | None = 0.5,
    dtype: str = "float32",
    scaler: LossScaler | None = None,
    make: Callable[[Any], Optimizer] = adamw,
    captured: bool = False,
) -> Run:
    """Train from the same start on the same data, whatever the ranks."""
    random.seed(3)
    model = kind(config).to(Here.device, dtype)
    if strategy.rank > 0:  # the values of rank 0 count
        for parameter in model.parameters():
            parameter.data[...] = 0
    optimizer = strategy.prepare(model, make)
    strategy.begin(0, [tensor.data for tensor in model.state_dict().values()])
    losses, norms = [], []

    def loss(x: Array, y: Array) -> Tensor:
        found: Tensor = model(x, y)
        return found

    def take(*arrays: Array) -> Any:
        optimizer.zero_grad()
        parts = [tuple(arrays[i : i + 2]) for i in range(0, len(arrays), 2)]
        total = strategy.compute_gradients(loss, parts, scaler)
        norm = optimizer.step(clip, scaler, strategy.reduce_norm)
        strategy.after_step()
        return total, norm

    one_step: Any = graph.capture(take) if captured else take
    for step in range(steps):
        parts = parts_of(batch(step, config), strategy, accumulate)
        total, norm = one_step(*(array for part in parts for array in part))
        losses.append(strategy.sum([float(total) / accumulate])[0] / strategy.ranks)
        norms.append(0.0 if norm is None else float(norm))
    if captured:
        assert one_step.graphs == 1
    return Run(model, optimizer, strategy, losses, norms)


def vector(run: Run, other: Run) -> tuple[Array, Array]:
    """Return what this rank updates, of the run itself and of one process, as two vectors.

    Without the biases of keys: alike for all keys they change no attention, so their gradients
    are rounding alone, which Adam scales up to steps that differ.
    """
    whole = {name: p.numpy() for name, p in other.model.named_parameters()}
    ours, others = [], []
    for name, values, _, data in run.optimizer.flat.parameter_shards():
        expected = whole[name].reshape(-1)[values]
        kept = np.ones(len(data), bool)
        if name.endswith("qkv.bias"):
            third = whole[name].size // 3
            places = np.arange(values.start, values.stop)
            kept = (places < third) | (places >= 2 * third)
        ours.append(backend.to_numpy(data)[kept].astype("float64"))
        others.append(expected[kept].astype("float64"))
    return np.concatenate([np.zeros(0), *ours]), np.concatenate([np.zeros(0), *others])


def same(run: Run, alone: Run, tolerance: float = 1e-6) -> None:
    """Compare losses, norms and the vector of all parameters, relative to its length."""
    np.testing.assert_allclose(run.losses, alone.losses, rtol=tolerance)
    np.testing.assert_allclose(run.norms, alone.norms, rtol=10 * tolerance)
    ours, others = vector(run, alone)
    difference, length = run.strategy.sum([((ours - others) ** 2).sum(), (others**2).sum()])
    assert length > 1
    assert difference**0.5 <= tolerance * length**0.5, (difference / length) ** 0.5
    if not (
        isinstance(run.strategy, Zero) and run.strategy.stage == 3
    ):  # every rank has everything
        crc = zlib.crc32(b"".join(p.numpy().tobytes() for p in run.model.parameters()))
        assert run.strategy.sum([crc]) == [crc * run.strategy.ranks]


def check_every_mode_equals_one_process(comm: Comm, folder: Path) -> None:
    steps = 8 if Here.device == "cpu" else 20
    alone = train(OneProcess(), steps=steps)
    assert alone.losses[-1] < alone.losses[0] - 0.1
    for make in STRATEGIES.values():
        same(train(make(comm), steps=steps), alone)


def check_without_clipping_every_bit_is_equal(comm: Comm, folder: Path) -> None:
    """Bucketing changes no sum; only the norm is added in another order.

    Of more than two terms NCCL adds those first that come first on the way.
    """
    if Here.device != "cpu" and comm.size > 2:
        return
    has_equal_bits(comm, list(STRATEGIES))
    has_equal_bits(comm, OVERLAPPING, make=lion)
    has_equal_bits(comm, OVERLAPPING, make=muon)
    has_equal_bits(comm, OVERLAPPING, make=muon, dtype="bfloat16")


def has_equal_bits(comm: Comm, strategies: Sequence[str], **options: Any) -> None:
    """Check that strategies give the bits of the naive one."""
    naive = train(STRATEGIES["naive"](comm), clip=None, steps=2, **options)
    expected = {name: p.numpy() for name, p in naive.model.named_parameters()}
    for strategy in strategies:
        run = train(STRATEGIES[strategy](comm), clip=None, steps=2, **options)
        for name, values, _, data in run.optimizer.flat.parameter_shards():
            bits = expected[name].reshape(-1)[values].tobytes()
            assert backend.to_numpy(data).tobytes() == bits, f"{strategy}: {name}"
    tolerance = 2e-2 if options.get("dtype") else 1e-5 if options else 1e-6
    same(naive, train(OneProcess(), clip=None, steps=2, **options), tolerance)


def check_captured_steps(comm: Comm, folder: Path) -> None:
    """A step is one CUDA graph with the collectives inside, for the bits of eager steps."""
    if Here.device == "cpu":
        return
    config = replace(ODD, dropout=0.2)
    for name, make in STRATEGIES.items():
        eager, found = (
            train(make(comm), config=config, steps=6, accumulate=2, captured=captured)
            for captured in (False, True)
        )
        assert (eager.losses, eager.norms) == (found.losses, found.norms), name
        for one, other in zip(
            eager.optimizer.flat.parameter_shards(),
            found.optimizer.flat.parameter_shards(),
            strict=True,
        ):
            assert backend.to_numpy(one.data).tobytes() == backend.to_numpy(other.data).tobytes()


def check_accumulation(comm: Comm, folder: Path) -> None:
    alone = train(OneProcess(), accumulate=2, steps=3)
    for name in ("flat", *OVERLAPPING):
        same(train(STRATEGIES[name](comm), accumulate=2, steps=3), alone)


def check_dropout_depends_on_the_cut_of_the_batch_alone(comm: Comm, folder: Path) -> None:
    config = replace(ODD, dropout=0.2)
    alone = train(OneProcess(), config=config, accumulate=4, steps=5)
    plain = train(OneProcess(), config=replace(ODD, dropout=0.0), accumulate=4, steps=5)
    assert abs(alone.losses[-1] - plain.losses[-1]) > 1e-3
    for name in ("overlap", "zero 3"):
        ranks = STRATEGIES[name](comm)
        same(train(ranks, config=config, accumulate=4 // comm.size, steps=5), alone)


def check_clipping(comm: Comm, folder: Path) -> None:
    alone = train(OneProcess(), clip=1e-2, steps=3)
    assert min(alone.norms) > 1e-2
    for name in OVERLAPPING:
        same(train(STRATEGIES[name](comm), clip=1e-2, steps=3), alone)


def check_16_bit_parameters_with_master_weights(comm: Comm, folder: Path) -> None:
    for dtype, scaler in (("bfloat16", None), ("float16", LossScaler)):
        names = OVERLAPPING[:: 1 if scaler is None else 3]
        runs = [
            train(ranks, dtype=dtype, steps=3, scaler=scaler and scaler())
            for ranks in (OneProcess(), *(STRATEGIES[name](comm) for name in names))
        ]
        for run in runs[1:]:
            same(run, runs[0], tolerance=2e-3)
            for part in run.optimizer.flat.parameter_shards():
                master = backend.to_numpy(run.optimizer.values(part))
                assert master.dtype == np.float32
                assert toy.same_bits([toy.rounded(master, part.data.dtype)], [part.data])


def check_scales_of_8_bits(comm: Comm, folder: Path) -> None:
    config = GPT2Config(vocab_size=32, context=16, layers=3, heads=2, width=32)
    tokens = (np.arange(8)[:, None] * 5 + np.arange(17) * 3) % 32
    for name in ("flat", "zero 1", "zero 2"):
        random.seed(3)
        model, strategy = GPT2(config).to(Here.device, "bfloat16"), STRATEGIES[name](comm)
        scales = optim.Fp8Scales(model.named_parameters())
        optimizer = strategy.prepare(model, adamw)
        own = backend.to_device(tokens[comm.rank :: comm.size], Here.device)

        def loss(x: Array, y: Array, model: GPT2 = model, scales: Any = scales) -> Tensor:
            with autocast("fp8", scales=scales):
                return model(x, y)

        for _ in range(3):
            optimizer.zero_grad()
            strategy.compute_gradients(loss, [(own[:, :-1], own[:, 1:])], scales)
            optimizer.step(0.5, scales, strategy.reduce_norm)
            strategy.after_step()
        state = scales.state_dict()
        last = [[values[2] for values in layer[2]] for layer in state["layers"].values()]
        assert min(map(min, last)) > 0
        comm.agree(
            name,
            {
                "scales": state,
                "weights": zlib.crc32(  # equal on all ranks
                    b"".join(backend.to_numpy(p.data).tobytes() for p in model.parameters())
                ),
            },
        )


def check_unused_and_frozen_parameters(comm: Comm, folder: Path) -> None:
    alone = train(OneProcess(), kind=Extended, steps=4)
    frozen = alone.model.state_dict()["positions.weight"].numpy()
    for name in OVERLAPPING:
        run = train(STRATEGIES[name](comm), kind=Extended, steps=4)
        same(run, alone)
        after = run.model.state_dict()
        assert np.array_equal(after["positions.weight"].numpy(), frozen)
        assert (after["unused"].numpy() == 1).all()  # weight decay moves no unused parameter
        assert "positions.weight" not in run.optimizer.flat.slots


def check_a_parameter_that_one_rank_alone_uses(comm: Comm, folder: Path) -> None:
    for name in ("naive", "overlap", "zero 1", "zero 2"):
        run = train(STRATEGIES[name](comm), kind=Extended, steps=1)
        assert isinstance(run.model, Extended)
        run.optimizer.zero_grad()

        def loss(x: Array, y: Array, run: Run = run) -> Tensor:
            found: Tensor = run.model(x, y)
            assert isinstance(run.model, Extended)
            return found + run.model.unused.sum() if run.strategy.rank == 0 else found

        run.strategy.compute_gradients(loss, parts_of(batch(1, ODD), run.strategy, 1))
        for piece in run.optimizer.flat.shards:
            places = piece.begin + np.arange(len(piece.grad))
            slot = run.optimizer.flat.slots["unused"].span
            used = (places >= slot.start) & (places < slot.stop)
            assert np.all(backend.to_numpy(piece.grad)[used] == np.float32(1 / comm.size)), name
        assert run.optimizer.flat.without_gradient() == {"blocks.1.unused"}
        run.optimizer.step()
        run.strategy.after_step()
        assert (run.model.unused.numpy() < 1).all()


def check_other_optimizers(comm: Comm, folder: Path) -> None:
    def momentum(parameters: Any) -> Optimizer:
        return optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)

    alone = train(OneProcess(), make=momentum, steps=4)
    for name in ("overlap", "zero 1", "zero 3"):
        same(train(STRATEGIES[name](comm), make=momentum, steps=4), alone)


def check_adafactor(comm: Comm, folder: Path) -> None:
    """All ranks keep the same state, whatever they update."""
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 2e-3)):
        alone = train(OneProcess(), make=adafactor, steps=3, dtype=dtype)
        for name in OVERLAPPING[:: 1 if dtype == "float32" else 3]:
            run = train(STRATEGIES[name](comm), make=adafactor, steps=3, dtype=dtype)
            same(run, alone, tolerance)
            kinds = [kind for kind in run.optimizer.state if kind != "low_bits"]
            assert kinds == ["row", "column", "v"]
            for kind in kinds:
                state = backend.to_numpy(run.optimizer.state[kind])
                crc = zlib.crc32(state.tobytes())
                assert run.strategy.sum([crc]) == [crc * comm.size], f"{name}: {kind}"
                if dtype == "float32":
                    expected = backend.to_numpy(alone.optimizer.state[kind])
                    found = optim.flat.cut(state, run.optimizer.slots[kind])
                    for each, value in optim.flat.cut(
                        expected, alone.optimizer.slots[kind]
                    ).items():
                        np.testing.assert_allclose(found[each], value, rtol=1e-3, atol=1e-12)


def check_muon(comm: Comm, folder: Path) -> None:
    """Momentum is sharded; matrices that are cut between ranks are gathered.

    Small singular values of a gradient, which 16 bits round, become about 1 as well.
    """
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 2e-2)):
        alone = train(OneProcess(), make=muon, steps=3, dtype=dtype)
        assert alone.losses[-1] < alone.losses[0]
        for name in OVERLAPPING[:: 1 if dtype == "float32" else 3]:
            run = train(STRATEGIES[name](comm), make=muon, steps=3, dtype=dtype)
            same(run, alone, tolerance)
            flat = run.optimizer.flat
            if name != "overlap":
                assert run.optimizer.state["m"].size * comm.size == flat.size
                cut = [
                    part.name
                    for part in flat.parameter_shards()
                    if part.data.size < math.prod(flat.slots[part.name].shape)
                ]
                assert comm.size == 1 or cut, "no matrix is cut between ranks"


def check_steps_that_are_not_finite_are_skipped_by_all(comm: Comm, folder: Path) -> None:
    for name in OVERLAPPING:
        skips_a_step(STRATEGIES[name](comm), name)
    for name in ("zero 1", "zero 3"):
        skips_a_step(STRATEGIES[name](comm), name, make=adafactor)
        skips_a_step(STRATEGIES[name](comm), name, make=muon)


def skips_a_step(strategy: Strategy, name: str, **options: Any) -> None:
    """Check that a step whose loss is NaN on the last rank changes nothing."""
    run = train(strategy, steps=1, **options)
    before = [data.copy() for *_, data in run.optimizer.flat.parameter_shards()]
    before += [array.copy() for array in run.optimizer.state.values()]
    run.optimizer.zero_grad()

    def loss(x: Array, y: Array, run: Run = run) -> Tensor:
        found: Tensor = run.model(x, y)
        return found * (np.nan if run.strategy.rank == run.strategy.ranks - 1 else 1.0)

    strategy.compute_gradients(loss, parts_of(batch(1, ODD), strategy, 1))
    norm = run.optimizer.step(1.0, None, strategy.reduce_norm)
    assert norm is not None
    assert not np.isfinite(float(norm)), name
    after = [data for *_, data in run.optimizer.flat.parameter_shards()]
    after += run.optimizer.state.values()
    assert all(bool((a == b).all()) for a, b in zip(before, after, strict=True)), name


def check_evaluation_with_other_numbers_of_batches(comm: Comm, folder: Path) -> None:
    """The last rank has one batch fewer than the others; then only the first has any.

    As many targets are ignored as the number of a batch says.
    """

    def ignoring(number: int) -> tuple[Array, Array]:
        x, y = batch(50 + number, ODD)
        y[: number % 9, 1:] = -100
        return x, y

    alone = train(OneProcess(), steps=2)
    for name in ("flat", "zero 3"):
        run = train(STRATEGIES[name](comm), steps=2)
        for counts in ([2] * (comm.size - 1) + [1], [1] + [0] * (comm.size - 1)):
            mine = [ignoring(10 * comm.rank + i) for i in range(counts[comm.rank])]
            everyone = [ignoring(10 * r + i) for r in range(comm.size) for i in range(counts[r])]
            found = mean_loss(run.model, run.model, mine, run.strategy)
            assert found == pytest.approx(mean_loss(alone.model, alone.model, everyone), rel=1e-6)


def memory(run: Run) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state that a rank holds."""
    flat = run.optimizer.flat
    gradients = flat.gradient_memory if isinstance(flat, ShardedParameters) else [flat.grad]
    return {
        "parameters": sum(array.nbytes for array in flat.memory),
        "gradients": sum(array.nbytes for array in gradients),
        "state": sum(array.nbytes for array in run.optimizer.state.values()),
    }


def check_memory(comm: Comm, folder: Path) -> None:
    """Check each stage against docs/chapters/parallel.md: P, U and R are elements with gaps."""
    n = comm.size
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        found = {
            name: memory(train(STRATEGIES[name](comm), steps=0, dtype=dtype))
            for name in ("flat", *OVERLAPPING)
        }
        kept = 8 if dtype == "float32" else 10  # m and v, and low bits of master weights
        random.seed(3)
        parameters = dict(GPT2(ODD).named_parameters())
        flat = ShardedParameters(
            parameters.items(), 0, n, 2,
            {name: int(name.split(".")[1]) if "blocks" in name else None for name in parameters},
        )  # fmt: skip
        sizes = [flat.buckets[number].size for number in flat.units]
        p, u, r = flat.size, sizes[0], flat.size - sum(sizes)
        assert sizes == [u] * ODD.layers
        slots = (p - r) // n + 2 * u + r
        assert found["zero 2"] == {
            "parameters": size * p,
            "gradients": 4 * slots,
            "state": kept * p // n,
        }
        assert found["zero 3"] == found["zero 2"] | {"parameters": size * slots}
        one = found["zero 1"]
        assert one["state"] * n == one["parameters"] // size * kept
        assert one["gradients"] == one["parameters"] // size * 4
        most = size * 64 * len(parameters)  # each bucket may end in a gap
        assert 0 <= found["overlap"]["parameters"] - found["flat"]["parameters"] < most
        used = sum(p.size for p in parameters.values())
        assert size * used < found["flat"]["parameters"] < size * used * 1.5


def check_a_run_resumes_on_other_ranks(comm: Comm, folder: Path) -> None:
    """All ranks start, half of them resume, all finish, each time with another strategy."""
    alone = {}
    for make in (adamw, adafactor, muon):
        trainer = make_trainer(
            folder / f"alone-{comm.rank}-{make.__name__}", steps=12, micro_batches=4,
            make_optimizer=make,
        )  # fmt: skip
        trainer.run()
        alone[make] = {name: p.data for name, p in trainer.model.named_parameters()}
    half = comm.size // 2
    groups = [range(half), range(half, comm.size)]
    fewer = comm.split(groups[comm.rank >= half])
    for chain, make in (
        (("zero 3", "zero 1", "overlap"), adamw),
        (("flat", "zero 3", "zero 2"), adamw),
        (("zero 3", "flat", "zero 1"), adafactor),
        (("zero 3", "flat", "zero 1"), muon),
    ):
        place = folder / "-".join((make.__name__, *chain)).replace(" ", "")
        for name, group, stop_after in zip(chain, (comm, fewer, comm), (3, 5, None), strict=True):
            if group is comm or comm.rank < half:
                strategy = STRATEGIES[name](group)
                parts = 4 // group.size
                trainer = make_trainer(
                    place / "ranks", strategy, steps=12, micro_batches=parts, stop_after=stop_after,
                    make_optimizer=make,
                )  # fmt: skip
                assert trainer.resume() == (name != chain[0])
                trainer.run()
            comm.barrier()
        assert trainer.step == 12
        for name, values, _, data in trainer.optimizer.flat.parameter_shards():
            np.testing.assert_allclose(
                data, alone[make][name].reshape(-1)[values], atol=3e-4, err_msg=f"{chain} {name}"
            )


def check_errors(comm: Comm, folder: Path) -> None:
    with pytest.raises(ArgumentError, match="reduction is 'ring', expected one of naive, flat, "):
        DataParallel(comm, "ring")
    with pytest.raises(ArgumentError, match="bucket_mb is 0, expected more than 0"):
        DataParallel(comm, bucket_mb=0)
    with pytest.raises(ArgumentError, match="stage is 4, expected 1, 2 or 3"):
        Zero(comm, 4)
    for strategy in (Zero(comm, 2), DataParallel(comm, "flat")):
        with pytest.raises(ArgumentError, match=r"prepare\(\) was not called"):
            strategy.reduce_gradients()
    with pytest.raises(ArgumentError, match="Linear has no parameters in a ModuleList"):
        Zero(comm, 3).prepare(nn.Linear(3, 2), optim.SGD)
    if comm.size > 1:
        odd = comm.rank == 1
        with pytest.raises(CommError, match=r"DataParallel: bucket_mb is .* on rank 1"):
            DataParallel(comm, bucket_mb=1.0 + odd).prepare(GPT2(ODD), optim.SGD)
        wider = replace(ODD, width=20 if odd else 18)
        with pytest.raises(CommError, match=r"Zero: blocks.0.*\(20,\)' on rank 1; .*; and 35 more"):
            Zero(comm, 1).prepare(GPT2(wider), optim.SGD)
        data = {"data": {"key": int(odd)}}
        trainer = make_trainer(folder, DataParallel(comm), clip=1.0 + odd, fingerprint=data)
        with pytest.raises(CommError, match=r"train: clip is .* on rank 1; data key is .* 1 on"):
            trainer.run()


class Recomputed(GPT2):
    """A model whose blocks run again in backward."""

    def run_blocks(self, x: Tensor, *args: Any) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block)(x)
        return x


def check_blocks_that_run_again_in_backward(comm: Comm, folder: Path) -> None:
    alone = train(OneProcess(), steps=3)
    for name in ("overlap", "zero 2", "zero 3"):
        same(train(STRATEGIES[name](comm), kind=Recomputed, accumulate=2, steps=3), alone)


class Twice(GPT2):
    """A model that uses one block twice."""

    def run_blocks(self, x: Tensor, *args: Any) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x


def check_misuse_is_an_error(comm: Comm, folder: Path) -> None:
    x, y = batch(0, ODD)
    strategy = DataParallel(comm, "overlap")
    model = GPT2(ODD).to(Here.device)
    strategy.prepare(model, optim.SGD)
    with strategy.no_sync():
        model(x, y).backward()
    model(x, y).backward()
    with pytest.raises(GradError, match=r"already on its way .* expected no_sync\(\)"):
        model(x, y).backward()
    strategy.reduce_gradients()
    for stage in (2, 3):
        zero = Zero(comm, stage)
        again = Twice(ODD).to(Here.device)
        zero.prepare(again, optim.SGD)
        with pytest.raises(GradError, match="came after those of its block were sent"):
            again(x, y).backward()


def checks(ranks: int, device: str) -> list[Check]:
    """Return the checks for a number of ranks: four share those that depend on it.

    On CPUs, where these take long, two ranks have the others alone.
    """
    everything = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
    if ranks == 2 and device != "cpu":
        return everything
    return [check for check in everything if (check in ON_MANY) == (ranks > 2)]


ON_MANY = (
    check_every_mode_equals_one_process,
    check_adafactor,
    check_muon,
    check_without_clipping_every_bit_is_equal,
    check_dropout_depends_on_the_cut_of_the_batch_alone,
    check_evaluation_with_other_numbers_of_batches,
    check_memory,
    check_a_run_resumes_on_other_ranks,
    check_errors,
)


def main() -> None:
    comm = parallel.world()
    Here.device = comm.select_device(sys.argv[2])
    found = checks(comm.size, Here.device)
    for check in found:
        check(comm, Path(sys.argv[1]))
        comm.barrier()
    if comm.rank == 0:
        print(f"{len(found)} checks on {comm.size} ranks, {Here.device}")


if __name__ == "__main__":
    main()
