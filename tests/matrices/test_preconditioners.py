"""Cautious updates, the hyperball constraint, and the rules that precondition both sides."""

import dataclasses
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_same_path, kind_of, slalom_trajectory

# --- Cautious, and its decay ------------------------------------------------------------------


def cautious(updates, grads, **options):
    context = sl.Context(step=0, grad=grads)
    return sl.Cautious(**options).update(updates, None, context=context)[0]


def test_cautious_drops_what_points_against_the_gradient_and_scales_up_the_rest():
    random = np.random.default_rng(0)
    u, g = random.standard_normal((2, 3, 5)).astype(np.float32)
    g[0, 0] = 0
    keep = u * g > 0
    np.testing.assert_allclose(
        cautious(jnp.asarray(u), jnp.asarray(g)), u * keep / keep.mean(), rtol=1e-6
    )
    np.testing.assert_allclose(
        cautious(jnp.asarray(u), jnp.asarray(g), min_fraction=1.0), u * keep, rtol=1e-6
    )


@pytest.mark.slow
def test_cautious_without_any_agreement_is_zero():
    x = jnp.array([1.0, -2.0])
    assert jnp.all(cautious(x, -x) == 0)
    assert jnp.all(cautious(0 * x, x) == 0)
    # One of 4000 entries agrees: it grows by 1000, not by 4000.
    one = jnp.ones(4000).at[1:].set(-1.0)
    np.testing.assert_allclose(cautious(one, jnp.ones(4000))[0], 1000, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cautious_compares_tiny_and_huge_numbers(dtype):
    limits = jnp.finfo(dtype)
    x = jnp.array([limits.tiny, limits.tiny, limits.max, limits.max], dtype)
    g = x * jnp.array([1, -1, 1, -1], dtype)
    kept = cautious(x, g, min_fraction=1.0)
    assert (kept != 0).tolist() == [True, False, True, False]


def test_cautious_takes_a_complex_entry_as_a_vector():
    u = jnp.array([1 + 1j, 1 + 1j, 1e-30j, 1e30 + 1j])
    g = jnp.array([2 - 1j, -2 + 1j, 1e-30j, -1e30 + 0j])
    np.testing.assert_array_equal(cautious(u, g, min_fraction=1.0), u.at[1].set(0).at[3].set(0))


def test_cautious_asks_for_the_gradient_by_name():
    params = {"w": jnp.ones(2)}
    opt = sl.Optimizer(sl.ScaleByAdam() | sl.Cautious() | sl.Scale(-0.1), params)
    with pytest.raises(TypeError, match=r"Cautious.*needs 'grad'.*grad=grads"):
        opt.step(params, params)


def test_cautious_decay_shrinks_only_what_the_update_shrinks():
    u, p = jnp.array([1.0, 1.0, 0.0, -1.0]), jnp.array([2.0, -2.0, 2.0, -2.0])
    link = sl.AddDecayedWeights(0.1, cautious=True)
    np.testing.assert_allclose(link.update(u, None, p)[0], [1.2, 1.0, 0.0, -1.2], rtol=1e-6)


# --- KeepInitialNorm --------------------------------------------------------------------------


@pytest.mark.slow
def test_parameters_keep_their_norm_and_turn_by_the_learning_rate():
    model = {"w": jax.random.normal(jax.random.key(0), (4, 3)), "zero": jnp.zeros(2)}
    radius = float(jnp.linalg.norm(model["w"]))
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), (20, *x.shape)), model)
    tx = sl.ScaleByTrustRatio() | sl.ScaleByLearningRate(0.1) | sl.KeepInitialNorm()
    history, _ = slalom_trajectory(tx, model, grads)
    np.testing.assert_allclose(
        jnp.linalg.norm(history["w"], axis=(1, 2)), np.full(20, radius), rtol=1e-6
    )
    g = np.asarray(grads["w"][0], np.float64)
    p = np.asarray(model["w"], np.float64)
    moved = p - 0.1 * radius * g / np.linalg.norm(g)
    np.testing.assert_allclose(
        history["w"][0], moved * radius / np.linalg.norm(moved), rtol=1e-5, atol=1e-6
    )
    # What starts at zero is free.
    assert jnp.linalg.norm(history["zero"][-1]) > 1e-3


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e18, 1e30, 3e38])
def test_a_projection_to_the_norm_is_finite(size):
    params = jnp.array([3.0, 4.0])
    opt = sl.Optimizer(sl.Scale(-1.0) | sl.KeepInitialNorm(), params)
    stepped, opt = opt.step(params, jnp.array([size, 0.0]))
    assert jnp.all(jnp.isfinite(stepped))
    if size < 1e18:
        np.testing.assert_allclose(stepped, params, rtol=1e-6)
    stepped, _ = opt.step(stepped, params)
    assert jnp.all(jnp.isfinite(stepped))


