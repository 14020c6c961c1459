"""A release agrees with itself: version, changelog, citation, script, workflows, images."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

import tensorgrad
from tests.source_tree import ROOT
from tests.test_packaging import project
from tests.test_readme import SCRIPTS, dead_links, extras, make_targets

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
HEADING = re.compile(r"^## \[([^]]+)\](?: - (\S+))?$", re.MULTILINE)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def released() -> list[tuple[str, str]]:
    """Return the versions in the changelog and their dates, the newest first."""
    return HEADING.findall(text_of("CHANGELOG.md"))[1:]


def pythons() -> list[str]:
    """Return the versions of Python that pyproject.toml names."""
    start = "Programming Language :: Python :: 3."
    names = project()["project"]["classifiers"]
    return [f"3.{name.removeprefix(start)}" for name in names if name.startswith(start)]


def test_the_version_is_the_newest_of_the_changelog_or_on_the_way_to_a_later_one() -> None:
    newest = released()[0][0]
    base, dev, _ = tensorgrad.__version__.partition(".dev")
    assert base == newest if not dev else numbers(base) > numbers(newest)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.split(r"\.|rc", version)))


def test_the_changelog_keeps_its_format() -> None:
    text = text_of("CHANGELOG.md")
    headings = HEADING.findall(text)
    assert [heading.partition("\n")[0] for heading in re.findall(r"^## (.+)$", text, re.M)] == [
        f"[{name}]" + f" - {day}" * bool(day) for name, day in headings
    ]
    assert headings[0] == ("Unreleased", "")
    versions = [numbers(name) for name, _ in headings[1:]]
    days = [date.fromisoformat(day) for _, day in headings[1:]]
    assert versions == sorted(versions, reverse=True)
    assert days == sorted(days, reverse=True)
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= KINDS
    addresses = dict(re.findall(r"^\[([^]]+)\]: (\S+)$", text, re.MULTILINE))
    repository, newest = project()["project"]["urls"]["Repository"], headings[1][0]
    assert list(addresses) == [name for name, _ in headings]
    assert addresses["Unreleased"] == f"{repository}/compare/v{newest}...HEAD"
    assert all(addresses[v] == f"{repository}/releases/tag/v{v}" for v, _ in headings[1:])


def test_the_citation_is_of_the_newest_release() -> None:
    citation = yaml.safe_load(text_of("CITATION.cff"))
    about = project()["project"]
    assert (citation["version"], str(citation["date-released"])) == released()[0]
    assert citation["license"] == about["license"]
    assert citation["repository-code"] == about["urls"]["Repository"]
    assert [author["name"] for author in citation["authors"]] == [
        a["name"] for a in about["authors"]
    ]


def test_the_versions_page_names_the_lowest_dependencies() -> None:
    text = re.sub(r"\s+", " ", text_of("docs/versions.md"))
    about, known = project()["project"], pythons()
    (numpy,) = (name[7:] for name in about["dependencies"] if name.startswith("numpy>="))
    assert f"Python {known[0]} to {known[-1]} and on NumPy from {numpy} on." in text
    assert about["requires-python"] == f">={known[0]}"


@pytest.mark.parametrize(
    "name",
    ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md", ".github/pull_request_template.md"],
)
def test_links_lead_to_files_and_headings(name: str) -> None:
    assert list(dead_links(ROOT / name, text_of(name))) == []


# The script.

FILES = {
    "tensorgrad/__init__.py": '__version__ = "1.2.0"\n',
    "CITATION.cff": "version: 1.2.0\ndate-released: 2030-01-02\n",
    "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2030-01-02\n\n- All.\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository of which 1.2.0 could be released, if it had tests that run."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release", tmp_path / ".ci")
    (tmp_path / ".ci" / "run").write_text("#!/bin/sh\necho the tests ran\nexit 3\n")
    (tmp_path / ".ci" / "run").chmod(0o755)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", "all")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def release(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Return the exit status, and the lines about what is wrong."""
    run = subprocess.run([folder / ".ci" / "release", *words], capture_output=True, text=True)
    return run.returncode, [
        line.removeprefix("release: ")
        for line in (run.stdout + run.stderr).splitlines()
        if line.startswith(("release: ", "usage: ", "the tests"))
    ]


def test_a_release_runs_the_tests_once_everything_agrees(repository: Path) -> None:
    assert release(repository, "1.2.0") == (3, ["the tests ran"])


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["1.2.0", "--no-tests"], ["1.2.0", "--tag"]])
def test_a_release_needs_a_version_and_tests(words: list[str], repository: Path) -> None:
    usage = "usage: .ci/release VERSION [--dry-run [--no-tests]]"
    assert release(repository, *words) == (2, [usage])


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("tensorgrad/__init__.py", "1.2.0", "1.3.0", "has another __version__, expected 1.2.0"),
        ("CITATION.cff", "version: 1.2.0", "version: 1.1.0", "has another version"),
        ("CITATION.cff", "2030-01-02", "2030-01-01", "has another date-released"),
        ("CHANGELOG.md", "- All.", "", "has no text under [1.2.0]"),
        ("CHANGELOG.md", "[Unreleased]", "[Unreleased]\n- More.", "entries under [Unreleased]"),
    ],
)
def test_a_release_needs_files_that_agree(
    name: str, old: str, new: str, problem: str, repository: Path
) -> None:
    path = repository / name
    path.write_text(path.read_text().replace(old, new))
    status, (first, second) = release(repository, "1.2.0")
    assert (status, first) == (1, "the working tree has changes, expected none")
    assert second.startswith(name)
    assert problem in second


