"""Transforms that scale the update of each leaf by the norm of its parameter."""

import math
from typing import Any, ClassVar

import jax.numpy as jnp

from ... import fields, tree
from ...tree.types import Hyperparameter, WhereLike
from .._base import AbstractRule, AbstractTransform, advise_keywords, chain
from ..momentum.momentum import Trace
from ..shaping.descent import ScaleByLearningRate, decayed
from .adam import ScaleByAdam


class ScaleByTrustRatio(AbstractRule[None]):
    """Makes the norm of each leaf's update proportional to the norm of its parameter.

        u ↦ u·c·‖p‖ / (‖u‖ + ε)   with the norms of one leaf, each at least `min_norm`

    The update is unchanged if one of the two norms is 0, which lets parameters leave zero. Norms
    are summed in at least float32, and are correct even where a sum of squares overflows, or where
    the norm of the updates underflows. Differs from Optax, which returns 0 or infinity there.

    **Arguments:**

    - `min_norm`: the lower bound of both norms, ≥ 0.
    - `trust_coefficient`: c, ≥ 0.
    - `eps`: ε, ≥ 0.

    ??? cite "You et al., [Large Batch Training of Convolutional
        Networks](https://arxiv.org/abs/1708.03888), 2017"
    """

    min_norm: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    trust_coefficient: fields.Number = fields.hyperparameter(1.0, within="[0, inf)")
    eps: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def measure(self, g, leaf):
        return {"u": tree.NormOf(g), "p": tree.NormOf(self.p, small=False)}

    def finish(self, sums, state):
        u_norm, p_norm = (jnp.maximum(x, self.min_norm) for x in sums.each("u", "p"))
        zero = (u_norm == 0) | (p_norm == 0)
        # The ratio may overflow where the result does not.
        self.inverse = tree.quotient(1.0, jnp.where(zero, 1, u_norm + self.eps))
        self.size = jnp.where(zero, 1, self.trust_coefficient * p_norm)

    def direction(self, g, leaf):
        return g * self.inverse * self.size


