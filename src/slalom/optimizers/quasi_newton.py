"""Recipes that approximate Newton's step."""

from .._core.chain import chain
from .._core.fields import Hyperparameter
from .._core.transform import AbstractTransform
from ..transforms import Scale, ScaleByLbfgs, ScaleByLearningRate, ScaleByZoomLinesearch

_ZOOM = ScaleByZoomLinesearch(20, initial_guess_strategy="one")


def lbfgs(
    learning_rate: Hyperparameter | None = None,
    memory_size: int = 10,
    scale_init_precond: bool = True,
    linesearch: AbstractTransform | None = _ZOOM,
) -> AbstractTransform:
    """L-BFGS: p ↦ p − η·P·g with an approximation P of the inverse Hessian, and η from a search.

    For losses without noise: give every step the same data. The search needs the loss, which
    `sl.train_step` passes to it:

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

    - `learning_rate`: a factor before the search, which begins at η = 1 times it; 1 without it.
    - `memory_size`: how many differences of parameters and gradients P is made of, an int ≥ 1.
    - `scale_init_precond`: as in `ScaleByLbfgs`.
    - `linesearch`: what finds η, such as `ScaleByZoomLinesearch` (which the default is, with 20
        steps at most, beginning at 1) or `ScaleByBacktrackingLinesearch`; `None` for no search.

    **Returns:** a chain of `ScaleByLbfgs`, `Scale` or `ScaleByLearningRate`, and the search.

    ??? cite "Liu & Nocedal, [On the limited memory BFGS method for large scale
        optimization](https://doi.org/10.1007/BF01589116), 1989"
    """
    scale = Scale(-1.0) if learning_rate is None else ScaleByLearningRate(learning_rate)
    links = () if linesearch is None else (linesearch,)
    return chain(ScaleByLbfgs(memory_size, scale_init_precond), scale, *links)
