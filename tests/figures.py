"""Tables of documents that follow from the code; `<!-- code NAME -->` has that of a function here.

Tests: tests/test_results.py, which renders them.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from tensorgrad.bench.decode import NEW, PROMPT
from tensorgrad.cli import main
from tensorgrad.cli.info import kernels_of
from tensorgrad.io.readers import read_json
from tensorgrad.io.tables import to_markdown
from tensorgrad.kernels.gpu import memory_bandwidth
from tensorgrad.models.gpt2 import GPT2
from tensorgrad.models.gpt2 import PRESETS as GPT2_PRESETS
from tensorgrad.nn import init
from tensorgrad.parallel.bucket_size import Overlap, default_bucket_bytes
from tensorgrad.parallel.planning.estimate import Speeds
from tensorgrad.parallel.schedule import SCHEDULES, bubble_fraction
from tensorgrad.startup.distribution import FIRST_DRIVER_OF_CUDA_13
from tensorgrad.train.settings import DTYPES
from tensorgrad.train.translation import PRESETS, TranslationSettings
from tests.reference import command_messages as command_messages
from tests.reference import error_classes as error_classes
from tests.reference import error_messages as error_messages
from tests.reference import kernel_files as kernel_files
from tests.reference import kernel_results as kernel_results
from tests.reference import op_dtypes as op_dtypes
from tests.reference import promotion as promotion
from tests.reference import python_numbers as python_numbers
from tests.reference import tangent_rules as tangent_rules
from tests.source_tree import ROOT

_2_7B = "--layers 32 --width 2560 --heads 32 --vocab 10000 --vocab-multiple 1 --batch 4"
_407B = "--layers 126 --width 16384 --heads 128 --context 2048"


_EXTRAS = {
    "cuda13": "GPUs, with a driver of CUDA 13; clocks and power, traces of kernels",
    "cuda12": "the same with a driver of CUDA 12; traces of kernels up to Python 3.12",
    "mpi": "several ranks: `mpirun` and its MPI",
    "text": "Hugging Face data sets, Parquet and Zstandard files, BLEU",
    "hub": "downloads of published models, chat templates",
    "plot": "pictures of losses, memory and benchmarks",
    "profile": "the same as `plot`",
    "log": "all loggers",
    "mlflow": "the MLflow logger",
    "tensorboard": "the TensorBoard logger",
    "trackio": "the trackio logger",
    "wandb": "the W&B logger",
    "dev": "the tests, linters and type checkers",
}


def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def extras() -> str:
    """Return the extras, what they are for, and the packages that each installs."""
    rows = []
    for name, requirements in project()["optional-dependencies"].items():
        packages = []
        for requirement in requirements:
            package = requirement.partition(";")[0]
            own = re.fullmatch(r"tensorgrad-cupy\[(.+)\]", package)
            name_of = re.split("[>=<]", package)[0]
            packages += (
                [f"`.[{extra}]`" for extra in own[1].split(",")] if own else [f"`{name_of}`"]
            )
        rows.append([f"`{name}`", _EXTRAS[name], ", ".join(packages)])
    return to_markdown(("extra", "brings", "packages and other extras"), rows)


def requirements() -> str:
    """Return the versions of Python, NumPy and CUDA, and the systems, that are supported."""
    about = project()
    pattern = r"(Python :: 3\.\d+|Operating System :: (?:POSIX :: )?\w+)$"
    found = [m[1] for name in about["classifiers"] if (m := re.search(pattern, name))]
    kinds = {name: name.rpartition(" :: ")[2] for name in found}
    pythons = [version for name, version in kinds.items() if name.startswith("Python")]
    systems = sorted(version for name, version in kinds.items() if name.startswith("Operating"))
    (numpy,) = (name for name in about["dependencies"] if name.startswith("numpy"))
    cupy = {
        name.partition("[")[0]: name.partition("=")[2]
        for extra in ("cuda13", "cuda12")
        for name in about["optional-dependencies"][extra]
        if name.startswith("cupy")
    }
    rows = [
        ["Python", ", ".join(pythons)],
        ["operating system", f"{' and '.join(systems).replace('MacOS', 'macOS')}; GPUs on Linux"],
        ["NumPy", f"from {numpy.partition('=')[2]} on"],
        ["CuPy, for GPUs", "; ".join(f"`{name}` from {low} on" for name, low in cupy.items())],
        ["NVIDIA driver", f"from {FIRST_DRIVER_OF_CUDA_13} on for CUDA 13, else one of CUDA 12"],
        *([f"GPU of compute capability {text}", kernels_of(capability)]
          for text, capability in (("9.0 or later", 90), ("8.0 to 8.9", 80), ("below 8.0", 75))),
    ]  # fmt: skip
    return to_markdown(("", "supported"), rows)


def planned(options: str) -> dict[str, Any]:
    """Return what `tensorgrad plan` prints as JSON."""
    with redirect_stdout(StringIO()) as out:
        assert main(["plan", *shlex.split(options), "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def percent(fraction: float) -> str:
    """Return a fraction as a document shows it."""
    return f"{100 * fraction:.1f} %"


def presets() -> str:
    """Return the sizes of language models."""
    rows = []
    for name in ("char", "gpt2-124M", "gpt2-355M", "gpt2-774M", "gpt2-1558M"):
        found = planned(f"--preset {name} --vocab-multiple 1 --batch 1")
        sizes = (found["model"][key] for key in ("layers", "heads", "width", "context"))
        rows.append([name, *(f"{size:,}" for size in (*sizes, found["parameters"]))])
    return to_markdown(("preset", "layers", "heads", "width", "context", "parameters"), rows)


def translation_presets() -> str:
    """Return the sizes of translation models."""
    head = ("layers", "width", "vocab", "epochs", "batch")
    rows = []
    for name in ("phrases", "small", "large"):
        settings = TranslationSettings(**PRESETS[name])
        rows.append([name, *(f"{getattr(settings, key):,}" for key in head)])
    return to_markdown(("`--preset`", *(f"`--{key}`" for key in head)), rows)


def bytes_a_parameter() -> str:
    """Return the bytes of parameters, gradients and AdamW's state in each dtype."""
    rows = []
    for dtype in DTYPES:
        found = planned(f"--batch 1 --dtype {dtype}")
        parts = (found["memory"][key] for key in ("parameters", "gradients", "optimizer state"))
        rows.append([f"`{dtype}`", *(f"{part / found['parameters']:.0f}" for part in parts)])
    return to_markdown(("`--dtype`", "w, parameters", "gradients", "k, optimizer state"), rows)


