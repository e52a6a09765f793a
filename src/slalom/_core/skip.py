"""Which mini-batches an accumulation leaves out."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .. import tree
from .._types import Params, Scalar, Updates
from ..tree.dtypes import as_float
from .declared import AbstractDeclared
from .fields import Hyperparameter, hyperparameter
from .messages import uncalled
from .printing import Infix
from .schedule import AbstractSchedule, call_schedule
from .transform import Context

RESERVED = ("mini_step", "gradient_step")
"""What `EveryK` itself reports under these names."""


class AbstractSkip(AbstractDeclared):
    """A condition under which `tx.every_k(k, skip=...)` leaves a mini-batch out.

    Two of them, or one and a plain function of the same arguments, are joined with `|`.
    """

    @abc.abstractmethod
    def __call__(
        self, updates: Updates, gradient_step: Int[Array, ""], params: Params | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Looks at the gradients of one mini-batch.

        **Arguments:**

        - `updates`: its gradients, in the accumulation dtype.
        - `gradient_step`: how many updates were emitted before.
        - `params`: the parameters, where these are known.

        **Returns:** whether to leave it out, a bool scalar, and what to report: scalars by name.
        """

    def read(self, name: str, context: Context | None) -> Scalar:
        """A hyperparameter as the next mini-batch finds it; schedules see emitted updates."""
        value = getattr(self, name)
        if isinstance(value, AbstractSchedule):
            step = None if context is None else context.step
            assert step is not None
            value = call_schedule(value, value, step)
        return as_float(value)

    def __or__(self, other: Any) -> "AbstractSkip":
        return AnySkip.join(self, other)

    def __ror__(self, other: Any) -> "AbstractSkip":
        return AnySkip.join(other, self)


class SkipNotFinite(AbstractSkip):
    """Leaves out mini-batches with a NaN or an infinity in their gradients.

    It reports `num_not_finite`, how many entries are not finite.

    ```python
    >>> tx = sl.adam(1e-3).every_k(4, skip=sl.SkipNotFinite())
    >>> opt = sl.Optimizer(tx, jnp.ones(3))
    >>> _, opt = opt.step(jnp.ones(3), jnp.array([1.0, jnp.nan, jnp.inf]))
    >>> int(opt.metrics["num_not_finite"]), bool(opt.metrics["should_skip"])
    (2, True)

    ```
    """

    def __call__(
        self, updates: Updates, gradient_step: Int[Array, ""], params: Params | None
    ) -> tuple[Bool[Array, ""], dict[str, Array]]:
        del gradient_step, params
        skip, number = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        for u in jax.tree.leaves(updates):
            own, count = _any_and_count(~jnp.isfinite(u))
            skip, number = skip | own, number + count
        return skip, {"num_not_finite": number}


def _any_and_count(bad: Bool[Array, "..."]) -> tuple[Bool[Array, ""], Int[Array, ""]]:
    """Whether any entry is true, and how many are."""
    # One reduction of pairs. A sum of bools by itself XLA:CPU rewrites to one over windows, for
    # which it writes the ints to memory, a buffer as large as the gradients.
    return jax.lax.reduce(
        (bad, jnp.asarray(bad, jnp.int32)),
        (jnp.zeros((), bool), jnp.zeros((), jnp.int32)),
        lambda a, b: (a[0] | b[0], a[1] + b[1]),
        tuple(range(bad.ndim)),
    )


class SkipLargeUpdates(AbstractSkip):
    """Leaves out mini-batches whose gradients are large: those with ‖g‖² ≥ c, or not finite.

    The squares are summed over all leaves, in at least float32. It reports `norm_squared`, ‖g‖².

    **Arguments:**

    - `max_squared_norm`: c, ≥ 0; a schedule of it sees the number of updates emitted before.
    """

    max_squared_norm: Hyperparameter = hyperparameter(within="[0, inf]")

    def __call__(
        self, updates: Updates, gradient_step: Int[Array, ""], params: Params | None
    ) -> tuple[Bool[Array, ""], dict[str, Array]]:
        del params
        limit = self.read("max_squared_norm", Context(step=gradient_step))
        norm = tree.squared_norm(updates)
        # Asked this way round, a NaN is not small.
        return ~(norm < jnp.asarray(limit, norm.dtype)), {"norm_squared": norm}


