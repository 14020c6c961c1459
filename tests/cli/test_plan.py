from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tensorgrad.cli import main, plan
from tensorgrad.parallel.planning.estimate import Speeds
from tensorgrad.train.settings import DTYPES
from tests.train.test_task import write_files


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = "--preset gpt2-1558M --dp 8 --pp 4 --tp 2 --parallel zero1 --batch 512"
    assert main(["plan", *mesh.split(), "--memory", "80GiB"]) == 0
    out = capsys.readouterr().out
    for words in ("on 64 GPUs", "dp 8 x pp 4 x tp 2", "optimizer state", "of 80", "tokens/s",
                  "pipeline bubble"):  # fmt: skip
        assert words in out
    assert "note" not in out  # the 25 heads are 12 and 13
    assert main(["plan", *mesh.split(), "--memory", "2GiB"]) == 0
    out = capsys.readouterr().out
    assert "of 2: too much" in out
    assert "see `tensorgrad plan --fit --memory 2GiB`" in out
    larger = "--preset gpt2-1558M --dp 8 --parallel zero1"
    assert main(["plan", *larger.split()]) == 0
    assert "of 80.0 GiB; with --micro-batches 2 it is 78.6 GiB" in capsys.readouterr().out
    assert main(["plan", "--preset", "gpt2-1558M", "--tp", "3", "--batch", "512"]) == 0
    assert "note: the hidden width is 6400, not a multiple of tp, 3" in capsys.readouterr().out
    assert main(["plan", "--tp", "16", "--batch", "512"]) == 0
    assert "note: the heads are 12, expected one or more for each of tp, 16" in (
        capsys.readouterr().out
    )


def test_large_numbers_have_columns_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 96 --heads 96 --width 12288 --context 65536"
    assert main(["plan", *sizes.split(), "--dp", "8", "--batch", "4096"]) == 0
    out = capsys.readouterr().out
    for words in (r"activations +1033392\.00\n", r"all-reduce +530  1,227,695  4395\.22 ",
                  r"compute  +133257378\.81 +100\.0 %\n"):  # fmt: skip
        assert re.search(words, out), out
    for table in out.split("\n\n")[1:-1]:  # each column ends at one place
        assert len({len(line) for line in table.splitlines()}) == 1, table


def test_a_model_is_named_by_its_preset_or_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    for options, name in (
        (["--context", "1024"], "gpt2-124M, 124M parameters"),
        (["--preset", "llama-1B"], "llama-1B, 1,236M parameters"),
        (["--preset", "qwen3-0.6B", "--batch", "8"], "qwen3-0.6B, 596M parameters"),
        (["--model", "transformer-lm"], "TransformerLM with 2 layers, 4 heads, width 192, context "
                                        "128, vocabulary 1,024, 1M parameters"),
        (["--width", "1536"], "GPT2 with 12 layers, 12 heads, width 1,536, context 1,024, "
                              "vocabulary 50,257, 419M parameters"),
    ):  # fmt: skip
        assert main(["plan", *options]) == 0
        assert capsys.readouterr().out.startswith(f"{name}, on 1 GPU")


