"""Factors for `sl.ScaleBy` that follow from a model's layers and shapes."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from slalom.tree.paths import leaf_paths


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


def by_path(model, factors):
    """The factor of each parameter, as an optimizer applies it."""
    params = eqx.filter(model, eqx.is_inexact_array)
    ones = jax.tree.map(jnp.ones_like, params)
    scaled, _ = sl.ScaleBy(factors).update(ones, None, params)
    firsts = [float(x.ravel()[0]) for x in jax.tree.leaves(scaled)]
    return dict(zip(leaf_paths(params), firsts, strict=True))


@pytest.mark.slow
def test_the_rate_decays_from_the_head_to_the_embeddings():
    found = by_path(Encoder(), sl.layerwise_decay(Encoder(), 0.5))
    assert found["position"] == found["tokens.weight"] == 0.5**4
    assert [found[f"blocks.{i}.layers.1.bias"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert found["blocks.0.layers.0.weight"] == 0.125
    assert found["norm.weight"] == found["head.bias"] == 1.0


@pytest.mark.slow
def test_the_factors_are_plain_code_and_train():
    model = Encoder()
    factors = sl.layerwise_decay(model, 0.5)
    assert eval(repr(factors), {"sl": sl}) == factors
    assert list(factors.values()) == [0.0625, 0.125, 0.25, 0.5]
    opt = sl.Optimizer(sl.adam(0.1) | sl.ScaleBy(factors), model)
    table = opt.describe(model).to_dict()
    assert table["blocks.1.layers.0.weight"]["transform"].endswith("scale_by.2")
    # Shapes are enough.
    assert sl.layerwise_decay(eqx.filter_eval_shape(Encoder), 0.5) == factors


def test_what_stands_between_two_lists_is_a_layer_and_embeddings_come_first():
    found = by_path(Pair(), sl.layerwise_decay(Pair(), 0.5))
    # tokens and what stands first | 3 blocks | norm, head, bridge, position | 3 blocks | the last
    assert found["second.head.weight"] == 1.0
    assert [found[f"second.blocks.{i}.layers.0.bias"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert found["bridge.weight"] == found["first.head.bias"] == 0.5**4
    assert [found[f"first.blocks.{i}.layers.0.bias"] for i in range(3)] == [2**-7, 2**-6, 2**-5]
    first = ("head.weight", "first.position", "first.tokens.weight", "second.tokens.weight")
    assert {found[path] for path in first} == {2**-8}


def test_a_list_of_layers_is_found_in_plain_trees_too():
    params = [{"w": jnp.ones(2)}, {"w": jnp.ones(2), "inner": [jnp.ones(2)] * 2}, jnp.ones(2)]
    assert by_path(params, sl.layerwise_decay(params, 0.1)) == pytest.approx(
        {"0.w": 0.01, "1.inner.0": 0.1, "1.inner.1": 0.1, "1.w": 0.1, "2": 1.0}
    )


def test_layers_may_be_named():
    params = {"embed": jnp.ones(2), "top": jnp.ones(2), "mid": jnp.ones(2), "other": jnp.ones(1)}
    names = [sl.where.path(name) for name in ("embed", "mid", "top")]
    assert sl.layerwise_decay(params, 0.5, layers=names) == {names[0]: 0.25, names[1]: 0.5}


BAD_LAYERS = {
    "no list": (
        lambda: sl.layerwise_decay(eqx.nn.Linear(2, 2, key=jax.random.key(0)), 0.5),
        r"^layerwise_decay found no list of layers in this model. Pass a selector for each layer, "
        r"first to last: `layers=\[sl.where.path\('embedding.\*\*'\), ...\]`.$",
    ),
    "a dict": (
        lambda: sl.layerwise_decay({"head": jnp.ones(2), "layers": [jnp.ones(2)] * 2}, 0.5),
        r"^layerwise_decay cannot tell whether 'head' is before or after the layers, since a dict "
        r"has no order. Pass a selector",
    ),
    "no layers": (
        lambda: sl.layerwise_decay({"w": jnp.ones(2)}, 0.5, layers=[]),
        r"^layerwise_decay got no layers. Pass a selector for each: `layers=\[...\]`.$",
    ),
    "no match": (
        lambda: sl.layerwise_decay({"w": jnp.ones(2)}, 0.5, layers=[sl.where.path("v")]),
        r"^sl.where.path\('v'\) in layerwise_decay matches no parameter.$",
    ),
    "decay": (
        lambda: sl.layerwise_decay(Encoder(), 1.5),
        r"^The decay of layerwise_decay must be in \(0, 1\], got 1.5.$",
    ),
    "rule": (
        lambda: sl.mup(Encoder(), Encoder(), rule="lion"),
        r"^The rule of mup must be 'adam' or 'sgd', got 'lion'.$",
    ),
    "other layers": (
        lambda: sl.mup([jnp.ones(2)] * 2, [jnp.ones(2)]),
        r"^mup needs two models with the same layers, but '1' is only in the model.$",
    ),
    "unknown": (
        lambda: sl.mup({"w": jnp.ones((2,) * 6)}, {"w": jnp.ones((1,) * 6)}),
        r"^mup does not know which axes of 'w' are outputs and which are inputs. Pass its layout: "
        r"`layout=\{sl.where.path\('w'\): \"...\"\}`.$",
    ),
}


@pytest.mark.parametrize("name", BAD_LAYERS)
def test_bad_input_is_refused_in_words(name):
    bad, message = BAD_LAYERS[name]
    with pytest.raises(ValueError, match=message):
        bad()


# --- μP -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adam_divides_the_rate_by_the_growth_of_the_inputs():
    wide, base = Encoder(16), eqx.filter_eval_shape(Encoder, 4)
    found = by_path(wide, sl.mup(wide, base))
    matrices = [path for path in found if path.endswith("weight") and "norm" not in path]
    hidden = [path for path in matrices if path.startswith("blocks")]
    assert len(hidden) == 6
    assert {found[path] for path in [*hidden, "head.weight"]} == {0.25}
    others = set(found) - set(hidden) - {"head.weight"}
    assert {found[path] for path in others} == {1.0}


@pytest.mark.slow
def test_sgd_multiplies_it_by_the_growth_of_the_outputs():
    wide, base = Encoder(16), Encoder(4)
    found = by_path(wide, sl.mup(wide, base, rule="sgd"))
    grown = ("position", "tokens.weight", "blocks.0.layers.1.bias", "norm.weight")
    assert [found[path] for path in grown] == [4.0] * 4
    assert found["blocks.1.layers.0.weight"] == 1.0
    assert (found["head.weight"], found["head.bias"]) == (0.25, 1.0)


def test_equal_layers_share_a_glob():
    factors = sl.mup(Encoder(16), Encoder(4))
    assert repr(factors) == (
        "{sl.where.path('blocks.*.layers.*.weight') | sl.where.path('head.weight'): 0.25}"
    )
    assert sl.mup(Encoder(4), Encoder(4)) == {}


@pytest.mark.slow
def test_a_convolution_counts_its_channels():
    def make(width):
        return eqx.nn.Conv2d(width, 2 * width, 3, key=jax.random.key(0))

    assert by_path(make(6), sl.mup(make(6), make(2)))["weight"] == pytest.approx(1 / 3)


class Own(eqx.Module):
    w: jax.Array


def test_a_guessed_layout_is_reported_where_it_matters():
    wide, base = Own(jnp.ones((8, 3))), Own(jnp.ones((4, 3)))
    with pytest.warns(UserWarning, match=r"mup does not know how Own stores 'w', and assumes"):
        assert list(sl.mup(wide, base).values()) == [0.5]
    told = {sl.where.path("w"): "oi"}
    assert sl.mup(wide, base, layout=told) == {}


@pytest.mark.slow
def test_the_size_of_a_step_does_not_depend_on_the_width():
    # What the activations change by in one step of Adam, with and without the factors.
    def change(width, factors):
        model = eqx.nn.MLP(4, 1, width, depth=2, key=jax.random.key(1))
        # μP starts the last layer at zero.
        model = eqx.tree_at(lambda m: m.layers[-1].weight, model, replace_fn=jnp.zeros_like)
        x = jax.random.normal(jax.random.key(2), (16, 4))

        def loss(m):
            return jnp.mean((jax.vmap(m)(x) - 1.0) ** 2)

        tx = sl.adam(1e-2)
        tx = tx | sl.ScaleBy(factors(model)) if factors else tx
        trained, opt = model, sl.Optimizer(tx, model)
        for _ in range(3):
            trained, opt = opt.step(trained, eqx.filter_grad(loss)(trained))
        return float(jnp.sqrt(jnp.mean((jax.vmap(trained)(x) - jax.vmap(model)(x)) ** 2)))

    def factors(model):
        base = eqx.filter_eval_shape(eqx.nn.MLP, 4, 1, 32, depth=2, key=jax.random.key(0))
        return sl.mup(model, base)

    narrow, wide = change(32, factors), change(512, factors)
    np.testing.assert_allclose(wide, narrow, rtol=0.5)
    assert change(512, None) > 4 * narrow
