"""Reports: one HTML page about a run, and tables and curves of what differs between runs.

    write_report("runs/gpt2-1")  # runs/gpt2-1/report.html
    print(to_text(compare(["runs/gpt2-1", "runs/gpt2-2"])))

The charts are drawn by charts.js, a small script of our own: no package that one can install from
PyPI carries a chart library that fits into a page (Bokeh's script has 1.3 MB and Plotly's 4.5 MB,
and both evaluate code that a strict Content-Security-Policy forbids), and a report must work
without another package.
"""

from tensorgrad.report.comparison import Comparison, compare, to_csv, to_markdown, to_page, to_text
from tensorgrad.report.page import write_report
from tensorgrad.report.run import Run, read_run

__all__ = ["Comparison", "Run", "compare", "read_run", "write_report"]
__all__ += ["to_csv", "to_markdown", "to_page", "to_text"]
