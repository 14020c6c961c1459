"""Checks of pipelines on every rank; run by test_pipeline.py through mpirun.

mpirun -n 4 python -m tests.parallel.pipeline_ranks FOLDER cpu
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad import random
from tensorgrad.autograd import record
from tensorgrad.core.tensor import Tensor
from tensorgrad.errors import TensorgradError
from tensorgrad.models.generation import generate_batch
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.models.transformer_lm import TransformerLM, TransformerLMConfig
from tensorgrad.nn import Linear, Module
from tensorgrad.optim import AdamW, Optimizer
from tensorgrad.parallel import Comm, DataParallel, Zero, make_mesh, world
from tensorgrad.parallel.pipeline import Pipeline
from tensorgrad.parallel.schedule import max_in_flight, one_f_one_b, timeline
from tensorgrad.train.checkpoint import load_latest
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loop import Trainer, mean_loss
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.strategy import Strategy

STEPS, MICRO, BATCH, CONTEXT, VOCAB = 10, 4, 8, 8, 48
SCHEDULES = (("interleaved", 2), ("1f1b", 1), ("gpipe", 1), ("model-parallel", 1))
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "warmup": 2,
    "batch": BATCH,
    "lr": 1e-3,
    "micro_batches": MICRO,
    "clip": 0.5,
    "evaluate_every": 5,
    "checkpoint_every": 10,
    "plot": False,
}
Model = GPT2Config | TransformerLMConfig


class Here:
    """The device of this process, set once by the program."""

    device = "cpu"


def gpt2(layers: int, dropout: float = 0.0) -> GPT2Config:
    return GPT2Config(VOCAB, CONTEXT, layers, heads=2, width=16, dropout=dropout)


def lm(layers: int, dropout: float = 0.0, tied: bool = False) -> TransformerLMConfig:
    return TransformerLMConfig(
        VOCAB, CONTEXT, layers, heads=2, kv_heads=1, width=16, hidden=32, dropout=dropout, tied=tied
    )


def batches(first: int) -> Iterator[tuple[Any, ...]]:
    """Yield the batch of each step: sequences that count, with gaps."""
    for step in range(first, first + STEPS):
        rng = np.random.default_rng(step)
        start, pace = rng.integers(0, VOCAB, (2, BATCH, 1))
        rows = (start + pace % 5 * np.arange(CONTEXT + 1)) % VOCAB
        yield rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)


def adamw(parameters: Any) -> Optimizer:
    """Return AdamW as TrainSettings has it, but for `eps`.

    Where the first gradient of an element is rounding alone, 1e-8 makes a whole step of it.
    """
    return AdamW(parameters, SETTINGS["lr"], (0.9, 0.95), 1e-5, weight_decay=0.1)


def make_trainer(
    folder: Path, config: Model, strategy: Strategy | None = None, **options: Any
) -> Trainer:
    """Return a trainer at step 0 with options of TrainSettings and `frozen` parameters."""
    strategy, frozen = strategy or Strategy(), options.pop("frozen", ())
    settings = TrainSettings(**{**SETTINGS, **options})
    random.seed(7)
    model: LanguageModel = GPT2(config) if isinstance(config, GPT2Config) else TransformerLM(config)
    model.to(Here.device, settings.parameter_dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(frozen)
    precision = settings.precision()

    def loss(x: Any, y: Any) -> Tensor:
        with precision():
            return model.forward(Tensor(x), Tensor(y))

    def evaluate() -> dict[str, float]:
        rows = [next(batches(1000 + number)) for number in range(2)]
        cut = [tuple(array[: 8 - 3 * i] for array in batch) for i, batch in enumerate(rows)]
        return {"validation_loss": mean_loss(model, loss, cut, strategy)}

    def own(first: int) -> Iterator[tuple[Any, ...]]:
        rows = BATCH // strategy.ranks
        for batch in batches(first):
            yield tuple(array[rows * strategy.rank : rows * (strategy.rank + 1)] for array in batch)

    optimizer = strategy.prepare(model, adamw)
    return Trainer(
        model, optimizer, loss, own, settings.learning_rate, settings, folder,
        evaluate=evaluate, strategy=strategy, scaler=settings.scaler(),
    )  # fmt: skip


def metrics(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def parameters(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of the newest checkpoint of a run, whole and by name."""
    found = load_latest(folder / "checkpoints")
    assert found is not None
    groups = {group: found.arrays(group) for group in ("model", "optimizer")}
    return {
        f"{group}/{name}": array.reshape(-1)
        for group, arrays in groups.items()
        for name, array in arrays.items()
    }


