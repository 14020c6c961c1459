from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2, PRESETS, GPT2Config
from tensorgrad.models.transformer_lm import TransformerLMConfig
from tensorgrad.optim import AdamW
from tensorgrad.parallel import Mesh
from tensorgrad.parallel.planning.costs import Costs
from tensorgrad.parallel.planning.estimate import (
    Estimate,
    Speeds,
    Traffic,
    TrainingJob,
    estimate,
    stage_memory,
)
from tensorgrad.parallel.planning.plan import (
    bytes_of,
    describe,
    divisors,
    fit,
    table,
    to_json,
    usual_micro_batches,
)
from tensorgrad.parallel.shards import ShardedParameters
from tensorgrad.parallel.units import find_units
from tensorgrad.train.settings import OPTIMIZERS, TrainSettings

LARGE = replace(PRESETS["gpt2-1558M"], vocab_multiple=128)
SMALL = GPT2Config(vocab_size=512, context=64, layers=8, heads=8, width=64)
COUNT = LARGE.parameters


def test_one_gpu_holds_sixteen_bytes_a_parameter_and_activations() -> None:
    found = estimate(TrainingJob(LARGE, Mesh(), 8))
    assert found.memory["parameters"] == 2 * COUNT
    assert found.memory["gradients"] == 4 * COUNT
    assert found.memory["optimizer state"] == 10 * COUNT
    tokens, width = 8 * 1024, 1600
    each = 12 * width * 2 + 4 * width + 16 + 4 * 25
    assert found.memory["activations"] == 48 * tokens * each
    assert found.memory["tokens, loss and head"] == tokens * (16 + 6 * width + 8) + (
        4 * LARGE.rows * width
    )
    assert found.memory["16-bit copies of weights"] == 0
    assert found.memory["messages between stages"] == 0
    assert found.memory["work"] == tokens * LARGE.rows * 2  # logits
    first = stage_memory(TrainingJob(LARGE, Mesh(pp=2), 8), 0)  # without them
    assert first["work"] == 2 * 7 * width * tokens
    assert found.bytes == sum(found.memory.values())
    assert found.sent == []
    assert found.seconds == found.time["compute"] + found.time["optimizer"]
    full = estimate(TrainingJob(LARGE, Mesh(), 8, dtype="float32"))
    assert full.memory["parameters"] == 4 * COUNT
    assert full.memory["optimizer state"] == 8 * COUNT
    assert estimate(TrainingJob(LARGE, Mesh(), 8, dtype="tf32")).memory == full.memory


