"""GPU kernels beside PyTorch: time, GB/s or TFLOP/s, ratio, and fraction of a copy's rate.

    python -m examples.bench.kernels norm softmax --json kernels.json

GB/s counts each input read once and each output written once. The copy is one on the device,
measured in the same run. PyTorch is measured where it is installed; `--compiled` adds
torch.compile, which takes seconds a line. Afterwards ours is repeated for --load seconds, which
gives the GPU's clock and power and the energy of a call: where the GPU is at its limit of power,
only less energy is less time.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from examples.bench.timing import Job, copy_ceiling, loaded
from tensorgrad import backend
from tensorgrad.bench.timing import compare
from tensorgrad.files import write_json
from tensorgrad.gpu import GpuMonitor, clock_and_watts_text

FAMILIES = (
    "norm", "softmax", "reduce", "fused", "cross_entropy", "optimizers", "elementwise", "dropout",
    "embedding", "matmul", "attention",
)  # fmt: skip


def measure(
    job: Job, ceiling: float, compiled: bool, monitor: GpuMonitor, load: float
) -> dict[str, Any]:
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
    return line | loaded(job.ours, monitor, load) if load else line


def show(line: dict[str, Any]) -> None:
    """Print one line."""
    fraction = line.get("fraction of copy")
    text = f"{line['name']:26} {line['size']:28} {line['ms']:8.3f} ms {line['rate']:7.0f} "
    text += "     " if fraction is None else f"{fraction:5.2f}"
    for name, peer in line["peers"].items():
        text += f"  {name} {peer['ms']:.3f} ms ({peer['ratio']:.2f}x)"
    load = clock_and_watts_text(line)
    energy = f", {line['mJ']:.3g} mJ" if "mJ" in line else ""
    print(f"{text}  {load}{energy}".rstrip(), flush=True)


def main() -> None:
    """Measure the families named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", default=FAMILIES, help=", ".join(FAMILIES))
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--compiled", action="store_true", help="measure torch.compile too")
    parser.add_argument(
        "--load", type=float, default=1.0, help="seconds of load for clock and power (default: 1)"
    )
    options = parser.parse_args()
    if options.load < 0:
        parser.error(f"--load: got {options.load}, expected 0 or more")
    if not backend.gpu_count():
        parser.error("no GPU was found")
    torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    ceiling = copy_ceiling()
    gpu = backend.cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"{gpu}, copy {ceiling:.0f} GB/s, PyTorch {torch.__version__ if torch else 'missing'}")
    print(f"{'':26} {'':28} {'ours':>11} {'rate':>7} {'copy':>5}")
    lines: list[dict[str, Any]] = []
    with GpuMonitor(0, 0.05) as monitor:
        for family in options.families:
            for job in importlib.import_module(f"examples.bench.{family}").jobs(torch):
                lines.append(measure(job, ceiling, options.compiled, monitor, options.load))
                show(lines[-1])
                if options.json is not None:  # after each line: all of them take minutes
                    result = {"gpu": gpu, "copy GB/s": ceiling, "lines": lines}
                    write_json(options.json, result, 1)
                del job
                backend.cupy.get_default_memory_pool().free_all_blocks()
                if torch is not None:
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
