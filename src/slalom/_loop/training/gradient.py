"""The traced part of a training step: the gradient of a batch, and the optimizer's step with it."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._core.engine.manual_axes import refuse_divided_examples
from ..._core.protocol.bases import AbstractPerExampleTransform
from ..._core.protocol.chain import last_link
from ..._core.protocol.context import Context
from ..._core.protocol.loss import Loss, loss_of
from ..._core.protocol.parts import Part
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.calls import check_takes
from ..._core.text.messages import warn
from ...combine import Terms
from ...tree import canonical_float, cast, cast_like, gram_matrix, is_array, scale
from ...tree.packed import pack, unpack
from ...tree.types import Params, PyTree, Scalar, Updates
from ..binding.model import split
from ..binding.stepping import advance, sampled_params
from ..residual_losses import linearized
from .batch import Role, TrainingInputs, batch_of
from .batch_loss import BatchLoss
from .loss import LossResult, check_call, checked_loss, checked_terms, residual_loss


def train_step(inputs: TrainingInputs) -> tuple[list[Array], PyTree]:
    """The body of the compiled program: the new values of the carried leaves, and the third result
    of the step in a tuple, with nothing to check after it."""
    opt, options = inputs.opt, inputs.options
    model = at = split(inputs.model, opt.binding.trainable)
    transform, state, count = map(unpack, opt.arrays)
    loss = loss_of(transform, state, Context(step=count), model.params)
    options.check_loss(loss)
    if "sampled parameters" in loss.askers:
        drawn = sampled_params(loss, model.params)
        at = split(model.join(drawn), opt.binding.trainable)
    check_call(inputs.loss, inputs.args, inputs.kwargs)
    scales = (part.state.scale for part in loss.askers.get("scaled loss", ()))
    batch_loss = BatchLoss(inputs, at, next(scales, None))
    if options.compute_dtype == "float16" and batch_loss.scale is None:
        warn(
            "The loss is computed in float16, and nothing scales it: gradients below 6e-8 "
            'become 0. Write `tx.scale_loss()`, or `compute_dtype="bfloat16"`, which needs no '
            "scale."
        )
    source = residual_loss(inputs.loss, loss)
    if "combined terms" in loss.askers:
        gradient = _combined_gradient(batch_loss, loss.askers["combined terms"][0], model.params)
    elif "single examples" in loss.askers:
        gradient = _per_example_gradient(batch_loss, loss.askers["single examples"][0])
    elif options.reuse_linesearch:
        gradient = _recalled_gradient(batch_loss, loss, transform)
    elif source is not None and options.microbatches is None:
        # From the Jacobian of the residuals, which the rules need in any case.
        residuals, value, grads = linearized(source, inputs, at, loss)
        gradient = Gradient(grads, grads, checked_loss(value), {"residuals": residuals})
    else:
        gradient = _batch_gradient(batch_loss)

    result = gradient.result
    entries = _context_entries(gradient, batch_loss, loss)
    if source is not None:
        entries.setdefault("residuals", source.on(*inputs.args, **inputs.kwargs))
    params, new_state = advance(
        opt, model, gradient.grads, entries, gathered=gradient.gathered, in_training_step=True
    )
    others = (*(result.weight,) * options.has_weight, *(result.aux,) * options.has_aux)
    returned = (result.loss, *others) if others else result.loss
    return jax.tree.leaves(params) + new_state, ((returned,), [])


def _context_entries(gradient: "Gradient", batch_loss: BatchLoss, loss: Loss) -> dict[str, Any]:
    """The inputs of the transforms: those that the caller passed, and those that they ask for."""
    inputs, result = batch_loss.inputs, gradient.result
    options = inputs.options
    entries = {"value": result.loss, **inputs.context, **gradient.entries}
    if "max_logits" in loss.askers:
        stacked = (options.microbatches is not None) + ("single examples" in loss.askers)
        entries.setdefault("max_logits", result.max_logits(stacked))
    if options.has_weight:
        entries["weight"] = result.weight
    if "grad" in loss.askers:
        entries["grad"] = gradient.mean
    if "value_fn" in loss.askers:
        entries["value_fn"] = batch_loss.value
    if "grad_fn" in loss.askers:
        entries["grad_fn"] = lambda model: _unscaled_gradient(batch_loss.at(model)).grads
    if "sampled_grad_fn" in loss.askers and options.sampled_loss_fn is not None:
        entries["sampled_grad_fn"] = functools.partial(_sampled_gradient, batch_loss)
    return entries


class Gradient(NamedTuple):
    """The gradient of a step.

    **Arguments:**

    - `grads`: the gradients for the transform, with a leading axis of examples if its first link
        needs per-example gradients.
    - `mean`: the gradient of the mean loss.
    - `result`: the results of the loss.
    - `entries`: more entries of the context.
    - `gathered`: where `grads` are the sums that the first link gathers, as in `Context`.
    """

    grads: Updates
    mean: Updates
    result: LossResult
    entries: Mapping[str, Any] = MappingProxyType({})
    gathered: tuple[PyTree, int] | None = None


def _batch_gradient(batch_loss: BatchLoss) -> Gradient:
    """The gradient of the mean loss."""
    means, result = batch_loss.over_batch(batch_loss.differentiate, batch_loss.trained)
    grads = batch_loss.transformed(batch_loss.ascent(means))
    return Gradient(grads, grads, result)


def _combined_gradient(batch_loss: BatchLoss, part: Part, params: Params) -> Gradient:
    """The gradient of the sum of the terms of the loss, with the weights of a combination.

    **Arguments:**

    - `batch_loss`, `part`: the loss, and the part that combines its terms.
    - `params`: all parameters, as the transforms see them.
    """
    inputs, names = batch_loss.inputs, part.module.terms
    check = functools.partial(checked_terms, names=names)

    def terms_of(trained: list[Array]) -> tuple[Array, PyTree]:
        model, arguments = batch_loss.model.join(trained), (inputs.args, inputs.kwargs)
        losses, result = batch_loss.evaluate(model, arguments, check)
        return losses, pack(result)

    losses, pullback, packed = jax.vjp(terms_of, batch_loss.trained, has_aux=True)
    result: LossResult = unpack(packed)

    def part_with(**entries: Any) -> Part:
        weight = result.weight if inputs.options.has_weight else inputs.context.get("weight")
        context = Context(step=inputs.opt.arrays.count, weight=weight, **entries)
        loss = loss_of(inputs.opt.transform, inputs.opt.state, context, params)
        return loss.askers["combined terms"][0]

    def gradient(weights: Array) -> Updates:
        (grads,) = pullback(cast(weights, losses.dtype))
        return batch_loss.transformed(batch_loss.ascent(grads))

    def products() -> Array:
        # Each product needs two gradients of one layer at a time, so XLA frees those of a layer
        # before it computes the next. They are of the parameters that the combination acts on, and
        # along the set that these are projected onto.
        rows_of = jnp.eye(len(names), dtype=losses.dtype)
        each = [part_with(grad=gradient(row)).context.grad for row in rows_of]
        return cast(gram_matrix(each), canonical_float())

    gram = None
    if part.module.combination.uses_gram:
        gram = part.module.refreshed(part.state, part.context, products, part.state.gram)
    terms = Terms(cast(losses, canonical_float()), gram)
    # A window of `.every_k` merges the terms of its mini-batches.
    part = part_with(terms=terms)
    weights, _ = part.module.weigh(part.context.terms, part.state, part.context)
    grads = gradient(weights)
    acts_on = jax.tree.map(lambda _, p: bool(jax.tree.leaves(p)), grads, part.params)
    if not all(jax.tree.leaves(acts_on)):
        # The other parameters get the gradient of the loss itself.
        rest = gradient(jnp.ones_like(weights))
        grads = jax.tree.map(lambda acts, g, x: g if acts else x, acts_on, grads, rest)
    return Gradient(grads, grads, result, {"terms": terms})


def _unscaled_gradient(batch_loss: BatchLoss) -> Gradient:
    """The gradient of the mean loss, for a transform that does not know of a scale."""
    gradient = _batch_gradient(batch_loss)
    if batch_loss.scale is None:
        return gradient
    return gradient._replace(grads=scale(gradient.grads, 1 / batch_loss.scale))


def _sampled_gradient(batch_loss: BatchLoss, model: PyTree, key: Any) -> tuple[Updates, Scalar]:
    """The gradient of the mean loss for labels that are drawn from a model, and their number."""
    inputs, options = batch_loss.inputs, batch_loss.inputs.options
    sampled_loss_fn: Any = options.sampled_loss_fn

    @functools.wraps(sampled_loss_fn)
    def loss_fn(*args: Any, **kwargs: Any) -> Any:
        try:
            returned = sampled_loss_fn(*args, **kwargs)
        except TypeError:
            names = ("model", "key", *(f"arg_{i}" for i in range(len(args) - 2)))
            check_takes("`sampled_loss_fn`", sampled_loss_fn, *names, **kwargs)
            raise
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                "`sampled_loss_fn` must return a pair: the mean of the loss over drawn labels, and "
                f"the number of them, got something of type {type(returned).__name__}."
            )
        return returned

    if options.batch_args is not None:
        # The key comes before the arguments that are counted.
        moved = (i + 1 if isinstance(i, int) else i for i in options.batch_args)
        options = options._replace(batch_args=tuple(moved))
    # The number of labels is the weight in the mean over microbatches.
    options = options._replace(has_aux=False, has_weight=True)
    inputs = inputs._replace(loss=loss_fn, options=options, args=(key, *inputs.args))
    gradient = _unscaled_gradient(batch_loss.at(model)._replace(inputs=inputs))
    return gradient.grads, gradient.result.weight


def _recalled_gradient(batch_loss: BatchLoss, loss: Loss, transform: AbstractTransform) -> Gradient:
    """The gradient that the line search kept, or a new one if it has not kept any."""
    kept = loss.recalled()
    if kept is None:
        raise TypeError(
            "`reuse_linesearch=True` takes loss and gradient from a line search that ends the "
            "chain, such as `sl.ScaleByZoomLinesearch` or "
            "`sl.ScaleByBacktrackingLinesearch(…, store_grad=True)`. This chain ends with "
            f"{type(last_link(transform)).__name__}, which keeps no gradient."
        )
    value, grad, is_known = kept

    def compute() -> tuple[Scalar, Updates]:
        new = _batch_gradient(batch_loss)  # which no `transform_grads` changes
        return jnp.asarray(new.result.loss, value.dtype), cast_like(new.grads, grad)

    value, grads = jax.lax.cond(is_known, lambda: (value, grad), compute)
    return Gradient(grads, grads, LossResult(value, jnp.ones(()), None))


def _per_example_gradient(batch_loss: BatchLoss, part: Part) -> Gradient:
    """Per-example gradients, or the sums of them that the first link gathers."""
    link, options = part.module, batch_loss.inputs.options
    gathers = isinstance(link, AbstractPerExampleTransform)
    if options.microbatches is not None and not gathers:
        raise TypeError(
            f"{type(link).__name__} needs the per-example gradients of the whole batch. To use "
            "microbatches, let it subclass `sl.AbstractPerExampleTransform`, which gathers sums."
        )
    batch = batch_of(batch_loss.inputs, "examples")
    arrays = list(filter(is_array, jax.tree.leaves(batch.arguments)))
    refuse_divided_examples(type(link).__name__, arrays, batch_loss.trained)
    batch = batch.with_keys(batch.size, Role.EXAMPLE_KEYS)
    if options.microbatches is None or not gathers:
        stacked, result = batch_loss.map_examples(batch)
        means = [jnp.mean(g, axis=0) for g in stacked]
        return Gradient(batch_loss.ascent(stacked), batch_loss.ascent(means), result)
    assert options.microbatches != "split"  # which is refused
    gather = functools.partial(link.gather, context=part.context)
    total, counts, means, result = batch_loss.gather(gather, batch, options.microbatches)
    gathered = (counts, batch.size)
    return Gradient(total, batch_loss.ascent(means), result, gathered=gathered)
