"""Selectors: which leaves they select, how they are joined, and how masks follow from them."""

import functools
import gc
import operator

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import after_steps, assert_same_bits, drawn, mlp, params_of
from slalom.where.masks import mask

LAYERS = ("layers.1.weight", "layers.12.weight", "layers.2.norm.bias", "layers.2.weight")
PATHS = ("bias", "head.bias", "head.weight", *LAYERS)


def tree_of(paths):
    """Nested dicts with a leaf at each dotted path."""
    tree = {}
    for path in paths:
        *above, last = path.split(".")
        node = functools.reduce(lambda node, name: node.setdefault(name, {}), above, tree)
        node[last] = jnp.ones(2)
    return tree


def dotted(key_path):
    names = (getattr(k, "name", getattr(k, "key", getattr(k, "idx", None))) for k in key_path)
    return ".".join(map(str, names))


def selected(where, params):
    """The paths of the leaves for which a transform under `.mask(where)` has state."""
    held = jax.eval_shape(sl.Trace(0.9).mask(where).init, params).trace
    return {dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(held)}


GLOBS = {
    "bias": {"bias"},
    "*": {"bias"},
    "**": set(PATHS),
    "**.bias": {"bias", "head.bias", "layers.2.norm.bias"},
    "*.bias": {"head.bias"},
    "layers.1.**": {"layers.1.weight"},
    "layers.2.**": {"layers.2.weight", "layers.2.norm.bias"},
    "layers.1*.**": {"layers.1.weight", "layers.12.weight"},
    "layers.*.weight": {"layers.1.weight", "layers.12.weight", "layers.2.weight"},
    "layers.**.bias": {"layers.2.norm.bias"},
    "layers.**.norm.**": {"layers.2.norm.bias"},
    "**.2.**.bias": {"layers.2.norm.bias"},
    "he*.w*t": {"head.weight"},
    "head*": set(),
    "head": set(),
    "ead.bias": set(),
    "*.*": {"head.bias", "head.weight"},
    "bias.**": {"bias"},
    "head.bia": set(),
    "h.ad.bias": set(),
}
REGEXES = {
    "bias": {"bias", "head.bias", "layers.2.norm.bias"},
    "^bias$": {"bias"},
    r"layers\.1\.": {"layers.1.weight"},
    r"layers\.\d+\.weight": {"layers.1.weight", "layers.12.weight", "layers.2.weight"},
    "nowhere": set(),
}


def test_paths_are_matched_by_many_globs_at_once_and_in_part_by_regexes():
    params = tree_of(PATHS)
    for glob, matches in GLOBS.items():
        assert selected(sl.where.path(glob), params) == matches, glob
    for pattern, matches in REGEXES.items():
        assert selected(sl.where.regex(pattern), params) == matches, pattern

    params = (
        {"conv1": jnp.ones(1), "conv2": [jnp.ones(1), jnp.ones(1)]},
        eqx.filter_eval_shape(eqx.nn.Linear, 1, 1, key=jax.random.key(0)),
    )
    assert selected(sl.where.path("0.conv*.**"), params) == {"0.conv1", "0.conv2.0", "0.conv2.1"}
    assert selected(sl.where.path("*.conv*"), params) == {"0.conv1"}
    assert selected(sl.where.path("1.weight"), params) == {"1.weight"}
    for where, matches in {"**": {""}, "*": set()}.items():
        assert selected(sl.where.path(where), jnp.ones(2)) == matches
    assert selected(sl.where.everything(), jnp.ones(2)) == {""}

    deep = tree_of([".".join(["a"] * 60)])
    for last in ("a", "z"):
        glob = ".".join(["**", "a"] * 12 + [last])
        assert mask(sl.where.path(glob), deep) == (last == "a",)

    for join in (operator.or_, operator.and_):
        many = functools.reduce(join, [sl.where.ndim(min=i % 2) for i in range(2000)])
        chosen = {"w": jnp.ones(2), "b": jnp.ones(())}
        assert mask(many, chosen) == (join is operator.or_, True)
        assert repr(many).count("sl.where.ndim") == 2000


SHAPES = {"scalar": (), "vector": (2,), "matrix": (2, 2), "kernel": (2, 2, 2), "empty": (0,)}


