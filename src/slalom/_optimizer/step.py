"""One step on traced arrays: what it is given is checked here, before anything is computed."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .. import tree
from .._compile.callables import as_tree
from .._core.chain import first_link
from .._core.context import Context
from .._core.marks import params_like_fields
from .._core.slots import slots
from .._core.transform import AbstractTransform, missing
from .._core.walk import parts, transforms
from .._core.write import ADD, Write
from .._paths import leaf_paths
from .._types import Params
from ..tree.dtypes import canonical_float
from .model import Split, check_bound

KNOWN = ("value", "grad", "value_fn", "key", "weight", "per_param")
"""What a caller may always pass beside the gradients; transforms that do not need it ignore it."""


def run(
    write: Write,
    transform: AbstractTransform[Any],
    state: Any,
    count: Any,
    bound: Any,
    model: Split,
    grads: Any,
    known: Mapping[str, Any],
) -> tuple[PyTree, list[Array]]:
    """One step: its result in the parameters' dtypes, and the leaves of the new state and count.

    **Arguments:**

    - `write`: `ADD` for a `step`, `RETURN` for an `update`.
    - `transform`, `state`, `count`: the parts of an optimizer.
    - `bound`: the structure of the parameters at binding.
    - `model`: the model, taken apart.
    - `grads`: gradients of the whole model; with an axis of examples in front where the first
        link asks for it.
    - `known`: what the caller passed for the context.

    **Returns:** parameters or updates, and the leaves of the new state and count.
    """
    params = model.params
    check_one_run(count, f"{'step' if write is ADD else 'update'}(model, grads)")
    check_bound(params, bound)
    grads = model.align(grads, examples=first_link(transform).per_example)
    context = _context(transform, count, model, dict(known))
    _check_shapes(transform, state, params)
    root = next(parts(transform, state, context, params))
    result, new = root.run(write, grads)
    tree.check_same_structure((result, params))
    new = _as_before(transform, state, new)
    return tree.cast_like(result, params), [*new, tree.increment(count)]


def check_one_run(count: Any, call: str) -> None:
    """Refuses, outside of a `vmap`, an optimizer that was made under one."""
    if jnp.ndim(count):
        raise ValueError(
            f"This optimizer is of {count.shape[0]} runs, since it was made under `vmap`. Use it "
            f"under one too: `eqx.filter_vmap(lambda opt, model, ...: opt.{call})`."
        )


def as_known(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a caller passed, without what was left out; numbers as arrays, so they are traced."""
    known = {name: x for name, x in given.items() if x is not None}
    if "value_fn" in known:
        known["value_fn"] = as_tree(known["value_fn"])
    for name in ("value", "weight"):
        x = known.get(name)
        if name == "weight" and isinstance(x, int | float) and not x >= 0:
            raise ValueError(f"`weight` must be at least 0, got {x!r}.")
        if isinstance(x, bool | int | float):
            known[name] = jnp.asarray(x, canonical_float())
        elif isinstance(x, jax.Array) and x.weak_type:
            known[name] = jnp.asarray(x, x.dtype)
    return known


