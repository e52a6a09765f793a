"""A loss and the batch of a step, divided into microbatches and examples."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import tree
from ..._core.text.calls import call
from ..._core.text.messages import series, warn
from ..._core.text.printing import code
from ...tree.packed import pack, unpack
from ...tree.paths import first_difference
from ...tree.types import PyTree, Scalar, Updates, is_state
from ..binding.model import Split, split, strong
from .batch import (
    PLACE,
    Arguments,
    Batch,
    Role,
    TrainingInputs,
    batch_of,
    check_state,
    states_of,
    with_states,
)
from .loss import LossResult, call_loss, checked_loss

LossGradient: TypeAlias = Callable[[Arguments], tuple[list[Array], PyTree]]
"""Maps the arguments of a loss to the leaves of its gradient and a packed `LossResult`."""


class BatchLoss(NamedTuple):
    """The loss of this step and its batch.

    **Arguments:**

    - `inputs`: the inputs of the step.
    - `model`: the model at which the loss is differentiated.
    - `scale`: a factor of the loss in its gradients.
    """

    inputs: TrainingInputs
    model: Split
    scale: Scalar | None

    def at(self, model: PyTree) -> "BatchLoss":
        """The loss of another model on the same batch, to differentiate there."""
        return self._replace(model=split(model, self.inputs.opt.binding.trainable))

    @property
    def trained(self) -> list[Array]:
        """The arrays to differentiate with respect to."""
        return [strong(x) for x in jax.tree.leaves(self.model.params)]

    def evaluate(
        self, model: PyTree, arguments: Arguments, check: Callable[..., Any] = checked_loss
    ) -> Any:
        """The loss with these arguments: a `LossResult`, or what else `check` makes of it."""
        (args, kwargs), options = arguments, self.inputs.options
        if options.compute_dtype is not None:
            state = args[: options.has_model_state]
            whole = (model, args[len(state) :], kwargs)
            model, args, kwargs = in_compute_dtype(whole, options.compute_dtype)
            args = (*state, *args)
        returned = call_loss(self.inputs.loss, model, *args, **kwargs)
        return check(returned, options.has_aux, options.has_weight)

    def differentiate(self, arguments: Arguments) -> tuple[list[Array], PyTree]:
        """The leaves of the gradient with these arguments, not conjugated."""

        def scaled_loss(trained: list[Array]) -> tuple[Scalar, PyTree]:
            result: LossResult = self.evaluate(self.model.join(trained), arguments)
            # Where nothing depends on them, no value is traced for their derivative.
            if type(result.loss) is not type(trained[0]):
                warn(
                    "The loss does not depend on the parameters, so their gradients are zero. Use "
                    "the model that the loss gets as its first argument."
                )
            loss, dtype = result.loss, tree.accumulation_dtype(result.loss.dtype)
            if self.scale is not None:
                loss = tree.cast(loss, dtype) * tree.cast(self.scale, dtype)
            return loss, pack(result)

        return jax.grad(scaled_loss, has_aux=True)(self.trained)

    def map_examples(self, batch: Batch) -> tuple[list[Array], LossResult]:
        """The gradient of each example, stacked, and the mean of the losses."""

        # The loss is called as for any batch, here of one example, with a single key.
        def one_by_one(x: Any, role: Role) -> Any:
            return x[:, None] if role is Role.ROWS else x

        def axis(role: Role) -> int | None:
            return 0 if role in (Role.ROWS, Role.EXAMPLE_KEYS) else None

        axes = jax.tree.map(axis, batch.roles)
        arguments = batch.mapped(one_by_one).arguments
        grads, packed = jax.vmap(self.differentiate, in_axes=(axes,))(arguments)
        result: LossResult = unpack(packed)
        if states_of(result.aux):
            raise ValueError(
                "The loss returns an `eqx.nn.State`, and is computed for each example separately, "
                "so there would be a state for each. Replace batch norm by a normalization without "
                "statistics, such as `eqx.nn.GroupNorm`, or do not return the state."
            )
        return grads, _mean_loss(result)

    def over_batch(
        self, function: LossGradient, like: list[Array]
    ) -> tuple[list[Array], LossResult]:
        """Evaluates a function of the arguments on the whole batch, in microbatches.

        **Arguments:**

        - `function`: the gradient of the loss, or only the loss.
        - `like`: arrays of the gradient's shapes and dtypes.

        **Returns:** the weighted means of the gradient, over microbatches in the accumulation
        dtype; and the mean loss, the total weight and the stacked `aux`.
        """
        number = self.inputs.options.microbatches
        if number is None:
            means, packed = function((self.inputs.args, self.inputs.kwargs))
            return means, unpack(packed)
        batch = batch_of(self.inputs, "microbatches")
        if number == "split":
            batch, number = batch.with_role(Role.PARTS, Role.ROWS), batch.size
        pad = ", or pad the batch and let the loss return a weighted mean and its weight, with "
        _check_divides(batch, number, f"{pad}`has_weight=True`")
        return self._over_parts(function, like, batch.with_keys(number, Role.PARTS), number)

    def _over_parts(
        self, function: LossGradient, like: list[Array], batch: Batch, number: int
    ) -> tuple[list[Array], LossResult]:
        has_weight = self.inputs.options.has_weight

        def body(carry: Any, i: Any) -> Any:
            total, means, states = carry
            arguments = with_states(batch.microbatch(i, number).arguments, states)
            new, packed = function(arguments)
            result: LossResult = unpack(packed)
            weight = jnp.asarray(result.weight, total.dtype)
            states, packed = _carried_states(states, result, has_weight)
            total = total + weight
            share = weight / jnp.where(total == 0, 1, total)

            def rule(now: Any, mean: Any, new: Any) -> Any:
                mixed = mean + (new - mean) * now.share
                # A microbatch of padding alone changes nothing, even if its gradient is NaN.
                return jnp.where(now.weight == 0, mean, mixed) if has_weight else mixed

            # A running mean instead of a sum, which would have to be divided into another buffer.
            means = tree.map_leaves(rule, (means, new), SimpleNamespace(weight=weight, share=share))
            return (total, means, states), packed

        means = [jnp.zeros_like(x, tree.accumulation_dtype(x.dtype)) for x in like]
        states = jax.tree.map(strong, states_of(batch.arguments))
        start = (jnp.zeros((), tree.canonical_float()), means, states)
        (total, means, states), packed = jax.lax.scan(body, start, jnp.arange(number))
        stacked: LossResult = unpack(packed)
        aux = with_states(stacked.aux, states)
        weights = jnp.asarray(stacked.weight, total.dtype)
        losses = jnp.asarray(stacked.loss, tree.accumulation_dtype(stacked.loss.dtype))
        shares = jnp.asarray(weights / jnp.where(total == 0, 1, total), losses.dtype)
        loss = jnp.sum(jnp.where(weights == 0, 0, losses * shares))
        return means, LossResult(
            jnp.asarray(loss, stacked.loss.dtype), total, aux, weights if has_weight else None
        )

    def gather(
        self, function: Callable[[Updates], tuple[Updates, PyTree]], batch: Batch, number: int
    ) -> tuple[Updates, PyTree, list[Array], LossResult]:
        """The sums that a per-example link gathers, one microbatch at a time.

        **Arguments:**

        - `function`: the link's `gather` in this step.
        - `batch`, `number`: the batch, and the number of microbatches.

        **Returns:** the sum that has the parameters' structure, the other sums, the mean gradient,
        and the results of the loss.
        """
        _check_divides(batch, number)

        def stack(x: Any) -> Any:
            return jnp.broadcast_to(x, (batch.size // number, *x.shape))

        def sums_of(stacked: list[Any]) -> Any:
            sums = function(self.ascent(stacked))
            return sums, [jnp.mean(g, 0, tree.accumulation_dtype(g.dtype)) for g in stacked]

        def body(before: Any, i: Any) -> Any:
            stacked, result = self.map_examples(batch.microbatch(i, number))
            new = jax.tree.map(jnp.add, before, sums_of(stacked))
            return tree.cast_like(new, before), pack(result)

        shapes = jax.eval_shape(lambda: sums_of(list(map(stack, self.trained))))
        zeros = tree.zeros_of(shapes)
        ((total, counts), sums), packed = jax.lax.scan(body, zeros, jnp.arange(number))
        return total, counts, [g / number for g in sums], _mean_loss(unpack(packed))

    def value(self, model: PyTree) -> Scalar:
        """The loss of another model on the same batch."""

        def without_gradient(arguments: Arguments) -> tuple[list[Array], PyTree]:
            return [], pack(self.evaluate(model, arguments)._replace(aux=None))

        return self.over_batch(without_gradient, [])[1].loss

    def ascent(self, grads: list[Array]) -> Updates:
        """Gradients as a tree like the parameters. JAX returns the conjugate of the direction of
        steepest ascent."""
        return jax.tree.structure(self.model.params).unflatten(map(jnp.conj, grads))

    def transformed(self, grads: Updates) -> Updates:
        """Gradients as the optimizer sees them."""
        transform = self.inputs.options.transform_grads
        if transform is None:
            return grads
        new = call("`transform_grads`", transform, grads=grads)
        if jax.tree.structure(new) != jax.tree.structure(grads):
            differ = first_difference(new, grads, ("the result", "the gradients"))
            raise ValueError(f"`transform_grads` must return a tree like the gradients: {differ}.")
        return self.model.align(new)


def _mean_loss(stacked: LossResult) -> LossResult:
    losses = jnp.asarray(stacked.loss, tree.accumulation_dtype(stacked.loss.dtype))
    return stacked._replace(loss=jnp.asarray(jnp.mean(losses), stacked.loss.dtype))


def _carried_states(
    states: list[Any], result: LossResult, has_weight: bool
) -> tuple[list[Any], PyTree]:
    """The states of the model after a microbatch, and its results with places for them in `aux`."""
    returned = states_of(result.aux)
    if not returned:
        return states, pack(result)
    if len(returned) != len(states):
        raise ValueError(
            f"The loss takes {len(states)} `eqx.nn.State` and returns {len(returned)}, so they "
            "cannot go from one microbatch to the next. Return each that it takes, in order."
        )
    for new, old in zip(returned, states, strict=True):
        check_state(new, old, "the one that it takes")
    if has_weight:  # a microbatch of padding alone changes nothing
        is_padding = result.weight == 0
        returned = jax.tree.map(lambda a, b: jnp.where(is_padding, a, b), states, returned)
    aux = with_states(result.aux, [PLACE] * len(returned))
    return returned, pack(result._replace(aux=aux))


def _check_divides(batch: Batch, number: int, advice: str = "") -> None:
    """Raises an error if a batch cannot be divided into this number of equal parts."""
    for size in batch.sizes:
        if size % number:
            raise ValueError(
                f"The batch has {size} examples, which cannot be divided into {number} "
                f"microbatches of equal size. Pass a multiple of {number}{advice}."
            )


DTYPES = ("bfloat16", "float16", "float32", "float64")


def as_compute_dtype(dtype: Any) -> str | None:
    """The name of the dtype. Raises an error for one that no loss is computed in."""
    if dtype is None:
        return None
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        names = series(map(repr, DTYPES), "or")
        raise TypeError(f"train_step.compute_dtype must be {names}, got {code(dtype)}.")
    return name


def in_compute_dtype(values: PyTree, dtype: str) -> PyTree:
    """The values with all real floating arrays in this dtype.

    `eqx.nn.State` stays as it is: the loss returns it, and the next step would be compiled again
    for another dtype.
    """
    wanted = tree.canonical(dtype)

    def in_dtype(x: Any) -> Any:
        if tree.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating):
            return tree.cast(x, wanted)
        return x

    return jax.tree.map(in_dtype, values, is_leaf=is_state)
