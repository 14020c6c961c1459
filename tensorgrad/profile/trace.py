"""Traces in the JSON of Chrome's trace viewer, which Perfetto (ui.perfetto.dev) reads.

A process is a rank. It has a track for the phases, layers and ops of each thread, one for each CUDA
stream, and one for collectives; an arrow leads from an op to its kernels. Tests:
tests/profile/test_trace.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.io.files import replacing, to_json
from tensorgrad.io.readers import read_json
from tensorgrad.profile.recording import Interval, Kernel, Range, Recording

_TRACKS = {"phase": 0, "layer": 1, "op": 2, "backward": 2}
_NAMES = ("phases", "layers", "ops")
_STREAMS = 1000  # the track of the first stream
_TRANSFERS = 900
_LARGEST = 1 << 30  # bytes of a trace to merge

Event = dict[str, Any]


def write_trace(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Write the trace of one rank.

    Raises:
        OSError: the file cannot be written.
    """
    facts = {name: getattr(recording, name) for name in ("rank", "device", "source", "steps")}
    facts["epoch_ns"] = recording.epoch
    _write(path, trace_events(recording), facts)


def trace_events(recording: Recording) -> Iterator[Event]:
    """Yield the events of a trace; times in us since the start of the recording."""
    origin, rank = recording.window[0], recording.rank
    yield _metadata(rank, 0, "process_name", name=f"rank {rank} ({recording.device})")
    for thread in sorted({span.thread for span in recording.ranges}):
        for place, name in enumerate(_NAMES):
            suffix = f" of thread {thread}" if thread else ""
            yield from _track(rank, 10 * thread + place, name + suffix)
    streams = sorted({(kernel.device, kernel.stream) for kernel in recording.kernels})
    tracks = {stream: _STREAMS + place for place, stream in enumerate(streams)}
    for (_, stream), track in tracks.items():
        yield from _track(rank, track, f"stream {stream}")
    if recording.transfers:
        yield from _track(rank, _TRANSFERS, "collectives")
    for span in recording.ranges:
        yield _range_event(span, rank, origin)
    for number, kernel in enumerate(recording.kernels):
        track = tracks[kernel.device, kernel.stream]
        yield from _kernel_events(number, kernel, recording, track)
    for number, transfer in enumerate(recording.transfers):
        # They overlap each other, which only asynchronous events may on one track.
        common = {"name": transfer.call, "cat": "transfer", "pid": rank, "tid": _TRANSFERS}
        arguments = {"bytes": transfer.nbytes}
        begin, end = ((time - origin) / 1e3 for time in (transfer.start, transfer.end))
        yield {**common, "ph": "b", "id": number, "ts": begin, "args": arguments}
        yield {**common, "ph": "e", "id": number, "ts": end}


def merge_traces(paths: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> None:
    """Write the traces of several ranks as one, aligned by the clocks of their hosts.

    Raises:
        ArgumentError: no traces, or two of one rank.
        DataError: one of them is not a trace of this library.
        OSError: one of them cannot be read, or the result not be written.
    """
    traces = [_read(path) for path in paths]
    ranks = [facts["rank"] for _, facts in traces]
    if not traces or len(set(ranks)) != len(ranks):
        raise ArgumentError(f"merge_traces: paths are of ranks {ranks}, expected different ones")
    first = min(facts["epoch_ns"] for _, facts in traces)

    def events() -> Iterator[Event]:
        for found, facts in traces:
            shift = (facts["epoch_ns"] - first) / 1e3
            for event in found:
                if "ts" in event:
                    event["ts"] += shift
                if "id" in event:
                    event["id"] = f"{facts['rank']}.{event['id']}"
                yield event

    _write(path, events(), {"ranks": sorted(ranks), "epoch_ns": first})


def _read(path: str | os.PathLike[str]) -> tuple[list[Event], dict[str, Any]]:
    """Return the events of a trace that `write_trace` wrote, and the facts about it."""
    trace = read_json(path, _LARGEST, links=True)
    events, facts = trace.get("traceEvents"), trace.get("otherData")
    known = isinstance(facts, dict) and all(
        type(facts.get(name)) is int for name in ("rank", "epoch_ns")
    )
    fine = isinstance(events, list) and all(
        isinstance(event, dict) and isinstance(event.get("ts", 0.0), int | float)
        for event in events
    )
    if not (known and fine):
        raise DataError(
            f"merge_traces: {os.fspath(path)} is not a trace of one rank, expected a file that "
            "write_trace wrote"
        )
    assert isinstance(events, list)
    assert isinstance(facts, dict)
    return events, facts


def _write(path: str | os.PathLike[str], events: Iterable[Event], facts: dict[str, Any]) -> None:
    with replacing(Path(path)) as file:
        file.write(b'{"displayTimeUnit": "ms", "otherData": ' + to_json(facts).encode())
        file.write(b', "traceEvents": [\n')
        separator = b""
        for event in events:
            file.write(separator + to_json(event).encode())
            separator = b",\n"
        file.write(b"\n]}\n")


def _metadata(rank: int, track: int, kind: str, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": arguments}


def _track(rank: int, track: int, name: str) -> Iterator[Event]:
    yield _metadata(rank, track, "thread_name", name=name)
    yield _metadata(rank, track, "thread_sort_index", sort_index=track)


def _span_event(
    name: str, kind: str, place: tuple[int, int], interval: Interval, arguments: dict[str, Any]
) -> Event:
    """Return a bar from a start to an end, in ns since the start of the recording.

    Args:
        name, kind: of the bar.
        place: rank and track.
        interval: when it is.
        arguments: what the viewer shows about it.
    """
    rank, track = place
    start, end = interval
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3, "args": arguments}
    return {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": track, **times}


def _range_event(each: Range, rank: int, origin: int) -> Event:
    arguments: dict[str, Any] = {"number": each.number}
    if each.is_op:
        arguments |= {"shapes": [list(shape) for shape in each.shapes], "dtype": each.dtype}
        arguments |= {"layer": each.layer, "phase": each.phase, "bytes": each.nbytes}
        if each.flops:
            arguments["flops"] = each.flops
    name = f"{each.name} backward" if each.kind == "backward" else each.name
    place = rank, 10 * each.thread + _TRACKS[each.kind]
    return _span_event(name, each.kind, place, (each.start - origin, each.end - origin), arguments)


def _kernel_events(
    number: int, kernel: Kernel, recording: Recording, track: int
) -> Iterator[Event]:
    around = recording.range_of(kernel)
    rank, origin = recording.rank, recording.window[0]
    interval = kernel.start - origin, kernel.end - origin
    arguments: dict[str, Any] = {"stream": kernel.stream}
    if around is not None:
        arguments |= {"op": around.name, "layer": around.layer, "phase": around.phase}
        arrow = {"name": "launch", "cat": "launch", "id": number, "pid": rank}
        launched = (around.start - origin) / 1e3
        of_op = 10 * around.thread + _TRACKS[around.kind]
        yield {**arrow, "ph": "s", "tid": of_op, "ts": launched}
        yield {**arrow, "ph": "f", "bp": "e", "tid": track, "ts": interval[0] / 1e3}
    yield _span_event(kernel.name, "kernel", (rank, track), interval, arguments)
