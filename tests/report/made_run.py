"""The folder of a run that never was, with every file of a real one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tensorgrad.train.language import LanguageSettings

DIFF = """diff --git a/models/gpt2.py b/models/gpt2.py
index 1111111..2222222 100644
--- a/models/gpt2.py
+++ b/models/gpt2.py
@@ -1,3 +1,3 @@ class GPT2:
 x = 1
-    return a < b
+    return a <= b
"""


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def metrics(steps: int, every: int, lr: float = 6e-4, seed: int = 0) -> Iterable[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    yield {"step": 0, "validation_loss": 10.9}
    for step in range(1, steps + 1):
        loss = 3.1 + 7.8 / (1 + step / (0.02 * steps)) + 0.08 * rng.standard_normal()
        norm = 0.4 + 2 / (1 + step / 50) + 0.1 * rng.random() + (3 if step % 997 == 0 else 0)
        rate = lr * min(step / (0.05 * steps), 0.55 + 0.45 * math.cos(math.pi * step / steps))
        yield {"step": step, "loss": loss, "lr": rate, "gradient_norm": norm}
        if step % every == 0 or step == steps:
            yield {"step": step, "validation_loss": loss + 0.05 + 0.02 * rng.standard_normal()}


def times(steps: int, tokens: int = 524_288, second: float = 0.9) -> Iterable[dict[str, Any]]:
    rng = np.random.default_rng(1)
    for step in range(1, steps + 1):
        seconds = step * second
        yield {
            "step": step,
            "seconds": seconds,
            "elapsed": 1.04 * seconds + 3,
            "tokens": step * tokens,
            "tokens_per_second": tokens
            / second
            * (1 - 0.03 * rng.random() - 0.3 * (step % 500 == 0)),
            "mfu": 0.46 - 0.01 * rng.random(),
            "memory_mb": 21_400.0,
            "peak_memory_mb": 38_211.5,
            "gpu_utilization": 99,
            "clock_mhz": 1755 - int(20 * rng.random()),
            "watts": 660 + 20 * rng.random(),
        }


ENVIRONMENT = {
    "command": ["tensorgrad", "train", "--preset", "gpt2-124M"],
    "python": "3.12.4",
    "platform": "Linux-6.8-x86_64",
    "packages": {"numpy": "2.4.6", "cupy-cuda13x": "14.0.1"},
    "device": "cuda:0",
    "gpu": "NVIDIA H200",
    "driver": "580.65",
    "cuda": "13.0",
    "ranks": 1,
    "git": {"commit": "ef9b8b3c7e1d", "dirty": True},
}


def make_run(folder: Path, steps: int = 60, every: int = 20, **settings: Any) -> Path:
    """Write a run of GPT-2 with all files; settings differ from the defaults."""
    folder.mkdir(parents=True)
    chosen = LanguageSettings(**{"steps": steps, "dtype": "bfloat16", **settings})
    config = {key: value for key, value in asdict(chosen).items() if key != "stop_after"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", metrics(steps, every, chosen.lr, chosen.seed))
    write_lines(folder / "times.jsonl", times(steps))
    text = "def train(model):\n    for step in range(10):\n        model.step()  # <b>\n"
    samples = [{"step": step, "prompt": "def ", "text": text} for step in (steps // 2, steps)]
    write_lines(folder / "samples.jsonl", samples)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT), encoding="utf-8")
    (folder / "uncommitted.diff").write_text(DIFF, encoding="utf-8")
    return folder
