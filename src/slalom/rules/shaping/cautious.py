"""Updates that never point against the gradient."""

from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Real

from ... import fields
from ..._core.protocol.rule import AbstractRule


class Cautious(AbstractRule[None]):
    """Drops the entries of an update that point against the gradient.

        u ↦ u·φ / max(mean φ, c)   with φ = 1 where Re(ū·g) > 0, and 0 elsewhere

    g is the gradient of the loss, and the mean is taken over one leaf: the remaining entries are
    scaled up to make up for the dropped ones. Momentum makes some entries of an update point
    against the current gradient, and such entries increase the loss to first order. A complex entry
    is one vector of two numbers.

    Use it between a rule and `ScaleByLearningRate`, where updates still point along the gradients.
    `sl.train_step` passes the gradient itself; otherwise pass it: `opt.step(model, grads,
    grad=grads)`. Weight decay that comes before is dropped where the whole update is. For decay
    that is cautious itself, use `sl.AddDecayedWeights(λ, cautious=True)` after this link.

    ```python
    >>> tx = sl.ScaleByAdam() | sl.Cautious() | sl.ScaleByLearningRate(1e-3)
    >>> updates, grads = jnp.array([1.0, -1.0, 2.0, 3.0]), jnp.array([1.0, 1.0, 0.1, 0.0])
    >>> sl.Cautious().update(updates, None, context=sl.Context(step=0, grad=grads))[0]
    Array([2., 0., 4., 0.], dtype=float32)

    ```

    **Arguments:**

    - `min_fraction`: c, the lower bound of the mean, in (0, 1]. With 1, no entry is scaled up.

    ??? cite "Liang et al., [Cautious Optimizers: Improving Training with One Line of
        Code](https://arxiv.org/abs/2411.16085), 2024"
    """

    min_fraction: fields.Number = fields.hyperparameter(1e-3, within="(0, 1]")

    over: ClassVar[str] = "leaf"
    needs: ClassVar[tuple[str, ...]] = ("grad",)
    keeps_zeros: ClassVar[bool] = True

    def direction(self, g, leaf):
        agree = ~(agreement(g, self.grad) <= 0)  # also NaN, which must not become 0
        share = jnp.sum(agree, dtype=self.min_fraction.dtype) / float(max(g.size, 1))
        return jnp.where(agree, g * (1 / jnp.maximum(share, self.min_fraction)), 0)


def agreement(a: Array, b: Array) -> Real[Array, "..."]:
    """A number with the sign of Re(ā·b) at each entry."""
    # The product of two tiny numbers underflows, but not that of their signs.
    a, b = jnp.sign(a), jnp.sign(b)
    if jnp.iscomplexobj(a) or jnp.iscomplexobj(b):
        return a.real * b.real + a.imag * b.imag
    return a * b
