"""What the documents say is true: Python blocks run; commands, links and source paths exist.

A block opened with ```python runs as it stands. ```python gpu is skipped without a GPU, ```python
torch without PyTorch, and ```python mpi runs on two ranks. One that names a file is a change: see
test_contributing.py.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from io import StringIO
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from tensorgrad import backend
from tensorgrad.cli import main
from tests.ranks import run_ranks
from tests.source_tree import ROOT, module_names

pytestmark = pytest.mark.slow

DOCS = sorted(ROOT.glob("docs/**/*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
PROGRAM = r"((?:[A-Z_]+=\S+ |taskset \S+ \S+ )*(?:python|mpirun|tensorgrad) {})"
INDENTED = re.compile("^ {4}" + PROGRAM.format(".+$"), re.MULTILINE)
QUOTED = re.compile("`" + PROGRAM.format("[^`]+") + "`")
CODE = re.compile(r"`([^`\n]+)`")
SOURCE = re.compile(
    r"(?:tensorgrad|models|parallel|examples|tests|docs)/[\w./-]*|[\w/-]+\.(?:py|cuh?)"
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
SHELL = {"sh", "bash", "shell", "console"}
TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
MARKS = {"gpu": pytest.mark.gpu, "mpi": pytest.mark.mpi, "torch": TORCH}
PROGRAMS = sorted(ROOT.glob("examples/*.py"))
SCRIPTS = [*sorted((ROOT / ".ci").iterdir()), *sorted((ROOT / "examples" / "cluster").iterdir())]
MADE_BY_RUNNING = ("runs/", ".venv")


def blocks(document: Path) -> Iterator[tuple[int, list[str], str]]:
    """Yield (line, words after the fence, text) of every fenced block."""
    text = document.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[2].split(), match[3]


def python_blocks() -> Iterator[object]:
    for document in DOCUMENTS:
        for line, words, text in blocks(document):
            if words[:1] == ["python"] and set(words[1:]) <= set(MARKS):
                marks = [MARKS[word] for word in words[1:]]
                name = f"{document.relative_to(ROOT)}:{line}"
                yield pytest.param(text, "mpi" in words, id=name, marks=marks)


def commands() -> Iterator[Any]:
    """Yield what stands in blocks of a shell, indented, or between backquotes in a sentence.

    Of programs it is what their docstrings begin with.
    """
    for document in (*DOCUMENTS, *PROGRAMS):
        text = document.read_text(encoding="utf-8")
        if document.suffix == ".py":
            text = ast.get_docstring(ast.parse(text)) or ""
        found = [
            command.removeprefix("$ ")
            for _, words, block in blocks(document)
            if words and words[0] in SHELL
            for command in block.replace("\\\n", " ").splitlines()
        ]
        prose = FENCE.sub("", text).replace("\\\n", " ")
        found += [*INDENTED.findall(prose), *QUOTED.findall(prose)]
        for number, command in enumerate(found):
            parts = shlex.split(command, comments=True)
            if parts:
                yield pytest.param(parts, id=f"{document.relative_to(ROOT)}:{number}")


Result = subprocess.CompletedProcess[str]


def run_block(text: str, folder: Path) -> Result:
    """Run a block as a program of its own, in a folder of its own."""
    script = folder / "block.py"
    script.write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "README.md", folder)  # some text to read
    threads = {"OMP_NUM_THREADS": "1"}  # others run at the same time
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder,
        env={**os.environ, **threads, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Result]]]:
    """Begin to run the blocks of the chosen tests, on all cores: most only import the library."""
    found: dict[str, Future[Result]] = {}
    pool = ThreadPoolExecutor(backend.threads())
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.originalname == "test_a_python_block_runs":
            text = str(item.callspec.params["text"])
            if not item.callspec.params["on_ranks"] and not item.get_closest_marker("skip"):
                found[text] = pool.submit(run_block, text, tmp_path_factory.mktemp("block"))
    yield found
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("text", "on_ranks"), list(python_blocks()))
def test_a_python_block_runs(
    text: str, on_ranks: bool, tmp_path: Path, results: dict[str, Future[Result]]
) -> None:
    if on_ranks:
        script = tmp_path / "block.py"
        script.write_text(text, encoding="utf-8")
        run_ranks(script, 2)
        return
    result = results[text].result()
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("parts", list(commands()))
def test_a_command_names_what_exists(parts: list[str]) -> None:
    assert list(problems(parts)) == []


def problems(parts: list[str]) -> Iterator[str]:
    """Yield what a command line names that this repository does not have."""
    if parts[0] == "make":
        yield from (
            f"make {target}"
            for target in parts[1:]
            if "=" not in target and target not in make_targets()
        )
    module = parts[parts.index("-m") + 1] if "-m" in parts else ""
    if module.startswith(("tensorgrad", "examples")) and module not in module_names():
        yield f"python -m {module}"
    for word in parts:
        for extra in re.findall(r"(?:tensorgrad|\.)\[([a-z0-9,]+)\]", word):
            yield from (f"extra {name}" for name in extra.split(",") if name not in extras())
        is_made = word in made_by_changes() or "--download" in parts  # or the name of a model
        if is_path(word) and not (ROOT / word).exists() and not is_made:
            yield f"file {word}"
    yield from unknown_options(parts)


@pytest.mark.parametrize("parts", [p for p in commands() if "mpirun" in p.values[0]])
def test_ranks_of_a_command_can_share_the_batch(parts: list[str]) -> None:
    script = next((word for word in parts if re.search(r"train_gpt2_\w+\.py$", word)), None)
    if script is None or "--resume" in parts:
        return
    said = dict(pairwise(parts))
    pipelines = script.endswith("_pp.py")
    ranks = int(said["-n"])
    stages = int(said.get("--pp", ranks) if pipelines else said.get("--pp", 1))
    replicas = ranks // (stages * int(said.get("--tp", 1)))
    micro = int(said.get("--micro-batches", 4) if pipelines else said.get("--micro-batches", 1))
    assert int(said.get("--batch", 8)) % (replicas * micro) == 0


@cache
def made_by_changes() -> set[str]:
    """Return the files that readers of CONTRIBUTING.md and of a guide make."""
    changes = {words[1] for _, words, _ in blocks(ROOT / "CONTRIBUTING.md") if len(words) == 2}
    found = (text.partition("\n")[0] for _, _, text in blocks(ROOT / "docs/guides/own-models.md"))
    return changes | {line.removeprefix("# ") for line in found if line.endswith(".py")}


def is_path(word: str) -> bool:
    looks = re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", word) is not None
    inside = "/" in word or word.endswith((".py", ".md", ".toml"))
    return looks and inside and not word.startswith(MADE_BY_RUNNING)


def unknown_options(parts: list[str]) -> Iterator[str]:
    """Yield the options that a program of this repository does not have."""
    ours = re.compile(r"examples/.+\.py|(tensorgrad|examples)\..+|tensorgrad")
    place = next((i for i, word in enumerate(parts) if ours.fullmatch(word)), len(parts))
    program = parts[place - 1 : place + 1] if "-m" in parts[:place] else parts[place : place + 1]
    if program == ["tensorgrad"]:
        words = takewhile(lambda word: re.fullmatch("[a-z0-9][a-z0-9-]*", word), parts[place + 1 :])
        grouped = parts[place + 1] in ("train", "bench")  # which have commands of their own
        program = ["-m", *program, *islice(words, 2 if grouped else 1)]
    for word in parts[place + 1 :]:
        option = re.escape(word.partition("=")[0])
        if (
            word.startswith("--")
            and word != "--help"
            and not re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(*program))
        ):
            yield f"{parts[place]} {word}"


@cache
def help_of(*program: str) -> str:
    if program[:2] == ("-m", "tensorgrad"):
        with redirect_stdout(StringIO()) as shown, pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "200")
            main([*program[2:], "--help"])
        return shown.getvalue()
    return subprocess.run(
        [sys.executable, *program, "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@cache
def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z]+):(?!=)", makefile, re.MULTILINE))


@cache
def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


def anchors(document: Path) -> set[str]:
    """Return what GitHub calls the headings of a document."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(document: Path, text: str) -> Iterator[str]:
    for name, anchor in LINK.findall(text):
        place = document.parent / name if name else document
        if not place.exists() or (anchor and anchor not in anchors(place)):
            yield f"{name}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    assert list(dead_links(document, document.read_text(encoding="utf-8"))) == []