def test_a_reset_takes_the_norm_of_the_present_parameters():
    params = {"a": jnp.ones(4), "b": jnp.ones(9)}
    opt = sl.Optimizer(sl.sgd(0.1) | sl.KeepInitialNorm(), params)
    larger = jax.tree.map(lambda x: 2 * x, params)
    opt = opt.reset(larger, sl.where.path("b"))
    assert eqx.tree_equal(
        opt.state_of(sl.KeepInitialNorm).radius, {"a": jnp.asarray(2.0), "b": jnp.asarray(6.0)}
    )


# --- SOAP -------------------------------------------------------------------------------------


def soap(**options):
    return sl.ScaleBySoap(**options) | sl.ScaleByLearningRate(0.1)


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


@pytest.mark.slow
@pytest.mark.parametrize("f", [1, 3])
def test_soap_is_adam_in_the_dense_eigenbasis(f, x64):
    start, grads = drawn_matrix((4, 3), 12)
    ours, _ = slalom_trajectory(
        soap(precondition_frequency=f), jnp.asarray(start), jnp.asarray(grads)
    )
    np.testing.assert_allclose(ours, dense_soap(start, grads, f), rtol=1e-9, atol=1e-9)


def drawn_matrix(shape, steps, seed=0):
    """A matrix, and a gradient for each step."""
    random = np.random.default_rng(seed)
    return random.standard_normal(shape), random.standard_normal((steps, *shape))


@pytest.mark.slow
def test_soap_follows_pytorch_optimizer():
    torch = pytest.importorskip("torch", reason="in no extra")
    peers = pytest.importorskip("pytorch_optimizer", reason="an independent SOAP, in no extra")
    start, grads = drawn_matrix((5, 4), 25)
    p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    peer = peers.SOAP([p], lr=0.1, weight_decay=0.0, precondition_frequency=4)
    history = []
    for g in grads:
        p.grad = torch.tensor(g)
        peer.step()
        history.append(p.detach().numpy().copy())
    ours, _ = slalom_trajectory(
        soap(precondition_frequency=4),
        jnp.asarray(start, jnp.float32),
        jnp.asarray(grads, jnp.float32),
    )
    # It adds ε before the correction of the bias, and computes QR in float32.
    assert_same_path(ours, np.stack(history), jnp.asarray(start), 2e-5)


KNOWN = (
    [[0.5, -1.0, 1.5], [2.0, 0.25, -0.75]],
    [
        [[1.0, 2.0, -1.0], [0.5, -1.0, 3.0]],
        [[0.5, -1.0, 2.0], [1.0, 1.0, -0.5]],
        [[-1.0, 0.5, 1.0], [2.0, -0.5, 1.0]],
    ],
)


def test_kl_soap_on_a_hyperball_follows_the_record(x64):
    # Of a float64 transcription of the equations of modded-nanogpt's records 19 and 25.
    start, grads = map(jnp.array, KNOWN)
    hyperball = sl.ScaleByTrustRatio() | sl.ScaleByLearningRate(0.018) | sl.KeepInitialNorm()
    ours, opt = slalom_trajectory(sl.ScaleByKlSoap(layout="oi") | hyperball, start, grads)
    theirs = [
        start,
        [[0.500502, -1.002839, 1.500843], [1.993870, 0.247834, -0.761145]],
        [[0.510757, -1.012886, 1.492059], [1.984881, 0.242579, -0.783168]],
    ]
    np.testing.assert_allclose(ours, theirs, atol=6e-7)
    left, right = opt.state_of(sl.ScaleByKlSoap).variances
    np.testing.assert_allclose(left[0] ** -0.5, [0.700486, 0.975485], atol=6e-7)
    np.testing.assert_allclose(right[0] ** -0.5, [0.599750, 1.119069, 1.803190], atol=6e-7)


# --- SPlus ------------------------------------------------------------------------------------


