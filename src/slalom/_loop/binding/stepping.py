"""One step on traced arrays. All arguments are checked before anything is computed."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import tree
from ..._core.engine.encoded import decoded
from ..._core.protocol.chain import first_link
from ..._core.protocol.context import Context
from ..._core.protocol.inputs import absent_inputs, missing
from ..._core.protocol.loss import Loss
from ..._core.protocol.parts import Part, transforms, walk
from ..._core.protocol.residuals import Residuals
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.writer import ADD, Writer
from ..._core.state.marks import params_like_fields
from ..._core.state.slots import slots
from ..._core.text.calls import call
from ..._core.text.messages import series
from ...tree.dtypes import nearest_float
from ...tree.packed import cached, unpack
from ...tree.paths import example, leaf_paths
from ...tree.types import Params, PyTree, Tracer, is_deleted, is_function
from ...wrappers.scope.forms import joined
from ..programs.arguments import as_tree
from ..sharding.placement import constrained
from .loop_warnings import warn_of_ascent, warn_of_capture
from .model import Split, check_bound, strong

KEYWORDS = ("value", "grad", "value_fn", "key", "weight", "per_param")
"""Keywords that every step accepts. Transforms that do not use them ignore them."""

FUNCTIONS = ("value_fn", "grad_fn", "sampled_grad_fn")
"""Entries of the context that are functions of the model."""

ALWAYS = (*KEYWORDS, "residuals", "terms", "max_logits")
"""The keywords that every step accepts, for the check of names."""


def advance(
    opt: Any,
    model: Split,
    grads: Any,
    keywords: Mapping[str, Any],
    write: Writer = ADD,
    *,
    gathered: tuple[PyTree, int] | None = None,
    sees_params: bool = True,
    in_training_step: bool = False,
) -> tuple[PyTree, list[Array]]:
    """Makes one step.

    **Arguments:**

    - `opt`: the optimizer.
    - `model`: the model, split into leaves.
    - `grads`: the gradients of the whole model, with a leading axis of examples if the first link
        needs per-example gradients. A training step passes them as a tree like the parameters.
    - `keywords`: the keywords of the step, for the context.
    - `write`: `ADD` for a `step`, `RETURN` for an `update`.
    - `gathered`: where `grads` are sums that the first link has gathered, as in `Context`.
    - `sees_params`: whether the transform gets the parameters. For Optax, which may have none, the
        gradients take the place of the model.
    - `in_training_step`: whether this is a step of `sl.train_step`, for messages.

    **Returns:** the new parameters or the updates, in the dtypes of the parameters, and the leaves
    of the new state and count.
    """
    warn_of_capture(opt, (model.leaves, grads))
    (transform, state, count), params = map(unpack, opt.arrays), model.params
    check_one_run(count, f"opt.{'step' if write is ADD else 'update'}(model, grads)")
    check_bound(params, opt.binding.params)
    per_example = gathered is None and first_link(transform).per_example
    if not in_training_step:
        grads = model.align(grads, examples=per_example)
    sharding = opt.binding.sharding
    places = () if sharding is None else sharding.updates
    if sharding is not None and sharding.axis is None:
        sharding = None  # the state and all intermediate arrays are where the parameters are
    if sharding is not None and not per_example:
        # Reduced only to the shard that updates the state.
        grads = constrained(grads, sharding.updates)
    of_step = {"step": count, "gathered": gathered, "shardings": places}
    context = _context(transform, model, grads, dict(keywords), of_step, in_training_step)
    _check_shapes(Part.root(transform, state, params=params))
    if write is ADD:
        warn_of_ascent(transform, params)
    root = Part.root(transform, state, context, params if sees_params else None)
    try:
        result, new = root.run(write, grads)
        tree.check_same_structure((result, params))
        new_leaves = [*_check_state(transform, state, new), tree.increment(count)]
    except (TypeError, ValueError) as error:  # the latter where promotion is strict
        _refuse_switched_x64(error, transform, state, params)
        raise
    result = tree.cast_like(result, params)
    if sharding is not None:
        result = constrained(result, sharding.params)
        new_leaves = constrained(new_leaves, sharding.state)
    return result, new_leaves


def check_one_run(count: Any, call: str) -> None:
    """Raises an error for an optimizer that was created under `vmap` and is used outside one."""
    if jnp.ndim(count):
        raise ValueError(
            f"This optimizer was created under `vmap` and holds {count.shape[0]} runs, so it must "
            f"be used under `vmap` too: `eqx.filter_vmap(lambda opt, model, ...: {call})`."
        )


def check_readable(opt: Any) -> None:
    """Raises an error if the optimizer was donated, so that its state cannot be read."""
    if is_deleted(opt.arrays.count):
        raise ValueError(
            "This optimizer was donated to a training step, so its state can no longer be read. "
            "Use the optimizer that the step returned, after Ctrl-C `step.last[1]`, or "
            "`sl.train_step(loss_fn, donate=False)`."
        )


def check_arrays(opt: Any, *, or_shapes: bool = False) -> None:
    """Raises an error for an optimizer whose leaves are not arrays.

    **Arguments:**

    - `opt`: the optimizer. Its count stands for all leaves.
    - `or_shapes`: whether they may be shapes of arrays.
    """
    count = opt.arrays.count
    if isinstance(count, jax.ShapeDtypeStruct):
        if not or_shapes:
            raise TypeError(
                "This optimizer has shapes in place of arrays. Create one for a model with arrays, "
                "`opt = sl.Optimizer(tx, model)`, or compute with shapes alone: `jax.eval_shape("
                "lambda model, opt: opt.step(model, grads), model, opt)`."
            )
    elif not hasattr(count, "dtype"):  # faster than asking for its type
        raise TypeError(_NOT_WHOLE.format(kind=repr(count)))


_NOT_WHOLE = """The count of an optimizer must be an array of ints, got {kind}. Use the optimizer \
itself, not a tree that `eqx.filter`, `jax.grad` or a cast of all leaves makes of it."""


def check_can_step(opt: Any) -> None:
    """Raises an error for an optimizer without arrays, or the error that a state has recorded, such
    as too many non-finite gradients."""
    check_arrays(opt)
    if (dtype := opt.arrays.count.dtype).kind not in "iu":
        raise TypeError(_NOT_WHOLE.format(kind=f"an array of dtype {dtype}"))
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


def as_keywords(passed: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that are not `None`. Numbers become arrays, so that they are traced."""
    keywords = {name: x for name, x in passed.items() if x is not None}
    for name in FUNCTIONS:
        if name in keywords:
            keywords[name] = as_tree(keywords[name])
    for name in ("value", "weight"):
        x = keywords.get(name)
        if name == "weight" and isinstance(x, int | float) and not 0 <= nearest_float(x) < np.inf:
            raise ValueError(f"`weight` must be non-negative and finite, got {x!r}.")
        if isinstance(x, bool | int | float):
            keywords[name] = jnp.asarray(nearest_float(x), tree.canonical_float())
        elif isinstance(x, jax.Array) and x.weak_type:
            keywords[name] = jnp.asarray(x, x.dtype)
    return keywords


