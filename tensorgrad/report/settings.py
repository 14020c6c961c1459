"""The settings of a run in groups, beside their defaults where these are known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from tensorgrad.train.config import GROUPS, OTHER, default_of, renamed
from tensorgrad.train.tasks import TASKS, task_class

_COVERED = 0.75  # fraction of a run's settings, for its program to be known


def grouped(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of settings by group, in the groups' order."""
    groups = {group: [name for name in names if name in config] for group, names in GROUPS.items()}
    placed = {name for names in groups.values() for name in names}
    groups[OTHER] = [name for name in config if name not in placed]
    return {group: names for group, names in groups.items() if names}


def defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of settings; {} if the program that wrote them is not known.

    Its task says which it is; of a run of an earlier version, the names of its settings.
    """
    config = renamed(config)
    known = [
        {f.name: _as_saved(default_of(f, config)) for f in fields(kind) if f.default is not MISSING}
        for kind in (task_class(name).Settings for name in TASKS)
    ]
    tasks = [task for task in known if config.get("task", task.get("task")) == task.get("task")]
    shared = [{n: value for n, value in task.items() if n in config} for task in tasks]
    best = max(shared, key=len, default={})
    return best if len(best) >= _COVERED * max(1, len(config)) else {}


def _as_saved(value: Any) -> Any:
    """Return a value as it comes back from a JSON file."""
    return list(value) if isinstance(value, tuple) else value


def value_text(value: Any) -> str:
    """Return a value of a JSON file as text: words without quotes, everything else as JSON."""
    if isinstance(value, str):
        return value if value else "(empty)"
    if value is None:
        return "none"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value) or "(empty)"
    return json.dumps(value, ensure_ascii=False)