def test_bfloat16_gradients_take_half_the_memory_and_are_of_one_gpu() -> None:
    wide = TrainingJob(LARGE, Mesh(), 8)
    job = replace(wide, grad_dtype="bfloat16")
    found, before = estimate(job), estimate(wide)
    assert found.memory == before.memory | {"gradients": 2 * COUNT}
    assert found.time["optimizer"] == before.time["optimizer"] * 28 / 32
    assert fit(job, found.bytes, zero=0).job.mesh == Mesh()
    with pytest.raises(ArgumentError, match="not enough on up to 1, expected"):
        fit(job, 10 * COUNT)
    expected = "expected float32, or bfloat16 with bfloat16-parameters on one GPU"
    for changed in ({"mesh": Mesh(2)}, {"dtype": "bfloat16"}, {"grad_dtype": "float16"}):
        with pytest.raises(ArgumentError, match=f"plan: grad_dtype is .*, {expected}"):
            replace(job, **changed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_copies_the_weights_of_each_micro_batch_in_flight(dtype: str) -> None:
    matrices = 12 * 1600**2
    found = stage_memory(TrainingJob(LARGE, Mesh(), 8, 2, dtype=dtype), 0)
    assert found["parameters"] == 4 * COUNT
    assert found["optimizer state"] == 8 * COUNT
    head = LARGE.rows * 1600
    assert found["16-bit copies of weights"] == 2 * (48 * matrices + head)
    tokens = 4 * 1024
    each = 2 * 1600 * 4 + 14 * 1600 * 2 + 16 + 4 * 25  # inputs of norms are float32
    assert found["activations"] == 48 * tokens * each
    first, last = (
        stage_memory(TrainingJob(LARGE, Mesh(pp=2), 8, 8, dtype=dtype), stage) for stage in (0, 1)
    )
    assert first["16-bit copies of weights"] == 2 * 2 * 25 * matrices  # two are in flight
    assert last["16-bit copies of weights"] == 2 * (23 * matrices + head)
    assert first["messages between stages"] == 4 * 1024 * 1600 * 4


def test_autocast_sends_float32_and_sums_of_layers_in_16_bits() -> None:
    def sent(dtype: str, mesh: Mesh, zero: int = 0) -> dict[str, float]:
        found = estimate(TrainingJob(LARGE, mesh, 32, zero=zero, dtype=dtype))
        return {each.what: each.bytes for each in found.sent}

    data = Mesh(4)
    assert sent("bfloat16", data, 1) == sent("float32", data, 1)
    wide, mixed, narrow = (
        sum(sent(dtype, Mesh(tp=4)).values())
        for dtype in ("float32", "bfloat16", "bfloat16-parameters")
    )
    assert wide == 2 * narrow
    ends, inside = 2, 2 * 48  # calls; inside also in backward
    assert mixed / narrow == pytest.approx((2 * ends + 3 * inside) / (ends + 2 * inside))


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "state"),
    [(0, 1, 1, 1), (1, 1, 1, 1 / 4), (2, 1, None, 1 / 4), (3, None, None, 1 / 4)],
)
def test_zero_divides_what_its_stage_says(
    zero: int, parameters: float | None, gradients: float | None, state: float
) -> None:
    block = 12 * 1600**2 + 13 * 1600
    shared = COUNT - 48 * block + 2 * block + 48 * block / 4  # the root, two slots, a quarter
    found = stage_memory(TrainingJob(LARGE, Mesh(4), 32, zero=zero), 0)
    assert found["parameters"] == 2 * (shared if parameters is None else COUNT)
    assert found["gradients"] == 4 * (shared if gradients is None else COUNT)
    assert found["optimizer state"] == 10 * COUNT * state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_state_that_is_planned(name: str) -> None:
    for dtype in ("float32", "bfloat16-parameters"):
        model = GPT2(SMALL).to(TrainSettings(dtype=dtype).parameter_dtype)
        optimizer = TrainSettings(optimizer_name=name).optimizer(model.named_parameters())
        found = sum(each.array.nbytes for each in optimizer.state_shards())
        job = TrainingJob(SMALL, Mesh(), 8, dtype=dtype, optimizer=name)
        assert stage_memory(job, 0)["optimizer state"] == found


def test_what_an_optimizer_sends_and_computes() -> None:
    def sent(optimizer: str, mesh: Mesh, zero: int = 0) -> dict[str, float]:
        found = estimate(TrainingJob(LARGE, mesh, 32, zero=zero, optimizer=optimizer))
        same = {each.what for each in estimate(TrainingJob(LARGE, mesh, 32, zero=zero)).sent}
        return {each.what: each.bytes for each in found.sent if each.what not in same}

    matrices = 48 * 12 * 1600**2
    for zero in (1, 2, 3):
        assert sent("muon", Mesh(4), zero) == {"momentum, all-gather": 3 / 4 * 4 * matrices}
    for optimizer in ("muon", "adafactor"):
        what = "matrices of updates, all-reduce"
        assert sent(optimizer, Mesh(tp=5)) == {what: 2 * 4 / 5 * 4 * matrices}
    for optimizer in ("lion", "sgd"):
        assert sent(optimizer, Mesh(4), 1) == sent(optimizer, Mesh(tp=5)) == {}
    times = {
        name: estimate(TrainingJob(LARGE, optimizer=name)).time["optimizer"] for name in OPTIMIZERS
    }
    assert times["lion"] == times["sgd"] == times["adamw"] * 24 / 32
    flops = 48 * 5 * 1600**3 * (4 * 3 + 2 + 6 + 2 * (4 * 4 + 2))
    job = TrainingJob(LARGE, optimizer="muon")
    moved = 100 * matrices + 32 * (COUNT - matrices)
    assert job.costs.moved_bytes("muon", job.numbers(0), True, True) == moved
    seconds = moved / Speeds().memory_bandwidth + flops / 400e12 * 989.4 / 66.9
    assert times["muon"] == pytest.approx(seconds, rel=1e-6)
    assert times["adafactor"] == 120 * COUNT / Speeds().memory_bandwidth
    with pytest.raises(ArgumentError, match="plan: optimizer is 'adam', expected one of adamw, m"):
        TrainingJob(LARGE, optimizer="adam")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_takes_the_memory_that_is_planned(zero: int) -> None:
    model = GPT2(SMALL)
    parameters = dict(model.named_parameters())
    _, units = find_units(model, parameters)
    groups = units if zero > 1 else dict.fromkeys(parameters)
    flat = ShardedParameters(parameters.items(), 1, 4, zero, groups)
    optimizer = AdamW(flat)
    planned = stage_memory(TrainingJob(SMALL, Mesh(4), 8, zero=zero, dtype="float32"), 0)
    for what, arrays in (
        ("parameters", flat.memory),
        ("gradients", flat.gradient_memory),
        ("optimizer state", optimizer.state.values()),
    ):
        found = sum(array.nbytes for array in arrays)
        assert planned[what] <= found <= 1.01 * planned[what], what  # and gaps for alignment


