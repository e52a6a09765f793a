"""The compiled programs of `Optimizer.step` and `Optimizer.update`.

They take what a call passes as one tree, `StepInputs`. The class of the optimizer in it is in the
file above this one.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array

from ..._core.protocol.bases import params_to_evaluate
from ..._core.protocol.chain import first_link
from ..._core.protocol.writer import ADD, RETURN, Writer
from ..._core.state.walk import transforms
from ...tree.captures import cached
from ...tree.packed import unpack
from ...tree.paths import example
from ...tree.sharding import to_device
from ...tree.types import PyTree, Tracer, Updates, is_deleted
from ..binding.model import Split, split
from ..binding.stepping import run
from ..binding.thrown_away import warn_of_capture, warn_of_unread_scale
from .families import Family, family_of
from .program import Program
from .recompiled import watch

if TYPE_CHECKING:
    from ..binding.optimizer import Optimizer


class StepInputs(NamedTuple):
    """The inputs of the program of `opt.step` or `opt.update`."""

    grads: PyTree
    """The gradients of the whole model."""
    keywords: dict[str, Any]
    """The other inputs of the step, by their names in the context."""
    model: PyTree
    """The whole model, or `None` for a transform that sees no parameters."""
    opt: "Optimizer"


def check_readable(opt: Any) -> None:
    """Raises an error if the optimizer was donated, so that its state cannot be read."""
    if is_deleted(opt.arrays.count):
        raise ValueError(
            "This optimizer was donated to a training step, so its state can no longer be read. "
            "Use the optimizer that the step returned, after Ctrl-C `step.last[1]`, or "
            "`sl.train_step(loss_fn, donate=False)`."
        )


def check_guards(opt: Any) -> None:
    """Raises the error that a state has recorded, such as too many non-finite gradients."""
    if not _is_guarded(jax.tree.structure(opt.arrays.transform)):
        return  # nothing to check, so do not block
    if any(isinstance(x, Tracer) or is_deleted(x) for x in jax.tree.leaves(opt)):
        return  # traced, or donated, which the step itself refuses
    for part in transforms(opt.transform, opt.state):
        if part.module.guard is not None:
            part.module.guard(part.name, part.state)


@cached(maxsize=256)
def _is_guarded(structure: Any) -> bool:
    return any(part.module.guard is not None for part in transforms(unpack(example(structure))))


def carried(inputs: Any, *, model: bool = True) -> Any:
    """The leaves that a step changes: the trainable parameters, the state and the count.

    `inputs` is any named tuple with an `opt` and a `model`.
    """
    opt = inputs.opt
    flags = jax.tree.map(lambda _: False, inputs)
    state = jax.tree.map(lambda _: True, opt.arrays.state)
    arrays = flags.opt.arrays._replace(state=state, count=True)
    flags = flags._replace(opt=flags.opt._with_arrays(arrays))
    if not model:
        return flags
    return flags._replace(model=split(inputs.model, opt.binding.trainable).flags(inputs.model))


def homes(inputs: Any, *, model: bool = True) -> tuple[NamedSharding | None, ...]:
    """The shardings at binding of the leaves that a step changes. Tracers do not show them."""
    binding = inputs.opt.binding
    if binding.sharding is None:
        return ()
    state = binding.sharding.state
    return (*binding.sharding.params, *state) if model else state


def advance(
    opt: "Optimizer",
    model: Split,
    grads: Any,
    keywords: Mapping[str, Any],
    write: Writer = ADD,
    gathered: Any = None,
    *,
    in_training_step: bool = False,
) -> tuple[PyTree, list[Array]]:
    """One step of an optimizer on traced arrays, as in `run`."""
    warn_of_capture(opt, (model.leaves, grads))
    rule, state, count = opt.transform, opt.state, opt.arrays.count
    sharding = opt.binding.sharding
    places = () if sharding is None else sharding.of_updates()
    if sharding is not None and sharding.axis is None:
        sharding = None  # the state is where its parameters are, and so is all between
    if sharding is not None and (gathered is not None or not first_link(rule).per_example):
        grads = sharding.constrain_grads(model.align(grads))
    bound = opt.binding.params
    known = {"gathered": gathered, "shardings": places, "in_training_step": in_training_step}
    result, new = run(write, rule, state, count, bound, model, grads, keywords, **known)
    if sharding is not None:
        result, new = sharding.constrain_params(result), sharding.constrain_state(new)
    return result, new


def _step(inputs: StepInputs) -> tuple[list[Array], None]:
    warn_of_unread_scale(inputs.opt)
    model = split(inputs.model, inputs.opt.binding.trainable)
    params, state = advance(inputs.opt, model, to_device(inputs.grads), inputs.keywords)
    return jax.tree.leaves(params) + state, None


def _update(inputs: StepInputs) -> tuple[list[Array], Updates]:
    model = split(to_device(inputs.model), inputs.opt.binding.trainable)
    grads = to_device(inputs.grads)
    updates, state = advance(inputs.opt, model, grads, inputs.keywords, RETURN)
    return state, updates


class EvalInputs(NamedTuple):
    """The inputs of the program of `opt.eval_params`."""

    full_precision: bool
    model: PyTree
    opt: Any
    """The optimizer."""


def _evaluate(inputs: EvalInputs) -> tuple[list[Array], None]:
    opt = inputs.opt
    params = split(inputs.model, opt.binding.trainable).params
    state, full_precision = to_device(opt.state), inputs.full_precision
    found = params_to_evaluate(opt.transform, state, params, full_precision=full_precision)
    return jax.tree.leaves(found), None


def _evaluated(inputs: EvalInputs) -> Any:
    flags = jax.tree.map(lambda _: False, inputs)
    return flags._replace(
        model=split(inputs.model, inputs.opt.binding.trainable).flags(inputs.model)
    )


def _homes_of_params(inputs: EvalInputs) -> tuple[NamedSharding | None, ...]:
    sharding = inputs.opt.binding.sharding
    return () if sharding is None else tuple(sharding.params)


def _family(inputs: StepInputs | EvalInputs) -> Family:
    return family_of(inputs.opt, inputs.model)


compiled_evaluation = Program(_evaluate, _evaluated, homes=_homes_of_params, family=_family)
compiled_step = Program(
    _step,
    carried,
    homes=homes,
    watch=functools.partial(watch, "opt.step", lambda: None),
    family=_family,
)
compiled_update = Program(
    _update,
    functools.partial(carried, model=False),
    homes=functools.partial(homes, model=False),
    family=_family,
)
