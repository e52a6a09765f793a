"""The compiled programs of optimizers, and their lifetime.

They take what a call passes as one tree, such as `StepInputs`. The class of the optimizer in it is
in the file above this one."""

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._core.protocol.bases import params_to_evaluate
from ..._core.protocol.context import Context
from ..._core.protocol.parts import Part
from ..._core.protocol.writer import RETURN
from ...tree.packed import captures
from ...tree.sharding import to_device
from ...tree.types import PyTree, Updates
from ..binding.loop_warnings import warn_of_unread_scale
from ..binding.model import split
from ..binding.stepping import advance, check_arrays, check_readable
from .arguments import carried
from .program import Family, Program

MOST_KEPT = 8

Read = TypeVar("Read")


# A function compiled with `jax.jit` is freed with its programs. `opt.step` is never freed, so its
# programs belong to families: the optimizers of one structure for parameters of the same shapes.
# They share their programs, which are freed with the last of them.
#
# A loop over seeds may drop an optimizer before it makes one like it. So the families used last are
# kept. Those with functions that hold data are kept only as long as the transform that they are in.

_alive: weakref.WeakValueDictionary[Hashable, Family] = weakref.WeakValueDictionary()
_kept: dict[int | None, OrderedDict[Hashable, Family]] = {}
"""The families used last, of each transform with such functions, and of all others together."""


def source_of(transform: Any, binding: Any) -> Callable[[], Any] | None:
    """The `source` of a binding of a transform."""
    if captures((binding.trainable, binding.params)):
        return lambda: None
    return weakref.ref(transform) if captures(transform) else None


def family_of(inputs: Any, name: str = "family") -> Family:
    """The programs of an optimizer for a model, both in a named tuple.

    **Arguments:**

    - `inputs`: the named tuple.
    - `name`: the field of the binding that keeps them.
    """
    opt, model = inputs.opt, inputs.model
    binding = opt.binding
    family = getattr(binding, name)
    if family is None:
        # Without the binding, which would keep the family that it keys.
        structure = jax.tree.structure((opt.arrays, model)), binding.trainable, binding.sharding
        shapes = [(np.shape(x), getattr(x, "dtype", None)) for x in jax.tree.leaves((opt, model))]
        key, family = (*structure, tuple(shapes)), Family()
        # A key without a hash is refused by the program itself, by name.
        with contextlib.suppress(TypeError):
            family = _alive.setdefault(key, family)
            _keep(key, family, binding.source)
        object.__setattr__(binding, name, family)
    return family


def _keep(key: Hashable, family: Family, source: Any) -> None:
    """Keeps a family for optimizers that are made next."""
    transform = None if source is None else source()
    if source is not None and transform is None:
        return
    whose = None if transform is None else id(transform)
    if transform is not None and whose not in _kept:
        weakref.finalize(transform, _kept.pop, whose, None).atexit = False
    families = _kept.setdefault(whose, OrderedDict())
    families[key] = family
    families.move_to_end(key)
    while len(families) > MOST_KEPT:
        families.popitem(last=False)


def reading(function: Callable[[Any], Read]) -> Callable[[Any], Read]:
    """Compiles a function of an optimizer that was not donated.

    For an optimizer of shapes it returns shapes, and for one that was created under `vmap` a value
    for each run.
    """

    def of_runs(opt: Any) -> Any:
        result = jax.vmap(function)(opt) if opt.arrays.count.ndim else function(opt)
        return jax.tree.map(jnp.copy, result)  # the next step may donate the state

    @functools.wraps(function)
    def read(opt: Any) -> Any:
        check_readable(opt)
        check_arrays(opt, or_shapes=True)
        if isinstance(opt.arrays.count, jax.ShapeDtypeStruct):
            return jax.eval_shape(of_runs, opt)
        leaves, structure = jax.tree.flatten(opt)
        family = family_of(SimpleNamespace(opt=opt, model=None), "reading_family")
        compiled = family.get((function, structure))
        if compiled is None:
            # Of a flat list: JAX keeps the structures of arguments, with the functions in them.
            compiled = jax.jit(lambda leaves: of_runs(structure.unflatten(leaves)))
            family[function, structure] = compiled
        return compiled(leaves)

    return read


class StepInputs(NamedTuple):
    """The inputs of the program of `opt.step`, `opt.update` or `opt.eval_params`."""

    grads: PyTree
    """The gradients of the whole model."""
    keywords: dict[str, Any]
    """The other inputs: of a step by their names in the context, or the options."""
    model: PyTree
    """The whole model, or `None` for a transform that sees no parameters."""
    opt: Any
    """The optimizer."""


def _step(inputs: StepInputs) -> tuple[list[Array], None]:
    warn_of_unread_scale(inputs.opt)
    model = split(inputs.model, inputs.opt.binding.trainable)
    params, state = advance(inputs.opt, model, to_device(inputs.grads), inputs.keywords)
    return jax.tree.leaves(params) + state, None


def _update(inputs: StepInputs) -> tuple[list[Array], Updates]:
    grads, sees_params = to_device(inputs.grads), inputs.model is not None
    like = to_device(inputs.model) if sees_params else grads
    model = split(like, inputs.opt.binding.trainable)
    updates, state = advance(
        inputs.opt, model, grads, inputs.keywords, RETURN, sees_params=sees_params
    )
    return state, updates


def _evaluate(inputs: StepInputs) -> tuple[list[Array], None]:
    opt = inputs.opt
    trained = split(inputs.model, opt.binding.trainable).params
    context = Context(step=to_device(opt.arrays.count))
    here = Part.root(opt.transform, to_device(opt.state), context, trained)
    return jax.tree.leaves(params_to_evaluate(here, **inputs.keywords)), None


compiled_evaluation = Program(_evaluate, functools.partial(carried, state=False), family=family_of)
compiled_step = Program(_step, carried, watched="opt.step", family=family_of)
compiled_update = Program(_update, functools.partial(carried, params=False), family=family_of)
