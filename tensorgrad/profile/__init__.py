"""Where the time of a step goes, and where its memory.

`Profiler` records; functions of a recording make tables, traces and pictures. To profile the step
of a GPT-2 from the command line: `tensorgrad profile`. Guide: docs/guides/profiling.md.
"""

from tensorgrad.profile.profiler import Profiler

__all__ = ["Profiler"]