def test_shapes_and_dtypes_select():
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    for where, matches in (
        (sl.where.ndim(1), {"vector", "empty"}),
        (sl.where.ndim(0), {"scalar"}),
        (sl.where.ndim(min=2), {"matrix", "kernel"}),
        (sl.where.ndim(max=1), {"scalar", "vector", "empty"}),
        (sl.where.ndim(min=1, max=2), {"vector", "matrix", "empty"}),
        (sl.where.ndim(5), set()),
        (sl.where.everything(), set(SHAPES)),
        (sl.where.nothing(), set()),
        (sl.where.leaf(lambda path, leaf: leaf.shape == (2,)), {"vector"}),
        (sl.where.leaf(lambda path, leaf: path.endswith("ty")), {"empty"}),
    ):
        assert selected(where, params) == matches, where

    dtypes = {"f32": "float32", "bf16": jnp.bfloat16, "f16": "float16", "c64": "complex64"}
    params = {name: jnp.ones(2, dtype) for name, dtype in dtypes.items()}
    for dtype, matches in (
        (jnp.float32, {"f32"}),
        ("float32", {"f32"}),
        (jnp.bfloat16, {"bf16"}),
        (jnp.dtype("float16"), {"f16"}),
        (jnp.floating, {"f32", "bf16", "f16"}),
        (jnp.complexfloating, {"c64"}),
        (jnp.inexact, {"f32", "bf16", "f16", "c64"}),
        (jnp.integer, set()),
    ):
        assert selected(sl.where.dtype(dtype), params) == matches, dtype


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear
    scale: jax.Array
    extras: dict


class Net(eqx.Module):
    blocks: tuple
    head: jax.tree_util.Partial


def net():
    key = jax.random.key(0)

    def block():
        linear = eqx.nn.Linear(2, 2, key=key)
        return Block(eqx.nn.LayerNorm(2), linear, jnp.ones(2), {"shift": [jnp.ones(2)]})

    # JAX gives the parts of a `Partial` no names.
    return Net((block(), block()), jax.tree_util.Partial(abs, eqx.nn.Linear(2, 2, key=key)))


def test_types_and_dtypes_are_those_of_parameters():
    params = eqx.filter_eval_shape(lambda: params_of(net()))
    of_linear = selected(sl.where.type(eqx.nn.Linear), params)
    assert of_linear == {
        *(f"blocks.{i}.linear.{name}" for i in (0, 1) for name in ("weight", "bias")),
        *(f"head.0.0.{name}" for name in ("weight", "bias")),
    }
    assert selected(sl.where.type(Net), params) == selected(sl.where.everything(), params)
    assert selected(sl.where.type(eqx.nn.Conv2d), params) == set()
    assert selected(sl.where.type(Block, owner=True), params) == {
        f"blocks.{i}.{name}" for i in (0, 1) for name in ("scale", "extras.shift.0")
    }
    assert selected(sl.where.type(Net, owner=True), params) == set()

    params = {"half": jnp.ones(2, jnp.bfloat16), "single": jnp.ones(2)}
    updates = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    tx = sl.Trace(0.9).mask(sl.where.dtype(jnp.bfloat16))
    state = tx.init(params)
    tx.update(updates, state, params)
    with pytest.raises(TypeError, match=r"needs them: `tx\.update\(grads, state, params"):
        tx.update(updates, state)


def test_selectors_join_nest_print_as_code_and_hash():
    path, params = sl.where.path, tree_of(PATHS)
    joined = path("**.bias") & ~path("head.**") | path("layers.12.*")
    assert selected(joined, params) == {"bias", "layers.2.norm.bias", "layers.12.weight"}
    assert selected(~~path("bias"), params) == {"bias"}
    heads = {"head": True, "bias": False, "layers": False}
    assert selected(path("**.bias") & heads, params) == {"head.bias"}
    both = {"head.bias", "head.weight"}
    assert selected(path("bias") | (lambda params: heads), params) == {"bias", *both}
    # Prefixes of the tree stand for all below.
    assert selected(heads, params) == selected(lambda params: heads, params) == both
    assert selected(True, params) == set(PATHS)
    assert selected(False, params) == set()

    names = {"sl": sl, "eqx": eqx, "is_matrix": is_matrix}
    for where in SELECTORS:
        again = eval(repr(where), names)
        assert again == where
        assert hash(again) == hash(where)
        assert len({where, again, ~where}) == 2

    # 1 == True, also in a memo.
    params = {"b": jnp.ones(2)}
    assert selected({"b": True}, params) == {"b"}
    with pytest.raises(TypeError, match="must consist of bools, got 1"):
        selected({"b": 1}, params)


