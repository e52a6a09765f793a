"""Combinations of the gradients of several losses."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import Counting, after_training, assert_close, slow_except
from slalom.combine import Terms

NAMES = ("first", "second")


def weights_of(combination, jacobian, losses=None):
    number = len(jacobian)
    losses = jnp.ones(number) if losses is None else losses
    jacobian = jnp.asarray(jacobian, losses.dtype)
    terms = Terms(losses, jacobian @ jacobian.T)
    return combination.at_step(terms, combination.init(number), None)[0]


# Of TorchJD's tests, with its own values of each combination.
JACOBIAN = np.array([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]])
OF_ITS_TESTS = (
    (sl.combine.UPGrad(), [0.292902, 1.900352, 1.900352]),
    (sl.combine.PCGrad(), [0.584795, 3.801170, 3.801170]),
    (sl.combine.MGDA(), [0.0, 1.0, 1.0]),
    (sl.combine.Fixed([0.5, 2.0]), [10.0, 2.5, 2.5]),
)
# Of TorchJD 0.18.0, `MGDA()(jacobian)`.
OF_TORCHJD = {
    (0, 3): [-0.1016572, -0.3675321, 0.4010811, -0.0959257],
    (1, 4): [0.029706, 0.1375429, -0.1888402, 0.0064461],
    (2, 5): [0.2587062, -0.2913959, -0.0329342, -0.0340337],
}


@pytest.mark.slow
def test_combined_gradients_are_those_of_torchjd():
    for combination, expected in OF_ITS_TESTS:
        found = weights_of(combination, JACOBIAN) @ JACOBIAN
        exact = not isinstance(combination, sl.combine.MGDA)
        tolerance = {"rtol": 2e-6} if exact else {"rtol": 1e-5, "atol": 1e-3}
        np.testing.assert_allclose(found, expected, **tolerance, err_msg=repr(combination))
    for (seed, number), expected in OF_TORCHJD.items():
        random = np.random.default_rng(seed)
        jacobian = random.standard_normal((number, 4)).astype(np.float32) - 0.2
        found = weights_of(sl.combine.MGDA(), jacobian) @ jacobian
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        # No term rises, up to the regularization.
        assert (jacobian @ found >= -1e-3 * np.linalg.norm(jacobian) ** 2).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_upgrad_solves_its_quadratic_programs(seed, x64):
    random = np.random.default_rng(seed)
    jacobian = random.standard_normal((5, 4)) + 0.3
    weights = np.asarray(weights_of(sl.combine.UPGrad(), jacobian, jnp.ones(5)))
    gram = jacobian @ jacobian.T
    gram = gram / np.trace(gram) + 1e-4 * np.eye(5)
    total = 0
    for i in range(5):
        least = np.eye(5)[i] / 5
        # Of all sets of numbers that are at their bounds, the one that is optimal.
        for free in itertools.product([False, True], repeat=5):
            free, v = np.array(free), least.copy()
            if free.any():
                rest = -(gram @ least)[free]
                v[free] += np.linalg.solve(gram[np.ix_(free, free)], rest)
            slope = gram @ v
            if (v >= least - 1e-12).all() and (slope[~free] >= -1e-12).all():
                total = total + v
                break
    np.testing.assert_allclose(weights, total, rtol=1e-9)
    # No term rises, up to the regularization.
    assert (jacobian @ (jacobian.T @ weights) >= -1e-3 * np.linalg.norm(jacobian) ** 2).all()


@pytest.mark.slow
def test_orders_and_draws_of_pcgrad_follow_the_key():
    jacobian = np.random.default_rng(1).standard_normal((3, 3)) - 0.4
    found = np.asarray(weights_of(sl.combine.PCGrad(), jacobian))

    def projected(i, order):
        g = jacobian[i]
        for j in order:
            g = g - min(g @ jacobian[j], 0) / (jacobian[j] @ jacobian[j]) * jacobian[j]
        return g

    choices = [
        [projected(i, order) for order in itertools.permutations(set(range(3)) - {i})]
        for i in range(3)
    ]
    sums = [np.sum(rows, axis=0) for rows in itertools.product(*choices)]
    assert min(np.abs(found @ jacobian - x).max() for x in sums) < 1e-5

    def run(combination):
        tx = sl.sgd(0.1).combine(combination, ("a", "b", "c"))
        # Three terms that conflict in pairs, so that the order of projection counts.
        step = sl.train_step(lambda m: {k: jnp.sum((m - x) ** 2) for k, x in points.items()})
        return np.asarray(after_training(step, tx, 4, jnp.zeros(2))[0])

    points = {"a": jnp.array([1.0, 0.3]), "b": jnp.array([-0.8, 1.0]), "c": jnp.array([0.1, -1.0])}
    for make in (sl.combine.PCGrad, lambda key: sl.combine.ReLoBRaLo(0.5, 0.1, 0.5, key)):
        results = [run(make(key)) for key in range(4)]
        assert any((results[0] != other).any() for other in results[1:])
        np.testing.assert_array_equal(run(make(jax.random.key(2))), results[2])
        np.testing.assert_array_equal(run(make(jax.random.key_data(jax.random.key(2)))), results[2])


def test_relobralo_is_that_of_its_authors_and_windows_combine_mean_terms():
    for rho, expected in ((1.0, [0.999069, 1.000931]), (0.0, [0.094826, 1.905174])):
        combination = sl.combine.ReLoBRaLo(temperature=0.1, rho=rho)
        state = combination.init(2)
        for losses in ([4.0, 5.0], [3.0, 4.0]):
            _, state = combination.at_step(Terms(jnp.array(losses)), state, None)
        # The golden values are for old weights of 1.
        state = eqx.tree_at(lambda s: s.weights, state, jnp.ones(2))
        weights, _ = combination.at_step(Terms(jnp.array([2.0, 4.0])), state, None)
        np.testing.assert_allclose(weights, expected, atol=1e-6)

    combination = sl.combine.ReLoBRaLo(temperature=0.1)
    first, second = jnp.array([4.0, 5.0]), jnp.array([3.0, 4.5])
    weights, state = combination.at_step(Terms(first), combination.init(2), None)
    np.testing.assert_array_equal(weights, 1)
    weights, _ = combination.at_step(Terms(second), state, None)
    np.testing.assert_allclose(weights, 2 * jax.nn.softmax(10 * second / first), rtol=1e-5)

    step = sl.train_step(loss_fn)
    summed = sl.train_step(lambda model, x: sum(loss_fn(model, x).values()))
    tx = sl.sgd(0.1)
    ours = step(MODEL, sl.Optimizer(tx, MODEL), X)
    theirs = summed(MODEL, sl.Optimizer(tx, MODEL), X)
    assert_close(ours, theirs, rtol=1e-6)

    tx = sl.sgd(0.1).combine(sl.combine.ReLoBRaLo(), NAMES).every_k(2)
    step = sl.train_step(lambda m, x: {"first": m * x, "second": m**2 * x})
    model, opt = jnp.array(1.0), sl.Optimizer(tx, jnp.array(1.0))
    for x in (0.25, 0.75):
        model, opt, _ = step(model, opt, jnp.array(x))
    np.testing.assert_allclose(opt.metrics["terms.first"], 0.5)
    np.testing.assert_allclose(opt.state.inner.combination.last, [0.5, 0.5])
    np.testing.assert_allclose(model, 1 - 0.1 * (0.5 + 2 * 0.5), rtol=1e-6)


def loss_fn(model, x):
    return {
        "first": jnp.mean(jnp.tanh(x @ model["w"]) ** 2),
        "second": jnp.mean((x @ model["w"] - 1) ** 2) + model["b"] ** 2,
    }


MODEL = {"w": jnp.array([0.5, -0.2, 0.1]), "b": jnp.array(0.3)}
X = jnp.linspace(-1, 1, 12).reshape(4, 3)


@pytest.mark.slow
def test_a_step_is_along_the_combined_gradient():
    seen = []

    def transform(grads):
        seen.append(grads)
        return grads

    tx = sl.sgd(0.1).combine(sl.combine.UPGrad(), NAMES)
    step = sl.train_step(loss_fn, transform_grads=transform)
    model, opt, loss = step(MODEL, sl.Optimizer(tx, MODEL), X)
    assert len(seen) == 3
    rows = [jax.grad(lambda m, name=name: loss_fn(m, X)[name])(MODEL) for name in NAMES]
    jacobian = np.stack([np.concatenate([g["w"], g["b"][None]]) for g in rows])
    weights = weights_of(sl.combine.UPGrad(), jacobian)
    change = np.concatenate([model["w"] - MODEL["w"], (model["b"] - MODEL["b"])[None]])
    np.testing.assert_allclose(change, -0.1 * weights @ jacobian, rtol=2e-5)
    metrics = opt.metrics
    np.testing.assert_allclose(loss, metrics["terms.first"] + metrics["terms.second"], rtol=1e-6)
    np.testing.assert_allclose(metrics["weights.second"], weights[1], rtol=1e-5)
    cosine = jacobian[0] @ jacobian[1] / np.prod(np.linalg.norm(jacobian, axis=1))
    np.testing.assert_allclose(metrics["cosines.first.second"], cosine, rtol=1e-5)


EACH = {
    "UPGrad": sl.combine.UPGrad(),
    "MGDA": sl.combine.MGDA(),
    "PCGrad": sl.combine.PCGrad(),
    "ReLoBRaLo": sl.combine.ReLoBRaLo(rho=0.5),
    "Fixed": sl.combine.Fixed([0.5, 2.0]),
}


@pytest.mark.parametrize("name", slow_except(EACH))
def test_weights_stay_from_one_refresh_to_the_next(name):
    combination, passes = EACH[name], []

    def counted(grads):
        jax.debug.callback(lambda: passes.append(name))
        return grads

    def weights_in(opt):
        return [opt.metrics[f"weights.{term}"] for term in NAMES]

    tx, passes_of_refresh = sl.sgd(0.1).if_finite(), 3 if combination.uses_gram else 1
    step, plain_step = sl.train_step(loss_fn, transform_grads=counted), sl.train_step(loss_fn)
    opt, each = (sl.Optimizer(tx.combine(combination, NAMES, n), MODEL) for n in (3, 1))
    model = MODEL
    for n in range(5):
        x, before = X * (n + 1), model
        if n % 3 == 0:
            _, each, _ = plain_step(model, each, x)
        passes.clear()
        model, opt, _ = step(model, opt, x)
        jax.effects_barrier()
        assert len(passes) == (passes_of_refresh if n % 3 == 0 else 1)
        weights = weights_in(opt)
        np.testing.assert_allclose(weights, weights_in(each), rtol=1e-5)

        def weighted(model, x=x, weights=weights):
            return sum(w * y for w, y in zip(weights, loss_fn(model, x).values(), strict=True))

        value, grads = jax.value_and_grad(weighted)(before)
        np.testing.assert_allclose(opt.metrics["weighted_loss"], value, rtol=1e-5)
        assert_close(model, jax.tree.map(lambda p, g: p - 0.1 * g, before, grads), rtol=1e-5)

    # After a refresh without finite losses the next step refreshes.
    for x in (X, X * jnp.nan, X):
        model, opt, _ = step(model, opt, x)
    assert np.all(np.isfinite(weights_in(opt)))


W = sl.where.path("w")
COMBINED = sl.sgd(0.1).combine(sl.combine.UPGrad(), NAMES)
# What the combination acts on, how the other parameters move, and whether along the sphere.
WITHIN = {
    "only": (COMBINED.only(W), "w", 0.0, False),
    "mask": (
        sl.Identity().combine(sl.combine.UPGrad(), NAMES).mask(W) | sl.ScaleByLearningRate(0.1),
        "w",
        0.1,
        False,
    ),
    "group": (sl.sgd(0.2).partition({W: COMBINED}), "w", 0.2, False),
    "sphere": (COMBINED.project(sl.projections.sphere(), where=W), "wb", None, True),
    "group on a sphere": (
        sl.sgd(0.2).partition({W: COMBINED.project(sl.projections.sphere())}),
        "w",
        0.2,
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHIN)
def test_weights_are_those_of_the_gradients_that_the_transform_uses(name):
    tx, own, rate, on_sphere = WITHIN[name]
    model = {"w": jnp.array([0.6, 0.0, -0.8]), "b": jnp.array(0.3)}

    def loss_fn(model):
        w, b = model["w"], model["b"]
        return {"first": 3 * w[0] + w[1] + w[2] + 5 * b, "second": w[0] - w[1] - 2 * b**2}

    new, opt, _ = sl.train_step(loss_fn)(model, sl.Optimizer(tx, model))
    rows = [jax.grad(lambda m, term=term: loss_fn(m)[term])(model) for term in NAMES]
    if on_sphere:
        w = model["w"]
        tangents = [{"w": g["w"] - (w @ g["w"]) * w, "b": g["b"]} for g in rows]
    else:
        tangents = rows
    jacobian = np.stack([np.concatenate([np.ravel(g[name]) for name in own]) for g in tangents])
    weights = np.asarray(weights_of(sl.combine.UPGrad(), jacobian))
    found = {path.split(".")[-1]: x for path, x in opt.metrics.items() if "weights" in path}
    np.testing.assert_allclose([found[name] for name in NAMES], weights, rtol=1e-4)
    moved = model["w"] - 0.1 * sum(x * g["w"] for x, g in zip(weights, tangents, strict=True))
    moved = moved / jnp.linalg.norm(moved) if on_sphere else moved
    np.testing.assert_allclose(new["w"], moved, rtol=1e-5)
    if rate is not None:
        np.testing.assert_allclose(new["b"], model["b"] - rate * sum(g["b"] for g in rows))


@pytest.mark.slow
def test_adaptive_weights_recompile_nothing_and_few_gradients_are_in_memory():
    counting = Counting(loss_fn)
    step = sl.train_step(counting)
    tx = sl.adam(0.1).combine(sl.combine.ReLoBRaLo(), NAMES)
    _, opt, _ = after_training(step, tx, 3, MODEL, X)
    assert int(opt.state.combination.age) == 3
    assert opt.metrics["weights.first"] != opt.metrics["weights.second"]
    before = counting.traces
    for weights in ([1.0, 1.0], [0.0, 2.0]):
        opt = sl.Optimizer(sl.sgd(0.1).combine(sl.combine.Fixed(weights), NAMES), MODEL)
        model, opt, _ = step(MODEL, opt, X)
    assert counting.traces == before + 1
    alone = sl.train_step(lambda model, x: 2 * loss_fn(model, x)["second"])
    expected, *_ = alone(MODEL, sl.Optimizer(sl.sgd(0.1), MODEL), X)
    np.testing.assert_allclose(model["w"], expected["w"], rtol=1e-6)

    model = [jnp.ones((128, 128)) for _ in range(12)]

    def terms(model, x):
        for w in model:
            x = jnp.tanh(x @ w)
        return {"first": jnp.mean(x**2), "second": jnp.mean(x)}

    tx = sl.adam(0.1).combine(sl.combine.UPGrad(), NAMES)
    step = sl.train_step(terms, donate="all")
    compiled = step.lower(model, sl.Optimizer(tx, model), jnp.ones((4, 128))).compile()
    params = sum(w.nbytes for w in model)
    # Those of both terms would take 2.
    assert compiled.memory_analysis().temp_size_in_bytes / params < 0.6