def test_splus_with_an_average_gives_known_numbers(x64):
    # Of a float64 transcription of the authors' equations, at the rate 0.1.
    w, grads = map(jnp.array, KNOWN)
    tx = (sl.ScaleBySplus(layout="oi") | sl.ScaleByLearningRate(0.1)).average(0.999)
    opt = sl.Optimizer(tx, w)
    known = [
        [[0.459816, -1.039584, 1.539384], [1.959216, 0.289884, -0.789684]],
        [[0.442630, -1.033927, 1.526823], [1.882611, 0.313142, -0.842640]],
    ]
    for g, wanted in zip(grads, known, strict=False):
        w, opt = opt.step(w, g)
        mean = opt.eval_params(w)
        w = w * (1 - 0.1 * 2 / (2 + 3) * 0.01)  # they decay after the step and the average
        np.testing.assert_allclose(w, wanted, atol=6e-7)
    wanted = [[0.451399, -1.037169, 1.533714], [1.921663, 0.301640, -0.816502]]
    np.testing.assert_allclose(mean, wanted, atol=6e-7)


def splus_updates(grads, f, **options):
    tx = sl.ScaleBySplus(precondition_frequency=f, layout="oi", **options)
    updates, state = [], tx.init(jnp.asarray(grads[0]))
    for g in grads:
        update, state = jax.jit(tx.update)(jnp.asarray(g), state)
        updates.append(update)
    return np.stack(updates)


@pytest.mark.slow
@pytest.mark.parametrize("f", [1, 3])
def test_splus_takes_signs_in_the_eigenvectors_of_earlier_steps(f, x64):
    _, grads = drawn_matrix((4, 3), 9)
    left, right, basis, mean, wanted = 0, 0, (np.eye(4), np.eye(3)), 0, []
    for t, g in enumerate(grads, 1):
        mean = 0.9 * mean + 0.1 * g
        left, right = (0.999 * x + 0.001 * y for x, y in ((left, g @ g.T), (right, g.T @ g)))
        wanted.append(2 / 7 * basis[0] @ np.sign(basis[0].T @ mean @ basis[1]) @ basis[1].T)
        if t == 1 or t % f == 0:
            basis = tuple(np.linalg.eigh(x)[1] for x in (left, right))
    np.testing.assert_allclose(splus_updates(grads, f), wanted, atol=1e-9)


@pytest.mark.slow
def test_splus_turns_with_the_gradients_once_it_has_a_basis(x64):
    _, grads = drawn_matrix((4, 4), 5)
    turns = np.linalg.qr(np.random.default_rng(1).standard_normal((2, 4, 4)))[0]
    plain, turned = (splus_updates(x, 2) for x in (grads, turns[0] @ grads @ turns[1]))
    np.testing.assert_allclose(turned[1:], turns[0] @ plain[1:] @ turns[1], atol=1e-9)
    assert not np.allclose(turned[0], turns[0] @ plain[0] @ turns[1], atol=1e-2)


def test_splus_does_not_step_along_rounding_errors():
    random = np.random.default_rng(0)
    g = random.standard_normal((16, 2)) @ random.standard_normal((2, 8))  # of rank 2
    u = splus_updates(np.stack([g, g]).astype(np.float32), 1)[1]
    lengths = np.linalg.svd(12 * u)[1]
    np.testing.assert_allclose(lengths, [1, 1, 0, 0, 0, 0, 0, 0], atol=1e-5)


# --- Kron -------------------------------------------------------------------------------------


def kron(**options):
    return sl.Ema(0.9) | sl.ScaleByKron(**options) | sl.ScaleByLearningRate(0.1)


@pytest.fixture
def same_noise(monkeypatch):
    """The same noise in every refresh, for each matrix of a shape."""

    def noise(_, like):
        return jnp.asarray(np.random.default_rng(5).standard_normal(like.shape), like.dtype)

    monkeypatch.setattr("slalom.transforms.matrices.kron._noise", noise)


def dense_kron(start, grads, probability, noise, rate=0.1):
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
                total = gain + loss
                column = total[:, np.argmax(np.linalg.norm(total, axis=0))]
                direction = total @ column / np.linalg.norm(total @ column)
                norm = np.linalg.norm(total @ direction)
                new.append(factor - rate * np.triu(gain - loss) @ factor / norm)
            left, right = new
        q = np.kron(left, right)
        direction = q.T @ q @ momentum
        direction *= min(1, 1.1 / np.sqrt(np.mean(direction**2)))
        p = p - 0.1 * direction
        history.append(p.reshape(n, m).copy())
    return np.stack(history)