def missing_sources(text: str) -> Iterator[str]:
    """Yield the source paths between backquotes that do not exist.

    Paths begin at the root. A name alone may be in any folder that the text names.
    """
    names = [name for name in CODE.findall(FENCE.sub("", text)) if SOURCE.fullmatch(name)]
    folders = {(ROOT / name) if name.endswith("/") else (ROOT / name).parent for name in names}
    for name in names:
        places = [ROOT] if "/" in name else folders - {ROOT}
        if not any((place / name).exists() for place in places):
            yield name


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *DOCS], ids=lambda path: str(path.relative_to(ROOT))
)
def test_source_paths_exist(document: Path) -> None:
    assert list(missing_sources(document.read_text(encoding="utf-8"))) == []


def missing_files(script: str) -> Iterator[str]:
    """Yield the documents, programs and .cu files that a shell script names and that are missing.

    The .cu files are those of a compile command, so their paths begin at the kernels' folder.
    """
    for name in re.findall(r"(?<![\w/])(?:docs|examples|tests)/[\w/-]+\.\w+", script):
        if not (ROOT / name).is_file():
            yield name
    for name in re.findall(r"[\w/{},]+\.cu\b", script):
        before, brace, rest = name.partition("{")
        middles, _, after = rest.partition("}") if brace else ("", "", "")
        for middle in middles.split(","):
            if not (ROOT / "tensorgrad/kernels" / (path := before + middle + after)).is_file():
                yield path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_files_that_a_script_names_exist(script: Path) -> None:
    assert list(missing_files(script.read_text(encoding="utf-8"))) == []


