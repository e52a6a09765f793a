"""Puts what was read in place of a program's own arrays, and reports what differs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import tree
from .._core.text.messages import warn
from .._core.text.printing import shortest
from .._loop.binding.optimizer import Optimizer
from ..tree.types import PyTree, Tracer
from ._file import Unread
from ._leaves import is_saved, kind, named_leaves, nodes, placed, words
from ._optimizers import Layout, match
from ._report import MismatchError, Report, mismatch, other_hyperparams


class Source(NamedTuple):
    """What was read."""

    where: str
    """The source at the start of a sentence."""
    items: Mapping[str, Any]
    """Arrays, read or not, and numbers and strings, by name."""
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
    restarted: list[str]
    recoded: list[str]
    hyperparams: dict[str, tuple[str, str]]
    used: set[str]
    """Names in the source that have a counterpart."""


class _Origins(NamedTuple):
    """Where the leaves of a tree's optimizers come from, by their full names."""

    sources: dict[str, str]
    """Names in the source; `""` for what is not in it."""
    made: dict[str, Any]
    """Values made from others of the source."""
    kept: set[str]
    """The arrays that keep their value, and are reported already or need not be."""
    rules: set[str]
    """The arrays of transforms."""


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
    found = _Findings([], [], {}, {}, [], [], {}, set())
    chosen = {
        root: _chosen(root, template, source, hyperparams == "file", found)
        for root, template in templates.items()
    }
    asked = [name for name in source.items if name.partition(".")[0] in templates]
    report = Report(
        loaded=tuple(found.loaded),
        missing=tuple(found.missing),
        unexpected=tuple(name for name in asked if name not in found.used),
        reshaped=found.reshaped,
        retyped=found.retyped,
        restarted=tuple(found.restarted),
        recoded=tuple(found.recoded),
        hyperparams=found.hyperparams,
    )
    if strict and not report.fits:
        raise MismatchError(mismatch(report, source.where))
    # Nothing large has been read so far. One array after the other is, and goes to its devices.
    trees = {
        root: jax.tree.structure(template).unflatten(
            [placed(value, leaf) if is_taken else leaf for leaf, value, is_taken in chosen[root]]
        )
        for root, template in templates.items()
    }
    _check_concrete(trees, source.where)
    if report.hyperparams:
        warn(other_hyperparams(report, source.where))
    loaded = Loaded(trees)
    loaded.report = report
    return loaded


def _chosen(
    root: str, template: PyTree, source: Source, take_hyperparams: bool, found: _Findings
) -> list[tuple[Any, Any, bool]]:
    """For each leaf of a tree: itself, its value in the source, and whether it takes it."""
    leaves = named_leaves(root, template)
    origins = _Origins({}, {}, set(), set())
    for name, leaf in leaves:
        if is_saved(root, leaf) and isinstance(leaf, Tracer):
            raise TypeError(
                f"'{name}' is being traced: a checkpoint cannot be loaded inside a function that "
                "JAX transforms. Load it first, and pass what it holds."
            )
    for path, node in nodes(root, template):
        if isinstance(node, Optimizer):
            _add_origins(path, node, source, origins, found)
            if not take_hyperparams and path in source.layouts:
                # Those of the file are not missed.
                found.used.update(f"{path}.{name}" for name in source.layouts[path].rule_arrays)
    chosen = []
    for name, leaf in leaves:
        given, is_taken = None, False
        if is_saved(root, leaf):
            origin = origins.sources.get(name, name)
            given = origins.made.get(name, source.items.get(origin))
            if origin in source.items:
                found.used.add(origin)
            if name in origins.kept:
                pass
            elif name in origins.rules and not take_hyperparams and not _abstract(leaf):
                if given is not None and not _equal(given, leaf):
                    found.hyperparams[name] = _number(given), _number(leaf)
            elif name in origins.made:
                found.loaded.append(name)
                is_taken = True
            else:
                is_taken = _fits(name, leaf, given, found)
        chosen.append((leaf, given, is_taken))
    return chosen


def _add_origins(
    path: str, opt: Optimizer, source: Source, origins: _Origins, found: _Findings
) -> None:
    """Adds where the arrays of an optimizer come from."""
    own, saved = Layout.of(opt), source.layouts.get(path)
    start = f"{path}."
    origins.rules.update(start + name for name in own.rule_arrays)
    arrays = dict(zip(opt.binding.names, opt.arrays, strict=True))
    given = {n.removeprefix(start): x for n, x in source.items.items() if n.startswith(start)}
    is_same = saved == own and all(
        name in given and not _difference(x, given[name]) for name, x in arrays.items()
    )
    several_runs = opt.arrays[-1].ndim > 0
    if saved is None or several_runs or is_same:
        return  # by their names alone
    matched = match(opt, own, arrays, saved, given)
    for leaf in (*own.rules, *own.state):
        for name in leaf.arrays:
            # A name that the file has for something else is no counterpart.
            theirs = matched.sources.get(name)
            origins.sources[start + name] = "" if theirs is None else start + theirs
    origins.made.update({start + name: value for name, value in matched.made.items()})
    origins.kept.update(start + name for name in matched.kept)
    found.used.update(start + name for name in matched.used)
    found.reshaped.update({start + name: x for name, x in matched.reshaped.items()})
    found.retyped.update({start + name: x for name, x in matched.retyped.items()})
    found.restarted.extend(start + name for name in matched.restarted)
    found.recoded.extend(start + name for name in matched.recoded)


def _fits(name: str, leaf: Any, given: Any, found: _Findings) -> bool:
    """Whether a value can take the place of a leaf. Notes what it finds."""
    if given is None:
        found.missing.append(name)
        return False
    difference = _difference(leaf, given)
    if not difference:
        found.loaded.append(name)
        return True
    in_words, of = (_shape, found.reshaped) if difference == "shape" else (_type, found.retyped)
    of[name] = in_words(given), in_words(leaf)
    return False


def _difference(leaf: Any, given: Any) -> str:
    """In what a given value differs from the leaf that it should replace, if in anything."""
    if not (_has_shape(leaf) and _has_shape(given)):
        return "" if type(leaf) is type(given) else "type"
    if tuple(leaf.shape) != tuple(given.shape):
        return "shape"
    return "" if kind(leaf) == kind(given) else "type"


def _has_shape(x: Any) -> bool:
    return tree.is_array(x) or isinstance(x, jax.ShapeDtypeStruct | Unread)


def _shape(x: Any) -> str:
    return str(tuple(x.shape))


def _type(x: Any) -> str:
    return kind(x) if _has_shape(x) else f"a Python {type(x).__name__}"


def _equal(given: Any, leaf: Any) -> bool:
    if _difference(leaf, given):
        return False
    return np.asarray(_plain(given)).tobytes() == np.asarray(_plain(leaf)).tobytes()


def _plain(x: Any) -> Any:
    if isinstance(x, Unread):
        return x.read()
    return words(x) if _has_shape(x) else x


def _number(x: Any) -> str:
    return shortest(_plain(x))


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