def _context(
    transform: AbstractTransform, count: Any, model: Split, known: dict[str, Any]
) -> Context:
    """The context of one step, checked against what the transform needs and declares."""
    for name in ("value", "weight"):
        x = known.get(name)
        if x is not None and not tree.is_array(x):
            raise TypeError(f"`{name}` must be a scalar, got {x!r} of type {type(x).__name__}.")
        if x is not None and x.shape != ():
            raise ValueError(f"`{name}` must be a scalar, got an array of shape {x.shape}.")
        if x is not None and jnp.iscomplexobj(x):
            raise TypeError(f"`{name}` must be real, got a scalar of dtype {x.dtype}.")
    if "key" in known and not tree.is_array(known["key"]):
        raise TypeError(
            f"`key` must be a PRNG key, such as `jax.random.key(0)`, got {known['key']!r}."
        )
    if "grad" in known:
        known["grad"] = model.align(known["grad"], "`grad`")
    if "per_param" in known:
        given = known["per_param"]
        if not isinstance(given, Mapping):
            raise TypeError(
                "`per_param` must be a dict of trees like the parameters, by name, got a "
                f"{type(given).__name__}."
            )
        known["per_param"] = {k: model.align(v, f"`per_param[{k!r}]`") for k, v in given.items()}
    if "value_fn" in known:
        of_model = known["value_fn"]
        if not callable(of_model):
            raise TypeError(
                f"`value_fn` must be the loss as a function of the model, got {of_model!r}."
            )
        known["value_fn"] = lambda params: of_model(model.join(jax.tree.leaves(params)))
    extra = {name: known.pop(name) for name in list(known) if name not in KNOWN}
    context = Context(step=count, **known, extra=extra)

    declared = set()
    for part in transforms(transform):
        declared.update(part.module.needs)
        for name in part.module.needs:
            if name != "params" and not context.has(name):
                raise TypeError(missing(f"{type(part.module).__name__} ('{part.name}')", name))
    for name in extra:
        if name not in declared:
            own = sorted(declared - {*KNOWN, "params", "step"})
            raise TypeError(
                f"No transform here declares '{name}'. Always welcome are {', '.join(KNOWN)}; "
                f"declared by these transforms: {', '.join(own) or 'nothing else'}."
            )
    return context


def _check_shapes(transform: AbstractTransform, state: Any, params: Params) -> None:
    """Refuses parameters of other shapes than those the state was made for."""
    for part in parts(transform, state, params=params):
        if any(inner.state is part.state for inner in part.module.children(part.state)):
            continue  # a mask has no state of its own: its inner transform sees the same one
        for name in params_like_fields(part.state):
            held = getattr(part.state, name)
            if jax.tree.structure(held) != jax.tree.structure(part.params):
                continue  # an option left it out, or it is in buffers, which the rule compares
            marked = jax.tree.leaves(held)
            named = zip(leaf_paths(part.params), jax.tree.leaves(part.params), strict=True)
            for s, (path, p) in zip(marked, named, strict=True):
                if jnp.shape(s) != jnp.shape(p):
                    raise ValueError(
                        f"The state '{part.name}.{name}' was made for a parameter of shape "
                        f"{jnp.shape(s)} at '{path}', where there is one of shape {jnp.shape(p)} "
                        "now. Bind a new optimizer with `sl.Optimizer(tx, model)`."
                    )


def _as_before(transform: AbstractTransform, old: PyTree, new: PyTree) -> list[Array]:
    """The new leaves, refused where structure, shape or dtype differ from what `init` made."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        before, after = _names(transform, old), _names(transform, new)
        gone = [path for path in before if path not in after]
        come = [path for path in after if path not in before]
        raise TypeError(
            "The state that `update` returned has another structure than the one that `init` "
            f"made (gone: {gone[:3]}, new: {come[:3]}). They must be equal, so that a second call "
            "does not compile again."
        )
    leaves = []
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    for i, (before, after) in enumerate(pairs):
        if not tree.is_array(before):
            if type(after) is not type(before) or after != before:
                raise TypeError(
                    f"The state at '{_names(transform, old)[i]}' is {before!r} of type "
                    f"{type(before).__name__}, which is no array and so stands still, and `update` "
                    f"made it {after!r}. Let `init` return an array, such as "
                    "`jnp.zeros((), jnp.int32)` for a count."
                )
            continue
        after = after if isinstance(after, jax.Array) else jnp.asarray(after)
        if before.shape != after.shape or before.dtype != after.dtype:
            raise TypeError(
                f"The state at '{_names(transform, old)[i]}' was "
                f"{before.dtype}{list(before.shape)} and `update` made it "
                f"{after.dtype}{list(after.shape)}. It must stay what `init` made: cast the new "
                "value, for example with `.astype(old.dtype)`."
            )
        leaves.append(tree.cast(after, before.dtype))
    return leaves


def _names(transform: AbstractTransform, state: PyTree) -> list[str]:
    """The path of each leaf of a state."""
    return [slot.name for slot in slots(transform, state, ())]
