"""Quasi-Newton rules with a full matrix, scaled in each step."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.protocol.real_vectors import from_vector, to_vector
from ...rules._base import AbstractTransform, advise_keywords, chain
from ...rules.curvature._system import check_size, dtype_and_size
from ...rules.curvature.lbfgs import ZOOM, first_scale, last_changes
from ...rules.shaping.scale import Scale
from ...tree.types import Params, Scalar


class ScaleBySelfScaledBroydenState(eqx.Module):
    """The state of `ScaleBySelfScaledBroyden`."""

    inverse: Float[Array, "params params"] = fields.until_reset()
    """H; zero before the first update of it."""
    age: Int[Array, "*leaves"] = fields.per_leaf()
    """The number of updates of each parameter."""
    params: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    """The parameters of the last update."""
    updates: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    """The gradients of the last update."""


class ScaleBySelfScaledBroyden(AbstractTransform[ScaleBySelfScaledBroydenState]):
    """Self-scaled Broyden: multiplies gradients by a full approximation of the inverse Hessian.

    From parameters w and gradients g of the last two steps, with s = wₖ − wₖ₋₁, y = gₖ − gₖ₋₁,
    ρ = 1 / ⟨s, y⟩ and v = ρ·s − H·y / ⟨y, H·y⟩,

        H ← (H − H·y·(H·y)ᵀ / ⟨y, H·y⟩ + φ·⟨y, H·y⟩·v·vᵀ) / τ + ρ·s·sᵀ,   uₖ = H·gₖ

    φ = 1 and τ = 1 is BFGS. The self-scaled rules divide by a τ that follows the ratio
    b = ⟨s, H⁻¹·s⟩ / ⟨s, y⟩, so that wrong eigenvalues are forgotten sooner; those of the Broyden
    family also choose φ. On full-batch problems in float64, such as physics-informed networks, this
    reaches much smaller losses than BFGS.

    Use it with a line search, as in `ss_broyden`, with nothing in between: b assumes that the last
    step went along its updates. The first update starts from a multiple of the identity, and the
    first direction is as long as in L-BFGS. A pair with ⟨s, y⟩ ≤ ε·‖s‖·‖y‖, where ε is the machine
    epsilon, changes nothing. If the parameters did not move, as after a failed line search, H is
    reset, and the next direction is the gradient. Complex parameters count as pairs of real ones.

    For P parameters the state has P² + 2·P elements, and a step takes a few times P² operations. A
    matrix of more than 16 GiB is refused.

    **Arguments:**

    - `family`: `"broyden"` for τ and φ of the self-scaled Broyden family, `"bfgs"` for self-scaled
        BFGS, with τ = min(1, 1/b), or `"plain"` for BFGS.

    ??? cite "Urbán et al., [Unveiling the optimization process of Physics Informed Neural
        Networks](https://arxiv.org/abs/2405.04230), 2025; Kiyani et al., [Optimizing the Optimizer
        for Physics-Informed Neural Networks and Kolmogorov-Arnold
        Networks](https://arxiv.org/abs/2501.16371), 2025"
    """

    family: str = fields.choice_field("broyden", "bfgs", "plain")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True
    unconstrained: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleBySelfScaledBroydenState:
        tree.check_inexact(params)
        dtype, size = dtype_and_size(params)
        check_size(
            "ScaleBySelfScaledBroyden would keep a matrix",
            size,
            "parameters",
            dtype,
            "Train fewer parameters with `trainable=`, or use `sl.lbfgs()`.",
        )
        return ScaleBySelfScaledBroydenState(
            inverse=jnp.zeros((size, size), dtype),
            age=tree.fresh_count(),
            params=tree.zeros_like(params, tree.accumulation_dtype),
            updates=tree.zeros_like(params, tree.accumulation_dtype),
        )

    def update(self, updates, state, params=None, context=None):
        params = self.demand("params", params)
        if not jax.tree.leaves(params):
            return updates, state
        dtype = state.inverse.dtype
        s, y = (to_vector(x, dtype) for x in last_changes(params, updates, state))
        g, last = to_vector(updates, dtype), to_vector(state.updates, dtype)
        first = jnp.asarray(first_scale(updates, params), dtype)
        # A matrix that is positive definite has no zero on its diagonal.
        fresh = state.inverse[0, 0] == 0
        # One pass over the matrix.
        products = tree.matmul(state.inverse, jnp.stack([last, y, g], axis=1))
        products = jnp.where(fresh, jnp.stack([last, y, g], axis=1), products)
        sy, eps = jnp.vdot(s, y), jnp.finfo(dtype).eps
        numbers, good = _numbers(self.family, s, y, last, products, fresh)
        good &= sy > eps * jnp.linalg.norm(s) * jnp.linalg.norm(y)
        good &= jnp.all(jnp.isfinite(jnp.stack(numbers)))
        tau, phi, rho, yhy = (jnp.where(good, x, 1) for x in numbers)

        hy, hg = products[:, 1], products[:, 2]
        v = rho * s - hy / yhy
        inverse = jnp.where(fresh, jnp.eye(s.size, dtype=dtype), state.inverse)
        inner = inverse - jnp.outer(hy / yhy, hy) + phi * yhy * jnp.outer(v, v)
        inverse = inner / tau + rho * jnp.outer(s, s)
        # The same product without another pass.
        direction = hg - hy * (jnp.vdot(hy, g) / yhy) + v * (phi * yhy * jnp.vdot(v, g))
        direction = direction / tau + s * (rho * jnp.vdot(s, g))

        still = jnp.all(s == 0)
        kept_inverse = jnp.where(still, 0, state.inverse)
        unchanged = jnp.where(fresh | still, first * g, hg)
        direction = jnp.where(good, direction, unchanged)
        return from_vector(direction, tree.widened(params)), ScaleBySelfScaledBroydenState(
            inverse=jnp.where(good, inverse, kept_inverse),
            age=tree.increment(state.age),
            params=tree.copy(tree.cast_like(params, state.params)),
            updates=tree.copy(tree.cast_like(updates, state.updates)),
        )


def _numbers(
    family: str, s: Array, y: Array, last: Array, products: Array, fresh: Array
) -> tuple[tuple[Scalar, Scalar, Scalar, Scalar], Bool[Array, ""]]:
    """τ, φ, ρ and ⟨y, H·y⟩, and whether there was a step that they follow from."""
    direction, hy = products[:, 0], products[:, 1]
    sy, yhy, square = jnp.vdot(s, y), jnp.vdot(y, hy), jnp.vdot(direction, direction)
    good = (sy > 0) & (yhy > 0)
    if family != "plain":
        good &= square > 0
    # Numbers that are not used have finite derivatives.
    sy, yhy, square = (jnp.where(good, x, 1) for x in (sy, yhy, square))
    rho = 1 / sy
    h, one = rho * yhy, jnp.ones_like(rho)
    if family == "plain":
        return (jnp.where(fresh, h, one), one, rho, yhy), good
    # The last step was s = −rate·H·g.
    rate = -jnp.vdot(s, direction) / square
    b = jnp.where(good, -rate * rho * jnp.vdot(s, last), 1)
    shrink = jnp.minimum(one, 1 / b)
    if family == "bfgs":
        return (jnp.where(fresh, h, shrink), one, rho, yhy), good
    a = jnp.maximum(b * h - 1, 0)
    # For a = 0 all members of the family are the same.
    safe = jnp.where(a > 0, a, 1)
    low = jnp.minimum(one, h * (1 - jnp.where(a > 0, jnp.sqrt(safe / (1 + safe)), 0)))
    theta = jnp.maximum((low - 1) / safe, jnp.minimum(1 / low, (1 - b) / b))
    theta = jnp.where(a > 0, theta, 0)
    sigma = 1 + a * theta
    root = sigma ** (1 / (1 - max(s.size, 2)))
    down = jnp.minimum(shrink * root, sigma)
    up = shrink * jnp.minimum(root, 1 / jnp.where(theta > 0, theta, 1))
    tau = jnp.where(theta > 0, up, down)
    return (jnp.where(fresh, h / sigma, tau), (1 - theta) / sigma, rho, yhy), good


@advise_keywords
def ss_broyden(
    family: str = "broyden",
    linesearch: AbstractTransform | None = ZOOM,
) -> AbstractTransform:
    """Self-scaled Broyden: p ↦ p − η·H·g, where the full matrix H approximates the inverse Hessian
    and a line search finds η.

    For deterministic losses of models with up to a few tens of thousands of parameters, in float64.
    It needs no residuals. Start from a few hundred steps of Adam.

    ```python
    >>> def rosenbrock(p):
    ...     return 100 * (p["y"] - p["x"] ** 2) ** 2 + (1 - p["x"]) ** 2
    >>> params = {"x": jnp.array(0.0), "y": jnp.array(0.0)}
    >>> found = sl.minimize(rosenbrock, sl.contrib.ss_broyden(), params, max_steps=50)
    >>> bool(found.loss < 1e-6)
    True

    ```

    **Arguments:**

    - `family`: `"broyden"`, `"bfgs"` or `"plain"`, as in `ScaleBySelfScaledBroyden`.
    - `linesearch`: the line search, or `None` for no search. Defaults to a zoom line search of at
        most 20 steps with the initial guess 1.

    **Returns:** a chain of `ScaleBySelfScaledBroyden`, `Scale` and the line search.

    ??? cite "Urbán et al., [Unveiling the optimization process of Physics Informed Neural
        Networks](https://arxiv.org/abs/2405.04230), 2025"
    """
    links = () if linesearch is None else (linesearch,)
    return chain(ScaleBySelfScaledBroyden(family), Scale(-1.0), *links)
