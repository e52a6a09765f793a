"""The lifetime of the compiled programs of optimizers.

A function compiled with `jax.jit` is freed with its programs. `opt.step` is never freed, so its
programs belong to families: the optimizers of one structure for parameters of the same shapes. They
share their programs, which are freed with the last of them.

A loop over seeds may drop an optimizer before it makes one like it. So the families used last are
kept. Those with functions that hold data are kept only as long as the transform that they are in.
"""

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from ...tree.captures import captures, release_functions_with
from ...tree.types import PyTree

MOST_KEPT = 8


class Family(dict[Any, Any]):
    """The programs of a family of optimizers, by what is compiled."""

    __slots__ = ("__weakref__",)


_alive: weakref.WeakValueDictionary[Hashable, Family] = weakref.WeakValueDictionary()
_kept: dict[int | None, OrderedDict[Hashable, Family]] = {}
"""The families used last, of each transform with such functions, and of all others together."""


def release(transform: Any, binding: Any) -> None:
    """Lets the functions that hold data die with the transform and the binding that they are in."""
    in_transform, in_binding = captures(transform), captures((binding.trainable, binding.params))
    if in_transform or in_binding:
        release_functions_with(binding, *[transform] * in_transform)
        source = (lambda: None) if in_binding else weakref.ref(transform)
        object.__setattr__(binding, "source", source)


def family_of(opt: Any, model: PyTree) -> Family:
    """The family of an optimizer for this model. Its binding keeps it."""
    binding = opt.binding
    family = binding.family
    if family is None:
        # Without the binding, which would keep the family that it keys.
        structure = jax.tree.structure((opt.arrays, model)), binding.trainable, binding.sharding
        shapes = [(np.shape(x), getattr(x, "dtype", None)) for x in jax.tree.leaves((opt, model))]
        family = _family((*structure, tuple(shapes)), binding.source)
        object.__setattr__(binding, "family", family)
    return family


def _family(key: Hashable, source: Any) -> Family:
    try:
        family = _alive.get(key)
    except TypeError:
        return Family()  # has no hash, which the program itself refuses by name
    if family is None:
        family = _alive[key] = Family()
    _keep(key, family, source)
    return family


def _keep(key: Hashable, family: Family, source: Any) -> None:
    whose = None
    if source is not None:
        transform = source()
        if transform is None:
            return
        whose = id(transform)
        if whose not in _kept:
            weakref.finalize(transform, _kept.pop, whose).atexit = False
    families = _kept.setdefault(whose, OrderedDict())
    families[key] = family
    families.move_to_end(key)
    while len(families) > MOST_KEPT:
        families.popitem(last=False)
