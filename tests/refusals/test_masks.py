"""Masks and labels that select nothing, or not what they say."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import slalom as sl

from .messages import bound, mlp, params, refused

GLOB = "the whole path; `*` … `**` …"
PREFIX = "masks or labels must have the structure of the parameters, or be a prefix"
ONLY_SHAPES = "shapes and dtypes (`jax.ShapeDtypeStruct` leaves), not with values"
ONE_CALL = "`sl.where.leaf(lambda path, leaf: ...)`"


def test_selectors_that_mean_nothing_and_gradients_of_python_numbers():
    model = {"w": jnp.ones(2), "scale": 2.0}
    grads = jax.grad(lambda m: m["scale"] * jnp.sum(m["w"]))(model)
    opt = sl.Optimizer(sl.sgd(0.1), model, trainable=sl.where.everything())
    with refused(TypeError, "gradient at 'scale' … number 2.0", "`jnp.asarray(2.0)`"):
        opt.step(model, grads)

    with refused(ValueError, "'a.***', and `***` has no meaning", "`**` any number"):
        sl.where.path("a.***")
    with refused(ValueError, "sl.where.ndim has min=3 and max=1", "nothing matches"):
        sl.where.ndim(min=3, max=1)
    for name, bad in (("n", -1), ("n", True), ("min", None), ("max", 1.5)):
        with refused(TypeError, "sl.where.ndim takes whole numbers", f"≥ 0, got {bad!r}"):
            sl.where.ndim(**{name: bad})
    with refused(ValueError, "sl.where.regex has '('", "missing ) … `re.escape` … `sl.where.path`"):
        sl.where.regex("(")
    for bad in (None, object, "flaot32", 3, [jnp.float32]):
        remedy = "a dtype, such as `jnp.float32`, or a group, such as `jnp.floating`"
        with refused(TypeError, f"sl.where.dtype … got {bad!r}", remedy):
            sl.where.dtype(bad)


def test_selections_of_nothing():
    with refused(
        ValueError,
        "sl.where.path('layer.*.weight') matches no parameter",
        GLOB + " 'layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias'",
    ):
        sl.Optimizer(sl.adamw(0.1, decay_where=sl.where.path("layer.*.weight")), mlp())
    with refused(ValueError, "sl.where.path('bias') matches no parameter", GLOB + " 'b', 'w'"):
        bound(sl.adam(0.1).partition({sl.where.path("bias"): sl.sgd(0.1)}))
    with refused(ValueError, "sl.where.path('layers.**') matches no parameter", GLOB + " 'b', 'w'"):
        bound(trainable=~sl.where.path("layers.**"))
    with refused(ValueError, "sl.where.regex('^layers') matches no parameter", "Paths: 'b', 'w'"):
        bound(sl.adam(0.1).only(sl.where.regex("^layers")))
    with refused(ValueError, "'w' has the label 'c'", "Labels with a transform: 'a', 'd'"):
        bound(sl.partition({"a": sl.adam(0.1), "d": sl.sgd(0.1)}, {"b": "a", "w": "c"}))
    with refused(
        ValueError,
        "Two groups … have the name '1' in paths: their labels are 1, '1'",
        "labels that also differ as text",
    ):
        sl.partition({1: sl.sgd(0.1), "1": sl.sgd(0.2)}, {"w": 1, "b": "1"})
    with refused(ValueError, "'w' has no label", "`sl.where.everything()` as the last case"):
        bound(sl.partition({"a": sl.adam(0.1)}, {sl.where.path("b"): "a"}))
    general, special = sl.where.everything(), sl.where.path("w")
    for tx in (
        sl.adam(0.1).partition({general: sl.sgd(0.1), special: sl.sgd(0.2)}),
        sl.partition({1: sl.sgd(0.1), 2: sl.adam(0.1)}, {general: 1, special: 2}),
        sl.ScaleBy({general: 0.1, special: 0.2}) | sl.sgd(0.1),
    ):
        with refused(
            ValueError,
            "sl.where.path('w') selects nothing … 'w' belongs to sl.where.everything()",
            "put the special ones first",
        ):
            bound(tx)


def test_what_is_no_selector():
    with refused(
        TypeError,
        "sl.where.path takes one glob, got ['b', 'w']",
        "`sl.where.path(...) | sl.where.path(...)`",
    ):
        sl.where.path(["b", "w"])
    with refused(TypeError, "a class, got a module", "`sl.where.type(Identity)`"):
        sl.where.type(eqx.nn.Identity())
    with refused(
        TypeError,
        "A selector has no truth value",
        "`&`, `|` and `~` instead of `and`, `or` and `not`",
    ):
        sl.where.path("b") and sl.where.path("w")
    paths = "`sl.where.path('b') | sl.where.path('w')`"
    with refused(TypeError, "A list of strings is not a selector, got ['b', 'w']", paths):
        sl.Clip(1.0).mask(["b", "w"])
    with refused(
        TypeError,
        "sl.where.dtype(float) would mean float64 alone",
        "`sl.where.dtype(jnp.floating)`, or name one dtype.",
    ):
        sl.where.dtype("float")
    with refused(TypeError, "None is not a selector", "`sl.where.everything()` or `.nothing()`"):
        sl.adam(0.1).only(None)
    with refused(TypeError, "sl.where.everything makes a selector", "`sl.where.everything()`"):
        sl.muon(0.1, layout={sl.where.everything: "io"})
    with refused(TypeError, "sl.where.ndim makes a selector", "`sl.where.ndim(...)`"):
        sl.where.path("w") & sl.where.ndim
    with refused(TypeError, "sl.where.ndim takes either", "a number of axes, or `min` and `max`"):
        sl.where.ndim(2, min=1)
    with refused(TypeError, "sl.where.leaf … got 3", "a function of (path, leaf)"):
        sl.where.leaf(3)
    with refused(TypeError, "sl.where.everything makes a selector", "`sl.where.everything()`"):
        sl.partition({1: sl.adam(0.1)}, {sl.where.everything: 1})
    for make in (
        lambda: sl.adamw(0.1, decay_where="w"),
        lambda: sl.adam(0.1).partition({"w": sl.sgd(0.1)}),
        lambda: sl.partition({1: sl.adam(0.1)}, {sl.where.path("b"): 1, "w": 1}),
    ):
        with refused(TypeError, "not a selector, got 'w'", "`sl.where.path('w')`"):
            make()
    with refused(
        TypeError,
        "`.partition` … got sl.where.path('w') of type _Selector",
        "a mapping from selectors to transforms",
    ):
        sl.adam(0.1).partition(sl.where.path("w"), sl.sgd(0.1))
    with refused(
        ValueError,
        "`names` … got ('a', 'b')",
        "each of the 1 groups, all different and none of them 'rest'",
    ):
        sl.adam(0.1).partition({sl.where.path("b"): sl.sgd(0.1)}, names=("a", "b"))


def test_what_is_no_mask():
    with refused(TypeError, "got 1 of type int at 'b' from {'b': 1, 'w': True}", "bools"):
        bound(sl.adam(0.1).only({"b": 1, "w": True}))
    with refused(TypeError, "got 1 of type int at 'b' from sl.where.leaf(…", "bools"):
        bound(sl.adam(0.1).only(sl.where.leaf(lambda path, leaf: len(leaf.shape))))
    with refused(ValueError, "'v' is in the mask but not in the parameters", PREFIX):
        bound(sl.adam(0.1).only({"b": True, "v": True}))
    with refused(ValueError, "'w' is in the parameters but not in the mask", PREFIX):
        bound(sl.adam(0.1).only(lambda params: {"b": True}))
    entries = "`tx | sl.Stateless(… jnp.multiply …`"
    whole = f"a bool for each, such as `bool(leaf.any())` … {entries}"
    with refused(TypeError, "A mask or label … got an array of dtype bool and shape ()", whole):
        sl.adam(0.1).only({"b": jnp.array(True), "w": True})
    traced = f"make the tree outside … {entries}"
    with refused(TypeError, "A mask or label … got a traced array of dtype bool", traced):
        jax.jit(lambda flag: sl.adam(0.1).only({"b": flag, "w": True}))(True)
    failed, both = "failed on the parameter tree:", f"{ONLY_SHAPES} … {ONE_CALL}"
    with refused(TypeError, f"{failed} '>' not supported", both):
        bound(sl.adam(0.1).only(lambda p: jax.tree.map(lambda x: bool(jnp.all(x > 0)), p)))
    with refused(TypeError, f"{failed} 'ShapeDtypeStruct' object has no attribute 'sum'", both):
        bound(sl.adam(0.1).only(lambda params: jax.tree.map(lambda x: bool(x.sum() > 0), params)))
    with refused(TypeError, f"{failed} 'dict' object has no attribute 'ndim'", both):
        bound(sl.adamw(0.1, decay_where=lambda p: p.ndim > 1))
    with refused(TypeError, "at 'b': '>' not supported", ONLY_SHAPES):
        bound(sl.adam(0.1).only(sl.where.leaf(lambda path, leaf: bool(jnp.all(leaf > 0)))))
    with refused(
        ValueError,
        "sl.where.matrix() & sl.where.path('b') selects nothing",
        "`sl.where.matrix({sl.where.path(\"experts\"): \"soi\"})` … Paths: 'b', 'w'",
    ):
        bound(sl.muon(0.02, where=sl.where.path("b")))


@pytest.mark.parametrize("predicate", [eqx.is_array, eqx.is_inexact_array])
@pytest.mark.parametrize("per_leaf", [False, True])
def test_functions_that_test_for_arrays(predicate, per_leaf):
    """They see shapes, and would select nothing."""
    where = lambda m: jax.tree.map(predicate, m)  # noqa: E731
    where = (
        sl.where.leaf(lambda path, leaf: leaf.ndim > 1 or predicate(leaf)) if per_leaf else where
    )
    words = lambda m: jax.tree.map(lambda x: "a" if predicate(x) else "b", m)  # noqa: E731
    tx, twice = sl.adam(0.1), sl.partition({"a": sl.sgd(0.1), "b": sl.adam(0.1)}, words)
    for make in (
        lambda: bound(trainable=where),
        lambda: bound(tx.only(where)),
        lambda: bound(tx.only(~where) if per_leaf else twice),
        lambda: bound(sl.Clip(1.0).mask(where) | tx),
        lambda: bound(tx.partition({where: sl.sgd(0.1)})),
        lambda: bound(sl.ScaleBy({where: 0.5}) | tx),
        lambda: bound(sl.adamw(0.1, decay_where=where)),
        lambda: bound(sl.muon(0.1, layout={where: "io"})),
        lambda: bound(tx.every_k(2).project(sl.projections.non_negative(), where=where)),
        lambda: bound().reset(params(), where=where),
        lambda: bound().rebind(params(), rows={where: jnp.arange(2)}),
    ):
        with refused(TypeError, "tests whether leaves are arrays", "`leaf.ndim` or `leaf.dtype`"):
            make()
