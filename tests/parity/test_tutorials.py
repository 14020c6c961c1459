"""PyTorch's tutorials run on this library with at most three names changed, beside the imports.

The scripts in tests/parity/tutorials/ are PyTorch's. Where it is installed, they run there too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).with_name("tutorials")
# script: what the last loss must be below, as a fraction of the first; and the names that change
SCRIPTS: dict[str, tuple[float, dict[str, str]]] = {
    "mlp": (0.2, {"type": "astype", "torch.float": "torch.float32"}),
    "ngram": (0.2, {"dim": "axis"}),
    "transformer": (
        0.3,
        {
            "F.scaled_dot_product_attention": "F.attention",
            "torch.nn.utils.clip_grad_norm_": "torch.optim.clip_grad_norm",
        },
    ),
}
IMPORTS = {
    "from torch.utils.data import": "from tensorgrad.data import",
    "from torch.nn import": "from tensorgrad.nn import",
    "from torch import": "from tensorgrad import",
    "import torch.": "import tensorgrad.",
    "import torch\n": "import tensorgrad as torch\n",
}


def losses_of(text: str, file: str) -> list[float]:
    """Run a script and return its losses."""
    names: dict[str, Any] = {"__name__": "tutorial"}
    exec(compile(text, file, "exec"), names)
    losses: list[float] = names["losses"]
    return losses


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tutorial_trains(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bound, changed = SCRIPTS[script]
    assert len(changed) <= 3
    text = (FOLDER / f"{script}.py").read_text(encoding="utf-8")
    for theirs, ours in IMPORTS.items():
        text = text.replace(theirs, ours)
    for theirs, ours in changed.items():
        text, count = re.subn(rf"(?<!\w){re.escape(theirs)}\b", ours, text)
        assert count, f"{theirs} is not in the script"
    losses = losses_of(text, f"{script}.py")
    assert losses[-1] < bound * losses[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_tutorial_is_one_of_pytorch(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    bound, _ = SCRIPTS[script]
    losses = losses_of((FOLDER / f"{script}.py").read_text(encoding="utf-8"), f"{script}.py")
    assert losses[-1] < bound * losses[0]