NAMES = st.sampled_from(["a", "b", "bias", "weight", "layers", "1", "12"])
TREES = st.recursive(
    st.just(()), lambda below: st.dictionaries(NAMES, below, min_size=1, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))
ATOMS = st.sampled_from(
    [
        (sl.where.path("**.bias"), lambda path: path.split(".")[-1] == "bias"),
        (sl.where.path("layers.1.**"), lambda path: (path + ".").startswith("layers.1.")),
        (sl.where.path("*.*"), lambda path: path.count(".") == 1),
        (sl.where.path("b*"), lambda path: path[0] == "b" and "." not in path),
        (sl.where.regex("w.*t"), lambda path: "weight" in path),
        (sl.where.leaf(lambda path, leaf: "1" in path), lambda path: "1" in path),
        (sl.where.everything(), lambda path: True),
        (sl.where.nothing(), lambda path: False),
    ]
)


def joins(below):
    pairs = st.tuples(below, below)
    return st.one_of(
        below.map(lambda x: (~x[0], lambda path: not x[1](path))),
        pairs.map(lambda p: (p[0][0] & p[1][0], lambda path: p[0][1](path) and p[1][1](path))),
        pairs.map(lambda p: (p[0][0] | p[1][0], lambda path: p[0][1](path) or p[1][1](path))),
    )


JOINED = st.recursive(ATOMS, joins, max_leaves=6)


