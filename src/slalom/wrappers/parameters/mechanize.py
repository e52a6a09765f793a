"""A scale of the updates that is learned while training."""

import math
from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PyTree

from ... import fields, tree
from ..._core.protocol.bases import AbstractParameterWriter
from ..._core.protocol.context import Context
from ..._core.protocol.parts import Part, instances, segments
from ..._core.protocol.wrapper import AbstractWrapper, refuse_constraints, run_if
from ..._core.protocol.writer import Writer
from ...tree.types import Gradients, Params, Scalar, Updates


class MechanizeState(eqx.Module):
    """The state of `Mechanize`."""

    inner: PyTree
    """The inner transform's state."""
    scales: Float[Array, "*betas"] = fields.until_reset()
    """The scale s that each β has chosen. Their sum scales the updates."""
    largest: Float[Array, "*betas"] = fields.until_reset()
    """The decaying maximum m of |h|."""
    variance: Float[Array, "*betas"] = fields.until_reset()
    """The decaying sum v of h²."""
    reward: Float[Array, "*betas"] = fields.until_reset()
    """The decaying sum r of h·s."""
    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")
    """The parameters that the run started from."""


class Mechanize(AbstractWrapper[MechanizeState]):
    """Mechanic: the inner transform, with a scale of its updates that is learned while training.

    Made by `tx.mechanize`, which describes the arguments.

    With the gradient g, the start x₀, the sum Δ of the updates u of the inner transform, and
    vectors s, m, v and r with an entry for each βᵢ = 1 − 10⁻ⁱ,

        h = −⟨g + λ·(Σs)·‖g‖/‖x‖·x, Δ⟩
        m ← max(β·m, |h| + ε),   v ← β²·v + h²,   r ← β·r + s·clip(h, ±m')
        s ← (s₀·m/n + max(r, 0)) / (√v + ε)
        Δ ← Δ + u,   x ← x₀ + (Σs)·Δ

    where m' is the old m and n the number of β. Δ is not stored: it is (x − x₀)/(Σs + ε) before the
    step. Norms and the product are over all parameters that this transform acts on.

    The learning rate inside only shapes a schedule: use a peak of 1. Mechanic does not suit rules
    that normalize their updates, such as LAMB.

    The clip by m' is not in the paper. The authors added it later to their code. Differs from
    Optax: scalars are in at least float32, even for bfloat16 parameters.

    In the first step h is 0, and the paper's formula would leave s at 0. As in Optax, ε is added to
    |h|, so the first scale is s₀, and stays s₀ until there is a reward. In the authors' code m
    starts at 1e-6 instead, and s₀ is 1e-8: with ε = 1e-8 the first scale is 100·s₀, about 1e-6 too,
    and the second one s₀ and the reward. There, the first step also has no decay in h.

    ??? cite "Cutkosky, Defazio & Mehta, [Mechanic: A Learning Rate
        Tuner](https://arxiv.org/abs/2306.00144), 2023"
    """

    needs: ClassVar[tuple[str, ...]] = ("params",)
    follows_loss: ClassVar[bool] = True

    weight_decay: fields.Number = fields.hyperparameter(1e-2, within="[0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="(0, inf)")
    s_init: fields.Number = fields.hyperparameter(1e-6, within="(0, inf)")
    num_betas: int = fields.count_field(6)

    def __check_init__(self):
        refuse_constraints(
            self.inner,
            ".mechanize",
            "Write it after `.mechanize`: `tx.mechanize(...) | {link}(...)`.",
        )
        for part in instances(self.inner, AbstractParameterWriter):
            raise ValueError(
                f"'{part.name}' inside `.mechanize` would write parameters that are never "
                "reached, since its updates are scaled. Write it outside: "
                f"`tx.mechanize(...).{segments(part.module)[0]}(...)`."
            )

    def init(self, params: Params) -> MechanizeState:
        def vector(value: Scalar | float = 0.0) -> Array:
            return jnp.zeros(self.num_betas, tree.canonical_float()) + value

        first = tree.as_canonical(self.at(Context(step=0)).s_init)
        return MechanizeState(
            inner=self.inner.init(params),
            scales=vector(first),
            largest=vector(),
            variance=vector(),
            reward=vector(),
            init_params=tree.copy(params),
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, MechanizeState]:
        state, context = here.state, here.context
        params = self.demand("params", here.params)
        grads = updates
        updates, inner = self.inner_part(here).run(write.returning, grads)

        def advance(updates: Updates, old: tuple[Array, ...]) -> tuple[Any, tuple[Array, ...]]:
            seen = write.full(params)
            scales, *_ = new = self._scaled(grads, seen, state, context)
            before = jnp.sum(state.scales)
            after = jnp.sum(scales)
            eps = tree.as_canonical(self.at(context).eps)
            # x₀ + s'·(Δ + u) − x with Δ = (x − x₀)/(s + ε), without the sum that loses its digits.
            numbers = SimpleNamespace(away=(after - before - eps) / (before + eps), scale=after)

            def rule(now, u, p, start):
                return now.away * (p - start) + now.scale * u

            change = tree.map_leaves(rule, (updates, seen, state.init_params), numbers)
            return write(params, change), new

        old = (state.scales, state.largest, state.variance, state.reward)
        wrote = self.inner.has_updated(inner)
        result, new = run_if(wrote, advance, write, params, updates, old)
        return result, MechanizeState(inner, *new, init_params=state.init_params)

    def _scaled(
        self, grads: Updates, params: Params, state: MechanizeState, context: Context
    ) -> tuple[Array, Array, Array, Array]:
        """The new scales, maxima, variances and rewards."""
        now = self.at(context)
        decay, eps, first = map(tree.as_canonical, (now.weight_decay, now.eps, now.s_init))
        total = jnp.sum(state.scales)
        # XLA keeps in memory what a sum and the step both read. So these sums read −g² and x₀ − x,
        # where the step has x − x₀ and rules such as Adam have g².
        negative = tree.map_leaves(lambda _, g: -g, (grads,))
        # Bounded, as the squares below: one huge gradient must not leave infinity in the state.
        norm = tree.as_canonical(tree.root(tree.bounded(-tree.inner(grads, negative))))
        size = tree.as_canonical(tree.root(tree.squared_norm(params)))
        numbers = SimpleNamespace(decay=decay * total * norm / (size + eps))
        # Not bounded entry by entry, or XLA would write them to memory.
        decayed = tree.map_leaves(lambda now, g, p: g + now.decay * p, (grads, params), numbers)
        back = tree.map_leaves(lambda _, p, start: start - p, (params, state.init_params))
        h = tree.as_canonical(tree.inner(decayed, back)) / (total + eps)
        limit = math.sqrt(float(jnp.finfo(h.dtype).max) / 4)
        h = jnp.clip(h, -limit, limit)

        betas = 1 - 0.1 ** jnp.arange(1, self.num_betas + 1, dtype=h.dtype)
        clipped = jnp.clip(h, -state.largest, state.largest)
        largest = tree.running_maximum(betas * state.largest, jnp.abs(h) + eps)
        variance = tree.bounded(betas**2 * state.variance + h**2)
        reward = betas * state.reward + clipped * state.scales
        wealth = first / self.num_betas * largest + jnp.maximum(reward, 0)
        return wealth / (tree.root(variance) + eps), largest, variance, reward
