"""What a loss returned, and its gradient over the parts and the examples of a batch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._compile.program import pack, unpack
from .._core.per_example import AbstractPerExampleTransform, Gathered
from .._core.transform import Context
from .._types import Updates
from ..tree import accumulation_dtype, cast_like, is_array, map_leaves
from ..tree.dtypes import canonical_float
from .batch import Batch


class Evaluated(NamedTuple):
    """A loss and what came beside it, from one batch."""

    loss: Any
    weight: Any
    aux: Any


def over_examples(
    of: Callable[[Any], tuple[list[Any], Any]], batch: Batch
) -> tuple[list[Any], Evaluated]:
    """What `of` returns of each example, stacked, and the mean of the losses."""
    grads, packed = jax.vmap(lambda rows: of(batch.example(rows).arguments))(batch.arrays)
    made = unpack(packed)
    losses = jnp.asarray(made.loss, accumulation_dtype(made.loss.dtype))
    return grads, made._replace(loss=jnp.asarray(jnp.mean(losses), made.loss.dtype))


def over_microbatches(
    of: Callable[[Any], tuple[list[Any], Any]],
    like: list[Any],
    batch: Batch,
    number: int,
    has_aux: bool | Literal["weight"],
) -> tuple[list[Any], Evaluated]:
    """The weighted mean over microbatches of arrays like `like`, which `of` returns, and of the
    loss."""
    pad = (
        ", or pad the batch and let the loss return a weighted mean and its weight, with "
        '`has_aux="weight"`'
    )
    _check_divides(batch, number, pad)

    def body(carry: Any, i: Any) -> Any:
        total, means = carry
        new, packed = of(batch.microbatch(i, number).arguments)
        weight = jnp.asarray(unpack(packed).weight, total.dtype)
        total = total + weight
        share = weight / jnp.where(total == 0, 1, total)

        def rule(now: Any, mean: Any, new: Any) -> Any:
            mixed = mean + (new - mean) * now.share
            # Padding alone, whatever stands in it, leaves no trace.
            return jnp.where(now.weight == 0, mean, mixed) if has_aux == "weight" else mixed

        # A mean and no sum: what comes after would otherwise be divided, which takes a buffer.
        means = map_leaves(rule, (means, new), SimpleNamespace(weight=weight, share=share))
        return (total, means), packed

    means = [jnp.zeros_like(x, accumulation_dtype(x.dtype)) for x in like]
    begin = (jnp.zeros((), canonical_float()), means)
    (total, means), packed = jax.lax.scan(body, begin, jnp.arange(number))
    made = unpack(packed)
    weights = jnp.asarray(made.weight, total.dtype)
    losses = jnp.asarray(made.loss, accumulation_dtype(made.loss.dtype))
    shares = jnp.asarray(weights / jnp.where(total == 0, 1, total), losses.dtype)
    loss = jnp.sum(jnp.where(weights == 0, 0, losses * shares))
    loss = jnp.asarray(loss, made.loss.dtype)
    return means, Evaluated(loss, total, total if has_aux == "weight" else made.aux)


def gather(
    of: Callable[[Any], tuple[list[Any], Any]],
    link: AbstractPerExampleTransform,
    batch: Batch,
    number: int,
    params: PyTree,
    context: Context,
) -> tuple[Updates, Gathered, list[Any], Evaluated]:
    """What a per-example link gathers from one microbatch after another.

    **Returns:** the sum like the parameters, the link with the rest of it, the mean gradient, and
    what the loss returned.
    """
    _check_divides(batch, number)
    leaves, structure = jax.tree.flatten(params)

    def stack(x: Any) -> Any:
        return jax.ShapeDtypeStruct((batch.size // number, *x.shape), x.dtype)

    def sums_of(stacked: list[Any]) -> Any:
        sums = link.gather(structure.unflatten(map(jnp.conj, stacked)), context)
        return sums, [jnp.mean(g, 0, accumulation_dtype(g.dtype)) for g in stacked]

    def body(before: Any, i: Any) -> Any:
        stacked, made = over_examples(of, batch.microbatch(i, number))
        new = jax.tree.map(jnp.add, before, sums_of(stacked))
        return cast_like(new, before), pack(made)

    shapes = jax.eval_shape(sums_of, list(map(stack, leaves)))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    ((total, counts), sums), packed = jax.lax.scan(body, zeros, jnp.arange(number))
    made = unpack(packed)
    losses = jnp.asarray(made.loss, accumulation_dtype(made.loss.dtype))
    made = made._replace(loss=jnp.asarray(jnp.mean(losses), made.loss.dtype))
    means = [g / number for g in sums]
    return total, Gathered(link, counts, batch.size), means, made


def _check_divides(batch: Batch, number: int, advice: str = "") -> None:
    """Refuses a batch that cannot be cut into so many parts of equal size."""
    if batch.size % number:
        raise ValueError(
            f"The batch has {batch.size} examples, of which {number} microbatches cannot be made "
            f"of equal size. Pass a multiple of {number}{advice}."
        )


def evaluated(result: Any, has_aux: bool | Literal["weight"]) -> Evaluated:
    """What the loss returned, refused where it cannot be differentiated."""
    loss, aux = result, None
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            second = "weight" if has_aux == "weight" else "aux"
            raise TypeError(
                f"With `has_aux={has_aux!r}` the loss must return a pair (loss, {second}), got "
                f"{_kind(result)}."
            )
        loss, aux = result
    if loss is None:
        raise TypeError("The loss returned None. Does the function end with `return`?")
    if not is_array(loss) and not isinstance(loss, int | float | complex):
        raise TypeError(
            f"The loss returned {_kind(loss)}. To return something beside the loss, write "
            "`sl.train_step(loss_fn, has_aux=True)` and return a pair (loss, aux)."
        )
    loss = jnp.asarray(loss)
    if loss.shape != ():
        raise ValueError(
            f"The loss must be a scalar, got an array of shape {loss.shape}. Average it over the "
            "batch, for example with `jnp.mean`."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"The loss must be a real floating number, got dtype {loss.dtype}.")
    if has_aux != "weight":
        return Evaluated(loss, jnp.ones((), canonical_float()), aux)
    if not is_array(aux) and not isinstance(aux, int | float):
        raise TypeError(f"The weight that the loss returns must be a scalar, got {_kind(aux)}.")
    weight = jnp.asarray(aux)
    if weight.shape != () or jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise ValueError(
            "The weight that the loss returns must be a real scalar, got an array of shape "
            f"{weight.shape} and dtype {weight.dtype}."
        )
    weight = jnp.asarray(weight, canonical_float())
    return Evaluated(loss, weight, weight)


def _kind(result: Any) -> str:
    """What the loss returned, in words."""
    if is_array(result):
        return f"an array of shape {result.shape}"
    size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
    return f"a {type(result).__name__}{size}"
