"""What all rules for matrices do: phases at one matrix, stacks as their layers, resets, meshes."""

import copy
import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PyTree
from known_matrix import drawn_matrix

import slalom as sl
from helpers import (
    compiled_step,
    kind_of,
    known,
    sampled,
    slalom_trajectory,
    slow_except,
    transforms_in,
)
from slalom.fields import layout_field
from slalom.where.layout import as_layout
from table import EVERYTHING, RECIPES, WITH_GRADIENT, rows


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
        leaf.mean, mean = (0 * leaf.mean[0],), leaf.mean[0]  # is dropped
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


OF_A_LEAF = {
    *("novograd", "novograd, decay_where", "lamb", "lars", "fromage", "mars", "stable_adamw"),
    *("adafactor", "adafactor, momentum", "sm3"),
}
"""Their docstrings speak of the norm, the root mean square or the axes of one leaf."""

OF_ALL = {"lbfgs", "ss_broyden", "polyak_sgd", "dog", "dowg", "momo", "momo_adam"}
"""One number for all parameters together."""

GROWS_LATER = {"prodigy", "dadapt_adamw"}
"""The number for all parameters stays as it is in the first steps."""

DRAWN = {"noisy_sgd", "apollo", "ivon", "dion", "kron"}
"""Random numbers, which are other ones for another shape."""

NAMES = [
    name
    for name, tx in RECIPES.items()
    if name in WITH_GRADIENT
    and name not in GROWS_LATER
    and not all(part.elementwise for part in transforms_in(tx))
]


def apart(tx):
    """How far a stack is from its layers after three steps, relative to the way that they went."""
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 5, use_bias=False, key=key))(
        jax.random.split(jax.random.key(0))
    )
    drawn = np.random.default_rng(0).standard_normal((3, *layers.weight.shape))
    grads = jnp.asarray(drawn * np.array([10, 0.1])[:, None, None], jnp.float32)

    def run(layers, grads):
        opt = sl.Optimizer(tx, layers)
        for g in grads:
            g = eqx.tree_at(lambda layer: layer.weight, layers, g)
            layers, opt = opt.step(layers, g, **known(layers, g))
        return layers.weight

    def both(layers, grads):
        each = [run(jax.tree.map(lambda x, i=i: x[i], layers), grads[:, i]) for i in range(2)]
        return run(layers, grads), jnp.stack(each)

    together, each = jax.jit(both)(layers, grads)
    moved = jnp.max(jnp.abs(each - layers.weight), (1, 2), keepdims=True)
    return float(jnp.max(jnp.abs(together - each) / moved))


@rows(NAMES, everyday=(), ci=("muon", "norm_muon", "scion", "adafactor", "dog", "dion"))
def test_a_stack_is_its_layers(row):
    if row.name in OF_A_LEAF | OF_ALL | DRAWN:
        assert apart(row.tx) > 1e-3
    else:
        # The outer products of few gradients are singular, so their roots multiply rounding errors.
        assert apart(row.tx) < (2e-3 if row.name == "shampoo" else 1e-4)


WITH_LAYOUT = {
    type(part).__name__: part
    for tx in EVERYTHING.values()
    for part in transforms_in(tx)
    if "layout" in vars(part) and not isinstance(part, sl.contrib.QKClip)
}


def reading(rule, layout):
    """A rule that reads the array 'w', and no other, by another layout."""
    rule = copy.copy(rule)
    object.__setattr__(rule, "layout", as_layout({sl.where.path("w*"): layout}))
    return rule


@pytest.mark.parametrize("name", sampled(WITH_LAYOUT, "ScaleByGalore", "Orthogonalize"))
def test_unequal_blocks_are_matrices_of_their_own_or_one_matrix_as_equal_ones_are(name):
    random = np.random.default_rng(0)
    w, g = (jnp.asarray(random.standard_normal((12, 5)), jnp.float32) for _ in range(2))

    def update(layout, cuts=()):
        rule, names = reading(WITH_LAYOUT[name], layout), [f"w{i}" for i in range(len(cuts) + 1)]

        @jax.jit
        def run(w, g):
            params, grads = (dict(zip(names, jnp.split(x, cuts), strict=True)) for x in (w, g))
            updates, _ = rule.update(grads, rule.init(params), params, sl.Context(step=0))
            return jnp.concatenate([updates[name] for name in names])

        return run(w, g)

    def close(one, other):
        return np.allclose(one, other, rtol=1e-5, atol=1e-6)

    try:
        found = update("(4:1:1o)i")
    except ValueError as error:
        assert f"{name} cannot read 'w0' in blocks of unequal sizes" in str(error)  # noqa: PT017  or none
        return
    if close(found, update("oi", (8, 10))):
        return
    assert close(found, update("oi"))
    assert close(update("(3o)i"), update("oi"))


