"""The benchmark of translation runs and counts what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorgrad import Tensor
from tensorgrad.bench.torch_transformer_lm import transformer_lm
from tensorgrad.cli import main
from tensorgrad.io.readers import read_json
from tensorgrad.models.translation import TranslationConfig, TranslationModel


def test_the_speed_of_both_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "workdir_vocab280_lr0.001_embd16"  # the name of these settings
    run.mkdir()
    (run / "config.json").write_text("{}")
    for part in ("train", "valid", "test"):
        for language in ("de", "en"):
            lines = [f"{language} {n} {'x' * (n % 7)}" for n in range(60)]
            (tmp_path / f"{part}.{language}").write_text("\n".join(lines) + "\n")
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocab": 280, "context": 32, "batch": 256,
             "warmup": 2, "timed": 2, "turns": 1}  # fmt: skip
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    command = ["bench", "translation", "--data", str(tmp_path), "--device", "cpu", *options]
    assert main([*command, "--out", "found"]) == 0
    [row] = read_json(tmp_path / "found" / "translation.json")["rows"]
    assert (row["status"], row["layers"], row["device"]) == ("ok", 1, "cpu")
    assert row["ms"] > 0
    assert row["tokens_per_second"] == pytest.approx(
        row["tokens"] / (2e-3 * row["ms"]), rel=1e-3
    )  # times of two batches
    if row["peer"]:
        assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ms"], rel=1e-3)


@pytest.mark.parametrize(
    ("prefix", "kv_heads", "tied"), [(False, 2, True), (True, 2, True), (False, 1, False)]
)
def test_the_peer_is_the_same_model(prefix: bool, kv_heads: int, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    config = TranslationConfig(
        300, 16, 2, 2, kv_heads, 32, tied=tied, label_smoothing=0.1, prefix=prefix
    )
    ours, peer = TranslationModel(config), transformer_lm(config, 0.1, prefix)
    pairs = {"tokens.weight": "tokens.weight", "norm.weight": "norm.weight"}
    if not tied:
        pairs["output.weight"] = "output.weight"
    for i in range(2):
        for a, b in (("attention.qkv", "qkv"), ("attention.proj", "proj"), ("norm1", "norm1"),
                     ("norm2", "norm2"), ("feed_forward.gate", "gate"), ("feed_forward.up", "up"),
                     ("feed_forward.down", "down")):  # fmt: skip
            pairs[f"blocks.{i}.{a}.weight"] = f"blocks.{i}.{b}.weight"
    state = dict(peer.named_parameters())
    assert sorted(pairs.values()) == sorted(state)
    named = dict(ours.named_parameters())
    assert sorted(pairs) == sorted(named)
    with torch.no_grad():
        for a, b in pairs.items():
            state[b].copy_(torch.from_numpy(named[a].numpy()))
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 300, (3, 12)), rng.integers(0, 300, (3, 8))
    targets[0, 2] = -100
    loss = ours.forward(Tensor(tokens), Tensor(targets)).item()
    theirs = peer(torch.from_numpy(tokens), torch.from_numpy(targets)).item()
    assert abs(loss - theirs) < 1e-5
