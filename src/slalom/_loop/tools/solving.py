"""The loop of `sl.minimize`: evaluate, decide whether to stop, and step."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ... import tree
from ..._core.protocol.context import Context
from ..._core.protocol.loss import Loss
from ..._core.protocol.parts import Part
from ..._core.protocol.real_vectors import to_vector
from ..._core.protocol.residuals import Residuals
from ..._core.state.walk import parts, transforms
from ...tree.dtypes import canonical_float
from ...tree.types import PyTree, Scalar
from ...wrappers import Project
from ..binding.model import Split, split, strong
from ..binding.optimizer import Optimizer
from ..residual_losses import linearized, residual_loss
from ..training.loss import checked_loss

REASONS = {
    "max_steps": "it took as many steps as it may",
    "stuck": "no step changes the parameters any more",
    "change": "the loss hardly changes, nor was it predicted to",
    "step": "the parameters hardly change",
    "gradient": "the gradient is 0, relative to the loss and the parameters",
    "function": "`stop` returned True",
    "not_finite": "the loss or its gradient is not finite",
}
"""Why the loop ends. Of several reasons the last one counts."""

CONVERGED = ("change", "step", "gradient")

MOST_IDLE = 40
"""After how many steps that change no parameter the loop ends: a damping that is raised tenfold
each time has then covered all that a float holds."""

DIGITS = 10.0
"""A gradient of residuals that is at most this multiple of its rounding counts as 0."""


class LoopEnd(NamedTuple):
    """The end of the loop."""

    params: list[Array]
    opt: Optimizer
    value: Scalar
    grad_norm: Scalar
    steps: Int[Array, ""]
    evaluations: Int[Array, ""]
    code: Int[Array, ""]
    losses: Array


class _Point(NamedTuple):
    params: list[Array]
    value: Scalar
    grads: list[Array]
    """The gradient along the sets of `.project`."""


class _Carry(NamedTuple):
    params: list[Array]
    opt: Optimizer
    last: _Point
    """The point of the last evaluation."""
    sizes: list[Array]
    """The largest size so far of every number among the parameters."""
    steps: Array
    evaluations: Array
    idle: Array
    code: Array
    losses: Array


class Solver(NamedTuple):
    """A loss to minimize.

    **Arguments:**

    - `loss_fn`, `args`, `kwargs`: the loss and its data.
    - `whole`: where to start.
    - `tolerances`, `stop`, `max_steps`: as for `sl.minimize`.
    - `report`: called before each step with its number and the loss.
    """

    loss_fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    whole: Split
    tolerances: dict[str, Array]
    stop: Callable[..., Any] | None
    max_steps: int
    report: Callable[[Any, Scalar], None]

    def solve(self, opt: Optimizer) -> LoopEnd:
        """Runs the loop."""
        params = [strong(x) for x in jax.tree.leaves(self.whole.params)]
        shape = jax.eval_shape(self._value, params)
        value = jnp.full((), jnp.nan, shape.dtype)
        zero = jnp.zeros((), jnp.int32)
        start = _Carry(
            params=params,
            opt=opt,
            last=_Point(params, value, params),
            sizes=[jnp.zeros(x.shape, jnp.abs(x).dtype) for x in params],
            steps=zero,
            evaluations=zero,
            idle=zero,
            code=zero - 1,
            losses=jnp.full(self.max_steps, jnp.nan, shape.dtype),
        )
        end = tree.while_loop("`sl.minimize`", lambda c: c.code < 0, self._iteration, start)
        norm = tree.global_norm(end.last.grads).astype(canonical_float())
        return LoopEnd(
            end.params,
            end.opt,
            end.last.value,
            norm,
            end.steps,
            end.evaluations,
            end.code,
            end.losses,
        )

    def _iteration(self, c: _Carry) -> _Carry:
        """Evaluates the loss, and makes a step unless this is the end."""
        root = self._root(c)
        value, grads, known, evaluations = self._evaluate(c, root)
        value = value.astype(c.last.value.dtype)
        now = _Point(c.params, value, along_sets(root, c.params, grads))
        sizes = [jnp.maximum(old, jnp.abs(x)) for old, x in zip(c.sizes, c.params, strict=True)]
        code = self._reason(c, now, sizes, known.get("residuals"))
        c = c._replace(last=now, sizes=sizes, code=code, evaluations=c.evaluations + evaluations)
        return jax.lax.cond(code < 0, lambda: self._step(c, grads, known), lambda: c)

    def _step(self, c: _Carry, grads: list[Array], known: dict[str, Any]) -> _Carry:
        value = c.last.value
        self.report(c.steps, value)
        losses = jax.lax.dynamic_update_index_in_dim(c.losses, value, c.steps, 0)
        gradient = self._tree(grads)
        known = {"value": value, "grad": gradient, "value_fn": self._loss, **known}
        model, opt = c.opt.step(self.whole.join(c.params), gradient, **known)
        params = jax.tree.leaves(split(model, opt.binding.trainable).params)
        same = [jnp.all(a == b) for a, b in zip(params, c.params, strict=True)]
        tried = [
            part.module.num_evaluations(part.state) for part in transforms(opt.transform, opt.state)
        ]
        return c._replace(
            params=params,
            opt=opt,
            losses=losses,
            steps=c.steps + 1,
            evaluations=c.evaluations + jnp.asarray(sum(tried), c.evaluations.dtype),
            idle=jnp.where(jnp.all(jnp.stack(same)), c.idle + 1, 0),
        )

    def _evaluate(
        self, c: _Carry, root: Part
    ) -> tuple[Scalar, list[Array], dict[str, Any], Int[Array, ""] | int]:
        """The loss, its gradient, the other inputs of a step, and the number of evaluations.

        A line search has evaluated the loss where it ended, and a linearization has the gradient.
        """
        params, asked = c.params, root.module.ask(root, Loss())
        source = residual_loss(self.loss_fn, asked)
        known: dict[str, Any] = {}
        if source is not None:
            here = split(self.whole.join(params), c.opt.binding.trainable)
            known["residuals"], linear = linearized(source, self.args, self.kwargs, here, asked)
            gradient = tree.cast_like(jax.tree.leaves(linear.updates(linear.gradient)), params)
            # A search or a damped rule has evaluated the loss here, except for the first time.
            return linear.value, gradient, known, (c.steps == 0).astype(jnp.int32)
        kept = asked.recalled()
        if kept is None:
            return *self._differentiate(params), known, 1
        value, grads, is_known = kept
        is_known &= c.steps > 0  # an optimizer to continue with may come from other data
        like = jax.tree.leaves(grads)

        def compute() -> tuple[Scalar, list[Array]]:
            new, found = self._differentiate(params)
            return new.astype(value.dtype), tree.cast_like(found, like)

        value, found = jax.lax.cond(is_known, lambda: (value, like), compute)
        return value, found, known, jnp.where(is_known, 0, 1)

    def _reason(
        self, c: _Carry, now: _Point, sizes: list[Array], residuals: Residuals | None
    ) -> Array:
        """The position of the reason to stop, or −1."""
        value, moved = jnp.abs(now.value), (c.idle == 0) & (c.steps > 0)
        moves = tree.map_leaves(lambda _, a, b: a - b, (now.params, c.last.params))
        steps = [jnp.abs(x) for x in moves]
        before, after = (
            jnp.abs(tree.inner(x.grads, moves)).astype(value.dtype) for x in (c.last, now)
        )
        change = jnp.maximum(jnp.abs(now.value - c.last.value), before / 2)
        # The way from here to where the slope along the step would be 0, in steps. A short step, as
        # by a small learning rate or a large damping, has hardly changed the slope.
        ahead = jnp.where(before > after, after / (before - after), jnp.inf)
        telling = moved & (ahead <= 1)
        tols = SimpleNamespace(**{**default_tolerances(value.dtype), **self.tolerances})

        def at_most(x: Array, tolerance: Scalar, bound: Array) -> Array:
            return jnp.all(x <= tolerance.astype(x.dtype) * bound.astype(x.dtype))

        short = [at_most(d, tols.xtol, s) for d, s in zip(steps, sizes, strict=True)]
        ahead = jnp.where(moved, ahead, 0)
        lengths = [
            jnp.maximum(s, d * ahead.astype(d.dtype)) for s, d in zip(sizes, steps, strict=True)
        ]
        flat = [
            # A parameter that has been 0 so far has no size.
            jnp.all((g == 0) | ((n > 0) & (jnp.abs(g) * n <= (tols.gtol * value).astype(n.dtype))))
            for g, n in zip(now.grads, lengths, strict=True)
        ]
        zero = jnp.all(jnp.stack([jnp.all(g == 0) for g in now.grads]))
        flat = [zero, (c.steps > 0) & jnp.all(jnp.stack(flat))]
        linear = None if residuals is None else residuals.known
        if linear is not None and linear.chunk is None:
            g, p = (to_vector(self._tree(x), linear.dtype) for x in (now.grads, now.params))
            flat.append(jnp.all(jnp.abs(g) <= DIGITS * linear.rounding(p)))
        finite = [jnp.all(jnp.isfinite(g)) for g in (now.value, *now.grads)]
        met: dict[str, Any] = {
            "max_steps": c.steps >= self.max_steps,
            "stuck": c.idle >= MOST_IDLE,
            "change": telling & at_most(change, tols.ftol, value),
            "step": telling & jnp.all(jnp.stack(short)),
            "gradient": jnp.any(jnp.stack(flat)),
            "not_finite": ~jnp.all(jnp.stack(finite)),
        }
        if self.stop is not None:
            stopped = self.stop(self.whole.join(now.params), now.value)
            met["function"] = jnp.asarray(stopped, bool)
        code = jnp.full((), -1, jnp.int32)
        for i, name in enumerate(REASONS):
            if name in met:
                code = jnp.where(met[name], i, code)
        return code

    def _value(self, params: list[Array]) -> Scalar:
        return checked_loss(self._loss(self.whole.join(params)), False, False).loss

    def _loss(self, model: PyTree) -> Scalar:
        return self.loss_fn(model, *self.args, **self.kwargs)

    def _differentiate(self, params: list[Array]) -> tuple[Scalar, list[Array]]:
        value, grads = jax.value_and_grad(self._value)(params)
        return value, [jnp.conj(g) for g in grads]

    def _root(self, c: _Carry) -> Part:
        """The transform as a part without an outer one."""
        context = Context(step=c.opt.count)
        return next(parts(c.opt.transform, c.opt.state, context, self._tree(c.params)))

    def _tree(self, leaves: list[Array]) -> PyTree:
        return jax.tree.structure(self.whole.params).unflatten(leaves)


def default_tolerances(dtype: np.dtype) -> dict[str, Array]:
    """ε^⅔, which a rule that converges faster than linearly reaches a step before rounding."""
    least = jnp.asarray(jnp.finfo(dtype).eps ** (2 / 3), dtype)
    return {"ftol": least, "xtol": least, "gtol": least}


def along_sets(part: Part, params: list[Array], grads: list[Array]) -> list[Array]:
    """The gradient without components that leave the sets of `.project`. It is 0 at a minimum.

    **Arguments:**

    - `part`: a transform with what it sees.
    - `params`: the parameters that it acts on, among others.
    - `grads`: their gradients.
    """
    position = {id(x): i for i, x in enumerate(params)}
    leaves, structure = jax.tree.flatten(part.params)
    places = [position[id(x)] for x in leaves if id(x) in position]
    # Inside `.flatten()` the parameters are others.
    if isinstance(part.module, Project) and len(places) == len(leaves):
        own = structure.unflatten([grads[i] for i in places])
        along = jax.tree.leaves(part.module.stationary(part, own))
        changed = dict(zip(places, along, strict=True))
        grads = [changed.get(i, g).astype(g.dtype) for i, g in enumerate(grads)]
    for child in part.children():
        grads = along_sets(child, params, grads)
    return grads