EACH = {
    "soap": functools.partial(sl.ScaleBySoap, precondition_frequency=2),
    "kl_soap": functools.partial(sl.contrib.ScaleByKlSoap, precondition_frequency=2),
    "splus": functools.partial(sl.contrib.ScaleBySplus, precondition_frequency=2),
    "kron": functools.partial(sl.ScaleByKron, 0.5),
    "shampoo": lambda **options: sl.ScaleByShampoo(
        precondition_frequency=2, block_size=2, **options
    ).graft(sl.ScaleByAdam()),
}
LARGE = EACH | {"shampoo": lambda: sl.ScaleByShampoo().graft(sl.ScaleByAdam())}

each = pytest.mark.parametrize("name", slow_except(EACH))


def descent(name, **options):
    return (EACH | {"orthogonalize": sl.Orthogonalize})[name](**options) | sl.Scale(-0.1)


@each
def test_a_stack_of_two_and_their_transposes_walk_the_paths_of_the_two(name, same_noise):
    start, grads = drawn_matrix((2, 4, 3), 6, jnp.float32)
    stacked, _ = slalom_trajectory(descent(name, layout="sio"), start, grads)
    alone = jax.jit(lambda p, g: slalom_trajectory(descent(name), p, g)[0])
    for i in range(2):
        want = alone(start[i], grads[:, i])
        np.testing.assert_allclose(stacked[:, i], want, rtol=1e-5, atol=1e-6)
    turned, _ = slalom_trajectory(descent(name, layout="oi"), start[1].T, grads[:, 1].mT)
    np.testing.assert_allclose(turned.mT, want, rtol=1e-6, atol=1e-7)


EXTREMES = [(name, dtype) for name in EACH for dtype in ("bfloat16", "float16", "float32")]


@pytest.mark.parametrize("case", sampled(EXTREMES, turn=1), ids="-".join)
def test_extreme_gradients_stay_finite(case):
    name, dtype = case
    limits = jnp.finfo(dtype)
    # Of rank 1, with a row and a column of zeros.
    one = np.outer([1.0, -2.0, 3.0, 0.0], [1.0, 2.0, 0.0])
    sizes = [0.0, float(limits.tiny), 1.0, float(limits.max) / 8, 1.0, 0.0]
    grads = jnp.stack([jnp.asarray(one * size, dtype) for size in sizes])
    run = jax.jit(lambda g: slalom_trajectory(descent(name), jnp.ones((4, 3), dtype), g))
    for given in (grads, grads[::-1]):
        history, opt = run(given)
        assert jnp.all(jnp.isfinite(history))
        assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(opt))


