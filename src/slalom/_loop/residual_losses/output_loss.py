"""Convex losses of the outputs of a model."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ... import tree
from ..._core.protocol.linearization import AbstractBlock, Local
from ..._core.protocol.residuals import Residuals
from ._loss import WHOLE, AbstractCurvatureLoss, as_arguments, divided, with_examples


class OutputLoss(AbstractCurvatureLoss):
    """The mean of a convex loss of the outputs of a model, such as a cross-entropy.

    With outputs zᵢ = F(w, xᵢ) and their Jacobian Jᵢ, curvature rules use the generalized
    Gauss–Newton matrix

        mean Jᵢᵀ·Hᵢ·Jᵢ,   Hᵢ = ∇²ℓ(zᵢ)

    which is the Fisher matrix if ℓ is the negative log-likelihood of an exponential family in its
    natural parameters. `sl.LeastSquares` is the case of a squared loss. Negative eigenvalues of Hᵢ
    count as 0.

    ```python
    >>> def loss_of_outputs(logits, label):
    ...     return -jax.nn.log_softmax(logits)[label]
    >>> loss_fn = sl.OutputLoss(lambda model, x: model(x), loss_of_outputs)
    >>> model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
    >>> opt = sl.Optimizer(sl.natural_gradient(0.1, damping=1e-2), model)
    >>> x, labels = jax.random.normal(jax.random.key(1), (30, 2)), jnp.arange(30) % 3
    >>> model, opt, loss = sl.train_step(loss_fn)(model, opt, x, labels)

    ```

    It is called as `loss_fn(model, inputs, targets)`. A tuple of inputs or targets is several
    arguments.

    **Arguments:**

    - `outputs_fn`: a function `outputs_fn(model, *inputs)` of one example that returns a real
        array.
    - `loss_of_outputs`: a function `loss_of_outputs(outputs, *targets)` of one example that
        returns a real scalar.

    ??? cite "Schraudolph, [Fast Curvature Matrix-Vector Products for Second-Order Gradient
        Descent](https://doi.org/10.1162/08997660260028683), 2002"
    """

    outputs_fn: Callable[..., Any]
    loss_of_outputs: Callable[..., Any]

    def on(self, inputs: Any, targets: Any = ()) -> Residuals:
        inputs, targets = as_arguments(inputs), as_arguments(targets)
        everything = (*inputs, *targets)
        rows, shared = divided("the outputs", everything, (True,) * len(everything))
        return Residuals((_OutputBlock(rows, shared, self, len(inputs)),))

    def axes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        def label(data: Any) -> Any:
            (flags,) = with_examples((data,), (True,))
            return jax.tree.map(lambda has: "outputs" if has else WHOLE, flags)

        return tuple(map(label, args)), {name: label(x) for name, x in kwargs.items()}


class _OutputBlock(AbstractBlock):
    """The mean of ℓ(F(w, x), y)."""

    rows: PyTree
    shared: PyTree
    loss: OutputLoss
    num_inputs: int = eqx.field(static=True)

    def outputs(self, params: PyTree, row: PyTree) -> Float[Array, " outputs"]:
        z = self._outputs(params, row)
        if not tree.is_inexact(z) or jnp.iscomplexobj(z):
            kind = f"dtype {z.dtype}" if tree.is_array(z) else f"type {type(z).__name__}"
            raise TypeError(f"`outputs_fn` must return a real floating array, got {kind}.")
        return z.reshape(-1)

    def _outputs(self, params: PyTree, row: PyTree) -> Any:
        return self.loss.outputs_fn(params, *eqx.combine(row, self.shared)[: self.num_inputs])

    def local(self, outputs: Float[Array, "examples outputs"]) -> Local:
        number, dtype = outputs.shape[0], outputs.dtype

        def loss_of(z: Array, row: PyTree) -> Array:
            targets = eqx.combine(row, self.shared)[self.num_inputs :]
            value = self.loss.loss_of_outputs(z, *targets)
            if jnp.shape(value) != ():
                raise ValueError(
                    "`loss_of_outputs` must return a scalar for one example, got shape "
                    f"{jnp.shape(value)}."
                )
            return jnp.asarray(value, dtype)

        def second(z: Array, row: PyTree) -> Array:
            return jax.jacfwd(jax.grad(loss_of))(z, row)

        values, grads = jax.vmap(jax.value_and_grad(loss_of))(outputs, self.rows)
        hessians = jax.vmap(second)(outputs, self.rows)
        roots = _root(hessians) * jnp.asarray(number**-0.5, dtype)
        return Local(jnp.mean(values), grads / number, roots, None)


def _root(matrices: Float[Array, "examples k k"]) -> Float[Array, "examples k k"]:
    """The symmetric square roots of matrices without negative eigenvalues."""
    values, vectors = jnp.linalg.eigh((matrices + jnp.swapaxes(matrices, -1, -2)) / 2)
    roots = jnp.sqrt(jnp.maximum(values, 0))
    return jnp.einsum("nij,nj,nkj->nik", vectors, roots, vectors)
