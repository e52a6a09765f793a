"""Puts what was read in the place of a program's own arrays, and reports what differs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import tree
from .._core.messages import warn
from .._core.printing import shortest
from .._optimizer.optimizer import Optimizer
from .._types import PyTree, Tracer
from ._leaves import is_saved, kind, named_leaves, nodes, placed, words
from ._optimizers import Layout, match
from ._report import MismatchError, Report, mismatch, other_hyperparams


class Source(NamedTuple):
    """What was read."""

    where: str
    """The source at the start of a sentence."""
    items: Mapping[str, Any]
    """Arrays, numbers and strings by name."""
    layouts: Mapping[str, Layout]
    """The layouts of optimizers, by path, where they are known."""


class Loaded(dict[str, Any]):
    """The trees that were loaded, by keyword, and a report."""

    report: Report
    """What was loaded and what differs."""


class _Findings(NamedTuple):
    loaded: list[str]
    missing: list[str]
    reshaped: dict[str, tuple[str, str]]
    retyped: dict[str, tuple[str, str]]
    hyperparams: dict[str, tuple[str, str]]
    used: set[str]
    """Names in the source that have a counterpart."""
    recoded: list[str]
    """The optimizers whose state rests in other codecs."""


class _Origins(NamedTuple):
    """Where the leaves of one optimizer come from, by their full names."""

    sources: dict[str, str]
    held: set[str]
    gathered: dict[str, Any]
    rules: set[str]
    """The arrays of its transform."""
    recoded: dict[str, tuple[str, str]]
    """The codecs of encoded arrays that have another one in the source: that one and its own."""


def assemble(
    source: Source, templates: Mapping[str, PyTree], strict: bool, hyperparams: str
) -> Loaded:
    """The templates with the values of the source.

    **Arguments:**

    - `source`: what was read.
    - `templates`: the trees of the program, by keyword.
    - `strict`: whether a difference is an error.
    - `hyperparams`: whose hyperparameters to use: `"program"` or `"file"`.
    """
    if hyperparams not in ("program", "file"):
        raise ValueError(f'`hyperparams` must be "program" or "file", got {hyperparams!r}.')
    found = _Findings([], [], {}, {}, {}, set(), [])
    trees = {
        root: _filled(root, template, source, hyperparams == "file", found)
        for root, template in templates.items()
    }
    asked = [name for name in source.items if name.partition(".")[0] in templates]
    unexpected = tuple(name for name in asked if name not in found.used)
    report = Report(
        tuple(found.loaded),
        tuple(found.missing),
        unexpected,
        found.reshaped,
        found.retyped,
        found.hyperparams,
    )
    if strict and not report.fits:
        raise MismatchError(mismatch(report, source.where, bool(found.recoded)))
    _check_concrete(trees, source.where)
    if report.hyperparams:
        warn(other_hyperparams(report, source.where))
    loaded = Loaded(trees)
    loaded.report = report
    return loaded


def _filled(
    root: str, template: PyTree, source: Source, take_hyperparams: bool, found: _Findings
) -> PyTree:
    """One tree with the values of the source."""
    leaves = named_leaves(root, template)
    origins = _Origins({}, set(), {}, set(), {})
    for path, node in nodes(root, template):
        if isinstance(node, Optimizer):
            _add_origins(path, node, source, origins, found)
            if not take_hyperparams:  # those of the file are not missed
                rules = source.layouts[path].rules if path in source.layouts else ()
                found.used.update(f"{path}.{name}" for name in rules)
    new = []
    for name, leaf in leaves:
        if not is_saved(root, leaf):
            new.append(leaf)
            continue
        if isinstance(leaf, Tracer):
            raise TypeError(
                f"'{name}' is being traced: a checkpoint cannot be loaded inside a function that "
                "JAX transforms. Load it first, and pass what it holds."
            )
        origin = origins.sources.get(name, name)
        given = origins.gathered.get(name, source.items.get(origin))
        if origin in source.items:
            found.used.add(origin)
        if name in origins.rules and not take_hyperparams and not _abstract(leaf):
            if given is not None and not _equal(given, leaf):
                found.hyperparams[name] = shortest(_plain(given)), shortest(_plain(leaf))
            new.append(leaf)
            continue
        if name in origins.recoded and _difference(leaf, given) != "shape":
            found.retyped[name] = origins.recoded[name]
            new.append(leaf)
            continue
        new.append(_taken(name, leaf, given, name in origins.held, name in origins.gathered, found))
    return jax.tree.structure(template).unflatten(new)


def _add_origins(
    path: str, opt: Optimizer, source: Source, origins: _Origins, found: _Findings
) -> None:
    """Adds where the arrays of an optimizer come from."""
    own, saved = Layout.of(opt), source.layouts.get(path)
    origins.rules.update(f"{path}.{name}" for name in own.rules)
    arrays = dict(zip(opt.binding.names, opt.arrays, strict=True))
    start = f"{path}."
    given = {n.removeprefix(start): x for n, x in source.items.items() if n.startswith(start)}
    alike = given.keys() == arrays.keys() and all(
        not _difference(arrays[name], x) for name, x in given.items()
    )
    several_runs = opt.arrays[-1].ndim > 0
    if saved is None or several_runs or (alike and saved == own):
        return  # by their names alone
    if not own.stores_like(saved):
        found.recoded.append(path)
    matched = match(own, arrays, saved, given)
    for name in (*own.rules, *own.state):
        # A name that the file has for something else is no counterpart.
        theirs = matched.sources.get(name)
        origins.sources[start + name] = "" if theirs is None else start + theirs
        old, new = saved.codecs.get(theirs or ""), own.codecs.get(name)
        if old is not None and new is not None and old != new:
            origins.recoded[start + name] = old, new
    origins.held.update(start + name for name in matched.held)
    origins.gathered.update({start + name: value for name, value in matched.gathered.items()})
    found.used.update(start + name for name in matched.used)


def _taken(name: str, leaf: Any, given: Any, held: bool, gathered: bool, found: _Findings) -> Any:
    """The value of a leaf: the given one if it fits, or else the leaf itself."""
    difference = "" if given is None or gathered else _difference(leaf, given)
    if given is None or held:
        found.missing.append(name)
    elif difference:
        shapes = difference == "shape"
        words = (_shape if shapes else _type)(given), (_shape if shapes else _type)(leaf)
        (found.reshaped if shapes else found.retyped)[name] = words
    else:
        found.loaded.append(name)
        return placed(given, leaf)
    return leaf


def _difference(leaf: Any, given: Any) -> str:
    """In what a given value differs from the leaf that it should replace, if in anything."""
    if not (_has_shape(leaf) and _has_shape(given)):
        return "" if type(leaf) is type(given) else "type"
    if tuple(leaf.shape) != tuple(given.shape):
        return "shape"
    return "" if kind(leaf) == kind(given) else "type"


def _has_shape(x: Any) -> bool:
    return tree.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _shape(x: Any) -> str:
    return str(tuple(x.shape))


def _type(x: Any) -> str:
    return kind(x) if _has_shape(x) else f"a Python {type(x).__name__}"


def _equal(given: Any, leaf: Any) -> bool:
    if _difference(leaf, given):
        return False
    return np.asarray(_plain(given)).tobytes() == np.asarray(_plain(leaf)).tobytes()


def _plain(x: Any) -> Any:
    return words(x) if _has_shape(x) else x


def _abstract(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _check_concrete(trees: Mapping[str, PyTree], where: str) -> None:
    """Raises an error for abstract leaves that got no value."""
    for root, filled in trees.items():
        left = [name for name, x in named_leaves(root, filled) if _abstract(x)]
        if left:
            raise MismatchError(
                f"{where} has nothing that fits '{left[0]}', and the program has no value for it: "
                "it is abstract. Pass a model and an optimizer with arrays."
            )
