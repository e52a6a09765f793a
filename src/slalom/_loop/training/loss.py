"""Checks the calls of a loss, and its results."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._core.protocol.loss import Loss
from ..._core.text.calls import signature_of
from ..._core.text.messages import NEEDS_A_VALUE, where_raised
from ...tree import accumulation_dtype, canonical_float, cast, is_array
from ...tree.types import PyTree, Scalar
from ..residual_losses import AbstractCurvatureLoss, LeastSquares


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
    loss_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tool: str = "sl.train_step",
    before: int = 1,
) -> None:
    """Raises an error if a loss does not take these arguments.

    `tool` is the public function that takes the loss, and `before` the number of the loss's
    arguments that it passes itself, for the advice.
    """
    if isinstance(loss_fn, LeastSquares) and not (loss_fn.named or kwargs):
        (term,) = loss_fn.terms.values()
        loss_fn = term.residual  # which takes what the loss takes
    signature = signature_of(loss_fn)
    if signature is None:
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"The loss does not take these arguments: {error}. "
            f"{_call_advice(signature.parameters, args, kwargs, tool, before)}"
        ) from None


def _call_advice(
    names: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tool: str,
    before: int,
) -> str:
    if next(iter(names), None) == "self":
        return f"A method needs its object: pass `self.loss_fn` to `{tool}`."
    others = [*names][before:]
    if tool in ("sl.sweep", "sl.lr_range_test"):
        batch = f"({', '.join(others)}{',' * (len(others) == 1)})"
        return f"Pass `{tool}` batches of its other arguments, such as `[{batch}]`."
    call = "step(model, opt" if tool == "sl.train_step" else f"{tool}(loss_fn, tx, model"
    for name in kwargs:
        if name == "value" and name not in names:
            return "The step passes the loss to the transforms itself: leave `value` out."
        if name in _FOR_TRANSFORMS and name not in names:
            return f"For the transforms, write `context={{{name!r}: {name}}}`."
    if len(args) < len(names) - 1 and any(isinstance(x, tuple | list) for x in args):
        return f"Unpack the batch: `{call}, *batch)`."
    return f"Write `{', '.join([call, *others])})`."


def call_loss(loss_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a loss. Raises an error for one that asks for the value of an array."""
    try:
        return loss_fn(*args, **kwargs)
    except NEEDS_A_VALUE as error:
        raise TypeError(
            f"The loss needs the value of an array, {where_raised(error)}. It is compiled, so its "
            "arrays have no values while Python runs it. Instead of `float(x)` or `x.item()`, "
            "return the array along with the loss, with `has_aux=True`, and convert what the step "
            "returns. Instead of `if x > 0`, write `jnp.where(x > 0, a, b)`, and instead of "
            "NumPy's functions those of `jax.numpy`. To print a value, use `jax.debug.print`."
        ) from error


def residual_loss(
    loss_fn: Callable[..., Any], loss: Loss, tool: str | None = None
) -> AbstractCurvatureLoss | None:
    """The loss function, if a rule asks for its residuals; else `None`.

    Raises an error for one that does not suit such a rule, or a tool that evaluates it at other
    parameters.
    """
    curved = loss_fn if isinstance(loss_fn, AbstractCurvatureLoss) else None
    if curved is not None and curved.fixed_data is not None:
        need = next((name for name in ("value_fn", "grad_fn") if name in loss.askers), None)
        if tool or need:
            who = f"`{tool}` needs" if tool else f"A transform of this optimizer needs '{need}',"
            raise TypeError(
                f"{who} the loss at other parameters, which {type(curved).__name__} does not know: "
                f"{curved.fixed_data}. Use `sl.train_step` with new data in each step, and a rule "
                "without a line search, such as `sl.natural_gradient`."
            )
    if "residuals" not in loss.askers:
        return None
    if curved is None:
        raise TypeError(
            "This optimizer needs 'residuals', which this loss does not know. Pass the loss "
            "`sl.LeastSquares(residual)`, with a function of one example, or an `sl.OutputLoss`."
        )
    return curved


def checked_loss(returned: Any, has_aux: bool = False, has_weight: bool = False) -> LossResult:
    """The results of the loss. Raises an error if it cannot be differentiated."""
    loss, weight, aux = returned, None, None
    if has_aux or has_weight:
        loss, weight, aux = _unpacked(returned, has_aux, has_weight)
    if isinstance(loss, dict):
        loss = functools.reduce(operator.add, _in_one_dtype(loss).values())
    if loss is None:
        raise TypeError("The loss returned None. Does the function end with `return`?")
    if not is_array(loss) and not isinstance(loss, int | float | complex):
        raise TypeError(
            f"The loss returned {_describe(loss)}. To return more than the loss, write "
            "`sl.train_step(loss_fn, has_aux=True)` and return a pair (loss, aux). `sl.minimize` "
            "takes the loss alone."
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
    returned: Any, has_aux: bool, has_weight: bool, names: tuple[str, ...]
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
    by_name = _in_one_dtype(terms)
    return jnp.stack([by_name[name] for name in names]), result


def _in_one_dtype(terms: dict[Any, Any]) -> dict[Any, Array]:
    """The terms of a loss, in the dtype of their sum."""
    if not terms:
        raise ValueError("The loss returned a dict without terms.")
    arrays = {}
    for name, term in terms.items():
        if not is_array(term) and not isinstance(term, int | float):
            raise TypeError(
                f"The terms of a loss must be scalars, and '{name}' is {_describe(term)}."
            )
        arrays[name] = term = jnp.asarray(term)
        if term.shape != () or not jnp.issubdtype(term.dtype, jnp.floating):
            raise TypeError(
                "The terms of a loss must be real floating scalars, and "
                f"'{name}' has shape {term.shape} and dtype {term.dtype}."
            )
    dtype = accumulation_dtype(*(x.dtype for x in arrays.values()))
    return {name: cast(x, dtype) for name, x in arrays.items()}


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
