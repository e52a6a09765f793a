"""Gauss–Newton and Levenberg–Marquardt: equations, failures, memory, and other mechanisms."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import slalom as sl
from helpers import after_steps, after_training, assert_close, sampled

FORMS = ("residuals", "parameters")


def residual(p, x, y):
    return jnp.tanh(p["w"] @ x + p["b"]) - y


def problem(dtype=None):
    x = jax.random.normal(jax.random.key(0), (6, 3), dtype)
    y = jax.random.normal(jax.random.key(1), (6, 2), dtype)
    p = {
        "b": jnp.array([0.1, -0.2], dtype),
        "w": jax.random.normal(jax.random.key(2), (2, 3), dtype),
    }
    return p, (x, y)


@jax.jit
def derivatives(p, x, y):
    def rho(flat):
        p = {"b": flat[:2], "w": flat[2:].reshape(2, 3)}
        r = jax.vmap(lambda x, y: residual(p, x, y))(x, y)
        return r.reshape(-1) * jnp.sqrt(2 / r.size)

    flat = jnp.concatenate([p["b"], p["w"].reshape(-1)])
    return rho(flat), jax.jacfwd(rho)(flat), jax.hessian(rho)(flat)


def dense(p, x, y):
    """ρ and its first and second derivatives, in the order of the leaves."""
    return tuple(map(np.asarray, derivatives(p, x, y)))


def flat_updates(u):
    return np.concatenate([np.asarray(u["b"]), np.asarray(u["w"]).reshape(-1)])


LEAST_SQUARES = sl.LeastSquares(residual)


def updates_of(tx, p, data, steps=1, loss_fn=LEAST_SQUARES):
    """The updates of several steps at the same parameters."""
    state, found, update = tx.init(p), [], eqx.filter_jit(tx.update)
    zeros = jax.tree.map(jnp.zeros_like, p)
    for i in range(steps):
        # Parameters that move a little, as under a learning rate.
        here = jax.tree.map(lambda x, i=i: x + 0.01 * i, p)
        context = sl.Context(step=jnp.int32(i), residuals=loss_fn.on(*data))
        u, state = update(zeros, state, here, context)
        found.append(flat_updates(u))
    return found, state


SOLVERS = {"auto": "auto", "cholesky": "cholesky", "qr": "qr", "a function": jnp.linalg.solve}
WAYS = [f"{form}, {solver}" for solver in SOLVERS for form in FORMS]


def in_way(way):
    form, _, solver = way.partition(", ")
    return {"form": form, "solver": SOLVERS[solver]}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_the_damped_solution(x64, way):
    p, data = problem(jnp.float64)
    rho, jacobian, _ = dense(p, *data)
    (u,), _ = updates_of(sl.ScaleByGaussNewton(0.03, None, **in_way(way)), p, data)
    expected = np.linalg.solve(jacobian.T @ jacobian + 0.03 * np.eye(8), jacobian.T @ rho)
    np.testing.assert_allclose(u, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", sampled(WAYS, "residuals, auto", turn=1))
def test_a_try_of_levenberg_marquardt_follows_the_bend_of_the_residuals(x64, way):
    p, data = problem(jnp.float64)
    rho, jacobian, second = dense(p, *data)
    matrix = jacobian.T @ jacobian
    damping = 0.1 * np.trace(matrix)
    matrix = matrix + damping * np.eye(8)
    d = -np.linalg.solve(matrix, jacobian.T @ rho)
    a = -np.linalg.solve(matrix, jacobian.T @ (second @ d @ d))
    size = np.linalg.norm(a) / np.linalg.norm(d)
    for acceleration, expected in ((None, d), (1.01 * size, d + a / 2), (0.99 * size, 0 * d)):
        tx = sl.levenberg_marquardt(0.1, acceleration=acceleration, max_tries=1, **in_way(way))
        (u,), state = updates_of(tx, p, data)
        np.testing.assert_allclose(u, expected, rtol=1e-9, atol=1e-12)
        assert bool(state.accepted) == bool(np.any(expected))


@pytest.mark.slow
def test_residuals_without_a_second_derivative_and_loops_of_ones_own(x64):
    @jax.custom_jvp
    def kink(x):
        return jnp.abs(x)

    @kink.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return jnp.abs(x), jnp.sqrt(x - x) * t + jnp.sign(x) * t

    p, x = {"a": jnp.array(2.0)}, jnp.array([1.0, 2.0])
    loss_fn, tx = sl.LeastSquares(lambda p, x: kink(p["a"] * x)), sl.levenberg_marquardt()
    p, opt, _ = sl.train_step(loss_fn)(p, sl.Optimizer(tx, p), x)
    assert bool(opt.metrics["accepted"])
    np.testing.assert_allclose(p["a"], 2 * (1 - 1 / 1.001), rtol=1e-9)

    p, data = problem(jnp.float64)
    tx = (
        sl.ScaleByGaussNewton(1e-6)
        | sl.Scale(-1.0)
        | sl.ScaleByBacktrackingLinesearch(25, decrease_factor=0.5)
    )
    by_step = sl.train_step(LEAST_SQUARES, donate=False)(p, sl.Optimizer(tx, p), *data)
    grads = jax.grad(LEAST_SQUARES)(p, *data)
    by_hand, _ = sl.Optimizer(tx, p).step(p, grads, residuals=LEAST_SQUARES.on(*data))
    assert_close(by_step[0], by_hand, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_momentum_is_that_of_spring(x64, form):
    p, data = problem(jnp.float64)
    found, _ = updates_of(sl.ScaleByGaussNewton(1e-3, 0.9, form), p, data, steps=5)
    phi = np.zeros(8)
    for i, u in enumerate(found):
        here = jax.tree.map(lambda x, i=i: x + 0.01 * i, p)
        rho, jacobian, _ = dense(here, *data)
        kernel = jacobian @ jacobian.T + 1e-3 * np.eye(rho.size)
        phi = jacobian.T @ np.linalg.solve(kernel, rho - 0.9 * jacobian @ phi) + 0.9 * phi
        np.testing.assert_allclose(u, phi, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_float32_keeps_its_digits_at_small_damping(form):
    # A Jacobian with singular values from 1 to 1e-3, and λ = 1e-10·σ₁².
    u, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(12, 8)))
    v, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(8, 8)))
    jacobian = (u @ np.diag(np.logspace(0, -3, 8)) @ v.T).astype(np.float32).astype(float)
    target = np.random.default_rng(2).normal(size=12)
    loss_fn = sl.LeastSquares(lambda p, row, y: row @ p - y)
    data = jnp.asarray(jacobian, jnp.float32), jnp.asarray(target, jnp.float32)
    scale = np.sqrt(2 / 12)
    lam = 1e-10 * scale**2
    normal = scale**2 * jacobian.T @ jacobian + lam * np.eye(8)
    expected = np.linalg.solve(normal, -(scale**2) * jacobian.T @ target)
    tx = sl.ScaleByGaussNewton(lam, None, form)
    context = sl.Context(step=0, residuals=loss_fn.on(*data))
    p = jnp.zeros(8, jnp.float32)
    found, _ = tx.update(p, tx.init(p), p, context)
    assert np.linalg.norm(found - expected) <= 3e-3 * np.linalg.norm(expected)


def test_failed_factorizations_raise_the_damping_and_two_linearizations_warn():
    loss_fn = sl.LeastSquares(lambda p, x: p["a"] * x + p["b"] * x)  # a singular Gram matrix
    p = {"a": jnp.array(1.0), "b": jnp.array(2.0), "c": jnp.array(0.0)}
    tx = sl.ScaleByGaussNewton(0.0, None, "parameters", "cholesky") | sl.Scale(-1.0)
    opt = sl.Optimizer(tx, p)
    step = sl.train_step(loss_fn)
    x = jnp.linspace(1, 2, 5)
    new, opt, loss = step(p, opt, x)
    metrics = {k.rpartition(".")[2]: float(v) for k, v in opt.metrics.items()}
    assert metrics["num_failures"] >= 1
    assert metrics["damping"] > 0
    assert loss_fn(new, x) < 1e-6 * loss

    p, _ = problem()
    two = sl.levenberg_marquardt().partition({sl.where.path("b"): sl.levenberg_marquardt()})
    with pytest.warns(UserWarning, match="together they overshoot"):
        sl.Optimizer(two, p)


@pytest.mark.slow
def test_failed_searches_rejected_steps_and_singular_problems_set_the_damping():
    p, data = problem()
    opt = sl.Optimizer(sl.ScaleByGaussNewton(1e-2) | sl.Scale(0.0), p)  # a search that finds 0
    dampings = []
    for _ in range(4):
        p, opt = opt.step(p, p, residuals=LEAST_SQUARES.on(*data))
        dampings.append(float(opt.metrics["scale_by_gauss_newton.damping"]))
    np.testing.assert_allclose(dampings, [1e-2, 1e-1, 1, 10], rtol=1e-5)
    assert opt.metrics["scale_by_gauss_newton.stuck"]

    def steep(p, x):
        return jnp.exp(20 * p * x) - 1e-8  # from 0.5, a full step is far too long

    loss_fn, x, p = sl.LeastSquares(steep), jnp.ones(1), jnp.array(-0.5)
    opt = sl.Optimizer(sl.levenberg_marquardt(1e-9, max_tries=1), p)
    step = sl.train_step(loss_fn)
    losses, dampings = [], []
    for _ in range(30):
        p, opt, loss = step(p, opt, x)
        losses.append(float(loss))
        dampings.append(float(opt.metrics["damping"]))
    assert losses == sorted(losses, reverse=True)
    assert not np.all(np.isnan(dampings))

    # With more parameters than residuals, and no damping to speak of.
    loss_fn = sl.LeastSquares(lambda m, x: m(x) - jnp.sin(3 * x))
    model = eqx.nn.MLP(1, 1, 16, 2, jnp.tanh, key=jax.random.key(0))
    x = jnp.linspace(-1, 1, 9)[:, None]
    for tx in (sl.gauss_newton(), sl.levenberg_marquardt()):
        step = sl.train_step(loss_fn, donate=False)
        assert after_training(step, tx, 15, model, x)[2] < 1e-4, tx


@pytest.mark.slow
def test_only_partition_and_ensembles_see_their_own_columns(x64):
    p, data = problem(jnp.float64)
    rho, jacobian, _ = dense(p, *data)
    bias = sl.where.path("b")
    rule = sl.ScaleByGaussNewton(0.1)
    expected = np.linalg.solve(
        jacobian[:, :2].T @ jacobian[:, :2] + 0.1 * np.eye(2), jacobian[:, :2].T @ rho
    )
    for tx in (rule.only(bias), sl.sgd(0.1).partition({bias: rule})):
        (u,), _ = updates_of(tx, p, data)
        np.testing.assert_allclose(u[:2], expected, rtol=1e-9)
    step = sl.train_step(LEAST_SQUARES)
    tx = rule | sl.Scale(-1.0)
    new, _, _ = step(p, sl.Optimizer(tx, p, trainable=bias), *data)
    np.testing.assert_allclose(p["b"] - new["b"], expected, rtol=1e-9)

    def run(scale, tx):
        q = jax.tree.map(lambda x: x * scale, p)
        return after_steps(tx, 2, q, q, residuals=LEAST_SQUARES.on(*data))[0]

    for tx in (sl.gauss_newton(), sl.levenberg_marquardt(scaling="columns")):
        together = jax.jit(jax.vmap(functools.partial(run, tx=tx)))(jnp.array([1.0, 2.0]))
        alone = jax.jit(functools.partial(run, 2.0, tx))()
        assert_close(jax.tree.map(lambda x: x[1], together), alone, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_chunks_give_the_same_step(x64, form):
    p, data = problem(jnp.float64)
    for rule in (sl.ScaleByGaussNewton, sl.ScaleByLevenbergMarquardt):
        (whole,), _ = updates_of(rule(0.1, form=form), p, data)
        (chunks,), _ = updates_of(rule(0.1, form=form, chunk=4), p, data)
        np.testing.assert_allclose(whole, chunks, rtol=1e-9, err_msg=rule.__name__)


def scratch(tx, examples, size=40):
    """The temporary memory of a step."""

    def wide(p, x):
        return jnp.tanh(x @ p)

    p, x = jnp.ones(size), jnp.ones((examples, size))
    opt, loss_fn = sl.Optimizer(tx, p), sl.LeastSquares(wide)

    def step(p, opt, x):
        return opt.step(p, p, residuals=loss_fn.on(x))

    return jax.jit(step).lower(p, opt, x).compile().memory_analysis().temp_size_in_bytes


# Memory for the vectors of length N or P grows, but none for N·P.
BOUNDED = [
    (sl.ScaleByGaussNewton, "parameters", 50, ((2_000,), (8_000,)), 12, 40),
    (sl.ScaleByLevenbergMarquardt, "parameters", 50, ((2_000,), (8_000,)), 12, 40),
    (sl.ScaleByGaussNewton, "residuals", 10, ((100, 4_000), (100, 8_000)), 60, 100),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "form", "chunk", "sizes", "vectors", "rows"), BOUNDED)
def test_chunks_bound_the_memory(rule, form, chunk, sizes, vectors, rows):
    small, large = sizes
    added = 4 * (large[-1] - small[-1])
    for options, low, high in (({"chunk": chunk}, 0, vectors), ({}, rows, np.inf)):
        tx = rule(0.1, form=form, solver="cholesky", **options)
        assert low * added <= scratch(tx, *large) - scratch(tx, *small) < high * added


MESHES = {
    "gauss_newton, auto": (sl.gauss_newton(1e-3), AxisType.Auto),
    "gauss_newton, explicit": (sl.gauss_newton(1e-3), AxisType.Explicit),
    "levenberg_marquardt, auto": (sl.levenberg_marquardt(), AxisType.Auto),
    "columns, auto": (sl.levenberg_marquardt(scaling="columns"), AxisType.Auto),
    "levenberg_marquardt, explicit": (sl.levenberg_marquardt(), AxisType.Explicit),
    "columns, explicit": (sl.levenberg_marquardt(scaling="columns"), AxisType.Explicit),
}


@pytest.mark.parametrize("name", sampled(MESHES))
def test_a_mesh_takes_the_steps_of_one_device(x64, name):
    tx, kind = MESHES[name]
    p, _ = problem(jnp.float64)
    x, y = (jax.random.normal(jax.random.key(5 + i), (8, 3 - i)) for i in (0, 1))
    residuals = {"fit": residual, "edge": lambda p, x: p["b"] * x[0]}
    batch, weights = {"fit": (x, y), "edge": x[:4]}, {"fit": jnp.linspace(0.5, 1, 8)}
    squares = sl.OutputLoss(lambda p, x: residual(p, x, 0), lambda z, y: jnp.sum((z - y) ** 2))

    def two_steps(p, batch, weights):
        step, opt = sl.train_step(sl.LeastSquares(residuals), donate=False), sl.Optimizer(tx, p)
        p, opt, _ = step(p, opt, batch, example_weights=weights)
        p, _, loss = step(p, opt, batch, example_weights=weights)
        return p, loss, sl.train_step(squares)(p, opt, *batch["fit"])[0]

    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec("data"))
        spread = jax.tree.map(lambda a: jax.device_put(a, rows), (batch, weights))
        many = two_steps(jax.device_put(p, NamedSharding(mesh, PartitionSpec())), *spread)
    assert_close(many, two_steps(p, batch, weights), rtol=1e-10)


@pytest.mark.slow
def test_cross_entropy_has_the_generalized_gauss_newton_matrix(x64):
    def outputs(p, x):
        return p["w"] @ x + p["b"]

    def cross_entropy(z, label):
        return -jax.nn.log_softmax(z)[label]

    p, (x, _) = problem(jnp.float64)
    labels = jnp.arange(6) % 2
    loss_fn = sl.OutputLoss(outputs, cross_entropy)

    def mean(p):
        z = jax.vmap(lambda x: outputs(p, x))(x)
        return jnp.mean(jax.vmap(cross_entropy)(z, labels))

    np.testing.assert_allclose(loss_fn(p, x, labels), mean(p), rtol=1e-14)
    grad = flat_updates(jax.grad(mean)(p))
    # The model is linear in its parameters, so the matrix is the Hessian.
    flat = flat_updates(p)
    hessian = jax.hessian(lambda f: mean({"b": f[:2], "w": f[2:].reshape(2, 3)}))(jnp.asarray(flat))
    expected = np.linalg.solve(hessian + 0.1 * np.eye(8), grad)
    for form in FORMS:
        tx = sl.ScaleByGaussNewton(0.1, form=form)
        (u,), _ = updates_of(tx, p, (x, labels), loss_fn=loss_fn)
        np.testing.assert_allclose(u, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("complex_psi", [False, True])
def test_scores_give_stochastic_reconfiguration(x64, complex_psi):
    """The formulas of SR, as NetKet has them for real parameters."""

    def log_psi(p, s):
        z = jnp.sum(jnp.tanh(p["w"] @ s + p["b"]))
        return jax.lax.complex(z, jnp.sum(p["w"] @ s**2)) if complex_psi else z

    p, (s, _) = problem(jnp.float64)
    energies = jax.random.normal(jax.random.key(9), (6,))
    energies = jax.lax.complex(energies, jnp.arange(6.0)) if complex_psi else energies

    def scores(flat):
        p = {"b": flat[:2], "w": flat[2:].reshape(2, 3)}
        z = jax.vmap(lambda s: log_psi(p, s))(s)
        return jnp.stack([z.real, z.imag])

    real, imag = np.asarray(jax.jacfwd(scores)(jnp.asarray(flat_updates(p))))
    o = real + 1j * imag
    o = o - o.mean(0)
    e = np.asarray(energies) - np.mean(np.asarray(energies))
    s_matrix = (o.conj().T @ o).real / 6
    force = 2 * (o.conj().T @ e).real / 6
    expected = np.linalg.solve(s_matrix + 0.01 * np.eye(8), force)
    loss_fn = sl.VariationalEnergy(log_psi)
    np.testing.assert_allclose(flat_updates(jax.grad(loss_fn)(p, s, energies)), force, rtol=1e-9)
    for form in FORMS:
        tx = sl.ScaleByGaussNewton(0.01, form=form)
        (u,), _ = updates_of(tx, p, (s, energies), loss_fn=loss_fn)
        np.testing.assert_allclose(u, expected, rtol=1e-9)
