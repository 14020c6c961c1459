"""Untrusted files of settings: none ends in a traceback, runs code, hangs or fills memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.train.settings_file import read_settings
from tests.train.test_config import given


@pytest.mark.parametrize(
    ("suffix", "text", "problem"),
    [
        ("yaml", "steps: 3.7", "--steps: got 3.7, expected an integer"),
        ("toml", "steps = 3.7", "--steps: got 3.7, expected an integer"),
        ("json", '{"steps": 3.7}', "--steps: got 3.7, expected an integer"),
        ("yaml", "steps: '3.7'", "--steps: got 3.7, expected an integer"),
        ("yaml", "steps: 1\nsteps: 2", "line 2 has 'steps' a second time"),
        ("yaml", "{steps: 1, 'steps': 2}", "line 1 has 'steps' a second time"),
        ("toml", "steps = 1\nsteps = 2", "Cannot overwrite a value"),
        ("json", '{"steps": 1, "steps": 2}', "the key 'steps' is there 2 times"),
        ("yaml", "!!python/object/apply:os.system ['id']", "python/object/apply:os.system"),
        ("yaml", "steps: !!python/name:os.system", "python/name:os.system"),
        ("yaml", "steps: !mine 3", "the tag '!mine'"),
        ("yaml", "steps: !!binary aGk=", "steps is b'hi', expected a text, a number"),
        ("yaml", "1: 2", "line 1 has the name '1', expected a text"),
        ("yaml", "null: 2", "line 1 has the name 'null', expected a text"),
        ("yaml", "? [a]\n: 2", "line 1 has the name None, expected a text"),
        ("yaml", "<<: {steps: 3}", "line 1 has the name '<<', expected a text"),
        ("yaml", "a: &a [1, 2]\nb: [*a, *a]", "line 2 has an alias, expected the value"),
        ("yaml", "a: &a {b: *a}", "has an alias"),
        ("yaml", "steps: 2020-01-01", "steps is datetime.date"),
        ("toml", "steps = 1979-05-27", "steps is datetime.date"),
        ("toml", f"a{'.a' * 30_000} = 1", "it has 30,000 dots, expected at most 5,000"),
        ("yaml", "lr: .nan", "lr is nan, expected a finite number"),
        ("toml", "lr = inf", "lr is inf, expected a finite number"),
        ("json", '{"lr": 1e999}', "1e999, expected finite ones"),
        ("yaml", f"steps: {10**30}", "steps has 100 bits, expected 64 at most"),
        ("yaml", "steps: {a: 1}", "steps is {'a': 1}, expected a text, a number"),
        ("toml", "[steps]\na = 1", "steps is {'a': 1}, expected a text, a number"),
        ("yaml", f"steps: [{'1,' * 2000}]", "steps has 2,000 values, expected at most 1,000"),
        ("yaml", "[" * 1000, "nested too deep"),
        ("yaml", "- " * 5000, "nested too deep"),
        ("toml", "a = " + "[" * 5000, "cannot read|nested too deep"),
        ("toml", "a = " + "{a = " * 5000, "nested too deep"),
        ("toml", ".".join("a" * 3000) + " = 1", "nested too deep|expected a text"),
        ("json", '{"a": ' + "[" * 5000, "nested more than 64 deep"),
        ("yaml", 'text: "a\\0b"', r"text is 'a\\x00b', expected text without NUL"),
        ("json", '{"text": "\\ud800"}', "half of a surrogate pair"),
        ("yaml", 'text: "\\ud800"', "expected text without NUL, in UTF-8"),
        ("yaml", "config: other.yaml", "expected it on the command line alone"),
        ("yaml", "a: 1\n---\na: 2", "expected a single document"),
        ("yaml", "# " + "a" * (1 << 16), "has 65,538 bytes, expected at most 65,536"),
    ],
)
def test_a_file_is_refused_in_one_line(
    tmp_path: Path, suffix: str, text: str, problem: str
) -> None:
    path = tmp_path / f"settings.{suffix}"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=problem) as caught:
        given("--config", str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_plain_values_are_read(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("\ufeffsteps: 3.0\nlr: 1e-3\ntext: '[[ \u00e9'\nfast: no\n")
    assert read_settings(path)["text"] == "[[ \u00e9"
    assert given("--config", str(path)) == {
        "steps": 3, "lr": 1e-3, "text": "[[ \u00e9", "fast": False,
    }  # fmt: skip
    whole = {"a": [1] * 1000, "b": [2**64 - 1, -(2**63)], "c": None, "d": True}
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    assert read_settings(tmp_path / "whole.json") == whole
    for wrong in ([1] * 1001, 2**64, -(2**63) - 1):
        (tmp_path / "wrong.yaml").write_text(json.dumps({"a": wrong}))
        with pytest.raises(ArgumentError, match=r"a has (1,001 values|6[45] bits), exp"):
            read_settings(tmp_path / "wrong.yaml")
    (tmp_path / "dots.toml").write_text(f"a = 1 # {'.' * 5000}")
    assert read_settings(tmp_path / "dots.toml") == {"a": 1}
    (tmp_path / "link.yaml").symlink_to(path)
    assert given("--config", str(tmp_path / "link.yaml"))["steps"] == 3


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    for name in ("fifo.yaml", "zero.json", "folder.toml", "none.yml", "a" * 300 + ".yaml"):
        with pytest.raises(ArgumentError, match="--config: cannot read"):
            read_settings(tmp_path / name)
    with pytest.raises(ArgumentError, match="is not the name of a file"):
        read_settings(tmp_path / "a\0b.yaml")
