"""`tensorgrad bench decode`: generation with GPT-2, beside transformers', and its kernels.

Random weights in bfloat16, prompts of 16 tokens, 256 new ones, greedy; the time of a whole call,
reading the prompt included, the best of three after two to warm up. "mbu" (memory bandwidth
utilization) is the rate at which the steps of that call read weights and caches, against the data
sheet of the GPU; see `LanguageModel.step_bytes`. "prefill" is a call with a prompt of 1,024 tokens,
for the first token after it. The peer is transformers' GPT-2 of the same size, eager ("peer") and
compiled with a cache of fixed size ("static_peer"). DECODE_KERNELS has what each kernel of a step
takes: those of all blocks, with their own weights, one after the other as a CUDA graph. Needs a
GPU. Tests: tests/bench/test_small.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from tensorgrad import graph
from tensorgrad.bench import options
from tensorgrad.bench.memory import release
from tensorgrad.bench.pictures import bars
from tensorgrad.bench.sweep import Case, Row, Sweep, together
from tensorgrad.bench.timing import host_seconds, milliseconds_on, random_array, seconds_of
from tensorgrad.core import backend
from tensorgrad.core.dtypes import bfloat16, float32
from tensorgrad.core.tensor import Tensor
from tensorgrad.kernels.gpu import GpuMonitor, clock_and_watts, memory_bandwidth, name_of
from tensorgrad.models.generation import generate_batch
from tensorgrad.models.generation.decoding_loop import Decoder
from tensorgrad.models.gpt2 import GPT2, PRESETS
from tensorgrad.nn import evaluating, init
from tensorgrad.ops.decode import attend
from tensorgrad.ops.linear import linear_gelu
from tensorgrad.ops.sampling import Sampling, extend, new_state

PROMPT, NEW, LONG_PROMPT = 16, 256, 1024
KERNELS = (
    *("norm", "add and norm", "qkv", "attention", "proj", "up and GELU", "down and residual"),
    *("embedding", "logits", "sampling"),
)


def random_model(name: str) -> GPT2:
    """Return a GPT-2 in bfloat16 with weights drawn on the GPU, which takes seconds less."""
    with init.without_values():
        model = GPT2(PRESETS[name])
    for number, (key, parameter) in enumerate(model.named_parameters()):
        scale = float("norm" in key and key.endswith("weight"))
        values = random_array(parameter.shape, seed=number) * 0.02 + scale
        parameter.data = values.astype(bfloat16)
    return model


def best_seconds(call: Callable[[], Any], repeats: int = 3) -> float:
    """Return the shortest time of some calls after two, in which graphs are captured."""
    return min([seconds_of(call, "cuda") for _ in range(repeats + 2)][2:])


def decode_sweep(
    *,
    models: tuple[Literal[tuple(PRESETS)], ...] = ("gpt2-124M", "gpt2-1558M"),  # type: ignore[valid-type]
    batches: tuple[int, ...] = (1, 32),
    peer: options.Peer = None,
    static: bool = False,
    kernels: bool = False,
) -> Iterator[Sweep]:
    """Measure greedy generation on a GPU: tokens a second, beside transformers.

    Args:
        models: presets, with random weights in bfloat16.
        batches: sequences.
        static: measure transformers compiled too, with a cache of fixed size.
        kernels: measure what each kernel of a step takes instead.
    """
    options.check_gpu("decode")
    shared: Row = {"model": models, "batch": batches, "dtype": "bfloat16"}
    if kernels:
        measure = together("kernel", measure_decode_kernels)
        results: tuple[str, ...] = "launches", "us", "step_us"
        names = "kernel", "model", "batch"
        draw = bars("Kernels of a decoding step", "us", names, results[2:])
        cases = options.crossed(**shared, kernel=KERNELS)
        cases = [{"kernel": case["kernel"], **case} for case in cases]  # the first column
        yield Sweep("decode-kernels", cases, measure, results, draw, "cuda")
        return
    peers = ("eager", "static")[: 1 + static] if options.is_measured(peer, "transformers") else ()
    cases = options.crossed(**shared, prompt=PROMPT, new=NEW, peers=" ".join(peers))
    rates = "tokens_per_second", "peer_tokens_per_second", "static_peer_tokens_per_second"
    times = "step_ms", "mbu", "host_ms", "prefill_ms"
    results = *rates, *times, "peer_ratio", "static_peer_ratio"
    draw = bars("Greedy generation", "tokens/s", ("model", "batch"), rates)
    yield Sweep("decode", cases, measure_decode, results, draw, "cuda")


def measure_decode(case: Case) -> Row:
    """Return how fast a model generates, what a step costs the host and the GPU, and the peers."""
    row = _generation(random_model(case["model"]), case["batch"])
    for kind in case["peers"].split():
        release()
        prefix = "static_peer" if kind == "static" else "peer"
        rate = peer_rate(case["model"], case["batch"], kind == "static")
        row[f"{prefix}_tokens_per_second"] = rate
        row[f"{prefix}_ratio"] = row["tokens_per_second"] / rate
    return row


def _generation(model: GPT2, batch: int) -> Row:
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (batch, PROMPT))
    with GpuMonitor(backend.gpu_index(model.device), 0.2, busy=True) as monitor:
        whole = best_seconds(lambda: generate_batch(model, prompts, NEW, temperature=0))
        with evaluating(model):
            step, host = step_times(model, prompts)
        load = clock_and_watts(monitor.take())
    row: Row = {"tokens_per_second": batch * NEW / whole, "step_ms": step, "host_ms": host, **load}
    row["mbu"] = utilization(
        model, batch, NEW / whole, name_of(backend.gpu_index(model.device) or 0)
    )
    long = np.random.default_rng(1).integers(0, model.vocab_size, (batch, LONG_PROMPT))
    first = best_seconds(lambda: generate_batch(model, long, 1, temperature=0))  # token after each
    return row | {"prefill_ms": 1e3 * first}


def utilization(model: GPT2, batch: int, steps: float, gpu: str) -> float | None:
    """Return the MBU of so many steps a second, memory bandwidth utilization from 0 to 1.

    None where the bandwidth of a GPU of this name is not known.
    """
    peak = memory_bandwidth(gpu)
    return None if peak is None else model.step_bytes(batch, PROMPT + NEW / 2) * steps / peak


def step_times(model: GPT2, prompts: Any) -> tuple[float, float]:
    """Return the milliseconds of a captured step, of the GPU and of the host."""
    state = new_state(list(prompts), NEW, range(len(prompts)), [], None, model.device)
    decoder = Decoder(model, list(prompts), state, Sampling(0.0))
    cupy = backend.cupy
    times, first, last = [], cupy.cuda.Event(), cupy.cuda.Event()
    for number in range(NEW):
        if number < 32:  # later launches wait where the driver's queue is full
            times.append(host_seconds(decoder.step, "cuda"))
        else:
            decoder.step()
        if number == NEW // 2:
            cupy.cuda.runtime.deviceSynchronize()
            first.record()
    last.record()
    last.synchronize()
    steps = NEW - NEW // 2 - 1
    return cupy.cuda.get_elapsed_time(first, last) / steps, 1e3 * float(np.median(times[4:]))


def measure_decode_kernels(case: Case) -> dict[str, Row]:
    """Return how many launches of each of KERNELS a step has, and the microseconds of one."""
    batch, model = case["batch"], random_model(case["model"])
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
        "up and GELU": lambda block, cache: linear_gelu(x, *block.feed_forward.up.affine()),
        "down and residual": lambda block, cache: block.feed_forward.down(hidden, x),
    }
    of_a_step: dict[str, Callable[[], Any]] = {
        "embedding": lambda: model.embed(tokens),
        "logits": lambda: model.last_logits(x),
        "sampling": lambda: extend(state, logits, Sampling(0.0)),
    }
    layers = list(zip(model.blocks, caches, strict=True))
    calls: dict[str, list[Callable[[], Any]]]
    calls = {kind: [partial(call, *layer) for layer in layers] for kind, call in of_a_block.items()}
    calls |= {kind: [call] for kind, call in of_a_step.items()}
    found: dict[str, Row] = {}
    with evaluating(model):
        for kind, launched in calls.items():
            us = _graph_us(launched)
            count = len(launched)
            found[kind] = {"launches": count, "us": us, "step_us": count * us}
    return found


def _graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the microseconds of a launch, where calls of one each are repeated as a CUDA graph."""
    repeats = max(1, 48 // len(calls))

    def all_calls() -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    captured = graph.capture(all_calls)
    captured()  # the next call captures
    return 1e3 * milliseconds_on("cuda", lambda _: captured()) / (repeats * len(calls))


def peer_rate(name: str, batch: int, static: bool) -> float:
    """Return tokens/s of transformers' GPT-2."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    sizes = PRESETS[name]
    config = transformers.GPT2Config(n_layer=sizes.layers, n_head=sizes.heads, n_embd=sizes.width)
    with torch.device("cuda"):
        model = transformers.GPT2LMHeadModel(config).bfloat16().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts = torch.randint(0, sizes.vocab_size, (batch, PROMPT), device="cuda")
    given: dict[str, Any] = {
        "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False,
        "attention_mask": torch.ones_like(prompts),
    }  # fmt: skip
    if static:
        given["cache_implementation"] = "static"
    return batch * NEW / best_seconds(lambda: model.generate(prompts, **given), 1)
