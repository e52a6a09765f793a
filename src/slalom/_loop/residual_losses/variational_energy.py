"""The energy of a wave function in variational Monte Carlo."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PyTree

from ... import tree
from ..._core.protocol.linearization import AbstractBlock, Local
from ..._core.protocol.real_vectors import as_real
from ..._core.protocol.residuals import Residuals
from ...tree.types import Scalar
from ._loss import AbstractCurvatureLoss, as_arguments, divided


class VariationalEnergy(AbstractCurvatureLoss):
    """The mean of local energies over samples of |ψ|², whose gradient comes from the scores.

    With scores Oᵢ = ∂ log ψ(w, sᵢ) and local energies Eᵢ, curvature rules use

        ∇E = 2·Re mean (Oᵢ − Ō)*·(Eᵢ − Ē),   S = Re mean (Oᵢ − Ō)*·(Oᵢ − Ō)ᵀ

    so that `sl.natural_gradient` steps along S⁻¹·∇E, the direction of stochastic reconfiguration,
    or with momentum that of SPRING. These are usually written with the force ∇E/2: a step with the
    learning rate η is theirs with 2·η, so take half of a rate from there. It is a loss for every
    rule: its gradient is ∇E.

    It is called as `loss_fn(model, samples, local_energies)`. The local energies are given, so the
    loss at other parameters is not known, and rules with a line search are refused.

    ```python
    >>> def log_psi(model, s):
    ...     return -model["a"] * jnp.sum(s**2)
    >>> loss_fn = sl.VariationalEnergy(log_psi)
    >>> model, s = {"a": jnp.array(0.3)}, jax.random.normal(jax.random.key(0), (50, 1))
    >>> energies = model["a"] + (0.5 - 2 * model["a"] ** 2) * s[:, 0] ** 2
    >>> opt = sl.Optimizer(sl.natural_gradient(0.05), model)
    >>> model, opt, energy = sl.train_step(loss_fn)(model, opt, s, energies)

    ```

    **Arguments:**

    - `log_psi`: a function `log_psi(model, *sample)` of one sample that returns a real or complex
        scalar.

    ??? cite "Sorella, [Green Function Monte Carlo with Stochastic
        Reconfiguration](https://doi.org/10.1103/PhysRevLett.80.4558), 1998; Chen & Heyl, [Efficient
        optimization of deep neural quantum states toward machine
        precision](https://arxiv.org/abs/2302.01941), 2023"
    """

    log_psi: Callable[..., Any]

    fixed_data: ClassVar[str | None] = "its local energies are those of the current parameters"

    def on(self, samples: Any, local_energies: Any) -> Residuals:
        if not tree.is_array(local_energies) or local_energies.ndim != 1:
            shape = getattr(local_energies, "shape", type(local_energies).__name__)
            raise ValueError(f"`local_energies` must have an entry for each sample, got {shape}.")
        samples = as_arguments(samples)
        axes = (True,) * (len(samples) + 1)
        rows, shared = divided("the energy", (*samples, local_energies), axes)
        block = _Scores(rows[:-1], shared[:-1], rows[-1], self.log_psi)
        return Residuals((block,), searchable=False)

    def axes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        raise ValueError(
            "VariationalEnergy subtracts means over all samples, so its batch cannot be divided. "
            "Pass `chunk=` to the rule to save memory."
        )

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Scalar:
        """The mean energy."""
        (block,) = self.on(*args, **kwargs).blocks
        z = jax.vmap(lambda row: block.outputs(model, row))(block.rows)
        local = block.local(jax.lax.stop_gradient(z))
        # The value is the mean, and the derivative is that of the scores.
        return local.value + jnp.sum(local.cotangents * (z - jax.lax.stop_gradient(z)))


class _Scores(AbstractBlock):
    rows: PyTree
    shared: PyTree
    energies: Inexact[Array, " samples"]
    log_psi: Callable[..., Any]

    centred: ClassVar[bool] = True

    def outputs(self, params: PyTree, row: PyTree) -> Float[Array, " outputs"]:
        z = self.log_psi(params, *eqx.combine(row, self.shared))
        if not tree.is_inexact(z) or z.shape != ():
            raise TypeError(f"`log_psi` must return a floating or complex scalar, got {z!r}.")
        return as_real(z)

    def local(self, outputs: Float[Array, "examples outputs"]) -> Local:
        number, dtype = outputs.shape[0], outputs.dtype
        parts = [self.energies.real, self.energies.imag][: outputs.shape[1]]
        energies = jnp.stack([x.astype(dtype) for x in parts], axis=1)
        errors = energies - jnp.mean(energies, 0, keepdims=True)
        share = jnp.full(number, number**-0.5, dtype)
        vector = 2 * share[:, None] * errors
        return Local(jnp.mean(energies[:, 0]), share[:, None] * vector, share, vector)
