from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import pytest

from tensorgrad.report.settings import defaults, grouped, value_text
from tensorgrad.train.config import OTHER
from tensorgrad.train.language import LanguageSettings
from tensorgrad.train.sentiment import SentimentSettings
from tensorgrad.train.translation import TranslationSettings


@pytest.mark.parametrize("kind", [LanguageSettings, TranslationSettings, SentimentSettings])
@pytest.mark.parametrize("has_task", [True, False])
def test_defaults_are_those_of_the_program(kind: Any, has_task: bool) -> None:
    saved = json.loads(json.dumps(asdict(kind())))
    config = {key: value for key, value in saved.items() if has_task or key != "task"}
    assert defaults(config) == config
    assert defaults({**config, "new": 1}) == config


@pytest.mark.parametrize("value", [["adamw"], {"a": 1}, 3, None])
def test_settings_of_any_type_have_defaults(value: Any) -> None:
    config = {f.name: f.default for f in fields(LanguageSettings)} | {"optimizer_name": value}
    assert defaults(config)["lr"] is None


def test_unknown_programs_have_no_defaults() -> None:
    assert defaults({}) == {}
    assert defaults({"steps": 3, "own": 1}) == {}
    three = {name: getattr(LanguageSettings, name) for name in ("steps", "preset", "heads")}
    assert defaults({**three, "own": 1}) == three  # known of most
    assert defaults({**three, "own": 1, "more": 2}) == {}
    assert defaults({**asdict(LanguageSettings()), "task": "chess"}) == {}
    assert defaults({**asdict(LanguageSettings()), "task": ["gpt2"]}) == {}


def test_every_setting_is_in_one_group() -> None:
    config = {**asdict(LanguageSettings()), "own": 1}
    groups = grouped(config)
    names = [name for group in groups.values() for name in group]
    assert sorted(names) == sorted(config)
    assert groups["Model"][0] == "task"
    assert groups[OTHER][-1] == "own"
    assert list(grouped({"own": 1})) == [OTHER]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a b", "a b"),
        ("", "(empty)"),
        (None, "none"),
        (1e-4, "0.0001"),
        (True, "true"),
        (["a", "b"], "a b"),
        ([1, "b"], '[1, "b"]'),
        ({"x": "ü"}, '{"x": "ü"}'),
    ],
)
def test_values_as_text(value: Any, text: str) -> None:
    assert value_text(value) == text