@pytest.mark.slow
@pytest.mark.parametrize("probability", [1.0, 0.4])
def test_kron_is_a_dense_triangular_preconditioner(probability, same_noise, x64):
    start, grads = drawn_matrix((4, 3), 12)
    ours, _ = slalom_trajectory(
        kron(update_probability=probability, layout="oi"), jnp.asarray(start), jnp.asarray(grads)
    )
    noise = np.random.default_rng(5).standard_normal((4, 3))
    theirs = dense_kron(start, grads, probability, noise)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("max_size", [4, 10])
def test_kron_follows_pytorch_optimizer(max_size, same_noise, monkeypatch, x64):
    torch = pytest.importorskip("torch", reason="in no extra")
    peers = pytest.importorskip("pytorch_optimizer", reason="an independent Kron, in no extra")
    start, grads = drawn_matrix((5, 4), 25)
    noise = np.random.default_rng(5).standard_normal((5, 4))
    monkeypatch.setattr(torch, "randn_like", lambda x, dtype: torch.tensor(noise, dtype=dtype))
    p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    peer = peers.Kron(
        [p],
        lr=0.1,
        pre_conditioner_update_probability=0.4,
        precondition_dtype=torch.float64,
        max_size_triangular=max_size,
    )
    history = []
    for g in grads:
        p.grad = torch.tensor(g)
        peer.step()
        history.append(p.detach().numpy().copy())
    ours, _ = slalom_trajectory(
        kron(update_probability=0.4, max_size=max_size, layout="oi"),
        jnp.asarray(start),
        jnp.asarray(grads),
    )
    # It solves with the triangular factors in float32, and adds 1e-6 to the root mean square.
    assert_same_path(ours, np.stack(history), jnp.asarray(start), 2e-5)


@pytest.mark.slow
def test_kron_refreshes_by_the_schedule_of_the_authors():
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


