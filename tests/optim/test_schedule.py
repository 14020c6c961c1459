from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.optim import SGD, Scheduler, lr_scheduler, schedule
from tests.optim import toy

TEXT: Any = "x"
NONE: Any = None

Schedule = Callable[[int], float]
ALL: dict[str, Schedule] = {
    "constant": lambda step: schedule.constant(step, 2.0, warmup=8),
    "linear": lambda step: schedule.linear(step, 2.0, 48, warmup=8, minimum=0.5),
    "cosine": lambda step: schedule.cosine(step, 2.0, 48, warmup=8, minimum=0.5),
    "wsd": lambda step: schedule.wsd(step, 2.0, 48, 8, 0.5, decay_fraction=0.25),
    "inverse_square_root": lambda step: schedule.inverse_square_root(step, 2.0, warmup=8),
}


@pytest.mark.parametrize("rate", ALL.values(), ids=ALL)
def test_all_warm_up_on_a_line_and_never_rise_again(rate: Schedule) -> None:
    assert [rate(step) for step in range(8)] == [0.25 * (step + 1) for step in range(8)]
    rates = [rate(step) for step in range(7, 100)]
    assert all(later <= earlier for earlier, later in pairwise(rates))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", {8: 2.0, 28: 2.0, 1000: 2.0}),
        ("linear", {8: 2.0, 18: 1.625, 28: 1.25, 48: 0.5, 1000: 0.5}),
        ("cosine", {8: 2.0, 18: 0.5 + 0.75 * (1 + math.sqrt(0.5)), 28: 1.25, 48: 0.5, 1000: 0.5}),
        ("wsd", {8: 2.0, 36: 2.0, 40: 1.5, 44: 1.0, 48: 0.5, 1000: 0.5}),
        ("inverse_square_root", {7: 2.0, 17: 2 * 2 / 3, 31: 1.0, 799: 0.2}),
    ],
)
def test_rates_after_the_warm_up(name: str, expected: dict[int, float]) -> None:
    found = {step: ALL[name](step) for step in expected}
    assert found == pytest.approx(expected, rel=1e-14)


def test_no_warm_up() -> None:
    assert schedule.constant(0, 3.0) == 3.0
    assert schedule.linear(0, 3.0, 10) == schedule.cosine(0, 3.0, 10) == 3.0
    assert schedule.linear(10, 3.0, 10) == schedule.cosine(10, 3.0, 10) == 0.0
    assert [schedule.wsd(step, 3.0, 10) for step in (0, 8, 10)] == [3.0, 3.0, 0.0]
    assert schedule.inverse_square_root(0, 3.0, 1) == 3.0
    assert schedule.inverse_square_root(3, 3.0, 1) == 1.5
    assert schedule.linear(9, 1.0, 10, 9) == 1.0


def test_wsd_depends_on_the_number_of_steps_only_where_it_falls() -> None:
    short, long = ([schedule.wsd(s, 1.0, steps, 5) for s in range(80)] for steps in (100, 1000))
    assert short == long
    assert schedule.wsd(81, 1.0, 100, 5) == pytest.approx(0.95)
    whole = [schedule.wsd(s, 1.0, 10, 4, decay_fraction=1.0) for s in range(4, 11)]
    assert whole == [schedule.linear(s, 1.0, 10, 4) for s in range(4, 11)]
    assert [schedule.wsd(s, 1.0, 10, decay_fraction=0.0) for s in (9, 10)] == [1.0, 0.0]


def test_rates_may_rise_to_the_end() -> None:
    assert schedule.linear(5, 1.0, 10, minimum=3.0) == 2.0


