"""Masks and labels that select nothing, or not what they say."""

import jax
import jax.numpy as jnp

import slalom as sl

from ._table import bound, mlp, refused

GLOB = "the whole path; `*` … `**` …"
PREFIX = "masks or labels must have the structure of the parameters, or be a prefix"
ONLY_SHAPES = "shapes and dtypes (`jax.ShapeDtypeStruct` leaves), not with values"
ONE_CALL = "`sl.where.leaf(lambda path, leaf: ...)`"
PYTHON_VALUE = "a Python value … `sl.where.ndim(min=2)`"


@refused(
    ValueError,
    "sl.where.path('layer.*.weight') matches no parameter",
    GLOB + " 'layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias'",
)
def a_glob_that_matches_nothing():
    sl.Optimizer(sl.adamw(0.1, decay_where=sl.where.path("layer.*.weight")), mlp())


@refused(ValueError, "sl.where.path('bias') matches no parameter", GLOB + " 'b', 'w'")
def a_glob_of_a_partition_that_matches_nothing():
    bound(sl.adam(0.1).partition({sl.where.path("bias"): sl.sgd(0.1)}))


@refused(ValueError, "sl.where.path('layers.**') matches no parameter", GLOB + " 'b', 'w'")
def a_glob_of_trainable_that_matches_nothing():
    bound(trainable=~sl.where.path("layers.**"))


@refused(ValueError, "sl.where.regex('^layers') matches no parameter", "Paths: 'b', 'w'")
def a_regex_that_matches_nothing():
    bound(sl.adam(0.1).only(sl.where.regex("^layers")))


@refused(ValueError, "'w' has the label 'c'", "Labels with a transform: 'a', 'd'")
def a_label_without_a_transform():
    bound(sl.partition({"a": sl.adam(0.1), "d": sl.sgd(0.1)}, {"b": "a", "w": "c"}))


@refused(ValueError, "'w' has no label", "`sl.where.everything()` as the last case")
def a_leaf_without_a_label():
    bound(sl.partition({"a": sl.adam(0.1)}, {sl.where.path("b"): "a"}))


@refused(
    TypeError,
    "sl.where.path takes one glob, got ['b', 'w']",
    "`sl.where.path(...) | sl.where.path(...)`",
    unchecked=True,
)
def a_list_of_globs():
    sl.where.path(["b", "w"])


@refused(
    TypeError, "A selector has no truth value", "`&`, `|` and `~` instead of `and`, `or` and `not`"
)
def selectors_joined_by_and():
    sl.where.path("b") and sl.where.path("w")


@refused(TypeError, "None is not a selector", "`sl.where.everything()` or `.nothing()`")
def none_as_selector():
    sl.adam(0.1).only(None)


@refused(TypeError, "sl.where.everything makes a selector", "`sl.where.everything()`")
def a_selector_that_was_not_called():
    sl.muon(0.1, layout={sl.where.everything: "io"})


@refused(TypeError, "sl.where.ndim makes a selector", "`sl.where.ndim(...)`")
def a_selector_that_was_not_called_beside_another():
    sl.where.path("w") & sl.where.ndim


@refused(TypeError, "sl.where.everything makes a selector", "`sl.where.everything()`")
def a_selector_that_was_not_called_as_case():
    sl.partition({1: sl.adam(0.1)}, {sl.where.everything: 1})


@refused(TypeError, "not a selector, got 'w'", "`sl.where.path('w')`")
def a_string_beside_a_selector_as_case():
    sl.partition({1: sl.adam(0.1)}, {sl.where.path("b"): 1, "w": 1})


@refused(
    TypeError,
    "`.partition` … got sl.where.path('w') of type _Path",
    "a mapping from selectors to transforms",
    unchecked=True,
)
def a_partition_by_a_selector_alone():
    sl.adam(0.1).partition(sl.where.path("w"), sl.sgd(0.1))


@refused(
    ValueError,
    "`names` … got ('a', 'b')",
    "each of the 1 groups, all different and none of them 'rest'",
)
def names_for_other_groups():
    sl.adam(0.1).partition({sl.where.path("b"): sl.sgd(0.1)}, names=("a", "b"))


@refused(TypeError, "got 1 of type int at 'b' from {'b': 1, 'w': True}", "bools")
def a_mask_of_ints():
    bound(sl.adam(0.1).only({"b": 1, "w": True}))


@refused(TypeError, "got 1 of type int at 'b' from sl.where.leaf(…", "bools")
def a_leaf_function_of_ints():
    bound(sl.adam(0.1).only(sl.where.leaf(lambda path, leaf: len(leaf.shape))))


@refused(TypeError, "not a selector, got 'w'", "`sl.where.path('w')`")
def a_string_as_selector():
    sl.adamw(0.1, decay_where="w")


@refused(TypeError, "not a selector, got 'w'", "`sl.where.path('w')`")
def a_string_as_case():
    sl.adam(0.1).partition({"w": sl.sgd(0.1)})


@refused(ValueError, "'v' is in the mask but not in the parameters", PREFIX)
def a_mask_of_another_structure():
    bound(sl.adam(0.1).only({"b": True, "v": True}))


@refused(ValueError, "'w' is in the parameters but not in the mask", PREFIX)
def a_mask_function_of_another_structure():
    bound(sl.adam(0.1).only(lambda params: {"b": True}))


@refused(TypeError, "A mask or label … got an array of dtype bool", PYTHON_VALUE)
def a_mask_of_arrays():
    sl.adam(0.1).only({"b": jnp.array(True), "w": True})


@refused(TypeError, "A mask or label … got a traced array of dtype bool", PYTHON_VALUE)
def a_traced_mask():
    jax.jit(lambda flag: sl.adam(0.1).only({"b": flag, "w": True}))(True)


@refused(
    TypeError, "failed on the parameter tree: '>' not supported", f"{ONLY_SHAPES} … {ONE_CALL}"
)
def a_mask_of_values_compared():
    bound(sl.adam(0.1).only(lambda params: jax.tree.map(lambda x: bool(jnp.all(x > 0)), params)))


@refused(
    TypeError,
    "failed on the parameter tree: 'ShapeDtypeStruct' object has no attribute 'sum'",
    f"{ONLY_SHAPES} … {ONE_CALL}",
)
def a_mask_of_values_summed():
    bound(sl.adam(0.1).only(lambda params: jax.tree.map(lambda x: bool(x.sum() > 0), params)))


@refused(
    TypeError,
    "failed on the parameter tree: 'dict' object has no attribute 'ndim'",
    f"{ONLY_SHAPES} … {ONE_CALL}",
)
def a_mask_of_a_function_of_a_leaf():
    bound(sl.adamw(0.1, decay_where=lambda p: p.ndim > 1))


@refused(TypeError, "at 'b': '>' not supported", ONLY_SHAPES)
def a_leaf_function_of_values():
    bound(sl.adam(0.1).only(sl.where.leaf(lambda path, leaf: bool(jnp.all(leaf > 0)))))


@refused(
    ValueError,
    "sl.where.matrix() & sl.where.path('b') selects nothing",
    "`sl.where.matrix({sl.where.path(\"experts\"): \"soi\"})` … Paths: 'b', 'w'",
)
def muon_without_a_matrix():
    bound(sl.muon(0.02, where=sl.where.path("b")))
