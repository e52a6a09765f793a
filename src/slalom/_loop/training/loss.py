"""Checks the results of a loss, and averages them over microbatches and examples."""

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._core.text.messages import where_raised
from ...tree import accumulation_dtype, cast, cast_like, is_array, map_leaves
from ...tree.dtypes import canonical_float
from ...tree.packed import pack, unpack
from ...tree.types import Params, PyTree, Scalar, Updates
from ..binding.model import strong
from .batch import PLACE, Arguments, Batch, Role, check_state, states_of, with_states

LossGradient: TypeAlias = Callable[[Arguments], tuple[list[Array], PyTree]]
"""Maps the arguments of a loss to the leaves of its gradient and a packed `LossResult`."""


class LossResult(NamedTuple):
    """The results of a loss for one batch."""

    loss: Scalar
    weight: Scalar
    """The weight of the batch. Defaults to 1."""
    aux: Any
    parts: Array | None = None
    """The weight of each microbatch, where the arrays of `aux` have a first axis for them."""

    def max_logits(self, stacked: int) -> PyTree | None:
        """The largest attention logits that the loss returns for `sl.contrib.QKClip`, if it does.

        **Arguments:**

        - `stacked`: the number of axes of microbatches and examples that `aux` has in front.
        """
        logits = self.aux.get("max_logits") if isinstance(self.aux, Mapping) else None

        def largest(x: Any) -> Array:
            x = jnp.asarray(x)
            if self.parts is not None:
                weights = self.parts.reshape(-1, *(1,) * (x.ndim - 1))
                x = jnp.where(weights == 0, 0, x)  # padding, which clips nothing
            return jnp.max(x, axis=tuple(range(stacked)))

        return jax.tree.map(largest, logits)


_FOR_TRANSFORMS = ("value", "weight", "key", "per_param", "grad", "value_fn")


def check_call(
    loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raises an error if a loss does not take the arguments of a step."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"The loss does not take these arguments: {error}. "
            f"{_call_advice(signature.parameters, args, kwargs)}"
        ) from None


