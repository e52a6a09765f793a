"""Muon and its relatives: against singular values and textbooks, and what users read of them."""

import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    compiled_step,
    distance,
    gradients,
    optax_trajectory,
    params_of,
    sampled,
    slalom_trajectory,
)
from slalom.rules.matrices._newton_schulz import MARGINS, iteration

STEPS = {"standard": 5, "tuned": 5, "polar_express": 5, "ten_steps": 10}
SHAPES = {"tall": (9, 4), "wide": (4, 9), "square": (5, 5), "nearly square": (5, 6)}
SHAPES |= {"batched": (2, 3, 8), "one row": (1, 4)}


def polynomial(sigma, name, steps):
    for a, b, c in iteration(name, steps):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def apply(tx, x):
    return jax.jit(tx.update)({"w": x}, None)[0]["w"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_singular_values_are_those_of_the_polynomial(name, x64):
    steps, given, wanted = STEPS[name], {}, {}
    for key, shape in SHAPES.items():
        x = np.random.default_rng(0).normal(size=shape)
        u, sigma, v = np.linalg.svd(x, full_matrices=False)
        sigma = sigma * np.logspace(0, -3, sigma.shape[-1])
        sigma[..., 2:3] = 0  # where there are as many, the rank is not full
        given[key] = jnp.asarray((u * sigma[..., None, :]) @ v)
        norm = np.linalg.norm(sigma, axis=-1, keepdims=True) * MARGINS.get(name, 1.0)
        wanted[key] = (u * polynomial(sigma / norm, name, steps)[..., None, :]) @ v
    tx = sl.Orthogonalize(name, steps, None, eps=0.0, layout="oi")
    got = jax.jit(lambda given: tx.update(given, None)[0])(given)
    for key in SHAPES:
        np.testing.assert_allclose(got[key], wanted[key], atol=1e-12, err_msg=key)


def best_odd_quintic(low, high):
    """The odd polynomial of degree 5 that is closest to 1 on [low, high], by Remez exchanges."""
    points = np.array([low, (3 * low + high) / 4, (low + 3 * high) / 4, high])
    error, before = np.inf, None
    while before is None or abs(before - error) > 1e-15:
        before = error
        powers = [points, points**3, points**5, np.array([1.0, -1.0, 1.0, -1.0])]
        a, b, c, error = np.linalg.solve(np.stack(powers, axis=1), np.ones(4))
        root = math.sqrt(9 * b**2 - 20 * a * c)
        points[1:3] = np.sqrt([(-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c)])
    return np.array([a, b, c])


def test_coefficients_are_those_of_their_derivation_and_of_the_original_code():
    # With the margin and the cushion of the published set, on singular values from 1e-3 to 1.
    margin, cushion, low, high, found = 1.02, 0.02, 1e-3, 1.0, []
    powers = np.array([1, 3, 5])
    for _ in range(5):
        triple = best_odd_quintic(max(low, cushion * high), high)
        triple = triple * 2 / (triple @ low**powers + triple @ high**powers)
        found.append(triple / margin**powers)
        low = found[-1] @ low**powers
        high = 2 - low
    found[-1] *= margin**powers  # the last step has no margin
    np.testing.assert_allclose(iteration("polar_express", 5), found, rtol=1e-12)
    assert MARGINS["polar_express"] == margin
    mapped = polynomial(np.array([0.001, 0.01, 0.1, 0.5, 1 / margin]), "polar_express", 5)
    np.testing.assert_allclose(mapped, [0.8589, 1.0271, 1.0592, 0.9106, 0.9035], atol=5e-5)

    x = jnp.array([[0.2499, 0.9105], [0.2655, 0.8824]])
    got = apply(sl.Orthogonalize(), x)
    np.testing.assert_allclose(got, [[-0.4419, 0.6456], [0.7282, 0.2970]], atol=1e-4)
    params, grads = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[1.0, 6.0], [7.0, 2.0]])
    tx = sl.muon(0.5, scale="match_rms_adamw", layout="oi")
    after, _ = sl.Optimizer(tx, params).step(params, grads)
    np.testing.assert_allclose(after, [[0.988775, 1.887053], [2.873428, 3.97035]], atol=2e-6)


EXTREME = [0.0, 1e-30, 1e-3, 1e4, 1e30]
HALF = ("bfloat16", "float16")
DTYPES = [*itertools.product((*HALF, "float32"), (None, *HALF))]


