"""Writers of files and their readers, with a fault at each of their calls in turn.

LD_PRELOAD=failing_calls.so python -m tests.disk_faults HOW EVERY FOLDER SCENARIO...

EVERY is 1 for a fault at each call, or 3 for one at every third, which is another for each HOW.
It prints for each scenario how many calls were made to fail and, where something was lost, what.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tensorgrad import random
from tensorgrad.data import Corpus, Tokenizer, prepare
from tensorgrad.errors import CheckpointError, DamagedError, TensorgradError
from tensorgrad.io.weights import load_arrays, load_metadata
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.models.pretrained import from_pretrained, save_pretrained
from tensorgrad.parallel import Comm, Mesh
from tensorgrad.parallel.checkpoint import RankWriters
from tensorgrad.parallel.merge import merge
from tensorgrad.train import config, environment
from tensorgrad.train.checkpoint import list_checkpoints, load_best, load_checkpoint, step_of
from tensorgrad.train.log import StepLog, read_metrics
from tensorgrad.train.loop import Trainer
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.shards import Shards
from tests.checkpoints import save_checkpoint, save_shards
from tests.failing_calls import FROM_THEN_ON, KILL, ONCE, Fault
from tests.parallel.test_checkpoint import FULL, held_on
from tests.parallel.threads import on_ranks
from tests.train.tiny_run import make_trainer

Armed = Callable[[], AbstractContextManager[None]]
Act = Callable[[Armed], object]
MOST = 2000  # points, or else it never ends
# Differences from one try to the next: a part of the names of temporary files, here and there.
DRAWN = re.compile(r"-[0-9a-f]{8}(?=\.tmp)|(?<=\.tmp)\w{6}$")
HOW = {"once": ONCE, "from-then-on": FROM_THEN_ON, "kill": KILL}


class Scenario:
    """Something done to files, and what must hold afterwards."""

    def prepare(self, folder: Path) -> None:
        """Leave files as they are before it is done; called once."""
        raise NotImplementedError

    def ready(self, folder: Path) -> Act:
        """Return what is done, with all else done already."""
        raise NotImplementedError

    def check_result(self, folder: Path, result: object) -> None:
        """Raise AssertionError where a result is wrong; it is an error, or what was returned."""

    def check_files(self, folder: Path) -> None:
        """Raise AssertionError where something was lost; called once for equal files."""
        raise NotImplementedError


def tree(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def contents(folder: Path) -> dict[str, Any]:
    """Return what the files of a folder say: safetensors orders the entries of a header anyhow."""

    def content(path: Path) -> Any:
        if path.name.startswith(".") or path.suffix == ".json":
            return path.read_bytes()
        arrays = {name: array.tobytes() for name, array in load_arrays(path).items()}
        return load_metadata(path), arrays

    return {name: content(folder / name) for name in tree(folder)}


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints there are, all of which must be whole."""
    paths = list_checkpoints(folder)
    assert all(load_checkpoint(path) for path in paths)
    return [step_of(path) for path in paths]


def check_kept(found: list[int], best: int, older: int, newest: int, new: int) -> None:
    """The second of the checkpoints best, older and newest may go once there is a new one."""
    assert {best, newest} <= set(found), f"of {[newest, older, best]} there are {found}"
    assert older in found or new in found, f"of {[newest, older, best]} there are {found}"


def check_read(before: Mapping[str, bytes], folder: Path, result: object) -> None:
    """Raise AssertionError where reading has changed files or took a failed call for damage."""
    assert tree(folder) == before, "files were changed"
    assert not isinstance(result, DamagedError), "a failed call was taken for damage"


