"""The loop of `sl.minimize`: evaluate, decide whether to stop, and step."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ... import tree
from ..._core.protocol.context import Context
from ..._core.protocol.linearization import first_possible
from ..._core.protocol.loss import Loss
from ..._core.protocol.parts import Part, parts, transforms
from ..._core.protocol.real_vectors import from_vector, to_vector
from ..._core.protocol.residuals import Residuals
from ..._core.text.calls import call
from ...tree.rounding import same_bits
from ...tree.types import PyTree, Scalar
from ...wrappers import Project
from ..binding.model import Split, split, strong
from ..binding.optimizer import Optimizer
from ..residual_losses import AbstractCurvatureLoss, linearized
from ..training.loss import call_loss, checked_loss
from .newton import MOST_PRODUCTS, newton
from .runs import send

REASONS = {
    "max_steps": "it took as many steps as it may",
    "stuck": "no step changes the parameters any more",
    "change": "the loss hardly changes, nor do its derivatives predict more",
    "step": "the parameters hardly change, and Newton's step is short",
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
"""A change of the loss, or a gradient of residuals, that is at most this multiple of its rounding
counts as 0."""


class Problem(NamedTuple):
    """The inputs of the program of `minimize`."""

    args: tuple[Any, ...]
    every: int
    kwargs: dict[str, Any]
    loss: Any
    """The loss as a tree."""
    max_steps: int
    model: PyTree
    opt: Optimizer
    receiver: Array | None
    """The number of the function that takes the reports, or `None` for no reports."""
    stop: Any
    """The function `stop` as a tree, or `None`."""
    tolerances: dict[str, Array]


class _Point(NamedTuple):
    value: Scalar
    x: Float[Array, " params"]
    """The parameters as one vector: each operation on it is one kernel for all leaves."""
    gradient: Float[Array, " params"]
    """The gradient along the sets of `.project`."""
    sizes: Float[Array, " params"]
    """The largest size so far of every number among the parameters."""


class _Carry(NamedTuple):
    params: list[Array]
    opt: Optimizer
    last: _Point
    """The point of the last evaluation."""
    steps: Array
    evaluations: Array
    idle: Array
    unchecked: Array
    """The steps until Newton's step may be computed again."""
    code: Array
    losses: Array