def test_bytes_of_gradients_are_those_of_a_ring() -> None:
    def sent(zero: int, micro_batches: int = 1) -> dict[str, float]:
        found = estimate(TrainingJob(LARGE, Mesh(4), 32, micro_batches, zero=zero))
        return {each.what: each.bytes for each in found.sent}

    fraction = 3 / 4
    assert sent(0) == {"gradients, all-reduce": 2 * fraction * 4 * COUNT}
    assert sent(1) == {
        "gradients, reduce-scatter": fraction * 4 * COUNT,
        "parameters, all-gather": fraction * 2 * COUNT,
    }
    assert sent(2) == sent(1)
    block = 12 * 1600**2 + 13 * 1600
    root = COUNT - 48 * block
    assert sent(2, 8)["gradients, reduce-scatter"] == fraction * 4 * (8 * 48 * block + root)
    assert sent(3)["parameters, all-gather"] == fraction * 2 * (94 * block + root)


def test_tensor_parallel_layers_send_activations() -> None:
    config = replace(SMALL, width=64)
    found = estimate(TrainingJob(config, Mesh(1, 1, 4), 2, 2))
    (sent,) = found.sent
    activation = 64 * 64 * 2  # C, tokens, bytes
    assert sent.calls == 2 * (4 * 8 + 2)
    assert sent.bytes == sent.calls * 2 * 3 / 4 * activation
    assert found.time["send within layers"] == sent.seconds
    rows = estimate(TrainingJob(config, Mesh(1, 1, 4), 2, 2, sequence=True))
    assert rows.sent[0].bytes == sent.bytes
    assert rows.memory["activations"] < found.memory["activations"]


def test_a_pipeline_keeps_micro_batches_in_flight_and_has_a_bubble() -> None:
    def of(schedule: str, micro_batches: int, chunks: int = 1) -> Estimate:
        return estimate(TrainingJob(SMALL, Mesh(1, 4), 32, micro_batches, 0, schedule, chunks))

    whole = stage_memory(TrainingJob(SMALL, Mesh(), 32, 8), 0)["activations"] / 8  # a block's
    one = of("1f1b", 8)
    assert one.bubble_fraction == 3 / 11
    assert one.stage == 0
    assert one.memory["activations"] == 4 * 2 * whole  # micro-batches, blocks
    assert of("gpipe", 8).memory["activations"] == 8 * 2 * whole
    assert of("interleaved", 8, 2).bubble_fraction == 3 / 19
    assert of("interleaved", 8, 2).memory["activations"] == 11 * whole
    assert one.time["pipeline bubble"] == pytest.approx(one.time["compute"] * 3 / 8)
    between = {each.what: each for each in one.sent}["activations and gradients"]
    assert between.calls in (8, 16)
    assert between.bytes == between.calls * 64 * 4 * 64 * 2
    # Each of GPipe's micro-batches keeps a gradient of the head until it goes back.
    last = stage_memory(TrainingJob(SMALL, Mesh(1, 4), 32, 8, 0, "gpipe"), 3)
    first = stage_memory(TrainingJob(SMALL, Mesh(1, 4), 32, 8, 0, "1f1b"), 3)
    assert last["tokens, loss and head"] == 8 * first["tokens, loss and head"]


