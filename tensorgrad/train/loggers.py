"""Loggers: callbacks that send a run to TensorBoard, Weights & Biases, trackio or MLflow.

A run that resumes continues its run there, without logging a step twice: loggers.json in the folder
of the run has the name of that run, and up to which step each value is there.

    tensorboard   RUN/tensorboard; `tensorboard --logdir runs` shows all runs
    wandb         offline in RUN/wandb, unless WANDB_MODE says otherwise; WANDB_DIR, WANDB_PROJECT
    trackio       where `trackio show` finds it; TRACKIO_DIR, TRACKIO_PROJECT
    mlflow        mlflow.db beside RUN; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.io.files import finite, to_json, write_json
from tensorgrad.io.readers import no_link, read_json
from tensorgrad.startup.distribution import install
from tensorgrad.train.callbacks import Callback
from tensorgrad.train.log import read_metrics, read_samples
from tensorgrad.train.settings import LOGGERS

if TYPE_CHECKING:
    from tensorgrad.train.loop import Trainer
    from tensorgrad.train.run import Outcome

FILE = "loggers.json"
_PROJECT = "tensorgrad"
_SAMPLE = "sample"
_MOST = 1000  # values of a call of MLflow
_MOST_PARAMETERS = 100


def make_loggers(names: Sequence[str]) -> list[Callback]:
    """Return the loggers of these names, one for each.

    Args:
        names: of LOGGERS, as in the settings of a run.
    Raises:
        ArgumentError: a name is unknown, or its package is not installed.
    """
    kinds: dict[str, Callable[[], Logger]] = {
        "tensorboard": TensorBoard,
        "wandb": WandB,
        "trackio": Trackio,
        "mlflow": MLflow,
    }
    for name in names:
        if name not in kinds:
            raise ArgumentError(f"--loggers: got {name!r}, expected names of {', '.join(LOGGERS)}")
    return [kinds[name]() for name in dict.fromkeys(names)]


class Logger(Callback):
    """A callback that logs all values of a run under their names; the base of the others.

    Times are "times/seconds" and so on, a sample is "sample".
    """

    def on_start(self, trainer: Trainer) -> None:
        """Open the run, a new one or that which loggers.json names."""
        name, folder = type(self).__name__.lower(), trainer.folder
        known = _read(folder)
        run = known.get(name, {}) if trainer.step else {}
        self._logged: dict[str, int] = run.get("logged", {})
        resumed: str | None = run.get("run")
        if resumed is not None:
            for key, step in _last_steps(folder).items():
                self._logged[key] = max(step, self._logged.get(key, -1))
        identity = self.open(trainer, resumed)
        entry = {"run": identity, "logged": self._logged}
        write_json(folder / FILE, known | {name: entry}, 2)

    @abstractmethod
    def open(self, trainer: Trainer, resumed: str | None) -> str:
        """Open a new run and return what names it, or the run of that name."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the finite values of a step."""

    @abstractmethod
    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Log a text that the model has written."""

    @abstractmethod
    def close(self, status: str) -> None:
        """Close the run, whose status is "finished", "stopped" or "failed"."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the loss, learning rate and gradient norm, or what an evaluation measured."""
        self._log_new(step, metrics)

    def on_times(self, step: int, times: Mapping[str, float]) -> None:
        """Log speed and memory."""
        self._log_new(step, {f"times/{name}": value for name, value in times.items()})

    on_evaluation = on_step

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        """Log a sample."""
        if self._is_new(_SAMPLE, step):
            self.log_sample(step, prompt, text)

    def on_end(self, result: Outcome | BaseException) -> None:
        """Close the run."""
        if isinstance(result, KeyboardInterrupt):
            self.close("stopped")
        elif isinstance(result, BaseException):
            self.close("failed")
        else:
            self.close("finished" if result.finished else "stopped")

    def _log_new(self, step: int, values: Mapping[str, float]) -> None:
        known = finite(values).items()
        new = {k: v for k, v in known if v is not None and self._is_new(k, step)}
        if new:
            self.log(step, new)

    def _is_new(self, key: str, step: int) -> bool:
        return step > self._logged.get(key, -1)


class TensorBoard(Logger):
    """Writes event files for TensorBoard, by tensorboardX."""

    def __init__(self) -> None:
        self._package = _imported("tensorboard", "tensorboardX")

    def open(self, trainer: Trainer, resumed: str | None) -> str:
        """Open a new event file; TensorBoard then ignores steps after the checkpoint in others."""
        self._logged = {}
        folder = no_link(trainer.folder / "tensorboard")
        # Step 0 has an evaluation in a new run only.
        first = trainer.step + 1 if trainer.step else 0
        self._writer = self._package.SummaryWriter(
            str(folder),
            purge_step=first,
            flush_secs=10,
            # The name of a file has the second of its start: two of one second must differ.
            filename_suffix=f".{time.time_ns():020d}",
        )
        settings = to_json(_settings(trainer), 2)
        self._writer.add_text("settings", _as_code(settings), trainer.step)
        return folder.name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Add a text."""
        self._writer.add_text(_SAMPLE, _as_code(text), step)

    def close(self, status: str) -> None:
        """Write what is left."""
        self._writer.close()


class WandB(Logger):
    """Logs to Weights & Biases; `wandb sync` uploads the parts of an offline run."""

    def __init__(self) -> None:
        self._package = _imported("wandb", "wandb")

    def open(self, trainer: Trainer, resumed: str | None) -> str:
        """Start or resume a run of this id."""
        identity = resumed or secrets.token_hex(4)
        environment = os.environ
        folder = Path(environment.get("WANDB_DIR", no_link(trainer.folder / "wandb").parent))
        # W&B names a part of an offline run by the second: two starts in one would share a folder.
        while any((folder / "wandb").glob(f"*{time.strftime('%Y%m%d_%H%M%S')}-{identity}")):
            time.sleep(0.05)
        self._run = self._package.init(
            project=environment.get("WANDB_PROJECT", _PROJECT),
            name=_name(trainer),
            id=identity,
            resume="allow",
            dir=environment.get("WANDB_DIR", trainer.folder),
            mode=None if "WANDB_MODE" in environment else "offline",
            config=_settings(trainer),
            allow_val_change=True,
            settings=self._package.Settings(console="off", silent=True),
        )
        return identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._run.log(dict(values), step=step)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Log a table of one row."""
        table = self._package.Table(columns=["step", "prompt", "text"], data=[[step, prompt, text]])
        self._run.log({_SAMPLE: table}, step=step)

    def close(self, status: str) -> None:
        """Finish the run."""
        self._run.finish(exit_code=1 if status == "failed" else 0)


