"""The base of the losses whose curvature is known, and the data of their blocks."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ... import tree
from ..._core.protocol.linearization import Linearization
from ..._core.protocol.loss import Loss
from ..._core.protocol.residuals import Residuals
from ...tree.types import Scalar
from ..binding.model import Split

WHOLE = ""
"""The label of arguments without an axis of examples."""


class AbstractCurvatureLoss(eqx.Module):
    """A loss of outputs of single examples. It knows its curvature as well as its value."""

    fixed_data: ClassVar[str | None] = None
    """The reason why the loss at other parameters has another value, if there is one."""

    @abc.abstractmethod
    def on(self, *args: Any, **kwargs: Any) -> Residuals:
        """The loss on these data, as a function of the model.

        Pass it to `opt.step(model, grads, residuals=loss_fn.on(x, y))`. `sl.train_step` passes it
        itself.

        **Arguments:**

        - `args`, `kwargs`: as for the loss, after the model.
        """

    @abc.abstractmethod
    def axes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        """For each leaf of the arguments the name of its axis of examples; `""` for none."""

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Scalar:
        """The loss."""
        return self.on(*args, **kwargs).value(model)


def as_arguments(data: Any) -> tuple[Any, ...]:
    """The data of a block as the arguments of its function: a tuple is several."""
    return tuple(data) if isinstance(data, tuple | list) else (data,)


def with_examples(arguments: tuple[Any, ...], axes: tuple[bool, ...]) -> PyTree:
    """For each leaf whether it is an array with an axis of examples."""
    return tuple(
        jax.tree.map(lambda x, has=has: has and tree.is_array(x), data)
        for data, has in zip(arguments, axes, strict=True)
    )


def divided(name: str, arguments: tuple[Any, ...], axes: tuple[bool, ...]) -> tuple[Any, Any]:
    """Divides the arguments into leaves with an axis of examples and the rest.

    Raises an error that names the block if there is none, or if they are of several sizes.
    """
    flags = with_examples(arguments, axes)
    rows, shared = eqx.partition(arguments, flags)
    sizes = {}
    for i, data in enumerate(rows):
        for x in jax.tree.leaves(data):
            if x.ndim == 0:
                raise ValueError(
                    f"Argument {i} of {name} has no axis of examples. Pass an array with one, or "
                    f"name those without in `in_axes`, such as "
                    f"`in_axes={tuple(None if j == i else 0 for j in range(len(arguments)))}`."
                )
            sizes.setdefault(x.shape[0], i)
    if not sizes:
        raise ValueError(
            f"{name[0].upper()}{name[1:]} has no array with an axis of examples. Pass one, or "
            "write `per_example=False` for a residual of all data at once."
        )
    if len(sizes) > 1:
        (size, i), (other, j), *_ = sizes.items()
        raise ValueError(
            f"The arguments of {name} have different numbers of examples: argument {i} has "
            f"{size}, and argument {j} has {other}. Name those without an axis of examples in "
            "`in_axes`."
        )
    if 0 in sizes:
        raise ValueError(f"{name[0].upper()}{name[1:]} has no examples: its arrays are empty.")
    return jax.tree.map(jnp.asarray, rows), shared


def residual_loss(loss_fn: Callable[..., Any], loss: Loss) -> AbstractCurvatureLoss | None:
    """The loss function, if a rule asks for its residuals; else `None`.

    Raises an error for one that does not suit such a rule.
    """
    known = loss_fn if isinstance(loss_fn, AbstractCurvatureLoss) else None
    if known is not None and known.fixed_data is not None:
        for name in ("value_fn", "grad_fn"):
            if loss.askers(name):
                raise TypeError(
                    f"A transform of this optimizer needs '{name}', the loss at other parameters, "
                    f"which {type(known).__name__} does not know: {known.fixed_data}. Use a "
                    "rule without a line search, such as `sl.natural_gradient`."
                )
    if not loss.askers("residuals"):
        return None
    if known is None:
        raise TypeError(
            "This optimizer needs 'residuals', which this loss does not know. Write the loss as a "
            "function of one example, `sl.train_step(sl.LeastSquares(residual))`, or as an "
            "`sl.OutputLoss`."
        )
    return known


def linearized(
    source: AbstractCurvatureLoss,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    model: Split,
    loss: Loss,
) -> tuple[Residuals, Linearization]:
    """The loss on these data, and its linearization, which the rules then share."""
    chunks = [getattr(part.module, "chunk", None) for part in loss.askers("residuals")]
    residuals = source.on(*args, **kwargs)
    inside = residuals.of(lambda params: model.join(jax.tree.leaves(params)))
    linear = inside.at(model.params, chunks[0])
    return residuals.with_known(linear), linear
