from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from tensorgrad.dtypes import bfloat16
from tensorgrad.errors import ArgumentError
from tensorgrad.optim import FlatParameters, schedule
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.config import option
from tensorgrad.train.language import LanguageSettings
from tensorgrad.train.sentiment import SentimentSettings
from tensorgrad.train.settings import (
    DTYPES,
    OPTIMIZERS,
    EpochSettings,
    TrainSettings,
    has_narrow_products,
)
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


def test_a_dtype_says_what_parameters_are_and_whether_losses_are_scaled() -> None:
    for dtype in DTYPES:
        settings = TrainSettings(dtype=dtype)
        narrow = dtype in ("bfloat16-parameters", "fp8")
        assert settings.parameter_dtype == ("bfloat16" if narrow else "float32")
        assert (settings.scaler() is None) == (dtype != "float16")
        assert (settings.precision() is nullcontext) == (
            dtype in ("float32", "bfloat16-parameters")
        )


def test_a_batch_divides_into_parts() -> None:
    TrainSettings(batch=12, micro_batches=3).check_batch(2)
    for options, ranks, message in (
        ((12, 1), 5, "--batch: got 12, expected a multiple of the 5 data parallel ranks"),
        ((12, 5), 1, "--micro-batches: got 5, expected a divisor of the 12 sequences of a batch"),
        (
            (12, 4), 2,
            "--micro-batches: got 4, expected a divisor of the 6 sequences of a data parallel rank",
        ),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            TrainSettings(batch=options[0], micro_batches=options[1]).check_batch(ranks)
        assert str(caught.value) == message
    Settings(batch=12, micro_batches=5).check_batch(5)  # loaders of epochs add padding


def test_schedules_have_the_settings() -> None:
    expected: dict[str, Any] = {
        "constant": lambda step, warmup: schedule.constant(step, 0.5, warmup),
        "linear": lambda step, warmup: schedule.linear(step, 0.5, 9, warmup, 0.1),
        "cosine": lambda step, warmup: schedule.cosine(step, 0.5, 9, warmup, 0.1),
        "inverse-square-root": lambda step, warmup: schedule.inverse_square_root(
            step, 0.5, max(1, warmup)
        ),
    }
    for name, rate in expected.items():
        for warmup in (0, 3):
            settings = TrainSettings(steps=9, schedule=name, warmup=warmup, lr=0.5, lr_end=0.2)
            rates = [settings.learning_rate(step) for step in range(9)]
            assert rates == [rate(step, warmup) for step in range(9)]


def test_a_run_has_a_folder_and_no_model_unless_settings_say_so(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(TrainSettings().folder) == "runs/run-1"
    assert str(TrainSettings(out="a").folder) == "a"
    assert TrainSettings().known_sizes() is None
    assert TrainSettings().model_class is None
    assert TrainSettings().with_steps(3).steps == 1000
    assert LanguageSettings().model_class.__name__ == "GPT2"
    assert TrainSettings.complete({"steps": 3}) == {"steps": 3}
    assert {dtype for dtype in DTYPES if not has_narrow_products(dtype)} == {"float32", "tf32"}


def test_options_of_every_run_have_ranges_and_defaults() -> None:
    own = {f.name: f for f in fields(TrainSettings) if f.name in TrainSettings.__annotations__}

    def names(key: str, value: Any) -> set[str]:
        return {name for name, f in own.items() if f.metadata[key] == value}

    assert names("low", 1) == {
        *("steps", "batch", "micro_batches", "evaluate_every", "checkpoint_every", "keep"),
        *("log_every", "stop_after"),
    }
    assert names("low", 0) == {
        *("lr", "warmup", "lr_end", "decay_fraction", "weight_decay", "beta1", "beta2"),
        *("momentum", "clip", "seed", "patience"),
    }
    assert names("high", 1) == {"lr_end", "decay_fraction", "beta1", "beta2", "momentum"}
    assert names("high", 1_000_000_000) == {"batch"}
    assert names("grows", True) == {"steps"}
    assert names("by_ranks", True) == {"micro_batches"}
    assert names("saved", False) == {"stop_after"}
    assert names("free", True) == {
        *("out", "nan", "patience", "checkpoint_every", "keep", "background_checkpoints"),
        *("log_every", "plot", "report", "loggers", "device", "capture", "stop_after"),
    }
    assert {name for name, f in own.items() if f.default is True} == {"plot", "capture"}
    assert {name for name, f in own.items() if f.default is False} == {
        *("background_checkpoints", "report")
    }


def test_a_preset_is_of_adamw_and_of_epochs() -> None:
    preset = {"lr": 0.5, "weight_decay": 0.2, "warmup": 9, "width": 3}
    whole: dict[str, Any] = EpochSettings.with_preset(preset, {"width": 4})
    assert whole == {"lr": 0.5, "weight_decay": 0.2, "warmup": 9, "width": 4}
    assert EpochSettings.with_preset(preset, {"optimizer_name": "muon"})["lr"] == 0.5
    other = EpochSettings.with_preset(preset, {"optimizer_name": "sgd", "steps": 5})
    assert other == {"warmup": None, "width": 3, "optimizer_name": "sgd", "steps": 5}


def test_warmup_ends_before_the_last_step() -> None:
    assert Settings(epochs=1, warmup=100).with_steps(50).warmup_steps == 49
    assert Settings(epochs=4, warmup=100).with_steps(50).warmup_steps == 100
    assert Settings(epochs=2).with_steps(50).warmup_steps == 5
    assert Settings(steps=20, warmup=19).warmup_steps == 19


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
    flat = FlatParameters(parameters)  # the layout of data parallel ranks
    with pytest.raises(ArgumentError, match="got bfloat16 with data parallel ranks, expected"):
        settings.optimizer(flat)


def test_every_optimizer_has_its_defaults_and_refuses_options_of_others() -> None:
    def values(**options: Any) -> list[Any]:
        settings = LanguageSettings(**options)
        return [getattr(settings, n) for n in ("lr", "weight_decay", "beta1", "beta2", "momentum")]

    assert values() == [3e-3, 0.1, 0.9, 0.95, None]
    assert values(optimizer_name="muon") == [3e-3, 0.1, 0.9, 0.95, 0.95]
    assert values(optimizer_name="lion", beta2=0.98) == [1e-4, 1.0, 0.9, 0.98, None]
    assert values(optimizer_name="adafactor", lr=0.5) == [0.5, 0.0, None, None, None]
    assert values(optimizer_name="sgd", weight_decay=0) == [0.1, 0.0, None, None, 0.9]
    assert SentimentSettings().beta2 == 0.99
    assert TranslationSettings().beta2 == 0.98
    assert TranslationSettings().weight_decay == 0.01
    wrong: tuple[tuple[Any, str, Any], ...] = (
        *(("adamw", "momentum", 0.9), ("sgd", "beta1", 0.9), ("adafactor", "beta2", 0.95)),
        *(("adafactor", "momentum", 0.0), ("lion", "momentum", 0.5)),
    )
    for optimizer, option_, value in wrong:
        message = f"--{option_}: got {value} with --optimizer {optimizer}, expected none: it is for"
        with pytest.raises(ArgumentError, match=message):
            values(**{"optimizer_name": optimizer, option_: value})
    with pytest.raises(
        ArgumentError, match="--optimizer: got 'adam', expected one of adamw, muon, "
    ):
        LanguageSettings(optimizer_name="adam")
    with pytest.raises(
        ArgumentError, match=r"--decay-fraction: got 0\.5 with --schedule cosine, ex"
    ):
        LanguageSettings(decay_fraction=0.5)
    assert replace(LanguageSettings(optimizer_name="sgd"), steps=7).momentum == 0.9


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_made_of_the_options(name: str) -> None:
    tensors = toy.parameters(shapes={"blocks.0.weight": (5, 6), "tokens.weight": (7, 6)})
    optimizer = LanguageSettings(optimizer_name=name).optimizer(tensors.items())
    assert type(optimizer) is OPTIMIZERS[name]
    assert optimizer.lr == LanguageSettings(optimizer_name=name).lr
    state = {entry for entry in optimizer.state_dict() if "blocks" in entry}
    expected = {"adafactor": {"row", "column"}, "adamw": {"m", "v"}, "sgd": {"momentum"}}
    assert state == {f"{kind}/blocks.0.weight" for kind in expected.get(name, {"m"})}
    assert ("v/tokens.weight" in optimizer.state_dict()) == (name in ("adamw", "muon"))


def test_presets_keep_their_learning_rate_to_adamw_and_muon() -> None:
    for kind, words, lr in (
        (SentimentSettings, ["--model", "transformer"], 1e-3),
        (TranslationSettings, ["--data", "phrases"], 4e-3),
    ):
        read: Any = read_command_line
        for more, expected in (
            (["adamw"], lr), (["muon"], lr), (["lion"], 1e-4), (["lion", "--lr", "0.5"], 0.5),
        ):  # fmt: skip
            found = read(kind, None, [*words, "--optimizer", *more])[0]
            assert found.lr == expected


def test_wsd_goes_on_with_more_steps() -> None:
    short, long = (
        TrainSettings(steps=steps, schedule="wsd", warmup=5, lr=1.0) for steps in (100, 300)
    )
    assert [short.learning_rate(s) for s in range(80)] == [long.learning_rate(s) for s in range(80)]
    assert short.learning_rate(99) == pytest.approx(0.1 + 0.9 / 20)
    wide = TrainSettings(steps=100, schedule="wsd", decay_fraction=0.5, lr=1.0, lr_end=0.0)
    assert wide.learning_rate(75) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", [LanguageSettings, SentimentSettings, TranslationSettings])
def test_every_program_captures_its_steps_unless_told_otherwise(kind: Any) -> None:
    assert kind().capture
    assert not read_command_line(kind, None, ["--no-capture"])[0].capture
