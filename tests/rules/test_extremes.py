"""Numbers at the ends of the range, through all rules and wrappers: zeros, huge numbers, NaN, ∞."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import known, sampled, slalom_trajectory, unchecked
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
ROWS = rows(0, BUT_RECIPES, everyday=("ScaleByTrustRatio", "Mechanize"), ci=("ScaleBySoap",))


def not_finite(tree):
    """The paths of arrays that are not finite."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = [jax.tree_util.keystr(path) for path, x in leaves if not np.isfinite(x).all()]
    return [path for path in paths if not path.endswith(".radius")]  # infinite where there is none


@ROWS
def test_parameters_that_the_loss_does_not_use_stay_finite(ends):
    assert not_finite(ends["ordinary"]) == []


@ROWS
def test_one_huge_gradient_does_no_lasting_harm(ends):
    assert not_finite(ends["huge"]) == []


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
    "dion": sl.contrib.dion(0.1, 1.0),
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
def test_numbers_whose_inverse_is_subnormal_are_orthogonalized():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5)), jnp.float32)
    x = x / jnp.max(jnp.abs(x))
    expected, _ = sl.Orthogonalize().update(x, None)
    for size in (3.4e38, 2.0**127, 2.0**126, 2.0**-100):
        got, _ = jax.jit(sl.Orthogonalize().update)(x * jnp.float32(size), None)
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.slow
def test_the_projection_of_apollo_belongs_to_the_path_of_a_parameter():
    rule = sl.contrib.ScaleByApollo(rank=2)
    w = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6)), jnp.float32)
    alone, _ = rule.update({"w": w}, rule.init({"w": w}))
    both = {"added": w, "w": w}
    beside, _ = rule.update(both, rule.init(both))
    np.testing.assert_allclose(beside["w"], alone["w"], rtol=1e-5)
    assert not np.allclose(beside["added"], beside["w"], rtol=1e-2)