def run_alone(comm: Comm, folder: Path, config: Model, **options: Any) -> None:
    """Train on rank 0 in one process."""
    if comm.rank == 0:
        make_trainer(folder, config, **options).run()
    comm.barrier()


def compare(
    comm: Comm, folder: Path, alone: Path, exact: bool = False, tolerance: float = 1e-6
) -> None:
    """Compare losses, norms and parameters of a run with those of one process."""
    comm.barrier()
    if comm.rank:
        return
    found, expected = metrics(folder), metrics(alone)
    assert [list(record) for record in found] == [list(record) for record in expected]
    for name in ("loss", "validation_loss", "gradient_norm"):
        one = [record[name] for record in found if name in record]
        other = [record[name] for record in expected if name in record]
        if exact and name != "gradient_norm":
            assert one == other, name
        near = 10 * tolerance if name == "gradient_norm" else tolerance
        np.testing.assert_allclose(one, other, near, err_msg=name)
    new, old = parameters(folder), parameters(alone)
    assert new.keys() == old.keys()
    for name, array in old.items():
        if exact:
            assert new[name].tobytes() == array.tobytes(), name
        elif name.startswith("model/") and name.endswith("weight"):
            # (Gradients of some biases are nothing but rounding, which Adam makes large.)
            distance = np.linalg.norm(new[name] - array)
            assert distance <= 10 * tolerance * np.linalg.norm(array), (name, distance)


def check_schedules(comm: Comm, folder: Path) -> None:
    """A tied head, dropout and clipping: as one process, except for the order of a few sums."""
    configs = [gpt2(layers, dropout=0.1) for layers in (comm.size, 2 * comm.size)]
    for rank, config in enumerate(configs):
        if comm.rank == rank:  # a message each, at the same time
            make_trainer(folder / f"alone-{config.layers}", config).run()
    for config, schedules in zip(configs, (SCHEDULES[1:], SCHEDULES[:1]), strict=True):
        for name, chunks in schedules:
            make_trainer(folder / name, config, Pipeline(comm, name, chunks)).run()
            compare(comm, folder / name, folder / f"alone-{config.layers}")


def check_equal_bits(comm: Comm, folder: Path) -> None:
    """Without a tied head and clipping, all sums have the same order."""
    config = lm(2 * comm.size, dropout=0.1)
    options = {"clip": 0.0, "steps": 4}
    run_alone(comm, folder / "alone", config, **options)
    for name, chunks in SCHEDULES[:2]:
        make_trainer(folder / name, config, Pipeline(comm, name, chunks), **options).run()
        compare(comm, folder / name, folder / "alone", exact=True)


