"""Each logger with its real package: what a stopped, killed and resumed run logged is read back."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError, DataError
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loggers import make_loggers
from tensorgrad.train.loop import Trainer
from tensorgrad.train.settings import LOGGERS, TrainSettings
from tests.file_formats import compare, fields_of
from tests.train.tiny_run import make_trainer

INSTALL = "(pip install -e '.[log]')"
OPTIONS: dict[str, Any] = {"steps": 9, "checkpoint_every": 3, "evaluate_every": 4}
STEPS, EVALUATIONS = list(range(1, 10)), [0, 4, 8, 9]

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the packages


def logged(folder: Path, logger: str, **options: Any) -> Trainer:
    """Return a trainer with this logger, which samples every 4 steps."""
    trainer = make_trainer(folder, loggers=(logger,), **{**OPTIONS, **options})
    trainer._callbacks = tuple(make_loggers([logger]))
    trainer._sampler, trainer._sample_every = lambda: ("def ", f"def f():\n  # {trainer.step}"), 4
    trainer.resume()
    return trainer


def die_after(trainer: Trainer, step: int) -> None:
    """Fail at a step that no checkpoint has, as when the process is killed."""
    good = trainer._schedule

    def schedule(done: int) -> float:
        if done == step:
            raise KeyboardInterrupt
        return good(done)

    trainer._schedule = schedule


def run_in_pieces(folder: Path, logger: str) -> None:
    """Stop after 2 steps, be killed after 5 and after 4 (from 3 on), and finish."""
    logged(folder, logger, stop_after=2).run()
    for step in (5, 4):
        trainer = logged(folder, logger)
        die_after(trainer, step)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    assert logged(folder, logger).run().finished


def losses(folder: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason=f"needs tensorboardX {INSTALL}")
    run_in_pieces(tmp_path / "run", "tensorboard")
    found = tensorboard_values(tmp_path / "run" / "tensorboard")
    assert found["loss"] == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in losses(tmp_path / "run").items()
    ]
    assert [step for step, _ in found["validation_loss"]] == EVALUATIONS
    assert {"lr", "gradient_norm", "times/tokens_per_second"} <= found.keys()
    assert [step for step, _ in found["sample/text_summary"]] == [4, 8, 9]
    known = json.loads((tmp_path / "run" / "loggers.json").read_text())
    assert known == {"tensorboard": {"run": "tensorboard", "logged": {}}}


def tensorboard_values(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return what TensorBoard shows: an event file hides later steps of those before it."""
    from tensorboardX.proto.event_pb2 import Event

    shown: dict[str, list[tuple[int, Any]]] = {}
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            if event.HasField("session_log") and event.session_log.status == 1:  # START
                for name, values in shown.items():
                    shown[name] = [each for each in values if each[0] < event.step]
            for value in event.summary.value:
                shown.setdefault(value.tag, []).append((event.step, value.simple_value))
    return shown


def test_tensorboard_as_tensorboard_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason=f"needs tensorboardX {INSTALL}")
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs tensorboard (pip install tensorboard)",
    )
    run_in_pieces(tmp_path / "run", "tensorboard")
    found = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("loss")] == STEPS
    assert [event.step for event in found.Scalars("validation_loss")] == EVALUATIONS


@pytest.fixture
def wandb_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    hook = sys.excepthook
    yield
    sys.excepthook = hook


def test_wandb(tmp_path: Path, wandb_environment: None) -> None:
    pytest.importorskip("wandb", reason=f"needs wandb {INSTALL}")
    run_in_pieces(tmp_path / "run", "wandb")
    until = time.monotonic() + 10
    while True:  # W&B's own process writes the files
        files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
        rows, starts, ends = wandb_records(files)
        if len(ends) == 4 or time.monotonic() > until:
            break
        time.sleep(0.1)
    name = json.loads((tmp_path / "run" / "loggers.json").read_text())["wandb"]["run"]
    assert {path.name for path in files} == {f"run-{name}.wandb"}
    assert [(row["_step"], row["loss"]) for row in rows if "loss" in row] == [
        *losses(tmp_path / "run").items()
    ]
    assert [row["_step"] for row in rows if "validation_loss" in row] == EVALUATIONS
    assert [row["_step"] for row in rows if "sample/path" in row] == [4, 8, 9]
    assert any("times/tokens_per_second" in row for row in rows)
    assert [(start["project"], start["steps"]) for start in starts] == [("tensorgrad", 9)] * 4
    assert ends == [0, 0, 0, 0]