class Run(Scenario):
    """A run comes to its last checkpoint: metrics, evaluation, checkpoint, deleting an older."""

    def trainer(self, folder: Path, **options: Any) -> Trainer:
        """Return a trainer whose best checkpoint is that of step 2."""
        options = {"steps": 8, "checkpoint_every": 2, "evaluate_every": 2, "warmup": 1, **options}
        trainer = make_trainer(folder, **options)
        trainer._evaluate = lambda: {"validation_loss": 1.0 if trainer.step == 2 else 2.0}
        return trainer

    def prepare(self, folder: Path) -> None:
        """Stop after 6 of 8 steps; find out how it ends without a fault."""
        self.trainer(folder, stop_after=6).run()
        assert steps_of(folder / "checkpoints") == [6, 4, 2]
        undisturbed = folder.with_name("undisturbed")
        whole = self.trainer(undisturbed)
        whole.run()
        self.expected = self.end_of(whole)

    def end_of(self, trainer: Trainer) -> tuple[bytes, ...]:
        """Return the bits of a run's parameters and optimizer, and its metrics."""
        tensors = trainer.model.state_dict().values()
        arrays = [*(tensor.data for tensor in tensors), *trainer.optimizer.state.values()]
        lines = (trainer.folder / "metrics.jsonl").read_bytes()
        return (*(array.tobytes() for array in arrays), lines)

    def resumed(self, folder: Path) -> Trainer:
        """Return a trainer that resumes the run."""
        trainer = self.trainer(folder)
        assert trainer.resume()
        return trainer

    def ready(self, folder: Path) -> Act:
        """Do the last two steps."""
        trainer = self.resumed(folder)

        def act(armed: Armed) -> None:
            with armed():
                trainer.run()

        return act

    def check_files(self, folder: Path) -> None:
        """Resume the run and compare its bits."""
        found = steps_of(folder / "checkpoints")
        check_kept(found, best=2, older=4, newest=6, new=8)
        trainer = self.resumed(folder)
        assert trainer.step == found[0]
        trainer.run()
        assert self.end_of(trainer) == self.expected, "other bits"
        assert steps_of(folder / "checkpoints") == [8, 6, 2]
        assert not list((folder / "checkpoints").glob(".*"))


class Resume(Run):
    """A run is resumed, and its best checkpoint is opened."""

    def ready(self, folder: Path) -> Act:
        """Read what there is."""
        trainer = self.trainer(folder)
        self.before = tree(folder)

        def act(armed: Armed) -> int:
            with armed():
                assert load_best(folder / "checkpoints").step == 2
                assert trainer.resume()
            return trainer.step

        return act

    def check_result(self, folder: Path, result: object) -> None:
        """See that it began at the newest checkpoint, or not at all."""
        check_read(self.before, folder, result)
        assert isinstance(result, Exception) or result == 6


