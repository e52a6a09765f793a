"""Adam that divides before it averages, by the mean of the squares so far: ADOPT."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Real

from ... import fields, tree
from ..._core.fields.schedule import call_schedule
from ...tree.types import Hyperparameter, WhereLike
from .._base import AbstractTransform, advise_keywords
from ..shaping.descent import decayed_descent
from .adam import AbstractAdam


def _fourth_root(step: Real[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """n^¼."""
    return jnp.sqrt(jnp.sqrt(step))


class ScaleByAdopt(AbstractAdam):
    """ADOPT: momentum of gradients that are divided by the root of the previous mean of squares.

        nₜ = clip(gₜ / max(√vₜ₋₁, ε), −cₜ, cₜ),   n₁ = 0
        mₜ = β₁·mₜ₋₁ + (1 − β₁)·nₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²,   v₁ = |g₁|²
        uₜ = mₜ,   or, with `nesterov`,   uₜ = β₁·mₜ + (1 − β₁)·nₜ

    with cₜ = (t − 1)^¼. The first step only measures the squares: its update is 0. Since vₜ₋₁ does
    not depend on gₜ, ADOPT converges with any β₂. The norm of a complex number is clipped.

    The authors' code counts t like this; `pytorch-optimizer` has cₜ = t^¼.

    **Arguments:**

    - `b1`: β₁, the decay of the momentum, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, the smallest divisor, ≥ 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.
    - `nesterov`: whether to use Nesterov momentum.
    - `use_clipping`: whether to clip n. The paper recommends it.
    - `clip_value_fn`: a function of t − 1, a floating array, that returns cₜ. Defaults to its
        fourth root.

    ??? cite "Taniguchi et al., [ADOPT: Modified Adam Can Converge with Any β₂ with the Optimal
        Rate](https://arxiv.org/abs/2411.02853), 2024"
    """

    b2: fields.Number = fields.hyperparameter(0.9999, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-6, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field()
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)
    use_clipping: bool = eqx.field(default=True, static=True, kw_only=True)
    clip_value_fn: Callable[[Any], Any] = eqx.field(default=_fourth_root, static=True, kw_only=True)

    written_last: ClassVar[tuple[str, ...]] = ("nu",)

    def begin(self, state):
        self.first = state.age == 0
        self.c1 = 1 - self.b1
        self.keep = jnp.where(self.first, 0, self.b2)
        self.c2 = 1 - self.keep
        if self.use_clipping:
            step = jnp.asarray(state.age, self.b1.dtype)
            limit = call_schedule("ScaleByAdopt.clip_value_fn", self.clip_value_fn, step)
            self.limit = jnp.asarray(limit, self.b1.dtype)
        state.age = tree.increment(state.age)

    def advance(self, g, leaf):
        # With Nesterov, XLA copies the old mean of squares: the new one has lost digits of it.
        self.divided = self._divided(g, leaf.nu)
        leaf.mu = self.b1 * leaf.mu + self.c1 * self.divided
        leaf.nu = self.keep * leaf.nu + self.c2 * tree.bounded_square(g)

    def direction(self, g, leaf):
        return self.b1 * leaf.mu + self.c1 * self.divided if self.nesterov else leaf.mu

    def _divided(self, g: Array, nu: Array) -> Array:
        n = g / jnp.maximum(tree.root(tree.positive(nu)), self.eps)
        if self.use_clipping and jnp.iscomplexobj(n):
            n = n * jnp.minimum(1, self.limit / jnp.maximum(jnp.abs(n), self.limit))
        elif self.use_clipping:
            n = jnp.clip(n, -self.limit, self.limit)
        return jnp.where(self.first, 0, n)


@advise_keywords
def adopt(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.9999,
    eps: Hyperparameter = 1e-6,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
    use_clipping: bool = True,
    clip_value_fn: Callable[[Any], Any] | None = None,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """ADOPT: momentum of gradients that are divided by the root of the previous mean of squares.

        p ↦ p − η·(mₜ + λ·p)   with   mₜ = β₁·mₜ₋₁ + (1 − β₁)·clip(gₜ / max(√vₜ₋₁, ε), ±cₜ)

    with the bound cₜ of `ScaleByAdopt`. Without weight decay, the first step changes no parameter:
    it only measures v. With weight decay, the first step decays, unlike in the authors' code.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `mu_dtype`, `nesterov`, `use_clipping`, `clip_value_fn`: as in
        `ScaleByAdopt`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByAdopt`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Taniguchi et al., [ADOPT: Modified Adam Can Converge with Any β₂ with the Optimal
        Rate](https://arxiv.org/abs/2411.02853), 2024"
    """
    options: dict[str, Any] = {} if clip_value_fn is None else {"clip_value_fn": clip_value_fn}
    options |= {"nesterov": nesterov, "use_clipping": use_clipping}
    rule = ScaleByAdopt(b1, b2, eps, mu_dtype, **options)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)