def bubbles() -> str:
    """Return the bubble fraction of four stages."""
    counts = (4, 8, 16, 32)
    rows = [
        [f"`{name}`" + ", 2 chunks" * (chunks > 1),
         *(percent(bubble_fraction(name, 4, count, chunks)) for count in counts)]
        for name in SCHEDULES for chunks in [1 + (name == "interleaved")]
    ]  # fmt: skip
    return to_markdown(("p = 4", *(f"m = {count}" for count in counts)), rows)


def bucket_overheads() -> str:
    """Return what buckets of several sizes add to a step, in ms, by the formula."""
    sizes, speeds = (1, 5, 25, 100, 400), Speeds()
    rows = []
    for name, gradients, backward, last in (
        ("124M, B 32", 498e6, 0.044, 0.0), ("with L = 157 MB", 498e6, 0.044, 157e6),
        ("1558M, B 8", 6.2e9, 0.13, 0.0), ("with L = 330 MB", 6.2e9, 0.13, 330e6),
    ):  # fmt: skip
        step = Overlap(gradients, backward, speeds.bandwidth, speeds.latency, last=last)
        usual = default_bucket_bytes(gradients)
        overheads = (step.overhead(size) for size in (*(1e6 * mb for mb in sizes), gradients))
        rows.append([
            name, f"{gradients / 1e6:,.0f} MB", f"{1e3 * backward:.0f} ms",
            *(f"{1e3 * overhead:.2f}" for overhead in overheads),
            f"{step.best / 1e6:.0f} MB: {1e3 * step.overhead(step.best):.2f}",
            f"{usual / 1e6:.0f} MB: {1e3 * step.overhead(usual):.2f}",
        ])  # fmt: skip
    head = ("", "G", "T", *(f"{mb} MB" for mb in sizes), "all at once", "best", "default")
    return to_markdown(head, rows)


def assumed_speeds() -> str:
    """Return the speeds of a GPU that the planner assumes."""
    speeds = Speeds()
    rows = [
        ["FLOP/s that it achieves, F", f"{speeds.flops / 1e12:.0f} TFLOP/s"],
        ["memory", f"{speeds.memory_bandwidth / 1e9:,.0f} GB/s"],
        [f"NCCL in a host of {speeds.gpus_per_host}", f"{speeds.bandwidth / 1e9:.0f} GB/s"],
        ["between hosts", f"{speeds.network / 1e9:.0f} GB/s"],
        ["latency of a call", f"{1e6 * speeds.latency:.0f} us"],
    ]
    return to_markdown(("", "speed"), rows)


def fp8_floors() -> str:
    """Return what 8 bits can save of a step of GPT-2 124M, batch 32, and what rounding costs.

    Rates are those of an H100 for products and of an H200 for memory, as the chapter says.
    """
    rows, layers, bandwidth = 32 * 1024, 12, 3.7e12
    table = []
    layers_of = (  # outputs, inputs, TFLOP/s in 16 and in 8 bits, passes before and after fusing
        ("qkv", 2304, 768, 671, 1115, 4 * (768 + 2304), 4 * (768 + 2304)),
        ("proj", 768, 768, 634, 961, 8 * 768, 8 * 768),
        ("up", 3072, 768, 698, 1081, 4 * 768 + (4 + 6) * 3072, 4 * 768 + 3 * 3072),
        ("down", 768, 3072, 743, 1172, 4 * 768, 4 * 768),
    )
    for name, outputs, inputs, wide, narrow, apart, fused in layers_of:
        flop = 3 * layers * 2.0 * rows * outputs * inputs  # forward, dx and dW
        table.append((name, flop, wide, narrow, layers * rows * apart, layers * rows * fused))
    flop = 2.0 * rows * 50304 * 768
    table.append(("head, forward", flop, 645, 1063, 3 * rows * 768, 3 * rows * 768))
    lines = []
    for name, flop, wide, narrow, apart, fused in table:
        times = (
            flop / wide / 1e9,
            flop / narrow / 1e9,
            1e3 * apart / bandwidth,
            1e3 * fused / bandwidth,
        )
        gain = times[0] - times[1] - times[3]
        lines.append([name, *(f"{time:.2f}" for time in times), f"{gain:.2f}"])
    head = ("ms a step", "16 bits", "8 bits", "passes", "passes, fused", "gain, fused")
    return to_markdown(head, lines)


