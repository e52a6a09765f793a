"""The least squares problems of Moré, Garbow and Hillstrom, from their published formulas.

Each is a function from a vector of n parameters to m residuals. `MINIMA` are values of Σ rᵢ² at
local minima, the global one first.

Moré, Garbow & Hillstrom, [Testing Unconstrained Optimization
Software](https://doi.org/10.1145/355934.355936), 1981.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Residuals = Callable[[Float[Array, " n"]], Float[Array, " m"]]


class Problem(NamedTuple):
    """A problem, where to start, and its minima."""

    residuals: Residuals
    start: tuple[float, ...]
    minima: tuple[float, ...]
    """Σ rᵢ² at the known local minima, the global one first."""


_BARD = ".14 .18 .22 .25 .29 .32 .35 .39 .37 .58 .73 .96 1.34 2.10 4.39"
_GAUSSIAN = ".0009 .0044 .0175 .0540 .1295 .2420 .3521 .3989"
_MEYER = "34780 28610 23650 19630 16370 13720 11540 9744 8261 7030 6005 5147 4427 3820 3307 2872"
_KOWALIK = ".1957 .1947 .1735 .1600 .0844 .0627 .0456 .0342 .0323 .0235 .0246"
_KOWALIK_AT = "4 2 1 .5 .25 .167 .125 .1 .0833 .0714 .0625"
_OSBORNE_1 = (
    ".844 .908 .932 .936 .925 .908 .881 .850 .818 .784 .751 .718 .685 .658 .628 .603 .580 .558 "
    ".538 .522 .506 .490 .478 .467 .457 .448 .438 .431 .424 .420 .414 .411 .406"
)
_OSBORNE_2 = (
    "1.366 1.191 1.112 1.013 .991 .885 .831 .847 .786 .725 .746 .679 .608 .655 .616 .606 .602 "
    ".626 .651 .724 .649 .649 .694 .644 .624 .661 .612 .558 .533 .495 .500 .423 .395 .375 "
    ".372 .391 .396 .405 .428 .429 .523 .562 .607 .653 .672 .708 .633 .668 .645 .632 .591 "
    ".559 .597 .625 .739 .710 .729 .720 .636 .581 .428 .292 .162 .098 .054"
)


def _data(text: str) -> np.ndarray:
    return np.array(text.split(), float)


def rosenbrock(x):
    even, odd = x[::2], x[1::2]
    return jnp.concatenate([10 * (odd - even**2), 1 - even])


def freudenstein_roth(x):
    a, b = x
    return jnp.stack([-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b])


def powell_badly_scaled(x):
    a, b = x
    return jnp.stack([1e4 * a * b - 1, jnp.exp(-a) + jnp.exp(-b) - 1.0001])


def brown_badly_scaled(x):
    a, b = x
    return jnp.stack([a - 1e6, b - 2e-6, a * b - 2])


def beale(x):
    a, b = x
    return jnp.array([1.5, 2.25, 2.625]) - a * (1 - b ** jnp.arange(1, 4))


def jennrich_sampson(x):
    i = jnp.arange(1.0, 11)
    return 2 + 2 * i - (jnp.exp(i * x[0]) + jnp.exp(i * x[1]))


def helical_valley(x):
    a, b, c = x
    turns = jnp.arctan2(b, a) / (2 * jnp.pi)
    turns = jnp.where(turns < -0.25, turns + 1, turns)
    return jnp.stack([10 * (c - 10 * turns), 10 * (jnp.sqrt(a**2 + b**2) - 1), c])


def bard(x):
    u = jnp.arange(1.0, 16)
    v = 16 - u
    return _data(_BARD) - (x[0] + u / (v * x[1] + jnp.minimum(u, v) * x[2]))


def gaussian(x):
    half = _data(_GAUSSIAN)
    t = (8 - jnp.arange(1.0, 16)) / 2
    return x[0] * jnp.exp(-x[1] * (t - x[2]) ** 2 / 2) - np.concatenate([half, half[-2::-1]])


def meyer(x):
    t = 45 + 5 * jnp.arange(1.0, 17)
    return x[0] * jnp.exp(x[1] / (t + x[2])) - _data(_MEYER)


def gulf(x):
    t = jnp.arange(1.0, 100) / 100
    y = 25 + (-50 * jnp.log(t)) ** (2 / 3)
    return jnp.exp(-(jnp.abs(y - x[1]) ** x[2]) / x[0]) - t


def box_3d(x):
    t = jnp.arange(1.0, 11) / 10
    return jnp.exp(-t * x[0]) - jnp.exp(-t * x[1]) - x[2] * (jnp.exp(-t) - jnp.exp(-10 * t))


def powell_singular(x):
    a, b, c, d = x.reshape(-1, 4).T
    parts = [a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2]
    return jnp.concatenate(parts)


def wood(x):
    a, b, c, d = x
    return jnp.stack(
        [
            10 * (b - a**2),
            1 - a,
            90**0.5 * (d - c**2),
            1 - c,
            10**0.5 * (b + d - 2),
            10**-0.5 * (b - d),
        ]
    )


def kowalik_osborne(x):
    u = _data(_KOWALIK_AT)
    return _data(_KOWALIK) - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3])


def brown_dennis(x):
    t = jnp.arange(1.0, 21) / 5
    first = x[0] + t * x[1] - jnp.exp(t)
    return first**2 + (x[2] + x[3] * jnp.sin(t) - jnp.cos(t)) ** 2


def osborne_1(x):
    t = 10 * jnp.arange(33.0)
    return _data(_OSBORNE_1) - (x[0] + x[1] * jnp.exp(-t * x[3]) + x[2] * jnp.exp(-t * x[4]))


def biggs_exp6(x):
    t = jnp.arange(1.0, 14) / 10
    y = jnp.exp(-t) - 5 * jnp.exp(-10 * t) + 3 * jnp.exp(-4 * t)
    found = x[2] * jnp.exp(-t * x[0]) - x[3] * jnp.exp(-t * x[1]) + x[5] * jnp.exp(-t * x[4])
    return found - y


def osborne_2(x):
    t = jnp.arange(65.0) / 10
    peaks = jnp.exp(-((t[:, None] - x[8:11]) ** 2) * x[5:8]) @ x[1:4]
    return _data(_OSBORNE_2) - (x[0] * jnp.exp(-t * x[4]) + peaks)


def watson(x):
    j = jnp.arange(len(x))
    t = (jnp.arange(1.0, 30) / 29)[:, None]
    slope = jnp.sum(j[1:] * x[1:] * t ** j[:-1], axis=1)
    rows = slope - jnp.sum(x * t**j, axis=1) ** 2 - 1
    return jnp.concatenate([rows, jnp.stack([x[0], x[1] - x[0] ** 2 - 1])])


def penalty_1(x):
    return jnp.concatenate([1e-5**0.5 * (x - 1), jnp.sum(x**2)[None] - 0.25])


def penalty_2(x):
    n, a = len(x), 1e-5**0.5
    i = jnp.arange(2.0, n + 1)
    e = jnp.exp(x / 10)
    y = jnp.exp(i / 10) + jnp.exp((i - 1) / 10)
    weights = jnp.arange(n, 0.0, -1)
    return jnp.concatenate(
        [
            (x[0] - 0.2)[None],
            a * (e[1:] + e[:-1] - y),
            a * (e[1:] - jnp.exp(-0.1)),
            (jnp.sum(weights * x**2) - 1)[None],
        ]
    )


def variably_dimensioned(x):
    total = jnp.sum(jnp.arange(1.0, len(x) + 1) * (x - 1))
    return jnp.concatenate([x - 1, jnp.stack([total, total**2])])


def trigonometric(x):
    n, i = len(x), jnp.arange(1.0, len(x) + 1)
    return n - jnp.sum(jnp.cos(x)) + i * (1 - jnp.cos(x)) - jnp.sin(x)


def brown_almost_linear(x):
    n = len(x)
    return jnp.concatenate([x[:-1] + jnp.sum(x) - (n + 1), jnp.prod(x)[None] - 1])


def _grid(x):
    n = len(x)
    return 1 / (n + 1), jnp.arange(1.0, n + 1) / (n + 1)


def discrete_boundary_value(x):
    h, t = _grid(x)
    around = jnp.pad(x, 1)
    return 2 * x - around[:-2] - around[2:] + h**2 * (x + t + 1) ** 3 / 2


def discrete_integral_equation(x):
    h, t = _grid(x)
    cubes = (x + t + 1) ** 3
    below = jnp.cumsum(t * cubes)
    above = jnp.sum((1 - t) * cubes) - jnp.cumsum((1 - t) * cubes)
    return x + h * ((1 - t) * below + t * above) / 2


def broyden_tridiagonal(x):
    around = jnp.pad(x, 1)
    return (3 - 2 * x) * x - around[:-2] - 2 * around[2:] + 1


def broyden_banded(x):
    i = np.arange(len(x))
    apart = i[:, None] - i
    band = (apart <= 5) & (apart >= -1) & (apart != 0)
    return x * (2 + 5 * x**2) + 1 - band.astype(float) @ (x * (1 + x))


def linear_full_rank(x):
    n, m = len(x), 2 * len(x)
    total = 2 * jnp.sum(x) / m
    return jnp.concatenate([x, jnp.zeros(m - n)]) - total - 1


def linear_rank_1(x):
    i, j = jnp.arange(1.0, 2 * len(x) + 1), jnp.arange(1.0, len(x) + 1)
    return i * jnp.sum(j * x) - 1


def linear_rank_1_with_zeros(x):
    m = 2 * len(x)
    middle = jnp.sum(jnp.arange(2.0, len(x)) * x[1:-1])
    i = jnp.arange(1.0, m - 1)
    return jnp.concatenate([-jnp.ones(1), i * middle - 1, -jnp.ones(1)])


def chebyquad(x):
    n, y = len(x), 2 * x - 1
    last, now, rows = jnp.ones_like(y), y, []
    for i in range(1, n + 1):
        integral = 0 if i % 2 else -1 / (i**2 - 1)
        rows.append(jnp.mean(now) - integral)
        last, now = now, 2 * y * now - last
    return jnp.stack(rows)


def _ones(n: int, value: float = 1.0) -> tuple[float, ...]:
    return (value,) * n


def _even(n: int) -> tuple[float, ...]:
    return tuple(float(j) / (n + 1) for j in range(1, n + 1))


def _on_grid(n: int) -> tuple[float, ...]:
    return tuple(t * (t - 1) for t in _even(n))


_OSBORNE_2_START = (1.3, 0.65, 0.65, 0.7, 0.6, 3.0, 5.0, 7.0, 2.0, 4.5, 5.5)
_VARIABLY = tuple(1 - j / 10 for j in range(1, 11))

PROBLEMS: dict[str, Problem] = {
    "rosenbrock": Problem(rosenbrock, (-1.2, 1.0), (0.0,)),
    "freudenstein_roth": Problem(freudenstein_roth, (0.5, -2.0), (0.0, 48.98425367924)),
    "powell_badly_scaled": Problem(powell_badly_scaled, (0.0, 1.0), (0.0,)),
    "brown_badly_scaled": Problem(brown_badly_scaled, (1.0, 1.0), (0.0,)),
    "beale": Problem(beale, (1.0, 1.0), (0.0,)),
    "jennrich_sampson": Problem(jennrich_sampson, (0.3, 0.4), (124.3621823556,)),
    "helical_valley": Problem(helical_valley, (-1.0, 0.0, 0.0), (0.0,)),
    "bard": Problem(bard, _ones(3), (8.214877306579e-3,)),
    "gaussian": Problem(gaussian, (0.4, 1.0, 0.0), (1.127932769619e-8,)),
    "meyer": Problem(meyer, (0.02, 4000.0, 250.0), (87.94585517046,)),
    "gulf": Problem(gulf, (5.0, 2.5, 0.15), (0.0,)),
    "box_3d": Problem(box_3d, (0.0, 10.0, 20.0), (0.0,)),
    "powell_singular": Problem(powell_singular, (3.0, -1.0, 0.0, 1.0), (0.0,)),
    "wood": Problem(wood, (-3.0, -1.0, -3.0, -1.0), (0.0,)),
    "kowalik_osborne": Problem(kowalik_osborne, (0.25, 0.39, 0.415, 0.39), (3.075056038492e-4,)),
    "brown_dennis": Problem(brown_dennis, (25.0, 5.0, -5.0, -1.0), (85822.20162636,)),
    "osborne_1": Problem(osborne_1, (0.5, 1.5, -1.0, 0.01, 0.02), (5.464894697483e-5,)),
    "biggs_exp6": Problem(biggs_exp6, (1.0, 2.0, 1.0, 1.0, 1.0, 1.0), (0.0, 5.655649925499e-3)),
    # At the second one all peaks are far from the data.
    "osborne_2": Problem(osborne_2, _OSBORNE_2_START, (4.013773629355e-2, 1.789813586881)),
    "watson_6": Problem(watson, _ones(6, 0.0), (2.287670053552e-3,)),
    "watson_9": Problem(watson, _ones(9, 0.0), (1.399760138097e-6,)),
    "watson_12": Problem(watson, _ones(12, 0.0), (4.722381069986e-10,)),
    "rosenbrock_10": Problem(rosenbrock, (-1.2, 1.0) * 5, (0.0,)),
    "powell_singular_12": Problem(powell_singular, (3.0, -1.0, 0.0, 1.0) * 3, (0.0,)),
    "penalty_1_4": Problem(penalty_1, (1.0, 2.0, 3.0, 4.0), (2.249977500936e-5,)),
    "penalty_1_10": Problem(penalty_1, tuple(map(float, range(1, 11))), (7.08765146709e-5,)),
    "penalty_2_4": Problem(penalty_2, _ones(4, 0.5), (9.376293007355e-6,)),
    "penalty_2_10": Problem(penalty_2, _ones(10, 0.5), (2.936605374567e-4,)),
    "variably_dimensioned": Problem(variably_dimensioned, _VARIABLY, (0.0,)),
    "trigonometric": Problem(trigonometric, _ones(10, 0.1), (0.0, 2.795056121877e-5)),
    "brown_almost_linear": Problem(brown_almost_linear, _ones(10, 0.5), (0.0, 1.0)),
    "discrete_boundary_value": Problem(discrete_boundary_value, _on_grid(10), (0.0,)),
    "discrete_integral_equation": Problem(discrete_integral_equation, _on_grid(10), (0.0,)),
    "broyden_tridiagonal": Problem(broyden_tridiagonal, _ones(10, -1.0), (0.0,)),
    "broyden_banded": Problem(broyden_banded, _ones(10, -1.0), (0.0,)),
    "linear_full_rank": Problem(linear_full_rank, _ones(5), (5.0,)),
    "linear_rank_1": Problem(linear_rank_1, _ones(5), (45 / 21,)),
    "linear_rank_1_with_zeros": Problem(linear_rank_1_with_zeros, _ones(5), (62 / 17,)),
    "chebyquad_8": Problem(chebyquad, _even(8), (3.516873725677e-3,)),
    "chebyquad_10": Problem(chebyquad, _even(10), (4.772713915218e-3, 6.503954800807e-3)),
}

RUNS = [
    (name, factor)
    for name, problem in PROBLEMS.items()
    for factor in ((1, 10) if any(problem.start) else (1,))
]
"""The names and factors of the starts: each problem from its start, and from ten times as far."""


def start_of(name: str, factor: float, dtype: Any = float) -> Float[Array, " n"]:
    """A start of a problem."""
    return jnp.asarray(factor * np.asarray(PROBLEMS[name].start), dtype)
