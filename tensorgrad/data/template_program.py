"""The program that renders a chat template, in a process of its own: see chat.py.

A template is an untrusted program. jinja2's sandbox keeps it from Python's objects, but lets it
loop, allocate and write without end; the limits of the process do not. It can open no file or
socket and start no process. This file imports nothing of tensorgrad, so that it starts at once.
"""

from __future__ import annotations

import ast
import datetime
import json
import sys
from contextlib import suppress
from typing import Any, NoReturn

MEMORY = 512 << 20  # bytes of address space
_FIRST = (
    "{{ [1] | tojson }}{{ '1' | urlize | wordwrap | striptags | pprint }}{{ lipsum(1) }}"
    "{{ strftime_now('%Y') }}{{ raise_exception('shown in a traceback') }}"
)


def main() -> None:
    """Render the template on the standard input, a literal; write JSON: "text" or "error"."""
    given = ast.literal_eval(sys.stdin.read())
    sys.path += given["path"]
    render = _renderer()
    _limit()
    try:
        found = {"text": render(given["template"], given["values"])}
    except MemoryError:
        found = {"error": f"it needs more than {MEMORY >> 20} MB"}
    except Exception as error:  # a template may raise anything
        found = {"error": f"{error!s:.300}"}
    json.dump(found, sys.stdout)


def _renderer() -> Any:
    """Return the function that renders a template, with what transformers offers to it."""
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def parse(self: Any, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # `{% generation %}` marks what a model writes.
    generation = type("Generation", (Extension,), {"tags": {"generation"}, "parse": parse})
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    # Python and jinja2 import some modules at their first use, which must be before the limits.
    with suppress(ValueError):
        environment.from_string(_FIRST).render()
    return lambda template, values: environment.from_string(template).render(values)


def _limit() -> None:
    """Let this process open no more files and start no processes."""
    try:
        import resource
    except ImportError:  # on Windows
        return
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: object) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


if __name__ == "__main__":
    main()