def _context(
    transform: AbstractTransform,
    model: Split,
    grads: Any,
    keywords: dict[str, Any],
    of_step: dict[str, Any],
    in_training_step: bool,
) -> Context:
    """The context of one step, checked against the inputs that the transform needs.

    **Arguments:**

    - `transform`, `model`, `grads`, `in_training_step`: as for `advance`.
    - `keywords`: the keywords of the step.
    - `of_step`: the entries of the context that the user does not pass.
    """
    for name in ("value", "weight"):
        x = keywords.get(name)
        if x is not None and not tree.is_array(x):
            raise TypeError(f"`{name}` must be a scalar, got {x!r} of type {type(x).__name__}.")
        if x is not None and x.shape != ():
            raise ValueError(f"`{name}` must be a scalar, got an array of shape {x.shape}.")
        if x is not None and jnp.iscomplexobj(x):
            raise TypeError(f"`{name}` must be real, got a scalar of dtype {x.dtype}.")
    if "key" in keywords and not tree.is_array(keywords["key"]):
        raise TypeError(
            f"`key` must be a PRNG key, such as `jax.random.key(0)`, got {keywords['key']!r}."
        )
    if "grad" in keywords:
        keywords["grad"] = model.align(keywords["grad"], "`grad`")
    if "per_param" in keywords:
        trees = keywords["per_param"]
        if not isinstance(trees, Mapping):
            raise TypeError(
                "`per_param` must be a dict from names to trees with the structure of the "
                f"parameters, got a {type(trees).__name__}."
            )
        keywords["per_param"] = {k: model.align(v, f"`per_param[{k!r}]`") for k, v in trees.items()}
    functions = [name for name in FUNCTIONS if name in keywords]
    for name in functions:
        keywords[name] = _of_params(name, keywords[name], model)
    declared = {name for part in transforms(transform) for name in part.module.needs}
    if keywords.get("residuals") is not None:
        keywords = _with_residuals(keywords, declared, model, grads)
    known = (*ALWAYS, *FUNCTIONS)
    extra = {name: keywords.pop(name) for name in list(keywords) if name not in known}
    context = Context(**of_step, **keywords, extra=extra)

    absent = {name for name in declared if name != "params" and not context.has(name)}
    if absent:
        lacking, names = absent_inputs(transform, lambda name: name not in absent)
        who = series((f"{type(x.module).__name__} ('{x.name}')" for x in lacking), "and")
        raise TypeError(missing(who, *names, in_training_step=in_training_step))
    for name in (*extra, *functions):
        if name not in declared and name != "value_fn":
            accepted = sorted(declared - {*ALWAYS, "params", "step"})
            also = f" These transforms also accept: {', '.join(accepted)}." if accepted else ""
            raise TypeError(
                f"No transform uses '{name}'. These keywords are always accepted: "
                f"{', '.join(KEYWORDS)}.{also} To pass it on in `context.extra`, declare it in a "
                f"transform: `needs = ('{name}',)`."
            )
    return context


