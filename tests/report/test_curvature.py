from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tensorgrad.curvature.record import read_curvature
from tensorgrad.errors import DataError
from tensorgrad.report import read_run, write_report
from tensorgrad.report.curvature import density_picture
from tests.report.made_run import make_run

NODES = [[-0.5, 0.0, 2.0], [-0.4, 0.1, 2.1]]


def record(**changed: Any) -> dict[str, Any]:
    checkpoint = {
        "step": 20,
        "values": [2.0, 1.0],
        "residuals": [0.01, 0.02],
        "loss": 3.0,
        "learning_rate": 0.5,
    }
    density = {
        "step": 40,
        "trace": 55.0,
        "trace_error": 4.0,
        "nodes": NODES,
        "weights": [[0.2, 0.7, 0.1]] * 2,
    }
    last = {**checkpoint, "step": 40, "values": [3.5, None], "loss": None, "learning_rate": 0.0}
    return {
        "format": 1,
        "parameters": 1000,
        "options": {"matrix": "gauss-newton", "batches": 1},
        "checkpoints": [checkpoint, last],
        "density": density,
        **changed,
    }


def page_of(folder: Path, content: Any) -> str:
    make_run(folder)
    (folder / "curvature.json").write_text(json.dumps(content))
    return write_report(folder).read_text(encoding="utf-8")


def test_the_section_and_the_chart(tmp_path: Path) -> None:
    text = page_of(tmp_path / "run", record())
    inside = text.partition("<h2>Curvature</h2>")[2].partition("</section>")[0]
    assert "Gauss-Newton matrix of the mean loss of 1 batch of the training data" in inside
    cells = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', inside)
    rows = [[step, *re.findall("<td>(.*?)</td>", rest)] for step, rest in cells]
    assert rows == [["20", "2, 1", "0.01", "4", "3"], ["40", "3.5, ", "0.01", "", ""]]
    assert "at step 40: the fraction of the 1,000 eigenvalues" in inside
    assert "is 55 (standard error 4)" in inside
    assert "<svg" in inside
    assert 'style="' not in inside  # which the policy of the page forbids
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text)[0])
    sharpness, threshold = data["charts"][-1]
    assert (sharpness["steps"], sharpness["values"]) == ([20, 40], [2, 3.5])
    assert threshold["values"] == [4, None]


def test_a_page_without_curvature_has_no_section(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "run")).read_text(encoding="utf-8")
    assert "Curvature" not in text
    assert "Sharpness" not in text
    assert "<h2>Curvature</h2>" in page_of(tmp_path / "other", record(density=None))


def test_the_picture_fits_its_frame(tmp_path: Path) -> None:
    path = tmp_path / "curvature.json"
    for scale in (1e-300, 1e-9, 1.0, 1e9):
        content = record()
        content["density"]["nodes"] = (scale * np.array(NODES)).tolist()
        path.write_text(json.dumps(content))
        root = ElementTree.fromstring(density_picture(read_curvature(path)))
        numbers = [
            float(number)
            for shape in root.iter()
            for pair in shape.get("points", "").split()
            for number in pair.split(",")
        ]
        assert len(numbers) == 512 * 2 * 3
        xs, ys = numbers[::2], numbers[1::2]
        assert (min(xs), max(xs)) == (70, 706)
        assert min(ys) == 16
        assert 230 < max(ys) <= 256
        labels = [text.text for text in root.iter() if text.tag.endswith("text")]
        assert {"eigenvalue", "density"} < set(labels)
        assert 8 < len(labels) < 20


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 2},
        {"checkpoints": []},
        {"checkpoints": 3},
        {"checkpoints": [{"step": -1, "values": [1], "residuals": [1]}]},
        {"checkpoints": [{**record()["checkpoints"][0], "values": ["a", "b"]}]},
        {"checkpoints": [{**record()["checkpoints"][0], "residuals": []}]},
        {"options": {"matrix": "<b>", "batches": 1}},
        {"options": None},
        {"parameters": "many"},
        {"density": {**record()["density"], "nodes": [[1.0]]}},
        {"density": {**record()["density"], "nodes": [[None] * 3] * 2}},
        {"density": {**record()["density"], "nodes": [[1e300] * 3] * 2}},
        {"density": {**record()["density"], "trace": []}},
    ],
)
def test_a_damaged_file_is_a_note(changed: dict[str, Any], tmp_path: Path) -> None:
    text = page_of(tmp_path / "run", record(**changed))
    assert "<h2>Curvature</h2>" not in text
    with pytest.raises(DataError, match=r"curvature\.json is damaged, expected a file of"):
        read_curvature(tmp_path / "run" / "curvature.json")
    (note,) = read_run(tmp_path / "run").notes
    assert note.startswith("curvature.json cannot be read: ")
