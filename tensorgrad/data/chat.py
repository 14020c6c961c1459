"""Chat templates: the text of a conversation, in the form in which a model was trained on it.

A template is a program in Jinja's language that comes with a published model. It runs in jinja2's
sandbox, in a process of its own with limits of time, memory and output (template_program.py).
Tests: tests/data/test_chat.py and tests/data/test_published_tokenizer.py.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorgrad.core.errors import ArgumentError, DataError
from tensorgrad.data import template_program
from tensorgrad.data.limited import run_program
from tensorgrad.io.readers import parse_json
from tensorgrad.startup.distribution import install

_SECONDS = 5.0
_OUTPUT = 1 << 18  # bytes, besides 8 times those of the messages
_MODULES = ("jinja2.sandbox", "markupsafe")


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], name: str
) -> str:
    """Return the text of a conversation, up to where the answer of the model begins.

    Args:
        template: in Jinja's language.
        messages: of the conversation, each with a "role" ("system", "user", "assistant") and its
            "content": text, numbers, and lists and mappings of them.
        variables: more that the template may use, such as `bos_token`.
        name: of the model, for errors.
    Raises:
        ArgumentError: there is no message, or one is not as above.
        DataError: jinja2 is not installed; or the template fails, or takes more than 5 s, 512 MB,
            or 256 KB of output besides 8 times the messages.
    """
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ArgumentError(
                f"chat: messages has {message!r:.200}, expected mappings with role and content"
            )
    if not messages:
        raise ArgumentError("chat: messages is empty, expected at least one")
    values = {
        "tools": None,  # templates may ask whether there are some
        "documents": None,
        **variables,
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
    }
    try:
        text = json.dumps(values)
        plain = parse_json(text, "the conversation", limit=len(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"chat: messages or variables cannot be written as JSON: {error!s:.200}; expected "
            "text, numbers, and lists and mappings of them"
        ) from error
    given = {"path": _places(name), "template": template, "values": plain}
    problem = f"chat: the chat template of {name} fails"
    found = run_program(
        template_program,
        given,
        problem,
        seconds=_SECONDS,
        memory=template_program.MEMORY,
        output=_OUTPUT + 8 * len(text),
    )
    if "text" not in found:
        raise DataError(f"{problem}: {found['error']}")
    return str(found["text"])


def _places(name: str) -> list[str]:
    """Return the folders of the packages that the program needs."""
    try:
        specs = [importlib.util.find_spec(module) for module in _MODULES]
    except ImportError:
        specs = []
    places = [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
    if len(places) < len(_MODULES):
        raise DataError(
            f"chat: {name} has a chat template and jinja2 is not installed, expected it: "
            f"{install('hub')}"
        )
    return places