class Ranks(Scenario):
    """Two ranks write a checkpoint together; the calls of one of them fail."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def save(self, folder: Path, step: int, armed: Armed | None = None) -> None:
        """Save what all ranks hold; the metrics are best at step 2."""
        state = {"metrics": {"validation_loss": 1.0 if step == 2 else 2.0}}

        def program(comm: Comm) -> None:
            shards = Shards(RankWriters(comm), self.held(comm, step))
            if armed is not None and comm.rank == self.rank:
                with armed():
                    save_shards(shards, folder, step, state)
            else:
                save_shards(shards, folder, step, state)

        on_ranks(2, program)

    def held(self, comm: Comm, step: int) -> list[Any]:
        """Return what a rank holds at a step: zeros at step 0."""
        found = held_on(Mesh(2, 1, 1, comm.rank), True, FULL)
        return [(piece, np.full_like(array, step)) for piece, array in found]

    def load(self, folder: Path, armed: Armed | None = None) -> int:
        """Load the newest checkpoint on both ranks; return its step."""

        def program(comm: Comm) -> int:
            held = self.held(comm, 0)

            def load() -> int:
                found = RankWriters(comm).load_latest(folder)
                assert found is not None
                Shards(RankWriters(comm), held).load(found)
                return found.step

            if armed is not None and comm.rank == self.rank:
                with armed():
                    step = load()
            else:
                step = load()
            for (_, array), (_, expected) in zip(held, self.held(comm, step), strict=True):
                assert array.tobytes() == expected.tobytes(), "other bits"
            return step

        steps = on_ranks(2, program)
        assert len(set(steps)) == 1
        return steps[0]

    def prepare(self, folder: Path) -> None:
        """Write the best checkpoint and two others."""
        folder.mkdir()
        for step in (2, 4, 6):
            self.save(folder, step)
        assert steps_of(folder) == [6, 4, 2]

    def ready(self, folder: Path) -> Act:
        """Write one more."""
        return lambda armed: self.save(folder, 8, armed)

    def check_files(self, folder: Path) -> None:
        """Load what there is, and write it once more."""
        found = steps_of(folder)
        check_kept(found, best=2, older=4, newest=6, new=8)
        assert self.load(folder) == found[0]
        self.save(folder, 8)
        assert self.load(folder) == 8
        assert steps_of(folder) == [8, 6, 2]
        assert not list(folder.glob(".*"))


class RanksResume(Ranks):
    """Two ranks load a checkpoint."""

    def ready(self, folder: Path) -> Act:
        """Load the newest."""
        self.before = tree(folder)
        return lambda armed: self.load(folder, armed)

    def check_result(self, folder: Path, result: object) -> None:
        """See that it was the newest, or none."""
        check_read(self.before, folder, result)
        assert isinstance(result, Exception) or result == 6


class Metrics(Scenario):
    """The metrics of a resumed run: lines beyond its checkpoint are dropped, others follow."""

    records: ClassVar = [{"step": step, "loss": 1 / (step + 1)} for step in range(8)]

    def write(self, folder: Path, step: int) -> None:
        """Go on from a step, to the end."""
        log = StepLog(folder / "metrics.jsonl", step)
        try:
            for record in self.records[step + 1 :]:
                log.write(record)
            log.sync()
        finally:
            log.close()

    def prepare(self, folder: Path) -> None:
        """Leave some lines, the last of which is cut short."""
        folder.mkdir()
        self.write(folder, -1)
        self.expected = (folder / "metrics.jsonl").read_bytes()
        (folder / "metrics.jsonl").write_bytes(self.expected[:-70])

    def ready(self, folder: Path) -> Act:
        """Go on from step 3."""

        def act(armed: Armed) -> None:
            with armed():
                self.write(folder, 3)

        return act

    def check_files(self, folder: Path) -> None:
        """See that the lines up to the checkpoint are there, and write the others again."""
        assert read_metrics(folder / "metrics.jsonl")[:4] == self.records[:4]
        self.write(folder, 3)
        assert (folder / "metrics.jsonl").read_bytes() == self.expected


class Cache(Scenario):
    """Text is prepared in a folder that has other prepared text."""

    def corpus(self, folder: Path, vocab_size: int = 270) -> Corpus:
        """Return prepared text, the source of which is elsewhere."""
        text = folder.parent / "text.txt"
        if not text.exists():
            text.write_text("<|endoftext|>".join(f"book {n}, line {n % 7}\n" for n in range(99)))
        return prepare(text, folder / "cache", vocab_size)

    def prepare(self, folder: Path) -> None:
        """Prepare another vocabulary; find out what is made without a fault."""
        self.other = self.corpus(folder, 265).digest
        self.expected = self.corpus(folder.with_name("undisturbed")).digest

    def ready(self, folder: Path) -> Act:
        """Prepare it."""

        def act(armed: Armed) -> str:
            with armed():
                return self.corpus(folder).digest

        return act

    def check_result(self, folder: Path, result: object) -> None:
        """See that it was what is expected, or an error."""
        assert isinstance(result, Exception) or result == self.expected

    def check_files(self, folder: Path) -> None:
        """Prepare it again, and open the other."""
        assert self.corpus(folder, 265).digest == self.other
        assert self.corpus(folder).digest == self.expected
        names = [path.name for path in (folder / "cache").iterdir()]
        assert len([name for name in names if not name.startswith(".")]) == 2
        assert not [name for name in names if name.endswith(".tmp")]


class CacheRead(Cache):
    """Prepared text is opened."""

    def prepare(self, folder: Path) -> None:
        """Prepare it."""
        super().prepare(folder)
        corpus = self.corpus(folder)
        self.tokens = corpus.train.tokens.tobytes()

    def ready(self, folder: Path) -> Act:
        """Open it and read its tokens."""
        self.before = tree(folder)

        def act(armed: Armed) -> str:
            with armed():
                corpus = self.corpus(folder)
            assert corpus.train.tokens.tobytes() == self.tokens
            return corpus.digest

        return act

    def check_result(self, folder: Path, result: object) -> None:
        """See that nothing was made again."""
        check_read(self.before, folder, result)
        super().check_result(folder, result)


class Exports(Scenario):
    """A tokenizer, settings, merged weights and published weights replace others."""

    def write(self, folder: Path, heads: int) -> None:
        """Write them all, of a model with the given number of heads."""
        Tokenizer.train([f"some words {heads}, other words"], 260 + heads).save(
            folder / "tokenizer.json"
        )
        config.save(TrainSettings(steps=20 * heads), folder)
        merge(load_checkpoint(folder.parent / f"of-{heads}" / "step-00000001"), folder / "merged")
        save_pretrained(self.models[heads], folder / "published")

    def prepare(self, folder: Path) -> None:
        """Write those to replace, and note both."""
        self.models, self.whole = {}, {}
        for heads in (4, 2):
            random.seed(heads)
            model = GPT2(GPT2Config(vocab_size=12, context=4, layers=1, heads=heads, width=8))
            arrays = {name: tensor.data for name, tensor in model.state_dict().items()}
            state = {"metrics": {}, "model": asdict(model.config)}
            save_checkpoint(folder.parent / f"of-{heads}", 1, {"model": arrays}, state)
            self.models[heads] = model
            folder.mkdir(exist_ok=True)
            self.write(folder, heads)
            self.whole[heads] = contents(folder)

    def ready(self, folder: Path) -> Act:
        """Write others."""

        def act(armed: Armed) -> None:
            with armed():
                self.write(folder, 4)

        return act

    def check_files(self, folder: Path) -> None:
        """See that each file is the old one or the new one, and that a mixture is an error."""
        found = contents(folder)
        for name, old in self.whole[2].items():
            assert found[name] in (old, self.whole[4][name]), f"{name} is neither old nor new"
        config.load(TrainSettings, folder)
        load_arrays(folder / "merged")
        files = [f"published/{name}" for name in ("config.json", "model.safetensors")]
        heads = {4 if found[name] == self.whole[4][name] else 2 for name in files}
        try:
            model = from_pretrained(folder / "published")
        except CheckpointError:
            assert len(heads) == 2
        else:
            assert heads == {model.config.heads}, "config.json belongs to other weights"
        self.write(folder, 4)
        new = contents(folder)
        assert {name: new[name] for name in self.whole[4]} == self.whole[4]


class Weights(Exports):
    """A tokenizer, settings, merged weights and published weights are read."""

    def ready(self, folder: Path) -> Act:
        """Read them all."""
        self.before = tree(folder)

        def act(armed: Armed) -> None:
            with armed():
                model = from_pretrained(folder / "published")
                arrays = load_arrays(folder / "merged")
                Tokenizer.load(folder / "tokenizer.json")
                assert config.load(TrainSettings, folder).steps == 40
            expected = self.models[2].state_dict()
            for name, tensor in model.state_dict().items():
                assert tensor.data.tobytes() == expected[name].data.tobytes()
                assert arrays[name].tobytes() == expected[name].data.tobytes()

        return act

    def check_result(self, folder: Path, result: object) -> None:
        """See that nothing was changed."""
        check_read(self.before, folder, result)


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "run": Run,
    "resume": Resume,
    "rank-0": lambda: Ranks(0),
    "rank-1": lambda: Ranks(1),
    "rank-0-resume": lambda: RanksResume(0),
    "rank-1-resume": lambda: RanksResume(1),
    "metrics": Metrics,
    "cache": Cache,
    "cache-read": CacheRead,
    "exports": Exports,
    "weights": Weights,
}


def attempt(act: Act, fault: Fault, folder: Path) -> object:
    """Do something with a fault in it; return what it gave, or its error."""
    try:
        return act(lambda: fault.armed(folder))
    except (TensorgradError, OSError) as error:
        return error


def attempt_and_die(act: Act, fault: Fault, folder: Path) -> object:
    """Do something in a process that ends at the fault."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            attempt(act, fault, folder)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    fault.reached = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert fault.reached or os.waitstatus_to_exitcode(status) == 0, "it failed without a fault"
    return None


