"""Factors for some parameters: first match, live, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from table import halving

PARAMS = {
    "layers": [{"w": jnp.ones((2, 2)), "b": jnp.ones(2)} for _ in range(3)],
    "head": jnp.ones(2, jnp.bfloat16),
}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
layer = [sl.where.path(f"layers.{i}.**") for i in range(3)]


def moved(updates):
    """The first number of each leaf."""
    layers = enumerate(updates["layers"])
    made = {f"{i}.{k}": float(x.ravel()[0]) for i, leaves in layers for k, x in leaves.items()}
    return made | {"head": float(updates["head"][0])}


def test_the_first_case_that_matches_counts_and_the_rest_stays():
    tx = sl.sgd(1.0) | sl.ScaleBy({layer[0]: 0.25, sl.where.path("layers.*.w"): 0.5})
    assert eval(repr(tx), {"sl": sl}) == tx
    opt = sl.Optimizer(tx, PARAMS)
    updates, _ = opt.update(PARAMS, GRADS)
    expected = {"0.w": 0.25, "0.b": 0.25, "1.w": 0.5, "1.b": 1.0, "2.w": 0.5, "2.b": 1.0}
    assert moved(updates) == {name: -x for name, x in {**expected, "head": 1.0}.items()}
    assert updates["head"].dtype == jnp.bfloat16
    # A factor is named where the parameter is described.
    table = opt.describe(PARAMS).to_dict()
    assert table["layers.0.w"]["transform"].endswith("scale_by.0")
    assert table["layers.1.b"]["transform"] == "scale_by_learning_rate"


def test_every_factor_is_a_live_hyperparameter():
    traced = 0

    @jax.jit
    def update(opt):
        nonlocal traced
        traced += 1
        return opt.update(PARAMS, GRADS)

    tx = sl.sgd(1.0) | sl.ScaleBy({layer[0]: 0.5, layer[1]: halving, layer[2]: jnp.float32(2.0)})
    opt = sl.Optimizer(tx, PARAMS)
    _, opt = update(opt)
    values = {name: round(float(x), 3) for name, x in opt.hyperparams.items()}
    assert values == {
        "scale_by_learning_rate.learning_rate": 1.0,
        "scale_by.0.step_size": 0.5,
        "scale_by.1.step_size": 0.95,
        "scale_by.2.step_size": 2.0,
    }
    opt = opt.with_hyperparams({"0.step_size": 0.125, "scale_by.1.step_size.init_value": 3.0})
    updates, _ = update(opt)
    np.testing.assert_allclose(moved(updates)["0.w"], -0.125)
    np.testing.assert_allclose(moved(updates)["1.w"], -2.75)
    assert traced == 1


def test_bad_input_is_refused_in_words():
    with pytest.raises(ValueError, match=r"sl.where.path\('tail.\*\*'\) matches no parameter"):
        sl.Optimizer(sl.sgd(0.1) | sl.ScaleBy({sl.where.path("tail.**"): 0.1}), PARAMS)
    culprit = r"^The factor of sl.where.path\('layers.0.\*\*'\) in ScaleBy must be a real number, "
    rest = r"a 0-d array or a schedule, got True of type bool.$"
    with pytest.raises(TypeError, match=culprit + rest):
        sl.ScaleBy({layer[0]: True})
    message = r"^A string is not a selector, got 'head'. Write `sl.where.path\('head'\)`.$"
    with pytest.raises(TypeError, match=message):
        sl.ScaleBy({"head": 0.1})
