"""Quasi-Newton methods."""

from .._core.fields.declare import Hyperparameter
from .._core.protocol.chain import chain
from .._core.protocol.transform import AbstractTransform
from .._core.text.advice import advise_keywords
from ..transforms import Scale, ScaleByLbfgs, ScaleByLearningRate, ScaleByZoomLinesearch
from ._objective import maximized_if

_ZOOM = ScaleByZoomLinesearch(20, initial_guess_strategy="one")


@advise_keywords
def lbfgs(
    learning_rate: Hyperparameter | None = None,
    memory_size: int = 10,
    scale_init_precond: bool = True,
    linesearch: AbstractTransform | None = _ZOOM,
    *,
    maximize: bool = False,
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

    **Arguments:**

    - `learning_rate`: a factor of the direction; the search finds η relative to it. Defaults to
        1.
    - `memory_size`: the number of past differences of parameters and gradients in P, an int ≥ 1.
    - `scale_init_precond`: as in `ScaleByLbfgs`.
    - `linesearch`: the line search, such as `ScaleByZoomLinesearch` or
        `ScaleByBacktrackingLinesearch`; `None` for no search. Defaults to a zoom line search of at
        most 20 steps with the initial guess 1.
    - `maximize`: whether to maximize the loss instead, as `.maximize()` does.

    **Returns:** a chain of `ScaleByLbfgs`, `Scale` or `ScaleByLearningRate`, and the line search.

    ??? cite "Liu & Nocedal, [On the limited memory BFGS method for large scale
        optimization](https://doi.org/10.1007/BF01589116), 1989"
    """
    scale = Scale(-1.0) if learning_rate is None else ScaleByLearningRate(learning_rate)
    links = () if linesearch is None else (linesearch,)
    return maximized_if(
        maximize, chain(ScaleByLbfgs(memory_size, scale_init_precond), scale, *links)
    )