def test_slow_networks_and_hosts_take_longer() -> None:
    job = TrainingJob(LARGE, Mesh(8, 1, 1), 64)
    inside, outside = estimate(job), estimate(job, Speeds(gpus_per_host=4))
    assert outside.sent[0].seconds > 5 * inside.sent[0].seconds
    assert outside.time["compute"] == inside.time["compute"]
    assert estimate(job, Speeds(flops=800e12)).time["compute"] == inside.time["compute"] / 2


def test_buckets_of_any_size_above_0_are_planned() -> None:
    job = TrainingJob(LARGE, Mesh(8), 64)
    assert estimate(job, bucket=1).seconds > estimate(job).seconds
    for bucket in (0, -1.0):
        with pytest.raises(ArgumentError, match=rf"plan: bucket is {bucket} bytes, expected more"):
            estimate(job, bucket=bucket)


def test_overlap_hides_what_a_pipeline_does_not() -> None:
    alone = estimate(TrainingJob(LARGE, Mesh(8), 64))
    assert alone.sent[0].exposed < 0.1 * alone.sent[0].seconds
    stages = estimate(TrainingJob(LARGE, Mesh(4, 2), 64, 8))
    gradients = next(each for each in stages.sent if each.axis == "dp")
    assert gradients.exposed == gradients.seconds


@pytest.mark.parametrize("gib", [79, 15, 8, 5])
def test_the_smallest_mesh_that_fits(gib: int) -> None:
    job = TrainingJob(LARGE, batch=8)
    found = fit(job, gib * 2**30)
    assert found.bytes <= gib * 2**30
    size = found.job.mesh.size
    assert (size == 1) == (gib > 29)
    smaller = [
        replace(job, mesh=Mesh(dp, pp), micro_batches=micro_batches, zero=zero)
        for dp in (1, 2, 4, 8)
        for pp in range(1, 49)
        for micro_batches in (1, 2, 4, 8)
        for zero in range(4)
        if dp * pp < size and 8 % (dp * micro_batches) == 0 and (pp == 1 or zero < 2)
    ]
    assert all(estimate(each).bytes > gib * 2**30 for each in smaller)
    only = fit(job, 15 * 2**30, zero=0)
    assert only.job.zero == 0


def test_gpipe_fits_on_fewer_gpus_with_fewer_micro_batches() -> None:
    """Each micro-batch keeps a gradient of the head: with the most, 38 MiB take 24 GPUs."""
    config = GPT2Config(vocab_size=8192, context=64, layers=8, heads=1, width=128)
    found = fit(TrainingJob(config, batch=16, schedule="gpipe"), 38 * 2**20, zero=0)
    assert found.job.mesh == Mesh(2, 3)


def test_without_a_pipeline_gpipe_remembers_one_micro_batch() -> None:
    assert stage_memory(TrainingJob(SMALL, Mesh(2), 32, 8, 0, "gpipe"), 0) == stage_memory(
        TrainingJob(SMALL, Mesh(2), 32, 8), 0
    )


def test_a_job_that_fits_on_no_mesh_is_an_error() -> None:
    with pytest.raises(
        ArgumentError, match=r"1\.0 GiB a GPU are not enough on up to 2, expected 1"
    ):
        fit(TrainingJob(LARGE), 2**30, most=2)
    whole = replace(LARGE, heads=1)  # its layers cannot be shared
    least = min(estimate(TrainingJob(whole, Mesh(1, pp), 1)).bytes for pp in (1, 2))
    with pytest.raises(ArgumentError, match=rf"expected {least / 2**30:.1f} GiB .* dp 1 x pp 2 "):
        fit(TrainingJob(whole, batch=1), 2**30, most=2)


