"""`tensorgrad curvature` on a run whose loss has a known Hessian."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tensorgrad.cli import main
from tensorgrad.report import read_run, write_report
from tensorgrad.train import load_checkpoint
from tests.file_formats import compare, fields_of

TASK = '''
from dataclasses import dataclass
import numpy as np
from tensorgrad import nn
from tensorgrad.train import Task, TrainSettings, option


@dataclass(frozen=True)
class BowlSettings(TrainSettings):
    task: str = option("bowl", "what to train", choices=("bowl",))


class Bowl(nn.Module):
    def __init__(self):
        self.weight = nn.Parameter(np.linspace(-1, 1, 8, dtype="float32"))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        squares = self.weight * self.weight
        return (self.dropout(x) * (squares + 0.25 * squares * squares)).sum() / 2


class BowlTask(Task):
    """Find the bottom of a bowl."""

    Settings = BowlSettings

    def build(self):
        return Bowl()

    def batches(self, step):
        while True:
            step += 1
            yield (step * np.arange(1, 9, dtype="float32"),)

    def count(self, *batch):
        return 1
'''
TRAIN = (
    "train bowl.py --out run --device cpu --steps 6 --lr 0.01 --optimizer sgd --momentum 0 "
    "--schedule constant --warmup 0 --checkpoint-every 2 --keep 9 --no-plot"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curvature")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("bowl.py").write_text(TASK)
        assert main(TRAIN.split()) == 0
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with checkpoints of three steps, in the current folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("run")


def curvature(*options: str) -> int:
    return main(["curvature", "run", "--task", "bowl.py", "--device", "cpu", *options])


def weight_at(run: Path, step: int) -> np.ndarray[Any, Any]:
    found = load_checkpoint(run / "checkpoints" / f"step-{step:08d}").arrays("model")
    return found["weight"].astype(np.float64)


def test_eigenvalues_and_density_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 4, "lr": 0.04}\n')
    assert curvature("--eigenvalues", "2", "--batches", "3") == 0
    found = json.loads((run / "curvature.json").read_text())
    compare(found, fields_of("curvature.json"))
    assert [one["step"] for one in found["checkpoints"]] == [2, 4, 6]
    scale = 2 * np.arange(1, 9)  # the mean of three batches
    for one in found["checkpoints"]:
        weight = weight_at(run, one["step"])
        values = np.sort(scale * (1 + 1.5 * weight**2))[::-1]
        np.testing.assert_allclose(one["values"], values[:2], rtol=1e-5)
        assert max(one["residuals"]) < 1e-4
        assert one["converged"] == [True, True]
        loss = (scale * (weight**2 + weight**4 / 4)).sum() / 2
        assert one["loss"] == pytest.approx(loss, rel=1e-5)
        assert one["learning_rate"] == {2: 0.01, 4: 0.04, 6: 0.01}[one["step"]]
    density = found["density"]
    assert density["trace"] == pytest.approx(values.sum(), rel=1e-5)
    assert density["trace_error"] < 1e-4
    np.testing.assert_allclose(density["nodes"], np.tile(values[::-1], (4, 1)), rtol=1e-5)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 6
    assert "|    6 |" in printed

    page = (run / "report.html").read_text()
    assert "Hessian of the mean loss of 3 batches" in page
    assert "Sharpness" in page
    assert '"steps":[2,4,6],"values":[200,50,200]' in page
    picture = ElementTree.parse(run / "curvature.svg").getroot()
    assert picture.tag.endswith("svg")
    assert "Spectral density of the Hessian at step 6" in page
    assert read_run(run).notes == ()


def test_equal_seeds_give_equal_files(run: Path) -> None:
    def content(*more: str) -> bytes:
        assert curvature("--samples", "2", "--steps", "3", "--checkpoints", "last", *more) == 0
        return (run / "curvature.json").read_bytes()

    assert content() == content() != content("--seed", "1")


def test_the_last_checkpoint_without_density(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "curvature.svg").write_text("an earlier one")
    assert curvature("--checkpoints", "last", "--samples", "0", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    compare(found, fields_of("curvature.json"))
    assert [one["step"] for one in found["checkpoints"]] == [6]
    assert found["density"] is None
    assert not (run / "curvature.svg").exists()
    assert "<h2>Curvature</h2>" in write_report(run).read_text()


def test_residuals_above_the_tolerance_are_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert curvature("--checkpoints", "last", "--samples", "0", "--eigenvalues", "2") == 0
    assert "residual" not in caplog.text
    tight = ("--checkpoints", "last", "--samples", "0", "--tolerance", "0")
    assert curvature(*tight, "--eigenvalues", "2") == 0
    assert "step 6: 2 of 2 eigenvalues have a residual above the tolerance 0 (" in caplog.text


def test_a_damaged_checkpoint_is_skipped(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = (run / "checkpoints" / "step-00000006").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert curvature("--samples", "0") == 0
    assert "step-00000006" in caplog.text
    assert "; skipping it" in caplog.text
    found = json.loads((run / "curvature.json").read_text())
    assert [one["step"] for one in found["checkpoints"]] == [2, 4]


def test_wrong_runs_and_options_are_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    def said(*options: str) -> str:
        caplog.clear()
        assert curvature(*options) == 1
        (record,) = (record for record in caplog.records if record.levelname == "ERROR")
        return record.getMessage()

    assert "--eigenvalues: got 9, expected at most 8" in said("--eigenvalues", "9")
    assert "--matrix: got fisher for a run of bowl, expected hessian" in said("--matrix", "fisher")
    assert "--samples: got 1, expected 0, or 2 or more" in said("--samples", "1")
    assert "--batches: got 0, expected 1 or more" in said("--batches", "0")
    assert "--tolerance: got -1.0, expected 0 or more" in said("--tolerance", "-1")
    caplog.clear()
    assert main(["curvature", "run"]) == 1
    assert "--task: got none, expected the Python file" in caplog.text
    Path("bowl.py").write_text(TASK.replace("0.25 *", "np.inf *"))
    assert "step-00000006: Operator: product 1 has NaN or infinity" in said()
    shutil.rmtree(run / "checkpoints")
    assert "RUN: got no checkpoints, expected one or more" in said()
    assert not (run / "curvature.json").exists()