class Solver(NamedTuple):
    """The loop for a problem.

    **Arguments:**

    - `problem`: the problem.
    - `whole`: its model, split.
    - `source`: its loss, if a rule uses residuals.
    """

    problem: Problem
    whole: Split
    source: AbstractCurvatureLoss | None

    def solve(self) -> tuple[list[Array], tuple[Array, ...]]:
        """Runs the loop. Returns the new parameters, state and count, and the other fields of a
        `MinimizeResult`."""
        params = [strong(x) for x in jax.tree.leaves(self.whole.params)]
        shape = jax.eval_shape(self._value, params)
        value = jnp.full((), jnp.nan, shape.dtype)
        zero = jnp.zeros((), jnp.int32)
        x = self._vector(params)
        start = _Carry(
            params=params,
            opt=self.problem.opt,
            last=_Point(value, x, jnp.zeros_like(x), jnp.zeros_like(x)),
            steps=zero,
            evaluations=zero,
            idle=zero,
            unchecked=zero,
            code=zero - 1,
            losses=jnp.full(self.problem.max_steps, jnp.nan, shape.dtype),
        )
        end = tree.while_loop("`sl.minimize`", lambda c: c.code < 0, self._iteration, start)
        norm = tree.norm(end.last.gradient).astype(tree.canonical_float())
        others = (end.last.value, norm, end.steps, end.evaluations, end.code, end.losses)
        return [*end.params, *jax.tree.leaves(end.opt.arrays[1:])], others

    def _iteration(self, c: _Carry) -> _Carry:
        """Evaluates the loss, and makes a step unless this is the end."""
        root = self._root(c)
        value, grads, residuals, evaluations = self._evaluate(c, root)
        along = along_sets(root, c.params, grads)
        value = value.astype(c.last.value.dtype)
        sizes = jnp.maximum(c.last.sizes, self._vector(map(jnp.abs, c.params)))
        now = _Point(value, self._vector(c.params), self._vector(along), sizes)
        can_move = self._can_move(root, grads, along)
        code, unchecked, products = self._reason(c, now, can_move, residuals)
        c = c._replace(
            last=now,
            code=code,
            unchecked=unchecked,
            evaluations=c.evaluations + evaluations + products,
        )
        return jax.lax.cond(code < 0, lambda: self._step(c, grads, residuals), lambda: c)

    def _step(self, c: _Carry, grads: list[Array], residuals: Residuals | None) -> _Carry:
        value = c.last.value
        number = self.problem.receiver
        if number is not None:
            is_due = c.steps % self.problem.every == 0
            jax.lax.cond(is_due, lambda: send(number, c.steps, value), lambda: None)
        losses = jax.lax.dynamic_update_index_in_dim(c.losses, value, c.steps, 0)
        gradient = self._tree(grads)
        known = {"value": value, "grad": gradient, "value_fn": self._loss, "residuals": residuals}
        model, opt = c.opt.step(self.whole.join(c.params), gradient, **known)
        params = jax.tree.leaves(split(model, opt.binding.trainable).params)
        same = [jnp.all(same_bits(a, b)) for a, b in zip(params, c.params, strict=True)]
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
    ) -> tuple[Scalar, list[Array], Residuals | None, Int[Array, ""] | int]:
        """The loss, its gradient, its residuals if a rule uses them, and the number of evaluations.

        A line search has evaluated the loss where it ended, and a linearization has the gradient.
        """
        params, asked = c.params, root.module.ask(root, Loss())
        if self.source is not None:
            here = split(self.whole.join(params), c.opt.binding.trainable)
            residuals, value, gradient = linearized(self.source, self.problem, here, asked)
            # A search or a damped rule has evaluated the loss here, except for the first time.
            return value, jax.tree.leaves(gradient), residuals, (c.steps == 0).astype(jnp.int32)
        kept = asked.recalled()
        if kept is None:
            return *self._differentiate(params), None, 1
        value, grads, is_known = kept
        is_known &= c.steps > 0  # an optimizer to continue with may come from other data
        like = jax.tree.leaves(grads)

        def compute() -> tuple[Scalar, list[Array]]:
            new, found = self._differentiate(params)
            return new.astype(value.dtype), tree.cast_like(found, like)

        value, found = jax.lax.cond(is_known, lambda: (value, like), compute)
        return value, found, None, jnp.where(is_known, 0, 1)

    def _reason(
        self, c: _Carry, now: _Point, can_move: Array, residuals: Residuals | None
    ) -> tuple[Array, Array, Array]:
        """The position of the reason to stop, or −1, the steps until Newton's step may be computed
        again, and how many evaluations it took."""
        value = jnp.abs(now.value)
        # 1e-8 as in `scipy.optimize.least_squares`, or ε^⅔ where that is larger: a rule that
        # converges faster than linearly reaches it a step before rounding.
        tol = jnp.asarray(max(jnp.finfo(value.dtype).eps ** (2 / 3), 1e-8), value.dtype)
        tols = SimpleNamespace(**{"ftol": tol, "xtol": tol, "gtol": tol} | self.problem.tolerances)
        change, still, ahead = self._last_step(c, now, tols.ftol.astype(value.dtype) * value)
        moved = (c.idle == 0) & (c.steps > 0)
        short, flat, rounded, finite = self._everywhere(
            c, now, jnp.where(moved, ahead, 0), tols, residuals
        )
        # A small learning rate or a large damping hardly changes the slope.
        telling = moved & (ahead <= 1)
        # In a narrow valley, a poor direction hardly leads down although the minimum is far.
        claims = (telling & (change | short)) | (moved & still & change) | (c.idle > 0)
        claims |= rounded
        checked = claims & (c.unchecked == 0) & (c.code < 0)
        decrease, length, products = self._newton(c, now, can_move, residuals, checked)
        # As Gill, Murray and Wright: where the loss has its digits, the parameters have half.
        least = (tols.ftol.astype(value.dtype) * value).astype(decrease.dtype)
        longest = jnp.maximum(tols.xtol, jnp.finfo(value.dtype).eps ** 0.5)
        done = checked & ((decrease <= least) | (length <= longest.astype(length.dtype)))
        unchecked = jnp.where(checked, MOST_PRODUCTS, jnp.maximum(c.unchecked - 1, 0))

        # The first step projects a start outside.
        in_sets = c.steps >= int(any(isinstance(p.module, Project) for p in parts(c.opt.transform)))
        met: dict[str, Any] = {
            "max_steps": c.steps >= self.problem.max_steps,
            "stuck": c.idle >= MOST_IDLE,
            "change": done & (change | (c.idle > 0)),
            "step": done & short & moved,
            "gradient": (flat | (rounded & done)) & in_sets,
            "not_finite": ~(jnp.isfinite(value) & finite),
        }
        if self.problem.stop is not None:
            point = {"model": self.whole.join(c.params), "loss": now.value}
            stopped = call("`stop` of `sl.minimize`", self.problem.stop, **point)
            met["function"] = jnp.asarray(stopped, bool)
        code = jnp.full((), -1, jnp.int32)
        for i, name in enumerate(REASONS):
            if name in met:
                code = jnp.where(met[name], i, code)
        return code, unchecked, products

    def _last_step(self, c: _Carry, now: _Point, least: Scalar) -> tuple[Array, Array, Array]:
        """Whether the last step hardly changed the loss; whether it changed it by no more than
        rounding; and the way from here to where the slope along it would be 0, in steps."""
        moves, change = now.x - c.last.x, jnp.abs(now.value - c.last.value)
        gradients = jnp.stack([c.last.gradient, now.gradient])
        before, after = jnp.abs(jnp.sum(gradients * moves[None], axis=1)).astype(change.dtype)
        rounding = jnp.finfo(change.dtype).eps * jnp.abs(now.value)
        return (
            jnp.maximum(change, before / 2) <= least,
            change <= DIGITS * rounding,
            jnp.where(before > after, after / (before - after), jnp.inf),
        )

    def _everywhere(
        self,
        c: _Carry,
        now: _Point,
        ahead: Array,
        tols: SimpleNamespace,
        residuals: Residuals | None,
    ) -> Bool[Array, "4"]:
        """Whether the last step hardly changed the parameters; whether the gradient is 0 relative
        to the loss and the parameters, or by rounding; and whether it is finite."""
        sizes, dtype = now.sizes, now.sizes.dtype
        lengths, slopes = jnp.abs(now.x - c.last.x), jnp.abs(now.gradient)
        short = lengths <= tols.xtol.astype(dtype) * sizes
        scales = jnp.maximum(sizes, lengths * ahead.astype(dtype))
        least = (tols.gtol * jnp.abs(now.value)).astype(dtype)
        # A parameter that has been 0 so far has no size.
        small = (scales > 0) & (slopes * scales <= least)
        flat = (slopes == 0) | ((c.steps > 0) & small)
        rounded = jnp.zeros_like(short)
        linear = None if residuals is None else residuals.known
        if linear is not None and linear.chunk is None:
            rounded = slopes <= DIGITS * linear.rounding(now.x)
        # Together, since each reduction of its own would be two or three kernels.
        return jnp.all(jnp.stack([short, flat, rounded, jnp.isfinite(slopes)]), axis=1)

    def _newton(
        self, c: _Carry, now: _Point, can_move: Array, residuals: Residuals | None, wanted: Array
    ) -> tuple[Scalar, Scalar, Int[Array, ""]]:
        """Newton's step in units of the sizes, over the parameters that can move."""
        params, gradient, sizes = c.params, now.gradient, now.sizes
        largest = jnp.where(sizes > 0, sizes, 1)
        # A size may have shrunk by many digits since the start.
        now_sizes = self._vector(map(jnp.abs, params))
        units = can_move * jnp.where(now_sizes > 0, now_sizes, largest)

        def exact(v: Array) -> Array:
            tangent = (from_vector(v, params),)
            _, along = jax.jvp(lambda p: self._differentiate(p)[1], (params,), tangent)
            return self._vector(along)

        def difference(v: Array, gradient_at: Callable[[list[Array]], Array]) -> Array:
            h = jnp.finfo(v.dtype).eps ** 0.5 / jnp.linalg.norm(v / largest)
            return (gradient_at(tree.add(params, from_vector(h * v, params))) - gradient) / h

        def by_rows(there: list[Array]) -> Array:
            assert residuals is not None
            return residuals.at(self._tree(there)).gradient.astype(gradient.dtype)

        def product(v: Array) -> Array:
            v = units * v
            ways = [
                lambda: exact(v),
                lambda: difference(v, lambda p: self._vector(self._differentiate(p)[1])),
            ]
            if residuals is not None:
                ways.append(lambda: difference(v, by_rows))
            return units * first_possible(*ways)

        return newton(product, units * gradient, units / largest, wanted)

    def _can_move(self, root: Part, grads: list[Array], along: list[Array]) -> Array:
        """1 for parameters that can move, and 0 for the others."""
        signs = root.module.signs(self._tree(grads))
        # On a curved boundary only the direction is free, and Newton's step of what is left of the
        # gradient is short where that is rounding.
        free = [
            jnp.ones(g.shape, bool) if a is g else (a == g) | (a != 0)
            for a, g in zip(along, grads, strict=True)
        ]
        can = [f & (sign != 0) for f, sign in zip(free, signs, strict=True)]
        return self._vector(x.astype(jnp.float32) for x in can)

    def _vector(self, leaves: Iterable[Array]) -> Float[Array, " params"]:
        """A vector with a number for each real parameter. Both parts of a complex one have the same
        where the leaf is real."""
        params = jax.tree.leaves(self.whole.params)

        def as_pair(x: Array) -> Array:
            return x if jnp.iscomplexobj(x) else jax.lax.complex(x, x)

        pairs = zip(leaves, params, strict=True)
        parts = [as_pair(x) if jnp.iscomplexobj(p) else x for x, p in pairs]
        return to_vector(parts, tree.sum_dtype(params))

    def _value(self, params: list[Array]) -> Scalar:
        return self._loss(self.whole.join(params))

    def _loss(self, model: PyTree) -> Scalar:
        problem = self.problem
        return checked_loss(call_loss(problem.loss, model, *problem.args, **problem.kwargs)).loss

    def _differentiate(self, params: list[Array]) -> tuple[Scalar, list[Array]]:
        value, grads = jax.value_and_grad(self._value)(params)
        return value, [jnp.conj(g) for g in grads]

    def _root(self, c: _Carry) -> Part:
        """The transform as a part without an outer one."""
        context = Context(step=c.opt.count)
        return Part.root(c.opt.transform, c.opt.state, context, self._tree(c.params))

    def _tree(self, leaves: list[Array]) -> PyTree:
        return jax.tree.structure(self.whole.params).unflatten(leaves)


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