# --- Shampoo ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_shampoo_with_grafting_and_momentum_gives_a_known_number():
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
    ours, _ = slalom_trajectory(
        rule | sl.ScaleByLearningRate(0.1), jnp.asarray(start), jnp.asarray(grads)
    )
    theirs = dense_shampoo(start, grads, 3, b2, 1e-4)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_blocks_walk_the_paths_of_separate_matrices(x64):
    start, grads = drawn_matrix((5, 4), 5)
    rule = sl.ScaleByShampoo(0.9, precondition_frequency=2, block_size=3)
    ours, _ = slalom_trajectory(rule | sl.Scale(-0.1), jnp.asarray(start), jnp.asarray(grads))
    for rows in (slice(0, 3), slice(3, 5)):
        for columns in (slice(0, 2), slice(2, 4)):
            alone, _ = slalom_trajectory(
                sl.ScaleByShampoo(0.9, precondition_frequency=2) | sl.Scale(-0.1),
                jnp.asarray(start[rows, columns]),
                jnp.asarray(grads[:, rows, columns]),
            )
            np.testing.assert_allclose(ours[:, rows, columns], alone, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_shampoo_follows_pytorch_optimizer(x64):
    torch = pytest.importorskip("torch", reason="in no extra")
    peers = pytest.importorskip("pytorch_optimizer", reason="an independent Shampoo, in no extra")
    start, grads = drawn_matrix((5, 4), 20)
    p = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    peer = peers.ScalableShampoo(
        [p],
        lr=0.1,
        start_preconditioning_step=1,
        preconditioning_compute_steps=1,
        block_size=32,
        shape_interpretation=False,
        matrix_eps=1e-12,
        use_svd=True,
    )
    history = []
    for g in grads:
        p.grad = torch.tensor(g)
        peer.step()
        history.append(p.detach().numpy().copy())
    tx = (
        sl.ScaleByShampoo(0.999, 1e-12, precondition_frequency=1).graft(sl.Identity())
        | sl.Trace(0.9, nesterov=True)
        | sl.ScaleByLearningRate(0.1)
    )
    ours, _ = slalom_trajectory(tx, jnp.asarray(start), jnp.asarray(grads))
    assert_same_path(ours, np.stack(history), jnp.asarray(start), 1e-4)


# --- what holds for all of them ---------------------------------------------------------------

EACH = {
    "soap": functools.partial(sl.ScaleBySoap, precondition_frequency=2),
    "kl_soap": functools.partial(sl.ScaleByKlSoap, precondition_frequency=2),
    "splus": functools.partial(sl.ScaleBySplus, precondition_frequency=2),
    "kron": functools.partial(sl.ScaleByKron, 0.5),
    "shampoo": lambda **options: sl.ScaleByShampoo(
        precondition_frequency=2, block_size=2, **options
    ).graft(sl.ScaleByAdam()),
}
each = pytest.mark.parametrize("rule", [pytest.param(rule, id=name) for name, rule in EACH.items()])
each_slow = pytest.mark.parametrize(
    "rule", [pytest.param(rule, id=name, marks=pytest.mark.slow) for name, rule in EACH.items()]
)


@each_slow
def test_storing_a_matrix_the_other_way_round_transposes_its_path(rule, same_noise):
    start, grads = drawn_matrix((4, 3), 6)
    tx = rule() | sl.Scale(-0.1)
    as_io, _ = slalom_trajectory(tx, jnp.asarray(start), jnp.asarray(grads))
    told = rule(layout="oi") | sl.Scale(-0.1)
    as_oi, _ = slalom_trajectory(told, jnp.asarray(start.T), jnp.asarray(grads.mT))
    np.testing.assert_allclose(as_io, as_oi.mT, rtol=1e-6, atol=1e-7)


@each_slow
def test_a_stack_of_two_walks_the_paths_of_the_two(rule, same_noise):
    start, grads = drawn_matrix((2, 4, 3), 6)
    told = rule(layout="sio") | sl.Scale(-0.1)
    stacked, _ = slalom_trajectory(told, jnp.asarray(start), jnp.asarray(grads))
    for i in range(2):
        alone, _ = slalom_trajectory(
            rule() | sl.Scale(-0.1), jnp.asarray(start[i]), jnp.asarray(grads[:, i])
        )
        np.testing.assert_allclose(stacked[:, i], alone, rtol=1e-5, atol=1e-6)


@each_slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_extreme_gradients_stay_finite(rule, dtype):
    limits = jnp.finfo(dtype)
    # Of rank 1, with a row and a column of zeros.
    one = np.outer([1.0, -2.0, 3.0, 0.0], [1.0, 2.0, 0.0])
    sizes = [0.0, float(limits.tiny), 1.0, float(limits.max) / 8, 1.0, 0.0]
    grads = jnp.stack([jnp.asarray(one * size, dtype) for size in sizes])
    for given in (grads, grads[::-1]):
        history, opt = slalom_trajectory(rule() | sl.Scale(-0.1), jnp.ones((4, 3), dtype), given)
        assert jnp.all(jnp.isfinite(history))
        assert all(jnp.all(jnp.isfinite(x)) for x in opt.arrays)


def outermost_conditionals(jaxpr):
    inner = [e.params["jaxpr"].jaxpr for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    own = sum(e.primitive.name == "cond" for e in jaxpr.eqns)
    return own + sum(map(outermost_conditionals, inner))


@pytest.mark.slow
@each
def test_all_refreshes_are_in_one_conditional_that_idle_steps_skip(rule):
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones((2, 3)), "c": jnp.ones((3, 2))}
    opt = sl.Optimizer(rule() | sl.Scale(-0.1), params)
    jaxpr = jax.make_jaxpr(lambda: opt.step(params, params)[0])()
    assert outermost_conditionals(jaxpr.jaxpr) == 1
    jaxpr = str(jaxpr)
    outside = jaxpr[: jaxpr.index("cond[")]
    assert not any(
        name in outside for name in ("householder", "geqrf", "eigh[", "triangular_solve")
    )


def compiled_step(rule, *shapes):
    params = {str(i): jnp.ones(shape) for i, shape in enumerate(shapes)}
    opt = sl.Optimizer(rule() | sl.Scale(-0.1), params)
    arrays, static = eqx.partition(opt, eqx.is_array)

    def step(params, arrays, grads):
        stepped, new = eqx.combine(arrays, static).step(params, grads)
        return stepped, eqx.filter(new, eqx.is_array)

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, arrays, params).compile()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="counts what XLA does on a CPU")
@each_slow
def test_scratch_does_not_grow_as_fast_as_the_number_of_large_matrices(rule):
    if rule is EACH["shampoo"]:

        def rule(**options):
            return sl.ScaleByShampoo(**options).graft(sl.ScaleByAdam())

    one, four = (
        compiled_step(rule, *[(264, 256)] * number).memory_analysis().temp_size_in_bytes
        for number in (1, 4)
    )
    assert four <= 3.3 * one
    assert four <= 5 * 4 * (4 * 264 * 256)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="counts what XLA does on a CPU")
