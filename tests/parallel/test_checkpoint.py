from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorgrad import Tensor, random
from tensorgrad.dtypes import bfloat16
from tensorgrad.errors import ArgumentError, CheckpointError, CommError
from tensorgrad.io.weights import ArrayFile, load_arrays, save_arrays
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.nn import Linear, Parameter
from tensorgrad.optim import Adafactor, AdamW
from tensorgrad.optim.master import low_bits_of
from tensorgrad.parallel import Comm, DataParallel, Mesh
from tensorgrad.parallel.checkpoint import RankWriters
from tensorgrad.parallel.merge import merge
from tensorgrad.train.checkpoint import (
    OneWriter,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from tensorgrad.train.pieces import open_pieces
from tensorgrad.train.placement import ArrayPiece, Placement, cut_box, divide
from tensorgrad.train.shards import Shards, load_pieces, pieces_of
from tensorgrad.train.strategy import OneProcess
from tests.checkpoints import save_former, save_shards
from tests.disk import flip, full_disk
from tests.parallel.threads import on_ranks
from tests.parallel.whole_arrays import cut
from tests.ranks import run_ranks

Array = np.ndarray[Any, Any]
Full = dict[str, Array]
DTYPES = (np.dtype("float32"), bfloat16, np.dtype("float16"), np.dtype("float64"))
STATE: dict[str, Any] = {"metrics": {}, "note": "of rank 0"}


def random_bits(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    """Return arbitrary bits, NaN and -0 among them."""
    rng = np.random.default_rng(seed)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    found: Array = np.frombuffer(rng.bytes(size), np.uint8).view(dtype).reshape(shape)
    return found


def held_on(mesh: Mesh, zero: bool, full: Full) -> Iterator[tuple[ArrayPiece, Array]]:
    """Yield what a rank of the mesh holds: its stage's parameters, cut by tp, sharded over dp.

    Parameters go round the stages; the first is on all of them, as a tied embedding is.
    """
    here = {
        name: array
        for number, (name, array) in enumerate(full.items())
        if number == 0 or number % mesh.pp == mesh.pp_rank
    }
    boxes = []
    for name, array in here.items():
        axis = next((i for i, n in enumerate(array.shape) if n and n % mesh.tp == 0), None)
        boxes.append(
            Placement(name, array.shape)
            if axis is None
            else divide(name, array.shape, axis, mesh.tp_rank, mesh.tp)
        )
    share = -(-sum(box.size for box in boxes) // mesh.dp)
    start = -share * mesh.dp_rank  # start of the box, in the shard of this rank
    for box in boxes:
        piece = box.piece
        if zero:
            first, last = max(start, 0) - start, min(start + box.size, share) - start
            start += box.size
            if first >= last:
                continue
            piece = ArrayPiece(box, first, last)
        yield piece, cut(full[box.name], piece).copy()


@st.composite
def models(draw: st.DrawFn) -> Full:
    shapes = draw(
        st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5)
    )
    return {
        f"model/p{i}": random_bits(shape, draw(st.sampled_from(DTYPES)), i)
        for i, shape in enumerate(shapes)
    }


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    return Mesh(*(draw(st.integers(1, 3)) for _ in "dpt"))


def at(mesh: Mesh, comm: Comm) -> Mesh:
    return Mesh(mesh.dp, mesh.pp, mesh.tp, comm.rank)


def save_on(
    mesh: Mesh, zero: bool, full: Full, folder: Path, step: int = 1, state: Any = STATE
) -> Path:
    def program(comm: Comm) -> Path:
        shards = Shards(RankWriters(comm), list(held_on(at(mesh, comm), zero, full)))
        return save_shards(shards, folder, step, {**state, "note": f"of rank {comm.rank}"})

    return on_ranks(mesh.size, program)[0]


def load_on(
    mesh: Mesh, zero: bool, full: Full, folder: Path, note: str | None = "of rank 0"
) -> None:
    """Load on every rank of a mesh and compare the bits."""

    def program(comm: Comm) -> None:
        expected = list(held_on(at(mesh, comm), zero, full))
        held = [(piece, np.zeros_like(array)) for piece, array in expected]
        found = RankWriters(comm).load_latest(folder)
        assert found is not None
        assert (found.step, found.state.get("note")) == (1, note)
        Shards(RankWriters(comm), held).load(found)
        for (_, array), (piece, other) in zip(held, expected, strict=True):
            assert array.tobytes() == other.tobytes(), piece

    on_ranks(mesh.size, program)


@settings(max_examples=25, deadline=None)
@given(meshes(), meshes(), st.booleans(), st.booleans(), models())
def test_any_mesh_loads_what_any_other_has_saved(
    one: Mesh, other: Mesh, zero: bool, other_zero: bool, full: Full
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = save_on(one, zero, full, folder)
        assert not list(folder.glob(".*"))
        found = load_checkpoint(path)
        with ExitStack() as stack:
            pieces = found.pieces(stack)
            for key, array in full.items():  # once, and nothing twice
                assert sum(each.piece.size for each in pieces.get(key, [])) == array.size
        for group in ("model", "optimizer"):  # a process without a Comm reads whole arrays
            for name, whole in found.arrays(group).items():
                array = full[f"{group}/{name}"]
                assert (whole.shape, whole.tobytes()) == (array.shape, array.tobytes())
                assert pieces.pop(f"{group}/{name}")
        assert not pieces
        load_on(other, other_zero, full, folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_and_its_optimizer_go_on_where_they_were(tmp_path: Path, dtype: str) -> None:
    def made(seed: int) -> tuple[GPT2, AdamW]:
        random.seed(seed)
        model = GPT2(GPT2Config(vocab_size=12, context=4, layers=2, heads=2, width=8)).to(dtype)
        model.register_buffer("count", Tensor(np.full(3, seed)))
        optimizer = AdamW(model.named_parameters(), lr=0.01 * seed)
        optimizer.flat.grad[...] = np.random.default_rng(seed).random(optimizer.flat.size)
        optimizer.step()
        return model, optimizer

    def everything(model: GPT2, optimizer: AdamW) -> dict[str, Any]:
        arrays = {name: tensor.data for name, tensor in model.state_dict().items()}
        state = {**arrays, **optimizer.state_dict()}
        return {n: v.tobytes() if isinstance(v, np.ndarray) else v for n, v in state.items()}

    expected = made(3)
    on_ranks(2, lambda comm: save_model(RankWriters(comm), tmp_path, *expected))

    def load(comm: Comm) -> None:
        found = RankWriters(comm).load_latest(tmp_path)
        assert found is not None
        model, optimizer = ours[comm.rank]
        load_pieces(RankWriters(comm), found, model, optimizer)
        assert everything(model, optimizer) == everything(*expected)
        assert model.tokens.weight.data.base is optimizer.flat.data

    ours = [made(1 + rank) for rank in range(3)]
    assert everything(*ours[0]) != everything(*expected)
    on_ranks(3, load)
    alone, found = made(9), load_checkpoint(tmp_path / "step-00000001")
    OneProcess().load(found, *alone)
    assert everything(*alone) == everything(*expected)


def test_a_buffer_with_strides_is_saved_and_loaded_in_place(tmp_path: Path) -> None:
    table = np.arange(12.0).reshape(3, 4).T
    model = Linear(3, 2)
    model.register_buffer("table", Tensor(table))
    optimizer = AdamW(model.named_parameters())
    save_model(OneWriter(), tmp_path, model, optimizer)
    expected = table.copy()
    table[...] = 0
    OneProcess().load(load_checkpoint(tmp_path / "step-00000001"), model, optimizer)
    assert table.tobytes() == expected.tobytes()


def save_model(writers: OneWriter, folder: Path, model: Any, optimizer: Any) -> Path:
    contents = Shards(writers, pieces_of(model, optimizer)).contents(optimizer.numbers())
    return save_checkpoint(folder, 1, contents, STATE)


FULL: Full = {
    "model/tokens": random_bits((8, 6), np.float32, 0),
    "model/qkv": random_bits((12, 4), np.float32, 1),
    "optimizer/m/qkv": random_bits((12, 4), np.float32, 2),
}


def save_in_former_version(full: Full, folder: Path) -> None:
    groups: dict[str, Full] = {"model": {}, "optimizer": {}}
    for key, array in full.items():
        group, _, name = key.partition("/")
        groups[group][name] = array
    save_former(folder, 1, groups, STATE)


def test_an_array_of_several_dtypes_is_refused(tmp_path: Path) -> None:
    header = {"pieces": json.dumps({"x": Placement("w", (2,)).piece.to_json()})}
    for name, dtype in (("a", np.float32), ("b", np.float64)):
        save_arrays(tmp_path / f"{name}.safetensors", {"x": np.ones(2, dtype)}, header)
    with ExitStack() as stack:
        found = open_pieces(tmp_path, ["a.safetensors"], stack)
        assert [(each.name, str(each.dtype)) for each in found["w"]] == [("x", "float32")]
        with pytest.raises(CheckpointError, match=r"has w as \{.*Kind.*\}, expected one"):
            open_pieces(tmp_path, ["a.safetensors", "b.safetensors"], stack)
    save_arrays(tmp_path / "a.safetensors", {"x": np.ones(3)}, header)
    with ExitStack() as stack, pytest.raises(CheckpointError, match=r"x has shape \(3,\), exp"):
        open_pieces(tmp_path, ["a.safetensors"], stack)


def test_ranks_load_what_a_former_version_has_saved(tmp_path: Path) -> None:
    save_in_former_version(FULL, tmp_path)
    load_on(Mesh(2, 1, 2), True, FULL, tmp_path)


@pytest.mark.parametrize("headers", [True, False])
def test_former_master_weights_of_bfloat16_are_loaded_as_low_bits(
    tmp_path: Path, headers: bool
) -> None:
    qkv, empty = random_bits((12, 4), np.float32, 3), np.ones((0, 3), "float32")
    former = {**FULL, "optimizer/master/qkv": qkv, "optimizer/master/empty": empty}
    if headers:
        save_on(Mesh(3), True, former, tmp_path)
    else:
        save_in_former_version(former, tmp_path)
    kept = {"qkv": low_bits_of(qkv), "empty": low_bits_of(empty)}
    low = {f"optimizer/low_bits/{name}": array for name, array in kept.items()}
    load_on(Mesh(2, 1, 2), True, {**FULL, **low}, tmp_path)


def test_an_empty_parameter_is_one_of_the_model(tmp_path: Path) -> None:
    model: Any = Linear(3, 2)
    model.empty = Parameter(np.ones((0, 3), "float32"))
    optimizer = AdamW(model.named_parameters())
    path = save_model(RankWriters(Comm()), tmp_path / "ranks", model, optimizer)
    merge(load_checkpoint(path), tmp_path / "model.safetensors")
    model.load_state_dict(load_arrays(tmp_path / "model.safetensors"))
    contents = OneProcess().contents(model, optimizer)
    assert contents is not None
    save_checkpoint(tmp_path / "one", 1, contents, STATE, 1)
    found = OneWriter().load_latest(tmp_path / "one")
    assert found is not None
    load_pieces(OneWriter(), found, model, optimizer)


def test_a_rank_reads_what_it_needs_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {"model/w": random_bits((64, 8), np.float32, 0)}
    save_on(Mesh(4), True, full, tmp_path)
    read: list[int] = []
    original = ArrayFile.read

    def counted(self: Any, name: str, start: int, stop: int) -> Array:
        read.append(stop - start)
        return original(self, name, start, stop)

    monkeypatch.setattr(ArrayFile, "read", counted)
    load_on(Mesh(3), True, full, tmp_path)
    assert sum(read) == 64 * 8
    read.clear()
    load_on(Mesh(1, 1, 4), False, full, tmp_path)
    assert sum(read) == 64 * 8


@pytest.mark.parametrize(
    ("harm", "file", "message"),
    [
        (flip, "rank-00001.safetensors", "rank-00001.safetensors has another CRC-32"),
        (Path.unlink, "rank-00003.safetensors", "rank-00003.safetensors is missing"),
        (Path.unlink, "state.json", "has no state.json"),
    ],
)
def test_all_ranks_go_back_together_when_one_finds_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Any, file: str, message: str
) -> None:
    save_on(Mesh(4), True, FULL, tmp_path)
    harm(save_on(Mesh(4), True, FULL, tmp_path, step=2) / file)
    with caplog.at_level(logging.WARNING):
        load_on(Mesh(2), False, FULL, tmp_path)
    assert message in caplog.text


def test_a_rank_that_cannot_write_leaves_earlier_checkpoints_whole(tmp_path: Path) -> None:
    save_on(Mesh(2), True, FULL, tmp_path)
    large = {**FULL, "model/large": np.zeros(1 << 20, np.float32)}
    with full_disk(1 << 20), pytest.raises(CheckpointError, match="step-00000001 and earlier ones"):
        save_on(Mesh(3), True, large, tmp_path, step=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert not list(tmp_path.glob(".*"))
    load_on(Mesh(1, 2), True, FULL, tmp_path)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        path = save_on(Mesh(2), True, FULL, tmp_path, step)
    assert path.name == "step-00000003"
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-00000003", "step-00000002"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model/new": np.zeros(3)}, "model/new is missing"),
        ({"model/tokens": np.zeros((8, 5), np.float32)}, r"float32\[8, 6\] there, expected"),
        ({"model/tokens": np.zeros((8, 6), bfloat16)}, r"expected bfloat16\[8, 6\]"),
        ({"model/qkv": None}, "model/qkv is not expected"),
    ],
)
def test_another_model_changes_nothing(tmp_path: Path, change: Any, message: str) -> None:
    save_on(Mesh(2), True, FULL, tmp_path)
    other = {name: array for name, array in {**FULL, **change}.items() if array is not None}

    def program(comm: Comm) -> None:
        held = list(held_on(Mesh(1, 2, 1, comm.rank), True, other))
        before = [array.tobytes() for _, array in held]
        found = RankWriters(comm).load_latest(tmp_path)
        assert found is not None
        with pytest.raises(CheckpointError, match=message):
            Shards(RankWriters(comm), held).load(found)
        assert [array.tobytes() for _, array in held] == before

    on_ranks(2, program)


