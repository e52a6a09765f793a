"""A stack of layers is trained as each of its layers would be, by recipes for which that holds.

Blocks of an axis are such a stack, for rules that tell them apart.
"""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import known, sampled, transforms_in
from slalom.where.layout import as_layout
from table import EVERYTHING, RECIPES, WITH_GRADIENT, rows

OF_A_LEAF = {
    *("novograd", "novograd, decay_where", "lamb", "lars", "fromage", "mars", "stable_adamw"),
    *("adafactor", "adafactor, momentum", "sm3"),
}
"""Their docstrings speak of the norm, the root mean square or the axes of one leaf."""

OF_ALL = {"lbfgs", "ss_broyden", "polyak_sgd", "dog", "dowg", "momo", "momo_adam"}
"""One number for all parameters together."""

GROWS_LATER = {"prodigy", "dadapt_adamw"}
"""The number for all parameters stays as it is in the first steps."""

DRAWN = {"noisy_sgd", "apollo", "ivon", "dion", "kron"}
"""Random numbers, which are other ones for another shape."""

NAMES = [
    name
    for name, tx in RECIPES.items()
    if name in WITH_GRADIENT
    and name not in GROWS_LATER
    and not all(part.elementwise for part in transforms_in(tx))
]


def apart(tx):
    """How far a stack is from its layers after three steps, relative to the way that they went."""
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 5, use_bias=False, key=key))(
        jax.random.split(jax.random.key(0))
    )
    drawn = np.random.default_rng(0).standard_normal((3, *layers.weight.shape))
    grads = jnp.asarray(drawn * np.array([10, 0.1])[:, None, None], jnp.float32)

    def run(layers, grads):
        opt = sl.Optimizer(tx, layers)
        for g in grads:
            g = eqx.tree_at(lambda layer: layer.weight, layers, g)
            layers, opt = opt.step(layers, g, **known(layers, g))
        return layers.weight

    def both(layers, grads):
        each = [run(jax.tree.map(lambda x, i=i: x[i], layers), grads[:, i]) for i in range(2)]
        return run(layers, grads), jnp.stack(each)

    together, each = jax.jit(both)(layers, grads)
    moved = jnp.max(jnp.abs(each - layers.weight), (1, 2), keepdims=True)
    return float(jnp.max(jnp.abs(together - each) / moved))


@rows(0, NAMES, everyday=(), ci=("muon", "norm_muon", "scion", "adafactor", "dog", "dion"))
def test_a_stack_is_its_layers(row):
    if row.name in OF_A_LEAF | OF_ALL | DRAWN:
        assert apart(row.tx) > 1e-3
    else:
        # The outer products of few gradients are singular, so their roots multiply rounding errors.
        assert apart(row.tx) < (2e-3 if row.name == "shampoo" else 1e-4)


WITH_LAYOUT = {
    type(part).__name__: part
    for tx in EVERYTHING.values()
    for part in transforms_in(tx)
    if "layout" in vars(part) and not isinstance(part, sl.contrib.QKClip)
}


def reading(rule, layout):
    """A rule that reads the array 'w', and no other, by another layout."""
    rule = copy.copy(rule)
    object.__setattr__(rule, "layout", as_layout({sl.where.path("w*"): layout}))
    return rule


@pytest.mark.parametrize("name", sampled(WITH_LAYOUT, "ScaleByGalore", "Orthogonalize"))
def test_unequal_blocks_are_matrices_of_their_own_or_one_matrix_as_equal_ones_are(name):
    random = np.random.default_rng(0)
    w, g = (jnp.asarray(random.standard_normal((12, 5)), jnp.float32) for _ in range(2))

    def update(layout, cuts=()):
        rule, names = reading(WITH_LAYOUT[name], layout), [f"w{i}" for i in range(len(cuts) + 1)]

        @jax.jit
        def run(w, g):
            params, grads = (dict(zip(names, jnp.split(x, cuts), strict=True)) for x in (w, g))
            updates, _ = rule.update(grads, rule.init(params), params, sl.Context(step=0))
            return jnp.concatenate([updates[name] for name in names])

        return run(w, g)

    def close(one, other):
        return np.allclose(one, other, rtol=1e-5, atol=1e-6)

    try:
        found = update("(4:1:1o)i")
    except ValueError as error:
        assert f"{name} cannot read 'w0' in blocks of unequal sizes" in str(error)  # noqa: PT017  or none
        return
    if close(found, update("oi", (8, 10))):
        return
    assert close(found, update("oi"))
    assert close(update("(3o)i"), update("oi"))