@each_slow
def test_other_steps_copy_no_factors(rule):
    if rule is EACH["shampoo"]:
        rule = sl.ScaleByShampoo
    program = compiled_step(rule, (264, 256), (264, 256)).as_text()
    outside = program[program.index("\nENTRY") :]
    size = r"= f32\[(?:1,)?(?:264,264|256,256|69696|65536)\]\S* (?:fusion|dot|copy|transpose)\("
    # The means G·Gᴴ and Gᴴ·G change in each step: a product and a sum.
    assert len(re.findall(size, outside)) == (0 if rule is EACH["kron"] else 2 * 4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="counts what XLA does on a CPU")
@each_slow
def test_small_matrices_of_equal_shape_are_refreshed_by_the_same_calls(rule):
    calls = [
        compiled_step(rule, *[(8, 6)] * number).as_text().count("custom_call_target=")
        for number in (1, 4)
    ]
    assert calls[0] == calls[1]


def test_shampoo_after_zeros_alone_leaves_gradients_as_they_are():
    # As below a last layer that starts at zero.
    tx, g = (
        sl.ScaleByShampoo(precondition_frequency=10),
        {"w": jnp.linspace(-1, 1, 6).reshape(2, 3)},
    )
    _, state = tx.update(sl.tree.zeros_like(g), tx.init(g), g)
    updates, _ = tx.update(g, state, g)
    np.testing.assert_allclose(updates["w"], g["w"], rtol=1e-6)


@each
def test_a_vector_is_refused_by_name(rule):
    with pytest.raises(
        ValueError, match=r"ScaleBy[SK][A-Za-z]+ takes matrices, and 'b' is a vector"
    ):
        sl.Optimizer(rule() | sl.Scale(-0.1), {"w": jnp.ones((3, 2)), "b": jnp.ones(2)})


@each_slow
def test_a_reset_parameter_starts_again_and_the_others_go_on(rule, same_noise):
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), (8, *x.shape)), params)
    tx = rule() | sl.Scale(-0.1)
    whole, _ = slalom_trajectory(tx, params, grads)
    _, opt = slalom_trajectory(tx, params, jax.tree.map(lambda g: g[:4], grads))
    halfway = jax.tree.map(lambda h: h[3], whole)
    opt = opt.reset(halfway, sl.where.path("b"))
    rest, _ = slalom_trajectory(opt, halfway, jax.tree.map(lambda g: g[4:], grads))
    fresh, _ = slalom_trajectory(tx, halfway, jax.tree.map(lambda g: g[4:], grads))
    # The first step after the reset belongs to the other parameter only.
    np.testing.assert_allclose(rest["a"][0], whole["a"][4], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rest["b"][0], fresh["b"][0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ScaleBySoap", "ScaleByShampoo"])
def test_the_frequency_is_a_count_or_a_schedule(name):
    rule = getattr(sl, name)
    with pytest.raises(ValueError, match=rf"{name}.precondition_frequency must be at least 1 step"):
        rule(precondition_frequency=0)
    with pytest.raises(TypeError, match=rf"{name}.precondition_frequency must be an int or a sche"):
        rule(precondition_frequency=1.5)
    params = {"w": jnp.ones((3, 2))}
    tx = rule(precondition_frequency=lambda n: n + 1.0)
    with pytest.raises(TypeError, match=f"{name} needs 'step'"):
        tx.update(params, tx.init(params), params)


@each_slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_matrices_take_the_same_path(rule, kind):
    # A square one, whose factors have no eigenvectors that rounding decides.
    start, grads = drawn_matrix((6, 6), 4)
    # In float32, either path of KL-SOAP is up to 1e-6 away from the one in float64.
    dtype = jnp.float64 if rule is EACH["kl_soap"] else jnp.float32
    with jax.enable_x64(dtype == jnp.float64):
        start, grads = jnp.asarray(start, dtype), jnp.asarray(grads, dtype)
        whole, _ = slalom_trajectory(rule() | sl.Scale(-0.1), start, grads)
        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType[kind],) * 2)
        home = jax.NamedSharding(mesh, jax.P("a", "b"))
        start = jax.device_put(start, home)
        opt = sl.Optimizer(rule() | sl.Scale(-0.1), start)
        before = kind_of(opt)
        step = jax.jit(lambda p, opt, g: opt.step(p, g))
        for g, there in zip(grads, whole, strict=True):
            start, opt = step(start, opt, jax.device_put(g, home))
            assert start.sharding == home
            np.testing.assert_allclose(start, there, rtol=1e-5, atol=1e-6)
        assert kind_of(opt) == before


@pytest.mark.slow
def test_descriptions_name_matrices_and_what_has_no_factor():
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