@pytest.mark.parametrize("case", sampled(DTYPES, turn=2), ids=str)
def test_zero_tiny_huge_and_rank_one_updates_stay_finite(case):
    dtype, compute = case
    base = jnp.asarray(np.random.default_rng(2).normal(size=(4, 7)), jnp.float32)
    one = jnp.outer(jnp.arange(1.0, 5.0), jnp.ones(7))
    sizes = [s for s in EXTREME if s < float(jnp.finfo(dtype).max)]
    trees = [{"full": base * s, "one": one * s} for s in sizes]
    trees = jax.tree.map(lambda x: x.astype(dtype), trees)
    tx = sl.Orthogonalize(compute_dtype=compute)
    results = jax.jit(lambda trees: [tx.update(x, None)[0] for x in trees])(trees)
    for size, u in zip(sizes, results, strict=True):
        for x in u.values():
            assert jnp.isfinite(x).all()
        if size == 0 or (size == 1e-30 and dtype == "float16"):
            assert not u["full"].any()
        if 1e-3 <= size <= 1e4:
            sigma = np.linalg.svd(np.asarray(u["full"], np.float32) / math.sqrt(7 / 4))[1]
            assert 0.6 < sigma.min() < sigma.max() < 1.25


@pytest.mark.slow
def test_norm_muon_complex_matrices_and_scales_follow_the_textbook():
    random = np.random.default_rng(3)
    x = random.normal(size=(3, 6)) + 1j * random.normal(size=(3, 6))
    got = apply(sl.Orthogonalize("ten_steps", 10, None), jnp.asarray(x, jnp.complex64))
    np.testing.assert_allclose(got @ got.conj().T, np.eye(3), atol=1e-3)
    u, _, v = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(got, u @ v, atol=1e-3)

    layer = eqx.nn.Linear(64, 256, use_bias=False, key=jax.random.key(0))
    ten = sl.Orthogonalize("ten_steps", 10)
    norm = lambda u: np.linalg.norm(np.asarray(u), 2)  # noqa: E731
    both = {"linear": layer, "turned": Turned(layer.weight.T), "plain": layer.weight}
    u, _ = ten.update(both, None)
    np.testing.assert_allclose(norm(u["linear"].weight), 2, rtol=1e-3)
    np.testing.assert_allclose(u["turned"].weight.T, u["linear"].weight, atol=1e-6)
    np.testing.assert_allclose(norm(u["plain"]), 1, rtol=1e-3)  # inputs first, as in Optax

    random = np.random.default_rng(0)
    params = [jnp.asarray(random.normal(size=s), jnp.float32) for s in ((6, 4), (4, 6))]
    grads = gradients(params, 5)
    ours, _ = slalom_trajectory(sl.norm_muon(0.02, layout="oi"), params, grads)
    for path, start, g in zip(ours, params, grads, strict=True):
        np.testing.assert_allclose(path, nor_muon(start, g, 0.02, 0.95, 0.95), atol=2e-5)

    params = {f"w{i}": jnp.zeros((384, 384 if i % 2 else 768)) for i in range(6)}
    memory = compiled_step(sl.muon(0.02), params).memory_analysis()
    # The products of all matrices together are three times the parameters.
    assert memory.temp_size_in_bytes < sum(x.nbytes for x in params.values())


class Turned(eqx.Module):
    """A linear layer that stores its weight the other way round."""

    __layout__ = {"weight": "io"}  # noqa: RUF012

    weight: jax.Array


