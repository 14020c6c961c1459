"""Import every public module of the installed package, from a folder that is no checkout."""

import importlib
import pathlib
import pkgutil
import sys

import tensorgrad

assert pathlib.Path(tensorgrad.__file__).is_relative_to(sys.prefix), tensorgrad.__file__
names = [module.name for module in pkgutil.walk_packages(tensorgrad.__path__, "tensorgrad.")]
names = [name for name in names if not name.split(".")[-1].startswith("_")]
for name in names:
    importlib.import_module(name)
print(f"imported {len(names)} modules")
