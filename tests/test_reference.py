"""The pages of the reference agree with the code: tables of the site, files, the glossary.

Tables that the repository has too are compared in tests/test_results.py.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tensorgrad as tg
from tensorgrad import errors
from tensorgrad.bench import sweep as sweep_module
from tensorgrad.bench.sweep import Sweep, run_sweep
from tensorgrad.cli import main
from tensorgrad.data.words import WordVocabulary
from tensorgrad.io.weights import ArrayFile
from tensorgrad.kernels import tuned
from tensorgrad.ops import elementwise
from tensorgrad.ops.elementwise import activation
from tensorgrad.parallel import merge
from tensorgrad.train import config
from tensorgrad.train.tasks import TASKS, task_class
from tests import reference
from tests.file_formats import cells, compare, documented, fields_of, quoted, section, text_of
from tests.source_tree import ROOT, library

SOME_VERSIONS = {"trapz", "in1d", "random_integers"}  # have these names of NumPy


def extension(name: str) -> ModuleType:
    """Return a module of docs/_ext, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_ext" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return extension("tables")


@pytest.fixture(scope="module")
def glossary() -> ModuleType:
    return extension("glossary")


# Tables of the site.


def test_every_table_of_the_site_has_a_place_on_one_page(tables: ModuleType) -> None:
    pages = [path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")]
    places = [name for page in pages for name in tables.BLOCK.findall(page)]
    assert sorted(places) == sorted(tables.TABLES)


def test_a_block_is_replaced_by_its_table(tables: ModuleType) -> None:
    text = "a\n<!-- site numpy_instead -->\nnot here\n<!-- /site -->\nb"
    table = tables.numpy_instead()
    assert tables.rendered(text) == f"a\n\n{table}\n\nb"
    assert {line.count(" | ") for line in table.splitlines()} == {1}


def test_every_elementwise_function_has_its_rows(tables: ModuleType) -> None:
    named = {row.name for row in tables.rows().values()}
    public = {*elementwise.__all__, *activation.__all__}
    assert named <= public
    assert public - named == set(quoted(section("elementwise", "Composed functions")))
    values, gradients = tables.elementwise_values(), tables.elementwise_gradients()
    assert len(cells(values)) == len(tables.rows())
    exp = "| {py:obj}`exp <tensorgrad.exp>` |"
    assert f"{exp} `x` | `exp(x)` | `exp(x)` |" in values
    assert f"{exp} float16 | float16 | float64 | float64 | float16 |" in tables.elementwise_dtypes()
    assert "| dx = `dy * y` | `y` |" in gradients
    assert not any("isnan" in row[0] for row in cells(gradients))
    assert tables.result_dtype(tables.rows()["invert"], "float16") == "DtypeError"


def test_every_name_of_numpy_has_an_answer(tables: ModuleType) -> None:
    instead = {row[0].strip("`") for row in cells(tables.numpy_instead())}
    listed = set()
    for space, (theirs, ours) in tables.numpy_spaces().items():
        missing = set(theirs.__all__) - set(ours.__all__) - SOME_VERSIONS
        listed |= missing
        if space != "numpy":  # test_numpy_names.py has those
            assert {
                name for name in missing - tables.explained() if f"{space}.{name}" not in instead
            } == set()
    assert tables.explained() - SOME_VERSIONS <= listed
    assert "Not here: `fft2`, `ifft2`, `irfft2`, `rfft2`." in tables.numpy_names()


def test_the_array_api_is_whole(tables: ModuleType) -> None:
    counts = re.findall(r"Of (\d+) names, (\d+) are the same here", tables.array_api_names())
    assert len(counts) == 3
    assert all(count == served for count, served in counts)


def test_every_name_of_pytorch_is_in_the_tables(tables: ModuleType) -> None:
    names = json.loads(tables.NAMES.read_text(encoding="utf-8"))["torch"]["names"]
    _, *parts = re.split(r"^### `([\w.]+)`$", tables.torch_names(), flags=re.MULTILINE)
    assert parts[::2] == list(names)
    for space, text in zip(parts[::2], parts[1::2], strict=True):
        assert set(names[space]) - set(quoted(text)) == set()
    assert tables.answer("cat", "tensorgrad") == ("name", "`tensorgrad.concatenate`")
    assert tables.answer("numel", "tensorgrad") == ("expression", "`x.size`")
    assert tables.answer("relu_", "tensorgrad")[0] == "in place"
    assert tables.answer("conv1d", "tensorgrad")[0] == "omitted"
    assert tables.answer("vmap", "tensorgrad") == ("", "")


# The command line.


def test_every_option_and_setting_is_in_the_tables(tables: ModuleType) -> None:
    commands, training = tables.command_line(), tables.training_options()
    found = dict(tables.commands())
    assert {"tensorgrad info", "tensorgrad train", "tensorgrad bench kernels"} <= found.keys()
    for words in found:
        assert words.startswith("tensorgrad train") or f"### `{words}`\n" in commands
    for words in ("tensorgrad generate", "tensorgrad bench step"):
        names = {argument.name for argument in found[words].assemble_argument_collection()}
        text = section_of(commands, f"`{words}`")
        assert {row[0].split("`")[1] for row in cells(text)} == names - {"*"}
    for task in TASKS:
        text = training.partition("\n### `")[0] + section_of(training, f"`tensorgrad train {task}`")
        rows = {row[0].split(" ")[0]: row for row in cells(text)}
        for f in fields(task_class(task).Settings):
            option = f"`{config.flag(f)}`"
            if option in rows:
                saved = f"`{f.name}`" if f.metadata["saved"] else ""
                assert rows[option][-1] == saved
            else:
                assert f.metadata["refused"] or len(f.metadata["choices"] or "many") <= 1
    assert "| `--top-p` | number | `0.95` |" in commands
    assert "; with `--download`, the name of a model" in commands
    assert "| `--keep` | integer | `2` |" in training


def section_of(text: str, heading: str) -> str:
    return text.partition(f"### {heading}\n")[2].partition("\n### ")[0]


def test_environment_variables_are_on_the_page() -> None:
    page = cells(section("command-line", "Environment variables"))
    assert {name for row in page for name in quoted(row[0])} == set(environment_variables())


def environment_variables() -> Iterator[str]:
    """Yield the variables that the library reads by name."""
    for source in library():
        if "os.environ" not in source.path.read_text(encoding="utf-8"):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_VARIABLES"):
                yield from ast.literal_eval(node.value)
            elif isinstance(node, ast.Call):
                function = ast.unparse(node.func)
                if function in ("os.environ.get", "os.environ.setdefault", "_number_in"):
                    names = node.args[0]
                    found = names.elts if isinstance(names, ast.Tuple) else [names]
                    yield from (str(name.value) for name in found if isinstance(name, ast.Constant))


# Errors and kernels.


def test_every_exception_has_a_remedy() -> None:
    rows = cells(section("errors", "Remedies"))
    assert [quoted(row[0])[0] for row in rows] == errors.__all__


# Cases with a residual, and without the gradient.
OTHER_WORK = {
    *("dropout + residual forward", "bias + dropout + residual forward", "cross_entropy forward")
}


def test_every_cuda_source_has_its_work() -> None:
    sources = reference.KERNELS.rglob("*.cu")
    files = {path.relative_to(reference.KERNELS).as_posix() for path in sources}
    assert set(reference.COSTS) == files
    compared = set()
    for source, row in reference.measured():
        assert source in files | {reference.GENERATED}
        cost = re.match(
            r"(\d?) ?S bytes(?:[^,]*, (\d) S backward)?", reference.COSTS.get(source, "")
        )
        count = reference.elements(row["size"])
        if cost and count and row["name"] not in OTHER_WORK:
            backward = row["name"].endswith("backward") and cost[2]
            size = 4 if row["dtype"] == "float32" else 2
            assert row["amount"] == int(backward or cost[1] or 1) * size * count, row["name"]
            compared.add(source)
    assert len(compared) >= 7


# Files.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small run, with the cache of its text beside it."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "text.txt").write_text("Some words to train on.\n" * 80)
    sizes = "--context 8 --layers 1 --width 8 --heads 1 --vocab 257 --batch 2 --steps 2 --no-plot"
    often = "--evaluate-every 1 --sample-every 1 --sample 4 --validation 0.1 --device cpu"
    places = ["--data", folder / "text.txt", "--out", folder / "run", "--cache", folder / "cache"]
    words = ["train", *sizes.split(), *often.split(), *map(str, places)]
    assert main(words) == 0
    return folder / "run"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def printed(words: str) -> Any:
    with redirect_stdout(StringIO()) as out:
        assert main(words.split()) == 0
    return json.loads(out.getvalue())


def test_files_of_a_run_have_the_documented_fields(run: Path) -> None:
    for name in ("facts.json", "environment.json"):
        compare(read(run / name), fields_of(name))
    for name in ("metrics.jsonl", "times.jsonl", "samples.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        for line in lines:
            compare(line, fields_of(name))
        written = {(field,) for line in lines for field in line}
        on_a_gpu = {"mfu", "memory_mb", "gpu_utilization", "clock_mhz", "watts"}
        assert fields_of(name).keys() - written <= {(field,) for field in (*on_a_gpu, "epoch")}
    settings = fields(task_class("language-model").Settings)
    assert list(read(run / "config.json")) == [f.name for f in settings if f.metadata["saved"]]


def test_a_checkpoint_has_the_documented_fields(run: Path) -> None:
    folder = run / "checkpoints" / "step-00000002"
    state = read(folder / "state.json")
    compare(state, fields_of("state.json"))
    assert state["format"] == 1
    rows = cells(section("file-formats", "rank-NNNNN.safetensors"))
    assert [quoted(row[0])[0] for row in rows] == ["model/NAME", "optimizer/STATE/NAME"]
    with ArrayFile(folder / "rank-00000.safetensors") as file:
        parts = {tuple(name.split("/")[:-1]) for name in file.names}
        assert parts == {("model",), ("optimizer", "m"), ("optimizer", "v")}
        assert {str(file.dtype(name)) for name in file.names} == {"float32"}


def test_metadata_of_safetensors_files(run: Path, tmp_path: Path) -> None:
    tg.save({"a": tg.ones(2), "b": 1}, tmp_path / "saved.safetensors")
    merge.main([str(run), str(tmp_path / "merged.safetensors")])
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    files = {
        "checkpoint": run / "checkpoints" / "step-00000002" / "rank-00000.safetensors",
        "`tg.save`": tmp_path / "saved.safetensors",
        "merged": tmp_path / "merged.safetensors",
        "exported": tmp_path / "exported" / "model.safetensors",
    }
    table: dict[str, set[str]] = {}
    for name, key, _ in cells(section("file-formats", "Metadata of safetensors files")):
        table.setdefault(name, set()).add(key.strip("`"))
    assert list(table) == list(files)
    for name, path in files.items():
        with ArrayFile(path) as file:
            keys = {*file.metadata, *(["crc32"] if file.sum else [])}
        assert keys == table[name] - {"settings"}, name


def test_a_prepared_text_and_vocabularies_have_the_documented_fields(run: Path) -> None:
    (facts,) = (run.parent / "cache").glob("*/corpus.json")
    compare(read(facts), fields_of("corpus.json"))
    assert read(facts)["format"] == 3
    tokens = np.load(facts.with_name("train.npy"), mmap_mode="r")
    assert (tokens.dtype.str, tokens.ndim) == ("<u2", 1)
    compare(read(facts.with_name("tokenizer.json")), fields_of("tokenizer.json"))
    WordVocabulary(["film", "good"]).save(run / "words.json")
    compare(read(run / "words.json"), fields_of("words.json"))


def test_results_of_a_benchmark_have_the_documented_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"date": "2026-01-02", "commit": "12345678e012", "versions": "numpy 2.0"}
    monkeypatch.setattr(sweep_module, "provenance", lambda: facts)
    sweep = Sweep("squares", [{"n": 2, "dtype": "int64"}], lambda case: {"ms": 0.5}, ("ms",))
    run_sweep(sweep, tmp_path, device="cpu", version="1.2.3")
    compare(read(tmp_path / "squares.json"), fields_of("Results of a benchmark"))


def test_tuned_choices_are_as_on_the_page(tmp_path: Path) -> None:
    rows = json.loads(quoted(section("file-formats", "tuned.json"))[0])
    tuned.write(tmp_path / "tuned.json", rows)
    assert tuned.read(tmp_path / "tuned.json") == rows == read(tmp_path / "tuned.json")


def test_output_of_commands_has_the_documented_fields(run: Path) -> None:
    text = section("file-formats", "Output of commands as JSON")
    evaluation, plan = text.split("`tensorgrad plan --json`")
    compare(printed(f"evaluate {run} --json --device cpu"), documented(evaluation))
    compare(printed("plan --preset gpt2-124M --batch 8 --json"), documented(plan))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"step": 1, "prompt": "a"}, "lacks .*text"),
        ({"step": "1", "prompt": "a", "text": "b"}, "step"),
        ({"step": 1, "prompt": "a", "text": "b", "more": 1}, "more is not documented"),
    ],
)
def test_a_field_that_differs_is_found(found: dict[str, Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        compare(found, fields_of("samples.jsonl"))


# The glossary.


def entries() -> dict[str, str]:
    _, *parts = re.split(r"^## (.+)$", text_of("glossary"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_entries_of_the_glossary_are_short_and_lead_on() -> None:
    titles = list(entries())
    assert titles == sorted(titles, key=str.lower)
    assert len(titles) == len({title.lower() for title in titles}) >= 80
    for title, entry in entries().items():
        text = re.sub(r"^Also: .*", "", entry.strip()).strip()
        assert text.count("](") == 1, title
        said = text.partition(" See [")[0]
        assert 1 <= len(re.findall(r"[.](?:\s|$)", said)) <= 3, title


def test_forms_of_terms_are_of_one_entry(glossary: ModuleType) -> None:
    forms = re.findall(r"^Also: ([^.]+)\.$", text_of("glossary"), re.MULTILINE)
    count = sum(len(re.split(r",\s+", line)) for line in forms)
    titles = [title for title in entries() if "(" not in title]
    assert len(glossary.Terms(text_of("glossary")).titles) == count + len(titles)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A warp of the SM", ["warp", "SM"]),
        ("Warps and warps", ["Warps"]),
        ("bf16, then bfloat16 and BF16", ["bf16"]),
        ("all-reduced, an all-reduce, pre-all-reduce", ["all-reduce"]),
        ("Flash\nattention", ["Flash\nattention"]),
        ("a block, a thread block", ["thread block"]),
        ("sm, tma and zero", []),
    ],
)
def test_first_uses_of_terms(glossary: ModuleType, text: str, found: list[str]) -> None:
    terms, used = glossary.Terms(text_of("glossary")), set[str]()
    uses = list(terms.uses(text, used))
    assert [text[start:stop] for start, stop, _ in uses] == found
    assert {title for *_, title in uses} == used <= set(entries())
    assert list(terms.uses(text, used)) == []


@pytest.fixture(scope="module")
def linked() -> Iterator[Callable[[str, str], list[tuple[str, str]]]]:
    """Return the texts and addresses of links that a page has once its terms are linked."""
    pytest.importorskip("sphinx")
    core, nodes = map(pytest.importorskip, ("docutils.core", "docutils.nodes"))

    def links(page: str, text: str) -> list[tuple[str, str]]:
        settings = {"_disable_config": True, "doctitle_xform": False}
        tree = core.publish_doctree(text, settings_overrides=settings)
        words = tree.astext()
        builder = SimpleNamespace(get_relative_uri=lambda page, other: f"{other}.html")
        site = SimpleNamespace(env=SimpleNamespace(docname=page), builder=builder)
        module.link_terms(site, tree)
        assert tree.astext() == words
        return [(node.astext(), node["refuri"]) for node in tree.findall(nodes.reference)]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "_ext")
        module = extension("glossary_links")
        yield links
    for name in ("glossary", "pages"):
        del sys.modules[name]


WARP = "docs/reference/glossary.html#warp"
SM = "docs/reference/glossary.html#streaming-multiprocessor"


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("A warp of the SM.\n\nWarps of SMs.", [("warp", WARP), ("SM", SM)]),
        ("The warp\n========\n\nWarps.", [("Warps", WARP)]),
        ("A ``warp``, then *Warps*.", [("Warps", WARP)]),
        ("::\n\n    a warp\n\n- Warps", [("Warps", WARP)]),
        ("`A warp <a.html>`__, then Warps.", [("A warp", "a.html"), ("Warps", WARP)]),
        ("Some :math:`warp`, then Warps.", [("Warps", WARP)]),
        ("=======  ======\na warp   a row\n=======  ======\n\nWarps.", [("Warps", WARP)]),
        (".. figure:: a.png\n\n   A warp.\n\nWarps.", [("Warps", WARP)]),
    ],
)
def test_first_uses_of_terms_are_links(linked: Any, text: str, links: list[Any]) -> None:
    assert linked("docs/chapters/x", f"Page\n####\n\n{text}") == links


def test_terms_are_links_on_pages_that_teach(linked: Any) -> None:
    assert linked("docs/how-to/x", "A warp.") == [("warp", WARP)]
    assert linked("docs/reference/glossary", "A warp.") == linked("reference/x", "A warp.") == []
