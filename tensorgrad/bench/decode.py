"""Generation with GPT-2: tokens a second, and GB/s of the attention kernel on long caches.

    python -m examples.bench.decode --json decode.json
    python -m examples.bench.decode --no-peer --no-caches
    python -m examples.bench.decode --kernels --models gpt2-124M --batches 1

Random weights in bfloat16, prompts of 16 tokens, 256 new ones, greedy; the time of a whole call,
reading the prompt included, the best of three after two to warm up. "prefill" is a call with a
prompt of 1,024 tokens, for the first token after it. Where transformers is installed, its GPT-2 of
the same size generates beside ours, eager and with --static compiled, with a cache of fixed size.
--kernels prints instead what each kernel of a step takes. Needs a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import tensorgrad as tg
from examples.bench.timing import loaded
from tensorgrad import Tensor, backend, graph
from tensorgrad.bench.timing import Call, compare, random_array
from tensorgrad.dtypes import bfloat16, float32
from tensorgrad.files import write_json
from tensorgrad.gpu import GpuMonitor, clock_and_watts, clock_and_watts_text
from tensorgrad.models.generation import generate_batch
from tensorgrad.models.generation.decoding_loop import Decoder
from tensorgrad.models.gpt2 import GPT2, PRESETS
from tensorgrad.nn import evaluating, init
from tensorgrad.ops.decode import attend
from tensorgrad.ops.sampling import Sampling, extend, new_state

PROMPT, NEW, LONG_PROMPT = 16, 256, 1024
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
    """Return the shortest time of some calls after two, in which graphs are captured."""
    times = []
    for _ in range(repeats + 2):
        backend.cupy.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        call()
        backend.cupy.cuda.runtime.deviceSynchronize()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def generation(model: GPT2, batch: int) -> dict[str, float]:
    """Return how fast a model generates, and what a step costs the host and the GPU."""
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (batch, PROMPT))
    whole = seconds(lambda: generate_batch(model, prompts, NEW, temperature=0))
    with evaluating(model):
        step, host = step_times(model, prompts)
    return {"tokens/s": batch * NEW / whole, "ms a step": step, "ms of the host": host}


def step_times(model: GPT2, prompts: Any) -> tuple[float, float]:
    """Return the milliseconds of a captured step, of the GPU and of the host."""
    state = new_state(list(prompts), NEW, range(len(prompts)), [], None, model.device)
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
    steps = NEW - NEW // 2 - 1
    return cupy.cuda.get_elapsed_time(first, last) / steps, 1e3 * float(np.median(times[4:32]))


def prefill(model: GPT2, batch: int) -> float:
    """Return the milliseconds of a call that reads long prompts and writes one token after each."""
    prompts = np.random.default_rng(1).integers(0, model.vocab_size, (batch, LONG_PROMPT))
    return 1e3 * seconds(lambda: generate_batch(model, prompts, 1, temperature=0))


def kernel_times(model: GPT2, batch: int) -> dict[str, tuple[int, float]]:
    """Return how many launches of a kind a step has, and the microseconds of each.

    Those of all blocks, with their own weights, run one after the other as a CUDA graph.
    """
    width, cupy = model.config.width, backend.cupy
    x, hidden, qkv = (
        Tensor(random_array((batch, 1, columns), bfloat16))
        for columns in (width, 4 * width, 3 * width)
    )
    tokens = cupy.zeros((batch, 1), np.int64)
    lengths = cupy.full(batch, PROMPT + NEW // 2, np.int32)
    steps = PROMPT + NEW
    caches = model.new_cache(batch, steps)
    state = new_state([[1]] * batch, 4096, range(batch), [], None, model.device)
    logits = random_array((batch, model.vocab_size), float32)
    of_a_block: dict[str, Callable[[Any, Any], Any]] = {
        "norm": lambda block, cache: block.norm1(x),
        "add and norm": lambda block, cache: block.norm2.add(x, x),
        "qkv": lambda block, cache: block.attention.qkv(x),
        "attention": lambda block, cache: attend(
            qkv.data[:, 0], cache.arrays[0], cache.arrays[1], lengths, counters=cache.counters
        ),
        "proj": lambda block, cache: block.attention.proj(x),
        "up and GELU": lambda block, cache: tg.linear_gelu(x, *block.feed_forward.up.affine()),
        "down and residual": lambda block, cache: block.feed_forward.down(hidden, x),
    }
    of_a_step: dict[str, Callable[[], Any]] = {
        "embedding": lambda: model.embed(tokens),
        "logits": lambda: model.last_logits(x),
        "sampling": lambda: extend(state, logits, Sampling(0.0)),
    }
    layers = list(zip(model.blocks, caches, strict=True))
    with evaluating(model):
        found = {
            name: (len(layers), _graph_us([partial(call, *each) for each in layers]))
            for name, call in of_a_block.items()
        }
        return found | {name: (1, _graph_us([call])) for name, call in of_a_step.items()}


def _graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the microseconds of a launch, where calls of one each are repeated as a CUDA graph."""
    repeats = max(1, 48 // len(calls))

    def all_calls() -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    captured = graph.capture(all_calls)
    for _ in range(3):
        captured()
    first, last = backend.cupy.cuda.Event(), backend.cupy.cuda.Event()
    first.record()
    for _ in range(20):
        captured()
    last.record()
    last.synchronize()
    elapsed = backend.cupy.cuda.get_elapsed_time(first, last)
    return float(1e3 * elapsed / (20 * repeats * len(calls)))


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


def long_cache(shape: tuple[int, ...], monitor: GpuMonitor) -> dict[str, Any]:
    """Return the time of attention against a cache, beside PyTorch's, and its load and energy."""
    batch, heads, kv_heads, steps, width = shape
    qkv = random_array((batch, (heads + 2 * kv_heads) * width), bfloat16)
    moved = 2 * batch * kv_heads * steps * width * 2
    sets = max(1, int(2e8 // moved))  # so that what is read is not in the L2 cache
    keys, values = (
        random_array((sets, batch, kv_heads, steps, width), bfloat16, seed) for seed in (1, 2)
    )
    lengths = backend.cupy.full(batch, steps - 1, np.int32)
    counters = backend.cupy.zeros(batch * heads, np.uint32)

    def ours_of(i: int) -> None:
        attend(qkv, keys[i % sets], values[i % sets], lengths, counters=counters)

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
    line["torch ms"] = others[0] if others else None
    return line | loaded(ours_of, monitor, 0.5)


def print_kernels(models: Sequence[str], batches: Sequence[int]) -> None:
    """Print what the kernels of a step take, by kind."""
    for name in models:
        model = random_model(name)
        for batch in batches:
            found = kernel_times(model, batch)
            total = sum(count * us for count, us in found.values())
            print(f"{name} batch {batch}: {total / 1e3:.3f} ms a step")
            for kind, (count, us) in found.items():
                print(f"  {kind:22} {count:3} x {us:7.2f} us", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="*", default=["gpt2-124M", "gpt2-1558M"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32])
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--static", action="store_true", help="its compiled variant too")
    parser.add_argument("--no-caches", action="store_true", help="without the attention kernel")
    parser.add_argument("--kernels", action="store_true", help="microseconds of each kernel")
    parser.add_argument("--json", type=Path, help="file to write")
    given = parser.parse_args(arguments)
    if not backend.gpu_count():
        parser.error("no GPU was found")
    gpu = backend.cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(gpu, flush=True)
    if given.kernels:
        print_kernels(given.models, given.batches)
        return
    result: dict[str, Any] = {"gpu": gpu, "generation": [], "caches": []}
    with_peer = not given.no_peer and importlib.util.find_spec("transformers") is not None
    for name in given.models:
        model = random_model(name)
        lines = []
        for b in given.batches:
            with GpuMonitor(0, 0.2, busy=True) as monitor:
                line = {"model": name, "batch": b, **generation(model, b)}
                line |= clock_and_watts(monitor.take())
            lines.append({**line, "ms of prefill": prefill(model, b)})
        del model
        backend.cupy.get_default_memory_pool().free_all_blocks()
        theirs = peer(name, given.batches, given.static) if with_peer else {}
        for line in lines:
            line["transformers"] = theirs.get(line["batch"], {})
            text = f"{name:11} batch {line['batch']:3} {line['tokens/s']:8.0f} tokens/s "
            text += f"{line['ms a step']:7.3f} ms a step, host {line['ms of the host']:.3f} ms, "
            text += f"prefill {line['ms of prefill']:.2f} ms  {clock_and_watts_text(line)}"
            for kind, rate in line["transformers"].items():
                text += f"  {kind} {rate:.0f} ({line['tokens/s'] / rate:.1f}x)"
            print(text, flush=True)
        result["generation"] += lines
    if not given.no_caches:
        with GpuMonitor(0, 0.05) as monitor:
            for shape in CACHES:
                line = long_cache(shape, monitor)
                result["caches"].append(line)
                peer_ms = f"  torch {line['torch ms']:.3f} ms" if line["torch ms"] else ""
                text = f"{line['cache']!s:28} {line['ms']:.3f} ms {line['GB/s']:5.0f} GB/s{peer_ms}"
                print(f"{text}  {clock_and_watts_text(line)}", flush=True)
    if given.json is not None:
        write_json(given.json, result, 1)


if __name__ == "__main__":
    main()
