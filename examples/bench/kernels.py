"""GPU kernels beside PyTorch: time, GB/s or TFLOP/s, ratio, and fraction of a copy's rate.

    python -m examples.bench.kernels norm softmax --json kernels.json

GB/s counts each input read once and each output written once. The copy is one on the device,
measured in the same run. PyTorch is measured where it is installed; `--compiled` adds
torch.compile, which takes seconds a line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from examples.bench.timing import Job, copy_ceiling
from tensorgrad import backend
from tensorgrad.bench.timing import compare

FAMILIES = (
    "norm", "softmax", "reduce", "fused", "cross_entropy", "optimizers", "elementwise", "dropout",
    "embedding", "matmul", "attention",
)  # fmt: skip


def measure(job: Job, ceiling: float, compiled: bool) -> dict[str, Any]:
    """Return the result of a job, one line of the table."""
    scale = 1e6 if job.unit == "GB/s" else 1e9
    names = [name for name in job.peers if compiled or name != "compiled"]
    ours, *others = compare(job.ours, *(job.peers[name] for name in names))
    peers = dict(zip(names, others, strict=True))
    line: dict[str, Any] = {"name": job.name, "size": job.size, "ms": ours, "unit": job.unit}
    line["rate"] = job.amount / ours / scale
    if job.unit == "GB/s":
        line["fraction of copy"] = line["rate"] / ceiling
    line["peers"] = {
        name: {"ms": ms, "rate": job.amount / ms / scale, "ratio": ms / ours}
        for name, ms in peers.items()
    }
    return line


def show(line: dict[str, Any]) -> None:
    """Print one line."""
    fraction = line.get("fraction of copy")
    text = f"{line['name']:26} {line['size']:28} {line['ms']:8.3f} ms {line['rate']:7.0f} "
    text += "     " if fraction is None else f"{fraction:5.2f}"
    for name, peer in line["peers"].items():
        text += f"  {name} {peer['ms']:.3f} ms ({peer['ratio']:.2f}x)"
    print(text, flush=True)


def main() -> None:
    """Measure the families named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", default=FAMILIES, help=", ".join(FAMILIES))
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--compiled", action="store_true", help="measure torch.compile too")
    options = parser.parse_args()
    if not backend.gpu_count():
        parser.error("no GPU was found")
    torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    ceiling = copy_ceiling()
    gpu = backend.cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"{gpu}, copy {ceiling:.0f} GB/s, PyTorch {torch.__version__ if torch else 'missing'}")
    print(f"{'':26} {'':28} {'ours':>11} {'rate':>7} {'copy':>5}")
    lines = []
    for family in options.families:
        for job in importlib.import_module(f"examples.bench.{family}").jobs(torch):
            lines.append(measure(job, ceiling, options.compiled))
            show(lines[-1])
            del job
            backend.cupy.get_default_memory_pool().free_all_blocks()
            if torch is not None:
                torch.cuda.empty_cache()
    if options.json is not None:
        result = {"gpu": gpu, "copy GB/s": ceiling, "lines": lines}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
