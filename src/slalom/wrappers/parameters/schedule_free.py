"""Averages in place of a schedule."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree, Real

from ... import fields, tree
from ..._core.fields.schedule import hyperparameter_fields, read_number
from ..._core.protocol.bases import AbstractParameterWriter
from ..._core.protocol.chain import Chain
from ..._core.protocol.context import Context
from ..._core.protocol.parts import Part, parts, segments, transforms
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import (
    AbstractPacedWrapper,
    AbstractWrapper,
    refuse_constraints,
    run_if,
)
from ..._core.protocol.writer import Writer
from ..._core.text.printing import code, shortest
from ...rules.momentum.momentum import Trace
from ...tree.paths import dotted, leaf_paths, whole
from ...tree.types import Gradients, Params, Scalar, Updates
from ...where.masks import mask
from ...where.resolve import Where, as_where_or_none
from .project import Project


class ScheduleFreeState(eqx.Module):
    """The state of `ScheduleFree`."""

    b1: Float[Array, ""]
    """The β₁ with which the parameters were written."""
    inner: PyTree
    """The inner transform's state."""
    age: Int[Array, "*leaves"] = fields.per_leaf()
    """The number of averaged steps."""
    max_rate: Float[Array, "*leaves"] = fields.per_leaf()
    """The largest learning rate so far."""
    relative_weight_sum: Float[Array, "*leaves"] = fields.per_leaf()
    """The sum of the weights so far, over γ^p of the largest learning rate."""
    z: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")
    """The parameters that the inner transform steps."""
    mean_l1: Float[Array, ""] | None = fields.until_reset()
    """The exponential average of ‖g‖₁, from 0; `None` without `polyak_beta`."""
    mean_l1_weight: Float[Array, ""] | None = fields.until_reset()
    """The sum of the weights in that average."""


