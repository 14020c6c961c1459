from __future__ import annotations

from tests.source_tree import examples, imports

# Benchmarks share what times them; nothing else is imported from another example.
SHARED = "examples.bench"


def test_no_example_imports_another() -> None:
    names = {source.module for source in examples()}
    stems = {name.rpartition(".")[2] for name in names}
    wrong = [
        f"{source}:{found.line}: {found.name}"
        for source in examples()
        for found in imports(source)
        # `from train_gpt2 import ...` finds the script beside the one that runs
        if found.name.split(".")[0] in {"examples", *stems}
        and not (source.module.startswith(SHARED) and found.name.startswith(f"{SHARED}."))
    ]
    assert len(names) > 8
    assert wrong == []
