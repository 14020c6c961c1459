from __future__ import annotations

import textwrap
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorgrad.errors import ArgumentError
from tensorgrad.parallel.schedule import (
    SCHEDULES,
    Action,
    bubble_fraction,
    check_schedule,
    draw,
    gpipe,
    interleaved,
    max_in_flight,
    one_f_one_b,
    sequential,
    timeline,
    with_transfers,
)
from tests.source_tree import ROOT

Plans = list[list[Action]]
Sizes = tuple[str, int, int, int]
PARTNERS = {"send_output": ("receive_input", 1), "send_gradient": ("receive_gradient", -1)}


@st.composite
def sizes(draw_from: st.DrawFn) -> Sizes:
    name = draw_from(st.sampled_from(sorted(SCHEDULES)))
    stages = draw_from(st.integers(1, 6))
    if name != "interleaved":
        return name, stages, draw_from(st.integers(1, 9)), 1
    return name, stages, stages * draw_from(st.integers(1, 3)), draw_from(st.integers(1, 4))


def plans_of(name: str, stages: int, micro: int, chunks: int = 1) -> Plans:
    return [SCHEDULES[name](stages, micro, stage, chunks) for stage in range(stages)]


def run_blocking(plans: Plans) -> None:
    """Execute lists where each send blocks until it is received: the worst network.

    Raises AssertionError where all wait, or where a computation lacks what it needs.
    """
    stages = len(plans)
    final = max(action.part for plan in plans for action in plan)
    has: list[set[tuple[str, int, int]]] = [set() for _ in plans]  # computed or received
    places = [0] * stages

    def head(stage: int) -> Action | None:
        return plans[stage][places[stage]] if places[stage] < len(plans[stage]) else None

    while any(head(stage) for stage in range(stages)):
        before = list(places)
        for stage in range(stages):
            while (action := head(stage)) and action.kind in ("forward", "backward"):
                kind, micro, part = action
                if kind == "forward":
                    assert part == 0 or Action("forward", micro, part - 1) in has[stage]
                else:
                    assert action._replace(kind="forward") in has[stage]
                    assert part == final or Action("backward", micro, part + 1) in has[stage]
                has[stage].add(action)
                places[stage] += 1
            if action and action.kind in PARTNERS:
                wanted, step = PARTNERS[action.kind]
                peer = (action.part + step) % stages
                if head(peer) == (wanted, action.micro, action.part + step):
                    sent = ("forward" if step == 1 else "backward", action.micro, action.part)
                    assert sent in has[stage]
                    has[peer].add(sent)
                    places[stage] += 1
                    places[peer] += 1
        assert places != before, [head(stage) for stage in range(stages)]


