"""Generation with GPT-2: tokens a second, and GB/s of the attention kernel on long caches.

    python -m examples.bench.decode --json decode.json
    python -m examples.bench.decode --models gpt2-124M --batches 1 --no-peer

Random weights in bfloat16, prompts of 16 tokens, 256 new ones, greedy; the time of a whole call,
reading the prompt included, the best of three after one to warm up. Where transformers is
installed, its GPT-2 of the same size generates beside ours, eager and with --static compiled, with
a cache of fixed size. Needs a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tensorgrad import backend
from tensorgrad.bench.timing import Call, compare, random_array
from tensorgrad.dtypes import bfloat16
from tensorgrad.kernels import decode as decode_cuda
from tensorgrad.kernels.prepared import now
from tensorgrad.models.generation import generate_batch
from tensorgrad.models.generation.decoding_loop import Decoder
from tensorgrad.models.gpt2 import GPT2, PRESETS
from tensorgrad.nn import init
from tensorgrad.ops.sampling import Sampling, new_state

PROMPT, NEW = 16, 256
# Sequences, query heads, key heads, steps in the cache, width of a head.
CACHES = (
    (1, 12, 12, 1024, 64), (1, 12, 12, 32768, 64), (32, 12, 12, 1024, 64), (32, 12, 12, 8192, 64),
    (1, 32, 8, 32768, 128), (16, 32, 8, 8192, 128),
)  # fmt: skip


def random_model(name: str) -> GPT2:
    """Return a GPT-2 in bfloat16 with weights drawn on the GPU, which takes seconds less."""
    nothing: dict[str, Any] = dict.fromkeys(("normal_", "uniform_", "zeros_"), lambda *_: None)
    with patch.multiple(init, **nothing):
        model = GPT2(PRESETS[name])
    for number, (key, parameter) in enumerate(model.named_parameters()):
        scale = float("norm" in key and key.endswith("weight"))
        values = random_array(parameter.shape, seed=number) * 0.02 + scale
        parameter.data = values.astype(bfloat16)
    return model


def seconds(call: Callable[[], Any], repeats: int = 3) -> float:
    """Return the shortest time of some calls after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        backend.cupy.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        call()
        backend.cupy.cuda.runtime.deviceSynchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def generation(model: GPT2, batch: int) -> dict[str, float]:
    """Return how fast a model generates, and what a step costs the host and the GPU."""
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (batch, PROMPT))
    whole = seconds(lambda: generate_batch(model, prompts, NEW, temperature=0))
    state = new_state(list(prompts), NEW, range(batch), [], None, model.device)
    decoder = Decoder(model, list(prompts), state, Sampling(0.0))
    cupy = backend.cupy
    times, first, last = [], cupy.cuda.Event(), cupy.cuda.Event()
    for number in range(NEW):
        if number < 32:  # later launches wait where the driver's queue is full
            cupy.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        decoder.step()
        times.append(time.perf_counter() - start)
        if number == NEW // 2:
            cupy.cuda.runtime.deviceSynchronize()
            first.record()
    last.record()
    last.synchronize()
    return {
        "tokens/s": batch * NEW / whole,
        "ms a step": cupy.cuda.get_elapsed_time(first, last) / (NEW - NEW // 2 - 1),
        "ms of the host": 1e3 * float(np.median(times[:32])),
    }


def peer(name: str, batches: Sequence[int], static: bool) -> dict[int, dict[str, float]]:
    """Return tokens/s of transformers' GPT-2 for each batch."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    sizes = PRESETS[name]
    config = transformers.GPT2Config(n_layer=sizes.layers, n_head=sizes.heads, n_embd=sizes.width)
    with torch.device("cuda"):
        model = transformers.GPT2LMHeadModel(config).bfloat16().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    found: dict[int, dict[str, float]] = {}
    for batch in batches:
        prompts = torch.randint(0, sizes.vocab_size, (batch, PROMPT), device="cuda")
        options: dict[str, Any] = {
            "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False,
            "attention_mask": torch.ones_like(prompts),
        }  # fmt: skip
        kinds = {"eager": options}
        if static:
            kinds["static"] = {**options, "cache_implementation": "static"}
        found[batch] = {kind: _rate(model, prompts, given) for kind, given in kinds.items()}
    return found


def _rate(model: Any, prompts: Any, options: dict[str, Any]) -> float:
    return len(prompts) * NEW / seconds(lambda: model.generate(prompts, **options), 1)


def long_cache(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the time of attention against a cache, beside PyTorch's."""
    batch, heads, kv_heads, steps, width = shape
    qkv = random_array((batch, (heads + 2 * kv_heads) * width), bfloat16)
    moved = 2 * batch * kv_heads * steps * width * 2
    sets = max(1, int(2e8 // moved))  # so that what is read is not in the L2 cache
    keys, values = (
        random_array((sets, batch, kv_heads, steps, width), bfloat16, seed) for seed in (1, 2)
    )
    lengths = backend.cupy.full(batch, steps - 1, np.int32)
    workspace = decode_cuda.AttentionWorkspace(qkv, keys[0], values[0], None)
    y = backend.empty((batch, heads * width), bfloat16, like=qkv)

    def ours_of(i: int) -> None:
        cache = keys[i % sets], values[i % sets]
        decode_cuda.attention(now, y, qkv, *cache, lengths, workspace, None, None, False)

    calls: list[Call] = [ours_of]
    if importlib.util.find_spec("torch"):
        torch = importlib.import_module("torch")
        k, v = (torch.as_tensor(a.view("int16")).view(torch.bfloat16) for a in (keys, values))
        q = torch.randn((batch, heads, 1, width), device="cuda", dtype=torch.bfloat16)
        attention = torch.nn.functional.scaled_dot_product_attention
        gqa = heads != kv_heads
        calls.append(lambda i: attention(q, k[i % sets], v[i % sets], enable_gqa=gqa))
    ours, *others = compare(*calls)
    line: dict[str, Any] = {"cache": list(shape), "ms": ours, "GB/s": moved / ours / 1e6}
    return {**line, "torch ms": others[0] if others else None}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="*", default=["gpt2-124M", "gpt2-1558M"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32])
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--static", action="store_true", help="its compiled variant too")
    parser.add_argument("--no-caches", action="store_true", help="without the attention kernel")
    parser.add_argument("--json", type=Path, help="file to write")
    given = parser.parse_args(arguments)
    if not backend.gpu_count():
        parser.error("no GPU was found")
    gpu = backend.cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(gpu, flush=True)
    result: dict[str, Any] = {"gpu": gpu, "generation": [], "caches": []}
    with_peer = not given.no_peer and importlib.util.find_spec("transformers") is not None
    for name in given.models:
        model = random_model(name)
        lines = [{"model": name, "batch": b, **generation(model, b)} for b in given.batches]
        del model
        backend.cupy.get_default_memory_pool().free_all_blocks()
        theirs = peer(name, given.batches, given.static) if with_peer else {}
        for line in lines:
            line["transformers"] = theirs.get(line["batch"], {})
            text = f"{name:11} batch {line['batch']:3} {line['tokens/s']:8.0f} tokens/s "
            text += f"{line['ms a step']:7.3f} ms a step, host {line['ms of the host']:.3f} ms"
            for kind, rate in line["transformers"].items():
                text += f"  {kind} {rate:.0f} ({line['tokens/s'] / rate:.1f}x)"
            print(text, flush=True)
        result["generation"] += lines
    if not given.no_caches:
        result["caches"] = [long_cache(shape) for shape in CACHES]
        for line in result["caches"]:
            theirs_ms = f"  torch {line['torch ms']:.3f} ms" if line["torch ms"] else ""
            print(f"{line['cache']!s:28} {line['ms']:.3f} ms {line['GB/s']:5.0f} GB/s{theirs_ms}")
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
