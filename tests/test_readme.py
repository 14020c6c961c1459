"""The documents' promises: Python blocks run; commands, links and source paths exist.

A block opened with ```python runs as it stands. ```python gpu is skipped without a GPU, ```python
torch without PyTorch, ```python jaxtyping without jaxtyping and beartype, and ```python mpi runs on
two ranks. One that names a file is a change: see test_contributing.py.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib.util import find_spec
from io import StringIO
from itertools import islice, pairwise, takewhile
from pathlib import Path

import pytest

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
JAXTYPING = pytest.mark.skipif(
    None in (find_spec("jaxtyping"), find_spec("beartype")), reason="needs jaxtyping and beartype"
)
JAX = pytest.mark.skipif(find_spec("optax") is None, reason="needs JAX, Equinox and optax")
MARKS = {
    "gpu": pytest.mark.gpu, "mpi": pytest.mark.mpi,
    "jax": JAX, "jaxtyping": JAXTYPING, "torch": TORCH,
}  # fmt: skip
PROGRAMS = sorted(ROOT.glob("examples/*.py"))
SCRIPTS = [*sorted((ROOT / ".ci").iterdir()), *sorted((ROOT / "examples" / "cluster").iterdir())]
MADE_BY_RUNNING = ("runs/", ".venv")


def blocks(document: Path) -> Iterator[tuple[int, list[str], str]]:
    """Yield (line, words after the fence, text) of every fenced block."""
    text = document.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[2].split(), match[3]


def python_blocks(document: Path) -> list[tuple[int, frozenset[str], str]]:
    """Return (line, marks, text) of the blocks of Python that run as they stand."""
    return [
        (line, frozenset(words[1:]), text)
        for line, words, text in blocks(document)
        if words[:1] == ["python"] and set(words[1:]) <= set(MARKS)
    ]


def plain_blocks(document: Path) -> dict[str, str]:
    """Return the blocks that run everywhere, by their line."""
    return {f"line-{line}": text for line, words, text in python_blocks(document) if not words}


def marked_blocks() -> Iterator[object]:
    """Yield the blocks that do not run everywhere, or not in one process."""
    for document in DOCUMENTS:
        for line, words, text in python_blocks(document):
            if words:
                marks = [MARKS[word] for word in sorted(words)]
                name = f"{document.relative_to(ROOT)}:{line}"
                yield pytest.param(text, "mpi" in words, id=name, marks=marks)


def commands(document: Path) -> list[list[str]]:
    """Return what stands in blocks of a shell, indented, or between backquotes in a sentence.

    Of programs it is what their docstrings begin with.
    """
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
    return [parts for command in found if (parts := shlex.split(command, comments=True))]


def run_scripts(texts: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the text of each script, by its name, as a program of its own, in a folder of its own."""
    scripts = []
    for name, text in texts.items():
        script = folder / name / "block.py"
        script.parent.mkdir()
        script.write_text(text, encoding="utf-8")
        shutil.copy(ROOT / "README.md", script.parent)  # some text to read
        scripts.append(str(script))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.forks", *scripts],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "document", [document for document in DOCUMENTS if plain_blocks(document)], ids=name_of
)
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    result = run_scripts(plain_blocks(document), tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("text", "on_ranks"), list(marked_blocks()))
def test_a_marked_block_runs(text: str, on_ranks: bool, tmp_path: Path) -> None:
    if on_ranks:
        script = tmp_path / "block.py"
        script.write_text(text, encoding="utf-8")
        run_ranks(script, 2)
        return
    result = run_scripts({"block": text}, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("document", [*filter(commands, (*DOCUMENTS, *PROGRAMS))], ids=name_of)
def test_commands_name_what_exists(document: Path) -> None:
    found = {" ".join(parts): list(problems(parts)) for parts in commands(document)}
    assert {command: missing for command, missing in found.items() if missing} == {}


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


def shares_the_batch(parts: list[str]) -> bool:
    """Whether the ranks of a command can divide its batch, where it says so much."""
    script = next((word for word in parts if re.search(r"train_gpt2_\w+\.py$", word)), None)
    if script is None or "--resume" in parts:
        return True
    said = dict(pairwise(parts))
    pipelines = script.endswith("_pp.py")
    ranks = int(said["-n"])
    stages = int(said.get("--pp", ranks) if pipelines else said.get("--pp", 1))
    replicas = ranks // (stages * int(said.get("--tp", 1)))
    micro = int(said.get("--micro-batches", 4) if pipelines else said.get("--micro-batches", 1))
    return int(said.get("--batch", 8)) % (replicas * micro) == 0


def test_ranks_of_a_command_can_share_the_batch() -> None:
    found = [
        parts for document in (*DOCUMENTS, *PROGRAMS) for parts in commands(document)
        if "mpirun" in parts
    ]  # fmt: skip
    assert len(found) > 20
    assert [parts for parts in found if not shares_the_batch(parts)] == []
    wrong = ["mpirun", "-n", "4", "python", "examples/train_gpt2_dp.py", "--batch", "6"]
    assert not shares_the_batch(wrong)


@cache
def made_by_changes() -> set[str]:
    """Return the files that readers of CONTRIBUTING.md, of guides and of how-to pages make."""
    changes = {words[1] for _, words, _ in blocks(ROOT / "CONTRIBUTING.md") if len(words) == 2}
    found = (text.partition("\n")[0] for document in DOCS for _, _, text in blocks(document))
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
    handler = signal.getsignal(signal.SIGINT)  # at its end a program takes the default one
    try:
        return _help_of(program)
    finally:
        signal.signal(signal.SIGINT, handler)


def _help_of(program: tuple[str, ...]) -> str:
    with redirect_stdout(StringIO()) as shown, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        patch.chdir(ROOT)
        if program[:2] == ("-m", "tensorgrad"):
            main([*program[2:], "--help"])
        else:
            run: Callable[..., object] = runpy.run_module if "-m" in program else runpy.run_path
            patch.setattr(sys, "argv", [program[-1], "--help"])
            with suppress(SystemExit), warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* without tokens under unit-test framework")
                warnings.filterwarnings("ignore", ".* found in sys.modules")
                run(program[-1], run_name="__main__")
    return shown.getvalue()


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
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


@pytest.mark.parametrize("document", [ROOT / "README.md", *DOCS], ids=name_of)
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


def test_the_checks_would_notice(tmp_path: Path) -> None:
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
    sources = (
        "`tensorgrad/core/tensor.py` `tensor.py` `models/none.py` `gpt2.py` `tensorgrad/nothing/`"
    )
    assert list(missing_sources(sources)) == ["models/none.py", "tensorgrad/nothing/"]
    assert list(missing_sources("`tensor.py` `python none.py` `state.json`")) == ["tensor.py"]
    script = "compile attention/{short,none}.cu softmax.cu lost.cu  # docs/none.md docs/README.md"
    assert list(missing_files(script)) == ["docs/none.md", "attention/none.cu", "lost.cu"]
    texts = {"good": "import tensorgrad", "wrong": "import os; os.nothing", "late": "print('end')"}
    result = run_scripts(texts, tmp_path)
    assert (result.returncode, result.stdout) == (1, "end\n")
    assert "has no attribute 'nothing'" in result.stderr
    assert "wrong/block.py ended with 1" in result.stderr
    assert sum(len(python_blocks(document)) for document in DOCUMENTS) > 50
