"""Factors for some parameters, as given or as they follow from a model's layers and shapes."""

import functools
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import after_training
from refusals.messages import refused
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


def test_the_first_case_that_matches_counts_and_bad_factors_are_refused():
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

    with pytest.raises(ValueError, match=r"sl.where.path\('tail.\*\*'\) matches no parameter"):
        sl.Optimizer(sl.sgd(0.1) | sl.ScaleBy({sl.where.path("tail.**"): 0.1}), PARAMS)
    culprit = r"^The factor of sl.where.path\('layers.0.\*\*'\) in ScaleBy must be a real number, "
    rest = r"a 0-d array or a schedule, got True of type bool.$"
    with pytest.raises(TypeError, match=culprit + rest):
        sl.ScaleBy({layer[0]: True})
    message = r"^A string is not a selector, got 'head'. Write `sl.where.path\('head'\)`.$"
    with pytest.raises(TypeError, match=message):
        sl.ScaleBy({"head": 0.1})


def test_every_factor_is_a_live_hyperparameter():
    update = jax.jit(lambda opt: opt.update(PARAMS, GRADS))
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
    assert update._cache_size() == 1


class Encoder(eqx.Module):
    position: jax.Array
    tokens: eqx.nn.Embedding
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    __layout__: ClassVar = {"position": "so"}

    def __init__(self, width=4):
        key = jax.random.key(0)
        self.position = jnp.ones((5, width))
        self.tokens = eqx.nn.Embedding(7, width, key=key)
        self.blocks = [eqx.nn.MLP(width, width, 4 * width, 1, key=key) for _ in range(3)]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 3, key=key)


class Pair(eqx.Module):
    head: eqx.nn.Linear
    first: Encoder
    bridge: eqx.nn.Linear
    second: Encoder

    def __init__(self):
        key = jax.random.key(0)
        self.head = self.bridge = eqx.nn.Linear(4, 4, key=key)
        self.first = self.second = Encoder()


def is_parameter(x):
    return isinstance(x, jax.ShapeDtypeStruct) or eqx.is_inexact_array(x)


def by_path(model, factors):
    """The factor of each parameter, as an optimizer applies it."""
    # One shape for all, so that it is one program. Factors are selected by paths.
    ones = jax.tree.map(lambda x: jnp.ones(()) if is_parameter(x) else None, model)
    scaled = jax.tree_util.tree_leaves_with_path(sl.ScaleBy(factors).update(ones, None, ones)[0])
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {keystr(path): float(x) for path, x in scaled}


