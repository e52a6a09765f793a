"""Code shared by Adam and its variants."""

from typing import Any, ClassVar, TypeVar

import equinox as eqx
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ...tree.moments import bias_factors, with_newest
from ...tree.types import Hyperparameter, Params, Scalar, WhereLike
from .._base import AbstractRule, AbstractTransform, advise_keywords
from ..momentum.momentum import first_moment
from ..shaping.descent import ScaleByLearningRate, decayed_descent


class AbstractMomentsState(eqx.Module):
    """The state of a rule with a mean of gradients and a mean of squares."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()
    nu: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")


class ScaleByAdamState(AbstractMomentsState):
    """The state of `ScaleByAdam` and its variants."""


MomentsState = TypeVar("MomentsState", bound=AbstractMomentsState)


class _AbstractMomentsFields:
    # Abstract variables would come first in the signature of a rule.
    b1: fields.Number
    b2: fields.Number
    eps: fields.Number


class AbstractMoments(AbstractRule[MomentsState], _AbstractMomentsFields):
    """A rule with the means of Adam: of gradients, and of squares. Both start at zero."""

    wide_mean: ClassVar[bool] = False
    """Whether the mean is at least float32 by default, because it is subtracted from gradients."""

    def _fresh_moments(self, params: Params) -> dict[str, Any]:
        """The fields of `AbstractMomentsState` before the first step."""
        return {
            "age": tree.fresh_count(),
            "mu": first_moment(self, params, "b1", wide=self.wide_mean),
            "nu": tree.second_moment(params),
        }

    def begin(self, state):
        self._correct_biases(state)

    def advance(self, g, leaf):
        leaf.mu = self.b1 * leaf.mu + self.c1 * g
        leaf.nu = self.b2 * leaf.nu + self.c2 * tree.bounded_square(g)

    def _correct_biases(self, state: Any, nesterov: bool = False) -> None:
        """Adds one to `age`, and sets 1 − β₁, 1 − β₂ and the factors of both means."""
        age = state.age = tree.increment(state.age)
        self.c1, self.c2 = 1 - self.b1, 1 - self.b2
        self.mu_scale, self.g_scale = bias_factors(self.b1, age, nesterov)
        self.nu_scale = tree.bias_correction(self.b2, age)

    def _debiased_mean(self, g: Array, mu: Array) -> Array:
        """m̂ₜ = mₜ / (1 − β₁ᵗ), or with Nesterov β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ)."""
        return with_newest(mu, g, self.mu_scale, self.g_scale)

    def _divisor(self, nu: Array, eps_root: Scalar | float = 0.0) -> Array:
        """√(v̂ₜ + ε_root) + ε."""
        return tree.root(tree.positive(nu) * self.nu_scale + eps_root) + self.eps


class AbstractAdam(AbstractMoments[ScaleByAdamState]):
    """A rule with the state of Adam, and the decays as its first fields."""

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")

    def init(self, params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(**self._fresh_moments(params))


class ScaleByAdam(AbstractAdam):
    """Adam: divides a mean of gradients by the root of a mean of their squares.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        uₜ = m̂ₜ / (√(v̂ₜ + ε_root) + ε)   with   m̂ₜ = mₜ / (1 − β₁ᵗ),   v̂ₜ = vₜ / (1 − β₂ᵗ)

    With `nesterov`, m̂ₜ is β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ). Each leaf counts t from
    the start of its own accumulators, so the correction is also right after a reset.

    Differs from Optax: `mu_dtype` is a floating dtype even for complex parameters, whose m is
    stored in its complex counterpart (complex64 for half precision). Complex dtypes are refused.
    With ε = 0 the update of a zero gradient is 0, not NaN.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0. A positive value keeps the derivative of the
        update finite at zero gradients, for meta-learning.
    - `mu_dtype`: the floating dtype in which m is stored; complex parameters use its complex
        counterpart. Defaults to the parameter's dtype, but float32 for float16 parameters. In
        bfloat16 decays above 0.996 are refused.
    - `nesterov`: whether to use Nesterov momentum.

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014; Dozat, Nesterov
        momentum into Adam, 2016"
    """

    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    eps_root: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field()
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)

    def begin(self, state):
        self._correct_biases(state, self.nesterov)

    def direction(self, g, leaf):
        return self._debiased_mean(g, leaf.mu) / self._divisor(leaf.nu, self.eps_root)


@advise_keywords
def adam(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
) -> AbstractTransform:
    """Adam: a mean of gradients, divided by the root of a mean of their squares.

        p ↦ p − η·m̂ / (√v̂ + ε)

    m̂ and v̂ are the means of `ScaleByAdam`.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `eps_root`, `mu_dtype`, `nesterov`: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam` and `ScaleByLearningRate`.

    ```python
    >>> sl.adam(1e-3)
    sl.ScaleByAdam() | sl.ScaleByLearningRate(0.001)

    ```

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014"
    """
    rule = ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return rule | ScaleByLearningRate(learning_rate)


@advise_keywords
def adamw(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 1e-4,
    decay_where: WhereLike | None = None,
    *,
    nesterov: bool = False,
    independent_decay: bool = False,
) -> AbstractTransform:
    """AdamW: Adam with decoupled weight decay.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·p)

    m̂ and v̂ are the means of `ScaleByAdam`.

    The decay is multiplied by the learning rate: each step subtracts η·λ·p.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `eps_root`, `mu_dtype`: as in `ScaleByAdam`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
        `sl.where.ndim(min=2)` selects weight matrices and excludes biases and norms.
    - `nesterov`: as in `ScaleByAdam`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByAdam`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ```python
    >>> sl.adamw(1e-3, weight_decay=0.1)
    sl.ScaleByAdam() | sl.AddDecayedWeights(weight_decay=0.1) | sl.ScaleByLearningRate(0.001)

    ```

    ??? cite "Loshchilov & Hutter, [Decoupled Weight Decay
        Regularization](https://arxiv.org/abs/1711.05101), 2017"
    """
    rule = ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)


@advise_keywords
def nadam(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """Adam with Nesterov momentum: `sl.adam` with `nesterov=True`.

        p ↦ p − η·m̂ / (√v̂ + ε)   with   m̂ₜ = β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ)

    This is not PyTorch's NAdam, which follows a schedule for β₁ that starts at half its value.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `eps_root`, `mu_dtype`: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam` and `ScaleByLearningRate`.

    ```python
    >>> sl.nadam(1e-3)
    sl.ScaleByAdam(nesterov=True) | sl.ScaleByLearningRate(0.001)

    ```

    ??? cite "Dozat, Incorporating Nesterov Momentum into Adam, 2016"
    """
    return adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=True)


@advise_keywords
def nadamw(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 1e-4,
    decay_where: WhereLike | None = None,
    *,
    independent_decay: bool = False,
) -> AbstractTransform:
    """AdamW with Nesterov momentum: `sl.adamw` with `nesterov=True`.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·p)
        m̂ₜ = β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ)

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `eps_root`, `mu_dtype`: as in `ScaleByAdam`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByAdam`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Dozat, Incorporating Nesterov Momentum into Adam, 2016; Loshchilov & Hutter,
        [Decoupled Weight Decay Regularization](https://arxiv.org/abs/1711.05101), 2017"
    """
    rule = ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=True)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)
