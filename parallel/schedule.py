"""Pipeline schedules: GPipe, 1F1B and interleaved 1F1B, as pure functions of sizes.

The model is divided into parts, one after another; part i belongs to stage i % stages. A batch is
divided into micro-batches. Each goes forward through all parts and then backward. A schedule is the
order in which a stage does its actions. Schedules differ in the bubble fraction, the fraction of
time in which stages are idle, and in the micro-batches in flight, whose activations a stage keeps
(p stages, m micro-batches, v parts on each stage):

    schedule      bubble fraction           in flight on stage s
    sequential    (p-1) / p                 1
    gpipe         (p-1) / (m+p-1)           m
    one_f_one_b   (p-1) / (m+p-1)           min(m, p-s)
    interleaved   (p-1) / (v m+p-1)         min(v m, 2 (p-s-1) + (v-1) p + 1), each 1/v as large

In all of them a part's backward passes are in the order of the micro-batches, so gradients are
added in the same order as without a pipeline. Tests: tests/parallel/test_schedule.py.

Source: Huang et al. 2018, arXiv:1811.06965, section 2.3 (GPipe); Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2 (1F1B, interleaved).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from tensorgrad.core.errors import ArgumentError

Kind = Literal[
    "forward", "backward", "send_output", "receive_input", "send_gradient", "receive_gradient"
]


class Action(NamedTuple):
    """An action of a stage.

    Attributes:
        kind: "forward" or "backward" through a part; or "send_output" (to the next part),
            "receive_input" (from the previous part), "send_gradient" (of the part's input, to the
            previous part), "receive_gradient" (of the part's output, from the next part).
        micro: which micro-batch, from 0.
        part: which part of the model, from 0.
    """

    kind: Kind
    micro: int
    part: int


Schedule = Callable[[int, int, int, int], list[Action]]

# How the result of a computation is received, and how it is sent.
_TRANSFERS: dict[Kind, tuple[Kind, Kind]] = {
    "forward": ("receive_input", "send_output"),
    "backward": ("receive_gradient", "send_gradient"),
}


def sequential(stages: int, micro: int, stage: int, chunks: int = 1) -> list[Action]:
    """Return plain model parallelism: a micro-batch starts when the previous one is complete.

    With one micro-batch this is the naive way to divide a model among GPUs.

    Args:
        stages: p, the number of stages.
        micro: m, micro-batches of a step.
        stage: which stage, 0 to p - 1.
        chunks: v, parts on each stage: 1.
    Returns:
        "forward" and "backward" actions in order.
    Raises:
        ArgumentError: a size is out of its range.
    """
    return _plan("sequential", 0, stages, micro, stage, chunks)


def gpipe(stages: int, micro: int, stage: int, chunks: int = 1) -> list[Action]:
    """Return GPipe: all forward passes, then all backward passes; arguments as `sequential`."""
    return _plan("gpipe", micro, stages, micro, stage, chunks)


def one_f_one_b(stages: int, micro: int, stage: int, chunks: int = 1) -> list[Action]:
    """Return 1F1B: after a warm-up each forward follows a backward, which frees its memory.

    Arguments as `sequential`.
    """
    return _plan("one_f_one_b", stages - 1 - stage, stages, micro, stage, chunks)


def interleaved(stages: int, micro: int, stage: int, chunks: int) -> list[Action]:
    """Return interleaved 1F1B: a stage has several parts, which makes the bubble smaller.

    Micro-batches go in groups of p: first through the stage's first part, then the second, and
    so on. Stages send v times as much. Arguments as `sequential`, but:

    Args:
        micro: a multiple of p.
        chunks: 1 or more; 1 is `one_f_one_b`.
    """
    _check("interleaved", stages, micro, stage, None)
    if chunks < 1:
        raise ArgumentError(f"interleaved: chunks is {chunks}, expected 1 or more")
    if chunks == 1:
        return one_f_one_b(stages, micro, stage)
    if micro % stages:
        raise ArgumentError(
            f"interleaved: micro is {micro}, expected a multiple of the {stages} stages"
        )
    order = [
        (first + number, chunk)
        for first in range(0, micro, stages)
        for chunk in range(chunks)
        for number in range(stages)
    ]
    forward = [(number, chunk * stages + stage) for number, chunk in order]
    backward = [(number, (chunks - 1 - chunk) * stages + stage) for number, chunk in order]
    return _alternate(2 * (stages - 1 - stage) + (chunks - 1) * stages, forward, backward)


SCHEDULES: dict[str, Schedule] = {
    "model-parallel": sequential,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}


def check_schedule(op: str, schedule: str, chunks: int) -> None:
    """Raise ArgumentError unless the schedule exists and allows this number of parts on a stage."""
    if schedule not in SCHEDULES:
        raise ArgumentError(
            f"{op}: schedule is {schedule!r}, expected one of {', '.join(SCHEDULES)}"
        )
    if chunks < 1:
        raise ArgumentError(f"{op}: chunks is {chunks}, expected 1 or more")
    if chunks > 1 and schedule != "interleaved":
        raise ArgumentError(
            f"{op}: chunks is {chunks} with schedule {schedule!r}, expected 1; more are for "
            "'interleaved'"
        )


def bubble_fraction(name: str, stages: int, micro: int, chunks: int = 1) -> float:
    """Return the bubble fraction of a schedule: the idle fraction of a stage's time in a step.

    (p-1) / (v m+p-1); for plain model parallelism (p-1) / p, when all parts take equally long.

    Args:
        name: one of SCHEDULES.
        stages, micro, chunks: p, m, v.
    """
    if name == "model-parallel":
        return (stages - 1) / stages
    return (stages - 1) / (chunks * micro + stages - 1)


def max_in_flight(name: str, stages: int, micro: int, stage: int, chunks: int = 1) -> int:
    """Return the largest number of forward passes in flight on a stage, waiting for backward.

    1; m; min(m, p-s); min(v m, 2 (p-s-1) + (v-1) p + 1): see the top of this file.

    Args:
        name: one of SCHEDULES.
        stages, micro, stage, chunks: p, m, s, v.
    """
    if name == "model-parallel":
        return 1
    if name == "gpipe":
        return micro
    if name == "1f1b" or chunks == 1:
        return min(micro, stages - stage)
    return min(chunks * micro, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1)


class ActionTimes(NamedTuple):
    """When an action begins and ends."""

    begin: float
    end: float


def timeline(
    plans: Sequence[Sequence[Action]], forward: float = 1.0, backward: float = 2.0
) -> dict[Action, ActionTimes]:
    """Return when each action runs if each stage starts its next one as soon as possible.

    Args:
        plans: for each stage its "forward" and "backward" actions in order.
        forward, backward: how long they take; sending takes no time.
    Raises:
        ArgumentError: the schedule deadlocks.
    """
    lengths = {"forward": forward, "backward": backward}
    last = max(action.part for plan in plans for action in plan)
    spans: dict[Action, ActionTimes] = {}
    places, clocks = [0] * len(plans), [0.0] * len(plans)
    moved = True
    while moved:
        moved = False
        for stage, plan in enumerate(plans):
            while places[stage] < len(plan):
                action = plan[places[stage]]
                needs = _needs(action, last)
                if not all(need in spans for need in needs):
                    break
                begin = max([clocks[stage], *(spans[need].end for need in needs)])
                clocks[stage] = begin + lengths[action.kind]
                spans[action] = ActionTimes(begin, clocks[stage])
                places[stage] += 1
                moved = True
    for stage, plan in enumerate(plans):
        if places[stage] < len(plan):
            kind, micro, part = plan[places[stage]]
            raise ArgumentError(
                f"timeline: stage {stage} deadlocks before {kind} of micro-batch {micro} through "
                f"part {part}, expected a schedule in which its inputs are computed before"
            )
    return spans


def with_transfers(plans: Sequence[Sequence[Action]], stage: int) -> list[Action]:
    """Return the actions of a stage, sends and receives included.

    All messages have one global order, by the time at which `timeline` sends them, and each stage
    sends and receives its own in that order. This cannot deadlock, even where a send blocks until
    it is received and a stage sends and receives on one stream. A send follows the computation of
    what it sends at once. A receive comes as late as that order allows, just before the computation
    that needs it, because a waiting receive occupies a GPU.

    Args:
        plans: for each stage its "forward" and "backward" actions in order; part i belongs to
            stage i % stages.
        stage: which stage.
    """
    plan = plans[stage]
    spans = timeline(plans)
    final = max(action.part for action in spans)
    places = {action: place for place, action in enumerate(plan)}
    messages = []
    for action in spans:
        for need in _needs(action, final):
            sends = need in places
            if sends != (action in places):
                here = need if sends else action
                transfer = Action(_TRANSFERS[need.kind][sends], here.micro, here.part)
                first = places[here] + sends
                messages.append(_PlacedTransfer(spans[need].end, need, transfer, first))
    return _merge_transfers(plan, sorted(messages, key=lambda message: message[:2]))


def draw(plans: Sequence[Sequence[Action]]) -> str:
    """Return a diagram of the timeline, one line for each stage, for up to 10 micro-batches.

    A forward pass is one character, the number of its micro-batch. A backward pass is two, the
    letter with that number (a for 0). Idle time is dots.
    """
    spans = timeline(plans)
    length = max(round(span.end) for span in spans.values())
    lines = []
    for stage, plan in enumerate(plans):
        cells = ["."] * length
        for action in plan:
            begin, end = map(round, spans[action])
            sign = str(action.micro) if action.kind == "forward" else "abcdefghij"[action.micro]
            cells[begin:end] = sign * (end - begin)
        lines.append(f"stage {stage}  {''.join(cells)}")
    return "\n".join(lines)


class _PlacedTransfer(NamedTuple):
    """A send or receive of a stage, and its first computation that may follow."""

    time: float
    sender: Action
    action: Action
    first: int


def _plan(op: str, ahead: int, stages: int, micro: int, stage: int, chunks: int) -> list[Action]:
    """Return the actions with one part on each stage, which goes `ahead` forward passes ahead."""
    _check(op, stages, micro, stage, chunks)
    units = [(number, stage) for number in range(micro)]
    return _alternate(ahead, units, units)


def _check(op: str, stages: int, micro: int, stage: int, chunks: int | None) -> None:
    for name, value in (("stages", stages), ("micro", micro)):
        if value < 1:
            raise ArgumentError(f"{op}: {name} is {value}, expected 1 or more")
    if not 0 <= stage < stages:
        raise ArgumentError(f"{op}: stage is {stage}, expected 0 to {stages - 1}")
    if chunks not in (1, None):
        raise ArgumentError(f"{op}: chunks is {chunks}, expected 1; more are for interleaved")


def _alternate(
    ahead: int, forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]]
) -> list[Action]:
    """Return `ahead` forward passes, then one forward and one backward each, then the rest."""
    ahead = min(ahead, len(forwards))
    actions = [Action("forward", *unit) for unit in forwards[:ahead]]
    for number, unit in enumerate(backwards):
        if ahead + number < len(forwards):
            actions.append(Action("forward", *forwards[ahead + number]))
        actions.append(Action("backward", *unit))
    return actions


def _needs(action: Action, last: int) -> list[Action]:
    """Return the computations whose results an action needs; `last` is the last part."""
    kind, micro, part = action
    if kind == "forward":
        return [Action("forward", micro, part - 1)] if part else []
    needs = [Action("forward", micro, part)]
    return needs if part == last else [*needs, Action("backward", micro, part + 1)]


def _merge_transfers(plan: Sequence[Action], messages: Sequence[_PlacedTransfer]) -> list[Action]:
    """Insert messages between computations: in their order, each as early as possible."""
    slots, sent = [], 0
    for message in messages:
        if message.action.kind.startswith("send"):
            sent = message.first
        slots.append(max(sent, message.first))
    for place in reversed(range(len(slots) - 1)):  # a message never follows a later one
        slots[place] = min(slots[place], slots[place + 1])
    found: list[Action] = []
    at = 0
    for number in range(len(plan) + 1):
        while at < len(slots) and slots[at] == number:
            found.append(messages[at].action)
            at += 1
        found += plan[number : number + 1]
    return found
