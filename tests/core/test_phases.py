"""What the phases of a rule see, and in which order they come."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, PyTree

import slalom as sl
from helpers import after_steps, slow_except

params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2), "c": jnp.zeros(3)}
sizes = {"a": 6, "b": 2, "c": 3}


class CountingState(eqx.Module):
    mu: PyTree = sl.fields.param_like()
    last: Float[Array, ""] = sl.fields.until_reset()


class Counting(sl.AbstractRule):
    """Adds gradients, and returns its sums: the old one, the new one, and that of the leaf."""

    needs = ("params",)

    def init(self, params):
        return CountingState(mu=sl.tree.zeros_like(params), last=jnp.zeros(()))

    def measure(self, g, leaf):
        return {"old": jnp.sum(leaf.mu)}

    def advance(self, g, leaf):
        leaf.mu = leaf.mu + g

    def reduce(self, g, leaf):
        return {"new": jnp.sum(leaf.mu)}

    def finish(self, sums, state):
        self.old, self.new, self.own = sums["old"], sums["new"], sums.each("new")
        self.last, state.last = state.last, sums["new"]

    def direction(self, g, leaf):
        return leaf.mu + 10 * self.old + 100 * self.new + 1000 * self.own + 10000 * self.last


def expected(names, steps):
    """The parameters after steps with gradients of 1, of which these names are updated."""
    count = sum(sizes[name] for name in names)
    return {
        name: sum(
            t + 10 * count * (t - 1) + 100 * count * t + 1000 * n * t + 10000 * count * (t - 1)
            for t in range(1, steps + 1)
        )
        if name in names
        else 0
        for name, n in sizes.items()
    }


VARIANTS = {
    "plain": (Counting(), "abc"),
    "only some": (Counting().only(sl.where.ndim(1)), "bc"),
    "stored": (Counting().store("bfloat16"), "abc"),
    "master": (Counting().write("master"), "abc"),
    "stored master": (Counting().store("bfloat16").write("master"), "abc"),
    "accumulated": (Counting().every_k(1), "abc"),
}


@pytest.mark.parametrize("variant", slow_except(VARIANTS, "only some", "stored master"))
def test_finish_sees_the_sums_of_the_old_and_of_the_new_state(variant):
    tx, names = VARIANTS[variant]
    new, _ = after_steps(tx, 2, params, jax.tree.map(jnp.ones_like, params))
    for name, want in expected(names, 2).items():
        np.testing.assert_array_equal(new[name], want)


def test_groups_and_rules_without_state_or_leaves_have_their_own_sums():
    vectors = sl.where.ndim(1)
    opt = sl.Optimizer(Counting().partition({vectors: Counting()}), params)
    new, _ = opt.step(params, jax.tree.map(jnp.ones_like, params))
    for name, want in (expected("a", 1) | {n: expected("bc", 1)[n] for n in "bc"}).items():
        np.testing.assert_array_equal(new[name], want)

    class Mean(sl.AbstractRule):
        def reduce(self, g, leaf):
            return {"sum": jnp.sum(g), "size": jnp.asarray(g.size, g.dtype)}

        def finish(self, sums, state):
            self.mean = sums["sum"] / sums["size"]

        def direction(self, g, leaf):
            return g - self.mean

    updates, _ = Mean().update({"a": jnp.array([1.0, 2.0]), "b": jnp.array([6.0])}, None)
    np.testing.assert_array_equal(updates["a"], [-2, -1])
    np.testing.assert_array_equal(updates["b"], [3])
    (updates, state), empty = Counting().update({}, Counting().init({}), {}), {}
    assert updates == empty
    assert state.last == 0


@pytest.mark.slow
def test_each_run_of_a_vmap_has_its_own_sums():
    grads = jax.tree.map(lambda p: jnp.stack([jnp.ones_like(p), 2 * jnp.ones_like(p)]), params)
    tx = Counting()
    updates = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(params), params)[0]))(grads)
    for name, want in expected("abc", 1).items():
        np.testing.assert_array_equal(updates[name][0], want)
        np.testing.assert_array_equal(updates[name][1], 2 * want)


def test_a_rule_that_only_measures_is_finished_before_it_advances():
    class Early(Counting):
        reduce = sl.AbstractRule.reduce

        def measure(self, g, leaf):
            return {"square": jnp.sum(g**2)}

        def finish(self, sums, state):
            self.inverse = 1 / sums["square"]

        def advance(self, g, leaf):
            leaf.mu = leaf.mu + self.inverse * g

        def direction(self, g, leaf):
            return leaf.mu

    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = jax.jit(Early().update)(grads, Early().init(params), params)
    np.testing.assert_allclose(updates["a"], 1 / 11, rtol=1e-6)
    np.testing.assert_array_equal(state.mu["a"], updates["a"])


def test_sums_and_norms_have_the_highest_precision_of_a_leaf(x64):
    class Sum(sl.AbstractRule):
        def measure(self, g, leaf):
            return {"sum": jnp.sum(g)}

        def finish(self, sums, state):
            self.sum = sums["sum"]

        def direction(self, g, leaf):
            return g * 0 + self.sum

    grads = {"a": jnp.asarray([1.0], "float64"), "b": jnp.asarray([2.0**-40], "float32")}
    updates, _ = Sum().update(grads, None)
    assert updates["a"] == 1 + 2.0**-40
    assert updates["b"].dtype == jnp.float32

    rule, grads = Norms(), {"a": jnp.full((2, 2), 1e-30, "float32"), "b": jnp.zeros((2, 2))}
    updates, _ = jax.jit(lambda grads: rule.update(grads, rule.init(grads)))(grads)
    np.testing.assert_allclose(updates["a"], [[2e-30, 2e-30], [4e-30, 2]], rtol=1e-6)
    assert updates["b"].dtype == jnp.float64
    np.testing.assert_allclose(updates["b"], [[2e-30, 0], [0, 2]], rtol=1e-6)


class NormState(eqx.Module):
    mu: PyTree = sl.fields.param_like()


class Norms(sl.AbstractRule):
    """Keeps the gradients; returns the norm of all, that of the leaf, and that of the state."""

    def init(self, params):
        return NormState(sl.tree.zeros_like(params))

    def measure(self, g, leaf):
        return {"g": sl.tree.NormOf(g)}

    def advance(self, g, leaf):
        leaf.mu = 2 * g

    def reduce(self, g, leaf):
        return {"mu": sl.tree.NormOf(leaf.mu), "count": jnp.asarray(1.0)}

    def finish(self, sums, state):
        self.all, (self.own, self.mu), self.count = sums["g"], sums.each("g", "mu"), sums["count"]

    def direction(self, g, leaf):
        first = jnp.stack([self.all, self.own, self.mu, self.count]).reshape(2, 2)
        return jnp.zeros_like(g).at[:2, :2].set(first)


class NormsOfMatrices(Norms):
    over = "matrix"


@pytest.mark.slow
def test_norms_are_those_of_gradients_of_any_size_and_nan_where_one_is_not_finite():
    for rule in (Norms(), NormsOfMatrices()):

        @jax.jit
        def updates_of(size, rule=rule):
            grads = {"a": jnp.full((2, 8), size), "b": jnp.full((3, 3), 2 * size)}
            return rule.update(grads, rule.init(grads))[0]

        for size in (0.0, 1e-36, 1e-30, 1.0, 1e30, 3e36):
            updates = updates_of(size)
            for name, own in (("a", 4.0), ("b", 6.0)):
                found = updates[name][:2, :2]
                # A matrix has its outputs as rows, and here they are on the second axis.
                found = found.T if rule.over == "matrix" else found
                expected = np.array([[np.sqrt(52) * size, own * size], [2 * own * size, 2]])
                np.testing.assert_allclose(np.asarray(found, float), expected, rtol=1e-6)

    @jax.jit
    def updates_of(bad):
        grads = {"a": jnp.ones((2, 2)).at[0, 1].set(bad), "b": jnp.ones((2, 2))}
        return Norms().update(grads, Norms().init(grads))[0]

    for bad in (jnp.nan, jnp.inf):
        updates = updates_of(bad)
        np.testing.assert_array_equal(updates["a"], [[jnp.nan, jnp.nan], [jnp.nan, 2]])
        np.testing.assert_allclose(updates["b"], [[jnp.nan, 2], [4, 2]])
