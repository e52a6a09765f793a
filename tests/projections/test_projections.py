"""Projections of trees, and parameters that `.project` keeps in a set."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax.projections as op
import pytest

import slalom as sl
from helpers import (
    assert_close,
    assert_same_bits,
    at,
    gradients,
    lenient,
    mlp,
    nested_dict,
    params_of,
    slow_except,
)

P = sl.projections
MODEL = nested_dict(jax.random.key(0))
GRADS = gradients(MODEL, 4)
NORMAL = {"a": jnp.array([0.3, -1.2, 2.0]), "b": [jnp.array(0.7), None]}
LOWER = {"a": jnp.array([0.0, -1.0, 0.5]), "b": [jnp.array(-0.5), None]}

# Each with the function of Optax, and with a tree in the set that is not on its boundary.
SETS = {
    "non_negative": (P.non_negative(), op.projection_non_negative),
    "box": (P.box(-0.5, 0.8), lambda x: op.projection_box(x, full(x, -0.5), full(x, 0.8))),
    "box of trees": (P.box(LOWER, None), lambda x: op.projection_box(x, LOWER, full(x, jnp.inf))),
    "hypercube": (P.hypercube(0.7), lambda x: op.projection_box(x, full(x, 0.0), full(x, 0.7))),
    "linf_ball": (P.linf_ball(0.7), lambda x: op.projection_linf_ball(x, 0.7)),
    "simplex": (P.simplex(2.0), lambda x: op.projection_simplex(x, 2.0)),
    "l1_ball": (P.l1_ball(1.5), lambda x: op.projection_l1_ball(x, 1.5)),
    "l2_ball": (P.l2_ball(1.5), lambda x: op.projection_l2_ball(x, 1.5)),
    "vector": (P.vector(NORMAL), lambda x: op.projection_vector(x, NORMAL)),
    "hyperplane": (P.hyperplane(NORMAL, 0.4), lambda x: op.projection_hyperplane(x, NORMAL, 0.4)),
    "halfspace": (P.halfspace(NORMAL, 0.4), lambda x: op.projection_halfspace(x, NORMAL, 0.4)),
}
SPHERES = {
    "l1_sphere": (P.l1_sphere(2.0), lambda x: op.projection_l1_sphere(x, 2.0)),
    "l2_sphere": (P.l2_sphere(2.0), lambda x: op.projection_l2_sphere(x, 2.0)),
}
ALL = SETS | SPHERES
BALLS = ("linf_ball", "l1_ball", "l1_sphere", "l2_ball", "l2_sphere")
LIKE_NORMAL = ("box of trees", "vector", "hyperplane", "halfspace")
OF_ANY_TREE = [name for name in ALL if name not in LIKE_NORMAL]


def full(tree, value):
    return jax.tree.map(lambda x: jnp.full_like(x, value), tree)


def as_tree(numbers, dtype=None):
    numbers = jnp.asarray(numbers, dtype)
    return {"a": numbers[:3], "b": [numbers[3], None]}


def as_vector(tree):
    leaves = [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)]
    return np.concatenate([np.zeros(0), *leaves])


def projected(x, names=ALL, of=lambda fn: fn):
    """What each projection makes of a tree, by one program."""
    return jax.jit(lambda x: {name: of(ALL[name][0])(x) for name in names})(x)


_random = np.random.default_rng(0)
POINTS = np.concatenate(
    [
        _random.normal(size=(40, 4)) * 2,
        _random.integers(-2, 3, (40, 4)),  # with ties and zeros
        [[0, 0, 0, 0], [1, 1, 1, 1], [4, -4, 4, -4]],
    ]
).astype(np.float32)


def each_point(fns, points):
    """The points that functions of trees give, as rows, by one program."""

    def rows(fn, x):
        p = jax.vmap(lambda x: fn(as_tree(x)))(x)
        return jnp.column_stack([p["a"], p["b"][0]])

    made = jax.jit(lambda points: {name: rows(fn, points[name]) for name, fn in fns.items()})
    return {name: np.asarray(found, np.float64) for name, found in made(points).items()}


@pytest.fixture(scope="module")
def nearest():
    return each_point({name: fn for name, (fn, _) in ALL.items()}, dict.fromkeys(ALL, POINTS))


@pytest.mark.slow
def test_the_results_are_those_of_optax(nearest):
    with lenient():
        theirs = each_point({name: fn for name, (_, fn) in ALL.items()}, dict.fromkeys(ALL, POINTS))
    for name in ALL:
        # Optax leaves the sphere at zeros.
        rows = np.abs(POINTS).min(axis=1) > 1e-3 if name in SPHERES else slice(None)
        ours, expected = nearest[name][rows], theirs[name][rows]
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_no_tree_of_the_set_is_nearer(nearest):
    again = each_point(
        {name: fn for name, (fn, _) in SETS.items()},
        {name: nearest[name].astype(np.float32) for name in SETS},
    )
    for name in SETS:
        p = nearest[name]
        # p is the nearest point if and only if ⟨x − p, q − p⟩ ≤ 0 for every q in the convex set.
        assert np.einsum("pi,pqi->pq", POINTS - p, p - p[:, None]).max() <= 1e-4, name
        np.testing.assert_allclose(again[name], p, atol=1e-5, err_msg=name)
    for name in SPHERES:
        p = nearest[name]
        apart = np.linalg.norm(POINTS[:, None] - p, axis=2)
        assert (np.diagonal(apart) <= apart.min(axis=1) + 1e-5).all(), name
        lengths = np.linalg.norm(p, ord=1 if name == "l1_sphere" else 2, axis=1)
        np.testing.assert_allclose(lengths, 2.0, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_simplices_of_many_numbers_and_bounds_follow_the_model():
    x = 1e6 * jax.random.normal(jax.random.key(0), (100_000,))
    p = P.simplex()({"a": x[:70_000], "b": x[70_000:].reshape(100, 300)})
    assert as_vector(p).min() == 0
    assert as_vector(p).sum() == pytest.approx(1.0, rel=1e-6)
    p = P.simplex(10.0)(x / 1e6)
    x = np.asarray(x / 1e6, np.float64)
    u = np.sort(x)[::-1]
    tau = (np.cumsum(u) - 10.0) / np.arange(1, len(u) + 1)
    np.testing.assert_allclose(p, np.maximum(x - tau[np.nonzero(u > tau)[0][-1]], 0), atol=1e-6)

    fn = P.l2_ball(0.5)
    model, opt = steps(sl.sgd(0.1).project(fn))
    assert_same_bits(opt.eval_params(model), model)
    model, opt = steps(sl.sgd(0.1).lookahead(3, 0.5).project(fn))
    assert_same_bits(opt.eval_params(model), opt.state_of("outer").slow)

    # A bound like the model may have anything at its functions, and at what is not selected.
    model, head = mlp(), sl.where.path("layers.1.**")
    bound = jax.tree.map(lambda x: jnp.full_like(x, 0.1) if eqx.is_array(x) else x, model)
    grads = jax.tree.map(jnp.zeros_like, params_of(model))
    for upper, where in ((bound, None), (params_of(bound), None), (bound, head)):
        opt = sl.Optimizer(sl.sgd(0.1).project(P.box(None, upper), where=where), model)
        new, _ = opt.step(model, grads)
        selected = params_of(new if where is None else new.layers[1])
        assert max(float(jnp.max(x)) for x in jax.tree.leaves(selected)) <= np.float32(0.1)
        assert new.activation is model.activation


@pytest.mark.slow
def test_norms_of_any_size_and_numbers_of_projections():
    for size in (1e-30, 1e30):
        x = {"w": size * jnp.array([3.0, 4.0])}
        np.testing.assert_allclose(P.l2_sphere(5.0)(x)["w"], [3.0, 4.0], rtol=1e-6)
        inside = P.l2_ball(5.0)(x)["w"]
        np.testing.assert_allclose(inside, jnp.array([3.0, 4.0]) * min(size, 1.0), rtol=1e-6)
    for fn in (P.l1_ball(100.0), P.l2_ball(100.0), P.linf_ball(100.0), P.box(-9, 9)):
        assert_same_bits(fn(MODEL), MODEL)

    schedule = sl.schedules.piecewise_constant(0.5, {1: 0.5})
    model, opt = steps(sl.sgd(0.1).project(P.l2_ball(schedule)), number=2)
    assert float(sl.tree.global_norm(model)) == pytest.approx(0.25, rel=1e-6)
    assert opt.hyperparams["project.l2_ball.scale"] == 0.25
    opt = sl.Optimizer(sl.sgd(0.1).project(P.l2_ball()), MODEL).with_hyperparams(scale=0.125)
    model, opt = opt.step(MODEL, at(GRADS, 0))
    assert float(sl.tree.global_norm(model)) == pytest.approx(0.125, rel=1e-6)
    assert "sl.projections.l2_ball(scale=0.125)" in repr(opt.transform)

    assert P.l2_ball(2) == P.l2_ball(2.0)
    assert hash(P.l2_ball(2.0)) == hash(P.l2_ball(2.0))
    assert P.l2_ball(2.0) != P.l2_ball(3.0)
    for fn in (P.non_negative(), P.box(0, None), P.simplex(), P.l1_sphere(2.5)):
        assert eval(repr(fn), {"sl": sl}) == fn
    assert repr(P.l1_ball(2.0)) == "sl.projections.l1_ball(scale=2.0)"

    names = {name.removeprefix("projection_") for name in dir(op) if name[:11] == "projection_"}
    assert names <= set(P.__all__)


DTYPES = ("bfloat16, float64", "bfloat16", "float16", "float64")


@pytest.mark.parametrize("dtypes", slow_except(DTYPES, DTYPES[0]))
def test_every_leaf_keeps_its_dtype(dtypes, x64):
    first, last = (dtypes.split(", ") * 2)[:2]
    x = {"a": jnp.array([0.9, -2.0, 1.5], first), "b": [jnp.array(0.25, last), None]}
    p, wide = projected(x), projected(jax.tree.map(lambda x: x.astype(jnp.float64), x))
    # Of several dtypes, sums are as exact as the narrowest.
    eps = float(jnp.finfo(first).eps)
    atol = 1e-2 if first != last else 4 * eps if first != "float64" else 1e-6
    for name in ALL:
        assert (p[name]["a"].dtype, p[name]["b"][0].dtype) == (first, last), name
        exact = as_vector(wide[name])
        np.testing.assert_allclose(as_vector(p[name]), exact, atol=atol, err_msg=name)


@pytest.mark.slow
def test_empty_trees_single_leaves_and_complex_numbers_as_pairs():
    x = [0.9, -2.0, 1.5, 0.25]
    alone, together = projected(jnp.array(x), OF_ANY_TREE), projected(as_tree(x))
    for name in OF_ANY_TREE:
        fn, _ = ALL[name]
        assert fn({"hole": None}) == {"hole": None}, name
        assert fn({"w": jnp.zeros((0, 2))})["w"].shape == (0, 2), name
        np.testing.assert_allclose(as_vector(together[name]), alone[name], rtol=1e-6, err_msg=name)

    # Its modulus is projected, and its phase kept: turning all numbers turns the result.
    x = jnp.array([0.9, 2.0, 1.5, 0.25])
    turn = np.exp(1j * np.arange(4.0)).astype(np.complex64)
    turned, plain = projected(x.astype(jnp.complex64) * turn, BALLS), projected(x, BALLS)
    for name in BALLS:
        assert turned[name].dtype == jnp.complex64, name
        np.testing.assert_allclose(
            turned[name], np.asarray(plain[name]) * turn, atol=1e-6, err_msg=name
        )
    for size in (1e20, 1e-30):
        x = jnp.asarray(np.array([3 + 4j, 0]) * size, jnp.complex64)
        p = P.l1_ball(size / 2)(x)
        np.testing.assert_allclose(p, np.array([0.3 + 0.4j, 0]) * size, rtol=1e-6)

    x, a = jnp.array([1 + 2j, 3 - 1j]), jnp.array([2 - 1j, 0.5j])
    parts = lambda z: jnp.stack([z.real, z.imag])  # noqa: E731
    for make in (P.vector, lambda a: P.hyperplane(a, 2.0), lambda a: P.halfspace(a, -2.0)):
        np.testing.assert_allclose(parts(make(a)(x)), make(parts(a))(parts(x)), rtol=1e-6)


@pytest.mark.slow
def test_derivatives_are_finite_at_corners_and_nan_stays_visible():
    def slope(fn):
        return jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fn(x))))

    for corner in (0.0, 0.7):
        for name, gradient in projected(as_tree([corner] * 4, jnp.float32), of=slope).items():
            assert np.all(np.isfinite(as_vector(gradient))), (name, corner)

    others = {"sphere": P.sphere(), "rows on spheres": P.sphere(axis=-1)}
    others |= {"stiefel": P.stiefel(), "psd": P.psd()}
    fns = others | {name: ALL[name][0] for name in OF_ANY_TREE}
    # The maximum of many numbers, which XLA computes in parts, misses NaN.
    large = jax.jit(lambda x: {name: fn(x) for name, fn in fns.items()})
    small = {"w": jnp.array([1.0, jnp.nan])}
    seen = large(jnp.full((64, 64), jnp.nan)) | {
        f"{name} of two": p["w"] for name, p in projected(small, OF_ANY_TREE).items()
    }
    for name, p in seen.items():
        assert np.any(np.isnan(p)), name


@pytest.mark.slow
def test_derivatives_are_those_of_differences(x64):
    x, direction = as_tree([0.95, -2.1, 1.5, 0.35]), as_tree([0.3, 0.4, -0.5, 0.6])

    def derivatives(fn):
        def along(x):
            _, tangent = jax.jvp(fn, (x,), (direction,))
            ahead = fn(jax.tree.map(lambda x, d: x + 1e-6 * d, x, direction))
            back = fn(jax.tree.map(lambda x, d: x - 1e-6 * d, x, direction))
            return tangent, jax.tree.map(lambda a, b: (a - b) / 2e-6, ahead, back)

        return along

    for name, (tangent, difference) in projected(x, of=derivatives).items():
        assert_close(tangent, difference, atol=1e-6, err_msg=name)


def steps(tx, model=MODEL, number=4):
    opt = sl.Optimizer(tx, model)
    for i in range(number):
        model, opt = opt.step(
            model, jax.tree.map(lambda g, p: g.astype(p.dtype), at(GRADS, i), model)
        )
    return model, opt


@pytest.mark.slow
def test_step_writes_the_projected_sum_of_selected_parameters_rounded_once():
    fn = P.l2_ball(1.1)
    summed = jax.jit(lambda p, g: fn(jax.tree.map(lambda p, g: p - 0.1 * g, p, g)))
    for dtype, rtol in ((jnp.float32, 1e-6), (jnp.bfloat16, 0.01)):
        model, grads = jax.tree.map(lambda p, d=dtype: p.astype(d), (MODEL, at(GRADS, 0)))
        stepped, _ = steps(sl.sgd(0.1).project(fn), model, 1)
        assert {x.dtype for x in jax.tree.leaves(stepped)} == {jnp.dtype(dtype)}
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), (stepped, model, grads))
        assert_close(wide[0], summed(*wide[1:]), rtol=rtol)
        if dtype == jnp.float32:
            assert float(sl.tree.global_norm(stepped)) == pytest.approx(1.1, rel=1e-6)

    matrices = sl.where.ndim(min=2)
    model, _ = steps(sl.sgd(0.1).project(P.l2_ball(0.4), where=matrices), number=3)
    plain, _ = steps(sl.sgd(0.1), number=3)
    assert jnp.linalg.norm(model["dense"]["weight"]) == pytest.approx(0.4, rel=1e-6)
    assert_same_bits(model["dense"]["bias"], plain["dense"]["bias"])
    assert_same_bits(model["scales"], plain["scales"])
    tx = sl.sgd(0.1).partition({matrices: sl.sgd(0.1).project(P.l2_ball(0.4))})
    grouped, _ = steps(tx, number=3)
    assert_same_bits(grouped, model)

    opt = sl.Optimizer(sl.sgd(0.1).project(P.linf_ball(0.5)), MODEL)
    assert "cond[" not in str(jax.make_jaxpr(lambda m, g: opt.step(m, g)[0])(MODEL, at(GRADS, 0)))


# The last one shrinks: an average of parameters in it is outside of what it is later.
CURVED = {
    "l1_sphere": P.l1_sphere(),
    "sphere": P.sphere(),
    "stiefel": P.stiefel(),
    "l2_ball": P.l2_ball(sl.schedules.linear(1.0, 0.5, transition_steps=4)),
}
ELSEWHERE = (
    sl.sgd(0.5).average(),
    sl.sgd(0.5).outer(sl.sgd(0.7, momentum=0.9), 2),
    sl.sgd(0.5).partition({sl.where.path("u"): sl.sgd(0.5).average(0.5)}),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CURVED)
def test_what_is_evaluated_is_in_the_set_also_where_it_bends_or_shrinks(name):
    onto, model = CURVED[name], {"u": jnp.eye(3, 2), "v": jnp.eye(2)}
    grads = gradients(model, 3)
    for inner in ELSEWHERE:
        trained, opt = model, sl.Optimizer(inner.project(onto), model)
        for i in range(3):
            trained, opt = opt.step(trained, jax.tree.map(lambda g, i=i: g[i], grads))
        evaluated = opt.eval_params(trained)
        apart = jax.tree.map(jnp.subtract, evaluated, trained)
        assert sl.tree.global_norm(apart) > 0.01
        nearest = onto(evaluated, sl.Context(step=opt.count))
        assert_close(evaluated, nearest, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_recording_changes_nothing_and_idle_steps_write_nothing():
    tx = sl.adam(0.1).project(P.box(-0.1, 0.1))
    recorded, opt = steps(tx.record())
    assert_same_bits(recorded, steps(tx)[0])
    assert all(jnp.all(jnp.abs(x) <= jnp.float32(0.1)) for x in jax.tree.leaves(recorded))
    norm = sl.tree.global_norm(recorded)
    np.testing.assert_allclose(opt.metrics["param_norm"], norm, rtol=1e-6)
    # The norm of the update is that of the change, not of what the inner transform asked for.
    before, _ = steps(tx, number=3)
    change = sl.tree.global_norm(jax.tree.map(lambda a, b: a - b, recorded, before))
    np.testing.assert_allclose(opt.metrics["update_norm"], change, rtol=1e-5, atol=1e-7)

    tx = sl.sgd(0.1).every_k(2).project(P.l2_ball(0.5))
    idle, opt = steps(tx, number=1)
    assert_same_bits(idle, MODEL)
    assert not opt.has_updated
    inside, opt = steps(tx, number=2)
    assert opt.has_updated
    assert float(sl.tree.global_norm(inside)) == pytest.approx(0.5, rel=1e-6)
    other, _ = steps(sl.sgd(0.1).project(P.l2_ball(0.5)).every_k(2), number=2)
    assert_close(inside, other, rtol=1e-6)


@pytest.mark.slow
def test_functions_of_optax_and_modules_are_projections_too_and_see_complex_parameters():
    with lenient():
        model, _ = steps(sl.sgd(0.1).project(op.projection_simplex))
    expected, _ = steps(sl.sgd(0.1).project(lambda p: P.simplex()(p)))
    assert_close(model, expected, atol=1e-6)

    class Shrink(eqx.Module):
        factor: jax.Array

        def __call__(self, params):
            return jax.tree.map(lambda p: p * self.factor, params)

    model, _ = steps(sl.sgd(0.0).project(Shrink(jnp.array(0.5))), number=1)
    assert_same_bits(model, jax.tree.map(lambda p: p * 0.5, MODEL))
    model = {"z": jnp.array([3 + 4j]), "w": jnp.ones(2)}
    opt = sl.Optimizer(sl.sgd(0.0).project(P.linf_ball(1.0)), model)
    model, _ = opt.step(model, jax.tree.map(jnp.zeros_like, model))
    np.testing.assert_allclose(model["z"], [0.6 + 0.8j], rtol=1e-6)