def test_what_ranks_hold_must_fit_together(tmp_path: Path) -> None:
    piece = Placement("model/w", (4,)).piece
    with pytest.raises(ArgumentError, match=r"has an array of shape \(3,\), expected \(4,\)"):
        Shards(OneWriter(), [(piece, np.zeros(3))])

    def program(comm: Comm) -> None:
        mine = Placement("model/w", (4 + comm.rank,)).piece
        with pytest.raises(ArgumentError, match=r"full shapes \(4,\) and \(5,\), expected one"):
            Shards(RankWriters(comm), [(mine, np.zeros(mine.size))])
        with pytest.raises(CommError, match=r"\[\] on rank 0, \['step-00000001'\] on rank 1"):
            RankWriters(comm).load_latest(tmp_path / "away" if comm.rank == 0 else tmp_path)

    os.makedirs(tmp_path / "step-00000001")
    on_ranks(2, program)


def test_a_checkpoint_without_a_part_of_an_array_is_not_whole(tmp_path: Path) -> None:
    whole = Placement("model/w", (8,))
    half = ArrayPiece(whole, 0, 4)
    path = save_shards(Shards(OneWriter(), [(half, np.ones(4))]), tmp_path, 1, STATE)
    found = RankWriters(Comm()).load_latest(tmp_path)
    assert found is not None
    array = np.zeros(8)
    with pytest.raises(CheckpointError, match=rf"load: {path} is not whole: .*model/w"):
        Shards(OneWriter(), [(whole.piece, array)]).load(found)
    Shards(OneWriter(), [(half, array[:4])]).load(found)
    assert array.tolist() == [1] * 4 + [0] * 4


