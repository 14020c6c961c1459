"""Tables of a recording: time by op, by kernel, by layer; and how it sums up to the step.

    step = busy + gaps              the times in which something runs, and the others
    sum of rows = busy + overlap    what runs at the same time on two streams counts twice

On a GPU rows are the times of kernels. On the CPU they are an op's own time in the thread that
trains, without ops inside it; the gaps are Python between ops. Tests: tests/profile/test_tables.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tensorgrad.io import tables
from tensorgrad.profile.ceilings import Ceilings
from tensorgrad.profile.recording import Interval, Kernel, Range, Recording, clipped, length, union

# The ops of attention that is computed op by op; the others are those of scale, mask and softmax.
_PARTS = {
    **dict.fromkeys(("matmul", "einsum"), "matrix products"),
    **dict.fromkeys(("reshape", "swapaxes", "transpose", "split", "getitem", ""), "layout"),
    **dict.fromkeys(("dropout", "rotary"), "dropout and rotary"),
}


_NOWHERE = Range(-1, -1, "phase", "", 0, 0)  # that launched no kernel
_RATES = ("gb_per_s", "tflop_per_s", "flops", "bytes", "dtype")  # columns of a CSV


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A piece of time that a table counts: a kernel, or an op's own time.

    Attributes:
        name: of the kernel, or of the op.
        op, phase, layer: it belongs to, or "".
        seconds: its length.
        flops, nbytes: of the op; divided among its kernels by their times.
        dtype: of the op's result.
        number: of the op's range, or -1.
    """

    name: str
    op: str
    phase: str
    layer: str
    seconds: float
    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = ""
    number: int = -1


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table; all figures are of one step.

    Attributes:
        name, phase: what the row is about.
        calls: the number of calls.
        seconds: in all calls.
        fraction: of the step.
        flops, nbytes: in all calls; 0 where unknown.
        dtype: of the results, where all have the same.
    """

    name: str
    phase: str
    calls: float
    seconds: float
    fraction: float
    flops: float
    nbytes: float
    dtype: str

    @property
    def mean(self) -> float:
        """Seconds of a call."""
        return self.seconds / self.calls if self.calls else 0.0

    @property
    def bytes_per_second(self) -> float:
        """The bytes that must move, by the time: at most the bandwidth, unless caches hold them."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float:
        """The FLOPs of matrix products, by the time."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Table:
    """Rows, the longest first, and how they sum up.

    Attributes:
        title: what the rows are, such as "op".
        rows: see TableRow.
        steps: the number of steps recorded.
        step: seconds of one, from the first to the last.
        busy: of these, the seconds in which something ran.
        overlap: seconds in which several streams ran, counted once more for each of them.
    """

    title: str
    rows: Sequence[TableRow]
    steps: int
    step: float
    busy: float
    overlap: float

    @property
    def gaps(self) -> float:
        """The seconds of a step in which nothing ran."""
        return self.step - self.busy

    def fraction(self, seconds: float) -> float:
        """Return seconds as a fraction of the step."""
        return seconds / self.step if self.step else 0.0


def op_table(recording: Recording) -> Table:
    """Return the time of each op, forward and backward, of all its kernels."""
    return _table(recording, "op", lambda span: (span.op or span.name, span.phase))


def kernel_table(recording: Recording) -> Table:
    """Return the time of each kernel; on the CPU, which has none, that of each op."""
    return _table(recording, "kernel", lambda span: (short_name(span.name), span.phase))


def layer_table(recording: Recording) -> Table:
    """Return the time of each layer: its own ops, with layers of the same kind in one row.

    "blocks.0.attention" and "blocks.1.attention" are "blocks.*.attention".
    """
    return _table(recording, "layer", lambda span: (layer_kind(span.layer), span.phase))


def layer_kind(layer: str) -> str:
    """Return the path of a layer with a star for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", layer) or "(no layer)"


