"""Rules that find their learning rate, against other implementations and what their papers say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_close,
    assert_same_bits,
    assert_same_path,
    compiled_step,
    gradients,
    lenient,
    nested_dict,
    optax_trajectory,
    public,
    slalom_trajectory,
    slow_except,
    trajectory,
)

contrib = pytest.importorskip("optax.contrib", reason="compares with Optax")

START = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.array([0.5, -0.25, 1.0])}
matrices = sl.where.ndim(min=2)


def loss_fn(p):
    return jnp.sum((p["w"] - 0.3) ** 2) + jnp.sum(jnp.sqrt(1 + (p["b"] - 2.0) ** 2)) + 0.5


def run(tx, steps, start=START, loss=loss_fn):
    """The parameters and metrics after each step, and the last optimizer."""
    opt = sl.Optimizer(tx, start)

    def step(before, opt, _):
        value, grads = jax.value_and_grad(loss)(before[0])
        params, opt = opt.step(before[0], grads, value=value)
        return (params, opt.metrics), opt

    (path, metrics), opt = trajectory(step, (start, opt.metrics), opt, (jnp.arange(steps),))
    return path, metrics, opt


def run_optax(tx, steps, start=START, loss=loss_fn):
    def step(params, state, _):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    with lenient():  # Optax promotes
        tx = optax.with_extra_args_support(tx())
        return trajectory(step, start, tx.init(start), (jnp.arange(steps),))[0]


def pair(name, *numbers, **options):
    """Our optimizer and that of Optax, of the same numbers."""
    ours, theirs = public(name), getattr(contrib, name)
    return ours(*numbers, **options), lambda: theirs(*numbers, **options)


LOWER_BOUND = {"lower_bound": -3.0, "adapt_lower_bound": True}
SAFEGUARD = {"estim_lr_coef": 2.0, "safeguard_warmup": True}
PAIRS = {
    "prodigy": pair("prodigy", weight_decay=0.01),
    "prodigy, safeguard": (
        sl.prodigy(0.5, b3=0.9, **SAFEGUARD),
        lambda: contrib.prodigy(0.5, beta3=0.9, **SAFEGUARD),
    ),
    "dadapt_adamw": pair("dadapt_adamw", weight_decay=0.01),
    "dog": (sl.dog(init_step=1e-2), lambda: contrib.dog(init_step=("heuristic", 1e-2))),
    "dog, distance": (
        sl.dog(0.5, init_step=0.1, init_step_type="distance", weight_decay=0.1),
        lambda: contrib.dog(0.5, init_step=("distance", 0.1), weight_decay=0.1),
    ),
    "dog, learning_rate": (
        sl.dog(init_step=0.01, init_step_type="learning_rate"),
        lambda: contrib.dog(init_step=("learning_rate", 0.01)),
    ),
    "dowg": pair("dowg", weight_decay=0.1),
    "momo": pair("momo"),
    "momo, adapt_lower_bound": pair("momo", 0.5, **LOWER_BOUND),
    "momo_adam": pair("momo_adam", 0.1),
    "momo_adam, adapt_lower_bound": pair("momo_adam", 0.1, **LOWER_BOUND),
    "cocob": pair("cocob", weight_decay=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_thirty_steps_are_those_of_optax(name, x64):
    ours, theirs = PAIRS[name]
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), START)
    assert_close(run(ours, 30, start)[0], run_optax(theirs, 30, start), rtol=1e-9, atol=1e-12)


def by_hand(tx, grads, params):
    """The parameters and states after each step on given gradients."""
    opt = sl.Optimizer(tx, params)
    step = jax.jit(lambda params, opt, g: opt.step(params, g, value=jnp.float32(1.0)))
    for g in grads:
        params, opt = step(params, opt, g)
        yield params, opt


SAFE = sl.prodigy(safeguard_warmup=True, b3=0.5)
RATES = {"prodigy": sl.prodigy(), "dadapt_adamw": sl.contrib.dadapt_adamw(), "safeguard": SAFE}


@pytest.mark.parametrize("name", slow_except(RATES, "prodigy"))
def test_the_estimate_grows_to_the_distance_and_never_decreases(name):
    path, metrics, _ = run(RATES[name], 400, jnp.zeros(4), lambda p: jnp.sum(jnp.abs(p - 3.0)))
    d = np.asarray(metrics["estim_lr"])
    assert np.all(np.diff(d) >= 0)
    assert d[0] == np.float32(1e-6)
    # Each number has to go a distance of 3. Only Prodigy's estimate is a lower bound of it.
    assert 0.05 < d[-1] <= (6.0 if name == "dadapt_adamw" else 3.0)
    np.testing.assert_allclose(path[-1], 3.0, atol=0.5)


@pytest.mark.slow
def test_the_estimate_ignores_the_scale_of_the_loss_and_follows_resets():
    for tx in (sl.contrib.dadapt_adamw(eps=0.0), sl.prodigy(eps=0.0)):
        # A power of 2 changes no digit.
        small = run(tx, 30, loss=loss_fn)
        large = run(tx, 30, loss=lambda p: 2.0**20 * loss_fn(p))
        assert_close(small[:2], large[:2], rtol=0, atol=0)

    tx = sl.prodigy(estim_lr0=1e-2)
    grads = [jax.tree.map(lambda p: p - 5.0, START)] * 20
    (*_, (params, opt)) = by_hand(tx, grads, START)
    d = float(opt.metrics["estim_lr"])
    assert d > 2e-2
    part = opt.reset(params, sl.where.path("w"))
    assert float(part.metrics["estim_lr"]) == d
    np.testing.assert_array_equal(part.state.init_params["w"], params["w"])
    np.testing.assert_array_equal(part.state.init_params["b"], START["b"])
    stepped, _ = part.step(params, grads[0])
    # A fresh mean is corrected from its own start: a first step of d.
    np.testing.assert_allclose(stepped["w"] - params["w"], d, rtol=1e-3)
    assert float(opt.reset(params).metrics["estim_lr"]) == np.float32(1e-2)


def test_momo_and_momo_adam_reach_the_lower_bound_of_their_model():
    # Without momentum the model is the tangent, also where the decay shrinks some parameters.
    params = {"w": jnp.array([[1.0, -2.0]]), "b": jnp.array([0.5])}
    grads = {"w": jnp.array([[0.3, 0.4]]), "b": jnp.array([-1.0])}
    for make, where in ((sl.contrib.momo, matrices), (sl.contrib.momo_adam, None)):
        tx = make(10.0, b1=0.0, lower_bound=0.25, weight_decay=0.02, decay_where=where)
        stepped, opt = sl.Optimizer(tx, params).step(params, grads, value=2.0)
        change = jax.tree.map(jnp.subtract, stepped, params)
        np.testing.assert_allclose(2.0 + sl.tree.inner(grads, change), 0.25, rtol=1e-5)
        if make is sl.contrib.momo:
            # b does not decay: its step is along the gradient.
            size = float(opt.metrics["step_size"])
            assert 0 < size < 10.0
            np.testing.assert_allclose(change["b"], -size * grads["b"], rtol=1e-6)


def test_cocob_bets_as_the_paper_says(x64):
    g, p0 = np.array([[0.5, -2.0], [1.0, -1.0], [-3.0, 0.1]]), np.array([1.0, 2.0])
    w, theta, scale, size, reward = p0, 0.0, 1e-8, 0.0, 0.0
    steps = by_hand(sl.contrib.ScaleByCocob(10.0), list(jnp.asarray(g)), jnp.asarray(p0))
    for grad, (ours, _) in zip(g, steps, strict=True):
        scale = np.maximum(scale, np.abs(grad))
        size = size + np.abs(grad)
        reward = np.maximum(reward - grad * (w - p0), 0)
        theta = theta - grad
        w = p0 + theta / (scale * np.maximum(size + scale, 10.0 * scale)) * (scale + reward)
        np.testing.assert_allclose(ours, w, rtol=1e-12)


DESCENT = sl.ScaleByDistanceOverGradients(0.5) | sl.Scale(-1.0)


def test_the_first_step_is_as_long_as_the_start_says_and_leads_to_the_minimum():
    params = {"w": jnp.array([3.0, 4.0]), "b": jnp.array(0.0)}
    grads = {"w": jnp.array([0.6, 0.8]), "b": jnp.array(-7.0)}
    stepped, opt = sl.Optimizer(DESCENT, params).step(params, grads)
    np.testing.assert_allclose(stepped["w"], jnp.array([3.0, 4.0]) - 3 * grads["w"], rtol=1e-6)
    np.testing.assert_allclose(stepped["b"], 0.5, rtol=1e-6)
    # The second: 3 has been gone by w, and two gradients of norm 1 were seen.
    again, opt = opt.step(stepped, grads)
    np.testing.assert_allclose(stepped["w"] - again["w"], 3 / 2**0.5 * grads["w"], rtol=1e-6)
    np.testing.assert_allclose(opt.state[0].max_dist["w"], 3.0, rtol=1e-6)

    minimum, start = jnp.array([1.0, -1.0, 1.0]), jnp.array([-1.0, 10.0, 1.0])
    tx = sl.ScaleByDistanceOverGradients() | sl.Scale(-1.0)
    path, _, _ = run(tx, 2_000, start, lambda p: jnp.sum((p - minimum) ** 2))
    np.testing.assert_allclose(path[-1], minimum, atol=3e-2)

    tx = sl.dog(init_step=0.5, init_step_type="learning_rate")
    grads = [jnp.zeros(2), jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])]
    params = [p for p, _ in by_hand(tx, grads, jnp.zeros(2))]
    np.testing.assert_allclose(params[1], [-0.5, 0.0])
    np.testing.assert_allclose(params[2], [-0.5, -0.5 / 2**0.5], rtol=1e-6)


def test_distances_are_those_of_absolute_values_in_single_precision():
    params = {"w": jnp.array([3.0 + 4.0j], jnp.complex64)}
    tx = sl.ScaleByDistanceOverGradients(0.5)
    assert tx.signs(params) == (1,)
    assert sl.ScaleByDistanceOverGradients(global_scale=-1.0).signs(params) == (-1,)
    made, _ = tx.update({"w": jnp.array([2j], jnp.complex64)}, tx.init(params), params)
    np.testing.assert_allclose(made["w"], [3j], rtol=1e-6)

    # One step is less than half a unit in the last place: what was traveled must add up anyway.
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), START)
    for name, tx in (ALL | {"distance": DESCENT}).items():
        for path, x in jax.tree_util.tree_leaves_with_path(sl.Optimizer(tx, params).state):
            path = jax.tree_util.keystr(path)
            if ".mu" not in path and ".age" not in path:
                expected = jnp.bfloat16 if ".init_params" in path else jnp.float32
                assert x.dtype == expected, (name, path)
    wide = sl.ScaleByDistanceOverGradients(param_dtype="float32").init(params)
    assert wide.init_params["w"].dtype == jnp.float32


ALL = {
    "prodigy": sl.prodigy(estim_lr0=1e-2),
    "dadapt_adamw": sl.contrib.dadapt_adamw(estim_lr0=1e-2),
    "dog": sl.dog(init_step=1e-2),
    "dowg": sl.contrib.dowg(),
    "momo": sl.contrib.momo(0.1),
    "momo_adam": sl.contrib.momo_adam(),
    "cocob": sl.contrib.cocob(),
}


@pytest.mark.parametrize("name", slow_except(ALL, "momo"))
def test_huge_tiny_and_zero_gradients_leave_everything_finite(name):
    sizes = (0.0, 1e-30, 1e-20, 1.0, 1e20, 1e30, 0.0, 1.0)
    grads = [jax.tree.map(lambda p, s=s: s * jnp.sign(p + 0.1), START) for s in sizes]
    for params, opt in by_hand(ALL[name], grads, START):
        assert bool(sl.tree.all_finite(params))
        assert bool(sl.tree.all_finite([x for x in jax.tree.leaves(opt) if x.dtype == jnp.float32]))


@pytest.mark.slow
def test_each_group_has_an_estimate_that_follows_windows():
    grads = [jax.tree.map(lambda p, i=i: 0.1 * p + i, START) for i in range(3)]
    for tx in (ALL["prodigy"], ALL["dowg"]):
        (*_, (params, _)) = by_hand(tx.partition({matrices: tx}), grads, START)
        for k in ("w", "b"):
            (*_, (alone, _)) = by_hand(tx, [{k: g[k]} for g in grads], {k: START[k]})
            np.testing.assert_allclose(params[k], alone[k], rtol=1e-6)

    tx = sl.prodigy(estim_lr0=1e-2)
    start = jax.tree.map(lambda x: x.astype(jnp.bfloat16), START)
    grads = [jax.tree.map(lambda p, i=i: p * 0 + i, start) for i in (1.0, 3.0, 2.0, 2.0)]
    broken = jax.tree.map(lambda p: p * jnp.nan, start)
    (*_, (accumulated, opt)) = by_hand(tx.if_finite().every_k(2), [*grads, broken, broken], start)
    (*_, (plain, alone)) = by_hand(tx, [grads[2], grads[2]], start)
    assert_close(accumulated, plain, rtol=0)
    assert accumulated["w"].dtype == jnp.bfloat16
    estimate = opt.state_of(sl.ScaleByProdigy).estim_lr
    np.testing.assert_allclose(estimate, alone.metrics["estim_lr"], rtol=1e-6)


LEAN = {"prodigy": 0.01, "dog": 0.01, "momo": 0.01, "cocob": 0.01, "momo_adam": 1.1}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAN)
def test_scratch_is_at_most_that_of_optax(name):
    params = {f"layer{i}": jnp.full((256, 512), 0.1) for i in range(3)}
    opt = sl.Optimizer(ALL[name], params)
    step = jax.jit(lambda p, opt, g: opt.step(p, g, value=jnp.float32(1.0)), donate_argnums=(0, 1))
    memory = step.lower(params, opt, params).compile().memory_analysis()
    size = sum(p.nbytes for p in params.values())
    # Optax needs 2 copies of the parameters for MoMo-Adam and 1.4 for COCOB.
    assert memory.temp_size_in_bytes <= LEAN[name] * size


@pytest.mark.slow
def test_prodigy_and_mechanic_are_those_of_their_authors(x64):
    model = nested_dict(jax.random.key(0), jnp.float64)
    grads = gradients(model, 8)
    options = {"s_init": 1e-2, "num_betas": 3}
    ours, opt = slalom_trajectory(sl.adam(1.0).mechanize(**options), model, grads)
    mechanic = contrib.mechanize(optax.adam(1.0), **options)
    theirs, state = optax_trajectory(mechanic, model, grads)
    assert_same_path(ours, theirs, model, 1e-8)
    assert jnp.allclose(opt.state.scales, state.s, rtol=1e-8)

    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    prodigyopt = pytest.importorskip("prodigyopt", reason="compares with the authors' code")
    start = np.linspace(-1.0, 1.0, 6)
    theirs = torch.nn.Parameter(torch.tensor(start))
    options = {"lr": 0.7, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizer = prodigyopt.Prodigy([theirs], **options, d0=1e-3, d_coef=2.0)
    estimate = {"estim_lr0": 1e-3, "estim_lr_coef": 2.0}
    tx = sl.prodigy(0.7, b2=0.99, weight_decay=0.1, **estimate, bias_correction=False)
    ours, opt = jnp.asarray(start), sl.Optimizer(tx, jnp.asarray(start))
    step = jax.jit(lambda p, opt: opt.step(p, jnp.cos(p) + p))
    for _ in range(30):
        theirs.grad = torch.cos(theirs.detach()) + theirs.detach()
        optimizer.step()
        ours, opt = step(ours, opt)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-12)
    assert float(opt.metrics["estim_lr"]) > 1e-2


@pytest.mark.slow
def test_idle_mechanic_learns_nothing_and_its_scratch_is_small():
    model = nested_dict(jax.random.key(0))
    grads = gradients(model, 2)
    tx = sl.sgd(1.0).every_k(2).mechanize()
    history, opt = slalom_trajectory(tx, model, grads)
    assert_same_bits(jax.tree.map(lambda h: h[0], history), model)
    assert jnp.all(opt.state.variance == 0)  # nothing has moved yet when the first update is made

    # Rules that square their gradients included. In a sum, XLA keeps a broadcast in memory.
    params = {name: jnp.ones((128, 256)) for name in "abc"}
    memory = compiled_step(sl.adamw(1.0).mechanize(), params).memory_analysis()
    assert memory.temp_size_in_bytes <= 1.02 * params["a"].nbytes


def test_mechanic_learns_what_only_a_master_copy_can_hold():
    # The steps from s₀ = 1e-6 are far below half a unit in the last place of bfloat16.
    def learned(dtype, wrap):
        w = jnp.full(3, 0.75, dtype)

        def body(carry, _):
            w, opt = carry
            return opt.step(w, w), None

        tx = wrap(sl.sgd(1.0).mechanize())
        run = jax.jit(lambda *carry: jax.lax.scan(body, carry, None, 300)[0])
        w, opt = run(w, sl.Optimizer(tx, w))
        return opt.eval_params(w, full_precision=True)

    for dtype, wrap in ((jnp.float32, lambda x: x), (jnp.bfloat16, lambda x: x.write("master"))):
        assert jnp.max(jnp.abs(learned(dtype, wrap))) < 1e-3