def test_a_strategy_saves_and_loads_what_its_rank_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, model = DataParallel(Comm()), Linear(3, 2)
    optimizer = strategy.prepare(model, AdamW)
    assert strategy.load_latest(tmp_path) is None
    before = model.weight.numpy().copy()
    contents = strategy.contents(model, optimizer)
    assert contents is not None
    save_checkpoint(tmp_path, 1, contents, STATE, 1)
    optimizer.flat.grad[...] = 1
    optimizer.step()
    assert (model.weight.numpy() != before).all()
    found = strategy.load_latest(tmp_path)
    assert found is not None
    gathered: list[bool] = []
    monkeypatch.setattr(strategy, "after_step", lambda: gathered.append(True))
    strategy.load(found, model, optimizer)
    np.testing.assert_array_equal(model.weight.numpy(), before)
    assert (gathered, optimizer.numbers()["step"]) == ([True], 0)


@pytest.mark.parametrize("kind", [AdamW, Adafactor])
def test_state_that_every_rank_has_is_whole_and_the_rest_in_boxes(kind: Any) -> None:
    model: Any = Linear(3, 2)
    model.empty = Parameter(np.ones((0, 3), "float32"))
    optimizer = kind(model.named_parameters())
    box = divide("weight", (4, 3), 0, 1, 2)
    held = {
        piece.placement.name: (piece.placement.shape, piece.placement.ranges)
        for piece, _ in pieces_of(model, optimizer, {"weight": box})
    }
    in_box, empty = ((4, 3), box.ranges), ((0, 3), None)
    expected: dict[str, Any] = {"model/weight": in_box, "model/bias": ((2,), None)}
    expected["model/empty"] = empty
    if kind is AdamW:
        for moment in ("m", "v"):
            for name in ("weight", "bias", "empty"):
                expected[f"optimizer/{moment}/{name}"] = expected[f"model/{name}"]
        assert held == expected
    else:
        assert held.items() >= expected.items()
        state = {name: ranges for name, (_, ranges) in held.items() if name not in expected}
        assert len(state) >= 3
        assert set(state.values()) == {None}


