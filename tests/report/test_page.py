from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.cli.report import report
from tensorgrad.errors import ArgumentError, DataError
from tensorgrad.report import write_report
from tensorgrad.report.page import page
from tensorgrad.report.run import Log, read_run
from tensorgrad.train.curves import Column
from tests.checkpoints import save_checkpoint
from tests.report.made_run import make_run, write_lines

MEGABYTE = 1_000_000


class Parsed(HTMLParser):
    """The elements of a page, their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.text += data
        else:
            self.scripts.append(data)

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[1])  # after the style
        return found


def parsed(folder: Path) -> Parsed:
    return Parsed(write_report(folder).read_text(encoding="utf-8"))


def test_a_page_has_every_part_of_a_run(tmp_path: Path) -> None:
    found = parsed(make_run(tmp_path / "gpt2-1", steps=60, every=20))
    for text in (
        *("gpt2-1", "finished: 60 steps", "Best validation loss", "NVIDIA H200", "38,212 MB"),
        *("Loss", "Learning rate", "Gradient norm", "Throughput", "MFU", "Memory", "GPU power"),
        *("4 evaluations", "def train(model):", "Configuration", "bfloat16", "Optimization"),
        *("tensorgrad train --preset gpt2-124M", "cupy-cuda13x", "ef9b8b3c7e1d with uncommitted"),
        *("return a <= b", "lines of git diff"),
    ):
        assert text in found.text, text
    charts = found.data["charts"]
    assert len(charts) == found.tags.count("figure") == 9
    assert [curve["steps"][-1] for curve in charts[0]] == [60, 60, 60]
    assert found.tags.count("h1") == 1
    assert found.tags.count("caption") == found.tags.count("table") > 5
    text = write_report(tmp_path / "gpt2-1").read_text(encoding="utf-8")
    assert "<title>gpt2-1: report</title>" in text
    assert '<p class="note">' not in text.partition("</header>")[0]
    parts = re.findall("<details( open)?><summary>Step (\\d+)</summary>\n<pre>(.{17})", text)
    assert parts == [(" open", "60", "<mark>def </mark>"), ("", "30", "<mark>def </mark>")]
    assert "The newest" not in text
    assert "<summary>2 packages</summary>" in text
    assert '<th scope="row">git' not in text
    assert "<summary>8 lines of git diff</summary>" in text
    assert re.findall('<span class="(file|added|removed|place-of)">(.)', text) == [
        *(("file", "d"), ("place-of", "@"), ("removed", "-"), ("added", "+"))
    ]


def test_a_best_step_without_a_checkpoint_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=60, every=20)
    assert "at step 60" in parsed(folder).text
    assert "no checkpoint" not in parsed(folder).text  # all were removed
    save_checkpoint(folder / "checkpoints", 40, {}, {"metrics": {"validation_loss": 4.0}})
    assert "at step 60, which has no checkpoint: the best one is of step 40" in parsed(folder).text
    save_checkpoint(folder / "checkpoints", 60, {}, {"metrics": {}})
    assert "no checkpoint" not in parsed(folder).text
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert "no checkpoint" not in parsed(folder).text


def test_values_that_differ_from_the_defaults_are_marked(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "run", steps=60)).read_text()
    marked = re.findall(r'class="changed"><th scope="row">(\w+)</th><td>(.*?)</td><td>(.*?)<', text)
    assert marked == [("steps", "60", "800"), ("dtype", "bfloat16", "float32")]
    (tmp_path / "run" / "config.json").write_text('{"steps": 60, "own": 1, "other": [1, {}]}')
    text = write_report(tmp_path / "run").read_text()
    assert "changed" not in re.sub(r"<style>.*</style>", "", text, flags=re.DOTALL)
    assert '<th scope="col">Default</th>' not in text  # they are not known
    assert "<td>60</td></tr>" in text
    assert "Marked values" not in text
    assert "[1, {}]" in text


EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\'&<!--\u202e'


def dress(value: Any) -> Any:
    """Return JSON whose texts are hostile."""
    if isinstance(value, dict):
        return {key: dress(inner) for key, inner in value.items()}
    return [dress(inner) for inner in value] if isinstance(value, list) else dressed(value)


def dressed(value: Any) -> Any:
    return value + EVIL if isinstance(value, str) else value


def test_nothing_that_a_run_wrote_becomes_an_element(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "run")
    evil = make_run(tmp_path / "</h1><script>1<" / "script>")
    for folder, end in ((plain, "more"), (evil, EVIL)):
        extra = [{"step": 60, "measure" + end: 1.0}]
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in extra)
    for name in ("config.json", "environment.json"):
        content = json.loads((evil / name).read_text())
        kept = {key: content[key] for key in ("task",) if key in content}  # or defaults are unknown
        (evil / name).write_text(json.dumps({**dress(content), **kept}))
    samples = [json.loads(line) for line in (evil / "samples.jsonl").read_text().splitlines()]
    write_lines(evil / "samples.jsonl", [dress(sample) for sample in samples])
    changed = (evil / "uncommitted.diff").read_text().replace("\n", EVIL + "\n")
    (evil / "uncommitted.diff").write_text(changed)
    expected, found = parsed(plain), parsed(evil)
    usual = [name for name, _ in expected.attributes if name != "class"]  # marks of changed values
    assert found.tags == expected.tags
    assert [name for name, _ in found.attributes if name != "class"] == usual
    assert found.text.count("alert(1)") > 20
    assert not [name for name, _ in found.attributes if name.startswith("on") or name == "style"]


def test_the_policy_allows_the_page_and_nothing_else(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "run")).read_text()
    found = Parsed(text)
    (policy,) = (value for name, value in found.attributes if value and "default-src" in value)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in found.scripts]
    style, _, script = hashes
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": f"'sha256-{style}'",
        "script-src": f"'sha256-{script}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    addresses = [value for name, value in found.attributes if name in ("src", "href", "action")]
    assert addresses == ["data:,"]
    outside = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert outside == {"http://www.w3.org/2000/svg"}  # a name, which nothing loads


def long_run(folder: Path, steps: int) -> Path:
    """Write a run whose logs have a line for each step, with numbers that are fast to make."""
    make_run(folder)
    rng = np.random.default_rng(0)
    for name in ("metrics", "times"):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        keys = [key for key in json.loads(lines[1 if name == "metrics" else 0]) if key != "step"]
        form = '{"step": %d' + "".join(f', "{key}": %.6f' for key in keys) + "}\n"
        rows = np.abs(rng.standard_normal((steps, len(keys)))).cumsum(1)
        text = "".join(form % (step, *row) for step, row in enumerate(rows.tolist(), 1))
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize("steps", [10_000, 50_000])
def test_a_long_run_has_a_small_page(tmp_path: Path, steps: int) -> None:
    target = write_report(long_run(tmp_path / "run", steps))
    assert target.stat().st_size < MEGABYTE
    curves = [c for chart in Parsed(target.read_text()).data["charts"] for c in chart]
    assert max(len(curve["steps"]) for curve in curves) <= 4500
    assert {curve["steps"][-1] for curve in curves} == {steps}


def test_a_run_with_much_of_everything_has_a_page_that_opens(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    noisy = Column(np.arange(20_000), np.random.default_rng(0).standard_normal(20_000))
    many = replace(
        run,
        metrics=Log({f"measure{n}": noisy for n in range(60)}, 19_999),
        config={f"key{n}": "<" * 10_000 for n in range(5000)},
        environment={"packages": {f"p{n}": "&" * 10_000 for n in range(5000)}},
        samples=[{"step": n, "prompt": "<", "text": "<" * 100_000} for n in range(500)],
        diff="+<\n-&\n" * 200_000,
        notes=("&" * 100_000,) * 4,
    )
    text = page(many)
    assert len(text.encode()) < 6 * MEGABYTE
    found = Parsed(text)
    assert sum(len(curve["steps"]) for chart in found.data["charts"] for curve in chart) < 80_000
    assert "The last 300 of 20,000 evaluations" in found.text
    assert "The newest 30 of 500." in found.text
    assert "1,200,000 lines" not in found.text
    assert "400,000 lines of git diff, the first 5,000 shown" in found.text
    assert page(replace(run, diff="+" + "ж" * 300_000)).count("ж") == 199_999


def test_a_run_that_only_evaluated_has_a_page(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0, "validation_loss": 2.5, "bleu": 30.5}])
    found = parsed(tmp_path)
    for text in ("evaluated, not trained", "1 evaluation", "no settings are known", "30.5000"):
        assert text in found.text
    assert len(found.data["charts"]) == 2


def test_a_run_without_a_step_has_a_page_without_charts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"steps": 10}')
    found = parsed(tmp_path)
    assert "no step logged yet" in found.text
    assert "No step has been logged." in found.text
    assert found.scripts[1:] == []


def test_losses_that_are_not_finite_are_gaps_and_a_note(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "loss": null, "lr": 1e-4, "gradient_norm": null}\n')
        file.write('{"step": 62, "loss": NaN}\n')
    found = parsed(tmp_path / "run")
    assert "2 logged losses not finite" in found.text
    assert "the last validation loss is not finite" not in found.text
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 63, "validation_loss": null}\n')
    text = page(read_run(tmp_path / "run"))
    assert '<p class="note">the last validation loss is not finite</p>' in text
    assert "<td>not finite</td>" in text
    assert found.data["charts"][0][0]["values"][-2:] == [None, None]


def test_only_losses_that_are_not_finite_make_no_chart(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": None}])
    found = parsed(tmp_path)
    assert "1 logged loss not finite" in found.text
    assert "figure" not in found.tags


def test_halves_of_surrogate_pairs_are_written_as_question_marks(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "run" / "samples.jsonl").write_text('{"step": 1, "text": "a\\ud800b"}\n')
    assert "a?b" in parsed(tmp_path / "run").text


def test_settings_that_a_preset_decides_have_its_values(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "config.json").write_text('{"task": "gpt2", "layers": null, "width": null}')
    (run / "facts.json").write_text('{"layers": 2, "parameters": 12345, "training_tokens": 678}')
    text = page(read_run(run))
    assert '<th scope="row">layers</th><td>2</td>' in text
    assert '<th scope="row">width</th><td>none</td>' in text
    assert "<dt>Parameters</dt><dd>12,345</dd>" in text
    assert "<dt>Tokens of the text</dt><dd>678</dd>" in text
    assert "Sentences" not in text  # which are not known


def test_the_header_has_a_tile_for_each_value(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "validation_loss": 1.5, "validation_tokens": 1234, "loss": 2.0},
        {"step": 3000, "validation_loss": 2.5, "validation_tokens": 1234, "bleu": 7.5},
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "environment.json").write_text('{"device": "cpu", "git": {"commit": "a1"}}')
    text = page(read_run(tmp_path))
    tiles = re.findall("<div><dt>(.*?)</dt><dd>(.*?)(?:<small>(.*?)</small>)?</dd></div>", text)
    assert tiles == [
        ("Status", "3,000 steps", ""),
        ("Final validation loss", "2.5000", "on 1,234 tokens"),
        ("Best validation loss", "1.5000", "at step 1"),
        ("Final training loss, smoothed", "2.0000", ""),
        ("Bleu", "7.5000", ""),
        ("Device", "cpu", ""),
    ]
    assert re.findall('<p class="note">(.*?)</p>\n', text.partition("</header>")[0]) == [
        "config.json: no settings are known"
    ]
    body = re.findall("<tr>(.*?)</tr>", text.partition("Evaluations</caption>")[2])[:3]
    assert [re.sub("<.*?>", "|", row).strip("|").replace("||", "|") for row in body] == [
        *(
            "Step|Validation loss|Validation tokens|Bleu",
            "1|1.5000|1,234",
            "3,000|2.5000|1,234|7.5000",
        )
    ]
    assert '<th scope="row">commit</th><td>a1</td>' in text
    for absent in ("<h2>Samples", "<h2>Configuration", "<h2>Uncommitted", "Packages"):
        assert absent not in text
    (tmp_path / "metrics.jsonl").write_text("")
    assert "<h2>Evaluations" not in page(read_run(tmp_path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("config.json", r"--out: \S*config.json has the ending '.json', expected .html or .htm"),
        ("nowhere/a.html", "which is not a folder"),
        (".", "is a folder, expected a new file"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    run = make_run(tmp_path / "run")
    before = (run / "config.json").read_text()
    with pytest.raises(ArgumentError, match=reason):
        write_report(run, run / name)
    assert (run / "config.json").read_text() == before


def test_a_folder_that_is_not_writable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(os, "access", lambda path, _: path != run)  # root may write everywhere
    with pytest.raises(ArgumentError, match="choose another place with --out"):
        write_report(run)
    assert write_report(run, tmp_path / "a.html").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert report(run, out=tmp_path / "page.html") == 0
    size = (tmp_path / "page.html").stat().st_size / 1e3
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}: {size:.0f} kB\n"
    assert sorted(path.name for path in run.glob("*.html")) == []
    with pytest.raises(DataError):
        report(tmp_path)
