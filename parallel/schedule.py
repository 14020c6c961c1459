"""What each stage of a pipeline does, in which order: pure functions of sizes.

The model is cut into parts, one after another; part i belongs to stage i % stages. A batch is cut
into micro-batches. Each micro-batch goes forward through all parts and back, and a schedule says
in which order a stage does its share. They differ in how long stages stand idle and in how many
micro-batches a stage must remember at a time (p stages, m micro-batches, v parts a stage):

    schedule      idle share                remembered by stage s
    sequential    (p-1) / p                 1
    gpipe         (p-1) / (m+p-1)           m
    one_f_one_b   (p-1) / (m+p-1)           min(m, p-s)
    interleaved   (p-1) / (v m+p-1)         min(v m, 2 (p-s-1) + (v-1) p + 1), each 1/v as large

In all of them the backward passes of a part come in the order of the micro-batches, so gradients
are added in the same order as without a pipeline. Tests: tests/parallel/test_schedule.py.

Source: Huang et al. 2018, arXiv:1811.06965, section 2.3 (GPipe); Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2 (1F1B, interleaved).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from tensorgrad.errors import ArgumentError

Kind = Literal[
    "forward", "backward", "send_output", "receive_input", "send_gradient", "receive_gradient"
]


class Action(NamedTuple):
    """One thing that a stage does.

    Attributes:
        kind: "forward" or "backward" through a part; or "send_output" (to the next part),
            "receive_input" (from the part before), "send_gradient" (of the part's input, to the
            part before), "receive_gradient" (of the part's output, from the next part).
        micro: which micro-batch, from 0.
        part: which part of the model, from 0.
    """

    kind: Kind
    micro: int
    part: int


Schedule = Callable[[int, int, int, int], list[Action]]


def sequential(stages: int, micro: int, stage: int, chunks: int = 1) -> list[Action]:
    """Return plain model parallelism: a micro-batch begins when the one before is all done.

    With one micro-batch, the usual way to spread a model over GPUs that work in turns.

    Args:
        stages: p, how many there are.
        micro: m, micro-batches of a step.
        stage: which stage, 0 to p - 1.
        chunks: v, parts a stage: 1.
    Returns:
        "forward" and "backward" actions in order.
    Raises:
        ArgumentError: a size is out of its range.
    """
    _check("sequential", stages, micro, stage, chunks)
    return [
        action
        for number in range(micro)
        for action in (Action("forward", number, stage), Action("backward", number, stage))
    ]


def gpipe(stages: int, micro: int, stage: int, chunks: int = 1) -> list[Action]:
    """Return GPipe: all micro-batches go forward, then all go back; arguments as `sequential`."""
    _check("gpipe", stages, micro, stage, chunks)
    units = [(number, stage) for number in range(micro)]
    return _in_turns(micro, units, units)


def one_f_one_b(stages: int, micro: int, stage: int, chunks: int = 1) -> list[Action]:
    """Return 1F1B: each forward after the first few waits for a backward, which frees its memory.

    Arguments as `sequential`.
    """
    _check("one_f_one_b", stages, micro, stage, chunks)
    units = [(number, stage) for number in range(micro)]
    return _in_turns(stages - 1 - stage, units, units)


def interleaved(stages: int, micro: int, stage: int, chunks: int) -> list[Action]:
    """Return interleaved 1F1B: a stage has several parts, which makes idle times shorter.

    Micro-batches go in groups of p: first through the stage's first part, then the second, and
    so on. There is v times as much to send. Arguments as `sequential`, but:

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
    return _in_turns(2 * (stages - 1 - stage) + (chunks - 1) * stages, forward, backward)


SCHEDULES: dict[str, Schedule] = {
    "model-parallel": sequential,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}


def check_schedule(op: str, schedule: str, chunks: int) -> None:
    """Raise ArgumentError unless there is such a schedule and it takes so many parts a stage."""
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
    """Return which share of a step a stage stands idle, when all parts take equally long.

    (p-1) / (v m+p-1); for plain model parallelism (p-1) / p

    Args:
        name: one of SCHEDULES.
        stages, micro, chunks: p, m, v.
    """
    if name == "model-parallel":
        return (stages - 1) / stages
    return (stages - 1) / (chunks * micro + stages - 1)


def max_in_flight(name: str, stages: int, micro: int, stage: int, chunks: int = 1) -> int:
    """Return how many forward passes of parts a stage remembers at most, to go back through.

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


class Span(NamedTuple):
    """When an action begins and ends."""

    begin: float
    end: float


def timeline(
    plans: Sequence[Sequence[Action]], forward: float = 1.0, backward: float = 2.0
) -> dict[Action, Span]:
    """Return when each action runs if each stage starts its next one as soon as it can.

    Args:
        plans: of each stage, its "forward" and "backward" actions in order.
        forward, backward: how long they take; sending takes no time.
    Raises:
        ArgumentError: a stage waits for what never comes.
    """
    lengths = {"forward": forward, "backward": backward}
    last = max(action.part for plan in plans for action in plan)
    spans: dict[Action, Span] = {}
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
                spans[action] = Span(begin, clocks[stage])
                places[stage] += 1
                moved = True
    for stage, plan in enumerate(plans):
        if places[stage] < len(plan):
            kind, micro, part = plan[places[stage]]
            raise ArgumentError(
                f"timeline: stage {stage} waits for ever to go {kind} through part {part} with "
                f"micro-batch {micro}, expected a schedule in which what that needs is done before"
            )
    return spans


def with_transfers(plans: Sequence[Sequence[Action]], stage: int) -> list[Action]:
    """Return what a stage does, sends and receives included.

    All messages have one order, that of the moments at which `timeline` sends them, and each
    stage sends and receives its own in that order. So nothing can wait in a circle, even where a
    send lasts until the other side receives, and where a stage sends and receives on one stream
    that keeps the order. Sends follow what computes them at once; a receive stands, where that
    order allows, before the computation that needs it: while it waits it keeps a GPU busy.

    Args:
        plans: of each stage, its "forward" and "backward" actions in order; part i belongs to
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
            forward = need.kind == "forward"
            if need in places and action not in places:
                kind: Kind = "send_output" if forward else "send_gradient"
                what = Action(kind, need.micro, need.part)
                messages.append(_PlacedTransfer(spans[need].end, need, what, places[need] + 1))
            elif action in places and need not in places:
                kind = "receive_input" if forward else "receive_gradient"
                what = Action(kind, action.micro, action.part)
                messages.append(_PlacedTransfer(spans[need].end, need, what, places[action]))
    return _woven(plan, sorted(messages, key=lambda message: message[:2]))


def draw(plans: Sequence[Sequence[Action]]) -> str:
    """Return a picture of the timeline, a line a stage, for up to 10 micro-batches.

    A forward pass takes one character, the number of its micro-batch; a backward pass two, the
    letter with that number (a for 0); idle time is dots.
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
    """What a stage sends or receives, and the first of its computations that may follow."""

    time: float
    sender: Action
    action: Action
    first: int


def _check(op: str, stages: int, micro: int, stage: int, chunks: int | None) -> None:
    for name, value in (("stages", stages), ("micro", micro)):
        if value < 1:
            raise ArgumentError(f"{op}: {name} is {value}, expected 1 or more")
    if not 0 <= stage < stages:
        raise ArgumentError(f"{op}: stage is {stage}, expected 0 to {stages - 1}")
    if chunks not in (1, None):
        raise ArgumentError(f"{op}: chunks is {chunks}, expected 1; more are for interleaved")


def _in_turns(
    ahead: int, forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]]
) -> list[Action]:
    """Go forward `ahead` times, then forward and back in turns, then back: (micro, part) each."""
    ahead = min(ahead, len(forwards))
    actions = [Action("forward", *unit) for unit in forwards[:ahead]]
    for number, unit in enumerate(backwards):
        if ahead + number < len(forwards):
            actions.append(Action("forward", *forwards[ahead + number]))
        actions.append(Action("backward", *unit))
    return actions


def _needs(action: Action, last: int) -> list[Action]:
    """Return the computations whose results an action uses; `last` is the last part."""
    kind, micro, part = action
    if kind == "forward":
        return [Action("forward", micro, part - 1)] if part else []
    needs = [Action("forward", micro, part)]
    return needs if part == last else [*needs, Action("backward", micro, part + 1)]


def _woven(plan: Sequence[Action], messages: Sequence[_PlacedTransfer]) -> list[Action]:
    """Put messages between computations: in their order, each as early as it may stand."""
    slots, sent = [], 0
    for message in messages:
        if message.action.kind.startswith("send"):
            sent = message.first
        slots.append(max(sent, message.first))
    for place in reversed(range(len(slots) - 1)):  # who comes before another cannot stand after it
        slots[place] = min(slots[place], slots[place + 1])
    found: list[Action] = []
    at = 0
    for number in range(len(plan) + 1):
        while at < len(slots) and slots[at] == number:
            found.append(messages[at].action)
            at += 1
        found += plan[number : number + 1]
    return found
