"""The compiled programs of optimizers, and their lifetime.

They take what a call passes as one tree, such as `StepInputs`. The class of the optimizer in it is
in the file above this one."""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

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
from ..binding.stepping import advance, check_readable
from .arguments import Flags, Homes
from .program import Program

if TYPE_CHECKING:
    from ..binding.optimizer import Optimizer


MOST_KEPT = 8


class Family(dict[Any, Any]):
    """The programs of a family of optimizers, by what is compiled.

    A function compiled with `jax.jit` is freed with its programs. `opt.step` is never freed, so its
    programs belong to families: the optimizers of one structure for parameters of the same shapes.
    They share their programs, which are freed with the last of them.

    A loop over seeds may drop an optimizer before it makes one like it. So the families used last
    are kept. Those with functions that hold data are kept only as long as the transform that they
    are in.
    """

    __slots__ = ("__weakref__",)


_alive: weakref.WeakValueDictionary[Hashable, Family] = weakref.WeakValueDictionary()
_kept: dict[int | None, OrderedDict[Hashable, Family]] = {}
"""The families used last, of each transform with such functions, and of all others together."""


def source_of(transform: Any, binding: Any) -> Callable[[], Any] | None:
    """The `source` of a binding of a transform."""
    if captures((binding.trainable, binding.params)):
        return lambda: None
    return weakref.ref(transform) if captures(transform) else None


def family_of(inputs: Any, name: str = "family") -> Family:
    """The family of an optimizer for a model, both in a named tuple.

    **Arguments:**

    - `inputs`: the named tuple.
    - `name`: the field of the binding that keeps it.
    """
    opt, model = inputs.opt, inputs.model
    binding = opt.binding
    family = getattr(binding, name)
    if family is None:
        # Without the binding, which would keep the family that it keys.
        structure = jax.tree.structure((opt.arrays, model)), binding.trainable, binding.sharding
        shapes = [(np.shape(x), getattr(x, "dtype", None)) for x in jax.tree.leaves((opt, model))]
        family = _family_with((*structure, tuple(shapes)), binding.source)
        object.__setattr__(binding, name, family)
    return family


def _family_with(key: Hashable, source: Any) -> Family:
    try:
        family = _alive.setdefault(key, Family())
    except TypeError:
        return Family()  # has no hash, which the program itself refuses by name
    transform = None if source is None else source()
    if source is None or transform is not None:
        _keep(key, family, transform)
    return family


def _keep(key: Hashable, family: Family, transform: Any) -> None:
    whose = None if transform is None else id(transform)
    if transform is not None and whose not in _kept:
        weakref.finalize(transform, _kept.pop, whose, None).atexit = False
    families = _kept.setdefault(whose, OrderedDict())
    families[key] = family
    families.move_to_end(key)
    while len(families) > MOST_KEPT:
        families.popitem(last=False)


def reading(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Compiles a function of an optimizer that was not donated.

    For an optimizer of shapes it returns shapes, and for one that was created under `vmap` a value
    for each run.
    """

    def of_runs(opt: Any) -> Any:
        result = jax.vmap(function)(opt) if opt.arrays.count.ndim else function(opt)
        return jax.tree.map(jnp.copy, result)  # the next step may donate the state

    def read(opt: Any) -> Any:
        check_readable(opt)
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
    """The inputs of the program of `opt.step` or `opt.update`."""

    grads: PyTree
    """The gradients of the whole model."""
    keywords: dict[str, Any]
    """The other inputs of the step, by their names in the context."""
    model: PyTree
    """The whole model, or `None` for a transform that sees no parameters."""
    opt: "Optimizer"


def carried(inputs: Any, *, model: bool = True) -> Flags:
    """The leaves that a step changes: the trainable parameters, the state and the count.

    `inputs` is any named tuple with an `opt` and a `model`.
    """
    opt = inputs.opt
    changed = opt._with_arrays(opt.arrays._replace(transform=False, state=True, count=True))
    return {"opt": changed} | (trainable(inputs) if model else {})


def trainable(inputs: Any) -> Flags:
    """The trainable parameters alone."""
    return {"model": split(inputs.model, inputs.opt.binding.trainable).flags}


def homes(inputs: Any, carried: Flags) -> Homes:
    """The shardings at binding of the leaves that a step changes. Tracers do not show them."""
    known = inputs.opt.binding.sharding
    if known is None:
        return ()
    params = known.params if "model" in carried else ()
    return (*params, *known.state) if "opt" in carried else params


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


class EvalInputs(NamedTuple):
    """The inputs of the program of `opt.eval_params`."""

    full_precision: bool
    model: PyTree
    opt: Any
    """The optimizer."""


def _evaluate(inputs: EvalInputs) -> tuple[list[Array], None]:
    opt = inputs.opt
    trained = split(inputs.model, opt.binding.trainable).params
    state, full_precision = to_device(opt.state), inputs.full_precision
    here = Part.root(opt.transform, state, Context(step=to_device(opt.arrays.count)), trained)
    params = params_to_evaluate(here, full_precision=full_precision)
    return jax.tree.leaves(params), None


compiled_evaluation = Program(_evaluate, trainable, homes=homes, family=family_of)
compiled_step = Program(_step, carried, homes=homes, watched="opt.step", family=family_of)
compiled_update = Program(
    _update, functools.partial(carried, model=False), homes=homes, family=family_of
)