def points(scenario: Scenario, how: int, every: int, work: Path) -> Iterator[tuple[Fault, str]]:
    """Yield the faults at every N-th call, and what was lost by each, if anything."""
    template, folder = work / "template", work / "at"
    scenario.prepare(template)
    checked: set[frozenset[tuple[str, bytes]]] = set()
    for number in range(1 + how % every, MOST, every):
        shutil.copytree(template, folder)
        fault, lost, result = Fault(number, how), "", None
        act = scenario.ready(folder)
        try:
            result = (attempt_and_die if how == KILL else attempt)(act, fault, folder)
            if fault.reached:
                if how != KILL:
                    scenario.check_result(folder, result)
                if isinstance(result, Exception):
                    assert str(folder) in str(result), "an error that names no file"
                files = frozenset(
                    (DRAWN.sub("", name), content)
                    for name, content in tree(folder).items()
                    if not name.endswith(".lock")  # it has the number of a process
                )
                if files not in checked:
                    scenario.check_files(folder)
                checked.add(files)
        except Exception as error:
            lost = f"{type(error).__name__}: {error}; after {result!r}"
        if not fault.reached:
            assert not lost, lost
            return
        yield fault, lost
        shutil.rmtree(folder)
    raise AssertionError(f"more than {MOST} calls")


def main() -> None:
    """Run scenarios."""
    how, every, work, *names = sys.argv[1:]
    environment._git = cache(environment._git)  # every run asks twice, about the same checkout
    result = {}
    for name in names:
        place = Path(work) / name
        place.mkdir()
        found = list(points(SCENARIOS[name](), HOW[how], int(every), place))
        lost = [f"call {fault.number}, {fault.call}: {lost}" for fault, lost in found if lost]
        result[name] = {"points": len(found), "lost": lost}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
