"""Gradients, norms and parameters of extreme sizes, and values that are not finite."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import known, sampled, slalom_trajectory, slow_except, unchecked
from table import BUT_RECIPES, rows

SECOND = {"ordinary": 0.5, "huge": 1e20, "nan": float("nan"), "infinite": float("inf")}
"""The first entry of the second of four gradients. All others are ordinary."""


def after_steps(tx):
    """Parameters and state after the steps, for each of `SECOND`, by one program.

    The loss does not use one of the parameters.
    """
    start = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "unused": jnp.ones((2, 2))}
    opt = sl.Optimizer(tx, start)

    def step(carry, entry):
        params, opt = carry
        # The zeros are a constant of the program, as where the loss does not use a parameter.
        grads = {"w": jnp.full((2, 3), 0.5).at[0, 0].set(entry), "unused": jnp.zeros((2, 2))}
        return opt.step(params, grads, **known(params, grads)), None

    @jax.jit
    def run(opt, entries):
        # Not under `jax.vmap`: there both branches of a `cond` run.
        return jax.lax.map(lambda row: jax.lax.scan(step, (start, opt), row)[0], entries)

    entries = jnp.full((len(SECOND), 4), 0.5).at[:, 1].set(jnp.array([*SECOND.values()]))
    params, opt = run(opt, entries)
    arrays = jax.device_get(eqx.filter((params, opt.state), eqx.is_inexact_array))
    return {name: jax.tree.map(lambda x, i=i: x[i], arrays) for i, name in enumerate(SECOND)}


@pytest.fixture(scope="session")
def ends(row):
    # It is set up before the fixture that turns the checks off.
    with unchecked():
        return after_steps(row.tx)


# The same rows each time: they share the program.
ROWS = rows(BUT_RECIPES, everyday=("ScaleByTrustRatio", "Mechanize"), ci=("ScaleBySoap",))


def not_finite(tree):
    """The paths of arrays that are not finite."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = [jax.tree_util.keystr(path) for path, x in leaves if not np.isfinite(x).all()]
    return [path for path in paths if not path.endswith(".radius")]  # infinite where there is none


@ROWS
def test_a_huge_gradient_does_no_lasting_harm_and_neither_do_parameters_without_any(ends):
    assert not_finite(ends["ordinary"]) == []
    assert not_finite(ends["huge"]) == []


@ROWS
def test_what_is_written_for_gpus_computes_the_same(row, ends, as_on):
    as_on("cuda")

    def check(path, x, y):
        size = np.max(np.abs(y), initial=0, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, 1e-4, 1e-5 * size, err_msg=str(path))

    jax.tree_util.tree_map_with_path(check, after_steps(row.tx), ends)


HIDDEN = {
    "no gradient counts": ("SetToZero(", "freeze(", "otherwise="),
    "this is its purpose": ("ZeroNans(", "if_finite(", "SkipNotFinite(", "scale_loss("),
    "spikes are skipped": ("skip_spikes(", "CheckFinite("),
    "it looks for a lower loss": ("Linesearch(",),
    "it follows the residuals": ("GaussNewton(", "LevenbergMarquardt("),
    "infinity has a sign": (
        *("Sign(", "Rprop(", "Lion(", "Clip(", "Sophia(", "Adopt("),
        "clip_radius=",
    ),
}
"""Why a gradient that is not finite may go unnoticed, and what does so."""


@ROWS
def test_a_gradient_that_is_not_finite_shows_in_the_parameters(row, ends):
    if any(name in repr(row.tx) for name in sum(HIDDEN.values(), ())):
        pytest.skip("one of the reasons that `HIDDEN` lists")
    for entry in ("nan", "infinite"):
        params, _ = ends[entry]
        assert not_finite(params) != [], entry


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [sl.ScaleBySoap(), sl.ScaleByShampoo(), sl.ScaleByKron(), sl.contrib.ScaleByDion()]
)
def test_a_matrix_rule_returns_nan_for_infinity_in_its_first_step(rule):
    params = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2)), jnp.float32)
    grads = params.at[0, 0].set(jnp.inf)
    update = jax.jit(lambda g, s: rule.update(g, s, params, sl.Context(step=0))[0])
    assert jnp.isnan(update(grads, rule.init(params))).any()