def test_a_job_is_described_in_a_line() -> None:
    assert describe(TrainingJob(SMALL, batch=8)) == (
        "dp 1 x pp 1 x tp 1, batch 8 = 1 dp x 1 micro-batches x 8 sequences"
    )
    job = TrainingJob(SMALL, Mesh(2, 2), 32, 4, 1, "interleaved", 2)
    assert describe(job) == (
        "dp 2 x pp 2 x tp 1, ZeRO 1, interleaved with 2 parts on a stage, "
        "batch 32 = 2 dp x 4 micro-batches x 4 sequences"
    )


def test_usual_micro_batches_divide_the_batch() -> None:
    for (batch, dp, pp), count in {
        (8, 1, 1): 1, (32, 2, 2): 8, (32, 2, 4): 16, (24, 1, 4): 12, (7, 1, 2): 7, (10, 1, 4): 10,
        (11, 1, 2): 1, (9, 2, 2): 1,
    }.items():  # fmt: skip
        assert usual_micro_batches(batch, dp, pp) == count


def test_plans_to_16384_gpus_take_less_than_two_seconds() -> None:
    huge = replace(LARGE, layers=96, width=12288, heads=96)

    def estimate_one() -> None:
        assert estimate(TrainingJob(huge, Mesh(128, 16, 8), 4096, 32, 1)).job.mesh.size == 16384

    def try_all() -> None:
        with pytest.raises(ArgumentError, match="not enough on up to 16,384"):
            fit(TrainingJob(huge, batch=4096), 2**28)

    gc.collect()
    gc.freeze()  # collections would visit what thousands of other tests have left
    for plan in (estimate_one, try_all):
        assert _seconds(plan) < 2
    gc.unfreeze()


def _seconds(run: Callable[[], None]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def test_sizes_in_bytes() -> None:
    assert bytes_of("80GiB") == 80 * 2**30
    assert bytes_of("80 GB") == 80e9
    assert bytes_of("1.5e9B") == 1.5e9
    assert bytes_of("1.GiB") == 2**30


INTERLEAVED: dict[str, Any] = {"schedule": "interleaved", "chunks": 2, "mesh": Mesh(1, 2)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"zero": 4}, "zero is 4, expected 0 to 3"),
        ({"zero": -1}, "zero is -1, expected 0 to 3"),
        ({"batch": 0}, "batch is 0, expected 1 or more"),
        ({"micro_batches": 0}, "micro_batches is 0, expected 1 or more"),
        ({"dtype": "float8"}, "dtype is 'float8', expected one of float32, tf32, bfloat16, bf"),
        ({"schedule": "none"}, "schedule is 'none', expected one of model-parallel, gpipe, 1f1b"),
        ({"chunks": 0}, "chunks is 0, expected 1 or more"),
        ({"chunks": 2}, "chunks is 2 with schedule '1f1b', expected 1; more are for 'interleaved'"),
        ({"mesh": Mesh(3)}, r"batch is 8 sequences, .* multiple of dp \* micro_batches, 3 \* 1$"),
        ({"mesh": Mesh(2), "micro_batches": 8}, r"batch is 8 .* dp \* micro_batches, 2 \* 8$"),
        (INTERLEAVED, "micro_batches is 1, expected a multiple of the 2 stages for interleaved"),
        ({"sequence": True, "mesh": Mesh(tp=5)}, "context is 64, expected a multiple of tp, 5"),
        ({"mesh": Mesh(pp=9)}, r"pp \* chunks is 9, expected 1 to the 8 layers"),
        ({"config": 3}, "config is a int, expected the Config of a LanguageModel"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_errors(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"plan: .*{message}"):
        TrainingJob(**{"config": SMALL} | changed)


def test_options_that_just_fit_are_planned() -> None:
    assert TrainingJob(SMALL) == TrainingJob(
        SMALL, Mesh(1, 1, 1, 0), 8, 1, 0, "1f1b", 1, False, "bfloat16-parameters", "float32",
        "adamw", None,
    )  # fmt: skip
    assert TrainingJob(SMALL, Mesh(8)).tokens == 64
    assert TrainingJob(SMALL, **INTERLEAVED, micro_batches=4).numbers(1) == [2, 3, 6, 7]
    assert TrainingJob(SMALL, Mesh(1, 2), schedule="interleaved").chunks == 1  # any micro-batches
    assert TrainingJob(SMALL, Mesh(tp=4), sequence=True).costs == Costs(SMALL, 4, sequence=True)


@pytest.mark.parametrize("name", vars(Speeds()))
def test_speeds_are_positive_numbers(name: str) -> None:
    assert vars(Speeds(**{name: 1}))[name] == 1
    for value in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match=f"plan: {name} is {value}, expected a positive"):
            Speeds(**{**vars(Speeds()), name: value})


