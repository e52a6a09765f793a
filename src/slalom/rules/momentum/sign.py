"""Transforms that keep only the sign: Lion and signSGD."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from ..._core.fields.declare import Hyperparameter, dtype_field, hyperparameter
from ..._core.protocol.rule import AbstractRule
from ..._core.state.marks import param_like
from ...tree.types import Params, Scalar, Tracer
from ._first_moment import first_moment


class ScaleByLionState(eqx.Module):
    """The state of `ScaleByLion`."""

    mu: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByLion(AbstractRule[ScaleByLionState]):
    """Lion: the sign of an interpolation between momentum and gradient.

        uₜ = sign(cₜ)   with   cₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        mₜ = β₂·mₜ₋₁ + (1 − β₂)·gₜ

    Two modes replace the sign near zero: `mode="smooth"` by uₜ = tanh(s·cₜ), and `mode="refined"`
    by uₜ = cₜ where |cₜ| < 1. For complex leaves the sign is z / |z|, and the modes apply to the
    absolute value.

    Where β₁ ≤ 2·β₂, as is usual, cₜ is derived from mₜ, which saves a copy of mₜ₋₁. With a smaller
    β₂ this would lose a factor of β₁/β₂ in precision, so cₜ is computed from mₜ₋₁ as it stands. For
    traced or scheduled β it is always derived from mₜ.

    **Arguments:**

    - `b1`: β₁, the weight of the momentum in the update, in [0, 1).
    - `b2`: β₂, the decay of the momentum, in (0, 1); 0 is excluded because of a division.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.
    - `mode`: `"hard"`, `"smooth"` or `"refined"`.
    - `smooth_beta`: s, > 0; used only by `"smooth"`.

    ??? cite "Chen et al., [Symbolic Discovery of Optimization
        Algorithms](https://arxiv.org/abs/2302.06675), 2023"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.99, within="(0, 1)")
    mu_dtype: np.dtype | None = dtype_field()
    mode: str = eqx.field(default="hard", static=True, kw_only=True)
    smooth_beta: Hyperparameter = hyperparameter(1.0, within="(0, inf)", kw_only=True)

    _reads_old: bool = eqx.field(init=False, static=True, repr=False)

    def __post_init__(self):
        b1, b2 = map(_known, (self.b1, self.b2))
        self._reads_old = b1 is not None and b2 is not None and b1 > 2 * b2

    def __check_init__(self):
        if self.mode not in ("hard", "smooth", "refined"):
            raise ValueError(
                f"ScaleByLion.mode must be 'hard', 'smooth' or 'refined', got {self.mode!r}."
            )

    def init(self, params: Params) -> ScaleByLionState:
        return ScaleByLionState(mu=first_moment(self, params, "b2"))

    def begin(self, now, state):
        now.c1, now.c2 = 1 - now.b1, 1 - now.b2
        now.from_mu, now.from_g = interpolation_of_new(now.b1, now.b2)

    def advance(self, now, g, leaf):
        if self._reads_old:
            leaf.c = now.b1 * leaf.mu + now.c1 * g
        leaf.mu = now.b2 * leaf.mu + now.c2 * g

    def direction(self, now, g, leaf):
        c = leaf.c if self._reads_old else now.from_mu * leaf.mu + now.from_g * g
        return self._sign(c, now.smooth_beta)

    def _sign(self, c: Array, smooth_beta: Scalar) -> Array:
        if self.mode == "hard":
            return jnp.sign(c)
        if self.mode == "refined":
            return c / jnp.maximum(jnp.abs(c), 1)
        if jnp.iscomplexobj(c):
            return jnp.sign(c) * jnp.tanh(smooth_beta * jnp.abs(c))
        return jnp.tanh(smooth_beta * c)


def _known(x: Any) -> float | None:
    """A number that is neither traced nor scheduled. What is no number is refused later."""
    number = isinstance(x, float | int | np.ndarray | jax.Array) and not isinstance(x, Tracer)
    return float(x) if number and np.ndim(x) == 0 else None


class ScaleBySign(AbstractRule[None]):
    """Keeps only the sign: u ↦ sign(u), which for complex leaves is u / |u|; 0 stays 0.

    ??? cite "Bernstein et al., [signSGD](https://arxiv.org/abs/1802.04434), 2018"
    """

    keeps_zeros: ClassVar[bool] = True

    def direction(self, now, g, leaf):
        return jnp.sign(g)


def interpolation_of_new(b1: Scalar, b2: Scalar) -> tuple[Scalar, Scalar]:
    """The factors a, b of β₁·m + (1 − β₁)·g = a·m' + b·g with m' = β₂·m + (1 − β₂)·g.

    Reading the new mean m' saves the copy of the old mean m; for Lion the step would take 2.7
    times as long with it.
    """
    from_new = b1 / b2
    return from_new, 1 - from_new