@pytest.mark.slow
def test_rates_decay_with_the_depth_and_grow_with_the_outputs():
    model = Encoder()
    factors = sl.contrib.layerwise_decay(model, 0.5)
    found = by_path(model, factors)
    assert found["position"] == found["tokens.weight"] == 0.5**4
    assert [found[f"blocks.{i}.layers.1.bias"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert found["blocks.0.layers.0.weight"] == 0.125
    assert found["norm.weight"] == found["head.bias"] == 1.0
    assert eval(repr(factors), {"sl": sl}) == factors
    assert list(factors.values()) == [0.0625, 0.125, 0.25, 0.5]
    table = sl.Optimizer(sl.adam(0.1) | sl.ScaleBy(factors), model).describe(model).to_dict()
    assert table["blocks.1.layers.0.weight"]["transform"].endswith("scale_by.2")
    # Shapes are enough.
    assert sl.contrib.layerwise_decay(eqx.filter_eval_shape(Encoder), 0.5) == factors

    wide, base = (eqx.filter_eval_shape(Encoder, width) for width in (16, 4))
    found = by_path(wide, sl.contrib.mup(wide, base, rule="sgd"))
    grown = ("position", "tokens.weight", "blocks.0.layers.1.bias", "norm.weight")
    assert [found[path] for path in grown] == [4.0] * 4
    assert found["blocks.1.layers.0.weight"] == 1.0
    assert (found["head.weight"], found["head.bias"]) == (0.25, 1.0)
    wide, base = (eqx.nn.Conv2d(n, 2 * n, 3, key=jax.random.key(0)) for n in (6, 2))
    assert by_path(wide, sl.contrib.mup(wide, base))["weight"] == pytest.approx(1 / 3)


def test_layers_are_found_in_lists_of_models_and_trees_or_by_name():
    pair = eqx.filter_eval_shape(Pair)
    found = by_path(pair, sl.contrib.layerwise_decay(pair, 0.5))
    # tokens and what stands first | 3 blocks | norm, head, bridge, position | 3 blocks | the last
    assert found["second.head.weight"] == 1.0
    assert [found[f"second.blocks.{i}.layers.0.bias"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert found["bridge.weight"] == found["first.head.bias"] == 0.5**4
    assert [found[f"first.blocks.{i}.layers.0.bias"] for i in range(3)] == [2**-7, 2**-6, 2**-5]
    first = ("head.weight", "first.position", "first.tokens.weight", "second.tokens.weight")
    assert {found[path] for path in first} == {2**-8}

    params = [{"w": jnp.ones(2)}, {"w": jnp.ones(2), "inner": [jnp.ones(2)] * 2}, jnp.ones(2)]
    assert by_path(params, sl.contrib.layerwise_decay(params, 0.1)) == pytest.approx(
        {"0.w": 0.01, "1.inner.0": 0.1, "1.inner.1": 0.1, "1.w": 0.1, "2": 1.0}
    )

    params = {"embed": jnp.ones(2), "top": jnp.ones(2), "mid": jnp.ones(2), "other": jnp.ones(1)}
    names = [sl.where.path(name) for name in ("embed", "mid", "top")]
    assert sl.contrib.layerwise_decay(params, 0.5, layers=names) == {names[0]: 0.25, names[1]: 0.5}


def test_bad_input_is_refused_in_words():
    encoder = eqx.filter_eval_shape(Encoder)
    named = "`layers=[sl.where.path('embedding.**'), ...]`"
    with refused(ValueError, "layerwise_decay found no list of layers in this model", named):
        sl.contrib.layerwise_decay(eqx.nn.Linear(2, 2, key=jax.random.key(0)), 0.5)
    w = {"w": jnp.ones(2)}
    before = "layerwise_decay cannot tell whether 'head' is before or after the layers"
    with refused(ValueError, before, f"Pass a selector … {named}"):
        sl.contrib.layerwise_decay({"head": jnp.ones(2), "layers": [jnp.ones(2)] * 2}, 0.5)
    with refused(ValueError, "layerwise_decay got no layers", "Pass a selector … `layers=[...]`"):
        sl.contrib.layerwise_decay(w, 0.5, layers=[])
    v = sl.where.path("v")
    with refused(ValueError, "sl.where.path('v') in layerwise_decay", "matches no parameter"):
        sl.contrib.layerwise_decay(w, 0.5, layers=[v])
    with refused(ValueError, "The decay of layerwise_decay", "must be in (0, 1], got 1.5"):
        sl.contrib.layerwise_decay(encoder, 1.5)
    rules = "must be one of 'adam', 'sgd', 'muon', 'soap', 'kron', 'shampoo', or such a rule, got "
    with refused(ValueError, "The rule of mup", f"{rules}'lion'"):
        sl.contrib.mup(encoder, encoder, rule="lion")
    with refused(ValueError, "The rule of mup", f"{rules}sl.ScaleByTrustRatio()"):
        sl.contrib.mup(encoder, encoder, rule=sl.ScaleByTrustRatio())
    large = "transfer does not know how large the updates of 'scale_by_trust_ratio' are"
    remedy = "Write the factors … `sl.ScaleBy(sl.contrib.mup(model, base, rule=...))`"
    with refused(ValueError, large, remedy):
        sl.contrib.transfer(sl.lamb(0.1), encoder, encoder)
    same = "mup needs two models with the same layers"
    with refused(ValueError, "'1' is only in the model", same):
        sl.contrib.mup([jnp.ones(2)] * 2, [jnp.ones(2)])
    remedy = "Pass its layout: `layout={sl.where.path('w'): \"...\"}`"
    with refused(ValueError, "mup does not know which axes of 'w' are outputs", remedy):
        sl.contrib.mup({"w": jnp.ones((2,) * 6)}, {"w": jnp.ones((1,) * 6)})


def test_adam_divides_the_rate_by_the_growth_of_the_inputs_and_reports_guesses():
    wide, base = (eqx.filter_eval_shape(Encoder, width) for width in (16, 4))
    factors = sl.contrib.mup(wide, base)
    # Equal layers share a glob.
    assert repr(factors) == (
        "{sl.where.path('blocks.*.layers.*.weight') | sl.where.path('head.weight'): 0.25}"
    )
    found = by_path(wide, factors)
    hidden = {f"blocks.{i}.layers.{j}.weight" for i in range(3) for j in range(2)}
    assert {path for path in found if found[path] == 0.25} == hidden | {"head.weight"}
    assert {*found.values()} == {0.25, 1.0}
    assert sl.contrib.mup(base, base) == {}

    wide, base = Own(jnp.ones((8, 3))), Own(jnp.ones((4, 3)))
    with pytest.warns(UserWarning, match=r"mup does not know how Own stores 'w', and assumes"):
        assert list(sl.contrib.mup(wide, base).values()) == [0.5]
    told = {sl.where.path("w"): "oi"}
    assert sl.contrib.mup(wide, base, layout=told) == {}


class Own(eqx.Module):
    w: jax.Array


# What a layer changes by in a few steps at 8 times the width, over what it changes by at the width
# of the base: at most this much more or less with factors, and at least that much more without.
COORDINATES = {
    "adam": (sl.adam(1e-2), 1.5, 5.0),
    "muon": (sl.muon(0.02, scale="match_rms_adamw"), 1.5, 2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COORDINATES)
def test_the_size_of_a_step_does_not_depend_on_the_width(name):
    tx, at_most, without = COORDINATES[name]
    x = jax.random.normal(jax.random.key(2), (64, 8))

    def make(width):
        model = eqx.nn.MLP(8, 4, width, depth=2, key=jax.random.key(1))
        # μP starts the last layer at zero.
        return eqx.tree_at(lambda m: m.layers[-1].weight, model, replace_fn=jnp.zeros_like)

    @sl.train_step
    def step(model):
        return jnp.mean((jax.vmap(model)(x) - jnp.sin(2 * x[:, :4])) ** 2)

    def coordinates(model):
        found, h = [], x
        for layer in model.layers:
            found.append(jax.vmap(layer)(h))
            h = jax.nn.relu(found[-1])
        return found

    def changes(tx, width):
        start = make(width)
        model, _, _ = after_training(step, tx, 3, start)
        pairs = zip(coordinates(model), coordinates(start), strict=True)
        return np.array([float(sl.tree.rms(a - b)) for a, b in pairs])

    base = eqx.filter_eval_shape(make, 32)
    narrow = changes(tx, 32)
    growth = changes(sl.contrib.transfer(tx, make(256), base), 256) / narrow
    assert np.max(np.maximum(growth, 1 / growth)) < at_most, growth
    assert np.max(changes(tx, 256) / narrow) > without


# The factors of a hidden matrix, of one whose inputs do not grow, and of the last layer, at 4 times
# the width: the equations of Qiu et al., 2025.
GROWTH = {
    (1, 4, 1 / 4): ("sgd",),
    (1, 2, 1 / 2): ("muon", "soap", "kron", "shampoo", sl.contrib.ScaleByKlSoap()),
    (1, 1, 1): (sl.Orthogonalize(scale="spectral"), sl.contrib.ScaleByDion()),
    (1, 1, 1 / 2): (sl.Orthogonalize(),),
    (1 / 2, 1, 1 / 4): (sl.Orthogonalize(scale="match_rms_adamw"),),
    (1 / 4, 1, 1 / 4): (
        *("adam", sl.ScaleByShampoo(block_size=16), sl.ScaleBySoap(max_size=1)),
        sl.ScaleBySoap().graft(sl.ScaleByAdam()),
    ),
}


def make(width):
    return eqx.nn.MLP(2, 1, width, depth=2, key=jax.random.key(1))


@pytest.mark.slow
def test_transfer_puts_the_factors_of_each_rule_behind_it_and_reads_its_arrays():
    wide, base = (eqx.filter_eval_shape(make, width) for width in (64, 16))
    for wanted, rules in GROWTH.items():
        for rule in rules:
            found = by_path(wide, sl.contrib.mup(wide, base, rule=rule))
            assert [found[f"layers.{i}.weight"] for i in (1, 0, 2)] == pytest.approx(wanted), rule
            assert found["layers.1.bias"] == (4 if rule == "sgd" else 1)

    small, large = ({"v": jnp.ones((n, 3)), "w": jnp.ones((n, n))} for n in (8, 32))
    for name, (tx, wanted) in PLACED.items():
        found = sl.contrib.transfer(tx, large, base=small)
        assert type(found) is type(tx)
        chain = getattr(found, "inner", found)
        assert " ".join(type(link).__name__ for link in chain) == wanted, name

    wide, base = make(16), eqx.filter_eval_shape(make, 4)
    soap = sl.soap(3e-3, adam_weight_decay=0.1)
    opt = sl.Optimizer(sl.contrib.transfer(soap, wide, base=base), wide)
    groups = {name: value for name, value in opt.hyperparams.items() if "step_size" in name}
    assert [float(x) for x in groups.values()] == [2.0, 0.5]
    assert sl.contrib.transfer(sl.adam(0.1), base, base) == sl.adam(0.1)

    models = [{"w": jnp.ones((n, 3))} for n in (32, 8)]
    # The inputs do not grow, which a guess would take the first axis for.
    for rule, wanted in (
        (sl.ScaleBySoap(layout="oi"), 2),
        (sl.ScaleByShampoo(layout="oi").graft(sl.ScaleByAdam()), 1),
        (sl.ScaleByAdam(), 1),
    ):
        tx = sl.contrib.transfer(rule | RATE, *models, layout={sl.where.path("w"): "oi"})
        factors = [link for link in tx if isinstance(link, sl.ScaleBy)]
        ones = jax.tree.map(jnp.ones_like, models[0])
        made, _ = (factors[0] if factors else sl.Identity()).update(ones, None, ones)
        np.testing.assert_allclose(made["w"], wanted)


RATE = sl.ScaleByLearningRate(0.1)
PLACED = {
    "adamw": (sl.adamw(0.1), "ScaleByAdam ScaleBy AddDecayedWeights ScaleByLearningRate"),
    "sgd": (sl.sgd(0.1, momentum=0.9), "Trace ScaleBy ScaleByLearningRate"),
    "muon": (
        sl.Trace(0.9) | sl.Orthogonalize("standard", 5, None) | sl.ScaleByRowRms() | RATE,
        "Trace Orthogonalize ScaleBy ScaleByRowRms ScaleByLearningRate",
    ),
    "shampoo": (
        sl.ScaleByShampoo().graft(sl.ScaleByRms()) | sl.Ema(0.9) | RATE,
        "Graft ScaleBy Ema ScaleByLearningRate",
    ),
    "inside": (
        (sl.ClipByGlobalNorm(1.0) | sl.adam(0.1)).every_k(2),
        "ClipByGlobalNorm ScaleByAdam ScaleBy ScaleByLearningRate",
    ),
    "outer": (sl.adam(0.1).outer(sl.sgd(0.7), 5), "ScaleByAdam ScaleBy ScaleByLearningRate"),
}