class Trackio(Logger):
    """Logs to trackio, on this machine unless its environment variables name a space."""

    def __init__(self) -> None:
        self._package = _imported("trackio", "trackio")

    def open(self, trainer: Trainer, resumed: str | None) -> str:
        """Start or resume a run of this name."""
        name = resumed or f"{_name(trainer)}-{secrets.token_hex(2)}"
        with contextlib.redirect_stdout(io.StringIO()):  # which may be the program's result
            self._run = self._package.init(
                os.environ.get("TRACKIO_PROJECT", _PROJECT),
                name=name,
                resume="allow",
                config=_settings(trainer),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._run.log(dict(values), step=step)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Log the text."""
        self._run.log({_SAMPLE: self._package.Markdown(_as_code(text))}, step=step)

    def close(self, status: str) -> None:
        """Finish the run."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._package.finish()


class MLflow(Logger):
    """Logs to MLflow, by default into a SQLite file beside the folder of the run.

    A call takes milliseconds: values are collected, and logged with each line of times.jsonl.
    """

    def __init__(self) -> None:
        self._package = _imported("mlflow", "mlflow", "mlflow-skinny")
        self._tracking = importlib.import_module("mlflow.tracking")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            _imported("mlflow", "sqlalchemy")
            _imported("mlflow", "alembic")

    def open(self, trainer: Trainer, resumed: str | None) -> str:
        """Create a run in the experiment, or open the one of this id."""
        folder = trainer.folder.resolve().parent
        default = f"sqlite:///{folder / 'mlflow.db'}"
        uri = os.environ.get("MLFLOW_TRACKING_URI", default)
        self._client = self._tracking.MlflowClient(tracking_uri=uri)
        self._values: list[Any] = []
        if resumed is not None:
            self._id = resumed
            self._client.update_run(resumed, status="RUNNING")
            return resumed
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        files = (folder / "mlartifacts").as_uri() if uri == default else None
        experiment = found.experiment_id if found else self._client.create_experiment(name, files)
        self._id = self._client.create_run(experiment, run_name=_name(trainer)).info.run_id
        make = self._package.entities.Param
        settings = [make(key, str(value)) for key, value in _settings(trainer).items()]
        for start in range(0, len(settings), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=settings[start : start + _MOST_PARAMETERS])
        return str(self._id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Collect the values of a step."""
        now, make = int(time.time() * 1000), self._package.entities.Metric
        self._values += [make(key, value, now, step) for key, value in values.items()]
        if len(self._values) >= _MOST:
            self._flush()

    def on_times(self, step: int, times: Mapping[str, float]) -> None:
        """Log speed and memory, and what was collected."""
        super().on_times(step, times)
        self._flush()

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Log the text as a file."""
        self._client.log_text(self._id, text, f"samples/step-{step:08d}.txt")

    def close(self, status: str) -> None:
        """Log what was collected, and the status."""
        self._flush()
        states = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._id, states[status])

    def _flush(self) -> None:
        values, self._values = self._values, []
        for start in range(0, len(values), _MOST):
            self._client.log_batch(self._id, metrics=values[start : start + _MOST])


def _imported(logger: str, module: str, package: str = "") -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # an environment variable of the package may be anything
        raise ArgumentError(
            f"--loggers: {logger} needs the {package or module} package, which cannot be imported "
            f"({error}): {install(logger)}"
        ) from error


def _name(trainer: Trainer) -> str:
    return trainer.folder.resolve().name


def _settings(trainer: Trainer) -> dict[str, Any]:
    """Return the settings as JSON has them."""
    settings = asdict(trainer.settings).items()
    return {name: list(value) if type(value) is tuple else value for name, value in settings}


def _as_code(text: str) -> str:
    """Return Markdown that shows the text as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _read(folder: Path) -> dict[str, Any]:
    """Return loggers.json as {logger: {"run": str, "logged": {key: step}}}."""
    try:
        found = read_json(folder / FILE)
    except FileNotFoundError:
        return {}
    for entry in found.values():
        whole = isinstance(entry, dict) and isinstance(entry.get("run"), str)
        logged = entry.get("logged") if whole else None
        if not isinstance(logged, dict) or not all(type(step) is int for step in logged.values()):
            raise DataError(f"loggers: {folder / FILE} is damaged: remove it to log a new run")
    return found


def _last_steps(folder: Path) -> dict[str, int]:
    """Return the last step in the logs of the run for each value, before lines are removed."""
    found: dict[str, int] = {}
    for file, prefix in (("metrics.jsonl", ""), ("times.jsonl", "times/")):
        if (folder / file).exists():
            for record in read_metrics(folder / file):
                found |= {prefix + key: record["step"] for key in record if key != "step"}
    if (folder / "samples.jsonl").exists():
        for record in read_samples(folder / "samples.jsonl"):
            found[_SAMPLE] = record["step"]
    return found