def short_name(name: str) -> str:
    """Return the name of a kernel without its arguments, and without long template arguments."""
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"\((?:[^()]|\([^()]*\))*\)(?: \[.*\])?$", "", name)
    return name if len(name) <= 80 else name[:77] + "..."


def spans(recording: Recording) -> list[TimeSpan]:
    """Return what a table counts, inside the steps."""
    window = recording.steps_window
    if recording.kernels:
        return _kernel_spans(recording, window)
    own = own_times(recording.ranges)
    return [
        TimeSpan(
            *(span.name, span.name, _phase(span), span.layer, own[span.number] / 1e9),
            *(span.flops, span.nbytes, span.dtype, span.number),
        )
        for span in recording.ranges
        if span.is_work and span.thread == 0 and _inside(span, window)
    ]


def own_times(ranges: Iterable[Range]) -> dict[int, int]:
    """Return by number the ns of each range without work of the ranges inside it."""
    ranges = list(ranges)
    by_number = {span.number: span for span in ranges}
    own = {span.number: span.end - span.start for span in ranges}
    for span in ranges:
        if not span.is_work:
            continue
        above = by_number.get(span.parent)
        while above is not None and not above.is_work:
            above = by_number.get(above.parent)
        if above is not None:
            own[above.number] -= span.end - span.start
    return own


def busy_times(recording: Recording) -> list[Interval]:
    """Return the times inside the steps in which a kernel, or on the CPU an op, runs."""
    if recording.kernels:
        found: Iterable[Interval] = ((kernel.start, kernel.end) for kernel in recording.kernels)
    else:
        found = (
            (span.start, span.end) for span in recording.ranges if span.is_work and span.thread == 0
        )
    return union(clipped(found, recording.steps_window))


def attention_split(recording: Recording) -> dict[str, float]:
    """Return seconds of a step inside attention layers, by what takes them.

    The keys are "flash attention", or where it is computed op by op "matrix products", "softmax"
    (with scale and mask), "dropout and rotary" and "layout" (splits and transposes). The linear
    layers around it are layers of their own: they do not count.
    """
    found: dict[str, float] = defaultdict(float)
    for span in spans(recording):
        if "attention" not in span.layer.rpartition(".")[2].lower():
            continue
        kind = "flash attention" if span.op.startswith("attention") else _PARTS.get(span.op)
        found[kind or "softmax"] += span.seconds / recording.steps
    return dict(found)


def to_csv(table: Table) -> str:
    """Return a table as CSV with one line a row, times in ms, and two lines for the gaps."""
    rows = [
        (
            *(row.name, row.phase, f"{row.calls:g}", f"{1e3 * row.seconds:.4f}"),
            *(f"{row.fraction:.4f}", f"{1e6 * row.mean:.2f}"),
            *(f"{row.bytes_per_second / 1e9:.1f}", f"{row.flops_per_second / 1e12:.3f}"),
            *(f"{row.flops:.0f}", f"{row.nbytes:.0f}", row.dtype),
        )
        for row in table.rows
    ]
    rest = [
        (name, "", "", f"{1e3 * seconds:.4f}", f"{table.fraction(seconds):.4f}", *[""] * 6)
        for name, seconds in (("(overlap)", -table.overlap), ("(gaps)", table.gaps))
    ]
    head = *(table.title, "phase", "calls", "ms", "fraction", "mean_us"), *_RATES
    return tables.to_csv([head, *rows, *rest])