class ScheduleFree(AbstractWrapper[ScheduleFreeState], AbstractParameterWriter[ScheduleFreeState]):
    """The inner transform, with an average of its iterates in place of a decaying learning rate.

    Made by `tx.schedule_free`, which describes the arguments.

    The gradient is taken at y, the inner transform steps z, and x is the weighted mean of all z.
    With the updates u that the inner transform returns for the gradient at yₜ,

        zₜ₊₁ = zₜ + uₜ
        xₜ₊₁ = xₜ + c·(zₜ₊₁ − xₜ)      with   c = wₜ / (w₀ + … + wₜ),   wₜ = (t + 1)^r · γₜ^p
        yₜ₊₁ = (1 − β₁)·zₜ₊₁ + β₁·xₜ₊₁

    γₜ is the largest learning rate up to step t. In the first `average_after` steps c is 1, so x is
    z, and their weights are left out of the sum. The model contains y, and `opt.eval_params(model)`
    returns the model with x. The state contains z alone: x is computed from y and z, in at least
    float32. Weight decay in the inner transform acts on y, as in the paper's experiments.

    γ is the learning rate of the link inside that acts on the parameter, on that link's clock, so
    the groups of a partition are weighted by their own rates. Every parameter that is updated must
    have exactly one such link. If the inner transform skips steps, as `.every_k` does, only its
    updates count.

    Averaging takes the place of momentum, so the inner transform should have none: use
    `sl.schedule_free_sgd`, `sl.schedule_free_adamw`, or `b1=0.0` in other rules. Use a constant
    learning rate, with a warm-up.

    The average is as precise as y. In bfloat16 a step of y that is smaller than half a unit in the
    last place is lost, so x stops moving early, although z is kept in float32. Write y in full
    precision: `tx.schedule_free().write("master")`.

    Schedule-Free+ needs no learning rate. With `polyak`, uₜ and γₜ come from the inner transform
    times

        ρₜ = max(0, f(yₜ) + ⟨gₜ, zₜ − yₜ⟩) / (√(π/2)·‖gₜ‖₁)

    which is Polyak's step for a loss f whose minimum is about 0, where the inner transform is Adam
    with the learning rate 1. Both sums are over all parameters that this transform acts on, and f
    is the loss of the whole batch. A constant that is added to the loss makes steps longer, and a
    loss below 0 can stop them. With `polyak_beta`, ‖gₜ‖₁ is its exponential average, with the bias
    corrected. With `weight_decay`, zₜ₊₁ = zₜ + uₜ − γₜ²·λ·yₜ. The paper keeps Adam's momentum,
    `sl.adam(1.0, b1=0.9, b2=0.95).schedule_free(polyak=True)`, and raises β₁ from 0.9 to 0.965
    while training, which a schedule as `b1` does.

    The paper weights by γₜ², which is the same unless the learning rate decays. The largest rate so
    far and r come from the authors' code. Differs from that code: it corrects the bias of
    `polyak_beta` twice, takes β₁·(zₜ − xₜ) for zₜ − yₜ, which differs while β₁ changes, and divides
    by zero where all gradients are zero; here such a step has no effect. Differs from Optax: wₜ is
    the rate that the step uses (Optax evaluates schedules one step later), sums are never kept in
    half precision, and the learning rate is not passed twice.

    ??? cite "Defazio et al., [The Road Less Scheduled](https://arxiv.org/abs/2405.15682), 2024;
        Defazio, [Schedule-Free+](https://arxiv.org/abs/2605.19095), 2026, for `polyak`; Defazio,
        [Why Gradients Rapidly Increase Near the End of
        Training](https://arxiv.org/abs/2506.02285), 2025, for `weight_decay`"
    """

    passes_gradients: ClassVar[bool] = True

    b1: fields.Number = fields.hyperparameter(0.9, within="(0, 1]")
    weight_lr_power: fields.Number = fields.hyperparameter(2.0, within="[0, inf)")
    r: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    state_dtype: np.dtype | None = fields.dtype_field()
    average_after: int = fields.count_field(0, least=0, kw_only=True)
    polyak: bool = eqx.field(default=False, static=True, kw_only=True)
    polyak_beta: fields.OptionalNumber = fields.hyperparameter(None, within="[0, 1)", kw_only=True)
    weight_decay: fields.OptionalNumber = fields.hyperparameter(
        None, within="[0, inf)", kw_only=True
    )
    decay_where: Where | None = eqx.field(
        default=None, static=True, converter=as_where_or_none, kw_only=True
    )

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        return ("value",) if self.polyak else ()

    @property
    def over(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        return "all" if self.polyak else "tree"

    @property
    def follows_loss(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        return self.polyak

    def __check_init__(self):
        if self.decay_where is not None and self.weight_decay is None:
            raise ValueError(
                "`.schedule_free` has `decay_where` without a `weight_decay`. Add one, or remove "
                "`decay_where`."
            )
        if self.polyak_beta is not None and not self.polyak:
            raise ValueError(
                "`.schedule_free` has `polyak_beta`, which averages the gradient norm for Polyak's "
                "step size, without `polyak=True`. Add it, or remove `polyak_beta`."
            )
        refuse_constraints(self.inner, ".schedule_free", "Leave out one of the two.")
        if isinstance(self.inner, Project) and not self.inner.fn.is_convex:
            raise ValueError(
                "`.schedule_free` averages parameters, and an average leaves the set "
                f"`{code(self.inner.fn)}`, which is not convex. Use "
                "`tx.average(...).project(...)`, which projects the average, too."
            )
        for part in parts(self.inner):
            if self.polyak and isinstance(part.module, AbstractPacedWrapper):
                (method,) = segments(part.module)
                raise ValueError(
                    f"'{part.name}' inside `.schedule_free(polyak=True)` may step with other "
                    "gradients than those that determine the size of the step. Write it outside: "
                    f"`tx.schedule_free(polyak=True).{method}(...)`."
                )
            projects = part.module is self.inner and isinstance(self.inner, Project)
            if isinstance(part.module, AbstractParameterWriter) and not projects:
                (method,) = segments(part.module)
                instead = f"Write it outside: `tx.schedule_free().{method}(...)`."
                if method == "outer":
                    instead = "Leave out one of them: the average takes the place of slow weights."
                raise ValueError(
                    f"'{part.name}' inside `.schedule_free` would write the parameters at which "
                    f"gradients are taken, and not those that are averaged. {instead}"
                )

    def init(self, params: Params) -> ScheduleFreeState:
        links = self._links(params)
        # One number for all leaves, or one for each if their learning rates may differ.
        distinct = {part.name for part in links if part is not None}
        shape = () if len(distinct) < 2 else (len(links),)
        return ScheduleFreeState(
            b1=jnp.array(self.at(Context(step=0)).b1, tree.canonical_float(), copy=True),
            inner=self.inner.init(params),
            age=jnp.zeros(shape, jnp.int32),
            max_rate=jnp.zeros(shape, tree.canonical_float()),
            relative_weight_sum=jnp.zeros(shape, tree.canonical_float()),
            z=tree.copy(params, lambda leaf: tree.storage_dtype(leaf, self.state_dtype)),
            mean_l1=self._fresh_mean(),
            mean_l1_weight=self._fresh_mean(),
        )

    def _fresh_mean(self) -> Array | None:
        return None if self.polyak_beta is None else jnp.zeros((), tree.canonical_float())

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, ScheduleFreeState]:
        state, context = here.state, here.context
        params = self.demand("params", here.params)
        now = self.at(context)
        rate = self._rates(state, context, params)
        factor = None
        if self.polyak:
            gap = self._gap(updates, state.z, write.full(params), context)
            size, state = self._l1_norm(now, updates, state)
            size = float(np.sqrt(np.pi / 2)) * size
            factor = tree.bounded(jnp.where(size > 0, gap / jnp.where(size > 0, size, 1), 0))
            rate = rate * factor
        part = self.inner_part(here)
        stepped = None
        if isinstance(self.inner, Project):
            part, updates, stepped = self.inner.seen_from(state.z, part, updates)
        updates, inner = part.run(write.returning, updates)

        def advance(updates: PyTree, old: ScheduleFreeState) -> tuple[Any, ScheduleFreeState]:
            if factor is not None:
                updates = tree.scale(updates, factor)
            updates = self._decayed(now, updates, rate, write.full(params))
            share, new = self._weighed(now, rate, old)
            if stepped is None:
                z = tree.map_leaves(lambda _, z, u: z + u, (old.z, updates), like=(old.z,))
            else:
                z = tree.cast_like(stepped(updates), old.z)
                updates = tree.map_leaves(lambda _, new, old: new - old, (z, old.z))
            # y moves to (1 − β)·z + β·x without x: x is (y − (1 − β')·z)/β' with the old z = z − u
            # and the β' of the last step. If β = β', this is y + c·(z − y) + (1 − c)·(1 − β)·u.
            b1 = tree.as_canonical(now.b1)
            ratio = b1 / old.b1
            numbers = SimpleNamespace(
                to_z=share + (1 - ratio) * (1 - share), ahead=(ratio - b1) * (1 - share)
            )

            def move(now, y, z, u):
                return now.to_z * (z - y) + now.ahead * u

            change = tree.map_leaves(move, (write.full(params), z, updates), numbers)
            return write(params, change), dataclasses.replace(new, b1=b1, z=z)

        wrote = self.inner.has_updated(inner)
        # Not `state` itself: the state of the inner transform needs no branch.
        before = dataclasses.replace(state, inner=None)
        result, after = run_if(wrote, advance, write, params, updates, before)
        return result, dataclasses.replace(after, inner=inner)

    def _gap(self, grads: Gradients, z: Params, y: Params, context: Context) -> Scalar:
        """max(0, f + ⟨g, z − y⟩): how far above 0 the loss is at z, by its tangent at y."""
        value = self.demand("value", context.value)
        ahead = tree.inner(grads, tree.map_leaves(lambda _, z, y: z - y, (z, y)))
        return jnp.maximum(tree.as_canonical(value) + tree.as_canonical(ahead), 0)

    def _l1_norm(
        self, now: SimpleNamespace, grads: Gradients, state: ScheduleFreeState
    ) -> tuple[Scalar, ScheduleFreeState]:
        """‖g‖₁, or its average."""
        absolute = [jnp.sum(jnp.abs(g)) for g in jax.tree.leaves(tree.widened(grads))]
        # An infinite sum would stay infinite in the average.
        size = tree.bounded(tree.as_canonical(tree.sum_of(absolute)))
        if state.mean_l1 is None or state.mean_l1_weight is None:
            return size, state
        beta = tree.as_canonical(now.polyak_beta)
        # The weights are summed too: they correct the bias also of a scheduled β.
        mean = beta * state.mean_l1 + (1 - beta) * size
        weight = beta * state.mean_l1_weight + (1 - beta)
        return mean / weight, dataclasses.replace(state, mean_l1=mean, mean_l1_weight=weight)

    def _decayed(
        self, now: SimpleNamespace, updates: Updates, rate: Real[Array, "*leaves"], y: Params
    ) -> Updates:
        """The updates with the decay of `weight_decay`."""
        if self.weight_decay is None:
            return updates
        decay = tree.as_canonical(now.weight_decay) * tree.bounded_square(rate)
        if self.decay_where is not None:
            decay = jnp.where(jnp.array(mask(self.decay_where, y)), decay, 0)

        def leaf(now, u, y):
            return jnp.where(now.decay == 0, u, u - now.decay * y)

        return tree.map_leaves(leaf, (updates, y), SimpleNamespace(decay=decay))

    def _weighed(
        self, now: SimpleNamespace, rate: Real[Array, "*leaves"], old: ScheduleFreeState
    ) -> tuple[Array, ScheduleFreeState]:
        """The share of the new z in the mean, and the state with the new ages, rates and sums."""
        power, r = tree.as_canonical(now.weight_lr_power), tree.as_canonical(now.r)
        age = tree.increment(old.age)
        largest = tree.running_maximum(old.max_rate, jnp.abs(rate))
        # The powers of tiny and of huge rates are out of range, those of their ratio are not. At
        # zero the derivative with respect to the power would be NaN.
        was_zero = old.max_rate == 0
        ratio = jnp.where(was_zero, 1, old.max_rate / jnp.where(was_zero, 1, largest))
        weight = jnp.where((largest == 0) & (power != 0), 0, age.astype(r.dtype) ** r)
        averages = age > self.average_after
        weight = jnp.where(averages, weight, 0)
        total = old.relative_weight_sum * ratio**power + weight
        share = jnp.where(total == 0, 0, weight / jnp.where(total == 0, 1, total))
        share = jnp.where(averages, share, 1)
        new = {"age": age, "max_rate": largest, "relative_weight_sum": total}
        return share, dataclasses.replace(old, **new)

    def eval_params(self, here: Part) -> Params:
        def average(now, y, z):
            return y + now.beyond * (y - z)

        beyond = SimpleNamespace(beyond=1 / here.state.b1 - 1)
        return tree.map_leaves(average, (here.params, here.state.z), beyond)

    # --- the learning rates inside ----------------------------------------------------------

    def _links(
        self, params: Params, state: PyTree = None, context: Context | None = None
    ) -> list[Part | None]:
        """The link that sets the learning rate of each parameter; `None` where nothing updates it.

        **Raises:** a `ValueError` for a parameter with no such link, or with two.
        """
        paths = leaf_paths(params)
        by_path: dict[str, Part] = {}
        for part in transforms(self.inner, state, context, params):
            if not part.module.sets_learning_rate:
                continue
            keys = (key for key, _ in jax.tree_util.tree_leaves_with_path(part.params))
            for path in dict.fromkeys(dotted(whole(key)) for key in keys):
                if path in by_path:
                    raise ValueError(
                        f"`.schedule_free` weights '{path}' by its learning rate, but both "
                        f"'{by_path[path].name}' and '{part.name}' set one. Keep only one; for "
                        "another factor, use `sl.Scale`."
                    )
                by_path[path] = part
        still = self.inner.signs(params)
        for path, sign in zip(paths, still, strict=True):
            if path not in by_path and sign != 0:
                raise ValueError(
                    f"`.schedule_free` weights '{path}' by its learning rate, but no link inside "
                    "sets one. Add it inside: `(tx | "
                    "sl.ScaleByLearningRate(1e-3)).schedule_free()`."
                )
        return [by_path.get(path) for path in paths]

    def _rates(
        self, state: ScheduleFreeState, context: Context, params: Params
    ) -> Real[Array, "*leaves"]:
        """The learning rate of this step: a number, or a vector with an entry for each leaf."""
        links = self._links(params, state.inner, context)
        by_name = {part.name: part for part in links if part is not None}
        rates = {
            name: tree.as_canonical(read_number(part.module, "learning_rate", part.context))
            for name, part in by_name.items()
        }
        if len(rates) < 2:
            return next(iter(rates.values()), tree.as_canonical(0.0))
        return jnp.stack([tree.as_canonical(0.0) if p is None else rates[p.name] for p in links])

    def warnings(self, params: Params) -> Iterator[str]:
        for part in transforms(self.inner, params=params):
            field = "decay" if isinstance(part.module, Trace) else "b1"
            declared = [f.name for f in hyperparameter_fields(part.module)]
            momentum = getattr(part.module, field) if field in declared else None
            if isinstance(momentum, float) and momentum != 0 and not self.polyak:
                instead = "Write `b1=0.0`, or use `sl.schedule_free_adamw`."
                yield (
                    f"'{part.name}' has momentum, {field}={shortest(momentum)}, and "
                    "`.schedule_free` already averages in its place. "
                    f"{'Remove it.' if field == 'decay' else instead}"
                )


def project(inner: AbstractTransform, fn: Any, where: Any) -> AbstractTransform:
    """A transform with a projection of the parameters that it steps: z in a `ScheduleFree`."""
    if isinstance(inner, ScheduleFree):
        return dataclasses.replace(inner, inner=Project(inner.inner, fn, where))
    if isinstance(inner, Chain) and isinstance(inner.links[-1], ScheduleFree):
        *first, last = inner.links
        return Chain((*first, project(last, fn, where)), inner.names)
    return Project(inner, fn, where)