def test_a_schedule_drives_an_optimizer(device: str) -> None:
    tensors = toy.parameters(device=device, shapes={"w": (1,)})
    before = float(tensors["w"].item())
    optimizer = SGD(tensors.items())
    optimizer.flat.grad.fill(1)
    for step in range(12):
        optimizer.lr = schedule.constant(step, 0.5, warmup=4)
        optimizer.step()
    moved = before - float(tensors["w"].item())
    assert moved == pytest.approx(0.5 * (0.25 + 0.5 + 0.75 + 9), rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule.constant(-1, 1.0), "constant: step is -1"),
        (lambda: schedule.linear(0, 1.0, 10, warmup=-1), "linear: warmup is -1"),
        (lambda: schedule.cosine(0, 1.0, 10, warmup=10), "cosine: steps is 10, expected more"),
        (lambda: schedule.inverse_square_root(0, 1.0, 0), "warmup is 0, expected at least 1"),
        (lambda: schedule.constant(TEXT, 1.0), "constant: step is 'x', expected a number"),
        (lambda: schedule.constant(0, TEXT), "constant: lr is 'x', expected a number"),
        (lambda: schedule.constant(0, 1.0, NONE), "warmup is None, expected a number"),
        (lambda: schedule.cosine(0, 1.0, NONE), "cosine: steps is None, expected a number"),
        (lambda: schedule.linear(0, 1.0, 9, 0, math.nan), "linear: minimum is nan"),
        (lambda: schedule.linear(0, 1.0, 8, warmup=8), "linear: steps is 8, expected more than w"),
        (lambda: schedule.cosine(0, -1.0, 10), "cosine: lr is -1.0"),
        (lambda: schedule.wsd(0, 1.0, 10, decay_fraction=1.5), "wsd: decay_fraction is 1.5, expe"),
        (lambda: schedule.wsd(0, 1.0, 10, decay_fraction=-0.5), "wsd: decay_fraction is -0.5"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_a_scheduler_counts_steps_and_resumes() -> None:
    optimizer = SGD(toy.parameters().items(), lr=2.0)
    scheduler = Scheduler(optimizer, schedule.cosine, steps=48, warmup=8, minimum=0.5)
    for step in range(20):
        assert optimizer.lr == ALL["cosine"](step)
        scheduler.step()
    state = scheduler.state_dict()
    other = SGD(toy.parameters().items(), lr=1.0)
    resumed = Scheduler(other, schedule.cosine, lr=2.0, steps=48, warmup=8, minimum=0.5)
    resumed.load_state_dict(state)
    assert other.lr == optimizer.lr == ALL["cosine"](20)
    assert state == {"step": 20}
    assert resumed.last_step == 20
    resumed.load_state_dict({"step": 0})
    assert other.lr == ALL["cosine"](0)
    assert (
        repr(resumed) == "Scheduler(cosine, last_step=0, lr=2.0, steps=48, warmup=8, minimum=0.5)"
    )
    for wrong in ({}, {"step": -1}, {"step": 1, "lr": 2}, 3):
        with pytest.raises(CheckpointError, match="expected a step from 0"):
            resumed.load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="steps is 4, expected more than warmup, 8"):
        Scheduler(other, schedule.cosine, steps=4, warmup=8)


def test_schedulers_with_the_names_of_pytorch() -> None:
    def rates(make: Callable[[SGD], Scheduler]) -> list[float]:
        optimizer = SGD(toy.parameters().items(), lr=2.0)
        scheduler, found = make(optimizer), []
        for _ in range(5):
            found.append(optimizer.lr)
            scheduler.step()
        return found

    assert rates(lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5)) == [2, 2, 1, 1, 0.5]
    assert rates(lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / 2**step)) == [
        2, 1, 0.5, 0.25, 0.125,
    ]  # fmt: skip
    assert rates(lambda o: lr_scheduler.StepLR(o, 1)) == pytest.approx([2, 0.2, 0.02, 2e-3, 2e-4])
    optimizer = SGD(toy.parameters().items(), lr=2.0)
    assert repr(lr_scheduler.StepLR(optimizer, 3)) == (
        "Scheduler(stepwise, last_step=0, lr=2.0, step_size=3, gamma=0.1)"
    )
    with pytest.raises(ArgumentError, match="StepLR: gamma is -1, expected"):
        rates(lambda o: lr_scheduler.StepLR(o, 2, -1))
    with pytest.raises(ArgumentError, match="Scheduler: f is a int, expected a function"):
        Scheduler(optimizer, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="StepLR: step_size is 0, expected 1 or more"):
        rates(lambda o: lr_scheduler.StepLR(o, 0))
    with pytest.raises(ArgumentError, match="LambdaLR: f is a float, expected a function"):
        rates(lambda o: lr_scheduler.LambdaLR(o, 0.5))  # type: ignore[arg-type]
