"""A language model that a script trains in a loop of its own: options, folder, logs, checkpoints.

    settings, folder, resuming = read_command_line(Settings, __doc__)
    with ScriptRun(settings, folder, resuming) as run:
        ...                                           # corpus, model, optimizer
        step = run.resume(model, optimizer, sizes, corpus)
        while step < settings.steps and not run.stopping():
            ...                                       # a step
            step += 1
            run.log_step(step, loss, optimizer.lr, norm)
            if step % 100 == 0:
                run.save(step)
        run.save(step)

The folder has the files of `tensorgrad train`, for the commands that read a run: generate,
evaluate, report, compare. examples/train_gpt2.py is such a script. Tests:
tests/train/test_script.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import ArgumentError
from tensorgrad.data import Corpus
from tensorgrad.data.corpus import IN_CACHE
from tensorgrad.nn import Module
from tensorgrad.optim import Optimizer
from tensorgrad.train import config
from tensorgrad.train.config import check, documented, option
from tensorgrad.train.folder import free_folder, run_folder
from tensorgrad.train.options import in_options
from tensorgrad.train.progress import StageProgress
from tensorgrad.train.run import TrainingRun, report_stop, resume_run, save_facts
from tensorgrad.train.settings import WarmupSettings
from tensorgrad.train.strategy import OneProcess, Strategy
from tensorgrad.train.times import Work

_log = logging.getLogger(__name__)


@documented
@dataclass(frozen=True)
class ScriptSettings(WarmupSettings):
    """The options that training scripts have in common; those of a script are a subclass.

    Raises:
        ArgumentError: a setting is out of its range.

    Example:
        >>> tg.train.ScriptSettings(steps=100).warmup_steps  # 5 %
        5
    """

    task: str = option("language-model", "what to train", choices=("language-model",))
    model: str = option("gpt2", "the model", choices=("gpt2",))
    steps: int = option(800, "optimizer steps", low=1, grows=True)
    batch: int = option(8, "sequences of a step, on all ranks together", low=1)
    warmup: int | None = option(None, "warmup steps", shown="5 % of --steps", low=0)
    data: str = option(
        "stdlib",
        "training text: a file, a folder, hf:NAME[:CONFIG][:SPLIT], or stdlib, Python's source",
        free=True,
        path=True,
    )
    cache: str = option("runs/data", "folder for tokenized text", free=True, known_by=IN_CACHE)
    out: str = option("", "folder of the run", shown="a new one in runs", free=True)
    seed: int = option(0, "seed of parameters and data order", low=0)
    device: str = option("auto", "cpu, cuda, cuda:N, or auto: a GPU if there is one", free=True)

    def __post_init__(self) -> None:
        check(self)
        self.check_warmup()

    @property
    def folder(self) -> Path:
        """The folder of a new run."""
        return Path(self.out) if self.out else free_folder(f"runs/{self.model}")


class ScriptRun:
    """The folder of a run, and what happens around the steps of a script's loop.

    From `resume` on, Ctrl-C and the signals of a scheduler only ask to stop. The time from
    `stopping` to `log_step` counts as training. The block ends with a line of the log: where the
    run is, or how to resume it. All ranks call the same methods in the same order.

    Args:
        settings: of the run.
        folder: of the run; created with config.json, and locked against other processes.
        resuming: whether it holds a run to resume.
        strategy: how ranks train together; default: this one alone.
        keep: the number of newest checkpoints to keep, besides the best.

    Attributes:
        progress: shows the progress of `prepare`.
        status: the exit status of the program: 0, or 128 + the signal that stopped the run.

    Raises:
        ArgumentError: the ranks cannot share the batch, or the folder is not writable.
        CheckpointError: another process trains in the folder.

    Example:
        >>> from pathlib import Path
        >>> from tensorgrad.train import ScriptRun, ScriptSettings
        >>> with ScriptRun(ScriptSettings(), Path("runs/6")) as run:
        ...     sorted(path.name for path in Path("runs/6").glob("*.json"))
        ['config.json']
        >>> run.status
        0
    """

    def __init__(
        self,
        settings: ScriptSettings,
        folder: Path,
        resuming: bool = False,
        strategy: Strategy | None = None,
        keep: int = 2,
    ) -> None:
        self._strategy = OneProcess() if strategy is None else strategy
        self._settings, self._folder, self._resuming = settings, folder, resuming
        self._keep = keep
        self._run: TrainingRun | None = None  # from `resume` on
        self._stack = ExitStack()
        self._pause = ExitStack()  # pauses the clock
        self.progress = StageProgress(f"preparing {settings.data}", self._strategy.is_main)
        self.status = 0

    def __enter__(self) -> ScriptRun:
        settings, strategy = self._settings, self._strategy
        with ExitStack() as stack:
            stack.enter_context(in_options(settings))
            if settings.batch % strategy.ranks:
                raise ArgumentError(
                    f"--batch: got {settings.batch}, expected a multiple of the {strategy.ranks} "
                    "data parallel ranks"
                )
            new = None if self._resuming else settings
            stack.enter_context(run_folder(self._folder, strategy.is_main, new))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def resume(self, model: Module, optimizer: Optimizer, sizes: Any, corpus: Corpus) -> int:
        """Load the newest checkpoint, if there is one, and open the logs; return the steps done.

        All ranks get the parameters of the main one.

        Args:
            model: on its device.
            optimizer: of the model, from `Strategy.prepare` where ranks train together.
            sizes: of the model, a dataclass such as GPT2Config; a checkpoint must be of these,
            corpus: and of this text and vocabulary.
        Raises:
            CheckpointError: the newest checkpoint does not fit, or all of them are damaged.
        """
        self.progress.__exit__()
        settings, folder, strategy = self._settings, self._folder, self._strategy
        fingerprint = {
            "model": asdict(sizes),
            "tokenizer": {"sha256": corpus.tokenizer.digest},
            "data": {"corpus": corpus.digest, "batch": settings.batch, "seed": settings.seed},
        }
        options: dict[str, Any] = {"fingerprint": fingerprint, "keep": self._keep}
        run = self._run = TrainingRun(model, optimizer, settings, folder, strategy, **options)
        if strategy.is_main:
            config.save(settings, folder)
            corpus.tokenizer.save(folder / "tokenizer.json")
            facts = {"warmup": settings.warmup_steps, "parameters": sizes.parameters}
            facts |= {"training_tokens": len(corpus.train)}
            facts |= {"validation_tokens": len(corpus.validation)}
            save_facts(folder, facts)
            _log.info(
                "%s: %s parameters, vocabulary %s, %s tokens of text, on %s",
                *(folder, f"{sizes.parameters:,}", f"{corpus.tokenizer.vocab_size:,}"),
                *(f"{len(corpus.train):,}", run.device),
            )
        if self._resuming:
            resume_run(run)
        self._stack.enter_context(run.session(Work(settings.batch * sizes.context)))
        self._stack.push(self._end)
        self._pause.enter_context(run.clock.paused())
        return run.step

    def stopping(self) -> bool:
        """Return whether a signal has asked a rank to stop; all ranks learn of it."""
        run = self._opened()
        self._pause.close()
        run.signals.agree(self._strategy.sum(run.signals.flags()))
        return run.signals.ends

    def log_step(self, step: int, loss: float, lr: float, gradient_norm: Any) -> None:
        """Write a step to metrics.jsonl, and show it.

        Args:
            step: the number of steps done, from 1.
            loss: of the batch, on all ranks.
            lr: the learning rate of the step.
            gradient_norm: before clipping, a number or what `Optimizer.step` returned.
        Raises:
            TrainingError: the loss or the norm is not finite.
        """
        run, norm = self._opened(), float(gradient_norm)
        run.step, run.measured = step, {}
        run.log_step(step, loss, lr, norm)
        if run.log is not None:
            run.log.times(step)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            run.end_not_finite(f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}")
        self._pause.enter_context(run.clock.paused())

    def log_evaluation(self, step: int, measured: Mapping[str, float]) -> None:
        """Write what an evaluation measured to metrics.jsonl, and show it.

        Args:
            step: the number of steps done.
            measured: values by name; the checkpoint with the lowest "validation_loss" is the best.
        """
        self._opened().log_evaluation(measured)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Write to samples.jsonl how the model has continued a prompt."""
        log = self._opened().log
        if log is not None:
            log.sample(step, prompt, text)

    def save(self, step: int) -> None:
        """Write a checkpoint of model, optimizer and generator, unless that of the step is there.

        Raises:
            CheckpointError: it cannot be written; earlier ones are unchanged.
        """
        run = self._opened()
        if step != run.saved_step:
            self._pause.close()
            run.save()
            self._pause.enter_context(run.clock.paused())

    def _opened(self) -> TrainingRun:
        if self._run is None:
            raise ArgumentError("ScriptRun: resume() was not called, expected it before the steps")
        return self._run

    def _end(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Log where the run is, or how to resume it."""
        self._pause.close()
        run = self._opened()
        if error is not None:
            return
        outcome = run.end()
        self.status = outcome.status
        if not run.strategy.is_main:
            return
        if outcome.finished:
            speed = f"{outcome.tokens_per_second:,.0f} tokens/s"
            _log.info("%d steps, %s; all in %s", outcome.step, speed, self._folder)
        else:
            report_stop(outcome, run)
