"""Adam that estimates its learning rate from the distance traveled: Prodigy."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.resolve import Where
from .._base import AbstractTransform, advise_keywords
from ..shaping.descent import where_field
from ._sums import AbstractEstimatingAdam, AbstractEstimatingState, bounded, larger, number


class ScaleByProdigyState(AbstractEstimatingState):
    """The state of `ScaleByProdigy`."""

    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")


class ScaleByProdigy(AbstractEstimatingAdam[ScaleByProdigyState]):
    """Prodigy: Adam with a learning rate d that grows to the distance traveled.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·d·gₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·d²·|gₜ|²
        rₜ = β₃·rₜ₋₁ + d·η·⟨gₜ, p₀ − p⟩,   sₜ = β₃·sₜ₋₁ + d·η·gₜ
        d' = max(d, c·rₜ / ‖sₜ‖₁)
        uₜ = −η·(mₜ / (√vₜ + d'·ε) + λ·p)   with   η = γ·d·√(1 − β₂ᵗ) / (1 − β₁ᵗ)

    with d = d₀ at first, and d' in the next step. There is one d for all leaves that this transform
    sees, so under `.partition` each group has its own. It never decreases; `opt.metrics` has it as
    `estim_lr`. A reset of all parameters restarts it. Use this as the last link: it includes the
    learning rate and the sign.

    ε has the factor d', as in the authors' code; in the paper it has the factor d. m and v are
    stored divided by d₀ and d₀², which keeps small gradients from underflowing.

    Differs from Optax: d and r are stored in at least float32 for half-precision parameters, where
    Optax stores them in the parameters' dtype. v and s are, too. A gradient that is zero everywhere
    in the first step changes nothing, where Optax makes d NaN.

    **Arguments:**

    - `learning_rate`: γ, ≥ 0. The authors recommend 1, with a schedule that decays it to 0.
    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `b3`: β₃, the decay of r and s, in [0, 1). Defaults to √β₂.
    - `eps`: ε, ≥ 0.
    - `estim_lr0`: d₀, the initial estimate, > 0. It should be too small rather than too large.
    - `estim_lr_coef`: c, > 0. The authors recommend this as the number to tune, from 0.5 to 2.
    - `weight_decay`: λ, ≥ 0.
    - `safeguard_warmup`: whether to leave γ and the correction of the bias out of sₜ, which keeps d
        from growing too fast in a long warm-up.
    - `bias_correction`: whether η has the factor √(1 − β₂ᵗ) / (1 − β₁ᵗ). Optax has it; the
        algorithm of the paper does not, and it is off by default in the authors' code.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Mishchenko & Defazio, [Prodigy: An Expeditiously Adaptive Parameter-Free
        Learner](https://arxiv.org/abs/2306.06101), 2023"
    """

    learning_rate: fields.Number = fields.hyperparameter(1.0, within="[0, inf)")
    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")
    b3: fields.OptionalNumber = fields.hyperparameter(None, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    estim_lr0: fields.Number = fields.hyperparameter(1e-6, within="(0, inf)")
    estim_lr_coef: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")
    weight_decay: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    safeguard_warmup: bool = eqx.field(default=False, static=True)
    bias_correction: bool = eqx.field(default=True, static=True, kw_only=True)
    decay_where: Where | None = where_field()
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def init(self, params: Params) -> ScaleByProdigyState:
        return ScaleByProdigyState(**self._fresh(params), init_params=tree.copy(params))

    def begin(self, state):
        state.age = tree.increment(state.age)
        self.b3 = tree.root(self.b2) if self.b3 is None else self.b3
        self.c1, self.c2 = 1 - self.b1, 1 - self.b2
        # In units of d₀.
        self.size = state.estim_lr / number(self.estim_lr0, state.estim_lr)
        self.rate = self.step_size(state.estim_lr, state.age)
        self.weight = self.size * (state.estim_lr if self.safeguard_warmup else self.rate)

    def advance(self, g, leaf):
        super().advance(self.size * g, leaf)
        leaf.grad_sum = self.b3 * leaf.grad_sum + self.weight * g

    def reduce(self, g, leaf):
        product = self.size * self.rate * tree.inner(g, leaf.init_params - self.p)
        return {"product": product, "size": jnp.sum(jnp.abs(leaf.grad_sum))}

    def finish(self, sums, state):
        r = bounded(self.b3 * state.numerator_weighted + bounded(sums["product"]))
        d = larger(state.estim_lr, self.estim_lr_coef * r, bounded(sums["size"]))
        state.numerator_weighted, state.estim_lr = r, d
        self.next_size = d / self.estim_lr0

    def direction(self, g, leaf):
        u = leaf.mu / (tree.root(tree.positive(leaf.nu)) + self.next_size * self.eps)
        return -self.rate * (u + self.weight_decay * self.p if self.plan else u)


@advise_keywords
def prodigy(
    learning_rate: Hyperparameter = 1.0,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    b3: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-8,
    estim_lr0: Hyperparameter = 1e-6,
    estim_lr_coef: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
    safeguard_warmup: bool = False,
    decay_where: WhereLike | None = None,
    *,
    bias_correction: bool = True,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """Prodigy: AdamW whose learning rate grows to the distance traveled.

        p ↦ p − γ·d·(m / (√v + d·ε) + λ·p)

    d is an estimate of the distance to the solution, and m and v are the means of `ScaleByProdigy`.

    **Arguments:**

    - `learning_rate`: γ. The authors recommend 1, with a schedule that decays it to 0.
    - `b1`, `b2`, `b3`, `eps`, `estim_lr0`, `estim_lr_coef`, `weight_decay`, `safeguard_warmup`,
        `decay_where`, `bias_correction`, `mu_dtype`: as in `ScaleByProdigy`.

    **Returns:** a `ScaleByProdigy`.

    ```python
    >>> schedule = sl.schedules.cosine_decay(1.0, decay_steps=1_000)
    >>> tx = sl.prodigy(schedule, weight_decay=0.1)

    ```

    ??? cite "Mishchenko & Defazio, [Prodigy: An Expeditiously Adaptive Parameter-Free
        Learner](https://arxiv.org/abs/2306.06101), 2023"
    """
    return ScaleByProdigy(
        learning_rate,
        b1,
        b2,
        b3,
        eps,
        estim_lr0,
        estim_lr_coef,
        weight_decay,
        safeguard_warmup,
        bias_correction=bias_correction,
        decay_where=decay_where,
        mu_dtype=mu_dtype,
    )