LAYOUTS = {"muon": sl.muon(0.1), "norm_muon": sl.norm_muon(0.1), "scion": sl.scion(1e-3)}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_weight_that_is_stored_the_other_way_round_walks_the_transposed_path(name):
    layer = eqx.nn.Linear(3, 5, use_bias=False, key=jax.random.key(0))
    grads = gradients(layer, 3)
    flip = lambda tree: Turned(jnp.swapaxes(tree.weight, -1, -2))  # noqa: E731
    ours, _ = slalom_trajectory(LAYOUTS[name], layer, grads)
    turned, _ = slalom_trajectory(LAYOUTS[name], flip(layer), flip(grads))
    np.testing.assert_allclose(flip(turned).weight, ours.weight, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_muon_follows_torch(scale, nesterov, monkeypatch):
    torch = pytest.importorskip("torch", reason="compares with torch.optim")
    # It iterates in bfloat16, which would leave only two digits to compare.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    random = np.random.default_rng(0)
    params = [jnp.asarray(random.normal(size=s), jnp.float32) for s in ((6, 4), (4, 6), (5, 5))]
    grads = gradients(params, 5)
    options = {"weight_decay": 0.1, "nesterov": nesterov}
    ours, _ = slalom_trajectory(sl.muon(0.02, scale=scale, layout="oi", **options), params, grads)

    weights = [torch.nn.Parameter(torch.tensor(np.asarray(p))) for p in params]
    peer = torch.optim.Muon(weights, lr=0.02, adjust_lr_fn=scale, **options)
    for i in range(5):
        for w, g in zip(weights, grads, strict=True):
            w.grad = torch.tensor(np.asarray(g[i]))
        peer.step()
        assert distance([x[i] for x in ours], [w.detach().numpy() for w in weights]) < 2e-5


OPTAX = [
    ({}, {}),
    ({"nesterov": False}, {}),
    ({"consistent_rms": 0.2}, {"scale": "match_rms_adamw"}),
    ({"ns_coeffs": "dion"}, {"ns_coeffs": "tuned"}),
    ({"preconditioning": "aol", "ns_steps": 4},) * 2,
    ({"preconditioning": "schatten"}, {"preconditioning": "schatten"}),
    ({"preconditioning": "spectral"}, {"preconditioning": "spectral"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "ours"), OPTAX, ids=str)
def test_a_debiased_mean_in_front_follows_optax(theirs, ours):
    params = {"w": jnp.ones((6, 4)), "b": jnp.ones(4), "v": jnp.ones((4, 4))}
    grads = gradients(params, 5)
    want, _ = optax_trajectory(optax.contrib.muon(0.02, **theirs), params, grads)
    nesterov = theirs.get("nesterov", True)
    rule = sl.Ema(0.95, nesterov=nesterov) | sl.Orthogonalize(**ours, eps=1e-8)
    rule = rule | sl.ScaleByLearningRate(0.02)
    tx = sl.adam(0.02, nesterov=nesterov).partition({sl.where.matrix(): rule})
    got, _ = slalom_trajectory(tx, params, grads)
    assert distance(got, want) < 2e-5


def nor_muon(params, grads, lr, b1, b2, eps=1e-10):
    """NorMuon as in its paper's code, in double precision."""
    p, trace, v, history = np.asarray(params, np.float64), 0.0, 0.0, []
    for g in np.asarray(grads, np.float64):
        trace = b1 * trace + g
        x = g + b1 * trace
        u, sigma, w = np.linalg.svd(x, full_matrices=False)
        o = (u * polynomial(sigma / np.linalg.norm(sigma), "standard", 5)) @ w
        v = b2 * v + (1 - b2) * np.mean(o**2, 1, keepdims=True)
        new = o / (np.sqrt(v) + eps)
        new = new * np.linalg.norm(o) / np.linalg.norm(new)
        p = p - lr * math.sqrt(max(1, p.shape[0] / p.shape[1])) * new
        history.append(p)
    return np.stack(history)


@pytest.mark.slow
def test_scion_is_steepest_descent_in_each_norm():
    model = {
        "embedding": eqx.nn.Embedding(5, 3, key=jax.random.key(0)),
        "hidden": eqx.nn.Linear(3, 6, key=jax.random.key(1)),
        "head": eqx.nn.Linear(6, 5, use_bias=False, key=jax.random.key(2)),
    }
    grads = jax.tree.map(lambda g: g[0], gradients(model, 1))
    tx = sl.scion(0.1, radius=2.0, output_radius=3.0, where=~sl.where.path("head.**"))
    after, _ = sl.Optimizer(tx, model).step(model, grads)
    change = jax.tree.map(lambda a, b: (b - a) / 0.1, params_of(after), params_of(model))
    g = jax.tree.map(np.asarray, grads)
    u, sigma, v = np.linalg.svd(g["hidden"].weight, full_matrices=False)
    o = (u * polynomial(sigma / np.linalg.norm(sigma), "standard", 5)) @ v
    np.testing.assert_allclose(change["hidden"].weight, 2 * math.sqrt(6 / 3) * o, atol=1e-4)
    np.testing.assert_allclose(change["head"].weight, 3 * np.sign(g["head"].weight) / 6, atol=1e-5)
    for name, row in (("embedding", g["embedding"].weight), ("hidden", g["hidden"].bias[None])):
        got = change[name].weight if name == "embedding" else change[name].bias[None]
        want = row / np.sqrt(np.mean(row**2, 1, keepdims=True))
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_everything_goes_where_it_belongs():
    keys = jax.random.split(jax.random.key(0), 4)
    model = {
        "table": eqx.nn.Embedding(5, 4, key=keys[0]),
        "conv": eqx.nn.Conv1d(4, 6, 3, key=keys[1]),
        "layers": eqx.filter_vmap(lambda k: eqx.nn.Linear(4, 4, key=k))(keys),
        "head": eqx.nn.Linear(4, 5, key=keys[2]),
        "norm": eqx.nn.LayerNorm(4),
    }
    tx = sl.muon(0.02, adam_learning_rate=1e-3, where=~sl.where.path("head.**"))
    opt = sl.Optimizer(tx, model)
    rows = opt.describe(model).to_dict()
    shown = {path: (row["group"], row["notes"]) for path, row in rows.items()}
    muon = {path for path, (group, _) in shown.items() if group == "muon"}
    assert muon == {"conv.weight", "layers.weight"}
    assert shown["conv.weight"][1] == "6 × 12"
    assert shown["layers.weight"][1] == "4 of 4 × 4"
    assert {group for path, (group, _) in shown.items() if "head" in path} == {"rest"}
    assert float(rows["head.weight"]["learning_rate"]) == pytest.approx(1e-3)
    assert "4 of 4 × 4" in str(opt.describe(model))


def test_an_option_that_differs_is_printed_and_an_unknown_layout_named():
    tx = sl.Orthogonalize([(1.5, -0.5, 0), (1, 2, 3)], 2, compute_dtype="bfloat16")
    coefficients = "ns_coeffs=((1.5, -0.5, 0.0), (1.0, 2.0, 3.0))"
    options = coefficients, "ns_steps=2", "compute_dtype='bfloat16'"
    assert repr(tx) == "sl.Orthogonalize(\n    " + ",\n    ".join(options) + "\n)"
    assert eval(repr(tx), {"sl": sl}) == tx

    class Mine(eqx.Module):
        weight: jax.Array

    model = Mine(jnp.ones((2, 3)))
    with pytest.warns(UserWarning, match="Orthogonalize does not know how Mine stores 'weight'"):
        sl.Optimizer(sl.muon(0.1), model)
    sl.Optimizer(sl.muon(0.1, scale=None), model)  # which of the two comes first is all the same


OTHER = (
    "`sl.adamw(1e-3).partition({sl.where.matrix(): sl.Orthogonalize(...) | "
    "sl.ScaleByLearningRate(1e-3)})`."
)
COEFFICIENTS = (
    "Orthogonalize.ns_coeffs must be one of 'standard', 'tuned', 'polar_express', 'ten_steps', or "
    "three numbers (a, b, c) for all steps, or three for each step, got "
)
ERRORS = {
    "vector": (
        lambda: sl.Optimizer(sl.Orthogonalize() | sl.sgd(0.1), {"b": jnp.ones(3)}),
        "Orthogonalize takes matrices, and 'b' is a vector. Give it another rule: " + OTHER,
    ),
    "embedding": (
        lambda: sl.Orthogonalize().init(eqx.nn.Embedding(3, 2, key=jax.random.key(0))),
        "Orthogonalize takes matrices, and 'weight' is an embedding. If it is a matrix to you, say "
        "which axes are outputs (o), inputs (i), a kernel (k) and a stack (s): "
        "`sl.Orthogonalize(..., layout={sl.where.path('weight'): 'io'})`. Otherwise give it "
        "another rule: " + OTHER,
    ),
    "three axes": (
        lambda: sl.ScaleByRowRms().init({"w": jnp.ones((2, 3, 4))}),
        "ScaleByRowRms takes matrices, and 'w' is an array with 3 axes of unknown layout. If it is "
        "a matrix to you, say which axes are outputs (o), inputs (i), a kernel (k) and a stack "
        "(s): `sl.ScaleByRowRms(..., layout={sl.where.path('w'): 'sio'})`. Otherwise give it "
        "another rule: `sl.adamw(1e-3).partition({sl.where.matrix(): sl.ScaleByRowRms(...) | "
        "sl.ScaleByLearningRate(1e-3)})`.",
    ),
    "no set": (lambda: sl.Orthogonalize(ns_coeffs="best"), f"{COEFFICIENTS}'best'."),
    "two numbers": (
        lambda: sl.Orthogonalize(ns_coeffs=((1, 2), (3, 4))),
        f"{COEFFICIENTS}((1.0, 2.0), (3.0, 4.0)).",
    ),
    "no scale": (
        lambda: sl.Orthogonalize(scale="moonlight"),
        "Orthogonalize.scale must be 'original', 'spectral', 'match_rms_adamw' or None, got "
        "'moonlight'.",
    ),
    "too many steps": (
        lambda: sl.Orthogonalize("tuned", 6),
        "Orthogonalize has ns_steps=6, but ns_coeffs='tuned' has 5 steps. Write `ns_steps=5`, or "
        "pass more coefficients.",
    ),
}


@pytest.mark.parametrize(("bad", "message"), ERRORS.values(), ids=ERRORS)
def test_messages_are_as_stated_to_the_last_word(bad, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole text is compared
        bad()
    assert str(error.value) == message


@pytest.mark.parametrize("recipe", [sl.muon, sl.norm_muon, sl.contrib.dion])
def test_adam_beside_muon_gets_a_rate_that_suits_it(recipe):
    def rate(learning_rate, **options):
        return recipe(learning_rate, **options)["rest.scale_by_learning_rate"].learning_rate

    assert rate(0.02) == pytest.approx(0.0003)
    assert rate(lambda step: jnp.float32(0.02))(0) == pytest.approx(0.0003)
    assert rate(0.02, scale="spectral") == pytest.approx(0.0003)
    assert rate(0.02, scale="match_rms_adamw") == 0.02
    assert rate(0.02, adam_learning_rate=0.1) == 0.1