@pytest.mark.parametrize(
    ("schedule", "chunks", "message"),
    [
        ("x", 1, "op: schedule is 'x', expected one of model-parallel, gpipe, 1f1b, interleaved"),
        ("interleaved", 0, "op: chunks is 0, expected 1 or more"),
        ("1f1b", 2, "op: chunks is 2 with schedule '1f1b', expected 1; more are for 'interleaved'"),
    ],
)
def test_schedules_that_are_not_there(schedule: str, chunks: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        check_schedule("op", schedule, chunks)
    for name in SCHEDULES:
        check_schedule("op", name, 1)
    check_schedule("op", "interleaved", 2)


def test_fractions_and_flights_of_one_part_are_the_default() -> None:
    assert [bubble_fraction(name, 4, 8) for name in SCHEDULES] == [3 / 4, 3 / 11, 3 / 11, 3 / 11]
    assert bubble_fraction("interleaved", 4, 8, 2) == 3 / 19
    assert [max_in_flight(name, 4, 8, 1) for name in SCHEDULES] == [1, 8, 3, 3]
    assert max_in_flight("interleaved", 4, 8, 1, 2) == 2 * 2 + 4 + 1


@settings(max_examples=150, deadline=None)
@given(sizes())
def test_every_pass_is_done_once_in_order(case: Sizes) -> None:
    _, stages, micro, chunks = case
    for stage, plan in enumerate(plans_of(*case)):
        parts = range(stage, stages * chunks, stages)
        wanted = {
            (kind, number, part)
            for kind in ("forward", "backward")
            for number in range(micro)
            for part in parts
        }
        assert Counter(plan) == Counter(wanted)
        for part in parts:  # gradients are added in the order of micro-batches
            back = [a.micro for a in plan if a.kind == "backward" and a.part == part]
            assert back == list(range(micro))


@settings(max_examples=150, deadline=None)
@given(sizes(), st.integers(1, 5), st.integers(1, 5))
def test_bubble_fraction_and_micro_batches_in_flight_match_a_simulation(
    case: Sizes, forward: int, backward: int
) -> None:
    name, stages, micro, chunks = case
    plans = plans_of(*case)
    spans = timeline(plans, forward, backward)
    work = micro * chunks * (forward + backward)
    end = max(span.end for span in spans.values())
    assert 1 - work / end == pytest.approx(bubble_fraction(name, stages, micro, chunks))
    for stage, plan in enumerate(plans):
        held = most = 0
        for action in plan:
            held += 1 if action.kind == "forward" else -1
            most = max(most, held)
        assert most == max_in_flight(name, stages, micro, stage, chunks)


@settings(max_examples=150, deadline=None)
@given(sizes())
def test_nothing_waits_in_a_circle_where_sends_block(case: Sizes) -> None:
    plans = plans_of(*case)
    full = [with_transfers(plans, stage) for stage in range(len(plans))]
    run_blocking(full)
    for plan, whole in zip(plans, full, strict=True):
        assert [a for a in whole if a.kind in ("forward", "backward")] == plan
        for place, action in enumerate(whole):
            if action.kind.startswith("send"):  # at once, but for what was sent to it before
                done = "forward" if action.kind == "send_output" else "backward"
                passes = [a for a in whole[:place] if a.kind in ("forward", "backward")]
                assert passes[-1] == (done, action.micro, action.part)


def test_receives_stand_before_the_computation_that_needs_them() -> None:
    plans = plans_of("1f1b", 2, 4)
    found = [(a.kind, a.micro) for a in with_transfers(plans, 1)][:6]
    assert found == [
        ("receive_input", 0),
        ("forward", 0),
        ("backward", 0),
        ("receive_input", 1),
        ("send_gradient", 0),
        ("forward", 1),
    ]


def test_one_stage_sends_nothing() -> None:
    for name in SCHEDULES:
        plans = plans_of(name, 1, 3)
        assert with_transfers(plans, 0) == plans[0]


def test_messages_without_a_common_order_would_wait_in_a_circle() -> None:
    plans = [with_transfers(plans_of("1f1b", 2, 4), stage) for stage in range(2)]
    run_blocking(plans)
    place = next(i for i, action in enumerate(plans[1]) if action == ("receive_input", 1, 1))
    plans[1].insert(place + 1, plans[1].pop(place))  # behind the send that follows
    with pytest.raises(AssertionError, match="send_output"):
        run_blocking(plans)


def test_a_schedule_that_deadlocks_is_an_error() -> None:
    plans = plans_of("model-parallel", 2, 2)
    plans[1] = plans[1][2:] + plans[1][:2]  # the second micro-batch first
    message = "stage 0 deadlocks before backward of micro-batch 0 through part 0"
    with pytest.raises(ArgumentError, match=message):
        timeline(plans)


def test_sizes_out_of_range_are_errors() -> None:
    for name, schedule in SCHEDULES.items():
        op = schedule.__name__
        with pytest.raises(ArgumentError, match=f"{op}: stages is 0, expected 1 or more"):
            schedule(0, 1, 0, 1)
        with pytest.raises(ArgumentError, match=f"{op}: micro is 0, expected 1 or more"):
            schedule(2, 0, 0, 1)
        with pytest.raises(ArgumentError, match=f"{op}: stage is 2, expected 0 to 1"):
            schedule(2, 2, 2, 1)
        if name != "interleaved":
            with pytest.raises(ArgumentError, match=f"{op}: chunks is 2, expected 1"):
                schedule(2, 2, 0, 2)
    with pytest.raises(ArgumentError, match="micro is 6, expected a multiple of the 4 stages"):
        interleaved(4, 6, 0, 2)
    with pytest.raises(ArgumentError, match="chunks is 0, expected 1 or more"):
        interleaved(4, 8, 0, 0)


def test_schedules_have_the_shapes_of_their_papers() -> None:
    assert draw([sequential(2, 2, stage) for stage in range(2)]) == (
        "stage 0  0...aa1...bb\n"
        "stage 1  .0aa...1bb.."
    )  # fmt: skip
    assert draw([gpipe(2, 3, stage) for stage in range(2)]) == (
        "stage 0  012...aabbcc\n"
        "stage 1  .012aabbcc.."
    )  # fmt: skip
    assert draw([one_f_one_b(2, 3, stage) for stage in range(2)]) == (
        "stage 0  01..aa2bb.cc\n"
        "stage 1  .0aa1bb2cc.."
    )  # fmt: skip


@pytest.mark.parametrize(
    "case", [("model-parallel", 4, 2, 1), ("gpipe", 4, 6, 1), ("1f1b", 4, 6, 1),
             ("interleaved", 2, 4, 2)],
)  # fmt: skip
def test_the_docs_show_the_output_of_draw(case: Sizes) -> None:
    text = (ROOT / "docs" / "chapters" / "parallel.md").read_text()
    assert textwrap.indent(draw(plans_of(*case)), "    ") + "\n\n" in text