class FunctionSkip(AbstractSkip):
    """A plain function as a condition.

    **Arguments:**

    - `function`: called as an `AbstractSkip` is.
    """

    function: Callable[..., Any] = eqx.field(static=True)

    def __call__(
        self, updates: Updates, gradient_step: Int[Array, ""], params: Params | None
    ) -> Any:
        return self.function(updates, gradient_step, params)

    def _code(self) -> Any:
        return self.function


class AnySkip(AbstractSkip):
    """Leaves out what any of several conditions leaves out, and reports what all of them do.

    **Arguments:**

    - `conditions`: the conditions; each is asked.
    """

    conditions: tuple[Callable[..., Any], ...]

    @classmethod
    def join(cls, *conditions: Any) -> "AbstractSkip":
        """One condition from several, flattened."""
        flat: list[Any] = []
        for condition in map(as_skip, conditions):
            flat += condition.conditions if isinstance(condition, cls) else [condition]
        return cls(tuple(flat))

    def __call__(
        self, updates: Updates, gradient_step: Int[Array, ""], params: Params | None
    ) -> tuple[Any, Mapping[str, Any]]:
        skip: Any = False
        known: dict[str, Any] = {}
        for condition in self.conditions:
            own, report = asked(condition, updates, gradient_step, params)
            twice = [name for name in report if name in known]
            if twice:
                raise ValueError(
                    f"Two of the conditions {self!r} report '{twice[0]}'. Give them other names."
                )
            skip = jnp.logical_or(skip, own)
            known |= report
        return skip, known

    def _code(self) -> Infix:
        return Infix("|", self.conditions)


def as_skip(condition: Any) -> Any:
    """A condition from what a user gave: a module is kept, a plain function wrapped."""
    if not callable(condition) or isinstance(condition, type):
        raise TypeError(
            "EveryK.skip must be a condition such as `sl.SkipNotFinite()`, or a function of "
            f"(updates, gradient_step, params), got {condition!r}.{uncalled(condition)}"
        )
    return condition if isinstance(condition, eqx.Module) else FunctionSkip(condition)


def asked(
    condition: Callable[..., Any], updates: Updates, gradient_step: Any, params: Params | None
) -> tuple[Bool[Array, ""], dict[str, Array]]:
    """What a condition says of one mini-batch; refused where it is not of the form it must have."""
    given = condition(updates, gradient_step, params)
    must = (
        "The `skip` of every_k must return a pair: a bool scalar, and a dict of scalars by name, "
        f"which may be empty. {condition!r} returned "
    )
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"{must}{_kind(given)}.")
    skip, report = given
    if _kind(skip) != "a bool scalar":
        raise TypeError(f"{must}{_kind(skip)} in the first place.")
    if not isinstance(report, Mapping):
        raise TypeError(f"{must}{_kind(report)} in the second place.")
    for name, x in report.items():
        if not isinstance(name, str) or not _kind(x).endswith(" scalar"):
            raise TypeError(f"{must}{_kind(x)} under {name!r}.")
        if name in RESERVED:
            raise ValueError(
                f"{condition!r} reports '{name}', which every_k reports itself. Give it another "
                "name."
            )
    # What is skipped is reported once, for all conditions together.
    return jnp.asarray(skip), {n: jnp.asarray(x) for n, x in report.items() if n != "should_skip"}


def _kind(x: Any) -> str:
    """What a condition returned, in words."""
    if isinstance(x, bool | int | float | complex):
        x = np.asarray(x)
    if not tree.is_array(x):
        size = f" of {len(x)}" if isinstance(x, tuple | list) else ""
        return f"a {type(x).__name__}{size}"
    if x.shape == ():
        return f"{'an' if x.dtype.kind == 'i' else 'a'} {x.dtype} scalar"
    return f"an array of dtype {x.dtype} and shape {x.shape}"
