from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tensorgrad.dtypes import bfloat16
from tensorgrad.errors import ArgumentError
from tensorgrad.optim import FlatParameters
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.config import option
from tensorgrad.train.language import LanguageSettings
from tensorgrad.train.sentiment import SentimentSettings
from tensorgrad.train.settings import EpochSettings
from tensorgrad.train.translation import TranslationSettings
from tests.optim import toy


@dataclass(frozen=True)
class Sizes:
    width: int
    layers: int = 2


@dataclass(frozen=True)
class Settings(EpochSettings):
    width: int = option(8, "width of the model")


def test_epochs_become_steps_unless_steps_are_given() -> None:
    assert Settings(epochs=3).with_steps(50).steps == 150
    assert Settings(epochs=3, steps=20).with_steps(50).steps == 20


def test_warmup_ends_before_the_last_step() -> None:
    assert Settings(epochs=1, warmup=100).with_steps(50).warmup_steps == 49
    assert Settings(epochs=4, warmup=100).with_steps(50).warmup_steps == 100
    assert Settings(epochs=2).with_steps(50).warmup_steps == 5


def test_warmup_is_checked_where_steps_are_given() -> None:
    with pytest.raises(ArgumentError, match="--warmup: got 20, expected less than --steps, 20"):
        Settings(steps=20, warmup=20)


def test_sizes_are_the_settings_that_a_config_has_too() -> None:
    assert Settings(width=5).sizes(Sizes) == {"width": 5}


def test_bfloat16_gradients_are_of_bfloat16_parameters_in_one_process() -> None:
    with pytest.raises(ArgumentError, match="--grad-dtype: got bfloat16 with --dtype bfloat16,"):
        LanguageSettings(dtype="bfloat16", grad_dtype="bfloat16")
    settings = LanguageSettings(dtype="bfloat16-parameters", grad_dtype="bfloat16")
    parameters = toy.parameters(bfloat16).items()
    assert settings.optimizer(parameters).flat.grad_dtype == bfloat16
    flat = FlatParameters(parameters)  # as data parallel ranks lay them out
    with pytest.raises(ArgumentError, match="got bfloat16 with data parallel ranks, expected"):
        settings.optimizer(flat)


@pytest.mark.parametrize("kind", [LanguageSettings, SentimentSettings, TranslationSettings])
def test_every_program_captures_its_steps_unless_told_otherwise(kind: Any) -> None:
    assert kind().capture
    assert not read_command_line(kind, None, ["--no-capture"])[0].capture
