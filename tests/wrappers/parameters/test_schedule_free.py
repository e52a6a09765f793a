"""`tx.schedule_free()` and its recipes: the paper's x, y and z, and whose learning rate weighs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import (
    after_training,
    assert_close,
    assert_same_path,
    gradients,
    nested_dict,
    slalom_trajectory,
    slow_except,
)

MODEL = nested_dict(jax.random.key(0))
GRADS = gradients(MODEL, 6)
halving = sl.schedules.piecewise_constant(0.1, {1: 0.5, 3: 3.0})


def by_the_book(p, grads, rates, betas, power=2.0, r=0.0, every=1, after=0):
    """SGD with x, y and z kept apart, in float64: the ys after each step, and the last x and z."""
    x = z = y = np.asarray(p, np.float64)
    total, largest, n, ys = 0.0, 0.0, 0, []
    grads = np.asarray(grads, np.float64)
    for i in range(len(grads)):
        if (i + 1) % every == 0:
            z = z - rates[n] * grads[i + 1 - every : i + 1].mean(0)
            largest = max(largest, rates[n])
            weight = (n + 1) ** r * largest**power
            if n < after:
                x = z
            else:
                total += weight
                x = x + (weight / total if total else 0) * (z - x)
            y = (1 - betas[n]) * z + betas[n] * x
            n += 1
        ys.append(y)
    return np.stack(ys), x, z


def check(tx, rates, betas=(0.9,) * 6, **options):
    history, opt = slalom_trajectory(tx, MODEL, GRADS)
    evaluated = opt.eval_params(jax.tree.map(lambda x: x[-1], history))
    trees = (MODEL, GRADS, history, evaluated)
    for p, grads, ours, x in zip(*map(jax.tree.leaves, trees), strict=True):
        of_leaf = rates if isinstance(rates, list) else rates[p.ndim]
        ys, x_book, _ = by_the_book(p, grads, of_leaf, betas, **options)
        np.testing.assert_allclose(ours, ys, rtol=3e-6, atol=3e-7)
        np.testing.assert_allclose(x, x_book, rtol=3e-6, atol=3e-7)
    return history, opt


HALVED = [0.1, 0.05, 0.05, 0.15, 0.15, 0.15]
from_zero, rising = sl.schedules.warmup_constant(0.0, 0.1, 3), 0.5 + 0.1 * np.arange(6)
OPTIONS = {"power": 1.0, "r": 2.0, "betas": (0.5,) * 6}
BOOK = {
    "constant": (sl.sgd(0.1).schedule_free(), [0.1] * 6, {}),
    # A rate of zero moves nothing, and weighs nothing.
    "from zero": (sl.sgd(from_zero).schedule_free(), [0, 0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1], {}),
    "down and up": (sl.sgd(halving).schedule_free(0.5, 1.0, 2.0), HALVED, OPTIONS),
    "average after": (
        sl.sgd(halving).schedule_free(r=1.0, average_after=2),
        HALVED,
        {"r": 1.0, "after": 2},
    ),
    # With the b1 of each step's y, x is what it is with any other.
    "scheduled b1": (
        sl.sgd(0.1).schedule_free(lambda n: 0.5 + 0.1 * n.astype(float)),
        [0.1] * 6,
        {"betas": rising},
    ),
    "every_k inside": (sl.sgd(halving).every_k(2).schedule_free(), HALVED[:3], {"every": 2}),
    "every_k outside": (sl.sgd(halving).schedule_free().every_k(2), HALVED[:3], {"every": 2}),
}


@pytest.mark.parametrize("name", slow_except(BOOK, "down and up"))
def test_y_and_x_are_those_of_the_textbook(name):
    tx, rates, options = BOOK[name]
    check(tx, rates, **options)


@pytest.mark.parametrize("polyak", [False, True])
def test_averages_weight_by_rates_of_any_size(polyak):
    def averaged(size):
        tx = sl.sgd(sl.schedules.polynomial(1 / size, 3 / size, 1, 2)).schedule_free(polyak=polyak)
        y, opt = jnp.array([1.0, -2.0]), sl.Optimizer(tx, jnp.zeros(2))
        for _ in range(3):
            y, opt = opt.step(y, 0.1 * size * y, value=size * jnp.sum(jnp.cos(y) + 2))
        return opt.eval_params(y)

    for size in (1e-25, 1e25):
        np.testing.assert_allclose(averaged(size), averaged(1.0), rtol=1e-5)


@pytest.mark.slow
def test_averages_follow_rates_skipped_steps_and_resets_in_half_precision_too():
    vectors = sl.where.ndim(1)
    tx = sl.sgd(halving).partition({vectors: sl.sgd(0.1), sl.where.ndim(0): sl.SetToZero()})
    history, opt = check(tx.schedule_free(), {0: [0.0] * 6, 1: [0.1] * 6, 2: HALVED})
    assert opt.state.relative_weight_sum.shape == (3,)
    assert jnp.all(history["scales"][0] == MODEL["scales"][0])

    tx = sl.sgd(halving).schedule_free()
    with_nan = jax.tree.map(lambda g: jnp.insert(g, 2, jnp.nan, axis=0), GRADS)
    plain, _ = slalom_trajectory(tx, MODEL, GRADS)
    skipping, opt = slalom_trajectory(tx.if_finite(), MODEL, with_nan)
    kept = jax.tree.map(lambda h: jnp.delete(h, 2, axis=0), skipping)
    assert_same_path(kept, plain, MODEL, 1e-6)
    assert opt.state.inner.age == 6

    tx = sl.sgd(0.1).schedule_free()
    _, opt = slalom_trajectory(tx, MODEL, GRADS)
    opt = opt.reset(MODEL, where=sl.where.ndim(2))
    ages = dict(zip(("bias", "weight", "scale"), opt.state.age.tolist(), strict=True))
    assert ages == {"bias": 6, "weight": 0, "scale": 6}
    x = opt.eval_params(MODEL)["dense"]["weight"]
    np.testing.assert_allclose(x, MODEL["dense"]["weight"], rtol=1e-6)

    model = jnp.ones(3, jnp.bfloat16)
    opt = sl.Optimizer(sl.schedule_free_sgd(0.5), model)
    assert opt.state.z.dtype == jnp.float32

    def step(carry, _):
        return carry[1].step(carry[0], jnp.ones(3, jnp.bfloat16))[::1], None

    (_, opt), _ = jax.lax.scan(step, (model, opt), None, length=300)
    # In bfloat16, the precision of the sum in Optax, it would stop at 256.
    assert float(opt.state.relative_weight_sum) == 300
    assert jnp.all(opt.state.z == 1 - 300 * 0.5)
    assert opt.eval_params(model).dtype == jnp.bfloat16
    half = sl.Optimizer(sl.sgd(0.1).schedule_free(state_dtype="bfloat16"), MODEL)
    assert half.state.z["scales"][0].dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(("which", "r"), [("sgd", 2.0), ("adamw", 0.0)])
def test_the_authors_package_takes_the_same_steps(which, r, x64):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    package = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    options = {"lr": 0.1, "weight_decay": 0.1, "r": r, "warmup_steps": 3, "foreach": False}
    p = np.linspace(-1, 1, 6)
    grads = np.random.default_rng(0).normal(size=(8, 6))
    theirs = torch.nn.Parameter(torch.tensor(p))
    tx = getattr(sl, f"schedule_free_{which}")(0.1, 3, weight_decay=0.1, r=r)
    if which == "sgd":
        optimizer = package.SGDScheduleFree([theirs], momentum=0.9, **options)
    else:
        optimizer = package.AdamWScheduleFree([theirs], betas=(0.9, 0.999), **options)
    ours, opt = slalom_trajectory(tx, jnp.asarray(p), jnp.asarray(grads))
    optimizer.train()
    for g, y in zip(grads, ours, strict=True):
        theirs.grad = torch.tensor(g)
        optimizer.step()
        np.testing.assert_allclose(theirs.detach().numpy(), y, rtol=1e-12, atol=1e-13)
    optimizer.eval()
    x = opt.eval_params(ours[-1])
    np.testing.assert_allclose(theirs.detach().numpy(), x, rtol=1e-12, atol=1e-13)


TWO_RATES = sl.sgd(0.1) | sl.ScaleByLearningRate(0.5, flip_sign=False)
REFUSED = {
    r"weights 'dense\.bias'.*no link inside sets one": sl.Trace(0.0) | sl.Scale(-0.1),
    r"both 'scale_by_learning_rate' and 'scale_by_learning_rate_2' set one": TWO_RATES,
    r"`tx\.schedule_free\(\)\.average\(\.\.\.\)`": sl.sgd(0.1).average(),
}
WARNED = {r"b1=0\.9.*`b1=0\.0`": sl.adam(0.1), r"decay=0\.9.*Remove": sl.sgd(0.1, momentum=0.9)}


def test_places_are_refused_and_polyak_steps_without_gradients_do_nothing():
    for message, tx in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            sl.Optimizer(tx.schedule_free(), MODEL)
    for advice, tx in WARNED.items():
        with pytest.warns(UserWarning, match=advice):
            sl.Optimizer(tx.schedule_free(), MODEL)

    with pytest.raises(TypeError, match="begin with the warm-up"):
        sl.schedule_free_sgd(halving, warmup_steps=2)
    with pytest.raises(ValueError, match="warmup_steps must be in"):
        sl.schedule_free_sgd(0.1, warmup_steps=0)

    ones = {"w": jnp.ones(2)}
    start = sl.Optimizer(sl.adam(1.0).schedule_free(polyak=True), ones)
    for gradient, loss in ((0.0, 1.0), (1.0, -100.0)):
        params, opt = start.step(ones, {"w": jnp.full(2, gradient)}, value=loss)
        np.testing.assert_array_equal(params["w"], 1)
        np.testing.assert_array_equal(opt.eval_params(params)["w"], 1)


def plus_by_the_book(y, loss_and_grad, decay, steps, *, beta, r, polyak_beta, after):
    """Schedule-Free+ of Defazio, 2026, on two arrays, in float64: the last x and y."""
    y = [np.asarray(v, np.float64) for v in y]
    x, z, m, nu, total, largest, l1 = y, y, [0.0] * 2, [0.0] * 2, 0.0, 0.0, 0.0
    for t in range(1, steps + 1):
        value, grads = loss_and_grad(y)
        ahead = sum(np.sum(g * (b - a)) for g, a, b in zip(grads, y, z, strict=True))
        l1 = polyak_beta * l1 + (1 - polyak_beta) * sum(np.sum(np.abs(g)) for g in grads)
        rate = max(0.0, value + ahead) / (np.sqrt(np.pi / 2) * l1 / (1 - polyak_beta**t))
        largest = max(largest, rate)
        weight = t**r * largest**2
        total += weight if t > after else 0
        for i, g in enumerate(grads):
            m[i] = 0.9 * m[i] + 0.1 * g
            nu[i] = 0.95 * nu[i] + 0.05 * g**2
            u = (m[i] / (1 - 0.9**t)) / (np.sqrt(nu[i] / (1 - 0.95**t)) + 1e-8)
            z = [*z]
            z[i] = z[i] - rate**2 * decay[i] * y[i] - rate * u
        share = weight / total if t > after else 1
        x = [a + share * (b - a) for a, b in zip(x, z, strict=True)]
        y = [beta(t - 1) * a + (1 - beta(t - 1)) * b for a, b in zip(x, z, strict=True)]
    return x, y


def test_schedule_free_plus_is_that_of_the_equations_with_a_decay_too():
    def loss_and_grad(y):
        with jax.enable_x64(True):
            given = {"b": jnp.asarray(y[0]), "w": jnp.asarray(y[1])}
            value, grads = jax.jit(jax.value_and_grad(plus_loss))(given)
            return float(value), [np.asarray(grads[name]) for name in "bw"]

    # 1 − β goes from 0.1 to 0.035 in equal factors, as the authors raise it.
    raised = 1 - sl.schedules.exponential_decay(0.1, 4, 0.35, end_value=0.035)
    decayed = {"weight_decay": 2.0, "decay_where": sl.where.ndim(2)}
    polyak = {"polyak": True, "polyak_beta": 0.5, "r": 1.0, "average_after": 2}
    tx = sl.adam(1.0, b2=0.95).schedule_free(raised, **decayed, **polyak)
    params, opt = plus_steps(tx, 4)
    beta = lambda n: 1 - 0.1 ** (1 - n / 4) * 0.035 ** (n / 4)  # noqa: E731
    options = {"beta": beta, "r": 1.0, "polyak_beta": 0.5, "after": 2}
    x, y = plus_by_the_book([PLUS["b"], PLUS["w"]], loss_and_grad, (0.0, 2.0), 4, **options)
    for i, name in enumerate("bw"):
        np.testing.assert_allclose(params[name], y[i], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(opt.eval_params(params)[name], x[i], rtol=1e-5, atol=1e-6)


PLUS = {"b": jnp.array([0.5, -1.0]), "w": jnp.array([[2.0, 1.0], [-1.0, 0.5]])}


def plus_loss(params):
    return 1 + jnp.sum(params["w"] ** 2) + jnp.sum((params["w"] @ params["b"] - 1) ** 2)


def plus_steps(tx, number, **options):
    step = sl.train_step(plus_loss, donate=False, **options)
    return after_training(step, tx, number, PLUS)[:2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scale_loss", "every_k", "if_finite"])
def test_polyak_steps_see_the_loss_and_all_gradients(name):
    tx = sl.adam(1.0).schedule_free(polyak=True, polyak_beta=0.5)
    expected, _ = plus_steps(tx, 4)
    if name == "every_k":
        result, _ = plus_steps(tx.every_k(2), 8)
    else:
        result, _ = plus_steps(getattr(tx, name)(), 4)
    assert_close(result, expected, rtol=1e-6)