def test_a_release_needs_a_new_version_on_main(repository: Path) -> None:
    git(repository, "tag", "v1.2.0")
    git(repository, "switch", "-q", "-c", "other")
    branch, tag = "the branch is other, expected main", "the tag v1.2.0 exists"
    status, (first, second) = release(repository, "1.2.0")
    assert (status, first) == (1, branch)
    assert second.startswith(tag)
    status, lines = release(repository, "1.2.0beta")
    assert status == 1
    assert "1.2.0beta is no version, expected one like 1.2.3 or 1.2.3rc1" in lines
    assert 'CHANGELOG.md has no heading "## [1.2.0beta] - DATE"' in lines


# Workflows, forms, images.


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_rights_and_runs_what_exists(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        for step in job["steps"]:
            action, run = step.get("uses", ""), step.get("run", "")
            assert bool(action) != bool(run)
            assert not action or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)
            if action.startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
            assert not re.search(r"\$\{\{ *(inputs|github\.(event|ref))", run)  # no shell code
            scripts = re.findall(r"(?:^|[ /])\.ci/(\w+)(?!\w|\.)", run)
            assert set(scripts) <= {script.name for script in SCRIPTS}
            assert set(re.findall(r"\bmake (\w+)", run)) <= make_targets()
            groups = set(re.findall(r"--group (\w+)", run))
            assert groups <= set(project()["dependency-groups"])
    used = re.findall(r"uses: \S+(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert [comment for comment in used if not re.fullmatch(r" # v\d+\.\d+\.\d+", comment)] == []


def jobs(name: str) -> dict[str, Any]:
    """Return the jobs of a workflow."""
    found: dict[str, Any] = yaml.safe_load(text_of(f".github/workflows/{name}.yml"))["jobs"]
    return found


def test_workflows_test_every_python() -> None:
    ci = jobs("ci")
    setup = [step for step in ci["run"]["steps"] if "setup-python" in step.get("uses", "")]
    alone = [step["with"]["python-version"] for step in setup]
    matrix = ci["test"]["strategy"]["matrix"]
    assert sorted([*alone, *matrix["python"]]) == pythons()
    others = [(entry["os"].partition("-")[0], entry["python"]) for entry in matrix["include"]]
    assert others == [("macos", pythons()[0]), ("macos", pythons()[-1])]
    assert jobs("nightly")["versions"]["strategy"]["matrix"]["python"] == pythons()


def test_only_the_jobs_that_publish_may_write() -> None:
    rights = {
        (path.stem, name): job["permissions"]
        for path in WORKFLOWS
        for name, job in jobs(path.stem).items()
        if "permissions" in job
    }
    assert rights == {
        ("release", "build"): {"contents": "read"},
        ("release", "publish"): {"id-token": "write"},
        ("release", "announce"): {"contents": "write"},
    }


def test_the_release_page_lists_every_workflow() -> None:
    listed = re.findall(r"^\| `(\.github/workflows/\S+)`", text_of("docs/release.md"), re.MULTILINE)
    assert sorted(listed) == [str(path.relative_to(ROOT)) for path in WORKFLOWS]


@pytest.mark.parametrize(
    "path", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem
)
def test_a_form_has_fields_with_labels(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(form) == {"name", "description", "labels", "body"}
    assert {field["type"] for field in form["body"]} <= {"textarea", "input", "checkboxes"}
    assert all(field["attributes"]["label"] for field in form["body"])
    names = [field["id"] for field in form["body"]]
    assert len(set(names)) == len(names)
    paths = re.findall(r"`((?:docs|tests)/\S+?)`", path.read_text(encoding="utf-8"))
    assert [name for name in paths if not (ROOT / name).exists()] == []


def test_images_install_extras_that_exist_as_a_user_without_rights() -> None:
    text = text_of("Dockerfile")
    assert set(re.findall(r"^ARG PYTHON=(\S+)$", text, re.MULTILINE)) <= set(pythons())
    lists = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    lists += re.findall(r"--build-arg EXTRAS=([\w,]+)", text_of("docs/containers.md"))
    assert {name for names in lists for name in names.split(",")} <= extras()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    final = {stage.split()[2]: stage.rstrip() for stage in stages if stage.startswith("base ")}
    assert set(final) == {"cpu", "cuda"}
    assert all(stage.rstrip().split("\n#")[0].endswith("USER 1000") for stage in final.values())


def test_images_get_what_a_wheel_is_built_from() -> None:
    about = project()
    needed = {*about["project"]["license-files"], "README.md", "pyproject.toml", "setup.py"}
    needed |= {package.partition(".")[0] for package in about["tool"]["setuptools"]["packages"]}
    needed |= set(about["tool"]["setuptools"]["package-dir"].values())
    lines = text_of(".dockerignore").splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == needed
