"""Measure which kernel is the fastest here: `python -m tensorgrad.kernels.tune [--write]`.

Runs every case of matmul/tune.py on the current GPU and prints the times. With --write the winners
go to tuned.json, where they replace those of the same architecture; without, the command says what
would change. Nothing is ever measured while a program trains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from tensorgrad.core import backend
from tensorgrad.core.errors import KernelError
from tensorgrad.io.command import command
from tensorgrad.kernels.matmul.tune import cases
from tensorgrad.kernels.tuned import PATH, Rows, TuningCase, architecture, read, write

_CLEARLY = 0.97  # a fraction of the default's time that is faster than noise
_TOGETHER = 5  # runs that are timed as one, from a CUDA graph
_LEAST, _MOST, _ENOUGH = 3, 20, 5.0  # such times; milliseconds


class Answer(NamedTuple):
    """The time of each candidate of a case in milliseconds, and the one to use."""

    choice: str
    name: str
    default: str
    times: dict[str, float]
    best: str


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Tune as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorgrad.kernels.tune", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("only", nargs="*", help="prefixes of the cases to measure (default: all)")
    parser.add_argument("--write", action="store_true", help="keep the result in tuned.json")
    parser.add_argument("--file", type=Path, default=PATH, help="instead of tuned.json")
    options = parser.parse_args(arguments)
    if not backend.gpu_count():
        raise KernelError("tune: no GPU was found, expected one to measure on")
    rows = read(options.file) if options.file.exists() else {}
    answers = list(answer_all(_cases(options.only), measure))
    new = merge(rows, architecture(), answers)
    print(table(answers))
    print("\n".join(changes(rows, new)) or "nothing changes")
    if options.write:
        write(options.file, new)
        print(f"wrote {options.file}")


def answer_all(
    cases: Iterator[TuningCase], timer: Callable[[Callable[[], object]], float]
) -> Iterator[Answer]:
    """Time every candidate of every case, with a line of progress."""
    progress = tqdm(cases, unit=" cases", disable=None)
    for case in progress:
        progress.set_postfix_str(case.name)
        times = {name: timer(run) for name, run in case.candidates.items()}
        best = min(times, key=lambda name: times[name])
        if times[best] > _CLEARLY * times[case.default]:
            best = case.default
        yield Answer(case.choice, case.name, case.default, times, best)


def measure(run: Callable[[], object]) -> float:
    """Return the median time on the GPU in milliseconds, without the overhead of launches."""
    cuda = backend.cupy.cuda
    times: list[float] = []
    cuda.Device().synchronize()  # operands are there
    with _stream() as stream:
        run()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(_TOGETHER):
            run()
        graph = stream.end_capture()
        graph.launch(stream)
        while len(times) < _LEAST or (len(times) < _MOST and sum(times) * _TOGETHER < _ENOUGH):
            start, end = cuda.Event(), cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(float(cuda.get_elapsed_time(start, end)) / _TOGETHER)
    return sorted(times)[len(times) // 2]


@cache
def _stream() -> Any:
    """Return one stream for all measurements: CuPy keeps the memory of each apart."""
    return backend.cupy.cuda.Stream(non_blocking=True)


def merge(rows: Rows, gpu: str, answers: Sequence[Answer]) -> Rows:
    """Return the rows with these answers in place; a default needs no row."""
    flat = _flat(rows)
    for answer in answers:
        flat.pop((gpu, answer.choice, answer.name), None)
        if answer.best != answer.default:
            flat[gpu, answer.choice, answer.name] = answer.best
    new: Rows = {}
    for (where, choice, case), name in flat.items():
        new.setdefault(where, {}).setdefault(choice, {})[case] = name
    return new


def changes(old: Rows, new: Rows) -> list[str]:
    """Return a line for each row that differs."""
    before, after = _flat(old), _flat(new)
    return [
        f"{' '.join(row)}: {before.get(row, 'default')} -> {after.get(row, 'default')}"
        for row in sorted({*before, *after})
        if before.get(row) != after.get(row)
    ]


def table(answers: Sequence[Answer]) -> str:
    """Return the times, a line for each case, the chosen one marked."""
    lines = []
    for answer in answers:
        times = "  ".join(
            f"{name} {time * 1000:.1f} us{'*' if name == answer.best else ' '}"
            for name, time in answer.times.items()
        )
        lines.append(f"{answer.choice} {answer.name:24} {times}")
    return "\n".join(lines)


def _flat(rows: Rows) -> dict[tuple[str, str, str], str]:
    return {
        (gpu, choice, case): name
        for gpu, choices in rows.items()
        for choice, row in choices.items()
        for case, name in row.items()
    }


def _cases(only: Sequence[str]) -> Iterator[TuningCase]:
    """Yield the cases whose name begins as one of `only` says."""
    return (case for case in cases() if not only or case.name.startswith(tuple(only)))


if __name__ == "__main__":
    sys.exit(main())
