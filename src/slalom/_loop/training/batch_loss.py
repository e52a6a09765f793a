"""A loss and the batch of a step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import tree
from ..._core.text.messages import NEEDS_A_VALUE, series
from ..._core.text.printing import code
from ...tree import accumulation_dtype, cast
from ...tree.packed import pack, unpack
from ...tree.types import Params, PyTree, Scalar, Updates
from ..binding.model import Split, split, strong
from ..binding.optimizer import Optimizer
from .batch import Arguments, Batch, batch_of
from .loss import LossGradient, LossResult, checked_loss, needs_a_value, scan_microbatches
from .options import Options


class BatchLoss(NamedTuple):
    """A loss and the batch of this step.

    With a `scale`, the gradients are those of the loss times it.
    """

    loss_fn: Callable[..., Any]
    options: Options
    model: Split
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    scale: Scalar | None

    def at(self, model: PyTree, opt: Optimizer) -> "BatchLoss":
        """The loss of another model on the same batch, to differentiate there."""
        return self._replace(model=split(model, opt.binding.trainable))

    @property
    def is_whole(self) -> bool:
        """Whether the loss is evaluated once, on the whole batch, and returns nothing else."""
        options = self.options
        return options.microbatches is None and not (options.has_aux or options.has_weight)

    @property
    def trained(self) -> list[Array]:
        """The arrays to differentiate with respect to."""
        return [strong(x) for x in jax.tree.leaves(self.model.params)]

    def evaluate(self, model: PyTree, arguments: Arguments) -> LossResult:
        """The loss with these arguments."""
        options = self.options
        return checked_loss(self.returned(model, arguments), options.has_aux, options.has_weight)

    def returned(self, model: PyTree, arguments: Arguments) -> Any:
        """The results of the loss with these arguments."""
        if self.options.compute_dtype is not None:
            dtype = self.options.compute_dtype
            model, arguments = in_compute_dtype((model, arguments), dtype)
        args, kwargs = arguments
        try:
            return self.loss_fn(model, *args, **kwargs)
        except NEEDS_A_VALUE as error:
            raise TypeError(needs_a_value(error)) from error

    def differentiate(self, arguments: Arguments) -> tuple[list[Array], PyTree]:
        """The leaves of the gradient with these arguments, not conjugated."""

        def scaled_loss(trained: list[Array]) -> tuple[Scalar, PyTree]:
            result = self.evaluate(self.model.join(trained), arguments)
            loss, dtype = result.loss, accumulation_dtype(result.loss.dtype)
            if self.scale is not None:
                loss = cast(loss, dtype) * cast(self.scale, dtype)
            return loss, pack(result)

        return jax.grad(scaled_loss, has_aux=True)(self.trained)

    def over_batch(
        self, function: LossGradient, like: list[Array]
    ) -> tuple[list[Array], LossResult]:
        """Evaluates a function of the arguments on the whole batch, in microbatches."""
        if self.options.microbatches is None:
            means, packed = function((self.args, self.kwargs))
            return means, unpack(packed)
        batch, number = self.divided("microbatches"), self.options.microbatches
        if number == "split":
            batch, number = batch._replace(is_split=True), batch.size
        return scan_microbatches(function, like, batch, number, self.options.has_weight)

    def value(self, model: PyTree) -> Scalar:
        """The loss of another model on the same batch."""

        def without_gradient(arguments: Arguments) -> tuple[list[Array], PyTree]:
            return [], pack(self.evaluate(model, arguments)._replace(aux=None))

        return self.over_batch(without_gradient, [])[1].loss

    def divided(self, parts: str) -> Batch:
        """The batch, ready to be divided."""
        return batch_of(self.loss_fn, self.args, self.kwargs, self.options.batch_args, parts)

    def tree(self, leaves: list[Array]) -> Params:
        """Leaves as a tree like the trained parameters."""
        return jax.tree.structure(self.model.params).unflatten(leaves)

    def ascent(self, grads: list[Array]) -> Updates:
        """Gradients as a tree. JAX returns the conjugate of the direction of steepest ascent."""
        return self.tree(list(map(jnp.conj, grads)))


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

    return jax.tree.map(in_dtype, values, is_leaf=_is_state)


def _is_state(x: Any) -> bool:
    return isinstance(x, eqx.nn.State | eqx.nn.StateIndex)
