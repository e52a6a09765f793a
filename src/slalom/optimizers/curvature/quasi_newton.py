"""Quasi-Newton methods."""

from collections.abc import Mapping
from typing import Any

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...projections import box
from ...rules import (
    Scale,
    ScaleByLbfgs,
    ScaleByLearningRate,
    ScaleBySelfScaledBroyden,
    ScaleByZoomLinesearch,
)

_ZOOM = ScaleByZoomLinesearch(20, initial_guess_strategy="one")


@advise_keywords
def lbfgs(
    learning_rate: Hyperparameter | None = None,
    memory_size: int = 10,
    scale_init_precond: bool = True,
    linesearch: AbstractTransform | None = _ZOOM,
    *,
    bounds: Any = None,
) -> AbstractTransform:
    """L-BFGS: an approximation of Newton's method, with a line search.

        p ↦ p − η·P·g

    P approximates the inverse Hessian, as in `ScaleByLbfgs`, and a line search finds η.

    For deterministic losses: use the same data in every step. `sl.train_step` passes the loss to
    the line search.

    ```python
    >>> def rosenbrock(p):
    ...     return 100 * (p["y"] - p["x"] ** 2) ** 2 + (1 - p["x"]) ** 2
    >>> params = {"x": jnp.array(0.0), "y": jnp.array(0.0)}
    >>> opt = sl.Optimizer(sl.lbfgs(), params)
    >>> step = sl.train_step(rosenbrock)
    >>> for _ in range(30):
    ...     params, opt, loss = step(params, opt)
    >>> bool(rosenbrock(params) < 1e-8)
    True

    ```

    With `bounds` it is L-BFGS-B, and all parameters stay in a box:

    ```python
    >>> params = {"x": jnp.array(0.0), "y": jnp.array(0.0)}
    >>> opt = sl.Optimizer(sl.lbfgs(bounds={sl.where.path("x"): (None, 0.5)}), params)
    >>> for _ in range(30):
    ...     params, opt, loss = step(params, opt)
    >>> params
    {'x': Array(0.5, dtype=float32), 'y': Array(0.25, dtype=float32)}

    ```

    **Arguments:**

    - `learning_rate`: a factor of the direction; the search finds η relative to it. Defaults to
        1.
    - `memory_size`: the number of past differences of parameters and gradients in P, an int ≥ 1.
    - `scale_init_precond`: as in `ScaleByLbfgs`.
    - `linesearch`: the line search, such as `ScaleByZoomLinesearch` or
        `ScaleByBacktrackingLinesearch`; `None` for no search. Defaults to a zoom line search of at
        most 20 steps with the initial guess 1.
    - `bounds`: a pair `(lower, upper)` as `sl.projections.box` takes it, or a mapping from
        selectors to such pairs: `{sl.where.path("noise"): (1e-6, None)}`. A start outside is
        projected, with a warning. Defaults to no bounds.

    **Returns:** a chain of `ScaleByLbfgs`, `Scale` or `ScaleByLearningRate`, and the line search;
    with `bounds` inside `.project(sl.projections.box(lower, upper))`.

    ??? cite "Liu & Nocedal, [On the limited memory BFGS method for large scale
        optimization](https://doi.org/10.1007/BF01589116), 1989; Byrd et al., [A Limited Memory
        Algorithm for Bound Constrained Optimization](https://doi.org/10.1137/0916069), 1995"
    """
    scale = Scale(-1.0) if learning_rate is None else ScaleByLearningRate(learning_rate)
    links = () if linesearch is None else (linesearch,)
    tx = chain(ScaleByLbfgs(memory_size, scale_init_precond), scale, *links)
    groups = bounds if isinstance(bounds, Mapping) else {None: bounds}
    for where, pair in groups.items():
        if pair is None:
            continue
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                "lbfgs.bounds must be a pair `(lower, upper)` or a mapping from selectors to such "
                f"pairs, got {pair!r}."
            )
        tx = tx.project(box(*pair), where=where)
    return tx


@advise_keywords
def ss_broyden(
    family: str = "broyden",
    linesearch: AbstractTransform | None = _ZOOM,
) -> AbstractTransform:
    """Self-scaled Broyden: p ↦ p − η·H·g, where the full matrix H approximates the inverse Hessian
    and a line search finds η.

    For deterministic losses of models with up to a few tens of thousands of parameters, in float64.
    It needs no residuals. Start from a few hundred steps of Adam.

    ```python
    >>> def rosenbrock(p):
    ...     return 100 * (p["y"] - p["x"] ** 2) ** 2 + (1 - p["x"]) ** 2
    >>> params = {"x": jnp.array(0.0), "y": jnp.array(0.0)}
    >>> found = sl.minimize(rosenbrock, sl.ss_broyden(), params, max_steps=50, tol=1e-3)
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