def _with_residuals(
    keywords: dict[str, Any], declared: set[str], model: Split, grads: Any
) -> dict[str, Any]:
    """The keywords, with residuals of the parameters, and with the inputs of a line search, which
    follow from them."""
    residuals = keywords["residuals"]
    if not isinstance(residuals, Residuals):
        raise TypeError(
            "`residuals` must be what `loss_fn.on(x, y)` returns for an `sl.LeastSquares` or "
            f"`sl.OutputLoss`, got {residuals!r} of type {type(residuals).__name__}."
        )
    residuals = residuals.of(model.join)
    known: dict[str, Any] = {}
    if residuals.searchable:
        if "value" in declared - keywords.keys():
            known["value"] = residuals.value(model.params)
        if "grad" in declared:
            known["grad"] = grads
        if {"value_fn", "grad_fn"} & declared:
            known["value_fn"] = residuals.value
    return known | keywords | {"residuals": residuals}


def _of_params(name: str, of_model: Any, model: Split) -> Callable[..., Any]:
    """A function of the model that the caller passed, as a function of the parameters."""
    if not is_function(of_model):
        kind = "maps the model to the loss" if name == "value_fn" else "takes the model"
        raise TypeError(f"`{name}` must be a function that {kind}, got {of_model!r}.")

    def of_params(params: Any, *key: Any) -> Any:
        arguments = dict(zip(("model", "key"), (model.join(params), *key), strict=False))
        returned = call(f"`{name}`", of_model, **arguments)
        if name == "value_fn":
            return returned
        if name == "grad_fn":
            return model.align(returned, "the result of `grad_fn`")
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                "`sampled_grad_fn` must return a pair: the gradient, and the number of terms in "
                f"the mean that it is the gradient of, got a {type(returned).__name__}."
            )
        return model.align(returned[0], "the result of `sampled_grad_fn`"), returned[1]

    return of_params