def test_a_box_of_a_whole_array_is_cut(tmp_path: Path) -> None:
    box = divide("model/qkv", (12, 4), 0, 1, 2, (4, 4, 4))
    save_on(Mesh(3), True, FULL, tmp_path)
    mine = np.zeros(box.size, np.float32)
    found = RankWriters(Comm()).load_latest(tmp_path)
    assert found is not None
    others = [(Placement(n, a.shape).piece, a.reshape(-1).copy()) for n, a in FULL.items()]
    Shards(OneWriter(), [(box.piece, mine), others[0], others[2]]).load(found)
    assert mine.tobytes() == cut_box(FULL["model/qkv"], box).tobytes()


KILLED = """
import os, sys
import numpy as np
from pathlib import Path
from tensorgrad.parallel import world
from tensorgrad.parallel.checkpoint import RankWriters
from tensorgrad.train.placement import ArrayPiece, Placement
from tensorgrad.train.shards import Shards
from tensorgrad.train import checkpoint as written
from tests.checkpoints import save_shards
comm = world()
half = ArrayPiece(Placement("model/w", (8,)), 4 * comm.rank, 4 * comm.rank + 4)
shards = Shards(RankWriters(comm), [(half, np.full(4, float(comm.rank)))])
save_shards(shards, Path(sys.argv[1]), 1, {"metrics": {}})
if comm.rank == int(sys.argv[2]):
    setattr(written, sys.argv[3], lambda *_, **__: os.kill(os.getpid(), 9))
save_shards(shards, Path(sys.argv[1]), 2, {"metrics": {}})
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("rank", "place"), [(1, "save_arrays"), (0, "replacing")])
def test_a_rank_killed_while_all_write_loses_nothing(tmp_path: Path, rank: int, place: str) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    folder = tmp_path / "checkpoints"
    result = run_ranks(script, 2, [folder, rank, place], check=False, timeout=60)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr, "the rank was not killed"
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000001"]
    (left,) = folder.glob(".step-00000002-*.tmp")
    assert (left / "rank-00001.safetensors").exists() == (place == "replacing")
    full = {"model/w": np.repeat([0.0, 1.0], 4)}
    load_on(Mesh(3), True, full, folder, note=None)
    save_on(Mesh(2), True, full, folder, step=2)
    assert not list(folder.glob(".*"))


def test_pieces_that_a_file_does_not_hold_take_no_memory(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    path = folder / "rank-00000.safetensors"

    def described(pieces: object) -> Any:
        text = pieces if isinstance(pieces, str) else json.dumps(pieces)
        save_arrays(path, {"a": np.ones(4, np.float32)}, {"pieces": text})
        data = path.read_bytes()
        files = {path.name: {"bytes": len(data), "crc32": zlib.crc32(data)}}
        state = {"format": 1, "step": 1, "metrics": {}, "files": files}
        (folder / "state.json").write_text(json.dumps(state))
        return load_checkpoint(folder)

    merge(described({"a": ["model/w", [2, 2], 0, None, 0, 4]}), tmp_path / "out")
    assert load_arrays(tmp_path / "out")["w"].shape == (2, 2)
    for pieces, message in (
        ({"a": ["model/w", [10**12], 0, None, 0, 10**12]}, "does not say what it holds"),
        ({"a": ["model/w", [10**12], 0, None, 0, 4]}, "model/w"),
        ({"a": ["model/w", [10**12, 10**12], 0, None, 0, 4]}, "model/w"),
        ({"a": ["model/w", [2**62, 2], 0, [[0, 2]], 0, 4]}, "model/w"),
        ({"a": ["model/w", [-2, -2], 0, None, 0, 4]}, "does not say what it holds"),
        ({"a": ["model/w", [4], 0, None, 0, 3]}, "does not say what it holds"),
        ({"b": ["model/w", [4], 0, None, 0, 4]}, "does not say what it holds"),
        ({"a": ["model/w", [4.0], 0, None, 0, 4]}, "does not say what it holds"),
        ({"a": ["model/w", [4], True, None, 0, 4]}, "does not say what it holds"),
        ({"a": [3, [4], 0, None, 0, 4]}, "does not say what it holds"),
        ({"a": ["model/w", [2**40, 2], 1, [[0, 1]], 0, 4]}, "model/w"),
        ({"a": ["model/w", [2, 2**40], 0, [[1, 2]], 0, 4]}, "model/w"),
        ({"a": None}, "does not say what it holds"),
        ("[]", "does not say what it holds"),
        ("[" * 100_000, "does not say what it holds: .*nested more than"),
    ):
        checkpoint = described(pieces)
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError, match=message) as caught:
                merge(checkpoint, tmp_path / "other")
            assert tracemalloc.get_traced_memory()[1] < 1 << 21
        finally:
            tracemalloc.stop()
        assert str(folder) in str(caught.value)
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("numbers", [[], "x", {"step": -1, "lr": 0.1}, {"step": 1, "lr": "x"}, {}])
def test_numbers_of_an_optimizer_that_are_damaged_change_nothing(
    tmp_path: Path, numbers: Any
) -> None:
    model = Linear(3, 2)
    optimizer = AdamW(model.named_parameters(), lr=0.1)
    before = {name: array.tobytes() for name, array in optimizer.state.items()}
    save_model(OneWriter(), tmp_path, model, optimizer)
    (path,) = list_checkpoints(tmp_path)
    state = json.loads((path / "state.json").read_text()) | {"optimizer": numbers}
    del state["crc32"]
    (path / "state.json").write_text(json.dumps(state))
    weight = model.weight.numpy().copy()
    with pytest.raises(CheckpointError, match=rf"load: {path}: AdamW"):
        load_pieces(OneWriter(), load_checkpoint(path), model, optimizer)
    np.testing.assert_array_equal(model.weight.numpy(), weight)
    assert before == {name: array.tobytes() for name, array in optimizer.state.items()}
    assert optimizer.numbers() == {"step": 0, "lr": 0.1}


def test_arrays_that_do_not_fit_leave_the_numbers_of_the_optimizer(tmp_path: Path) -> None:
    model, other = Linear(3, 2), Linear(3, 3)
    save_model(OneWriter(), tmp_path, other, AdamW(other.named_parameters(), lr=0.5))
    (path,) = list_checkpoints(tmp_path)
    optimizer = AdamW(model.named_parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="was saved from a different model"):
        load_pieces(OneWriter(), load_checkpoint(path), model, optimizer)
    assert optimizer.numbers() == {"step": 0, "lr": 0.1}