INDEPENDENT = {
    "Orthogonalize": sl.Orthogonalize() | sl.ScaleByLearningRate(0.1),
    "aol": sl.Orthogonalize(preconditioning="aol") | sl.ScaleByLearningRate(0.1),
    "bfloat16": sl.Orthogonalize(compute_dtype="bfloat16") | sl.ScaleByLearningRate(0.1),
    "muon": sl.muon(0.1),
    "scion": sl.scion(1e-3),
    "norm_muon": sl.norm_muon(0.1),
    "dion": sl.contrib.dion(0.1, 0.5),
    "splus": sl.contrib.ScaleBySplus(precondition_frequency=1) | sl.ScaleByLearningRate(0.1),
    "NormalizeColumns": sl.NormalizeColumns() | sl.ScaleByLearningRate(0.1),
}


@pytest.mark.parametrize("name", sampled(INDEPENDENT, "muon"))
def test_an_orthogonal_update_does_not_depend_on_the_size_of_the_gradient(name):
    random = np.random.default_rng(0)
    params = jnp.asarray(random.standard_normal((5, 3)), jnp.float32)
    grads = jnp.asarray(random.standard_normal((3, 5, 3)), jnp.float32)
    run = jax.jit(lambda grads: slalom_trajectory(INDEPENDENT[name], params, grads)[0])
    expected = run(grads)
    for power in (-100, -30, 30, 100):
        np.testing.assert_allclose(run(grads * 2.0**power), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_subnormal_inverses_and_the_paths_of_projections():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5)), jnp.float32)
    x = x / jnp.max(jnp.abs(x))
    expected, _ = sl.Orthogonalize().update(x, None)
    for size in (3.4e38, 2.0**127, 2.0**126, 2.0**-100):
        got, _ = jax.jit(sl.Orthogonalize().update)(x * jnp.float32(size), None)
        np.testing.assert_allclose(got, expected, rtol=1e-5)

    rule = sl.contrib.ScaleByApollo(rank=2)
    w = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6)), jnp.float32)
    alone, _ = rule.update({"w": w}, rule.init({"w": w}))
    both = {"added": w, "w": w}
    beside, _ = rule.update(both, rule.init(both))
    np.testing.assert_allclose(beside["w"], alone["w"], rtol=1e-5)
    assert not np.allclose(beside["added"], beside["w"], rtol=1e-2)


SIZES = [1e-36, 1e-30, 1e-22, 1e-16, 1.0, 1e15, 3e20, 1e36]


def around(size):
    return jnp.asarray([[3.0, -4.0], [0.0, 1.0]], jnp.float32) * jnp.float32(size)


@pytest.mark.slow
def test_norms_epsilons_and_fits_of_any_size():
    scale = jax.jit(lambda u, p: sl.ScaleByTrustRatio().update(u, None, p)[0])
    for size in SIZES:
        for of_params in (1e-15, 1.0, 4e20):
            u = around(size)
            wanted = np.asarray(u) / np.float32(size) * of_params
            out = scale(u, around(of_params))
            np.testing.assert_allclose(out, wanted, rtol=2e-6, err_msg=f"{size}, {of_params}")

    u = jnp.full(4, 3e38)
    for tx in (sl.NormalizeByUpdateNorm(), sl.ScaleByTrustRatio(), sl.ClipByGlobalNorm(1.0)):
        out, _ = tx.update(u, tx.init(u), jnp.ones(4))
        assert not bool(jnp.any(jnp.isfinite(out)))

    derivative = jax.jit(jax.grad(sl.tree.global_norm))
    for size in (1e-30, 1.0, 1e30):
        wanted = around(1.0) / np.sqrt(26)
        np.testing.assert_allclose(derivative(around(size)), wanted, rtol=1e-6, err_msg=f"{size}")

    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=2, eps=1e-300)
    zeros = {"vector": jnp.zeros(3), "matrix": jnp.zeros((4, 4))}
    updates, _ = jax.jit(tx.update)(zeros, tx.init(zeros))
    assert eqx.tree_equal(updates, zeros)

    def loss(x):
        return 1e-22 * jnp.sum((x - 1) ** 2)

    result = sl.minimize(loss, sl.sgd(1e21), jnp.zeros(3), max_steps=3, gtol=0.0)
    np.testing.assert_allclose(result.model, 1 - 0.8**3, rtol=1e-5)


