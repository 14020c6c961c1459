"""Time of the first training step of a GPT-2, with empty and with filled kernel caches.

    python examples/bench/first_use.py

Each run is a new process. The time is that of forward, backward and the optimizer step, once
modules, weights and the GPU are ready: compiling or loading kernels, libraries that initialize on
first use, and the step itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from tensorgrad import Tensor, backend, optim
from tensorgrad.models.gpt2 import GPT2, PRESETS
from tensorgrad.nn import init


def first_step(preset: str, batch: int, context: int) -> dict[str, float]:
    """Return the seconds of the first step, and of the second."""
    init.normal_ = lambda parameter, *_: parameter.data.fill(0.01)  # weights play no role here
    config = replace(PRESETS[preset], context=context, vocab_multiple=128)
    model = GPT2(config).to("bfloat16").to("cuda")
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-4)
    rng = np.random.default_rng(0)
    tokens = backend.to_device(rng.integers(0, config.vocab_size, (batch, context)), "cuda")
    times = []
    for _ in range(2):
        backend.cupy.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(Tensor(tokens), tokens).backward()
        optimizer.step(max_norm=1.0)
        backend.cupy.cuda.runtime.deviceSynchronize()
        times.append(time.perf_counter() - start)
    return {"first": times[0], "second": times[1]}


def main() -> None:
    """Measure the first step with empty caches, then with the caches of that run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="gpt2-124M", choices=PRESETS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not backend.gpu_count():
        parser.error("no GPU was found")
    if options.child:
        print(json.dumps(first_step(options.preset, options.batch, options.context)))
        return
    with tempfile.TemporaryDirectory() as folder:
        ours, cupys = Path(folder) / "tensorgrad/kernels", Path(folder) / "cupy"
        environment = {**os.environ, "XDG_CACHE_HOME": folder, "CUPY_CACHE_DIR": str(cupys),
                       "CUDA_CACHE_PATH": f"{folder}/driver"}  # fmt: skip
        for caches in ("empty caches", "warm caches"):
            command = [sys.executable, __file__, "--child", *sys.argv[1:]]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            seconds = json.loads(done.stdout)
            print(
                f"{caches}: first step {seconds['first']:.2f} s, second {seconds['second']:.3f} s"
            )
        print(
            f"kernels: {len(list(ours.iterdir()))} of ours, "
            f"{len(list(cupys.glob('*.cubin')))} of CuPy's"
        )


if __name__ == "__main__":
    main()
