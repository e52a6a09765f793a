"""A transform as one of Optax."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import tree
from .._core.fields.hyperparams import bind_numbers
from .._core.protocol.loss import loss_of
from .._core.protocol.parts import transforms
from .._core.protocol.transform import AbstractTransform, require_transform
from .._core.text.calls import signature_of
from .._loop.binding.binding import bind_to_model
from .._loop.binding.model import split
from .._loop.binding.optimizer import Optimizer
from .._loop.binding.stepping import KEYWORDS, as_keywords, check_can_step
from .._loop.programs.compiled import StepInputs, compiled_update
from ..tree.packed import unpack
from ..tree.types import PyTree
from . import _flax
from ._optax import GradientTransformationExtraArgs, import_optax
from ._state import ToOptaxState, as_optimizer, as_state, for_any_params, names, renamed, updated


def to_optax(
    tx: AbstractTransform[Any], *, hyperparam_dtype: Any | None = None
) -> GradientTransformationExtraArgs:
    """Makes a transform usable wherever Optax's are.

    Its `update` returns the same as `opt.update`, at the same cost under your own `jit`. Flax,
    Optimistix, NumPyro and Optax's own wrappers accept it.

    ```python
    >>> tx = sl.interop.to_optax(sl.adamw(1e-3))
    >>> params = {"w": jnp.ones(2)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"w": jnp.ones(2)}, state, params)
    >>> sl.interop.hyperparams(state)["learning_rate"]
    Array(0.001, dtype=float32)

    ```

    The state holds the hyperparameters as arrays. Read them with `sl.interop.hyperparams(state)`,
    and change them with `sl.interop.with_hyperparams(state, learning_rate=1e-4)`, which does not
    recompile. Hyperparameters that are arrays in `tx` are set by each call of `to_optax` instead,
    so `optax.inject_hyperparams(lambda learning_rate: sl.interop.to_optax(sl.adam(learning_rate)))`
    works too.

    The keywords of `opt.update`, such as `value`, `value_fn` and `key`, and those that a link
    declares in `needs` are passed on by name. `value_fn` also gets the keywords that it takes by
    name, such as `batch`, as in Optax. Others are dropped.

    With `.average`, `.lookahead` and `.project`, the updates are the new parameters minus the old
    ones. Apply them as they are: a transform after them would change parameters that were averaged
    or projected. The error of `.if_finite(on_limit="raise")` is only raised outside `jit`.

    **Arguments:**

    - `tx`: the transform.
    - `hyperparam_dtype`: the dtype of all hyperparameters. Defaults to float32 (float64 under x64).

    **Returns:** an `optax.GradientTransformationExtraArgs`. Its `init` takes any tree of arrays, or
    a whole model. Its `update` needs `params` only if a link of `tx` does. If they are passed, the
    updates have their dtypes.

    **Raises:** `TypeError` for anything but a transform, and `ValueError` for `sl.contrib.ivon`.
    `init` and `update` raise the errors of `sl.Optimizer` and `opt.update`. But a transform that
    passes some gradients on, such as `sl.adam(1e-3).mask(where)`, only gives a warning: another one
    may follow it in an `optax.chain`.
    """
    optax = import_optax("to_optax")
    if isinstance(tx, Optimizer):
        raise TypeError(
            "`sl.interop.to_optax` takes a transform, got an optimizer, whose state belongs to one "
            "model. Write `sl.interop.to_optax(opt.transform)`."
        )
    require_transform("The argument of `sl.interop.to_optax`", tx)
    if "sampled parameters" in loss_of(tx).askers:
        raise ValueError(
            "This optimizer needs gradients at samples of its posterior, and a loop for Optax "
            "takes them at the parameters. Use `sl.train_step`, or `opt.sample_params(model)`."
        )

    def init(params: PyTree) -> ToOptaxState:
        _flax.register(ToOptaxState, names, renamed)
        plain = _flax.pure(params)
        if jax.tree.leaves(plain):
            arrays, _ = bind_to_model(tx, plain, None, hyperparam_dtype, is_whole=False)
            transform, inner, count = map(unpack, arrays)
        else:
            # A group of `optax.partition` may be empty, and `optax.tree.map_params` passes no
            # arrays. An optimizer would be refused.
            transform, count = bind_numbers(tx, hyperparam_dtype), tree.fresh_count()
            inner = for_any_params(tx.init(plain))
        inner = _flax.with_variables(inner, params)
        return as_state(transform, inner, count, _given(tx, transform))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ToOptaxState]:
        if not isinstance(state, ToOptaxState):
            raise TypeError(
                "The second argument of `update` must be the state that `init` or the last "
                f"`update` returned, got something of type {type(state).__name__}. Optax's order "
                "is `tx.update(grads, state, params)`."
            )
        plain = _flax.pure(state)
        grads = _flax.pure(updates)
        keywords = _keywords(plain, params, extra_args)
        if not jax.tree.leaves(grads):
            return updates, state
        params = _flax.pure(params)
        seen = split(grads if params is None else params, None)
        if not any(seen.trainable):
            kinds = sorted({str(jnp.result_type(x)) for x in seen.leaves})
            raise TypeError(
                "The gradients must be floating or complex arrays, got arrays of dtype "
                f"{', '.join(kinds)}."
            )
        opt = as_optimizer(_with_given(plain, tx), jax.tree.structure(seen.params))
        check_can_step(opt)
        after, new = compiled_update(StepInputs(grads, as_keywords(keywords), params, opt))
        new_state = _in_containers_of(state, plain, updated(plain, after.opt))
        return _in_containers_of(updates, grads, new), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _in_containers_of(containers: PyTree, plain: PyTree, result: PyTree) -> PyTree:
    """The result in the variables of nnx if `plain` was taken out of some."""
    structure = jax.tree.structure(containers)
    if structure == jax.tree.structure(plain):
        return result
    return structure.unflatten(jax.tree.leaves(result))


# --- what is given to each call of `to_optax` ----------------------------------------------


def _given(tx: AbstractTransform[Any], bound: AbstractTransform[Any]) -> tuple[str, ...]:
    """The paths of the arrays of a transform that has arrays in place of numbers."""
    paths = names(as_state(bound, None, tree.fresh_count(), ()))
    numbers = [
        x for x in jax.tree.leaves(tx) if tree.is_array(x) or isinstance(x, bool | int | float)
    ]
    pairs = zip(paths, numbers, strict=False)
    return tuple(name for name, x in pairs if tree.is_array(x))


def _with_given(state: ToOptaxState, tx: AbstractTransform[Any]) -> ToOptaxState:
    """The state with the arrays of this transform.

    `optax.inject_hyperparams` calls `to_optax` in every step, each time with other arrays, and
    passes a state that has those of the first step.
    """
    leaves, structure = jax.tree.flatten(tx)
    if not any(map(tree.is_array, leaves)):
        return state
    old = as_optimizer(state).transform
    kept = [
        jnp.asarray(x, y.dtype) if tree.is_array(x) else y
        for x, y in zip(leaves, jax.tree.leaves(old), strict=True)
    ]
    return as_state(structure.unflatten(kept), state.inner_state, state.count, state.given)


# --- checks ---------------------------------------------------------------------------------


def _keywords(state: ToOptaxState, params: PyTree, extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """The extra arguments that some link may use. Raises an error if one is missing."""
    transform = as_optimizer(state).transform
    available = {name: x for name, x in extra_args.items() if x is not None}
    if params is not None:
        available["params"] = params
    declared = {*KEYWORDS}
    for part in transforms(transform):
        needs = {*part.module.needs} - {"step"}
        if params is None and part.module.per_example:
            needs.add("params")
        absent = needs - available.keys() - set(available.get("per_param", ()))
        if "grad_fn" in absent:
            # It is the gradient of the loss.
            absent = absent - {"grad_fn"} | ({"value_fn"} - available.keys())
        if absent:
            passed = ", ".join(["params", *(f"{name}=..." for name in sorted(absent - {"params"}))])
            raise TypeError(
                f"{type(part.module).__name__} ('{part.name}') needs "
                f"{', '.join(map(repr, sorted(absent)))}: write "
                f"`tx.update(grads, state, {passed})`."
            )
        declared |= needs
    if callable(value_fn := available.get("value_fn")):
        available["value_fn"] = _with_arguments(value_fn, available)
    return {name: x for name, x in available.items() if name in declared - {"params"}}


def _with_arguments(value_fn: Callable[..., Any], keywords: dict[str, Any]) -> Callable[..., Any]:
    """The loss as a function of the parameters alone, given those keywords that it takes."""
    signature = signature_of(value_fn, named=True)
    takes = [] if signature is None else [*signature.parameters][1:]
    arguments = {name: keywords[name] for name in takes if name in keywords}
    # As a tree, so that other data do not recompile the update.
    return jax.tree_util.Partial(value_fn, **arguments) if arguments else value_fn
