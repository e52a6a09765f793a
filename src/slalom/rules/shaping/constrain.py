"""Transforms that zero or restrict updates."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Real

from ... import fields, tree
from ...tree.paths import check_real
from ...tree.types import Params, WhereLike
from .._base import AbstractRule, AbstractTransform


class SetToZero(AbstractRule[None]):
    """Replaces updates, including NaN and infinity, by zeros.

    `SetToZero().mask(where)` freezes the selected parameters.
    """

    keeps_zeros: ClassVar[bool] = True
    update_sign: ClassVar[int | None] = 0

    def direction(self, g, leaf):
        return jnp.zeros_like(g)

    def has_updated(self, state: object) -> bool:
        return False


def freeze(where: WhereLike) -> AbstractTransform:
    """Replaces the updates of the selected parameters, including NaN and infinity, by zeros.

    **Arguments:**

    - `where`: a selector, a function of the parameters to a tree of bools, or such a tree.

    **Returns:** `SetToZero().mask(where)`, a link for a chain.

    ```python
    >>> sl.sgd(0.1) | sl.freeze(sl.where.ndim(1))
    sl.ScaleByLearningRate(0.1) | sl.SetToZero().mask(sl.where.ndim(1))

    ```
    """
    return SetToZero().mask(where)


class Cautious(AbstractRule[None]):
    """Drops the entries of an update that point against the gradient.

        u ↦ u·φ / max(mean φ, c)   with φ = 1 where Re(ū·g) > 0, and 0 elsewhere

    g is the gradient of the loss, and the mean is taken over one leaf: the remaining entries are
    scaled up to make up for the dropped ones. Momentum makes some entries of an update point
    against the current gradient, and such entries increase the loss to first order. A complex entry
    is one vector of two numbers.

    Use it between a rule and `ScaleByLearningRate`, where updates still point along the gradients.
    `sl.train_step` passes the gradient itself; otherwise pass it: `opt.step(model, grads,
    grad=grads)`. Weight decay that comes before is dropped where the whole update is. For decay
    that is cautious itself, use `sl.AddDecayedWeights(λ, cautious=True)` after this link.

    ```python
    >>> tx = sl.ScaleByAdam() | sl.Cautious() | sl.ScaleByLearningRate(1e-3)
    >>> updates, grads = jnp.array([1.0, -1.0, 2.0, 3.0]), jnp.array([1.0, 1.0, 0.1, 0.0])
    >>> sl.Cautious().update(updates, None, context=sl.Context(step=0, grad=grads))[0]
    Array([2., 0., 4., 0.], dtype=float32)

    ```

    **Arguments:**

    - `min_fraction`: c, the lower bound of the mean, in (0, 1]. With 1, no entry is scaled up.

    ??? cite "Liang et al., [Cautious Optimizers: Improving Training with One Line of
        Code](https://arxiv.org/abs/2411.16085), 2024"
    """

    min_fraction: fields.Number = fields.hyperparameter(1e-3, within="(0, 1]")

    over: ClassVar[str] = "leaf"
    needs: ClassVar[tuple[str, ...]] = ("grad",)
    keeps_zeros: ClassVar[bool] = True

    def direction(self, g, leaf):
        agree = ~(agreement(g, self.grad) <= 0)  # also NaN, which must not become 0
        share = jnp.sum(agree, dtype=self.min_fraction.dtype) / float(max(g.size, 1))
        return jnp.where(agree, g * (1 / jnp.maximum(share, self.min_fraction)), 0)


def agreement(a: Array, b: Array) -> Real[Array, "..."]:
    """A number with the sign of Re(ā·b) at each entry."""
    # The product of two tiny numbers underflows, but not that of their signs.
    a, b = jnp.sign(a), jnp.sign(b)
    if jnp.iscomplexobj(a) or jnp.iscomplexobj(b):
        return a.real * b.real + a.imag * b.imag
    return a * b


class KeepParamsNonnegative(AbstractRule[None]):
    """Sets parameters that would become negative to zero: u ↦ u, or −p where p + u < 0.

    Use it as the last link, since it does not see the changes by later links. Parameters that start
    negative become zero in the first update.
    """

    needs: ClassVar[tuple[str, ...]] = ("params",)
    constrains: ClassVar[bool] = True

    def init(self, params: Params) -> None:
        why = "KeepParamsNonnegative cannot be used with complex numbers"
        check_real(params, why, "Use `.mask(where)` to exclude it.")
        return tree.no_state(params)

    def direction(self, g, leaf):
        return jnp.where(self.p + g < 0, -self.p, g)


class KeepInitialNormState(eqx.Module):
    """The state of `KeepInitialNorm`."""

    radius: PyTree[Float[Array, ""]] = fields.per_param(stored="copy")
    """The norm of each parameter when its state was created."""


class KeepInitialNorm(AbstractRule[KeepInitialNormState]):
    """Projects each parameter back to the norm that it started with: a hyperball constraint.

        u ↦ R·(p + u) / ‖p + u‖ − p   with R = ‖p₀‖ and the norms of one leaf

    Use it as the last link, since it does not see the changes by later links. It takes the place of
    weight decay. With `sl.ScaleByTrustRatio()` in front of the learning rate, each step turns a
    parameter by an angle of about η, whatever the rule, as in the paper:

    ```python
    >>> rule, matrices = sl.ScaleByAdam(), sl.where.ndim(min=2)
    >>> hyperball = sl.ScaleByTrustRatio() | sl.ScaleByLearningRate(0.01) | sl.KeepInitialNorm()
    >>> tx = rule | hyperball.partition({~matrices: sl.ScaleByLearningRate(1e-3)})

    ```

    A parameter that starts at zero is not restricted. The norm covers the parameters to train: a
    mean of several of them, as by `.lookahead` or `.average`, has a smaller one.

    ??? cite "Wen et al., [Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball
        Optimization](https://arxiv.org/abs/2606.16899), 2026"
    """

    over: ClassVar[str] = "leaf"
    needs: ClassVar[tuple[str, ...]] = ("params",)
    constrains: ClassVar[bool] = True

    def init(self, params: Params) -> KeepInitialNormState:
        tree.check_inexact(params)
        return KeepInitialNormState(jax.tree.map(lambda p: tree.norm(tree.widened(p)), params))

    def direction(self, g, leaf):
        is_free = leaf.radius == 0
        inverse = 1 / jnp.where(is_free, 1, leaf.radius)
        square, scale = tree.scaled_square((self.p + g) * inverse)
        is_free = is_free | (square == 0)
        factor = jnp.where(is_free, 1, scale * jax.lax.rsqrt(jnp.where(is_free, 1, square)))
        # R·(p + u) / ‖p + u‖ − p would lose a small u to rounding.
        return g * factor + self.p * (factor - 1)


class ZeroNansState(eqx.Module):
    """The state of `ZeroNans`."""

    found_nan: Int[Array, " leaves"] = fields.per_leaf()
    """The number of updates of each leaf that contained a NaN."""


class ZeroNans(AbstractTransform[ZeroNansState]):
    """Replaces NaN by zero, and counts for each leaf the updates that contained one.

    Infinities pass through. Differs from Optax: `found_nan` is a count, where Optax stores only
    whether the last update contained a NaN.
    """

    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ZeroNansState:
        tree.check_inexact(params)
        return ZeroNansState(jnp.zeros(len(jax.tree.leaves(params)), jnp.int32))

    def update(self, updates, state, params=None, context=None):
        has_nan = [jnp.any(jnp.isnan(u)) for u in jax.tree.leaves(updates)]
        count = state.found_nan
        if has_nan:
            count = jnp.where(jnp.stack(has_nan), tree.increment(count), count)
        updates = tree.map_leaves(lambda _, u: jnp.where(jnp.isnan(u), 0, u), (updates,))
        return updates, ZeroNansState(count)
