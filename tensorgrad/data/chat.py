"""Chat templates: the text of a conversation, in the form in which a model was trained on it.

A template is a program in Jinja's language that comes with a published model. It runs in jinja2's
sandbox, with what transformers offers to it. Tests: tests/data/test_published_tokenizer.py.
"""

from __future__ import annotations

import datetime
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tensorgrad.distribution import install
from tensorgrad.errors import ArgumentError, DataError

__all__ = ["render_chat"]


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], name: str
) -> str:
    """Return the text of a conversation, up to where the answer of the model begins.

    Args:
        template: in Jinja's language.
        messages: of the conversation, each with a "role" ("system", "user", "assistant") and its
            "content".
        variables: more that the template may use, such as `bos_token`.
        name: of the model, for errors.
    Raises:
        ArgumentError: there is no message, or one is not as above.
        DataError: jinja2 is not installed, or the template fails.
    """
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ArgumentError(
                f"chat: messages has {message!r:.200}, expected mappings with role and content"
            )
    if not messages:
        raise ArgumentError("chat: messages is empty, expected at least one")
    try:
        sandbox = importlib.import_module("jinja2.sandbox")
    except ImportError as error:
        raise DataError(
            f"chat: {name} has a chat template and jinja2 is not installed, expected it: "
            f"{install('hub')}"
        ) from error
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    # Templates may ask whether there are tools.
    given = {
        "tools": None,
        "documents": None,
        **variables,
        "messages": list(messages),
        "add_generation_prompt": True,
    }
    try:
        text: str = environment.from_string(template).render(given)
    except Exception as error:  # a template may raise anything
        raise DataError(f"chat: the chat template of {name} fails: {error!s:.300}") from error
    return text


def _generation() -> Any:
    """Return the extension for `{% generation %}`, which marks what a model writes."""

    def parse(self: Any, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    base = importlib.import_module("jinja2.ext").Extension
    return type("Generation", (base,), {"tags": {"generation"}, "parse": parse})


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: object) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
