from __future__ import annotations

from dataclasses import dataclass

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.train.config import option
from tensorgrad.train.settings import EpochSettings


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