@pytest.mark.parametrize("name", slow_except(["lamb", "lars", "fromage"], "lars"))
def test_large_parameters_take_a_finite_step(name):
    params = {"w": around(4e20), "b": jnp.zeros(2)}
    grads = {"w": around(1.0), "b": jnp.ones(2)}
    opt = sl.Optimizer(getattr(sl, name)(0.1), params)
    updates, _ = opt.update(params, grads)
    scale = np.linalg.norm(np.asarray(params["w"], np.float64))
    size = np.linalg.norm(np.asarray(updates["w"], np.float64))
    assert 1e-5 * scale < size < scale


HUGE = [(shape, bound) for shape in [(3,), (4, 4)] for bound in (None, 1.0)]


@pytest.mark.parametrize("platform", slow_except(("cpu", "cuda"), "cuda"))
@pytest.mark.parametrize("case", slow_except(HUGE, HUGE[-1]), ids=str)
def test_adafactor_recovers_from_a_huge_gradient(case, platform, as_on):
    as_on(platform)
    shape, clipping_threshold = case
    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=2, clipping_threshold=clipping_threshold)
    state, update = tx.init(jnp.ones(shape)), jax.jit(tx.update)
    for g in (1.0, 3e20, 1.0):
        updates, state = update(jnp.full(shape, g), state)
        assert bool(jnp.all(jnp.isfinite(updates) & (updates > 0)))
    later = jnp.full(shape, 1e17)
    after = jax.jit(lambda s: jax.lax.fori_loop(0, 200, lambda _, s: tx.update(later, s)[1], s))
    updates, _ = update(later, after(state))
    assert bool(jnp.all(updates > 1e-2))
    beside_zeros = jnp.zeros(shape).at[..., 0].set(1.0)
    _, state = update(beside_zeros, tx.init(beside_zeros))
    updates, _ = update(beside_zeros.at[0].multiply(3e20), state)
    assert bool(jnp.all((updates > 0) == (beside_zeros > 0)))
    assert clipping_threshold is None or abs(jnp.mean(updates**2) - 1) < 1e-5


LAYOUT = {sl.where.path("w"): "oi"}
NORMS = {
    "ClipByGlobalNorm": sl.ClipByGlobalNorm(0.7),
    "delayed": sl.ClipByGlobalNorm(0.7, delayed=True),
    "ClipByBlockRms": sl.ClipByBlockRms(0.7),
    "UnitwiseClip": sl.UnitwiseClip(0.7, layout=LAYOUT),
    "AdaptiveGradClip": sl.AdaptiveGradClip(0.1, layout=LAYOUT),
    "ZClip": sl.ZClip(0.5, warmup_steps=1, eps=0.0),
    "NormalizeByUpdateNorm": sl.NormalizeByUpdateNorm(eps=0.0),
    "ScaleByTrustRatio": sl.ScaleByTrustRatio(),
    "ScaleByPolyak": sl.ScaleByPolyak(),
    "PerExampleGlobalNormClip": sl.PerExampleGlobalNormClip(0.7, single_batch_element=True),
    "KeepInitialNorm": sl.KeepInitialNorm(),
    "graft": sl.Trace(0.9).graft(sl.ScaleByTrustRatio()),
    "sam": sl.Trace(0.9).sam(0.1),
    "skip_spikes": sl.Trace(0.9).skip_spikes(sigma=0.5, window=2, by="grad_norm"),
    "l2_ball": sl.Scale(1.0).project(sl.projections.l2_ball(0.7)),
    "l2_sphere": sl.Scale(1.0).project(sl.projections.l2_sphere(0.7)),
}
"""Transforms that compute a norm of what comes in."""


def updates_of_sizes(tx, dtype):
    """The updates for gradients of several sizes, which grow by 10 % in each of three steps."""
    random = np.random.default_rng(0)
    params = {"w": random.standard_normal((3, 4)), "b": random.standard_normal(4)}
    given = {name: random.standard_normal(p.shape) for name, p in params.items()}
    params, given = jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, given))

    @jax.jit
    def run(size):
        def step(opt, growth):
            grads = jax.tree.map(lambda g: g * (size * growth), given)
            known = {"value": size}
            if "grad_fn" in tx.needs:
                known["grad_fn"] = lambda p: jax.tree.map(lambda g, x: g + size * x, grads, p)
            updates, opt = opt.update(params, grads, **known)
            return opt, updates

        return jax.lax.scan(step, sl.Optimizer(tx, params), jnp.asarray([1.0, 1.1, 1.21], dtype))

    return [jax.device_get(run(jnp.asarray(size, dtype))[1]) for size in (1e-25, 1e-20, 1e20, 1e25)]