def to_markdown(table: Table, ceilings: Ceilings | None = None, most: int = 30) -> str:
    """Return a table as Markdown, times of one step.

    Args:
        table: the table.
        ceilings: of the device; then GB/s and TFLOP/s are followed by their fraction of them.
        most: rows to show; the others are one row.
    """
    peaks = {} if ceilings is None else ceilings.flops
    bandwidth = None if ceilings is None else ceilings.bandwidth
    rows = [
        (
            *(row.name, row.phase, f"{row.calls:g}", f"{1e3 * row.seconds:.3f}"),
            *(f"{100 * row.fraction:.1f}", f"{1e6 * row.mean:.1f}"),
            _rate(row.bytes_per_second, 1e9, bandwidth),
            _rate(row.flops_per_second, 1e12, peaks.get(row.dtype)),
        )
        for row in table.rows[:most]
    ]
    rest = table.rows[most:]
    extra = [(f"{len(rest)} more", sum(row.seconds for row in rest))] if rest else []
    if table.overlap > 1e-6 * table.step:
        extra.append(("overlap of streams", -table.overlap))
    for name, seconds in (*extra, ("gaps", table.gaps), ("step", table.step)):
        percent = f"{100 * table.fraction(seconds):.1f}"
        rows.append((f"*{name}*", "", "", f"{1e3 * seconds:.3f}", percent, "", "", ""))
    head = table.title, "phase", "calls", "ms", "% of step", "mean us", "GB/s", "TFLOP/s"
    return tables.to_markdown(head, rows, 6)


def _rate(per_second: float, unit: float, ceiling: float | None) -> str:
    """Return a rate with its percentage of a ceiling; nothing for 0."""
    if not per_second:
        return ""
    percent = f" ({100 * per_second / ceiling:.0f} %)" if ceiling else ""
    return f"{per_second / unit:.3g}{percent}"


def _table(recording: Recording, title: str, key: Callable[[TimeSpan], tuple[str, str]]) -> Table:
    counted, steps = spans(recording), recording.steps
    start, end = recording.steps_window
    step, busy = (end - start) / 1e9 / steps, length(busy_times(recording)) / 1e9 / steps
    groups: dict[tuple[str, str], list[TimeSpan]] = defaultdict(list)
    for span in counted:
        groups[key(span)].append(span)
    rows = []
    for (name, phase), members in groups.items():
        seconds = sum(span.seconds for span in members) / steps
        dtypes = {span.dtype for span in members if span.flops} or {m.dtype for m in members}
        rows.append(
            TableRow(
                *(name, phase, len(members) / steps, seconds, seconds / step if step else 0.0),
                *(sum(span.flops for span in members) / steps,),
                *(sum(span.nbytes for span in members) / steps,),
                dtypes.pop() if len(dtypes) == 1 else "",
            )
        )
    rows.sort(key=lambda row: -row.seconds)
    total = sum(row.seconds for row in rows)
    return Table(title, rows, steps, step, busy, max(total - busy, 0.0))


def _kernel_spans(recording: Recording, window: Interval) -> list[TimeSpan]:
    inside = [kernel for kernel in recording.kernels if window[0] <= kernel.start < window[1]]
    times = {kernel: float(kernel.end - kernel.start) for kernel in inside}
    if recording.source == "events":
        times = _without_nested(recording, times)
    totals: dict[int, float] = defaultdict(float)
    for kernel in inside:
        totals[kernel.range] += times[kernel]
    found = []
    for kernel in inside:
        around = recording.range_of(kernel) or _NOWHERE
        op = around if around.is_work else _NOWHERE
        part = times[kernel] / totals[kernel.range] if totals[kernel.range] else 0.0
        found.append(
            TimeSpan(
                *(kernel.name, op.name, _phase(around), around.layer, times[kernel] / 1e9),
                *(part * op.flops, part * op.nbytes, op.dtype, op.number),
            )
        )
    return found


def _without_nested(recording: Recording, times: dict[Kernel, float]) -> dict[Kernel, float]:
    """Return the times between events less those of the ranges inside, which have events too."""
    parents = {span.number: span.parent for span in recording.ranges}
    of_range = {kernel.range: kernel for kernel in times}
    own = dict(times)
    for kernel, whole in times.items():
        around = parents.get(kernel.range, -1)
        while around != -1 and around not in of_range:
            around = parents.get(around, -1)
        if around != -1:
            own[of_range[around]] -= whole
    return own


def _phase(each: Range) -> str:
    return each.name if each.kind == "phase" else each.phase


def _inside(each: Range, window: Interval) -> bool:
    return window[0] <= each.start and each.end <= window[1]
