"""Command-line programs: standard streams, error messages and exit statuses."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import groupby
from typing import ParamSpec

from tensorgrad.core.errors import TensorgradError
from tensorgrad.startup.interrupt import INTERRUPTED

_FIXABLE = (TensorgradError, OSError, UnicodeError)  # by the user, who needs no traceback
_NO_THREADS = "can't start new thread", "ThreadPoolBuildError"  # Python, tokenizers
_BROKEN_PIPE = 141  # a shell's status for a program killed by SIGPIPE
_LINE = 4000  # characters of an error
# Characters that a terminal obeys, or that let it show text in another order, but \n and \t.
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_log = logging.getLogger(__name__)
_Arguments = ParamSpec("_Arguments")


def command(program: Callable[_Arguments, int | None]) -> Callable[_Arguments, int]:
    """Wrap a program to log errors that a user can fix as one line, and return an exit status.

    The status is 0, or what the program returns; 1 after such an error; 130 after Ctrl-C; 141 when
    the reader of its output has exited, as in `| head -1`.
    """

    @wraps(program)
    def run(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> int:
        open_standard_streams()
        messages = logging.StreamHandler()
        messages.setFormatter(_Plain())
        logging.basicConfig(level=logging.INFO, handlers=[messages])
        logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of its list of fonts
        try:
            try:
                status = program(*arguments, **options) or 0
            finally:
                sys.stdout.flush()  # a full disk or a closed pipe may show only now
        except BaseException as error:
            _end_at_once_on_ctrl_c(program)
            found = status_and_line(error)
            if found is None:
                raise
            status, line = found
            if line:
                _log.error("%s", _cut(line))
        finally:
            _end_at_once_on_ctrl_c(program)
            drop_unwritten_output()
        return status

    return run


class _Plain(logging.Formatter):
    """Messages without control characters: names and texts in them may be untrusted."""

    def format(self, record: logging.LogRecord) -> str:
        return without_controls(super().format(record))


def _cut(line: str) -> str:
    """Return the start and the end of a line that is too long to be read."""
    return line if len(line) <= _LINE else f"{line[: _LINE // 2]} [...] {line[-_LINE // 2 :]}"


def without_controls(text: str) -> str:
    """Return the text with escapes for control characters, which a terminal would obey."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def _end_at_once_on_ctrl_c(program: Callable[..., object]) -> None:
    """Let another Ctrl-C end the process at once, as only Python's own shutdown remains."""
    handled = callable(signal.getsignal(signal.SIGINT))  # not ignored
    if program.__module__ == "__main__" and handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def status_and_line(error: BaseException) -> tuple[int, str] | None:
    """Return the exit status and the message for an uncaught error.

    The message may be empty. None is for an error that a user cannot fix: it needs a traceback.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "; ".join(getattr(error, "__notes__", ()))
    if isinstance(error, BrokenPipeError):
        return _BROKEN_PIPE, ""
    if isinstance(error, MemoryError):
        advice = "; ".join(getattr(error, "__notes__", ())) or (
            "expected more memory, or a smaller model, --batch or --context (a larger "
            "--micro-batches keeps the effective batch)"
        )
        return 1, f"out of memory: {_allocation(error)}; {advice}"
    if isinstance(error, UnicodeEncodeError):
        return 1, f"{error}; expected an output in UTF-8, as with PYTHONIOENCODING=utf-8"
    if any(words in str(error) for words in _NO_THREADS):
        return 1, (
            f"cannot start another thread ({error!s:.60}); raise the limit of processes (ulimit "
            "-u) or of memory, or set OMP_NUM_THREADS=1 and TOKENIZERS_PARALLELISM=false"
        )
    if isinstance(error, _FIXABLE):
        return 1, str(error)
    line = _import_failure(error)
    return (1, line) if line else None


def _import_failure(error: BaseException) -> str:
    """Return the line about a package that fails as it is imported, by an environment variable.

    tqdm reads its variables then, for instance. Empty: the error is another.
    """
    for frame in traceback.extract_tb(error.__traceback__):
        _, found, inside = frame.filename.replace(os.sep, "/").rpartition("/site-packages/")
        package = inside.partition("/")[0].removesuffix(".py")
        names = [name for name in os.environ if name.startswith(f"{package.upper()}_")]
        if frame.name == "<module>" and found and names:
            return (
                f"{', '.join(names)}: got {', '.join(repr(os.environ[name]) for name in names)}, "
                f"expected values that {package} accepts ({type(error).__name__}: {error})"
            )
    return ""


def _allocation(error: MemoryError) -> str:
    """Return what could not be allocated, or the line of code if the error does not say."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"at {frames[-1].filename}:{frames[-1].lineno}" if frames else "none is left"
    return str(error).rstrip(".") or place


def open_standard_streams() -> None:
    """Open closed standard streams, as after `2>&-`, on the null device.

    Otherwise the next file or socket gets the descriptor of one of them, and libraries that write
    to descriptor 2 would write into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  the lowest free descriptor
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def drop_unwritten_output() -> None:
    """Flush the standard streams; drop what cannot be written, or Python's shutdown fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()


def aligned(text: str) -> str:
    """Return text whose Markdown tables have columns of equal width, for a terminal."""
    lines = text.split("\n")
    for is_table, rows in groupby(range(len(lines)), lambda n: lines[n].startswith("|")):
        numbers = list(rows)
        if is_table:
            table = [_cells(lines[number]) for number in numbers]
            for number, line in zip(numbers, _aligned(table), strict=True):
                lines[number] = line
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    """Return the cells of a row of a Markdown table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows of a Markdown table, whose second row says how columns are aligned."""
    rules = table[1]
    widths = [
        max(3, *(columns_of(row[place]) for row in table if row is not rules))
        for place in range(len(rules))
    ]
    for row in table:
        cells = []
        for cell, rule, width in zip(row, rules, widths, strict=True):
            space = width - columns_of(cell)
            if row is rules:
                left, right = rule.startswith(":"), rule.endswith(":")
                cells.append(":" * left + "-" * (width - left - right) + ":" * right)
            else:
                cells.append(" " * space + cell if rule.endswith(":") else cell + " " * space)
        yield f"| {' | '.join(cells)} |"


def columns_of(text: str) -> int:
    """Return the columns that a text takes on a terminal: wide characters take two, marks none."""
    return sum(
        0 if unicodedata.combining(letter) or unicodedata.category(letter) in ("Cf", "Me", "Mn")
        else 2 if unicodedata.east_asian_width(letter) in "WF"
        else 1
        for letter in text
    )  # fmt: skip


def printable(text: str) -> str:
    """Return the text with escapes for characters that standard output cannot encode.

    On a terminal those that it would obey have escapes too.
    """
    encoding = sys.stdout.encoding or "utf-8"
    return harmless(text).encode(encoding, "backslashreplace").decode(encoding)


def harmless(text: str) -> str:
    """Return a model's text, where it is printed on a terminal without control characters."""
    return without_controls(text) if sys.stdout.isatty() else text