@pytest.mark.parametrize("name", slow_except(NORMS, "delayed", "AdaptiveGradClip", "skip_spikes"))
def test_norms_of_gradients_of_any_size_are_those_of_float64(name):
    found = updates_of_sizes(NORMS[name], jnp.float32)
    with jax.enable_x64(True):
        wanted = updates_of_sizes(NORMS[name], jnp.float64)
    for own, exact in zip(map(jax.tree.leaves, found), map(jax.tree.leaves, wanted), strict=True):
        for x, y in zip(own, exact, strict=True):
            # An update that constrains a parameter is a difference of two of its size.
            unit = 1 if NORMS[name].constrains else np.max(np.abs(y))
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6 * unit)


MEASURED = ("ClipByGlobalNorm", "ZClip", "NormalizeByUpdateNorm", "ScaleByTrustRatio")


@pytest.mark.parametrize("name", sampled([*MEASURED, "ScaleByPolyak"]))
def test_other_platforms_than_a_cpu_find_these_norms_without_a_conditional(name, as_on):
    tx = NORMS[name]
    on_cpu = updates_of_sizes(tx, jnp.float32)
    grads = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}

    def moved(size):
        scaled = grads | {"w": size * grads["w"]}
        updates, _ = sl.Optimizer(tx, grads).update(grads, scaled, value=jnp.ones(()))
        return jnp.sum(updates["w"]) + 2 * jnp.sum(updates["b"])

    sizes = np.array([0.3, 3e-21, 3e20])
    slopes = [jax.grad(moved)(size) for size in sizes.tolist()]

    def has_conditional():
        step = jax.make_jaxpr(lambda opt: opt.update(grads, grads, value=jnp.ones(())))
        return " cond[" in str(step(sl.Optimizer(tx, grads)))

    assert has_conditional()
    as_on("cuda")
    assert not has_conditional()
    for own, wanted in zip(updates_of_sizes(tx, jnp.float32), on_cpu, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), own, wanted)
    own = [jax.grad(moved)(size) for size in sizes.tolist()]
    # The size does not change a trust ratio, so its slope is rounding.
    unit, rounding = (sizes, 1e-5) if name == "ScaleByTrustRatio" else (1, 0)
    own, slopes = (np.asarray(x) * unit for x in (own, slopes))
    np.testing.assert_allclose(own, slopes, rtol=1e-5, atol=rounding)


@pytest.mark.parametrize("size", slow_except((1e-25, 1e-20, 1e20, 1e25), 1e-25))
def test_a_common_factor_changes_no_direction(size):
    random = np.random.default_rng(0)
    x, a = ({"w": jnp.asarray(random.standard_normal((2, 3)), jnp.float32)} for _ in range(2))
    large = jax.tree.map(lambda y: y * jnp.float32(size), a)
    b = np.float32(0.3)
    for of in (
        lambda a, _: sl.projections.vector(a),
        lambda a, b: sl.projections.hyperplane(a, b),
        lambda a, b: sl.projections.halfspace(a, b),
    ):
        found, wanted = of(large, b * np.float32(size))(x), of(a, b)(x)
        np.testing.assert_allclose(found["w"], wanted["w"], rtol=1e-5, atol=1e-6)

    @sl.train_step
    def step(model, size):
        return {"a": size * jnp.sum(model["w"] * a["w"]), "b": size * jnp.sum(jnp.cos(model["w"]))}

    for combination in (sl.combine.UPGrad(), sl.combine.PCGrad(), sl.combine.MGDA()):
        tx = sl.sgd(0.0).combine(combination, ("a", "b"))
        metrics = [step(x, sl.Optimizer(tx, x), jnp.float32(s))[1].metrics for s in (size, 1.0)]
        for name in ("weights.a", "weights.b", "cosines.a.b"):
            np.testing.assert_allclose(metrics[0][name], metrics[1][name], rtol=1e-4, atol=1e-5)