@pytest.mark.slow
@drawn(TREES, JOINED, examples=300)
def test_algebra_is_boolean_algebra_on_paths(shape, joined):
    where, holds = joined
    params = jax.tree.map(lambda _: jnp.ones(()), shape, is_leaf=lambda node: node == ())
    paths = [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert selected(where, params) == set(filter(holds, paths))


def is_matrix(path, leaf):
    return len(leaf.shape) == 2


SELECTORS = [
    sl.where.path("layers.*.**"),
    sl.where.regex(r"^a\.b$"),
    sl.where.ndim(2),
    sl.where.ndim(min=1),
    sl.where.ndim(max=3),
    sl.where.ndim(min=1, max=2),
    sl.where.dtype(jnp.bfloat16),
    sl.where.dtype(jnp.floating),
    sl.where.type(eqx.nn.Linear),
    sl.where.type(eqx.nn.Linear, owner=True),
    sl.where.leaf(is_matrix),
    sl.where.everything(),
    sl.where.nothing(),
    ~sl.where.path("a") & sl.where.ndim(1) | sl.where.nothing(),
    ~(sl.where.path("a") | sl.where.path("b")),
    (sl.where.path("a") | sl.where.ndim(1)) & (sl.where.path("b") & sl.where.ndim(2)),
    sl.where.path("a") | (sl.where.path("b") & sl.where.ndim(1) | sl.where.ndim(2)),
    sl.where.path("a") & {"a": True, "b": [False, True]},
]


def test_functions_see_the_whole_tree_of_shapes_and_are_asked_once():
    seen = []

    def largest(params):
        seen.append(params)
        size = max(leaf.size for leaf in jax.tree.leaves(params))
        return jax.tree.map(lambda leaf: leaf.size == size, params)

    params = {"a": jnp.ones(2), "b": jnp.ones((2, 3), jnp.bfloat16), "hole": None}
    assert selected(largest, params) == {"b"}
    assert seen[0] == {
        "a": jax.ShapeDtypeStruct((2,), jnp.float32),
        "b": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
        "hole": None,
    }

    calls = []

    def where(params):
        calls.append(params)
        return jax.tree.map(lambda leaf: len(leaf.shape) == 2, params)

    def leaf(path, leaf):
        calls.append(path)
        return len(leaf.shape) == 1

    gc.collect()  # later, what other tests left would empty the caches
    params = {"b": jnp.ones(2), "w": jnp.ones((2, 2))}
    tx = sl.adamw(0.1, decay_where=where) | sl.Clip(1.0).mask(sl.where.leaf(leaf))
    trained = after_steps(tx, 2, params, params)  # it keeps its program
    sl.Optimizer(tx, {"b": jnp.zeros(2), "w": jnp.zeros((2, 2))}).step(params, params)
    del trained
    assert len(calls) == 6  # one tree and two leaves, as shapes and as arrays

    where = sl.where.ndim(2)
    for shape in ((2,), (2, 2)):
        assert selected(where, {"a": jnp.ones(shape)}) == ({"a"} if len(shape) == 2 else set())


def test_filter_specs_and_callable_modules_are_trees():
    # As Equinox's documentation builds them. Activations are leaves of the specification too.
    model = mlp()
    head = lambda m: (m.layers[1].weight, m.layers[1].bias)  # noqa: E731
    spec = eqx.tree_at(head, jax.tree.map(lambda _: False, model), replace=(True, True))
    ones = jax.tree.map(jnp.ones_like, params_of(model))
    for opt in (
        sl.Optimizer(sl.sgd(1.0).only(spec), model),
        sl.Optimizer(sl.sgd(1.0), model, trainable=spec),
    ):
        new, _ = opt.step(model, ones)
        for a, b in zip(head(new), head(model), strict=True):
            assert jnp.array_equal(a, b - 1)
        assert eqx.tree_equal(eqx.tree_at(head, new, head(model)), model)

    # Both masks and labels have a `__call__`; neither may be called.
    model = mlp()
    params = params_of(model)
    mask = jax.tree.map(lambda leaf: leaf.ndim == 2, params)
    weights = {"layers.0.weight", "layers.1.weight"}
    assert callable(mask)
    assert selected(mask, params) == weights

    labels = jax.tree.map(lambda leaf: "w" if leaf.ndim == 2 else "b", params)
    tx = sl.partition({"w": sl.sgd(1.0), "b": sl.SetToZero()}, labels)
    new, _ = sl.Optimizer(tx, model).step(model, jax.tree.map(jnp.ones_like, params))
    assert jnp.array_equal(new.layers[0].weight, model.layers[0].weight - 1)
    assert jnp.array_equal(new.layers[0].bias, model.layers[0].bias)


def test_trainable_takes_what_where_takes_with_globs_over_the_whole_tree():
    model = {"b": jnp.ones(2), "w": jnp.ones((2, 2))}
    for trainable in (
        sl.where.path("w"),
        ~sl.where.ndim(1),
        lambda params: {"b": False, "w": True},
        {"b": False, "w": True},
    ):
        opt = sl.Optimizer(sl.sgd(1.0), model, trainable=trainable)
        new, _ = opt.step(model, {"b": None, "w": jnp.ones((2, 2))})
        assert new["b"] is model["b"]
        assert not new["w"].any()
    # An empty selection by type, shape and dtype is legal.
    nothing = sl.where.ndim(7) | sl.where.type(eqx.nn.Conv2d) | sl.where.dtype(jnp.float16)
    new, _ = sl.Optimizer(sl.adam(0.1).only(nothing), model).step(model, model)
    assert jnp.array_equal(new["b"], model["b"])

    # Each glob sees one group only, and matches in the whole.
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    decay = sl.AddDecayedWeights(0.1).mask(sl.where.path("a")) | sl.sgd(0.1)
    with_inner_glob = decay.partition({sl.where.path("a"): sl.sgd(1.0)})
    new, _ = sl.Optimizer(with_inner_glob, model).step(model, model)
    assert jnp.array_equal(new["a"], jnp.zeros(2))
    assert jnp.allclose(new["b"], 0.9, rtol=1e-6)


@pytest.mark.slow
def test_a_model_that_is_one_array_may_be_masked_away():
    model = jnp.asarray(2.0)
    for tx in (
        sl.AddDecayedWeights(0.1).mask(sl.where.ndim(min=2)) | sl.sgd(0.1),
        sl.adamw(0.1).partition({sl.where.ndim(0): sl.sgd(0.1)}),
        sl.sgd(0.1).partition({sl.where.ndim(min=2): sl.adamw(0.1).average()}),
    ):
        stepped, opt = sl.Optimizer(tx, model).step(model, jnp.asarray(1.0))
        np.testing.assert_allclose(stepped, 1.9, rtol=1e-6)
        assert_same_bits(opt.eval_params(stepped), stepped)
