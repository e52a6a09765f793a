"""Cautious updates, the hyperball constraint, and the rules that precondition both sides."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known_matrix import GRADS, START, drawn_matrix

import slalom as sl
from helpers import EXHAUSTIVE, SLOW, public, slalom_trajectory, updates_of
from slalom.rules.matrices import _orthonormal


def cautious(updates, grads, **options):
    context = sl.Context(step=0, grad=grads)
    return sl.Cautious(**options).update(updates, None, context=context)[0]


def test_cautious_drops_what_points_against_the_gradient():
    random = np.random.default_rng(0)
    u, g = random.standard_normal((2, 3, 5)).astype(np.float32)
    g[0, 0] = 0
    keep = u * g > 0
    for options, wanted in (({}, u * keep / keep.mean()), ({"min_fraction": 1.0}, u * keep)):
        found = cautious(jnp.asarray(u), jnp.asarray(g), **options)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    # Without any agreement it is zero.
    x = jnp.array([1.0, -2.0])
    assert jnp.all(cautious(x, -x) == 0)
    assert jnp.all(cautious(0 * x, x) == 0)
    # One of 4000 entries agrees: it grows by 1000, not by 4000.
    one = jnp.ones(4000).at[1:].set(-1.0)
    np.testing.assert_allclose(cautious(one, jnp.ones(4000))[0], 1000, rtol=1e-6)

    for dtype in ("bfloat16", "float16", "float32"):
        limits = jnp.finfo(dtype)
        x = jnp.array([limits.tiny, limits.tiny, limits.max, limits.max], dtype)
        g = x * jnp.array([1, -1, 1, -1], dtype)
        kept = cautious(x, g, min_fraction=1.0)
        assert (kept != 0).tolist() == [True, False, True, False], dtype
    u = jnp.array([1 + 1j, 1 + 1j, 1e-30j, 1e30 + 1j])
    g = jnp.array([2 - 1j, -2 + 1j, 1e-30j, -1e30 + 0j])
    np.testing.assert_array_equal(cautious(u, g, min_fraction=1.0), u.at[1].set(0).at[3].set(0))

    params = {"w": jnp.ones(2)}
    opt = sl.Optimizer(sl.ScaleByAdam() | sl.Cautious() | sl.Scale(-0.1), params)
    with pytest.raises(TypeError, match=r"Cautious.*needs 'grad'.*grad=grads"):
        opt.step(params, params)

    u, p = jnp.array([1.0, 1.0, 0.0, -1.0]), jnp.array([2.0, -2.0, 2.0, -2.0])
    link = sl.AddDecayedWeights(0.1, cautious=True)
    np.testing.assert_allclose(link.update(u, None, p)[0], [1.2, 1.0, 0.0, -1.2], rtol=1e-6)


def test_a_projection_to_the_norm_is_finite_and_a_reset_takes_the_present_one():
    params = jnp.array([3.0, 4.0])
    start = sl.Optimizer(sl.Scale(-1.0) | sl.KeepInitialNorm(), params)
    for size in (0.0, 1e-30, 1e18, 1e30, 3e38):
        stepped, opt = start.step(params, jnp.array([size, 0.0]))
        assert jnp.all(jnp.isfinite(stepped)), size
        if size < 1e18:
            np.testing.assert_allclose(stepped, params, rtol=1e-6)
        stepped, _ = opt.step(stepped, params)
        assert jnp.all(jnp.isfinite(stepped)), size
    # What starts at zero is free.
    free, _ = sl.Optimizer(start.transform, 0 * params).step(0 * params, params)
    np.testing.assert_allclose(free, -params)

    params = {"a": jnp.ones(4), "b": jnp.ones(9)}
    opt = sl.Optimizer(sl.sgd(0.1) | sl.KeepInitialNorm(), params)
    larger = jax.tree.map(lambda x: 2 * x, params)
    opt = opt.reset(larger, sl.where.path("b"))
    assert eqx.tree_equal(
        opt.state_of(sl.KeepInitialNorm).radius, {"a": jnp.asarray(2.0), "b": jnp.asarray(6.0)}
    )


def refreshed_by(sometimes, always):
    """Two rhythms: one with steps in between, and one without, which shows less."""
    return [pytest.param(sometimes, marks=SLOW), pytest.param(always, marks=EXHAUSTIVE)]


def assert_walks(rule, start, grads, theirs):
    ours, _ = slalom_trajectory(rule | sl.ScaleByLearningRate(0.1), start, grads)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def dense_soap(start, grads, f, b1=0.95, b2=0.95, eps=1e-8):
    """SOAP as in the paper, for a single matrix: the basis is one full Kronecker product."""
    n, m = start.shape
    p, mean, square = start.flatten().copy(), np.zeros(n * m), np.zeros((n, m))
    left = right = basis = None
    history = []
    for t, g in enumerate(grads):
        if basis is not None:
            full = np.kron(*basis)
            rotated = full.T @ g.flatten()
            mean = b1 * mean + (1 - b1) * g.flatten()
            square = b2 * square + (1 - b2) * rotated.reshape(n, m) ** 2
            direction = (full.T @ mean / (1 - b1**t)) / (
                np.sqrt(square.flatten() / (1 - b2**t)) + eps
            )
            p = p - 0.1 * full @ direction
        history.append(p.reshape(n, m).copy())
        left = (1 - b2) * g @ g.T + (0 if left is None else b2 * left)
        right = (1 - b2) * g.T @ g + (0 if right is None else b2 * right)
        if basis is None:
            basis = [np.linalg.eigh(x)[1][:, ::-1] for x in (left, right)]
        elif t % f == 0:
            turned = []
            for axis, (x, q) in enumerate(zip((left, right), basis, strict=True)):
                order = np.argsort(-np.sum(q * (x @ q), axis=0))
                square = np.take(square, order, axis)
                turned.append(np.linalg.qr(x @ q[:, order])[0])
            basis = turned
    return np.stack(history)


@pytest.mark.parametrize("f", [3, pytest.param(1, marks=EXHAUSTIVE)])
def test_soap_is_adam_in_the_dense_eigenbasis(f, x64):
    start, grads = drawn_matrix((4, 3), 12)
    theirs = dense_soap(*map(np.asarray, (start, grads)), f)
    assert_walks(sl.ScaleBySoap(precondition_frequency=f), start, grads, theirs)


@pytest.mark.slow
def test_kl_soap_gives_known_numbers(x64):
    # Of a float64 transcription of the equations of modded-nanogpt's records 19 and 25.
    start, grads = jnp.array(START), jnp.array(GRADS)
    hyperball = sl.ScaleByTrustRatio() | sl.ScaleByLearningRate(0.018) | sl.KeepInitialNorm()
    ours, opt = slalom_trajectory(sl.contrib.ScaleByKlSoap(layout="oi") | hyperball, start, grads)
    theirs = [
        start,
        [[0.500502, -1.002839, 1.500843], [1.993870, 0.247834, -0.761145]],
        [[0.510757, -1.012886, 1.492059], [1.984881, 0.242579, -0.783168]],
    ]
    np.testing.assert_allclose(ours, theirs, atol=6e-7)
    left, right = opt.state_of(sl.contrib.ScaleByKlSoap).variances
    np.testing.assert_allclose(left[0] ** -0.5, [0.700486, 0.975485], atol=6e-7)
    np.testing.assert_allclose(right[0] ** -0.5, [0.599750, 1.119069, 1.803190], atol=6e-7)


@pytest.mark.parametrize("f", refreshed_by(3, 1))
def test_splus_takes_signs_in_the_eigenvectors_of_earlier_steps(f, x64):
    _, grads = drawn_matrix((4, 3), 9)
    left, right, basis, mean, wanted = 0, 0, (np.eye(4), np.eye(3)), 0, []
    for t, g in enumerate(np.asarray(grads), 1):
        mean = 0.9 * mean + 0.1 * g
        left, right = (0.999 * x + 0.001 * y for x, y in ((left, g @ g.T), (right, g.T @ g)))
        wanted.append(2 / 7 * basis[0] @ np.sign(basis[0].T @ mean @ basis[1]) @ basis[1].T)
        if t == 1 or t % f == 0:
            basis = tuple(np.linalg.eigh(x)[1] for x in (left, right))
    tx = sl.contrib.ScaleBySplus(precondition_frequency=f, layout="oi")
    np.testing.assert_allclose(updates_of(tx, jnp.asarray(grads)), wanted, atol=1e-9)


@pytest.mark.parametrize("shape", [(64, 64), (300, 8)])
@jax.default_matmul_precision("highest")  # of the plain products
def test_products_in_parts_are_those_of_float32(shape, as_on, monkeypatch):
    as_on("cuda")
    exact = _orthonormal._parts
    eleven_bits = functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=10)
    monkeypatch.setattr(_orthonormal, "_parts", lambda x: tuple(map(eleven_bits, exact(x))))
    random = np.random.default_rng(0)
    x, y = random.standard_normal(shape, np.float32), random.random(shape[::-1], np.float32)
    for function, plain in (
        (_orthonormal.products_of, lambda x: x.T @ x),
        (lambda x: _orthonormal.product(x, y), lambda x: x @ y),
    ):
        assert np.all(abs(function(x) - plain(x.astype(float))) <= 1e-6 * plain(abs(x)))
        value, pullback = jax.vjp(function, abs(x))  # where no terms cancel
        np.testing.assert_allclose(pullback(value), jax.vjp(plain, abs(x))[1](value), rtol=1e-6)


def test_products_of_float32_are_in_parts_on_gpus_of_nvidia_only():
    def products(platform, dtype):
        traced = jax.jit(_orthonormal.products_of).trace(jnp.ones((4, 4), dtype))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return [line.count("HIGHEST") for line in text.splitlines() if "dot_general" in line]

    assert products("cuda", jnp.float32) == [0, 0]
    assert products("rocm", jnp.float32) == products("cpu", jnp.float32) == [2]
    assert products("cuda", jnp.complex64) == [2]


PLATFORMS = {"cuda": SLOW, "cpu": EXHAUSTIVE, "tpu": EXHAUSTIVE}
RANKS = {"full": np.ones(24), "decades": 10.0 ** -np.arange(24), "low": np.arange(24) < 3, "one": 1}


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("platform", [pytest.param(p, marks=m) for p, m in PLATFORMS.items()])
def test_a_refresh_of_soap_is_a_qr_decomposition(rank, dtype, platform, as_on, x64):
    """Also where columns nearly depend on each other, and where they are zero."""
    as_on(platform)
    random = np.random.default_rng(0)
    sizes = np.zeros((24, 24)) + RANKS[rank]
    rule = sl.ScaleBySoap(precondition_frequency=1, b2=0.5)
    grads = [random.standard_normal((24, 24)) * sizes for _ in range(3)]
    if dtype == "complex64":
        grads = [g + 1j * random.standard_normal((24, 24)) * sizes for g in grads]
    state = rule.init(jnp.zeros((24, 24), dtype))
    for g in grads:
        before, (_, state) = state, rule.update(jnp.asarray(g, dtype), state)
    eps = float(jnp.finfo(dtype).eps)
    for x, q, new in zip(before.statistics, before.basis, state.basis, strict=True):
        x, q, new = (np.asarray(a[0], np.complex128) for a in (x, q, new))
        product = x @ q
        order = np.argsort(-np.sum(q.conj() * product, 0).real)
        wanted, triangle = np.linalg.qr(product[:, order])
        np.testing.assert_allclose(new.conj().T @ new, np.eye(24), atol=20 * eps)
        sizes = np.abs(np.diagonal(triangle))
        known = int(np.argmin(np.append(sizes > 1e-3 * sizes[0], False)))
        of_span = [a[:, :known] @ a[:, :known].conj().T for a in (new, wanted)]
        np.testing.assert_allclose(*of_span, atol=1e-4 if eps > 1e-10 else 1e-11)


IN_EIGENBASES = {
    "soap": sl.ScaleBySoap(),
    "soap each step": sl.ScaleBySoap(precondition_frequency=1),
    "soap of one side": sl.ScaleBySoap(max_size=10),
    "kl_soap": sl.contrib.ScaleByKlSoap(),
    "splus": sl.contrib.ScaleBySplus(precondition_frequency=5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_EIGENBASES)
def test_rules_in_eigenbases_stay_in_the_span_of_collinear_inputs(name, x64):
    random = np.random.default_rng(0)
    basis = random.standard_normal((2, 8))
    inputs, targets = random.standard_normal((30, 2)) @ basis, random.standard_normal((30, 16))
    complement = np.eye(8) - np.linalg.pinv(basis) @ basis

    def trained(dtype):
        x, y = jnp.asarray(inputs, dtype), jnp.asarray(targets, dtype)
        w = jnp.zeros((16, 8), dtype)
        opt = sl.Optimizer(IN_EIGENBASES[name] | sl.Scale(-0.02), w)

        def loss_fn(w):
            return jnp.mean((x @ w.T - y) ** 2)

        @jax.default_matmul_precision("highest")  # a GPU would round the inputs, and steps to 1e-4
        def step(carry, _):
            w, opt = carry
            return opt.step(w, jax.grad(loss_fn)(w)), None

        return np.asarray(jax.lax.scan(step, (w, opt), length=60)[0][0], np.float64)

    single, double = trained(jnp.float32), trained(jnp.float64)
    outside, least = (np.linalg.norm(w @ complement) for w in (single, double))
    # The first step of SPlus takes signs in no basis, which leaves the span.
    assert least < 1e-6 or name == "splus"
    assert outside < least + 1e-5 * np.linalg.norm(single)
    assert np.linalg.norm(single) > 0.1
    # On any device, at most the way out of the basis is less precise.
    rule, g = IN_EIGENBASES[name], jnp.ones((16, 8))
    text = str(jax.make_jaxpr(rule.update)(g, rule.init(g)))
    assert text.count("dot_general[") - text.count("precision=") <= 2


def dense_kron(start, grads, noise, *, probability, max_size, rate=0.1):
    """PSGD as in the paper, for a single matrix: Q is one full Kronecker product."""
    n, m = start.shape
    p, mean, since = start.flatten().copy(), np.zeros(n * m), 0
    left, right = np.eye(n), np.eye(m)
    history = []
    for t, g in enumerate(grads, 1):
        mean = 0.9 * mean + 0.1 * g.flatten()
        momentum = mean / (1 - 0.9**t)
        since += 1
        if since >= 1 / probability:
            since, q = 0, np.kron(left, right)
            a = (q @ momentum).reshape(n, m)
            b = np.linalg.solve(q.T, noise.flatten()).reshape(n, m)
            new = []
            for factor, x, y in ((left, a, b), (right, a.T, b.T)):
                gain, loss = x @ x.T, y @ y.T
                total, change = gain + loss, np.triu(gain - loss)
                if len(factor) > max_size:
                    norm, change = np.max(np.diag(total)), np.diag(np.diag(change))
                else:
                    column = total[:, np.argmax(np.linalg.norm(total, axis=0))]
                    direction = total @ column / np.linalg.norm(total @ column)
                    norm = np.linalg.norm(total @ direction)
                new.append(factor - rate * change @ factor / norm)
            left, right = new
        q = np.kron(left, right)
        direction = q.T @ q @ momentum
        direction *= min(1, 1.1 / np.sqrt(np.mean(direction**2)))
        p = p - 0.1 * direction
        history.append(p.reshape(n, m).copy())
    return np.stack(history)


@pytest.mark.parametrize("probability", refreshed_by(0.4, 1.0))
@pytest.mark.parametrize("max_size", [4, 3], ids=["triangular", "one diagonal factor"])
def test_kron_is_a_dense_preconditioner(max_size, probability, same_noise, x64):
    start, grads = drawn_matrix((4, 3), 12)
    rule = sl.ScaleByKron(probability, max_size=max_size, layout="oi")
    given = np.asarray(start), np.asarray(grads), np.random.default_rng(5).standard_normal((4, 3))
    theirs = dense_kron(*given, probability=probability, max_size=max_size)
    assert_walks(sl.Ema(0.9) | rule, start, grads, theirs)


@pytest.mark.slow
def test_kron_and_shampoo_give_the_numbers_of_their_authors():
    rule = sl.ScaleByKron()
    params = jnp.ones((2, 2))

    def refreshes(step, state):
        _, state = rule.update(params, state, context=sl.Context(step=step))
        return state.since

    state = rule.init(params)
    for step, since in ((499, 33), (500, 0), (500 + 1000, 1), (5000, 32)):
        before = dataclasses.replace(state, since=jnp.asarray(since, jnp.int32))
        wanted = 1 / np.clip(np.exp(-(step - 500) / 1000), 0.03, 1)
        assert (int(refreshes(step, before)) == 0) == (since + 1 >= wanted), step

    # From the tests of Google's distributed_shampoo: learning rate 0.1, blocks of 32.
    params = [jnp.array([[1.0, 3.0], [2.0, 4.0]]), jnp.array([[3.0, 4.0], [3.0, 4.0]])]
    grads = [jnp.array([[500.0, 5.0], [500.0, 5.0]]), jnp.array([[300.0, 3.0], [300.0, 3.0]])]
    tx = (
        sl.ScaleByShampoo(block_size=32).graft(sl.Identity())
        | sl.Trace(0.9, nesterov=True)
        | sl.ScaleByLearningRate(0.1)
    )
    updates, _ = tx.update(grads, tx.init(params), params, sl.Context(step=0))
    np.testing.assert_allclose(updates[1][-1, -1], -0.57, atol=1e-4)

    model = {"w": jnp.ones((3, 6)), "b": jnp.ones(3)}
    for tx, note in (
        (sl.soap(0.1), "6 × 3"),
        (sl.soap(0.1, max_size=5), "6 × 3, unrotated rows"),
        (sl.kron(0.1, max_size=2), "6 × 3, diagonal factor of rows, diagonal factor of columns"),
        (sl.shampoo(0.1, block_size=3), "6 × 3, 2 blocks of 3 × 3"),
    ):
        rows = sl.Optimizer(tx, model).describe(model).to_dict()
        assert rows["w"]["notes"] == note
        assert rows["b"]["notes"] == ""
        assert rows["b"]["group"] == "rest"


def dense_shampoo(start, grads, f, b2, eps):
    """Shampoo as in the paper, for a single matrix: one full Kronecker product of two roots."""
    n, m = start.shape
    p, left, right = start.flatten().copy(), np.zeros((n, n)), np.zeros((m, m))
    history = []
    for t, g in enumerate(grads):
        weight = 1 if b2 == 1 else 1 - b2
        left, right = b2 * left + weight * g @ g.T, b2 * right + weight * g.T @ g
        if t % f == 0:
            scale = 1 if b2 == 1 else 1 / (1 - b2 ** (t + 1))
            roots = []
            for x in (left * scale, right * scale):
                values, vectors = np.linalg.eigh(x)
                ridge = np.maximum(values, 0) + eps * values.max()
                roots.append(vectors @ np.diag(ridge**-0.25) @ vectors.T)
        p = p - 0.1 * np.kron(*roots) @ g.flatten()
        history.append(p.reshape(n, m).copy())
    return np.stack(history)


@pytest.mark.slow
@pytest.mark.parametrize("b2", [0.9, 1.0])
def test_shampoo_is_a_dense_kronecker_product_of_roots(b2, x64):
    start, grads = drawn_matrix((4, 3), 7)
    rule = sl.ScaleByShampoo(b2, 1e-4, precondition_frequency=3)
    theirs = dense_shampoo(*map(np.asarray, (start, grads)), 3, b2, 1e-4)
    assert_walks(rule, start, grads, theirs)


@pytest.mark.slow
def test_blocks_walk_the_paths_of_separate_matrices(x64):
    start, grads = drawn_matrix((5, 4), 5)
    blocks, whole = (
        sl.ScaleByShampoo(0.9, precondition_frequency=2, block_size=size) | sl.Scale(-0.1)
        for size in (3, 1024)
    )
    ours, _ = slalom_trajectory(blocks, start, grads)
    for rows in (slice(0, 3), slice(3, 5)):
        for columns in (slice(0, 2), slice(2, 4)):
            alone, _ = slalom_trajectory(whole, start[rows, columns], grads[:, rows, columns])
            np.testing.assert_allclose(ours[:, rows, columns], alone, rtol=1e-7, atol=1e-9)


def test_shampoo_leaves_gradients_after_zeros_and_frequencies_are_schedules():
    # As below a last layer that starts at zero.
    tx, g = sl.ScaleByShampoo(precondition_frequency=10), jnp.linspace(-1, 1, 6).reshape(2, 3)
    update = jax.jit(tx.update)
    _, state = update(0 * g, tx.init(g), g)
    updates, _ = update(g, state, g)
    np.testing.assert_allclose(updates, g, rtol=1e-6)

    for name in ("ScaleBySoap", "ScaleByKlSoap", "ScaleBySplus", "ScaleByKron", "ScaleByShampoo"):
        with pytest.raises(ValueError, match=f"{name} takes matrices, and 'b' is a vector"):
            sl.Optimizer(public(name)(), {"w": jnp.ones((3, 2)), "b": jnp.ones(2)})

    params = {"w": jnp.ones((3, 2))}
    for rule in (sl.ScaleBySoap, sl.ScaleByShampoo):
        field = f"{rule.__name__}.precondition_frequency"
        with pytest.raises(ValueError, match=f"{field} must be at least 1 step"):
            rule(precondition_frequency=0)
        with pytest.raises(TypeError, match=f"{field} must be an int or a sche"):
            rule(precondition_frequency=1.5)
        tx = rule(precondition_frequency=lambda n: n + 1.0)
        with pytest.raises(TypeError, match=f"{rule.__name__} needs 'step'"):
            tx.update(params, tx.init(params), params)
