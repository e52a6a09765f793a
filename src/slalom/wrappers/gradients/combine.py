"""Steps along a combination of the gradients of several losses."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import fields, tree
from ..._core.protocol.context import Context, Merge
from ..._core.protocol.loss import Loss, loss_of
from ..._core.protocol.parts import Part, segments
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import Writer
from ..._core.text.messages import uncalled
from ...combine import AbstractCombination, Terms
from ...tree.types import Gradients, Params, PyTree

_T = TypeVar("_T")


def _as_names(terms: Any) -> Any:
    return tuple(terms) if isinstance(terms, Iterable) and not isinstance(terms, str) else terms


_MERGES = {
    "terms": Merge(
        start=lambda combine, params: jnp.zeros(len(combine.terms), tree.canonical_float()),
        read=lambda terms, like: tree.cast(terms.losses, like.dtype),
        entry=Terms,
    )
}


class CombineState(eqx.Module):
    """The state of `Combine`."""

    inner: PyTree
    """The inner transform's state."""
    combination: PyTree
    """The combination's state."""
    losses: Float[Array, "*terms"]
    """The terms of the last step."""
    weights: Float[Array, "*terms"]
    """Their weights."""
    gram: Float[Array, "*terms_terms"] | None
    """The inner products of their gradients, where the combination uses them."""


class Combine(AbstractWrapper[CombineState]):
    """The gradient of a loss with several terms, combined from the gradients of the terms.

    Made by `tx.combine`, which describes the arguments.

    The loss returns a dict of terms. `sl.train_step` asks the combination for the weights w of this
    step, and differentiates Σ wᵢ·Lᵢ. A combination that depends on the gradients of the terms gets
    their inner products only, so that they need not all be in memory: in an unrolled model those of
    a layer are freed before the next. The step costs one backward pass per term and one more. With
    `every`, the steps between keep the weights, and cost one backward pass.

    ```python
    >>> @sl.train_step
    ... def step(model):
    ...     return {"near_0": model["x"] ** 2, "near_1": (model["x"] - 1) ** 2}
    >>> model = {"x": jnp.array(3.0)}
    >>> tx = sl.sgd(0.1).combine(sl.combine.MGDA(), ("near_0", "near_1"))
    >>> model, opt, loss = step(model, sl.Optimizer(tx, model))
    >>> float(opt.metrics["weights.near_0"]), float(opt.metrics["cosines.near_0.near_1"])
    (0.0, 1.0)

    ```

    The inner products cover the parameters that this transform acts on, inside `.project` onto a
    smooth set along that set. Other parameters, as in other groups of a partition, get the gradient
    of the sum of the terms. Inside `.every_k` a combination of values sees the mean terms of the
    window so far. One of gradients belongs outside: `tx.every_k(k).combine(...)`.

    The step returns the sum of the terms, which `value` is too. `opt.metrics` contains the `terms`
    and `weights` of the last step by name, the `weighted_loss` Σ wᵢ·Lᵢ, and the `cosines` between
    the gradients of the terms, where these were last computed. `transform_grads` is called with the
    gradient of each term, and with the combined one. Transforms that evaluate the loss themselves,
    such as line searches and `.sam`, are refused, and so are microbatches and `.scale_loss`.
    """

    combination: AbstractCombination
    terms: tuple[str, ...] = eqx.field(static=True, converter=_as_names)
    every: int = fields.count_field(1)

    needs: ClassVar[tuple[str, ...]] = ("terms",)
    passes_gradients: ClassVar[bool] = False

    @property
    def merges(self) -> dict[str, Merge]:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        # The inner products of mean gradients do not follow from those of the mini-batches.
        return {} if self.combination.uses_gram else _MERGES

    def __check_init__(self):
        # Here and not in the declarations, whose checks come later.
        combination, terms = self.combination, self.terms
        if not isinstance(combination, AbstractCombination):
            advice = uncalled(combination) if isinstance(combination, type) else ""
            raise TypeError(
                "Combine.combination must be a combination of losses, such as "
                f"`sl.combine.UPGrad()`, got {combination!r}.{advice}"
            )
        if not isinstance(terms, tuple) or not all(isinstance(x, str) for x in terms):
            raise TypeError(
                f'Combine.terms must be the names of the terms, such as ("a", "b"), got {terms!r}.'
            )
        if len(terms) < 2 or len(set(terms)) < len(terms):
            raise ValueError(f"Combine.terms must be two or more different names, got {terms!r}.")
        combination.check(len(terms))
        loss_of(self)

    def ask(self, here: Part, loss: Loss) -> Loss:
        return super().ask(here, loss.request("combined terms", here))

    def init(self, params: Params) -> CombineState:
        number = len(self.terms)
        gram = (
            jnp.zeros((number, number), tree.canonical_float())
            if self.combination.uses_gram
            else None
        )
        return CombineState(
            inner=self.inner.init(params),
            combination=self.combination.init(number),
            losses=jnp.zeros(number, tree.canonical_float()),
            weights=jnp.zeros(number, tree.canonical_float()),
            gram=gram,
        )

    def weigh(
        self, terms: Terms, state: CombineState, context: Context
    ) -> tuple[Float[Array, " terms"], Any]:
        """The weights of a step, and the combination's new state."""

        def new() -> tuple[Array, Any]:
            return self.combination.at_step(terms, state.combination, context)

        kept = state.weights.astype(terms.losses.dtype), state.combination
        return self.refreshed(state, context, new, kept)

    def refreshed(
        self, state: CombineState, context: Context, new: Callable[[], _T], kept: _T
    ) -> _T:
        """The new values in steps that refresh the weights, and the old ones in the others."""
        if self.every == 1:
            return new()
        step = self.demand("step", context.step)
        # A fresh state has weights of 0, and a loss that overflowed may have left no finite ones.
        total = jnp.sum(jnp.abs(state.weights))
        due = (step % self.every == 0) | ~((total > 0) & (total < jnp.inf))
        return jax.lax.cond(due, new, lambda: kept)

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, CombineState]:
        state, context = here.state, here.context
        terms = self.demand("terms", context.terms)
        weights, combination = self.weigh(terms, state, context)
        result, inner = self.inner_part(here).run(write, updates)
        return result, CombineState(
            inner=inner,
            combination=combination,
            losses=tree.cast_like(terms.losses, state.losses),
            weights=tree.cast_like(weights, state.weights),
            gram=None if state.gram is None else tree.cast_like(terms.gram, state.gram),
        )

    def children(self, here: Part) -> tuple[Part, ...]:
        path = segments(self.combination)
        combination = here.child(path, self.combination, lambda outer: outer.combination)
        return self.inner_part(here), combination._replace(params=None)

    def metrics(self, state: CombineState) -> dict[str, Array]:
        result = {}
        for kind, values in (("terms", state.losses), ("weights", state.weights)):
            result |= {f"{kind}.{name}": values[..., i] for i, name in enumerate(self.terms)}
        result["weighted_loss"] = jnp.sum(state.weights * state.losses, axis=-1)
        if state.gram is None:
            return result
        squares = jnp.diagonal(state.gram, axis1=-2, axis2=-1)
        inverse = jnp.where(squares > 0, jax.lax.rsqrt(squares), 0)
        for i, first in enumerate(self.terms):
            for j, second in enumerate(self.terms[:i]):
                # One factor after the other: the product of both squares may overflow.
                cosine = state.gram[..., i, j] * inverse[..., i] * inverse[..., j]
                result[f"cosines.{second}.{first}"] = cosine
        return result
