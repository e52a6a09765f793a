"""The compiled programs of `Optimizer.step` and `Optimizer.update`.

They take the arguments of a call as one tree, in which `opt` is the optimizer. Its class is in the
file above this one.
"""

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array

from .._compile.memory import to_device
from .._compile.program import Program
from .._core.chain import first_link
from .._core.transform import AbstractTransform
from .._core.walk import transforms
from .._core.write import ADD, RETURN, Write
from .._types import Tracer, Updates
from .arrays import check_not_donated
from .model import Split, split
from .recompiled import watch
from .step import run


def check_readable(opt: Any) -> None:
    """Raises an error if the optimizer was donated, so that its state cannot be read."""
    check_not_donated(opt.arrays.leaves[-1:])


def check_guards(opt: Any) -> None:
    """Raises the error that a state has recorded, such as too many non-finite gradients."""
    if not opt.binding.guarded:
        return  # nothing to check, so do not block
    if any(isinstance(x, Tracer) or getattr(x, "is_deleted", bool)() for x in opt.arrays):
        return  # traced, or donated, which the step itself refuses
    for part in transforms(opt.transform, opt.state):
        if part.module.guard is not None:
            part.module.guard(part.name, part.state)


def carried(arguments: Any, *, model: bool = True) -> Any:
    """Which leaves a step changes: the trainable parameters, the state and the count."""
    opt = arguments["opt"]
    flags = jax.tree.map(lambda _: False, arguments)
    changes = tuple(i >= opt.binding.rules for i in range(len(opt.arrays)))
    flags["opt"] = jax.tree.structure(opt).unflatten(changes)
    if model:
        flags["model"] = split(arguments["model"], opt.binding.trainable).flags(arguments["model"])
    return flags


def homes(arguments: Any, *, model: bool = True) -> tuple[NamedSharding | None, ...]:
    """Where the leaves that a step changes were at binding, which tracers do not show."""
    binding = arguments["opt"].binding
    if binding.sharding is None:
        return ()
    state = binding.sharding.arrays[binding.rules :]
    return (*binding.sharding.params, *state) if model else state


def advance(
    opt: Any,
    model: Split,
    grads: Any,
    known: Any,
    write: Write = ADD,
    transform: AbstractTransform | None = None,
) -> Any:
    """One step of an optimizer on traced arrays, as in `run`. `transform` may replace its own, if
    it has the same state."""
    own, (state, count) = opt._tree
    rule = own if transform is None else transform
    sharding = opt.binding.sharding
    places = () if sharding is None else sharding.of_updates()
    if sharding is not None and sharding.axis is None:
        sharding = None  # the state is where its parameters are, and so is all between
    if sharding is not None and not first_link(rule).per_example:
        grads = sharding.constrain_grads(model.align(grads))
    bound = opt.binding.params
    result, new = run(write, rule, state, count, bound, model, grads, known, shardings=places)
    if sharding is not None:
        result, new = sharding.constrain_params(result), sharding.constrain_state(new)
    return result, new


def _step(arguments: Any) -> tuple[list[Array], None]:
    opt, known = arguments["opt"], arguments["known"]
    model = split(arguments["model"], opt.binding.trainable)
    params, state = advance(opt, model, to_device(arguments["grads"]), known)
    return jax.tree.leaves(params) + state, None


def _update(arguments: Any) -> tuple[list[Array], Updates]:
    opt, known = arguments["opt"], arguments["known"]
    model = split(to_device(arguments["model"]), opt.binding.trainable)
    updates, state = advance(opt, model, to_device(arguments["grads"]), known, RETURN)
    return state, updates


compiled_step = Program(
    _step, carried, homes=homes, watch=functools.partial(watch, "opt.step", lambda: None)
)
compiled_update = Program(
    _update, functools.partial(carried, model=False), homes=functools.partial(homes, model=False)
)
