"""Optimizers for losses whose residuals are known."""

from typing import Any

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules import (
    ClipByGlobalNorm,
    Scale,
    ScaleByBacktrackingLinesearch,
    ScaleByGaussNewton,
    ScaleByLearningRate,
    ScaleByLevenbergMarquardt,
)

# The factor takes each search back to 1, also after 30 halvings.
BACKTRACKING = ScaleByBacktrackingLinesearch(30, decrease_factor=0.5, increase_factor=1e10)


@advise_keywords
def gauss_newton(
    damping: Hyperparameter = 1e-7,
    *,
    form: str = "auto",
    solver: Any = "auto",
    chunk: int | None = None,
    linesearch: Any = BACKTRACKING,
) -> AbstractTransform:
    """Gauss–Newton, with a line search.

        p ↦ p − η·(JᵀJ + λ)⁻¹·Jᵀρ

    For deterministic losses ½‖ρ‖², written as an `sl.LeastSquares`, or as an `sl.OutputLoss`. In
    float64 it solves small physics-informed networks to errors that first-order rules do not reach.
    For mini-batches use `sl.natural_gradient`.

    ```python
    >>> loss_fn = sl.LeastSquares(lambda model, x, y: model["a"] * jnp.exp(model["b"] * x) - y)
    >>> model = {"a": jnp.array(1.0), "b": jnp.array(0.0)}
    >>> opt = sl.Optimizer(sl.gauss_newton(), model)
    >>> x = jnp.linspace(0, 1, 10)
    >>> step = sl.train_step(loss_fn)
    >>> for _ in range(10):
    ...     model, opt, loss = step(model, opt, x, 2 * jnp.exp(-x))
    >>> bool(loss < 1e-8)
    True

    ```

    **Arguments:**

    - `damping`: λ, ≥ 0.
    - `form`, `solver`, `chunk`: as in `ScaleByGaussNewton`.
    - `linesearch`: the line search, or `None` for no search. Defaults to one that tries 1 first,
        and then halves up to 30 times.

    **Returns:** a chain of `ScaleByGaussNewton`, `Scale` and the line search.

    ??? cite "Müller & Zeinhofer, [Achieving High Accuracy with PINNs via Energy Natural Gradient
        Descent](https://arxiv.org/abs/2302.13163), 2023"
    """
    links = () if linesearch is None else (linesearch,)
    rule = ScaleByGaussNewton(damping, None, form, solver, chunk)
    return chain(rule, Scale(-1.0), *links)


@advise_keywords
def natural_gradient(
    learning_rate: Hyperparameter,
    damping: Hyperparameter = 1e-3,
    momentum: Hyperparameter | None = 0.99,
    *,
    max_norm: Hyperparameter | None = None,
    form: str = "auto",
    solver: Any = "auto",
    chunk: int | None = None,
) -> AbstractTransform:
    """SPRING: energy natural gradient descent, with momentum.

        p ↦ p − η·φₜ   with   φₜ = (JᵀJ + λ)⁻¹·Jᵀ·(ρ − μ·J·φₜ₋₁) + μ·φₜ₋₁

    J is the Jacobian of the residuals ρ, as in `ScaleByGaussNewton`.

    For mini-batches: the momentum keeps what earlier batches have determined.

    **Arguments:**

    - `learning_rate`: η.
    - `damping`: λ, ≥ 0.
    - `momentum`: μ, in [0, 1). `None` is minSR, or energy natural gradient descent.
    - `max_norm`: the largest norm of a step, ≥ 0. The paper uses √1e-3 for wave functions. Defaults
        to none.
    - `form`, `solver`, `chunk`: as in `ScaleByGaussNewton`.

    **Returns:** a chain of `ScaleByGaussNewton`, `ScaleByLearningRate` and, with `max_norm`,
    `ClipByGlobalNorm`.

    ??? cite "Goldshlager et al., [A Kaczmarz-inspired approach to accelerate the optimization of
        neural network wavefunctions](https://arxiv.org/abs/2401.10190), 2024"
    """
    rule = ScaleByGaussNewton(damping, momentum, form, solver, chunk)
    clip = () if max_norm is None else (ClipByGlobalNorm(max_norm),)
    return chain(rule, ScaleByLearningRate(learning_rate), *clip)


@advise_keywords
def levenberg_marquardt(
    damping: Hyperparameter = 1e-3,
    *,
    scaling: str | None = None,
    acceleration: Hyperparameter | None = 0.75,
    max_tries: int = 10,
    form: str = "auto",
    solver: Any = "auto",
    chunk: int | None = None,
) -> AbstractTransform:
    """Levenberg–Marquardt, for losses written as an `sl.LeastSquares`.

        p ↦ p − (JᵀJ + λ·D²)⁻¹·Jᵀ·(ρ + ρ̈/2)

    The step is computed twice: first with ρ̈ = 0, and then with the second derivative of the
    residuals along the first step. λ increases until the loss falls, and decreases afterwards; see
    `ScaleByLevenbergMarquardt`.

    It has no learning rate. Its steps lower the loss of the batch that they see, so batches should
    be large. For the fit of a formula with a few parameters, use `scaling="columns"`.

    **Arguments:**

    - The arguments: as in `ScaleByLevenbergMarquardt`.

    **Returns:** a `ScaleByLevenbergMarquardt`.
    """
    return ScaleByLevenbergMarquardt(damping, scaling, acceleration, max_tries, form, solver, chunk)