def wandb_records(files: list[Path]) -> tuple[list[dict[str, Any]], list[Any], list[int]]:
    """Return the rows of all files of a run, its settings at each start, its exit statuses."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, starts, ends = [], [], []
    for path in files:
        for data in wandb_messages(path.read_bytes()):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                rows.append(row)
            elif kind == "run":
                config = {u.key: json.loads(u.value_json) for u in record.run.config.update}
                starts.append({"project": record.run.project, "steps": config.get("steps")})
            elif kind == "exit":
                ends.append(record.exit.exit_code)
    return rows, starts, ends


def wandb_messages(data: bytes) -> Iterator[bytes]:
    """Yield the messages of a .wandb file: a LevelDB log, in blocks of 32 KB, after 7 bytes."""
    at, message = 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # no header fits: padding
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole message, or its last part
            yield message
            message = b""


@pytest.fixture
def trackio(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the package, which reads where to write when it is imported."""
    folder = tmp_path_factory.mktemp("trackio")
    for name in [name for name in os.environ if name.startswith("TRACKIO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    package = pytest.importorskip("trackio", reason=f"needs trackio {INSTALL}")
    if str(package.TRACKIO_DIR) != str(folder):
        pytest.skip("trackio was imported before")
    return package


def test_trackio(tmp_path: Path, trackio: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_in_pieces(tmp_path / "run", "trackio")
    assert capsys.readouterr().out == ""
    (run,) = trackio.Api().runs("tensorgrad")
    assert run.name.startswith("run-")
    assert run.config["steps"] == 9
    rows = trackio.SQLiteStorage.get_logs("tensorgrad", run.name)
    assert {row["step"]: row["loss"] for row in rows if "loss" in row} == losses(tmp_path / "run")
    for name, steps in (("loss", STEPS), ("validation_loss", EVALUATIONS), ("sample", [4, 8, 9])):
        assert [row["step"] for row in rows if name in row] == steps
    assert any("times/tokens_per_second" in row for row in rows)


def test_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(name, reason=f"needs {name} {INSTALL}")
    from mlflow.tracking import MlflowClient

    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.WARNING)
    run_in_pieces(tmp_path / "run", "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tensorgrad")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["steps"] == "9"
    found = client.get_metric_history(run.info.run_id, "loss")
    assert {each.step: each.value for each in found} == losses(tmp_path / "run")
    for name, steps in (("loss", STEPS), ("validation_loss", EVALUATIONS)):
        assert sorted(m.step for m in client.get_metric_history(run.info.run_id, name)) == steps
    assert client.get_metric_history(run.info.run_id, "times/tokens_per_second")
    assert (tmp_path / "mlartifacts").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlartifacts", "mlflow.db", "run"]


def test_mlflow_takes_1000_values_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    entities = SimpleNamespace(Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "anywhere")
    calls: list[int] = []
    ends: list[str] = []
    logger: Any = make_loggers(["mlflow"])[0]
    logger._id, logger._values = "1", []
    logger._client = SimpleNamespace(
        log_batch=lambda run, metrics: calls.append(len(metrics)),
        set_terminated=lambda run, status: ends.append(status),
    )
    for step, count in enumerate((999, 1, 2400, 7)):
        logger.log(step, {f"value{number}": 0.5 for number in range(count)})
        assert calls == ([], [1000], [*[1000] * 3, 400], [*[1000] * 3, 400])[step]
    logger.close("stopped")
    assert (calls[-1], ends) == (7, ["KILLED"])


class FakeWandB:
    """A package that remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> FakeWandB:
        self.calls.append(("init", options))
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls.append(("log", {**values, "step": step}))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))

    def named(self, name: str) -> list[Any]:
        return [value for called, value in self.calls if called == name]

    Settings: Callable[..., Any] = dict
    Table: Callable[..., Any] = dict


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, wandb_environment: None) -> FakeWandB:
    package = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_the_environment_chooses_mode_folder_and_project(
    tmp_path: Path, fake: FakeWandB, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged(tmp_path / "one", "wandb", stop_after=1).run()
    for name, value in (("MODE", "online"), ("DIR", "there"), ("PROJECT", "mine")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    logged(tmp_path / "two", "wandb", stop_after=1).run()
    one, two = fake.named("init")
    assert (one["mode"], one["dir"], one["project"]) == ("offline", tmp_path / "one", "tensorgrad")
    assert (two["mode"], two["dir"], two["project"]) == (None, "there", "mine")
    assert one["config"]["loggers"] == ["wandb"]
    assert one["id"] != two["id"]
    assert (one["name"], one["resume"], one["allow_val_change"]) == ("one", "allow", True)
    assert one["settings"] == {"console": "off", "silent": True}
    known = json.loads((tmp_path / "one" / "loggers.json").read_text())
    assert known == {"wandb": {"run": one["id"], "logged": {}}}
    compare(known, fields_of("loggers.json"))


def test_a_run_in_pieces_logs_each_value_once(tmp_path: Path, fake: FakeWandB) -> None:
    run_in_pieces(tmp_path, "wandb")
    rows = fake.named("log")
    assert [row["step"] for row in rows if "loss" in row] == STEPS
    assert [row["step"] for row in rows if "validation_loss" in row] == EVALUATIONS
    timed = [row["step"] for row in rows if "times/tokens_per_second" in row]
    assert timed == sorted(set(timed)) != []
    samples = [row["sample"] for row in rows if "sample" in row]
    assert [table["data"] for table in samples] == [
        [[step, "def ", f"def f():\n  # {step}"]] for step in (4, 8, 9)
    ]
    assert samples[0]["columns"] == ["step", "prompt", "text"]
    assert fake.named("finish") == [0] * 4
    assert len({start["id"] for start in fake.named("init")}) == 1


class Calls:
    """A package, or an object of one, that remembers how its functions were called."""

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            self.calls.append((name, *given, options))
            return self

        return call

    def named(self, name: str) -> list[Any]:
        return [given for called, *given in self.calls if called == name]


def test_tensorboard_is_told_which_steps_to_hide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Calls()
    monkeypatch.setitem(sys.modules, "tensorboardX", package)
    logged(tmp_path, "tensorboard", stop_after=2).run()
    logged(tmp_path, "tensorboard").run()
    starts = package.named("SummaryWriter")
    assert [(folder, options["purge_step"]) for folder, options in starts] == [
        (f"{tmp_path}/tensorboard", 0),
        (f"{tmp_path}/tensorboard", 3),
    ]
    scalars = package.named("add_scalar")
    assert [step for name, _, step, _ in scalars if name == "loss"] == STEPS
    texts = [(name, step) for name, _, step, _ in package.named("add_text")]
    samples = [("sample", step) for step in (4, 8, 9)]
    assert texts == [("settings", 0), ("settings", 2), *samples]
    assert package.named("add_text")[2][1] == "    def f():\n      # 4"
    assert len(package.named("close")) == 2
    known = json.loads((tmp_path / "loggers.json").read_text())
    assert known == {"tensorboard": {"run": "tensorboard", "logged": {}}}


def test_trackio_continues_a_run_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Calls()
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    logged(tmp_path / "a", "trackio", stop_after=2).run()
    logged(tmp_path / "a", "trackio").run()
    starts = package.named("init")
    (name,) = {options["name"] for _, options in starts}
    assert re.fullmatch("a-[0-9a-f]{4}", name)
    assert {project for project, _ in starts} == {"tensorgrad"}
    flags = "resume", "embed", "auto_log_gpu", "auto_log_cpu"
    assert [starts[0][1][flag] for flag in flags] == ["allow", False, False, False]
    rows = package.named("log")
    assert [options["step"] for values, options in rows if "loss" in values] == STEPS
    assert [options["step"] for values, options in rows if "sample" in values] == [4, 8, 9]
    assert package.named("Markdown")[0][0] == "    def f():\n      # 4"
    assert len(package.named("finish")) == 2


def test_mlflow_makes_a_run_and_opens_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimpleNamespace(run_id="r1")
    client = Calls(get_experiment_by_name=lambda name: None, info=run)

    def opened(tracking_uri: str) -> Calls:
        uris.append(tracking_uri)
        return client

    values = SimpleNamespace(
        Param=lambda key, value: (key, value), Metric=lambda key, value, now, step: (key, step)
    )
    uris: list[str] = []
    for module in ("sqlalchemy", "alembic"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(entities=values))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=opened))
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_in_pieces(tmp_path / "a", "mlflow")
    assert set(uris) == {f"sqlite:///{tmp_path}/mlflow.db"}
    files = (tmp_path / "mlartifacts").as_uri()
    assert client.named("create_experiment") == [["tensorgrad", files, {}]]
    assert client.named("create_run") == [[client, {"run_name": "a"}]]
    assert client.named("update_run") == [["r1", {"status": "RUNNING"}]] * 3
    batches = [options for _, options in client.named("log_batch")]
    parameters = [part for batch in batches for part in batch.get("params", [])]
    assert dict(parameters)["steps"] == "9"
    assert len(parameters) == len(set(parameters)) == len(fields(TrainSettings))
    metrics = [value for batch in batches for value in batch.get("metrics", [])]
    assert [step for name, step in metrics if name == "loss"] == STEPS
    assert client.named("log_text")[0] == ["r1", "def f():\n  # 4", "samples/step-00000004.txt", {}]
    statuses = [status for _, status, _ in client.named("set_terminated")]
    assert statuses == ["KILLED", "KILLED", "KILLED", "FINISHED"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    make_loggers(["mlflow"])[0].on_start(make_trainer(tmp_path))
    assert uris[-1] == "sqlite:///elsewhere.db"
    assert client.named("create_experiment")[-1] == ["tensorgrad", None, {}]


def test_a_run_that_fails_is_closed_as_failed(tmp_path: Path, fake: FakeWandB) -> None:
    trainer = logged(tmp_path, "wandb")
    good = trainer._loss
    trainer._loss = lambda *batch: good(*batch) * math.nan
    with pytest.raises(ArithmeticError):
        trainer.run()
    assert fake.named("finish") == [1]
    assert all(math.isfinite(v) for row in fake.named("log") for v in row.values())


def test_a_run_that_starts_again_is_another(tmp_path: Path, fake: FakeWandB) -> None:
    for _ in range(2):
        trainer = logged(tmp_path, "wandb")
        die_after(trainer, 2)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    first, second = fake.named("init")
    assert first["id"] != second["id"]
    assert [row["step"] for row in fake.named("log") if "loss" in row] == [1, 2, 1, 2]
    assert fake.named("finish") == [0, 0]


def test_a_logger_may_be_added_when_a_run_resumes(tmp_path: Path, fake: FakeWandB) -> None:
    make_trainer(tmp_path, stop_after=4, **OPTIONS).run()
    logged(tmp_path, "wandb").run()
    assert [row["step"] for row in fake.named("log") if "loss" in row] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"wandb": 3}', '{"wandb": {"run": "a", "logged": {"loss": "b"}}}']
)
def test_a_damaged_file_is_named(tmp_path: Path, fake: FakeWandB, content: str) -> None:
    logged(tmp_path, "wandb", stop_after=3).run()
    (tmp_path / "loggers.json").write_text(content)
    with pytest.raises(DataError, match=r"loggers\.json"):
        logged(tmp_path, "wandb").run()


def test_loggers_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainSettings(loggers=["wandb"]).loggers == ("wandb",)  # type: ignore[arg-type]
    for name, module in zip(LOGGERS, ("tensorboardX", "wandb", "trackio", "mlflow"), strict=True):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ArgumentError, match=rf"{name} needs the {module}.*\[{name}\]"):
                make_loggers([name])
    assert make_loggers([]) == []
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace())
        assert len(make_loggers(["wandb", "wandb"])) == 1
    with pytest.raises(ArgumentError, match="got 'comet', expected names of tensorboard, wandb"):
        make_loggers(["comet"])
