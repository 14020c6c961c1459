"""Trees: nested dictionaries, lists, tuples and modules, whose leaves are tensors.

None is a tree without leaves. A module is a tree of the parameters that require a gradient, by
name; a parameter that has several names is one leaf. Tests: tests/autograd/test_trees.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, Literal, NamedTuple, TypeAlias

from tensorgrad.core.errors import ArgumentError
from tensorgrad.core.tensor import Tensor

# Leaves of a tree that is built: others in their place; tensors that belong to them, such as
# gradients; or results of any shape.
How: TypeAlias = Literal["build", "results", "plain"]


class Container(NamedTuple):
    """A kind of container.

    Args:
        children: returns what a container holds, by key.
        build: `build(container, children, how)` returns another container with other children.
        stands_for: `stands_for(other, container)` returns the children of a tree in the place of
            the container, such as its tangents; None where it is none.
    """

    children: Callable[[Any], Mapping[Any, Any]]
    build: Callable[[Any, Mapping[Any, Any], How], Any]
    stands_for: Callable[[Any, Any], Mapping[Any, Any] | None]


_KINDS: dict[type, Container] = {}


def register(kind: type, functions: Container) -> None:
    """Make a class, and those derived from it, containers."""
    _KINDS[kind] = functions


def kind_of(value: Any) -> Container | None:
    """Return the kind of a container; None for a leaf."""
    for base in type(value).__mro__:
        if base in _KINDS:
            return _KINDS[base]
    return None


class Tree(NamedTuple):
    """The structure of a tree, without its leaves.

    Args:
        container: with this structure; None where the tree is a leaf.
        kind: of the container; None for a leaf.
        children: the structure of what it holds, by key.
    """

    container: Any
    kind: Container | None
    children: Mapping[Any, Tree]

    def build(self, leaves: Iterable[Any], how: How = "build") -> Any:
        """Return a tree with this structure.

        Args:
            leaves: in the order of `flatten`.
            how: what the leaves are; see `How`.
        """
        remaining = iter(leaves)

        def build(tree: Tree) -> Any:
            if tree.kind is None:
                return next(remaining)
            children = {key: build(child) for key, child in tree.children.items()}
            return tree.kind.build(tree.container, children, how)

        return build(self)

    def names(self, name: str = "") -> list[str]:
        """Return what errors call the leaves: "tangents[0]['weight']"."""
        if self.kind is None:
            return [name]
        return [
            leaf for key, child in self.children.items() for leaf in child.names(f"{name}[{key!r}]")
        ]

    def leaves_of(self, op: str, name: str, other: Any) -> list[Any]:
        """Return the leaves of another tree with this structure.

        Args:
            op, name: of the other tree, for errors.
            other: the tree. For a module it may be a dictionary of the parameters by name.

        Raises:
            ArgumentError: the structures differ; names the first place where they do.
        """
        if self.kind is None:
            if other is None or kind_of(other) is not None:
                got = "None" if other is None else f"a {type(other).__name__}"
                raise ArgumentError(f"{op}: {name} is {got}, expected a tensor")
            return [other]
        expected = type(self.container).__name__
        children = self.kind.stands_for(other, self.container)
        if children is None:
            raise ArgumentError(
                f"{op}: {name} is a {type(other).__name__}, expected a {expected} as in the primals"
            )
        missing = [key for key in self.children if key not in children]
        more = [key for key in children if key not in self.children]
        if missing or more:
            problem = f"lacks {missing[0]!r}" if missing else f"has {more[0]!r}"
            raise ArgumentError(
                f"{op}: {name} {problem}, expected the keys of the {expected} in the primals"
            )
        return [
            leaf
            for key, child in self.children.items()
            for leaf in child.leaves_of(op, f"{name}[{key!r}]", children[key])
        ]


def flatten(value: Any) -> tuple[list[Any], Tree]:
    """Return the leaves of a tree, and its structure."""
    leaves: list[Any] = []

    def structure(value: Any) -> Tree:
        kind = kind_of(value)
        if kind is None:
            leaves.append(value)
            return Tree(None, None, {})
        children = {key: structure(child) for key, child in kind.children(value).items()}
        return Tree(value, kind, children)

    return leaves, structure(value)


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a tree with function(tensor) in the place of each tensor; other leaves stay."""
    leaves, tree = flatten(value)
    return tree.build([function(x) if isinstance(x, Tensor) else x for x in leaves])


def without_modules(value: Any) -> Any:
    """Return a tree with a dictionary of the leaves by name in the place of each module."""
    leaves, tree = flatten(value)
    return tree.build(leaves, "plain")


def _dictionary(container: Any, children: Mapping[Any, Any], how: How) -> Any:
    if type(container) is dict:
        return dict(children)
    other = copy(container)  # such as an OrderedDict, or a defaultdict with its function
    other.update(children)
    return other


def _sequence(container: Any, children: Mapping[Any, Any], how: How) -> Any:
    make = getattr(container, "_make", type(container))  # that of a named tuple
    return make(children.values())


def _numbered(container: Any) -> dict[int, Any]:
    return dict(enumerate(container))


def _same_length(other: Any, container: Any) -> Mapping[Any, Any] | None:
    return _numbered(other) if isinstance(other, list | tuple) else None


register(dict, Container(dict, _dictionary, lambda x, _: x if isinstance(x, dict) else None))
register(list, Container(_numbered, _sequence, _same_length))
register(tuple, Container(_numbered, _sequence, _same_length))
register(
    type(None), Container(lambda _: {}, lambda *_: None, lambda x, _: {} if x is None else None)
)
