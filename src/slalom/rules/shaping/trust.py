"""Transforms that scale the update of each leaf by the norm of its parameter."""

from typing import ClassVar

import jax.numpy as jnp

from ... import tree
from ..._core.fields.declare import Hyperparameter, hyperparameter
from ..._core.protocol.rule import AbstractRule


class ScaleByTrustRatio(AbstractRule[None]):
    """Makes the norm of each leaf's update proportional to that of its parameter.

        u ↦ u·c·‖p‖ / (‖u‖ + ε)   with the norms of one leaf, each at least `min_norm`

    The update is unchanged if one of the two norms is 0, which lets parameters leave zero. Norms
    are summed in at least float32, and are correct even where a sum of squares overflows, or where
    that of the updates underflows. Differs from Optax, which returns 0 or infinity there.

    **Arguments:**

    - `min_norm`: the lower bound of both norms, ≥ 0.
    - `trust_coefficient`: c, ≥ 0.
    - `eps`: ε, ≥ 0.

    ??? cite "You et al., [Large Batch Training of Convolutional
        Networks](https://arxiv.org/abs/1708.03888), 2017"
    """

    min_norm: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    trust_coefficient: Hyperparameter = hyperparameter(1.0, within="[0, inf)")
    eps: Hyperparameter = hyperparameter(0.0, within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def measure(self, now, g, leaf):
        return {"u": tree.NormOf(g), "p": tree.NormOf(leaf.p, small=False)}

    def finish(self, now, sums, state):
        u_norm, p_norm = (jnp.maximum(x, now.min_norm) for x in sums.each("u", "p"))
        zero = (u_norm == 0) | (p_norm == 0)
        # The ratio may overflow where the result does not.
        now.inverse = 1 / jnp.where(zero, 1, u_norm + now.eps)
        now.size = jnp.where(zero, 1, now.trust_coefficient * p_norm)

    def direction(self, now, g, leaf):
        return g * now.inverse * now.size


class ScaleByParamBlockNorm(AbstractRule[None]):
    """Multiplies the update of each leaf by the parameter's norm: u ↦ u·max(‖p‖, s).

    **Arguments:**

    - `min_scale`: s, ≥ 0; lets a parameter leave zero.
    """

    min_scale: Hyperparameter = hyperparameter(1e-3, within="[0, inf)")

    over: ClassVar[str] = "leaf"
    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def direction(self, now, g, leaf):
        return g * jnp.maximum(tree.norm(leaf.p), now.min_scale)


class ScaleByParamBlockRms(AbstractRule[None]):
    """Multiplies the update of each leaf by the parameter's root mean square.

        u ↦ u·max(√(mean |p|²), s)

    **Arguments:**

    - `min_scale`: s, ≥ 0; lets a parameter leave zero.

    ??? cite "Shazeer & Stern, [Adafactor](https://arxiv.org/abs/1804.04235), 2018"
    """

    min_scale: Hyperparameter = hyperparameter(1e-3, within="[0, inf)")

    over: ClassVar[str] = "leaf"
    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def direction(self, now, g, leaf):
        return g * jnp.maximum(tree.rms(leaf.p), now.min_scale)


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

    learning_rate: Hyperparameter = hyperparameter()

    needs: ClassVar[tuple[str, ...]] = ("params",)
    update_sign: ClassVar[int | None] = -1

    def begin(self, now, state):
        square = jnp.square(now.learning_rate)
        root = jnp.sqrt(1 + square)
        now.rate = now.learning_rate / root
        # 1/√(1 + η²) − 1 without cancellation, which would leave 3 digits at η = 0.01.
        now.shrink = -square / (root * (1 + root))

    def direction(self, now, g, leaf):
        return now.shrink * leaf.p - now.rate * g
