"""The inputs of one step other than the gradients."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from ... import tree
from ...tree.types import Params, PyTree, Scalar, Step, Updates
from .residuals import Residuals

_OTHER = ("extra", "bounds", "constrain", "gathered", "shardings", "stored_clock")
"""The fields that are not inputs by name."""


class Context(eqx.Module):
    """The inputs of one step other than the gradients.

    **Arguments:**

    - `step`: the number of steps so far, at which schedules are evaluated.
    - `value`: the loss, a scalar.
    - `grad`: the gradient of the loss, before any transform.
    - `value_fn`: the loss as a function of the parameters.
    - `grad_fn`: the gradient of the loss as a function of the parameters. Where it is not passed,
        `gradient` and `hessian_product` differentiate `value_fn`.
    - `sampled_grad_fn`: a function of the parameters and a key, which returns the gradient of the
        mean loss for labels that are drawn from the model, and the number of terms of that mean.
    - `residuals`: the loss as a function of the parameters that can be linearized by rows, as
        `loss_fn.on(x, y)` of an `sl.LeastSquares` returns it.
    - `terms`: the terms of the loss, an `sl.combine.Terms`.
    - `max_logits`: the largest attention logits of each head, as `sl.contrib.QKClip` takes them.
    - `key`: a PRNG key for this step.
    - `weight`: the weight of this mini-batch in a mean over several, a scalar.
    - `per_param`: parameter-shaped trees by name. Masks and partitions restrict them to the leaves
        that they select.
    - `bounds`: the lower and upper bounds of the parameters, two trees like them, which may be
        infinite. `.project` passes them for sets that are boxes.
    - `gathered`: where the updates are already the sums that a per-example transform gathers, its
        other sums and the number of examples. `sl.train_step` passes it.
    - `constrain`: the projection of `.project`, a function of a tree like the parameters, for
        transforms that evaluate the loss at other parameters or keep such parameters.
    - `extra`: inputs that custom transforms declare in `needs`, by name.
    - `shardings`: where each parameter is on a mesh with automatic axes, in the order of the
        leaves. `opt.step` passes it.
    - `stored_clock`: the number of steps that stochastic rounding of stored state hashes. `.store`
        passes it.
    """

    step: Step | None = None
    value: Any = None
    grad: Updates | None = None
    value_fn: Callable[[Params], Any] | None = None
    grad_fn: Callable[[Params], Updates] | None = None
    sampled_grad_fn: Callable[[Params, Any], tuple[Updates, Any]] | None = None
    residuals: Residuals | None = None
    terms: Any = None
    max_logits: PyTree | None = None
    key: Any = None
    weight: Any = None
    per_param: Mapping[str, PyTree] | None = None
    bounds: tuple[Params, Params] | None = None
    gathered: tuple[PyTree, int] | None = None
    constrain: Callable[[Params], Params] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shardings: tuple[NamedSharding | None, ...] = eqx.field(default=(), static=True)
    stored_clock: Any = None

    def has(self, name: str) -> bool:
        """Whether this step has the input `name`."""
        fields = [field.name for field in dataclasses.fields(self) if field.name not in _OTHER]
        named = {**self.extra, **(self.per_param or {})}
        value = getattr(self, name) if name in fields else named.get(name)
        return value is not None or (name == "grad_fn" and self.value_fn is not None)

    def gradient(self, params: Params) -> Updates:
        """The gradient of the loss at other parameters. A transform that uses it `needs`
        `"grad_fn"`.

        **Arguments:**

        - `params`: a tree like the parameters.

        **Returns:** a tree like them; complex gradients are conjugated, as in `update`.
        """
        if self.grad_fn is not None:
            return self.grad_fn(params)
        assert self.value_fn is not None, "A transform that needs a gradient must declare it."
        value_fn = self.value_fn

        def checked(params: Params) -> Scalar:
            return checked_value("of this step", value_fn(params))

        return jax.tree.map(jnp.conj, jax.grad(checked)(params))

    def hessian_product(self, params: Params, vector: Params) -> Updates:
        """The product H·v of the Hessian of the loss with a vector. A transform that uses it
        `needs` `"grad_fn"`.

        It costs about as much as two gradients. Put it into a `jax.lax.cond` if it is not needed in
        every step.

        **Arguments:**

        - `params`: real parameters.
        - `vector`: v, a tree like the parameters.

        **Returns:** a tree like the parameters.
        """
        vector = tree.cast_like(vector, params)
        return jax.jvp(self.gradient, (params,), (vector,))[1]

    def replace(self, **changes: object) -> "Context":
        """This context with some entries changed.

        A wrapper that gives its inner transform a clock of its own replaces `step`.
        """
        return dataclasses.replace(self, **changes)

    def mapped(self, **functions: Callable[[Any], Any]) -> "Context":
        """This context with functions of some of its entries in their place.

        **Arguments:**

        - `functions`: a function of each entry, by name. It is not called if there is none.
        """
        entries = {name: getattr(self, name) for name in functions}
        return self.replace(
            **{name: functions[name](x) for name, x in entries.items() if x is not None}
        )

    def constrained(self, params: Params) -> Params:
        """Parameters projected onto the set of the `.project` around this, if there is one."""
        return params if self.constrain is None else self.constrain(params)

    def in_form(
        self, inward: Callable[[PyTree], PyTree], outward: Callable[[PyTree], PyTree]
    ) -> "Context":
        """This context for a transform that sees the parameters in another form.

        **Arguments:**

        - `inward`: from a tree like the parameters to the form that the transform sees.
        - `outward`: from parameters in that form to the parameters.
        """

        def inside(function: Callable[[Params], Params]) -> Callable[[PyTree], PyTree]:
            return lambda params: inward(function(outward(params)))

        def sampled_inside(function: Callable[[Params, Array], Any]) -> Callable[..., Any]:
            def sampled(params: PyTree, key: Array) -> tuple[Any, Any]:
                grad, terms = function(outward(params), key)
                return inward(grad), terms

            return sampled

        return self.replace(shardings=()).mapped(
            per_param=lambda trees: {name: inward(tree) for name, tree in trees.items()},
            grad=inward,
            bounds=lambda ends: (inward(ends[0]), inward(ends[1])),
            constrain=inside,
            value_fn=lambda value_fn: lambda params: value_fn(outward(params)),
            grad_fn=inside,
            sampled_grad_fn=sampled_inside,
            residuals=lambda residuals: residuals.of(outward),
        )

    def cut(self, keep: tuple[bool, ...], params: Params) -> "Context":
        """This context for a transform that acts on some of the parameters only.

        The loss becomes a function of those parameters; the others are held constant.
        """
        pairs = zip(self.shardings, keep, strict=False)
        shardings = tuple(sharding for sharding, kept in pairs if kept)
        inside = self.in_form(
            lambda whole: tree.cut(whole, keep), lambda kept: tree.put(params, keep, kept)
        )
        return dataclasses.replace(inside, shardings=shardings)


def checked_value(which: str, value: Any) -> Scalar:
    """The result of this `value_fn`, if it is a valid loss."""
    if not tree.is_array(value) and not isinstance(value, int | float | complex):
        raise TypeError(
            f"The `value_fn` {which} must return a real scalar, got {value!r} of "
            f"type {type(value).__name__}."
        )
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(
            f"The `value_fn` {which} must return a scalar, got an array of shape "
            f"{value.shape}. Average it over the batch, for example with `jnp.mean`."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"The `value_fn` {which} must return a real floating-point number, got dtype "
            f"{value.dtype}."
        )
    return value


class Merge(NamedTuple):
    """The arrays that a window of `.every_k` merges for an entry of the context.

    **Arguments:**

    - `start`: a function of the transform and its parameters that returns the array with which a
        window begins.
    - `read`: a function of the entry and of an array like that one that returns the entry as such
        an array.
    - `entry`: a function of such an array that returns the entry.
    """

    start: Callable[[Any, Params], Array]
    read: Callable[[Any, Array], Array]
    entry: Callable[[Array], Any]