def test_the_index_lists_every_document() -> None:
    index = ROOT / "docs" / "README.md"
    links = LINK.findall(index.read_text(encoding="utf-8"))
    listed = {name for name, _ in links if name.endswith(".md")}
    assert {str(path.relative_to(index.parent)) for path in DOCS} - {index.name} == listed


def test_the_checks_would_notice() -> None:
    assert list(problems(["make", "trian"])) == ["make trian"]
    assert list(problems(["python", "examples/nothing.py"])) == ["file examples/nothing.py"]
    assert list(problems(["pip", "install", ".[nothing,mpi]"])) == ["extra nothing"]
    assert list(problems(["python", "-m", "tensorgrad.nothing"])) == [
        "python -m tensorgrad.nothing"
    ]
    assert list(problems(["make", "train", "ARGS=--steps 10"])) == []
    bench = ["mpirun", "-n", "2", "tensorgrad", "bench", "first-use", "--batch", "8"]
    assert list(problems(bench)) == []
    assert list(problems([*bench, "--nothing"])) == ["tensorgrad --nothing"]
    links = "[a](docs/none.md) [b](#quick-start) [c](#nothing) [d](docs/guides/data.md#nothing)"
    found = list(dead_links(ROOT / "README.md", links))
    assert found == ["docs/none.md#", "#nothing", "docs/guides/data.md#nothing"]
    sources = "`tensorgrad/tensor.py` `tensor.py` `models/none.py` `gpt2.py` `tensorgrad/nothing/`"
    assert list(missing_sources(sources)) == ["models/none.py", "tensorgrad/nothing/"]
    assert list(missing_sources("`tensor.py` `python none.py` `state.json`")) == ["tensor.py"]
    script = "compile attention/{short,none}.cu softmax.cu lost.cu  # docs/none.md docs/README.md"
    assert list(missing_files(script)) == ["docs/none.md", "attention/none.cu", "lost.cu"]
    assert len(list(python_blocks())) > 0
    assert len(list(commands())) > 2
