from __future__ import annotations

from tests.source_tree import examples, imports

# The packages of the courses are packages; nothing else is imported from another example.
PACKAGES = ("examples.courses.minitorch", "examples.courses.cs336", "examples.courses.project")


def test_no_example_imports_another() -> None:
    names = {source.module for source in examples()}
    stems = {name.rpartition(".")[2] for name in names}
    wrong = [
        f"{source}:{found.line}: {found.name}"
        for source in examples()
        for found in imports(source)
        # `from train_gpt2 import ...` finds the script beside the one that runs
        if found.name.split(".")[0] in {"examples", *stems}
        and not _of_its_package(source.module, found.name)
    ]
    assert len(names) > 8
    assert wrong == []


def _of_its_package(module: str, imported: str) -> bool:
    """Whether both are of one course: its packages are on the path under their own names."""
    return module.startswith(PACKAGES) and imported.split(".")[0] in (
        module.split(".")[2],
        "minitorch",  # which the course's projects import
    )