def test_a_plan_says_why_its_mesh_cannot_train_the_model() -> None:
    fullest = "the estimate is of the fullest rank"
    llama = TransformerLMConfig(64, heads=8, kv_heads=2, width=64)
    for job, problems in (
        (TrainingJob(SMALL, Mesh(2, 2), zero=1), []),
        (TrainingJob(SMALL, Mesh(2), zero=3), []),
        (TrainingJob(SMALL, Mesh(2, 2), zero=2),
         ["ZeRO 2 is not for pipelines, where several blocks are in use"]),
        (TrainingJob(SMALL, Mesh(tp=8)), []),
        (TrainingJob(SMALL, Mesh(tp=16)),
         ["the heads are 8, expected one or more for each of tp, 16"]),
        (TrainingJob(llama, Mesh(tp=4)),
         ["the key and value heads are 2, expected one or more for each of tp, 4"]),
        (TrainingJob(SMALL, Mesh(tp=3)), [
            f"the token embedding is 512, not a multiple of tp, 3: {fullest}",
            f"the hidden width is 256, not a multiple of tp, 3: {fullest}",
        ]),
    ):  # fmt: skip
        assert job.problems == problems


def test_the_traffic_and_the_time_of_a_step() -> None:
    """On two hosts, with every axis of the mesh and an optimizer that sends."""
    job = TrainingJob(SMALL, Mesh(2, 2, 2), 32, 4, 1, optimizer="muon")
    found, costs = estimate(job, Speeds(gpus_per_host=4)), job.costs
    assert found.stage == 0  # the last computes longest
    sizes = {(each.axis, each.what): (each.calls, each.bytes) for each in found.sent}
    held = costs.root_parameters(False, True) + 4 * costs.blocks[0].parameters
    activation, matrices = 4 * 64 * 64 * 2, 4 * 12 * 64**2
    assert sizes == {
        ("tp", "activations, all-reduce"): (4 * (2 * 8 + 1), 4 * (2 * 8 + 1) * activation),
        ("pp", "activations and gradients"): (4, 4 * activation),
        ("pp", "gradient of the token embedding"): (1, 4 * 512 * 64 / 2),
        ("dp", "gradients, reduce-scatter"): (1, 4 * held / 2),
        ("dp", "parameters, all-gather"): (1, 2 * held / 2),
        ("dp", "momentum, all-gather"): (4, 4 * matrices / 2 / 2),
        ("tp", "matrices of updates, all-reduce"): (4 * 4, 4 * matrices),
    }
    for each in found.sent:
        link = 45e9 if each.axis == "pp" else 280e9
        assert each.seconds == pytest.approx(each.calls * 20e-6 + each.bytes / link)
        waits = 1 / 2 if each.what == "activations and gradients" else 1
        assert each.exposed == pytest.approx(waits * each.seconds)
    exposed = [each.exposed for each in found.sent]
    assert found.time["send within layers"] == exposed[0]
    assert found.time["send between stages"] == sum(exposed[1:3])
    assert found.time["send gradients and parameters"] == sum(exposed[3:5])
    assert found.time["send for the optimizer"] == sum(exposed[5:])
    flops = sum(costs.flops(job.blocks(1), head=True)) * job.tokens
    assert found.time["compute"] == pytest.approx(4 * flops / 400e12)
    waits = (found.time["compute"] + exposed[0]) * 1 / 4
    assert found.time["pipeline bubble"] == pytest.approx(waits)
    assert found.seconds == sum(found.time.values())
    assert found.tokens_per_second == 32 * 64 / found.seconds
    rate = SMALL.training_flops() * 32 * 64 / found.seconds / 8
    assert found.flops_per_second == pytest.approx(rate)


