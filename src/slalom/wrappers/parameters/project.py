"""Parameters that stay in a set."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ... import tree
from ..._core.fields.declare import checked_field
from ..._core.protocol.bases import AbstractParameterWriter, params_to_evaluate
from ..._core.protocol.context import Context
from ..._core.protocol.parts import Part, segments, transforms
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractWrapper, run_if
from ..._core.protocol.writer import Writer
from ..._core.text.calls import call
from ..._core.text.messages import uncalled, warn
from ..._core.text.printing import as_module, code
from ...projections import AbstractProjection
from ...tree.paths import dotted, first_difference, leaf_paths
from ...tree.rounding import read_back
from ...tree.types import Gradients, Params, Tracer, Updates, is_function
from ...where.masks import mask
from ...where.resolve import Where, as_where_or_none
from .write import refuse_written


class FunctionProjection(AbstractProjection):
    """A function of a tree of parameters, about whose set nothing is known."""

    fn: Callable[[PyTree], PyTree] = eqx.field(converter=as_module)

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        return call("Project.fn", self.fn, params=x)

    def __call__(self, x: PyTree, context: Context | None = None) -> PyTree:
        return self.nearest(SimpleNamespace(), x)

    def _code(self) -> object:
        return self.fn


def _as_projection(fn: Any) -> object:
    known = isinstance(fn, AbstractProjection | type) or not is_function(fn)
    return fn if known else FunctionProjection(fn)


def _check_function(name: str, fn: object) -> None:
    if not isinstance(fn, AbstractProjection):
        raise TypeError(
            f"{name} must be a function from the parameters to a tree like them, such as "
            f"`sl.projections.l2_ball(1.0)`, got {fn!r}.{uncalled(fn)}"
        )


class Project(AbstractWrapper[Any], AbstractParameterWriter[Any]):
    """The inner transform, and a projection of the parameters after each of its steps.

    Made by `tx.project`, which describes the arguments.

    With updates u it writes

        p ← fn(p + u)

    where the sum is projected in the accumulation dtype and rounded once. `fn` receives one tree
    with all selected parameters, so it can act on all of them together; the others get p + u. Where
    the inner transform is idle, nothing is written. `update` returns fn(p + u) − p.

    Steps stop where the loss has no better neighbor in a convex set, also after a rule that scales
    every element separately, such as Adam: of the gradient, the inner transform sees the part along
    the set, which at the boundary lacks what leads out of the set. While the gradient leads out,
    updates do not leave the boundary inwards. Otherwise Adam would stop in a ball where p is
    parallel to its update, which is not the gradient. A box separates the elements, so there a rule
    sees the whole gradient, and those that mix the elements of a matrix, such as Muon, Shampoo and
    SOAP, stop elsewhere. A plain function is only applied after the step.

    If the set is smooth, such as `sl.projections.sphere` and `stiefel`, this is an optimizer on a
    manifold: of the update, too, only the part along the set is added, unless a line search has
    chosen it. So moments need no transport of their own: a tangent vector from an earlier point is
    projected onto the tangent at this one.

    A line search inside evaluates the loss at projected points. In a box (`box`, `non_negative` and
    `hypercube`) it ends at the bounds, and L-BFGS is L-BFGS-B. A start outside the box is projected
    by the first step. Other sets around L-BFGS are refused.

    Put `.project` inside wrappers that skip steps, which then skip the projection too. Put it
    around `.average`, `.lookahead` and `.outer`: what they evaluate is projected, too. Inside of
    `.average` and `.lookahead` it may be if the set is convex, as an average of parameters is in
    it then. `.schedule_free` steps and averages other parameters than the model's, which are
    projected instead, onto convex sets: `tx.schedule_free().project(fn)` is
    `tx.project(fn).schedule_free()`.

    ```python
    >>> tx = sl.sgd(0.1).project(sl.projections.non_negative())
    >>> opt = sl.Optimizer(tx, {"w": jnp.ones(2)})
    >>> opt.step({"w": jnp.ones(2)}, {"w": jnp.array([5.0, 20.0])})[0]
    {'w': Array([0.5, 0. ], dtype=float32)}

    ```
    """

    passes_gradients: ClassVar[bool] = True

    fn: AbstractProjection = checked_field(_check_function, converter=_as_projection, static=False)
    where: Where | None = eqx.field(default=None, static=True, converter=as_where_or_none)

    def __check_init__(self):
        refuse_written(self.inner, ".project(...)")
        for part in transforms(self.inner):
            if segments(part.module) == ("schedule_free",):
                raise ValueError(
                    f"`.project(...)` cannot be around '{part.name}', which steps and averages "
                    "other parameters than the model's. Write it directly after it: "
                    "`tx.schedule_free().project(...)`. In a partition, do so in each group."
                )
            if part.module.unconstrained and not (self.fn.is_box and part.module.heeds_bounds):
                instead = "Use a first-order rule, such as `sl.adam(1e-3).project(...)`"
                if part.module.heeds_bounds:
                    instead += ", or a box: `sl.lbfgs(bounds=(lower, upper))`"
                raise ValueError(
                    f"`.project(...)` cannot be around '{part.name}', which mixes parameters as if "
                    f"each could move freely: it would converge to wrong points. {instead}."
                )

    def warnings(self, params: Params) -> Iterable[str]:
        self.fn.check(tree.cut(params, self._keep(params)))
        return ()

    @property
    def _sees_tangent(self) -> bool:
        return not (self.fn.is_box or isinstance(self.fn, FunctionProjection))

    @property
    def _passes_bounds(self) -> bool:
        return self.fn.is_box and self._searches

    @property
    def _searches(self) -> bool:
        return any(part.module.heeds_bounds for part in transforms(self.inner))

    def init(self, params: Params) -> PyTree:
        # Here and not in `warnings`, which are those of the shapes.
        if self._passes_bounds:
            projected = self._projected(params, Context(step=0))
            within = jax.tree.map(lambda x, y: jnp.all((x == y) | jnp.isnan(x)), params, projected)
            for path, inside in zip(leaf_paths(params), jax.tree.leaves(within), strict=True):
                # Traced also where the parameters are known, inside of `jax.eval_shape`.
                if not isinstance(inside, Tracer) and not inside:
                    warn(f"'{path}' starts outside its bounds. The first step projects it.")
        return super().init(params)

    def _inner_state(self, state: PyTree) -> PyTree:
        return state  # `init` adds nothing to it

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, Any]:
        params = self.demand("params", here.params)
        old = write.full(params)
        inner, updates, projected = self.seen_from(old, here, updates)
        updates, state = inner.run(write.returning, updates)

        def project(updates: Updates, nothing: None) -> tuple[Any, None]:
            new = projected(updates)
            change = tree.map_leaves(lambda _, new, old: new - old, (new, old))
            return write.assigning(new)(params, change), nothing

        wrote = self.inner.has_updated(state)
        result, _ = run_if(wrote, project, write, params, updates, None)
        return result, state

    def seen_from(
        self, old: Params, here: Part, updates: Gradients
    ) -> tuple[Part, Gradients, Callable[[Updates], Params]]:
        """A step from a point that may be another one than the parameters.

        **Arguments:**

        - `old`: the point.
        - `here`: this transform with its state, its parameters and a context.
        - `updates`: the gradients.

        **Returns:** the inner transform as a part, the gradients for it, and a function from its
        updates to the new point.
        """
        context = seen = here.context

        def constrain(params: Params) -> Params:
            return self._projected(context.constrained(params), context)

        if self._passes_bounds:
            seen = seen.replace(bounds=self._bounds(old, context))
        heading = along = None
        if self._sees_tangent:
            heading = self._turned(old, updates)
            along = self._along(old, heading, context)
            updates, seen = self._turned(old, along), self._tangent_context(old, seen)
        # Changes by a writer inside are not the update of a rule.
        writers = (isinstance(p.module, AbstractParameterWriter) for p in transforms(self.inner))
        holds = not self.fn.is_manifold and not any(writers)

        def projected(updates: Updates) -> Params:
            if self.fn.is_manifold and not self._searches:
                updates = self._along(old, updates, context)
            elif heading is not None and holds:
                updates = _held(updates, heading, along)
            return self._projected(tree.add(tree.widened(old), updates), context)

        seen = seen.replace(constrain=constrain)
        return self.inner_part(here._replace(context=seen)), updates, projected

    def stationary(self, here: Part, grads: Updates) -> Updates:
        """The gradient without components that leave the set. It is 0 at a minimum.

        **Arguments:**

        - `here`: this transform with its state, parameters and context.
        - `grads`: the gradient, a tree like its parameters.
        """
        params, context = here.params, here.context
        if self._sees_tangent:
            return self._tangent(params, grads, context)
        if not self.fn.is_box:
            short = tree.map_leaves(lambda _, p, g: p - g, (params, grads))
            there = tree.widened(self._projected(short, context))
            return tree.map_leaves(lambda _, p, q: p - q, (params, there))

        def inside(_: object, p: Array, g: Array, lower: Array, upper: Array) -> Array:
            if jnp.iscomplexobj(p):
                return g  # which has no bounds
            return jnp.where(((p <= lower) & (g > 0)) | ((p >= upper) & (g < 0)), 0, g)

        return tree.map_leaves(inside, (params, grads, *self._bounds(params, context)))

    def _bounds(self, params: Params, context: Context) -> tuple[Params, Params]:
        """The bounds of the box and of those around it. Other leaves have none."""

        def infinite(x: Array | np.ndarray, sign: int) -> Array:
            inf = sign * np.inf
            return jnp.full_like(x, complex(inf, inf) if jnp.iscomplexobj(x) else inf)

        def bound(sign: int) -> Params:
            # The projection of an infinite number is its bound, rounded as the parameter is.
            ends = jax.tree.map(lambda x: infinite(x, sign), params)
            return jax.tree.map(read_back, self._projected(ends, context))

        lower, upper = bound(-1), bound(1)
        if context.bounds is not None:
            lower = jax.tree.map(jnp.maximum, lower, context.bounds[0])
            upper = jax.tree.map(jnp.minimum, upper, context.bounds[1])
        return lower, upper

    def _turned(self, params: Params, u: Updates) -> Updates:
        """A gradient as a direction of updates (against it, except where they ascend), or such a
        direction as a gradient."""
        leaves, structure = jax.tree.flatten(u)
        signs = self.inner.signs(params)
        return structure.unflatten(
            [x if sign == 1 else -x for x, sign in zip(leaves, signs, strict=True)]
        )

    def _along(self, params: Params, u: Updates, context: Context) -> Updates:
        """The part of a direction along the set, at the selected leaves."""
        keep = self._keep(params)
        along = self.fn.along(tree.cut(params, keep), tree.cut(u, keep), context)
        return tree.put(u, keep, along)

    def _tangent(self, params: Params, grads: Updates, context: Context) -> Updates:
        """The part of a gradient along the set."""
        return self._turned(params, self._along(params, self._turned(params, grads), context))

    def _tangent_context(self, params: Params, context: Context) -> Context:
        """The context for rules that evaluate the gradient themselves."""

        def along(grad: Updates) -> Updates:
            return self._tangent(params, grad, context)

        def grad_fn(other: Params) -> Updates:
            return along(context.gradient(other))

        seen = context.replace(grad_fn=grad_fn if context.has("grad_fn") else None)
        return seen.mapped(grad=along)

    def _keep(self, params: Params) -> tuple[bool, ...]:
        """Marks the selected leaves."""
        if self.where is None:
            return (True,) * len(jax.tree.leaves(params))
        return mask(self.where, params)

    def _projected(self, params: Params, context: Context) -> Params:
        """The parameters with the selected ones projected."""
        keep = self._keep(params)
        selected = tree.cut(params, keep)
        projected = self.fn(selected, context)
        self._check_result(selected, projected)
        return tree.put(params, keep, tree.cast_like(projected, selected))

    def _check_result(self, params: PyTree, result: PyTree) -> None:
        must = f"The projection {code(self.fn)} must return a tree like the one that it receives"
        if jax.tree.structure(result) != jax.tree.structure(params):
            names = ("what it returns", "what it receives")
            raise ValueError(f"{must}: {first_difference(result, params, names)}.")
        leaves = jax.tree_util.tree_leaves_with_path(params)
        for (path, x), y in zip(leaves, jax.tree.leaves(result), strict=True):
            if np.shape(y) != x.shape:
                raise ValueError(
                    f"{must}: at '{dotted(path)}' it received shape {x.shape} and returned shape "
                    f"{np.shape(y)}."
                )
            if np.iscomplexobj(y) and not np.iscomplexobj(x):
                raise TypeError(
                    f"{must}: at '{dotted(path)}' it received {x.dtype} and returned {y.dtype}."
                )

    def children(self, here: Part) -> tuple[Part, ...]:
        inner = self.inner_part(here)
        if self.fn.is_manifold and here.params is not None and here.context is not None:
            inner = inner._replace(context=self._tangent_context(here.params, inner.context))
        if isinstance(self.fn, FunctionProjection):
            return (inner,)
        fn = here.child(segments(self.fn), self.fn, lambda outer: outer.fn)
        return inner, fn._replace(params=None)

    def eval_params(self, here: Part) -> Params:
        params = params_to_evaluate(self.inner_part(here), full_precision=True)
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(here.params), strict=True)
        # The parameters of the model are in the set already.
        if all(x is p for x, p in pairs):
            return params
        return self._projected(params, here.context)


def refuse_projected(inner: AbstractTransform, call: str, *, averages: bool = True) -> None:
    """Raises an error for a projection inside a wrapper that evaluates parameters outside its set.

    **Arguments:**

    - `inner`: the transform inside the wrapper.
    - `call`: the call that makes the wrapper, such as `".average(...)"`.
    - `averages`: whether what is evaluated is an average of the projected parameters, which is in
        a convex set.
    """
    for part in transforms(inner):
        if isinstance(part.module, Project) and not (averages and part.module.fn.is_convex):
            raise ValueError(
                f"`{call}` around '{part.name}' would evaluate parameters outside of its set. "
                f"Change the order: `tx{call}.project(...)` projects them, too."
            )


def _held(updates: Updates, heading: Updates, along: Updates) -> Updates:
    """The updates without components that leave a boundary against which the gradient presses.

    Rules that divide by a mean of squares would otherwise leave the boundary every few steps, see
    another gradient there, and end elsewhere.
    """
    outward = tree.map_leaves(lambda _, d, t: d - t, (heading, along))
    size = tree.global_norm(outward)
    # In float32 rounding leaves 1e-4 of the gradient.
    pressed = size > 1e-3 * tree.global_norm(heading)
    now = SimpleNamespace(unit=jnp.where(pressed, 1 / jnp.where(pressed, size, 1), 0))
    normal = tree.map_leaves(lambda now, n: now.unit * n, (outward,), now)
    now = SimpleNamespace(inwards=jnp.maximum(-tree.inner(updates, normal), 0))
    return tree.map_leaves(lambda now, u, n: u + now.inwards * n, (updates, normal), now)