def _check_shapes(root: Part) -> None:
    """Raises an error for parameters whose shapes differ from those at binding."""
    for part in walk(root):
        if any(inner.state is part.state for inner in part.children()):
            continue  # a mask has no state of its own: its inner transform sees the same one
        for name in params_like_fields(part.state):
            held = getattr(part.state, name)
            if jax.tree.structure(held) != jax.tree.structure(part.params):
                continue  # an option disables it, or it is in buffers, which `.flatten()` checks
            pairs = zip(*map(jax.tree.leaves, (held, part.params)), strict=True)
            for i, (s, p) in enumerate(pairs):
                if jnp.shape(s) != jnp.shape(p):
                    path = leaf_paths(part.params)[i]
                    raise ValueError(
                        f"The parameter at '{path}' has shape {jnp.shape(p)}, but the state "
                        f"'{part.name}.{name}' was created for shape {jnp.shape(s)}. Create a new "
                        "optimizer with `sl.Optimizer(tx, model)`, or transfer the state with "
                        "`opt.rebind(model)`."
                    )


def _refuse_switched_x64(
    error: Exception, transform: AbstractTransform, state: PyTree, params: Params
) -> None:
    """Raises an error that names the cause, if it is that x64 was switched after the binding."""
    # State like the parameters has their dtypes, which may have changed for another reason.
    singles = {"float64": np.float32, "complex128": np.complex64}
    single = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, singles.get(p.dtype.name, p.dtype)), params
    )
    fresh = jax.tree.leaves(jax.eval_shape(transform.init, single))
    held = jax.tree.leaves(state)
    now, other, before, after = np.dtype(np.float32), np.dtype(np.float64), "on", "off"
    if tree.canonical_float() == other:
        now, other, before, after = other, now, after, before
    if len(fresh) != len(held):
        return
    for i, (old, new) in enumerate(zip(held, fresh, strict=True)):
        if tree.is_array(old) and (old.dtype, new.dtype) == (other, now):
            raise TypeError(
                f"This optimizer was created with x64 {before}, and this step runs with x64 "
                f"{after}: the state at '{_names(transform, state)[i]}' is {other}, and would be "
                f"{now} now. Set `jax_enable_x64` once, before anything is created, or convert the "
                "state with `opt, _ = opt.rebind(model)`."
            ) from error


def _check_state(transform: AbstractTransform, old: PyTree, new: PyTree) -> list[Array]:
    """The leaves of the new state, whose structure is that of the old one. Raises an error unless
    its shapes, dtypes and static leaves are, too."""
    leaves = []
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    for i, (before, after) in enumerate(pairs):
        if not tree.is_array(before):
            if type(after) is not type(before) or after != before:
                raise TypeError(
                    f"The state at '{_names(transform, old)[i]}' is {before!r} of type "
                    f"{type(before).__name__}, which is not an array and cannot change, but "
                    f"`update` returned {after!r}. Return an array from `init`, such as "
                    "`jnp.zeros((), jnp.int32)` for a count."
                )
            continue
        after = after if isinstance(after, jax.Array) else jnp.asarray(after)
        if before.shape != after.shape or before.dtype != after.dtype:
            raise TypeError(
                "`update` must preserve shapes and dtypes, but it changed the state at "
                f"'{_names(transform, old)[i]}' from {before.dtype}{list(before.shape)} to "
                f"{after.dtype}{list(after.shape)}. Cast the new value, for example with "
                "`.astype(old.dtype)`."
            )
        leaves.append(strong(after))
    return leaves


def _names(transform: AbstractTransform, state: PyTree) -> list[str]:
    """The path of each leaf of a state."""
    return [slot.name for slot in slots(transform, state, ())]


def sampled_params(loss: Loss, params: Params, key: Any = None) -> Params:
    """The parameters at which to evaluate a loss, in their dtypes. Without a key, the sample of the
    next gradient."""
    samplers = loss.askers.get("sampled parameters", ())
    keys = [None] * len(samplers) if key is None else list(jax.random.split(key, len(samplers)))

    def add(p: Any, noise: PyTree) -> Any:
        acts_on = jax.tree.leaves(noise)
        return tree.add(p, noise) if acts_on else p

    for part, k in zip(samplers, keys, strict=True):
        noise = joined(part.module.noise(decoded(part.state), part.params, part.context, k))
        params = jax.tree.map(add, params, noise)
    return params