def small_estimate(**options: Any) -> Estimate:
    job = TrainingJob(SMALL, Mesh(2, 2), 32, 4, **options)
    memory = {"parameters": 2.5 * 2**30, "work": 0.0}
    sent = [Traffic("gradients", "dp", 1200, 3.4e9, 0.25, 0.125)]
    return Estimate(job, Speeds(), 1, memory, sent, {"compute": 0.75, "bubble": 0.0, "send": 0.25})


def test_a_table_has_a_line_for_each_cost() -> None:
    title = (
        "small, 0M parameters, on 4 GPUs: dp 2 x pp 2 x tp 1, 1f1b, "
        "batch 32 = 2 dp x 4 micro-batches x 4 sequences, bfloat16-parameters"
    )
    assert table("small", small_estimate(), 3 * 2**30, 2**29).splitlines() == [
        title,
        "",
        "memory of a GPU of stage 1                  GiB",
        "  parameters                               2.50",
        "  reserved                                 0.50",
        "  total                                    3.00 of 3",
        "",
        "sent by a GPU in a step                   calls       MB       ms  waited for",
        "  dp gradients                            1,200    3,400   250.00      125.00",
        "",
        "time of a step                               ms  fraction",
        "  compute                                750.00    75.0 %",
        "  send                                   250.00    25.0 %",
        "  total                                 1000.00   100.0 %",
        "",
        "2,048 tokens/s, 0 TFLOP/s of the model a GPU",
    ]
    other = small_estimate(zero=2, optimizer="lion")
    lines = table("small", other, 2**30).splitlines()
    assert lines[:2] == [
        title.replace("1f1b", "ZeRO 2, 1f1b") + ", lion",
        "note: ZeRO 2 is not for pipelines, where several blocks are in use",
    ]
    assert lines[5] == "  total                                    2.50 of 1: too much"
    one = TrainingJob(LARGE, grad_dtype="bfloat16")
    lines = table("large", replace(other, job=one, sent=[])).splitlines()
    assert lines[:3] == [
        "large, 1,558M parameters, on 1 GPU: dp 1 x pp 1 x tp 1, batch 8 = 1 dp x 1 micro-batches "
        "x 8 sequences, bfloat16-parameters, gradients in bfloat16",
        "",
        "memory of a GPU                             GiB",
    ]
    assert lines[4:7] == ["  total                                    2.50", "", lines[6]]
    assert lines[6].startswith("time of a step")
    assert lines[-1] == "8,192 tokens/s, 80 TFLOP/s of the model a GPU"


def test_an_estimate_for_json_has_every_number() -> None:
    found = small_estimate(zero=2)
    values = to_json(found, 512.0)
    job = values.pop("job")
    assert job == {
        "batch": 32, "micro_batches": 4, "zero": 2, "schedule": "1f1b", "chunks": 1,
        "sequence": False, "dtype": "bfloat16-parameters", "grad_dtype": "float32",
        "optimizer": "adamw",
    }  # fmt: skip
    assert values == {
        "model": asdict(SMALL), "parameters": SMALL.parameters,
        "mesh": {"dp": 2, "pp": 2, "tp": 1}, "gpus": 4, "speeds": asdict(Speeds()),
        "fullest_stage": 1,
        "memory": {**found.memory, "reserved": 512.0, "total": 2.5 * 2**30 + 512},
        "sent": [{"what": "gradients", "axis": "dp", "calls": 1200, "bytes": 3.4e9,
                  "seconds": 0.25, "exposed": 0.125}],
        "time": {"compute": 0.75, "bubble": 0.0, "send": 0.25, "total": 1.0},
        "bubble_fraction": 1 / 5, "tokens_per_second": 2048.0,
        "model_flops_per_second_and_gpu": SMALL.training_flops() * 512,
        "problems": found.job.problems,
    }  # fmt: skip


def test_divisors_come_from_the_smallest() -> None:
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
