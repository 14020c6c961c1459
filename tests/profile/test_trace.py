from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError, DataError
from tensorgrad.profile.recording import Kernel, Range, Recording, Transfer
from tensorgrad.profile.trace import merge_traces, write_trace
from tests.profile.steps import Step


def written(recording: Recording, path: Path) -> dict[str, Any]:
    write_trace(recording, path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def small(rank: int = 0, epoch: int = 0) -> Recording:
    return Recording(
        [
            Range(0, -1, "phase", "step", 1000, 9000),
            Range(1, 0, "backward", "linear", 2000, 3000, 0, "backward", "net.0", ((2, 3),), "f4"),
        ],
        (1000, 9000),
        [Kernel("gemm", 4000, 5000, 1 << 46, 0, 1), Kernel("memset", 5000, 6000)],
        [Transfer("all_reduce", 2500, 7000, 64)],
        epoch,
        rank,
    )


def test_a_real_step(tmp_path: Path) -> None:
    trace = written(Step().recorded(2).recording, tmp_path / "trace.json")
    events = trace["traceEvents"]
    assert trace["otherData"]["steps"] == 2
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {0: "phases", 1: "layers", 2: "ops"}
    assert {event["tid"] for event in complete} == set(tracks)
    (op, *_) = [event for event in complete if event["name"] == "attention_packed backward"]
    assert op["args"]["layer"] == "blocks.1.attention"
    assert op["args"]["shapes"] == [[2, 8, 16]]
    for track in tracks:  # a track nests
        inside = sorted((e["ts"], -e["dur"]) for e in complete if e["tid"] == track)
        ends: list[float] = []
        for start, negative in inside:
            ends = [end for end in ends if end > start + 1e-6]
            assert not ends or start - negative <= ends[-1] + 1e-3
            ends.append(start - negative)


def test_kernels_collectives_and_arrows(tmp_path: Path) -> None:
    events = written(small(), tmp_path / "trace.json")["traceEvents"]
    kernel = next(event for event in events if event["name"] == "gemm")
    assert (kernel["ts"], kernel["dur"]) == (3.0, 1.0)
    assert kernel["args"]["op"] == "linear"
    assert kernel["args"]["layer"] == "net.0"
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks[kernel["tid"]] == f"stream {1 << 46}"
    arrows = [event for event in events if event["name"] == "launch"]
    assert [(event["ph"], event["ts"]) for event in arrows] == [("s", 1.0), ("f", 3.0)]
    sent = [event for event in events if event["name"] == "all_reduce"]
    assert [(event["ph"], event["ts"]) for event in sent] == [("b", 1.5), ("e", 6.0)]
    assert sent[0]["args"] == {"bytes": 64}
    assert {(event["pid"], event["tid"], event["cat"]) for event in sent} == {(0, 900, "transfer")}
    assert tracks == {
        0: "phases", 1: "layers", 2: "ops", 900: "collectives", 1000: "stream 0",
        1001: f"stream {1 << 46}",
    }  # fmt: skip
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert order == {track: track for track in tracks}
    assert [(event["tid"], event.get("bp")) for event in arrows] == [(2, None), (1001, "e")]
    assert events[0]["args"] == {"name": "rank 0 (cpu)"}
    memset = next(event for event in events if event["name"] == "memset")
    assert (memset["tid"], memset["args"]) == (1000, {"stream": 0})
    back = next(event for event in events if event["name"] == "linear backward")
    assert (back["cat"], back["tid"], back["ts"], back["dur"]) == ("backward", 2, 1.0, 1.0)
    assert back["args"] == {
        "number": 1, "shapes": [[2, 3]], "dtype": "f4", "layer": "net.0", "phase": "backward",
        "bytes": 0,
    }  # fmt: skip


def test_threads_have_tracks_and_products_their_flops(tmp_path: Path) -> None:
    ranges = [Range(3, -1, "op", "matmul", 10, 30, 2, flops=8.0), Range(4, -1, "layer", "a", 0, 9)]
    recording = Recording(ranges, (0, 40), epoch=7, rank=5, device="a GPU", source="cupti")
    trace = written(recording, tmp_path / "trace.json")
    assert trace["otherData"] == {
        "rank": 5, "device": "a GPU", "source": "cupti", "steps": 1, "epoch_ns": 7
    }  # fmt: skip
    events = trace["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {
        0: "phases", 1: "layers", 2: "ops",
        20: "phases of thread 2", 21: "layers of thread 2", 22: "ops of thread 2",
    }  # fmt: skip
    op, layer = (event for event in events if event["ph"] == "X")
    assert (op["tid"], op["args"]["flops"]) == (22, 8)
    assert (layer["tid"], layer["args"]) == (1, {"number": 4})


def test_traces_of_ranks_are_merged_by_their_clocks(tmp_path: Path) -> None:
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    write_trace(small(0, epoch=5_000_000), paths[0])
    write_trace(small(1, epoch=5_002_000), paths[1])
    merge_traces(paths, tmp_path / "both.json")
    trace = json.loads((tmp_path / "both.json").read_text())
    assert trace["otherData"] == {"ranks": [0, 1], "epoch_ns": 5_000_000}
    sent = {e["id"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "b"}
    assert sent == {"0.0": 1.5, "1.0": 3.5}
    kernels = {e["pid"]: e["ts"] for e in trace["traceEvents"] if e["name"] == "gemm"}
    assert kernels == {0: 3.0, 1: 5.0}
    ids = Counter(e["id"] for e in trace["traceEvents"] if e["name"] == "launch")
    assert set(ids.values()) == {2}  # no arrow leads to another rank


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"traceEvents": [1], "otherData": {"rank": 0, "epoch_ns": 1}}',
     '{"traceEvents": [{"ts": "1"}], "otherData": {"rank": 0, "epoch_ns": 1}}',
     '{"traceEvents": [], "otherData": {"rank": "0", "epoch_ns": 1}}'],
)  # fmt: skip
def test_damaged_traces_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "0.json").write_text(text)
    with pytest.raises(DataError, match=r"0\.json"):
        merge_traces([tmp_path / "0.json"], tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


def test_traces_must_be_of_different_ranks(tmp_path: Path) -> None:
    write_trace(small(), tmp_path / "0.json")
    with pytest.raises(ArgumentError, match="ranks \\[0, 0\\]"):
        merge_traces([tmp_path / "0.json"] * 2, tmp_path / "all.json")
    with pytest.raises(ArgumentError, match="ranks \\[\\]"):
        merge_traces([], tmp_path / "all.json")
