"""The decay of power-function averages, which reach back over a fixed share of a run."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Real

from .._core.fields.declare import Number, hyperparameter
from .._core.fields.schedule import AbstractSchedule
from ..tree.dtypes import as_canonical, canonical_float
from ..tree.types import Scalar, Step

LARGEST = 0.288
"""Below 1/√12, the relative standard deviation of a uniform mean."""


class power_average(AbstractSchedule):
    """The decay of an average that reaches back over a fixed share of the run.

        s(n) = (1 − 1/t)^(γ + 1),   t = n + 1

    An average with this decay weights the parameters of step τ by τ^γ, so that its width grows with
    the run. It is given by the standard deviation of that weight relative to t,

        σ_rel = √(γ + 1) / ((γ + 2)·√(γ + 3))

    The first decay is 0, so the average begins with the first parameters, and `tx.average` takes it
    without another correction of the start: t is the number of steps that it has averaged.

    ```python
    >>> narrow, wide = sl.schedules.power_average(0.05), sl.schedules.power_average(0.1)
    >>> opt = sl.Optimizer(sl.adam(1e-3).average(wide).average(narrow), {"w": jnp.ones(2)})

    ```

    From checkpoints with two such averages, `sl.checkpoint.synthesize` makes one of any width.

    **Arguments:**

    - `sigma_rel`: σ_rel, in (0, 0.288]. 0.05 and 0.1 are usual.

    ??? cite "Karras et al., [Analyzing and Improving the Training Dynamics of Diffusion
        Models](https://arxiv.org/abs/2312.02696), 2024"
    """

    sigma_rel: Number = hyperparameter(within=f"(0, {LARGEST}]")

    def __call__(self, step: Step) -> Scalar:
        n = jnp.asarray(step, jnp.int32).astype(canonical_float())
        return (n / (n + 1)) ** (exponent(as_canonical(self.sigma_rel), jnp) + 1)

    def newest_weight(self, age: Int[Array, "*leaves"]) -> Real[Array, "*leaves"]:
        """1 − s(age − 1), which does not cancel, the weight of the newest of `age` values."""
        power = exponent(as_canonical(self.sigma_rel), jnp) + 1
        share = 1 / age.astype(power.dtype)
        weight = -jnp.expm1(power * jnp.log1p(-jnp.where(age == 1, 0, share)))
        return jnp.where(age == 1, 1, weight)


def exponent(sigma_rel: Any, xp: Any = np) -> Any:
    """γ, the largest root of γ³ + 7γ² + (16 − σ⁻²)γ + (12 − σ⁻²) = 0.

    **Arguments:**

    - `sigma_rel`: σ.
    - `xp`: NumPy, for float64, or `jax.numpy`.
    """
    s = sigma_rel**-2
    # With γ = x − 7/3 the cubic has no square, and three real roots: x³ − p·x + q = 0.
    p, q = s + 1 / 3, 4 / 3 * s + 2 / 27
    angle = xp.arccos(-1.5 * q / p * xp.sqrt(3 / p))
    return 2 * xp.sqrt(p / 3) * xp.cos(angle / 3) - 7 / 3


def synthesis_weights(
    snapshots: list[tuple[float, float]], time: float, sigma_rel: float
) -> np.ndarray:
    """The weights of the averages whose mix is closest to another average.

    **Arguments:**

    - `snapshots`: the time t and the σ_rel of each average.
    - `time`, `sigma_rel`: those of the average to make.

    **Returns:** weights with the sum 1, in float64.
    """
    times, sigmas = np.array([*snapshots, (time, sigma_rel)], np.float64).T
    powers = exponent(sigmas)
    inner = _inner(times[:, None], powers[:, None], times, powers)
    # Averages of nearly the same steps are nearly equal, and the system nearly singular.
    weights = np.linalg.lstsq(inner[:-1, :-1], inner[:-1, -1], rcond=1e-14)[0]
    return weights / math.fsum(weights)


def _inner(s: np.ndarray, a: np.ndarray, t: np.ndarray, b: np.ndarray) -> np.ndarray:
    """∫ p(τ; s, a)·p(τ; t, b) dτ for p(τ; t, γ) = (γ + 1)·τ^γ / t^(γ + 1) on [0, t]."""
    ratio = (s / t) ** np.where(s < t, b, -a)
    return (a + 1) * (b + 1) * ratio / ((a + b + 1) * np.maximum(s, t))
