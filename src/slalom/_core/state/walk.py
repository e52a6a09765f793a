"""The one walk over a composition: every part with its path, state, context and parameters."""

from collections.abc import Iterator
from typing import Any

from ...tree.paths import named, not_one, snake_case
from ...tree.types import Params
from ..protocol.context import Context
from ..protocol.parts import AbstractDeclared, Part
from ..protocol.traits import AbstractTraits


def parts(
    root: AbstractDeclared,
    state: Any = None,
    context: Context | None = None,
    params: Params | None = None,
) -> Iterator[Part]:
    """The root and everything inside it, depth first, with full paths.

    Transforms, and what they hold that has hyperparameters or state of its own: skip conditions and
    stateful schedules.
    """
    outer = Part.root(root, state, context, params)
    yield from _walk(outer._replace(path=segments(root)))


def transforms(
    root: AbstractDeclared,
    state: Any = None,
    context: Context | None = None,
    params: Params | None = None,
) -> Iterator[Part]:
    """The parts that are transforms."""
    return (p for p in parts(root, state, context, params) if isinstance(p.module, AbstractTraits))


def _walk(outer: Part) -> Iterator[Part]:
    yield outer
    for part in outer.children():
        yield from _walk(
            part._replace(
                path=outer.path + part.path,
                group=outer.group + part.group,
                get=lambda root, part=part: part.get(outer.get(root)),
            )
        )


def segments(module: AbstractDeclared) -> tuple[str, ...]:
    """The segments that a part without a given name adds to a path. A chain adds none."""
    nameless = isinstance(module, AbstractTraits) and module.nameless
    return () if nameless else (snake_case(type(module).__name__),)


def inner_transforms(module: AbstractDeclared) -> list[Any]:
    """The transforms directly inside another one."""
    children = (part.module for part in Part.root(module).children())
    return [child for child in children if isinstance(child, AbstractTraits)]


def keeps_zeros(transform: AbstractTraits) -> bool:
    """Whether zeros stay zeros, through wrappers and chains too."""
    inside = inner_transforms(transform)
    return transform.keeps_zeros or (bool(inside) and all(map(keeps_zeros, inside)))


def find(root: AbstractDeclared, which: Any, state: Any = None) -> Part:
    """The one part with this path, path suffix or class. An error lists the candidates."""
    if not isinstance(which, str | type):
        raise TypeError(
            "A part is named by its path or its class, in a chain also by its position, got "
            f"{which!r} of type {type(which).__name__}."
        )
    known: dict[str, Part] = {}
    for part in parts(root, state):
        # A chain inside a wrapper has the wrapper's path: the outermost counts.
        if part.path:
            known.setdefault(part.name, part)
    if isinstance(which, str):
        found = named(which, known)
    else:
        found = [name for name, part in known.items() if type(part.module) is which]
    if len(found) != 1:
        raise not_one(which, found, known, "is not in this transform")
    return known[found[0]]
