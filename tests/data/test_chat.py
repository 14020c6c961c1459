"""Untrusted chat templates, which run in a process of their own."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.data import chat, template_program
from tensorgrad.data.chat import render_chat
from tensorgrad.data.limited import run_limited
from tensorgrad.errors import ArgumentError, DataError

pytest.importorskip("jinja2", reason="jinja2 is not installed")
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi \u00e9 \U0001f600", "n": [1, None]}
]


def render(template: str, **variables: Any) -> str:
    return render_chat(template, MESSAGES, variables, "model")


def test_a_template_has_what_transformers_offers() -> None:
    template = (
        "{{ bos }}{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}"
        "{% generation %}{{ tools is none }}{% endgeneration %}{{ add_generation_prompt }}"
        "{{ strftime_now('%Y') }}{{ messages[0].content | upper }}"
    )
    expected = '<s>{"role": "user", "content": "hi \u00e9 \U0001f600", "n": [1, null]}TrueTrue'
    assert render(template, bos="<s>") == f"{expected}{time.strftime('%Y')}HI \u00c9 \U0001f600"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2, "more than 0.5 s"),
        ("{{ 'a' * 10 ** 9 }}", "needs more than 512 MB"),
        ("{{ 'a' * 10 ** 7 }}", r"its text has more than 26\d,\d{3} bytes"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{{ raise_exception('expected a user') }}", "fails: expected a user"),
    ],
)
def test_an_untrusted_template_ends_in_an_error(
    template: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "0.5 s" in problem:
        monkeypatch.setattr(chat, "_SECONDS", 0.5)
    with pytest.raises(DataError, match=problem):
        render(template)


def test_long_messages_may_give_long_text() -> None:
    long = [{"role": "user", "content": "a" * 400_000}]
    assert len(render_chat("{{ messages[0].content }}", long, {}, "model")) == 400_000


def test_values_that_no_template_can_get_are_named() -> None:
    for value in (object(), {1}, print):
        with pytest.raises(ArgumentError, match="cannot be written as JSON"):
            render("{{ x }}", x=value)


LIMITED = f"""
import os, socket, sys
sys.path.insert(0, {str(Path(template_program.__file__).parent)!r})
import template_program
template_program._limit()
for action in (socket.socket, lambda: open("/etc/passwd"), os.pipe, lambda: bytes(1 << 30)):
    try:
        action()
    except (OSError, MemoryError) as error:
        print(type(error).__name__)
    else:
        print("allowed")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits are those of Linux")
def test_the_process_can_open_no_file_or_socket() -> None:
    found = run_limited(
        [sys.executable, "-I", "-B", "-c", LIMITED], seconds=5, memory=1 << 30, output=1000
    )
    assert found.output.split() == [b"OSError", b"OSError", b"OSError", b"MemoryError"]


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # A killed process whose parent has ended stays a zombie until it is reaped.
    return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("waits", [True, False])
def test_a_program_ends_with_its_children(tmp_path: Path, waits: bool) -> None:
    script = f"sleep 60 & echo $! > {tmp_path / 'child'}; {'sleep 60' if waits else 'exit 3'}"
    if waits:
        with pytest.raises(TimeoutError, match=r"sh took more than 0.3 s"):
            run_limited(["sh", "-c", script], seconds=0.3, memory=1 << 30, output=10)
    else:
        found = run_limited(["sh", "-c", script], seconds=5, memory=1 << 30, output=10)
        assert (found.status, found.output, found.is_cut) == (3, b"", False)
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.02)
    raise AssertionError("the child is running still")


def test_output_and_environment_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "elsewhere")
    found = run_limited(
        ["sh", "-c", "cat; echo $GIT_DIR$OWN"],
        b"12345",
        seconds=5,
        memory=1 << 30,
        output=100,
        environment={"OWN": "6"},
    )
    assert found == (0, b"123456\n", False)
    found = run_limited(["sh", "-c", "yes"], seconds=5, memory=1 << 30, output=100)
    assert (len(found.output), found.is_cut) == (100, True)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 101  # limits of this process stay
