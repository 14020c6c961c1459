"""The drawings of the chapters; `python -m tests.drawings` writes them into docs/chapters.

A chapter's drawing is made by the function with its name. Tests: tests/test_drawings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np

from tests.figures import planned
from tests.source_tree import ROOT
from tests.svg import BLUE, GREEN, GREY, ORANGE, WHITE, Drawing

FOLDER = ROOT / "docs" / "chapters"


def core() -> Drawing:
    """Draw how an op is recorded, and where its gradients go."""
    d = Drawing(
        "An op records a node; backward passes gradients on, adds them up or keeps them", 332
    )
    d.text(10, 20, "forward: the op computes y and records it", bold=True)
    d.box(10, 32, 84, 48, "Tensor x", "data", "node or leaf")
    d.box(114, 32, 128, 48, "op", "y = f(x.data)", "record(name, y...)", fill=BLUE)
    d.box(264, 32, 86, 48, "Tensor y", "data", "node")
    d.line((94, 56), (113, 56))
    d.line((242, 56), (263, 56))
    d.box(92, 98, 258, 34, "Node: backward function, saved arrays,", "an edge for each input",
          fill=GREEN)  # fmt: skip
    d.line((307, 80), (307, 97))
    d.line((92, 115), (50, 115), (50, 81))
    d.text(50, 129, "edge", anchor="middle")
    d.text(10, 162, "backward: a node after all its users", bold=True)
    d.box(10, 174, 340, 34, "dxs = node.backward(dy, saved, needs)", "each dx follows its edge, to",
          fill=BLUE)  # fmt: skip
    rows = (
        ("node with one user", "the array dx", "its dy"),
        ("node with more users", "Gradient.collect", "sum: its dy"),
        ("leaf", "LeafGradient.add", "its grad"),
    )
    for number, (edge, does, then) in enumerate(rows):
        y = 222 + 34 * number
        d.box(10, y, 134, 24, edge)
        d.box(158, y, 108, 24, does, fill=GREEN)
        d.box(280, y, 70, 24, then, size=9.5)
        d.line((144, y + 12), (157, y + 12))
        d.line((266, y + 12), (279, y + 12))
    return d


def autograd() -> Drawing:
    """Draw three additions y = add(y, y): all paths, and the walk."""
    d = Drawing("Three additions have eight paths to x, but four nodes to visit", 226)
    d.text(10, 20, "every path: 15 visits", bold=True)
    d.text(226, 20, "the walk: 4 visits", bold=True)
    notes = ("starts", "after 2 uses", "after 2 uses", "after 2 uses")
    for level, (name, note) in enumerate(zip(("y3", "y2", "y1", "x"), notes, strict=True)):
        y, count = 34 + 50 * level, 2**level
        step = 200 / count
        for number in range(count):
            x = 10 + step * (number + 0.5)
            if level:
                d.line((10 + 2 * step * (number // 2 + 0.5), y - 28), (x, y - 1))
            d.box(x - 10, y, 20, 22, name, fill=BLUE)
        d.box(240, y, 26, 22, name, fill=GREEN)
        d.text(274, y + 15, note)
        for x in (247, 259) if level else ():
            d.line((x, y - 28), (x, y - 1))
    return d


def derivatives() -> Drawing:
    """Draw forward mode, and the gradient of an op as an op."""
    d = Drawing(
        "Forward mode carries tangents; a gradient that is an op can be differentiated", 300
    )
    d.text(10, 20, "forward mode: value and tangent together", bold=True)
    d.box(10, 32, 70, 46, "x", "tangent tx")
    d.box(106, 32, 148, 46, "op: y = f(x)", "rule: ty = J(x) tx", fill=BLUE)
    d.box(280, 32, 70, 46, "y", "tangent ty")
    d.line((80, 55), (105, 55))
    d.line((254, 55), (279, 55))
    d.text(10, 112, "a gradient that is an op", bold=True)
    d.box(10, 124, 70, 46, "dy, x")
    d.box(106, 124, 148, 46, "gradient of the op:", "g = J(x)^T dy", fill=GREEN)
    d.box(280, 124, 70, 46, "g")
    d.line((80, 147), (105, 147))
    d.line((254, 147), (279, 147))
    d.text(10, 204, "its gradients, w that of g: both from the rule", bold=True)
    d.box(10, 216, 160, 62, "by dy:", "J(x) w", "the tangent along w", fill=BLUE)
    d.box(
        190,
        216,
        160,
        62,
        "by x: the gradient of",
        "the recorded J(x) w,",
        "with dy as its gradient",
        fill=ORANGE,
    )
    d.line((150, 170), (90, 215))
    d.line((210, 170), (270, 215))
    return d


def kernels() -> Drawing:
    """Draw where `load` looks for a kernel."""
    d = Drawing("A kernel comes from a dictionary, from a file on disk, or from the compiler", 264)
    d.box(
        10, 12, 340, 34, 'load("cross_entropy.cu",', '"cross_entropy_group<float, 8>")', fill=BLUE
    )
    rows = (
        ("dictionary of the process", "key: file, kernel, GPU"),
        ("file in ~/.cache/tensorgrad", "key: hash of source, headers,", "options, GPU, compiler"),
        ("NVRTC", "compiles this instantiation", "for this GPU"),
    )
    for number, words in enumerate(rows):
        y = 66 + 66 * number
        d.box(10, y, 202, 46, *words, fill=GREEN if number < 2 else ORANGE)
        d.line((111, y - 20), (111, y - 1))
        if number:
            d.text(117, y - 7, "not there")
    d.box(270, 66, 80, 178, "function", "of a", "RawKernel:", "launch")
    d.line((212, 89), (269, 89))
    d.text(240, 84, "hit", anchor="middle")
    d.line((212, 155), (269, 155))
    d.text(240, 150, "hit: load", anchor="middle", size=9)
    d.line((212, 221), (269, 221))
    d.text(240, 216, "keep it", anchor="middle", size=9)
    return d


def elementwise() -> Drawing:
    """Draw the arrays that SwiGLU moves in five loops, and in one kernel."""
    d = Drawing("Five loops move twelve arrays, one kernel moves three", 254)
    loops = (
        ("negative", ("gate",), "t1"),
        ("exp", ("t1",), "t2"),
        ("1 + t", ("t2",), "t3"),
        ("divide", ("gate", "t3"), "t4"),
        ("multiply", ("t4", "up"), "y"),
    )
    d.text(10, 20, "five loops: 12 passes over an array", bold=True)
    for number, (name, reads, writes) in enumerate((*loops, ("fused", ("gate", "up"), "y"))):
        y = 32 + 30 * number + (40 if number == len(loops) else 0)
        for place, read in enumerate(reads):
            d.box(10 + 48 * place, y, 42, 22, read, fill=BLUE)
        d.box(142, y, 92, 22, name)
        d.box(272, y, 42, 22, writes, fill=ORANGE)
        d.line((54 + 48 * (len(reads) - 1), y + 11), (141, y + 11))
        d.line((234, y + 11), (271, y + 11))
    d.text(10, 212, "one kernel: 3 passes", bold=True)
    d.text(208, 212, "read", anchor="end")
    d.text(268, 212, "written", anchor="start")
    return d


def reductions() -> Drawing:
    """Draw how a long axis is reduced in two launches."""
    d = Drawing(
        "A long row is cut into chunks, whose accumulators are combined in a fixed order", 238
    )
    d.text(10, 20, "launch 1: a long row, a block for each chunk", bold=True)
    for chunk in range(4):
        x = 10 + 86 * chunk
        for place in range(5):
            d.box(x + 16 * place, 30, 16, 20, fill=BLUE)
        d.line((x + 40, 50), (x + 40, 65))
        d.box(x, 66, 80, 32, f"block {chunk}", "absorb")
        d.line((x + 40, 98), (x + 40, 113))
        d.box(x, 114, 80, 24, "accumulator", fill=GREEN)
        d.line((x + 40, 138), (x + 40, 167))
    d.box(10, 168, 338, 24, "launch 2: combine, from the first to the last")
    d.line((179, 192), (179, 203))
    d.box(139, 204, 80, 24, "finish: y", fill=ORANGE)
    return d


def norms() -> Drawing:
    """Draw the pipeline of norm_forward_rows over three rows."""
    d = Drawing("While a row is normalized in registers, the next is copied to shared memory", 182)
    d.text(10, 20, "a group of threads, over time", bold=True)
    d.text(10, 44, "memory to")
    d.text(10, 57, "shared")
    d.text(10, 94, "registers")
    d.text(10, 146, "memory")
    for row in range(3):
        x = 72 + 88 * row
        d.box(x, 36, 80, 24, f"copy row {row}", fill=BLUE)
        if row < 2:
            d.box(x + 88, 80, 50, 24, "moments", fill=GREEN, size=9.5)
            d.box(x + 138, 80, 30, 24, "norm", fill=GREEN, size=9.5)
            d.line((x + 60, 60), (x + 92, 79))
            d.box(x + 138, 132, 34, 24, f"y {row}", fill=ORANGE)
            d.line((x + 153, 104), (x + 153, 131))
    d.line((72, 172), (346, 172))
    d.text(10, 175, "time")
    return d


def softmax() -> Drawing:
    """Draw the one buffer of cross_entropy_staged."""
    d = Drawing(
        "The gradient of a row leaves shared memory while the next row arrives in its place", 226
    )
    d.text(10, 20, "pass 1: maximum and sum", bold=True)
    d.text(10, 122, "pass 2: gradient out, next row in", bold=True)
    for part in range(8):
        x = 10 + 42 * part
        d.box(x, 30, 42, 22, "row r", fill=BLUE)
        fresh = part < 3
        d.box(x, 152, 42, 22, "r + 1" if fresh else "row r", fill=GREEN if fresh else BLUE)
    d.line((10, 62), (340, 62))
    d.box(82, 72, 196, 24, "maximum, sum: loss")
    d.text(10, 142, "shared memory of a block")
    d.box(10, 196, 150, 22, "logits, row r + 1", fill=GREEN)
    d.box(196, 196, 154, 22, "gradient, row r", fill=ORANGE)
    d.line((115, 196), (115, 175))
    d.line((157, 174), (215, 195))
    return d


def matmul() -> Drawing:
    """Draw the tile of a block of the wgmma kernel, and what feeds it."""
    d = Drawing("A tile of 128 x 256 sums is fed by stages of 64 terms in shared memory", 328)
    d.text(10, 20, "y = a b: a tile of a block", bold=True)
    for row, column in product(range(4), range(3)):
        here = (row, column) == (1, 1)
        d.box(130 + 72 * column, 110 + 24 * row, 72, 24, *(["128 x 256"] if here else []),
              fill=ORANGE if here else WHITE)  # fmt: skip
    for step in range(5):
        now = step == 2
        d.box(10 + 22 * step, 134, 22, 24, *(["64"] if now else []), fill=BLUE if now else GREY)
        d.box(202, 30 + 15 * step, 72, 15, *(["64"] if now else []), fill=GREEN if now else GREY)
    d.text(10, 128, "128 rows of a")
    d.text(280, 60, "256", size=9.5)
    d.text(280, 72, "columns of b", size=9.5)
    d.text(10, 232, "shared memory: 3 stages of 64 terms, by TMA", bold=True)
    for stage in range(3):
        x = 10 + 114 * stage
        d.box(x, 242, 36, 24, "a", fill=BLUE)
        d.box(x + 36, 242, 72, 24, "b", fill=GREEN)
    for group in range(2):
        x = 10 + 174 * group
        d.box(x, 286, 162, 34, f"warpgroup {group + 1}: 64 x 256", "sums in registers", fill=ORANGE)
        d.line((180, 266), (x + 81, 285))
    return d


def tile_kinds(queries: int, keys: int, rows: int, columns: int) -> np.ndarray:
    """Return for tiles of causal scores: 0 skipped, 1 masked, 2 whole.

    Args:
        queries, keys: positions.
        rows, columns: of a tile, which divide them.
    """
    seen = np.tri(queries, keys, keys - queries, dtype=bool)
    tiles = seen.reshape(queries // rows, rows, keys // columns, columns)
    return tiles.any((1, 3)).astype(int) + tiles.all((1, 3))


def attention() -> Drawing:
    """Draw the tiles of causal attention, and where a block keeps what."""
    d = Drawing("Tiles of causal scores, and the shared memory and registers of a block", 388)
    d.text(10, 20, "scores, 128 queries x 128 keys a tile", bold=True)
    for (row, column), kind in np.ndenumerate(tile_kinds(768, 768, 128, 128)):
        d.box(64 + 26 * column, 46 + 22 * row, 26, 22, fill=(GREY, ORANGE, BLUE)[kind])
    d.text(142, 40, "keys", anchor="middle")
    d.text(10, 116, "queries")
    for number, (fill, words) in enumerate(
        ((BLUE, "computed"), (ORANGE, "masked"), (GREY, "not even loaded"))
    ):
        d.box(232, 60 + 30 * number, 18, 18, fill=fill)
        d.text(256, 73 + 30 * number, words)
    d.text(10, 204, "a block, heads of 128", bold=True)
    d.box(10, 214, 340, 66)
    d.text(18, 228, "shared memory, filled by TMA")
    d.box(18, 236, 80, 36, "Q", "2 x 64 rows", fill=BLUE)
    d.box(106, 236, 114, 36, "K", "3 tiles of 128", fill=GREEN)
    d.box(228, 236, 114, 36, "V", "3 tiles of 128", fill=GREEN)
    d.box(10, 300, 340, 80)
    d.text(18, 370, "registers of each warpgroup, 64 queries")
    d.box(18, 312, 92, 40, "S = Q K^T", "64 x 128", fill=ORANGE)
    d.box(126, 312, 104, 40, "max, sum a row", "P = exp(S - max)", size=9.5)
    d.box(246, 312, 96, 40, "O = c O + P V", "64 x 128", fill=ORANGE)
    d.line((58, 272), (58, 311))
    d.line((150, 272), (94, 311))
    d.line((290, 272), (290, 311))
    d.line((110, 332), (125, 332))
    d.line((230, 332), (245, 332))
    return d


def fp8() -> Drawing:
    """Draw what a linear layer keeps in 8 bits, and which product takes it."""
    d = Drawing("Each product takes two operands of 8 bits, whose terms lie along rows", 268)
    d.text(10, 20, "rounded in one pass: as it is, and transposed", bold=True)
    rows = (("x", "e4m3", BLUE), ("W", "e4m3", GREEN), ("dy", "e5m2", ORANGE))
    for number, (name, kind, fill) in enumerate(rows):
        y = 34 + 40 * number
        d.box(10, y, 64, 28, f"{name}, 16 bits", size=7.5)
        d.line((74, y + 14), (97, y + 14))
        d.box(98, y, 100, 28, f"{name} in {kind}", fill=fill)
        d.box(214, y, 136, 28, f"{name} transposed", fill=fill)
    d.text(10, 172, "three products, each of two of these", bold=True)
    products = (
        ("y = x W^T", "x, W", "16 bits"),
        ("dx = dy W", "dy, W transposed", "16 bits"),
        ("dW += dy^T x", "dy, x, both transposed", "float32"),
    )
    for number, (product_, operands, result) in enumerate(products):
        y = 182 + 27 * number
        d.box(10, y, 92, 22, product_)
        d.box(114, y, 164, 22, operands)
        d.box(290, y, 60, 22, result)
    return d


def decoding() -> Drawing:
    """Draw caches of three sequences, and the splits of one of them."""
    d = Drawing("A step adds a token to each cache and reads the cache in splits", 300)
    d.text(10, 20, "keys and values of three sequences", bold=True)
    for row, (prompt, length) in enumerate(((6, 9), (3, 6), (9, 12))):
        y = 32 + 28 * row
        d.text(10, y + 14, f"length {length}")
        for place in range(16):
            fill = BLUE if place < prompt else GREEN if place < length else WHITE
            fill = ORANGE if place == length else fill
            d.box(92 + 16 * place, y, 16, 20, fill=fill)
    for number, (fill, words) in enumerate(
        ((BLUE, "prompt"), (GREEN, "generated"), (ORANGE, "this step"))
    ):
        d.box(10 + 112 * number, 122, 16, 16, fill=fill)
        d.text(30 + 112 * number, 134, words)
    d.text(10, 168, "attention: a block for each split of a cache", bold=True)
    for split, fill in enumerate((BLUE, BLUE, GREEN)):
        x = 10 + 116 * split
        d.box(x, 178, 108, 22, ("keys 0 to 4", "keys 5 to 9", "keys 10 to 12")[split], fill=fill)
        d.box(x, 220, 108, 22, "max, sum, output", size=10)
        d.line((x + 54, 200), (x + 54, 219))
        d.line((x + 54, 242), (x + 54, 265))
    d.box(10, 266, 340, 24, "the last block to finish combines them in order", fill=ORANGE)
    return d


def optimizer() -> Drawing:
    """Draw the flat buffers and what one thread of a step reads and writes."""
    d = Drawing("Parameters, gradients and moments are flat buffers that a step passes once", 232)
    d.text(10, 20, "flat buffers: the same place in each", bold=True)
    parts = (("tokens", 96), ("qkv", 60), ("...", 40), ("norm1", 46), ("bias", 30))
    for row, (name, fill) in enumerate(
        (("parameter", BLUE), ("gradient", ORANGE), ("m", GREEN), ("v", GREEN))
    ):
        y, x = 34 + 30 * row, 78
        d.text(10, y + 15, name)
        for part, width in parts:
            d.box(x, y, width, 22, *([part] if row == 0 else []), fill=fill, size=10)
            x += width
    d.text(78, 166, "0")
    d.text(282, 166, "decayed", anchor="middle")
    d.text(350, 166, "size", anchor="end")
    d.line((226, 26), (226, 193))
    d.text(232, 184, "a thread: 16 bytes")
    d.box(10, 194, 340, 30, "read gradient, p, m, v; write p, m, v: 28 bytes")
    return d


def graphs() -> Drawing:
    """Draw what a call of a captured step does."""
    d = Drawing("The first call of a key warms up, the second captures, later ones replay", 286)
    d.box(90, 12, 180, 24, "call of the step", fill=BLUE)
    d.box(90, 58, 180, 34, "key: shapes, dtypes, modes", "guards: are all as before?")
    d.line((180, 36), (180, 57))
    rows = (
        ("new key", "warm-up: runs eagerly", "and notes what it uses"),
        ("second call", "capture: records the", "launches, runs nothing"),
        ("graph is there", "replay: copies arguments,", "launches the graph"),
    )
    for number, (when, *does) in enumerate(rows):
        y = 116 + 56 * number
        d.text(48, y + 20, when)
        d.box(160, y, 190, 36, *does, fill=(GREY, ORANGE, GREEN)[number])
        d.line((30, y + 17), (44, y + 17), arrow=False)
        d.line((142, y + 17), (159, y + 17))
    d.line((90, 75), (30, 75), (30, 245), arrow=False)
    d.line((255, 208), (255, 227))
    d.text(10, 280, "guard differs: another graph, or eager")
    return d


def parallel() -> Drawing:
    """Draw the time of backward and of all-reduces in three ways."""
    d = Drawing(
        "With overlap the buckets are sent during backward, and only the last one waits", 248
    )
    blocks, send = ("3", "2", "1", "0", "emb"), 22  # a bucket's; backward of a block takes 34
    for way, name in enumerate(("naive", "flat", "overlap")):
        y = 12 + 78 * way
        d.text(10, y + 10, name, bold=True)
        d.text(10, y + 30, "compute")
        d.text(10, y + 54, "network")
        for number, block in enumerate(blocks):
            d.box(68 + 34 * number, y + 16, 34, 20, block, fill=BLUE)
        end = 68 + 34 * len(blocks)
        if name == "naive":  # a call for each of many parameters
            for number in range(11):
                d.box(end + 10 * number, y + 40, 9, 20, fill=ORANGE)
        elif name == "flat":
            d.box(end, y + 40, send * len(blocks) - 20, 20, "all", fill=ORANGE)
        else:
            for number, block in enumerate(blocks):
                d.box(68 + 34 * (number + 1), y + 40, send, 20, block, fill=ORANGE, size=9.5)
    d.text(10, 240, "backward of blocks 3 to 0, embedding; time to the right", size=10)
    return d


def planning() -> Drawing:
    """Draw the planned memory of GPT-2 1558M on eight GPUs by stage of ZeRO."""
    d = Drawing("Planned memory of GPT-2 1558M on eight GPUs: ZeRO divides more at each stage", 214)
    d.text(10, 20, "GPT-2 1558M, 8 GPUs, batch 8: GiB of a GPU", bold=True)
    parts = (("parameters", BLUE), ("gradients", ORANGE), ("optimizer state", GREEN))
    options = "--preset gpt2-1558M --dp 8 --batch 8 --reserved 0 --parallel"
    for row, (name, label) in enumerate(
        (("overlap", "plain"), ("zero1", "ZeRO 1"), ("zero2", "ZeRO 2"), ("zero3", "ZeRO 3"))
    ):
        memory = planned(f"{options} {name}")["memory"]
        y, x = 34 + 34 * row, 62.0
        d.text(10, y + 16, label)
        sizes = [(memory[part], fill) for part, fill in parts]
        sizes.append((memory["total"] - sum(size for size, _ in sizes), GREY))
        for size, fill in sizes:
            width = round(size / 2**30 * 9.8, 1)
            d.box(x, y, width, 24, fill=fill)
            x += width
        d.text(x + 4, y + 16, f"{memory['total'] / 2**30:.1f}")
    for number, (name, fill) in enumerate((*parts, ("activations, work", GREY))):
        x, y = 10 + 170 * (number % 2), 174 + 20 * (number // 2)
        d.box(x, y, 14, 14, fill=fill)
        d.text(x + 20, y + 11, name)
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    function.__name__: function
    for function in (
        *(
            core,
            autograd,
            derivatives,
            kernels,
            elementwise,
            reductions,
            norms,
            softmax,
            matmul,
            fp8,
            attention,
        ),
        *(decoding, optimizer, graphs, parallel, planning),
    )
}


if __name__ == "__main__":
    for name, drawing in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(drawing().svg(), encoding="utf-8")
