"""Rules that normalize rows and columns: NorMuon, and the norms of Scion."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ... import fields, tree
from ..._core.engine.matrices import matrices
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where import matrix
from ...where.layout import LayoutLike
from ...where.resolve import Where
from .._base import AbstractRule, AbstractTransform, advise_keywords, chain
from .._layout import AbstractByLayout, columns, inputs, matrices_as_text, warn_guessed
from ..momentum.momentum import Ema, Trace
from ..momentum.sign import ScaleBySign
from ..shaping.scale import Scale
from ._newton_schulz import divided_by_norm
from ._routing import chosen, descent, rate_beside_muon, with_adam_elsewhere
from .orthogonalize import Orthogonalize


class ScaleByRowRmsState(eqx.Module):
    """The state of `ScaleByRowRms`."""

    nu: PyTree[Float[Array, "..."]] = fields.per_param()
    """At each leaf a tuple of one array: for each matrix the mean of squares of each row."""


class ScaleByRowRms(AbstractRule[ScaleByRowRmsState]):
    """NorMuon's scaling: divides each row of a matrix by its root mean square over all steps.

        vₜ = β₂·vₜ₋₁ + (1 − β₂)·mean over the inputs of |gₜ|²
        uₜ = ûₜ·‖gₜ‖ / ‖ûₜ‖   with   ûₜ = gₜ / (√vₜ + ε)

    A row holds the weights of one output. The norm of the matrix does not change. After
    `sl.Orthogonalize()` it makes the updates of all outputs equally large. Layouts are read as in
    `sl.where.matrix`, and other leaves are refused.

    **Arguments:**

    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, ≥ 0.
    - `layout`: the layout of arrays that would otherwise be read wrongly.

    ??? cite "Li et al., [NorMuon](https://arxiv.org/abs/2510.05491), 2025. The paper scales u to a
        root mean square of 0.2. As in its code, the norm stays that of g, so the scale of
        `sl.Orthogonalize` is kept."
    """

    b2: fields.Number = fields.hyperparameter(0.95, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-10, within="[0, inf)")
    layout: LayoutLike = fields.layout_field()

    over: ClassVar[str] = "leaf"
    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByRowRmsState:
        tree.check_inexact(params)
        views = matrices(self, params)
        warn_guessed(self, params)
        leaves, structure = jax.tree.flatten(params)
        nu = [tree.zeros_of_sums(m.read(x), [2]) for m, x in zip(views, leaves, strict=True)]
        return ScaleByRowRmsState(structure.unflatten(nu))

    def notes(self, params: Params) -> tuple[str | None, ...]:
        return matrices_as_text(self, params)

    def plans(self, params):
        return matrices(self, params)

    def begin(self, state):
        self.c2 = 1 - self.b2

    def advance(self, g, leaf):
        x = self.plan.read(g)
        count = max(self.plan.columns, 1)
        self.squares = tree.bounded(jnp.sum(tree.abs_squared(x), -1, keepdims=True) / count)
        leaf.nu = (tree.moved(leaf.nu[0], self.squares, self.c2),)

    def direction(self, g, leaf):
        (nu,) = leaf.nu
        # A row that was always zero stays so, and must not dwarf the others.
        by_row = jnp.where(nu == 0, 0, 1 / (tree.root(tree.positive(nu)) + self.eps))
        # The sum of the squares of û follows from those of the rows, without a second pass.
        largest = jax.lax.stop_gradient(jnp.max(by_row, (-2, -1), keepdims=True, initial=0))
        relative = by_row / jnp.where(largest == 0, 1, largest)
        before = jnp.sum(self.squares, (-2, -1), keepdims=True)
        after = jnp.sum(self.squares * jnp.square(relative), (-2, -1), keepdims=True)
        # √before / √after, not √(before / after), whose derivative would be NaN at zero.
        divisor = tree.root(after)
        kept = tree.root(before) / jnp.where(divisor == 0, 1, divisor)
        return self.plan.write(self.plan.read(g) * (relative * kept))


class NormalizeColumns(AbstractByLayout[None]):
    """Scales each column to a root mean square of 1: u ↦ u / ((1 + ε)·rms(u)) for each input.

    A column holds the weights from one input to all outputs, such as the vector of one token in an
    embedding. A vector, such as a bias, is one column, and a scalar becomes its sign. This is the
    steepest direction for one-hot inputs.

    **Arguments:**

    - `eps`: ε, ≥ 0, relative to the root mean square, so that the result does not depend on the
        size of the updates. Zeros stay zero.
    - `layout`: the layout of arrays that would otherwise be read wrongly, as in `sl.where.matrix`.

    ??? cite "Pethick et al., [Training Deep Learning Models with Norm-Constrained
        LMOs](https://arxiv.org/abs/2502.07529), 2025"
    """

    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    layout: LayoutLike = fields.layout_field()

    def plans(self, params):
        return columns(self, params)

    def direction(self, g, leaf):
        if g.size == 0:
            return g
        shape, axes = self.plan
        root = math.sqrt(math.prod(shape[a] for a in axes))
        return (divided_by_norm(g.reshape(shape), self.eps, axes) * root).reshape(g.shape)


class ScaleByFanIn(AbstractByLayout[None]):
    """Divides the update of each layer by its number of inputs: u ↦ u / inputs.

    After `sl.ScaleBySign()` it is the steepest direction if only the largest change of an output
    counts, as in Scion's last layer. Vectors have no inputs and stay as they are.

    **Arguments:**

    - `layout`: the layout of arrays that would otherwise be read wrongly, as in `sl.where.matrix`.

    ??? cite "Pethick et al., [Training Deep Learning Models with Norm-Constrained
        LMOs](https://arxiv.org/abs/2502.07529), 2025"
    """

    layout: LayoutLike = fields.layout_field()

    def plans(self, params):
        return inputs(self, params)

    def direction(self, g, leaf):
        return g * (1 / self.plan)


@advise_keywords
def norm_muon(
    learning_rate: Hyperparameter,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    b1: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.95,
    eps: Hyperparameter = 1e-7,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = True,
    preconditioning: str = "frobenius",
    scale: str | None = "original",
    compute_dtype: Any | None = None,
    where: WhereLike | None = None,
    layout: LayoutLike = None,
    adam_learning_rate: Hyperparameter | None = None,
    adam_b1: Hyperparameter = 0.9,
    adam_b2: Hyperparameter = 0.999,
    adam_weight_decay: Hyperparameter = 0.0,
) -> AbstractTransform:
    """NorMuon for the matrices of hidden layers, and AdamW for everything else.

        p ↦ p − η·(s·r·D·orth(m) + λ·p)

    It is `muon` with `ScaleByRowRms` after `Orthogonalize`: the diagonal matrix D makes the updates
    of all outputs of a layer equally large, and r keeps the norm of the matrix.

    **Arguments:**

    - `learning_rate`: η.
    - `ns_coeffs`, `ns_steps`, `b1`: as in `muon`.
    - `b2`: the decay of the mean of squares of each row, in [0, 1).
    - `eps`, `weight_decay`, `decay_where`, `mu_dtype`, `nesterov`, `preconditioning`: as in `muon`.
    - `scale`: as in `muon`. The paper's root mean square of 0.2 is `scale="match_rms_adamw"`, up to
        the deviation of the singular values from 1.
    - `compute_dtype`, `where`, `layout`, `adam_learning_rate`, `adam_b1`, `adam_b2`,
        `adam_weight_decay`: as in `muon`.

    **Returns:** a partition of the chain of `Trace`, `Orthogonalize`, `ScaleByRowRms`,
    `AddDecayedWeights` and `ScaleByLearningRate`, and of AdamW.

    ??? cite "Li et al., [NorMuon](https://arxiv.org/abs/2510.05491), 2025"
    """
    orthogonalize = Orthogonalize(
        ns_coeffs,
        ns_steps,
        scale,
        compute_dtype,
        preconditioning=preconditioning,
        eps=eps,
        layout=layout,
    )
    rule = Trace(b1, nesterov, mu_dtype) | orthogonalize | ScaleByRowRms(b2, layout=layout)
    rule = descent(rule, learning_rate, weight_decay, decay_where)
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    default = rate_beside_muon(learning_rate, scale)
    return with_adam_elsewhere(rule, "norm_muon", chosen(where, layout), default, *adam_numbers)


@advise_keywords
def scion(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    radius: Hyperparameter = 50.0,
    output_radius: Hyperparameter = 3000.0,
    rest_radius: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    mu_dtype: Any | None = None,
    *,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    eps: Hyperparameter = 1e-7,
    preconditioning: str = "frobenius",
    compute_dtype: Any | None = None,
    where: WhereLike | None = None,
    layout: LayoutLike = None,
) -> AbstractTransform:
    """Scion: each layer takes the steepest step of a fixed norm, in a norm that suits the layer.

        p ↦ p − η·(ρ·lmo(m) + λ·p)   with   mₜ = β·mₜ₋₁ + (1 − β)·gₜ

    lmo(m) is √(outputs / inputs)·orth(m) for the matrices of hidden layers, sign(m) / inputs for
    the output layer, and for everything else m with columns of root mean square 1: the vectors of
    the tokens in an embedding, and biases. No parameter goes to AdamW. The output layer is what
    `where` leaves out: `where=~sl.where.path("head.**")`.

    With λ = 1 the step is p ↦ (1 − η)·p − η·ρ·lmo(m), and p stays in the ball of radius ρ: this is
    the constrained Scion of the paper. The radii come from its GPT-2, with η = 0.00036.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`: β, the decay of the mean of gradients, in [0, 1). The paper calls 1 − β α.
    - `radius`: ρ of the matrices of hidden layers, > 0.
    - `output_radius`: ρ of the other matrices.
    - `rest_radius`: ρ of everything else.
    - `weight_decay`: λ, ≥ 0. Defaults to no decay, the unconstrained Scion.
    - `decay_where`: which parameters decay. Defaults to all.
    - `mu_dtype`: the dtype of the mean.
    - `ns_coeffs`, `ns_steps`, `eps`, `preconditioning`, `compute_dtype`, `layout`: as in `muon`.
    - `where`: which matrices belong to hidden layers. Defaults to all.

    **Returns:** a partition of three chains: with `Orthogonalize`, with `ScaleBySign` and
    `ScaleByFanIn`, and with `NormalizeColumns`.

    ??? cite "Pethick et al., [Training Deep Learning Models with Norm-Constrained
        LMOs](https://arxiv.org/abs/2502.07529), 2025. For a convolution the paper divides by the
        kernel's size, and we by its root: it is one matrix, outputs × (inputs · kernel)."
    """

    def step(*direction: AbstractTransform, radius: Hyperparameter) -> AbstractTransform:
        links = chain(Ema(b1, False, mu_dtype), *direction, Scale(radius))
        return descent(links, learning_rate, weight_decay, decay_where)

    spectral = Orthogonalize(
        ns_coeffs,
        ns_steps,
        "spectral",
        compute_dtype,
        preconditioning=preconditioning,
        eps=eps,
        layout=layout,
    )
    hidden = step(spectral, radius=radius)
    output = step(ScaleBySign(), ScaleByFanIn(layout=layout), radius=output_radius)
    rest = step(NormalizeColumns(layout=layout), radius=rest_radius)
    matrices = matrix(layout)
    groups: Mapping[Where, AbstractTransform] = {chosen(where, layout): hidden, matrices: output}
    if where is None:
        return rest.partition({matrices: hidden}, names=("hidden",))
    return rest.partition(groups, names=("hidden", "output"))
