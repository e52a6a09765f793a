"""Rules with `over = "matrix"`: phases that see one matrix, and what they refresh."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PyTree

import slalom as sl
from helpers import slalom_trajectory
from slalom.fields import layout_field


class WhitenState(eqx.Module):
    age: jax.Array = sl.fields.per_leaf()
    mean: PyTree = sl.fields.per_param()
    root: PyTree = sl.fields.per_param()


class Whiten(sl.AbstractRule):
    every: int = sl.fields.count_field(2)
    layout: Any = layout_field()

    over = "matrix"
    refreshes = ("root",)

    def init(self, params):
        mean, root = (
            self.for_each_matrix(params, lambda n, m, dtype: (jnp.zeros((n, n), dtype),))
            for _ in range(2)
        )
        return WhitenState(sl.tree.fresh_count(), mean, root)

    def begin(self, state):
        self.due = state.age % self.every == 0
        state.age = sl.tree.increment(state.age)

    def advance(self, g, leaf):
        leaf.mean = (0.5 * leaf.mean[0] + g @ g.T,)

    def refresh(self, g, leaf):
        leaf.mean, mean = (), leaf.mean[0]  # is dropped
        leaf.root = (jnp.linalg.inv(mean + jnp.eye(len(mean), dtype=mean.dtype)),)

    def direction(self, g, leaf):
        return leaf.root[0] @ g


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def test_a_rule_for_matrices_is_its_formula_for_each_of_a_stack():
    start, grads = drawn(2, 3, 4), drawn(5, 2, 3, 4)
    ours, _ = slalom_trajectory(Whiten(layout="soi") | sl.Scale(-0.1), start, grads)
    for i in range(2):
        p, mean, root = np.asarray(start[i]), np.zeros((3, 3)), np.zeros((3, 3))
        for t, (g, there) in enumerate(zip(np.asarray(grads[:, i]), ours[:, i], strict=True)):
            mean = 0.5 * mean + g @ g.T
            root = np.linalg.inv(mean + np.eye(3)) if t % 2 == 0 else root
            p = p - 0.1 * root @ g
            np.testing.assert_allclose(there, p, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_each_leaf_may_be_due_by_itself_with_keys_and_sums_of_its_own():
    params = {"a": drawn(3, 4), "b": drawn(3, 4)}
    tx = Whiten(every=10)
    _, state = tx.update(params, tx.init(params))
    ages = jnp.array([10, 3], jnp.int32)
    _, new = tx.update(params, eqx.tree_at(lambda s: s.age, state, ages))
    assert jnp.any(new.root["a"][0] != state.root["a"][0])
    assert jnp.all(new.root["b"][0] == state.root["b"][0])

    params = {"a": jnp.ones((2, 3, 4)), "b": jnp.ones((2, 3, 4))}
    tx = Noisy(layout="soi")
    updates, _ = tx.update(params, tx.init(params))
    noise = [m - 48**-0.5 for x in updates.values() for m in x]
    assert len({round(float(x[0, 0]), 5) for x in noise}) == 4
    expected = jax.random.fold_in(jax.random.key(0), 0xE8B7BE43)  # the CRC-32 of "a"
    expected = jax.random.normal(jax.random.fold_in(expected, 1), (3, 4))
    np.testing.assert_allclose(noise[1], expected, atol=1e-5)


class Noisy(sl.AbstractRule):
    layout: Any = layout_field()

    over = "matrix"

    def begin(self, state):
        self.key = jax.random.key(0)

    def measure(self, g, leaf):
        return {"square": jnp.sum(g**2)}

    def finish(self, sums, state):
        self.size = jnp.sqrt(sums["square"])

    def direction(self, g, leaf):
        return g / self.size + jax.random.normal(self.key, g.shape)
