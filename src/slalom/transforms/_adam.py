"""Code shared by Adam and its variants."""

import abc
import dataclasses
from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Inexact, Int, PyTree

from .. import tree
from .._core.context import Context
from .._core.marks import param_like, per_leaf
from .._core.transform import AbstractTransform, State
from .._types import Params, Updates


class ScaleByAdamState(eqx.Module):
    """The state of `ScaleByAdam` and its variants."""

    age: Int[Array, "*leaves"] = per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = param_like()
    nu: PyTree[Inexact[Array, "..."]] = param_like("nonnegative")


class AbstractAdam(AbstractTransform[State]):
    """A rule that updates some moments and derives the update from them.

    The first field of its state is `age`, the others are the moments. At each leaf `_moments` and
    `_direction` see the hyperparameters and what `_add_numbers` adds to them.
    """

    elementwise: ClassVar[bool] = True

    @abc.abstractmethod
    def _add_numbers(self, now: SimpleNamespace, age: Int[Array, "*leaves"]) -> None:
        """Adds the numbers that follow from hyperparameters and age, such as `now.c1`."""

    @abc.abstractmethod
    def _moments(self, now: Any, g: Array, *args: Any, **kwargs: Any) -> tuple[Array, ...]:
        """The new moments: called as `_moments(now, g, *old_moments)`."""

    @abc.abstractmethod
    def _direction(self, now: Any, g: Array, *args: Any, **kwargs: Any) -> Array:
        """The update: called as `_direction(now, g, *new_moments)`, with the moments as stored."""

    def update(
        self,
        updates: Updates,
        state: Any,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, Any]:
        del params
        age = tree.increment(state.age)
        now = self.at(context)
        self._add_numbers(now, age)
        _, *fields = dataclasses.fields(state)
        old = tuple(getattr(state, field.name) for field in fields)
        new = tree.map_leaves(self._moments, (updates, *old), now, like=old)
        updates = tree.map_leaves(self._direction, (updates, *new), now)
        return updates, type(state)(age, *new)


def add_mean_numbers(now: SimpleNamespace, age: Int[Array, "*leaves"], nesterov: bool) -> None:
    """Adds c₁ = 1 − β₁ and the factors that `debiased_mean` uses."""
    now.c1 = 1 - now.b1
    now.from_mu, now.from_g = tree.bias_correction(now.b1, age), None
    if nesterov:
        now.from_g = now.c1 * now.from_mu
        now.from_mu = now.b1 * tree.bias_correction(now.b1, tree.increment(age))


def debiased_mean(now: SimpleNamespace, g: Array, mu: Array) -> Array:
    """m̂ₜ = mₜ / (1 − β₁ᵗ), or with Nesterov β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ)."""
    if now.from_g is None:
        return now.from_mu * mu
    return now.from_mu * mu + now.from_g * g