def check_resume(comm: Comm, folder: Path) -> None:
    """Stop, and resume with another schedule, on fewer stages, from one process's files."""
    config = gpt2(comm.size, dropout=0.1)
    run_alone(comm, folder / "run", config, stop_after=2)
    for stage, (name, chunks) in enumerate(SCHEDULES[1:3]):
        trainer = make_trainer(folder / "run", config, Pipeline(comm, name, chunks), stop_after=2)
        assert trainer.resume()
        assert trainer.run().step == 4 + 2 * stage
    for zero, stop in ((1, 2), (0, None)):
        ranks = pipelines(comm, comm.size // 2, zero)
        trainer = make_trainer(folder / "run", config, ranks, micro_batches=2, stop_after=stop)
        assert trainer.resume()
        assert trainer.run().finished == (stop is None)
    compare(comm, folder / "run", folder.parent / "check_schedules" / f"alone-{comm.size}")


def pipelines(comm: Comm, stages: int, zero: int = 0) -> Pipeline:
    """Return several pipelines that share the batch."""
    mesh = make_mesh(comm.size, comm.rank, pp=stages)
    line = comm.split(mesh.line("dp"))
    data = Zero(line, zero) if zero else DataParallel(line)
    return Pipeline(comm.split(mesh.line("pp")), data=data, world=comm)


def check_sixteen_bits(comm: Comm, folder: Path) -> None:
    """Autocast with a loss scaler, and 16-bit parameters."""
    config = lm(comm.size)
    for dtype in ("float16", "bfloat16-parameters"):
        alone, run = folder / f"alone-{dtype}", folder / dtype
        options = {"dtype": dtype, "steps": 4, "warmup": 1, "clip": 0.0}
        run_alone(comm, alone, config, **options)
        make_trainer(run, config, Pipeline(comm), **options).run()
        compare(comm, run, alone, tolerance=5e-3)


def check_frozen(comm: Comm, folder: Path) -> None:
    """A frozen tied head, and a first part without trained parameters."""
    config = gpt2(2 * comm.size, dropout=0.1)
    tables = ("tokens", "positions")
    for number, frozen in enumerate((tables, (*tables, "blocks.0"))):
        options: dict[str, Any] = {"frozen": frozen, "steps": 3, "checkpoint_every": 3}
        alone, run = folder / f"alone-{number}", folder / f"run-{number}"
        run_alone(comm, alone, config, **options)
        make_trainer(run, config, Pipeline(comm, "interleaved", 2), **options).run()
        compare(comm, run, alone)


def check_errors(comm: Comm, folder: Path) -> None:
    """Sizes that do not match are errors on all ranks, with the numbers, and all can continue."""
    p = comm.size
    adamw = TrainSettings(**SETTINGS).optimizer

    def fails(call: Callable[[], object], message: str) -> None:
        with pytest.raises(TensorgradError, match=message):
            call()

    fails(lambda: Pipeline(comm, "2f2b"), "schedule is '2f2b', expected one of model-parallel, gp")
    fails(lambda: Pipeline(comm, "gpipe", 2), "Pipeline: chunks is 2 with schedule .gpipe., ex")
    fails(lambda: pipelines(comm, comm.size // 2, zero=2), "data is Zero of stage 2 or 3, expected")
    fails(lambda: Pipeline(comm, "interleaved", 0), "Pipeline: chunks is 0, expected 1 or more")
    fails(
        lambda: Pipeline(comm).prepare(GPT2(gpt2(p - 1)), adamw),
        f"the model has {p - 1} layers, expected {p} or more: {p} stages with 1 parts each",
    )
    fails(
        lambda: Pipeline(comm, "interleaved", 2).prepare(GPT2(gpt2(2 * p - 1)), adamw),
        f"the model has {2 * p - 1} layers, expected {2 * p} or more: {p} stages with 2 parts each",
    )
    fails(lambda: Pipeline(comm).prepare(Linear(2, 2), adamw), "is a Linear, expected a LanguageM")
    fails(
        lambda: Pipeline(comm).prepare(GPT2(gpt2(p + comm.rank % 2)), adamw),
        rf"Pipeline: blocks.{p}.attention.* is missing on rank.*, .float32.* on rank.* same on all",
    )
    fails(
        lambda: make_trainer(folder, gpt2(p), Pipeline(comm), frozen=("tok", "pos", "blocks.0")),
        f"all parameters of stage 0 are frozen, expected some to train on each of the {p} stages",
    )
    frozen = ("norm.bias",) if comm.rank else ()
    fails(
        lambda: make_trainer(folder, gpt2(p), Pipeline(comm), frozen=frozen),
        r"Pipeline: norm.bias is 'float32\[16\]' on rank 0, 'float32\[16\] frozen' on rank",
    )
    twice = GPT2(gpt2(p))
    twice.blocks[p - 1] = twice.blocks[0]
    fails(
        lambda: Pipeline(comm).prepare(twice, adamw),
        rf"Pipeline: blocks.{p - 1}.\w+.weight is blocks.0.\w+.weight too, expected layers that",
    )
    ranks = Pipeline(comm, "interleaved", 2)
    trainer = make_trainer(folder / "odd", gpt2(2 * p), ranks, micro_batches=1, steps=3)
    fails(trainer.run, f"interleaved: micro is 1, expected a multiple of the {p} stages")
    trainer = make_trainer(folder / "rows", gpt2(p), Pipeline(comm), micro_batches=3, steps=3)
    fails(trainer.run, "micro_batches is 3 and a batch has 8 rows")
    x = next(batches(0))[0]
    fails(lambda: trainer.model(x), "this rank has some of the layers, expected to be called by")
    assert isinstance(trainer.model, GPT2)
    elsewhere = trainer.model.blocks[0 if comm.rank else p - 1]
    fails(lambda: elsewhere(x), r"blocks\.\d: is on another stage of the pipeline, expected here")


def check_generation(comm: Comm, folder: Path) -> None:
    """All stages write together, with the same result as one process."""
    for config, chunks in ((gpt2(2 * comm.size), 2), (lm(comm.size), 1)):
        written = []
        for ranks in (Strategy(), Pipeline(comm, "interleaved", chunks)):
            model = make_trainer(folder, config, ranks).model
            assert isinstance(model, LanguageModel)
            prompts = [[1, 2, 3], [4, 5, 6]]
            for use_cache in (True, False):
                written.append(generate_batch(model, prompts, 7, seed=3, use_cache=use_cache))
        assert all(each == written[0] for each in written), written


def check_overlap(comm: Comm, folder: Path) -> None:
    """Stages work at the same time: each stays in a block until the other is in the one beside it.

    So the step comes to its end only if what the schedule puts beside each other is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    micro = 8
    spans = timeline([one_f_one_b(2, micro, stage) for stage in range(2)], backward=1)
    begins = [[span.begin for action, span in spans.items() if action.part == s] for s in range(2)]
    moments: Iterator[float] | None = None
    others = set(begins[1 - comm.rank])

    def meet() -> None:
        if moments is None:
            return
        moment = next(moments)
        if moment in others:
            (folder / f"{comm.rank} at {moment}").touch()
            end = time.monotonic() + 60
            while not (folder / f"{1 - comm.rank} at {moment}").exists():
                assert time.monotonic() < end, f"stage {comm.rank} is alone at {moment}"
                time.sleep(0.001)

    random.seed(7)
    model = GPT2(gpt2(comm.size))
    for number in range(comm.size):
        model.blocks[number] = Meeting(model.blocks[number], meet)
    strategy = Pipeline(comm, "1f1b")
    strategy.prepare(model, TrainSettings(**SETTINGS).optimizer)

    def loss(x: Any, y: Any) -> Tensor:
        return model.forward(Tensor(x), Tensor(y))

    parts = [next(batches(number)) for number in range(micro)]
    strategy.compute_gradients(loss, parts)  # at first stages tell each other what they will send
    moments = iter(sorted(begins[comm.rank]))
    strategy.compute_gradients(loss, parts)
    assert next(moments, None) is None
    assert len(list(folder.iterdir())) == 2 * (2 * micro - 2)  # all but the first and last of each


def check_memory(comm: Comm, folder: Path) -> None:
    """More micro-batches take more memory in GPipe, but not in 1F1B."""
    peaks = {}
    for name in ("gpipe", "1f1b"):
        random.seed(7)
        model = GPT2(gpt2(comm.size))
        strategy = Pipeline(comm, name)
        strategy.prepare(model, TrainSettings(**SETTINGS).optimizer)

        def loss(x: Any, y: Any, model: LanguageModel = model) -> Tensor:
            return model.forward(Tensor(x), Tensor(y))

        for micro in (4, 16):
            parts = [next(batches(number)) for number in range(micro)]
            found = []
            for _ in range(4):  # a message may be in transit in some of them
                tracemalloc.start()
                strategy.compute_gradients(loss, parts)
                found.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            peaks[name, micro] = min(found[1:])
    assert peaks["gpipe", 16] > 3 * peaks["gpipe", 4], peaks
    assert peaks["1f1b", 16] < 1.1 * peaks["1f1b", 4], peaks
    in_flight = max_in_flight("1f1b", comm.size, 16, comm.rank) + 1  # a message in transit
    assert peaks["1f1b", 16] < 1.2 * in_flight / 16 * peaks["gpipe", 16], peaks


class Meeting(Module):
    """A block that meets another one at the start of its forward and of its backward."""

    def __init__(self, block: Module, meet: Callable[[], None]) -> None:
        self.block, self.meet = block, meet

    def forward(self, x: Any, cache: Any = None) -> Tensor:
        self.meet()
        y = self.block(x)

        def backward(dy: Any, saved: Any, needs: Any) -> tuple[Any]:
            self.meet()
            return (dy,)

        return record("meeting", y.data, (y,), backward, ())


CHECKS = (check_schedules, check_resume, check_errors, check_memory)
# Not of the number of stages: on two ranks alone.
CHECKS_ON_TWO = (
    check_equal_bits,
    check_frozen,
    check_sixteen_bits,
    check_generation,
    check_overlap,
)
OF_THE_HOST = (check_memory, check_overlap)  # they count its memory, and what it does


def checks(ranks: int, device: str) -> list[Callable[[Comm, Path], None]]:
    """Return the checks for a number of ranks."""
    found = CHECKS + CHECKS_ON_TWO * (ranks == 2)
    return [check for check in found if device == "cpu" or check not in OF_THE_HOST]


def main() -> None:
    comm = world()
    Here.device = comm.select_device(sys.argv[2])
    found = checks(comm.size, Here.device)
    for check in found:
        check(comm, Path(sys.argv[1]) / check.__name__)
        comm.barrier()
    if comm.rank == 0:
        print(f"{len(found)} checks on {comm.size} ranks, {Here.device}")


if __name__ == "__main__":
    main()