def test_a_model_of_a_file_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write_files(tmp_path)
    source = (tmp_path / "nope.py").read_text()
    block = "nn.TransformerBlock, config.width, config.heads, bias=False, norm=nn.RMSNorm"
    assert block in source
    alone = source.replace(block, "nn.Linear, config.width, config.width")
    (tmp_path / "alone.py").write_text(f"{alone}\n    def shards(self):\n        return []\n")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", "nope.py", "--layers", "4", "--pp", "2", "--tp", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NoPE with 4 layers, 4 heads, width 192, context 128, vocabulary 1,024")
    assert "note" not in out
    sizes = "--model nope.py --width 4096 --layers 8 --batch 64 --fit --memory 16GiB --json"
    assert main(["plan", *sizes.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 1025 * 4096 + 8 * (12 * 4096 + 2) * 4096
    assert found["gpus"] > 1
    for options, message in (
        ("--pp 3", "pp * chunks is 3, expected 1 to the 2 layers"),
        ("--model alone.py --tp 2", "--model: got a NoPE without a table of the layers that ranks"),
        ("--kv-heads 2", "--kv-heads: got 2 for NoPE, expected none: its config has no kv_heads"),
        ("--preset gpt2-124M", "--preset: got gpt2-124M with --model nope.py, expected one of sma"),
    ):
        assert main(["plan", "--model", "nope.py", *options.split()]) == 1
        assert message in caplog.text


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                "--preset",
                "gpt2-355M",
                "--dp",
                "4",
                "--batch",
                "64",
                "--parallel",
                "zero3",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"dp": 4, "pp": 1, "tp": 1}
    parts = {name: size for name, size in found["memory"].items() if name != "total"}
    assert sum(parts.values()) == found["memory"]["total"]
    assert found["memory"]["reserved"] == 2**30
    spent = {name: seconds for name, seconds in found["time"].items() if name != "total"}
    assert sum(spent.values()) == pytest.approx(found["time"]["total"])
    assert [each["axis"] for each in found["sent"]] == ["dp", "dp"]
    assert (
        main(
            [
                "plan",
                "--preset",
                "gpt2-1558M",
                "--fit",
                "--memory",
                "12GiB",
                "--batch",
                "64",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["total"] <= 12 * 2**30
    assert found["gpus"] == found["mesh"]["dp"] * found["mesh"]["pp"] * found["mesh"]["tp"] > 1
    two = "--layers 1 --heads 1 --batch 2 --fit --memory 1.85GiB --parallel zero1 --bucket-mb 1"
    assert main(["plan", *two.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sent"][0]["calls"] == 187  # MB of gradients


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--dp 3",
            r"--batch: got 512 sequences, expected a multiple of --dp \* --micro-batches, 3 \* 1",
        ),
        ("--pp 13", r"pp \* chunks is 13, expected 1 to the 12 layers"),
        ("--pp 2 --micro-batches 3", r"expected a multiple of --dp \* --micro-batches, 1 \* 3"),
        (
            "--pp 2 --pipeline-schedule gpipe --chunks 2",
            "--chunks: got 2 with schedule .gpipe., expected 1",
        ),
        (
            "--pp 4 --pipeline-schedule interleaved --chunks 2 --micro-batches 2",
            "--micro-batches: got 2, expected a multiple",
        ),
        ("--dp 0", "--dp: got 0, expected 1 or more"),
        ("--batch 0", "--batch: got 0, expected 1 or more"),
        ("--tp 3 --sequence-parallel", "the context is 1024, expected a multiple of tp, 3"),
        ("--memory lots", "--memory: got 'lots', expected bytes"),
        ("--fit", "--memory: got none, expected the memory of a GPU for --fit"),
        ("--fit --memory 80GiB --tp 4", "--fit: got --tp 4, expected without"),
        (
            "--fit --memory 80GiB --micro-batches 1",
            "--fit: got --micro-batches 1, expected without",
        ),
        ("--fit --memory 1GiB --max-gpus 1", r"1\.0 GiB a GPU are not enough on up to 1,"),
        ("--batch 0 --pp 2", "--batch: got 0, expected 1 or more"),
        ("--batch -4 --pp 2", "--batch: got -4, expected 1 or more"),
        ("--pp 2 --dp 0", "--dp: got 0, expected 1 or more"),
        ("--reserved some", "--reserved: got 'some', expected bytes"),
        ("--memory 1.2.3GiB", "--memory: got '1.2.3GiB', expected bytes"),
        ("--fit --memory 1GiB --max-gpus 0", "--max-gpus: got 0 GPUs, expected 1 or more"),
        ("--dp 2 --bucket-mb 0", "--bucket-mb: got 0.0, expected more than 0"),
        ("--dp 2 --grad-dtype bfloat16", "on 2 GPUs, expected float32, or bfloat16 with"),
        ("--preset llama-1B --model gpt2", "--preset: got llama-1B with --model gpt2, expected"),
        ("--preset llama-1B --kv-heads 5", "--heads: got 32, expected a multiple of 5"),
        ("--preset llama-1B --vocab-multiple 8", "--vocab-multiple: got 8 for TransformerLM, exp"),
        ("--model rnn", "--model: got rnn, expected one of gpt2, transformer-lm, or a Python file"),
        ("--batch 1000000000000", "--batch: got 1,000,000,000,000, expected at most 268,435,456"),
        ("--layers 1001", "--layers: got 1,001, expected at most 1,000"),
        ("--vocab 9223372036854775807", "--vocab: got 9,22.*, expected at most 268,435,456"),
        ("--pp 1001", "--pp: got 1,001, expected at most 1,000"),
        ("--tflops -1", "--tflops: got -1.0, expected more than 0"),
        ("--network 0", "--network: got 0.0, expected more than 0"),
        ("--latency inf", "--latency: got inf, expected more than 0"),
        ("--memory 0GiB", "--memory: got 0GiB, expected more than 0"),
    ],
)
def test_errors_have_the_numbers(
    options: str, message: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["plan", *options.split()]) == 1
    assert capsys.readouterr().out == ""
    assert re.search(message, caplog.text), caplog.text


def test_speeds_have_units() -> None:
    assert plan.SpeedOptions(1, 2, 3, 4, 8, 6).speeds() == Speeds(1e12, 2e9, 3e9, 4e9, 8e-6, 6)
    assert vars(plan.SpeedOptions().speeds()) == pytest.approx(vars(Speeds()))


def test_the_largest_sizes_are_planned() -> None:
    plan._check_most(plan.MeshOptions(pp=1000, batch=1 << 28))


def test_dtypes_are_those_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for dtype in DTYPES:
        assert main(["plan", "--batch", "8", "--dtype", dtype, "--json"]) == 0
        found[dtype] = json.loads(capsys.readouterr().out)["memory"]
    assert found["bfloat16"] == found["float16"]
    assert found["bfloat16"]["16-bit copies of weights"] > 0
    assert found["bfloat16"]["total"] < found["float32"]["total"]
    assert main(["plan", "--batch", "8"]) == 0
    assert capsys.readouterr().out.partition("\n")[0].endswith(", bfloat16-parameters")
    assert main(["plan", "--batch", "8", "--grad-dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.partition("\n")[0].endswith(", gradients in bfloat16")