class _AbstractScaleByParam(AbstractRule[None]):
    """Multiplies the update of each leaf by the size of its parameter."""

    min_scale: fields.Number = fields.hyperparameter(1e-3, within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def measure(self, g, leaf):
        return {"p": tree.NormOf(self.p)}

    def finish(self, sums, state):
        self.norm = sums.each("p")


class ScaleByParamBlockNorm(_AbstractScaleByParam):
    """Multiplies the update of each leaf by the parameter's norm: u ↦ u·max(‖p‖, s).

    **Arguments:**

    - `min_scale`: s, ≥ 0; lets a parameter leave zero.
    """

    def direction(self, g, leaf):
        return g * jnp.maximum(self.norm, self.min_scale)


class ScaleByParamBlockRms(_AbstractScaleByParam):
    """Multiplies the update of each leaf by the parameter's root mean square.

        u ↦ u·max(√(mean |p|²), s)

    **Arguments:**

    - `min_scale`: s, ≥ 0; lets a parameter leave zero.

    ??? cite "Shazeer & Stern, [Adafactor](https://arxiv.org/abs/1804.04235), 2018"
    """

    def direction(self, g, leaf):
        rms = self.norm / math.sqrt(max(g.size, 1))
        return g * jnp.maximum(rms, self.min_scale)


class ScaleByFromage(AbstractRule[None]):
    """Fromage: a step of descent, followed by a shrinkage that offsets its growth.

        p + u' = (p − η·u) / √(1 + η²)

    The norm of p is preserved if ‖u‖ = ‖p‖, as after `ScaleByTrustRatio`, and u is orthogonal to p.
    Use it as the last link: it includes the learning rate and the sign.

    **Arguments:**

    - `learning_rate`: η.

    ??? cite "Bernstein et al., [On the distance between two neural networks and the stability of
        learning](https://arxiv.org/abs/2002.03432), 2020"
    """

    learning_rate: fields.Number = fields.hyperparameter()

    needs: ClassVar[tuple[str, ...]] = ("params",)
    update_sign: ClassVar[int | None] = -1

    def begin(self, state):
        square = jnp.square(self.learning_rate)
        root = jnp.sqrt(1 + square)
        self.rate = self.learning_rate / root
        # 1/√(1 + η²) − 1 without cancellation, which would leave 3 digits at η = 0.01.
        self.shrink = -square / (root * (1 + root))

    def direction(self, g, leaf):
        return self.shrink * self.p - self.rate * g


@advise_keywords
def lamb(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-6,
    eps_root: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """LAMB: AdamW with the step of each leaf in proportion to the norm of its parameter.

        p ↦ p − η·(‖p‖ / ‖u‖)·u   with   u = m̂ / (√v̂ + ε) + λ·p

    m̂ and v̂ are the means of `ScaleByAdam`.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `eps_root`: as in `ScaleByAdam`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam`, `AddDecayedWeights`, `ScaleByTrustRatio` and
    `ScaleByLearningRate`.

    ??? cite "You et al., [Large Batch Optimization for Deep Learning: Training BERT in 76
        minutes](https://arxiv.org/abs/1904.00962), 2019"
    """
    rule = ScaleByAdam(b1, b2, eps, eps_root, mu_dtype) | decayed(weight_decay, decay_where)
    return rule | ScaleByTrustRatio() | ScaleByLearningRate(learning_rate)


@advise_keywords
def lars(
    learning_rate: Hyperparameter,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    trust_coefficient: Hyperparameter = 0.001,
    eps: Hyperparameter = 0.0,
    trust_ratio_where: WhereLike | None = None,
    momentum: Hyperparameter = 0.9,
    nesterov: bool = False,
) -> AbstractTransform:
    """LARS: momentum of steps in proportion to the norm of each leaf's parameter.

        p ↦ p − tₙ   with   tₙ = γ·tₙ₋₁ + η·c·(‖p‖ / (‖u‖ + ε))·u,   u = g + λ·p

    Biases and norms are usually excluded from both the decay and the ratio:
    `decay_where=sl.where.ndim(min=2), trust_ratio_where=sl.where.ndim(min=2)`.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `trust_coefficient`: c, ≥ 0.
    - `eps`: ε, ≥ 0.
    - `trust_ratio_where`: which updates are scaled by the ratio. Defaults to all.
    - `momentum`: γ, the decay of the sum, in [0, 1].
    - `nesterov`: whether to use Nesterov momentum.

    **Returns:** a chain of `AddDecayedWeights`, `ScaleByTrustRatio`, `ScaleByLearningRate` and
    `Trace`.

    ??? cite "You et al., [Large Batch Training of Convolutional
        Networks](https://arxiv.org/abs/1708.03888), 2017"
    """
    ratio = ScaleByTrustRatio(trust_coefficient=trust_coefficient, eps=eps)
    return chain(
        decayed(weight_decay, decay_where),
        ratio if trust_ratio_where is None else ratio.mask(trust_ratio_where),
        ScaleByLearningRate(learning_rate),
        Trace(momentum, nesterov),
    )


@advise_keywords
def fromage(
    learning_rate: Hyperparameter,
    min_norm: Hyperparameter = 1e-6,
) -> AbstractTransform:
    """Fromage: steps in proportion to the norm of each leaf's parameter.

        p ↦ (p − η·(‖p‖ / ‖g‖)·g) / √(1 + η²)

    Differs from Optax: η is a single hyperparameter, so it can be changed, and the factor that
    shrinks p is computed without cancellation.

    **Arguments:**

    - `learning_rate`: η. 0.01 is a good first guess.
    - `min_norm`: a lower bound on both norms, ≥ 0.

    **Returns:** a chain of `ScaleByTrustRatio` and `ScaleByFromage`.

    ??? cite "Bernstein et al., [On the distance between two neural networks and the stability of
        learning](https://arxiv.org/abs/2002.03432), 2020"
    """
    return ScaleByTrustRatio(min_norm) | ScaleByFromage(learning_rate)
