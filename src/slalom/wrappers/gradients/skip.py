"""Conditions under which an accumulation skips mini-batches."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ... import fields, tree
from ..._core.fields.schedule import read_number
from ..._core.protocol.context import Context
from ..._core.protocol.parts import AbstractDeclared, Part
from ..._core.text.calls import call
from ..._core.text.messages import uncalled
from ..._core.text.printing import Infix, as_module
from ...tree.types import Params, Updates, is_function


class AbstractSkip(AbstractDeclared):
    """A condition under which `tx.every_k(k, skip=...)` skips a mini-batch.

    Conditions, including plain functions of the same arguments, can be combined with `|`.
    """

    @abc.abstractmethod
    def __call__(
        self, updates: Updates, gradient_step: Int[Array, ""], params: Params | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Evaluates the condition for one mini-batch.

        **Arguments:**

        - `updates`: its gradients, in the accumulation dtype.
        - `gradient_step`: the number of steps so far, a 0-d integer array.
        - `params`: the parameters, or `None` if they were not passed.

        **Returns:** whether to skip the mini-batch, a bool scalar, and its metrics, a dict of
        scalars.
        """

    def __or__(self, other: object) -> "AbstractSkip":
        return AnySkip.join(self, other)

    def __ror__(self, other: object) -> "AbstractSkip":
        return AnySkip.join(other, self)


class SkipNotFinite(AbstractSkip):
    """Skips mini-batches whose gradients contain NaN or infinity.

    Reports `num_not_finite`, the number of non-finite entries.

    ```python
    >>> tx = sl.adam(1e-3).every_k(4, skip=sl.SkipNotFinite())
    >>> opt = sl.Optimizer(tx, jnp.ones(3))
    >>> _, opt = opt.step(jnp.ones(3), jnp.array([1.0, jnp.nan, jnp.inf]))
    >>> int(opt.metrics["num_not_finite"]), bool(opt.metrics["should_skip"])
    (2, True)

    ```
    """

    def __call__(self, updates, gradient_step, params):
        skip, number = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        for u in jax.tree.leaves(updates):
            any_here, count = _any_and_count(~jnp.isfinite(u))
            skip, number = skip | any_here, number + count
        return skip, {"num_not_finite": number}


def _any_and_count(bad: Bool[Array, "..."]) -> tuple[Bool[Array, ""], Int[Array, ""]]:
    """Whether any entry is true, and how many are."""
    # One reduction of pairs. XLA:CPU would rewrite a separate sum of bools to a reduction over
    # windows, which needs a buffer of ints as large as the gradients.
    return jax.lax.reduce(
        (bad, jnp.asarray(bad, jnp.int32)),
        (jnp.zeros((), bool), jnp.zeros((), jnp.int32)),
        lambda a, b: (a[0] | b[0], a[1] + b[1]),
        tuple(range(bad.ndim)),
    )


class SkipLargeUpdates(AbstractSkip):
    """Skips mini-batches whose gradients are large, ‖g‖² ≥ c, or not finite.

    The squares are summed over all leaves, in at least float32. Reports `norm_squared`, ‖g‖².

    **Arguments:**

    - `max_squared_norm`: c, ≥ 0. A schedule is evaluated at the number of steps so far.
    """

    max_squared_norm: fields.Number = fields.hyperparameter(within="[0, inf]")

    def __call__(self, updates, gradient_step, params):
        limit = read_number(self, "max_squared_norm", Context(step=gradient_step))
        norm = tree.squared_norm(updates)
        # Written so that NaN is skipped.
        return ~(norm < jnp.asarray(limit, norm.dtype)), {"norm_squared": norm}


class AnySkip(AbstractSkip):
    """Skips a mini-batch if any of several conditions does, and reports the metrics of all.

    **Arguments:**

    - `conditions`: the conditions. All of them are evaluated.
    """

    conditions: tuple[Callable[..., Any], ...]

    @classmethod
    def join(cls, *conditions: object) -> "AbstractSkip":
        """One condition from several, flattened."""
        flat: list[Any] = []
        for condition in map(as_skip, conditions):
            flat += condition.conditions if isinstance(condition, cls) else [condition]
        return cls(tuple(flat))

    def __call__(self, updates, gradient_step, params):
        skip: Any = False
        reports: dict[str, Any] = {}
        for condition in self.conditions:
            skips, report = evaluate_skip(condition, updates, gradient_step, params)
            twice = [name for name in report if name in reports]
            if twice:
                raise ValueError(
                    f"Two of the conditions {self!r} report '{twice[0]}'. Use different names."
                )
            skip = jnp.logical_or(skip, skips)
            reports |= report
        return skip, reports

    def children(self, here: Part) -> tuple[Part, ...]:
        here = here._replace(params=None)
        return tuple(
            here.child((str(i),), condition, lambda outer, i=i: outer.conditions[i])
            for i, condition in enumerate(self.conditions)
            if isinstance(condition, AbstractSkip)
        )

    def _code(self) -> Infix:
        return Infix("|", self.conditions)


def as_skip(condition: object) -> Any:
    """Converts a function to a module. Modules are returned as is."""
    if not is_function(condition) or isinstance(condition, type):
        raise TypeError(
            "EveryK.skip must be a condition such as `sl.SkipNotFinite()`, or a function of "
            f"(updates, gradient_step, params), got {condition!r}.{uncalled(condition)}"
        )
    return as_module(condition)


def evaluate_skip(
    condition: Callable[..., Any], updates: Updates, gradient_step: Array, params: Params | None
) -> tuple[Bool[Array, ""], dict[str, Array]]:
    """Evaluates a condition for one mini-batch. Raises an error for results of another form."""
    arguments = {"updates": updates, "gradient_step": gradient_step, "params": params}
    result = call("EveryK.skip", condition, **arguments)
    must = (
        "The `skip` of every_k must return a pair: a bool scalar, and a dict of scalars by name, "
        f"which may be empty. {condition!r} returned "
    )
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{must}{describe(result)}.")
    skip, report = result
    if describe(skip) != "a bool scalar":
        raise TypeError(f"{must}{describe(skip)} as the first entry.")
    if not isinstance(report, Mapping):
        raise TypeError(f"{must}{describe(report)} as the second entry.")
    for name, x in report.items():
        if not isinstance(name, str) or not describe(x).endswith(" scalar"):
            raise TypeError(f"{must}{describe(x)} under {name!r}.")
        if name in ("mini_step", "gradient_step"):
            raise ValueError(
                f"{condition!r} reports '{name}', which every_k reports itself. Use another name."
            )
    # `should_skip` is reported once, for all conditions together.
    return jnp.asarray(skip), {n: jnp.asarray(x) for n, x in report.items() if n != "should_skip"}


def describe(x: Any) -> str:
    """The kind of object that a condition returned, for messages."""
    if isinstance(x, bool | int | float | complex):
        x = np.asarray(x)
    if not tree.is_array(x):
        size = f" of {len(x)}" if isinstance(x, tuple | list) else ""
        return f"a {type(x).__name__}{size}"
    if x.shape == ():
        return f"{'an' if x.dtype.kind == 'i' else 'a'} {x.dtype} scalar"
    return f"an array of dtype {x.dtype} and shape {x.shape}"