@each
def test_a_reset_parameter_starts_again_and_the_others_go_on(name, same_noise):
    model = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}
    _, grads = drawn_matrix((3, 2), 5, jnp.float32)
    step = jax.jit(lambda model, opt, g: opt.step(model, {"a": g, "b": g}))
    opt = sl.Optimizer(descent(name), model)
    for g in grads[:4]:
        model, opt = step(model, opt, g)
    whole, _ = step(model, opt, grads[4])
    after, _ = step(model, opt.reset(model, sl.where.path("b")), grads[4])
    fresh, _ = step(model, sl.Optimizer(descent(name), model), grads[4])
    np.testing.assert_allclose(after["a"], whole["a"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after["b"], fresh["b"], rtol=1e-5, atol=1e-6)


AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
KINDS = {"auto": (AUTO, AUTO), "explicit": (EXPLICIT, EXPLICIT), "mixed": (AUTO, EXPLICIT)}
ON_A_MESH = [(name, kind) for kind in KINDS for name in EACH] + [("orthogonalize", "mixed")]


@pytest.mark.parametrize("case", sampled(ON_A_MESH), ids="-".join)
def test_sharded_matrices_take_the_same_path(case):
    name, kind = case
    # In float32, either path of KL-SOAP is up to 1e-6 away from the one in float64.
    with jax.enable_x64(name == "kl_soap"):
        # A square one, whose factors have no eigenvectors that rounding decides.
        start, grads = drawn_matrix((4, 4), 4, float if name == "kl_soap" else jnp.float32)
        whole, _ = slalom_trajectory(descent(name), start, grads)
        # With eight devices, its sides are divided among 4 and 2 of them.
        mesh = jax.make_mesh((jax.device_count() // 2, 2), ("a", "b"), axis_types=KINDS[kind])
        home = jax.NamedSharding(mesh, jax.P("a", "b"))
        start = jax.device_put(start, home)
        opt = sl.Optimizer(descent(name), start)
        before = kind_of(opt)
        step = jax.jit(lambda p, opt, g: opt.step(p, g))
        for g, there in zip(grads, whole, strict=True):
            start, opt = step(start, opt, jax.device_put(g, home))
            assert start.sharding == home
            np.testing.assert_allclose(start, there, rtol=1e-5, atol=1e-6)
        assert kind_of(opt) == before


def outermost_conditionals(jaxpr):
    inner = [e.params["jaxpr"].jaxpr for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    own = sum(e.primitive.name == "cond" for e in jaxpr.eqns)
    return own + sum(map(outermost_conditionals, inner))


FACTORIZATIONS = "householder_product", "geqrf", "qr", "eigh", "cholesky", "triangular_solve"


def factorizations(jaxpr, around=0):
    """The kinds of factorizations, with the number of conditionals around each."""
    for e in jaxpr.eqns:
        if e.primitive.name in FACTORIZATIONS:
            yield e.primitive.name, around
        for inner in jax.tree.leaves((*e.params.values(),)):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from factorizations(inner, around + (e.primitive.name == "cond"))


@each
def test_all_refreshes_are_in_one_conditional_that_idle_steps_skip(name):
    found = []
    for names in ("ab", "abc"):  # with c, matrices are stacked
        params = {n: jnp.ones((2, 3) if n == "b" else (3, 2)) for n in names}
        opt = sl.Optimizer(descent(name), params)
        jaxpr = jax.make_jaxpr(lambda opt=opt, p=params: opt.step(p, p)[0])().jaxpr
        assert outermost_conditionals(jaxpr) == 1
        found.append({*factorizations(jaxpr)})
    assert all(around for _, around in found[0])
    assert found[0] == found[1]  # a batched predicate would have both branches taken


def program(rule, shape, number):
    """Of a step on matrices of this shape."""
    return compiled_step(rule() | sl.Scale(-0.1), {str(i): jnp.ones(shape) for i in range(number)})


@each
def test_scratch_grows_slower_than_the_number_of_matrices_and_other_steps_copy_no_factor(name):
    one, four = (program(LARGE[name], (264, 256), number) for number in (1, 4))
    scratch = [p.memory_analysis().temp_size_in_bytes for p in (one, four)]
    assert scratch[1] <= 3.3 * scratch[0]
    assert scratch[1] <= 5 * 4 * (4 * 264 * 256)

    text = four.as_text()
    outside = text[text.index("\nENTRY") :]
    size = r"= f32\[(?:1,)?(?:264,264|256,256|69696|65536)\]\S* (?:fusion|dot|copy|transpose)\("
    # The means G·Gᴴ and Gᴴ·G change in each step: a product and a sum.
    assert len(re.findall(size, outside)) == (0 if name == "kron" else 4 * 4)


@pytest.mark.parametrize("name", sampled(EACH, turn=1))
def test_small_matrices_of_equal_shape_are_refreshed_by_the_same_calls(name):
    one, four = (program(EACH[name], (8, 6), number).as_text() for number in (1, 4))
    assert one.count("custom_call_target=") == four.count("custom_call_target=")