def _call_advice(names: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    for name in kwargs:
        if name == "value" and name not in names:
            return "The step passes the loss to the transforms itself: leave `value` out."
        if name in _FOR_TRANSFORMS and name not in names:
            return f"For the transforms, write `context={{{name!r}: {name}}}`."
    if len(args) < len(names) - 1 and any(isinstance(x, tuple | list) for x in args):
        return "Unpack the batch: `step(model, opt, *batch)`."
    others = [*names][1:]
    return f"Write `step({', '.join(['model', 'opt', *others])})`."


def checked_loss(returned: Any, has_aux: bool, has_weight: bool) -> LossResult:
    """The results of the loss. Raises an error if it cannot be differentiated."""
    loss, weight, aux = returned, None, None
    if has_aux or has_weight:
        loss, weight, aux = _unpacked(returned, has_aux, has_weight)
    if isinstance(loss, dict):
        loss = _sum_of_terms(loss)
    if loss is None:
        raise TypeError("The loss returned None. Does the function end with `return`?")
    if not is_array(loss) and not isinstance(loss, int | float | complex):
        raise TypeError(
            f"The loss returned {_describe(loss)}. To return more than the loss, write "
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
    if not has_weight:
        return LossResult(loss, jnp.ones((), canonical_float()), aux)
    if not is_array(weight) and not isinstance(weight, int | float):
        raise TypeError(
            f"The weight that the loss returns must be a scalar, got {_describe(weight)}."
        )
    weight = jnp.asarray(weight)
    if weight.shape != () or jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise ValueError(
            "The weight that the loss returns must be a real scalar, got an array of shape "
            f"{weight.shape} and dtype {weight.dtype}."
        )
    return LossResult(loss, jnp.asarray(weight, canonical_float()), aux)


def checked_terms(
    returned: Any, names: tuple[str, ...], has_aux: bool, has_weight: bool
) -> tuple[Float[Array, " terms"], LossResult]:
    """The terms that a loss returns, in this order, and its results, of which the loss is their
    sum."""
    result = checked_loss(returned, has_aux, has_weight)
    terms = returned[0] if has_aux or has_weight else returned
    if not isinstance(terms, dict) or set(terms) != set(names):
        got = f"the terms {list(terms)}" if isinstance(terms, dict) else _describe(terms)
        raise TypeError(
            f"`.combine` of this optimizer is for the terms {list(names)}, so the loss must return "
            f"a dict with these names, got {got}."
        )
    values = [jnp.asarray(terms[name]) for name in names]
    dtype = accumulation_dtype(*(x.dtype for x in values))
    return jnp.stack([cast(x, dtype) for x in values]), result


def _sum_of_terms(terms: dict[Any, Any]) -> Array:
    """The sum of a dict of losses."""
    if not terms:
        raise ValueError("The loss returned a dict without terms.")
    total: Any = None
    for name, term in terms.items():
        if not is_array(term) and not isinstance(term, int | float):
            raise TypeError(
                f"The terms of a loss must be scalars, and '{name}' is {_describe(term)}."
            )
        term = jnp.asarray(term)
        if term.shape != () or not jnp.issubdtype(term.dtype, jnp.floating):
            raise TypeError(
                "The terms of a loss must be real floating scalars, and "
                f"'{name}' has shape {term.shape} and dtype {term.dtype}."
            )
        dtype = accumulation_dtype(term.dtype, *(() if total is None else (total.dtype,)))
        total = cast(term, dtype) if total is None else cast(total, dtype) + cast(term, dtype)
    return total


def needs_a_value(error: Exception) -> str:
    """The message for a loss that asks for the value of an array while it is traced."""
    return (
        f"The loss needs the value of an array, {where_raised(error)}. It is compiled, so its "
        "arrays have no values while Python runs it. Instead of `float(x)` or `x.item()`, return "
        "the array along with the loss, with `has_aux=True`, and convert what the step returns. "
        "Instead of `if x > 0`, write `jnp.where(x > 0, a, b)`, and instead of NumPy's functions "
        "those of `jax.numpy`. To print a value, use `jax.debug.print`."
    )


def _unpacked(returned: Any, has_aux: bool, has_weight: bool) -> tuple[Any, Any, Any]:
    options = {"has_weight": has_weight, "has_aux": has_aux}
    names = ["loss", *(name.removeprefix("has_") for name, on in options.items() if on)]
    if not isinstance(returned, tuple) or len(returned) != len(names):
        written = " and ".join(f"`{name}=True`" for name, on in options.items() if on)
        kind = "a pair" if len(names) == 2 else "a triple"
        raise TypeError(
            f"With {written} the loss must return {kind} ({', '.join(names)}), got "
            f"{_describe(returned)}."
        )
    by_name = dict(zip(names, returned, strict=True))
    return by_name["loss"], by_name.get("weight"), by_name.get("aux")


def _describe(returned: Any) -> str:
    """The kind of object that the loss returned, in words."""
    if is_array(returned):
        return f"an array of shape {returned.shape}"
    size = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
    return f"a {type(returned).__name__}{size}"


def map_examples(differentiate: LossGradient, batch: Batch) -> tuple[list[Array], LossResult]:
    """The gradient of each example, stacked, and the mean of the losses."""
    grads, packed = jax.vmap(lambda rows: differentiate(batch.example(rows).arguments))(
        batch.arrays
    )
    result: LossResult = unpack(packed)
    if states_of(result.aux):
        raise ValueError(
            "The loss returns an `eqx.nn.State`, and is computed for each example separately, so "
            "there would be a state for each. Replace batch norm by a normalization without "
            "statistics, such as `eqx.nn.GroupNorm`, or do not return the state."
        )
    return grads, _mean_loss(result)


def _mean_loss(stacked: LossResult) -> LossResult:
    losses = jnp.asarray(stacked.loss, accumulation_dtype(stacked.loss.dtype))
    return stacked._replace(loss=jnp.asarray(jnp.mean(losses), stacked.loss.dtype))


def scan_microbatches(
    differentiate: LossGradient, like: list[Array], batch: Batch, number: int, has_weight: bool
) -> tuple[list[Array], LossResult]:
    """The weighted means over microbatches of the gradient and of the loss.

    **Arguments:**

    - `differentiate`: the gradient of the loss on one microbatch.
    - `like`: arrays of the gradient's shapes and dtypes.
    - `batch`, `number`: the batch, and the number of microbatches.
    - `has_weight`: whether the loss returns its weight.

    **Returns:** means in the accumulation dtype, and the mean loss, the total weight and the
    stacked `aux`.
    """
    advice = (
        ", or pad the batch and let the loss return a weighted mean and its weight, with "
        "`has_weight=True`"
    )
    _check_divides(batch, number, advice)
    batch = batch.with_keys(number, Role.PART_KEYS)

    def body(carry: Any, i: Any) -> Any:
        total, means, states = carry
        arguments = with_states(batch.microbatch(i, number).arguments, states)
        new, packed = differentiate(arguments)
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
        means = map_leaves(rule, (means, new), SimpleNamespace(weight=weight, share=share))
        return (total, means, states), packed

    means = [jnp.zeros_like(x, accumulation_dtype(x.dtype)) for x in like]
    states = jax.tree.map(strong, states_of(batch.arguments))
    start = (jnp.zeros((), canonical_float()), means, states)
    (total, means, states), packed = jax.lax.scan(body, start, jnp.arange(number))
    stacked: LossResult = unpack(packed)
    aux = with_states(stacked.aux, states)
    weights = jnp.asarray(stacked.weight, total.dtype)
    losses = jnp.asarray(stacked.loss, accumulation_dtype(stacked.loss.dtype))
    shares = jnp.asarray(weights / jnp.where(total == 0, 1, total), losses.dtype)
    loss = jnp.sum(jnp.where(weights == 0, 0, losses * shares))
    return means, LossResult(
        jnp.asarray(loss, stacked.loss.dtype), total, aux, weights if has_weight else None
    )


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


def gather_microbatches(
    differentiate: LossGradient,
    gather: Callable[[Updates], tuple[Updates, PyTree]],
    batch: Batch,
    number: int,
    params: Params,
) -> tuple[Updates, PyTree, list[Array], LossResult]:
    """The sums that a per-example link gathers, one microbatch at a time.

    **Arguments:**

    - `differentiate`: the gradient of the loss on one example.
    - `gather`: the link's `gather` in this step.
    - `batch`, `number`: the batch, and the number of microbatches.
    - `params`: the trainable parameters.

    **Returns:** the sum that has the parameters' structure, the other sums, the mean gradient, and
    the results of the loss.
    """
    _check_divides(batch, number)
    leaves, structure = jax.tree.flatten(params)

    def stack(x: Any) -> Any:
        return jax.ShapeDtypeStruct((batch.size // number, *x.shape), x.dtype)

    def sums_of(stacked: list[Any]) -> Any:
        sums = gather(structure.unflatten(map(jnp.conj, stacked)))
        return sums, [jnp.mean(g, 0, accumulation_dtype(g.dtype)) for g in stacked]

    def body(before: Any, i: Any) -> Any:
        stacked, result = map_examples(differentiate, batch.microbatch(i, number))
        new = jax.tree.map(jnp.add, before, sums_of(stacked))
        return cast_like(new, before), pack(result)

    shapes = jax.eval_shape(sums_of, list(map(stack, leaves)))
    zeros: PyTree = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    ((total, counts), sums), packed = jax.lax.scan(body, zeros, jnp.arange(number))
    means = [g / number for g in sums]
    return total, counts, means, _mean_loss(unpack(packed))


def _check_divides(batch: Batch, number: int, advice: str = "") -> None:
    """Raises an error if a batch cannot be divided into this number of equal parts."""
    for size in batch.sizes:
        if size % number:
            raise ValueError(
                f"The batch has {size} examples, which cannot be divided into {number} "
                f"microbatches of equal size. Pass a multiple of {number}{advice}."
            )