def parts_of_124m() -> str:
    """Return the planned memory of a step of GPT-2 124M, by part."""
    found = planned("--preset gpt2-124M --vocab-multiple 128 --batch 32 --reserved 0")["memory"]
    rows = [[name, f"{size / 1e6:,.0f}"] for name, size in found.items() if size]
    return to_markdown(("GPT-2 124M, batch 32", "MB"), rows)


def sharded_124m() -> str:
    """Return the planned memory of GPT-2 124M on two GPUs, by stage of ZeRO."""
    parts = ("parameters", "gradients", "optimizer state", "total")
    rows = []
    for name in ("overlap", "zero1", "zero2", "zero3"):
        options = f"--preset gpt2-124M --dp 2 --batch 32 --parallel {name} --reserved 0"
        found = planned(options)["memory"]
        rows.append([f"`{name}`", *(f"{found[part] / 1e6:,.0f}" for part in parts)])
    return to_markdown(("MB", *parts), rows)


def contexts() -> str:
    """Return the planned memory of a step of the 2.7B model over the context length."""
    lengths = (128, 256, 512, 1024)
    rows = []
    for dtype in ("float32", "bfloat16-parameters"):
        totals = (
            planned(f"{_2_7B} --context {length} --dtype {dtype} --reserved 0")["memory"]["total"]
            for length in lengths
        )
        rows.append([f"`{dtype}`", *(f"{total / 1e9:.1f}" for total in totals)])
    return to_markdown(("GB", *(f"{length:,} tokens" for length in lengths)), rows)


def decoding_floors() -> str:
    """Return what a decoding step reads, how fast it could be, and how near the measured one is."""
    rows = []
    for row in read_json(ROOT / "docs" / "results" / "decode" / "decode.json")["rows"]:
        with init.without_values():
            model = GPT2(GPT2_PRESETS[row["model"]])
        batch, bandwidth = row["batch"], memory_bandwidth(row["device"]) or math.nan
        weights, total = (
            model.step_bytes(batch, keys) / 2 for keys in (0, PROMPT + NEW / 2)
        )  # 16 of the 32 bits that the model is made with
        speed = row["tokens_per_second"] / batch  # steps a second, the prompt included
        rows.append([
            row["model"], str(batch), str(7 * model.config.layers + 4), f"{weights / 1e6:,.0f}",
            f"{(total - weights) / 1e6:,.0f}", f"{1e3 * total / bandwidth:.3f}",
            f"{row['step_ms']:.3f}", percent(total * speed / bandwidth),
        ])  # fmt: skip
    sizes = "kernels", "weights, MB", "cache, MB"
    return to_markdown(("model", "sequences", *sizes, "floor, ms", "step, ms", "MBU"), rows)


def waits_of_zero3() -> str:
    """Return what of a step of a large model 128 GPUs wait for."""
    rows = []
    for mesh, counts in (("--dp 128", (1, 2, 4, 8)),
                         ("--dp 16 --tp 8 --sequence-parallel", (1, 2, 4, 8))):  # fmt: skip
        ranks = int(mesh.split()[1])
        for count in counts:
            found = planned(f"{_407B} {mesh} --parallel zero3 --batch {count * ranks}")
            time, tokens = found["time"], count * ranks * 2048 // 128
            waits = (time["send gradients and parameters"], time["send within layers"])
            fractions = (percent(wait / time["total"]) for wait in waits)
            rows.append([f"`{mesh}`", f"{tokens:,}", *fractions])
    head = ("128 GPUs, ZeRO 3", "tokens a GPU", "gradients and parameters", "within layers")
    return to_markdown(head, rows)


def micro_batches() -> str:
    """Return the bubble and the memory of four stages of GPT-2 1558M over micro-batches."""
    rows = []
    for count in (4, 8, 16, 32):
        found = planned(f"--preset gpt2-1558M --pp 4 --batch 32 --micro-batches {count}")
        bubble = found["time"]["pipeline bubble"] / found["time"]["total"]
        total = f"{found['memory']['total'] / 2**30:.1f}"
        rows.append([str(count), percent(found["bubble_fraction"]), percent(bubble), total])
    return to_markdown(("micro-batches", "formula", "of the planned step", "GiB"), rows)
