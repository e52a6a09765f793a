"""Masks and labels that select nothing, or not what they say."""

import jax
import jax.numpy as jnp

import slalom as sl

from ._table import bound, mlp, refused

GLOBS = (
    " matches no parameter. The whole path must match, `*` is one segment and `**` any number of "
    "them. Paths here: "
)


@refused(
    ValueError,
    "sl.where.path('layer.*.weight')" + GLOBS + "'layers.0.weight', 'layers.0.bias', "
    "'layers.1.weight', 'layers.1.bias'.",
)
def a_glob_that_matches_nothing():
    sl.Optimizer(sl.adamw(0.1, decay_where=sl.where.path("layer.*.weight")), mlp())


@refused(ValueError, "sl.where.path('bias')" + GLOBS + "'b', 'w'.")
def a_glob_of_a_partition_that_matches_nothing():
    bound(sl.adam(0.1).partition({sl.where.path("bias"): sl.sgd(0.1)}))


@refused(ValueError, "sl.where.path('layers.**')" + GLOBS + "'b', 'w'.")
def a_glob_of_trainable_that_matches_nothing():
    bound(trainable=~sl.where.path("layers.**"))


@refused(
    ValueError,
    "sl.where.regex('^layers') is found in no parameter's path. Paths here: 'b', 'w'.",
)
def a_regex_that_matches_nothing():
    bound(sl.adam(0.1).only(sl.where.regex("^layers")))


@refused(
    ValueError,
    "The parameter 'w' has the label 'c', for which there is no transform. Labels with a "
    "transform: 'a', 'd'.",
)
def a_label_without_a_transform():
    bound(sl.partition({"a": sl.adam(0.1), "d": sl.sgd(0.1)}, {"b": "a", "w": "c"}))


@refused(
    ValueError,
    "The parameter 'w' has no label. Give every leaf one, for example with "
    "`sl.where.everything()` as the last case.",
)
def a_leaf_without_a_label():
    bound(sl.partition({"a": sl.adam(0.1)}, {sl.where.path("b"): "a"}))


SEVERAL = " To select by several, join selectors: `sl.where.path(...) | sl.where.path(...)`."


@refused(TypeError, "sl.where.path takes one glob, got ['b', 'w']." + SEVERAL, unchecked=True)
def a_list_of_globs():
    sl.where.path(["b", "w"])


@refused(
    TypeError,
    "A selector is neither true nor false. Join selectors with `&`, `|` and `~` instead of `and`, "
    "`or` and `not`.",
)
def selectors_joined_by_and():
    sl.where.path("b") and sl.where.path("w")


@refused(TypeError, "None is no selector. Write `sl.where.everything()`, or `.nothing()`.")
def none_as_selector():
    sl.adam(0.1).only(None)


@refused(TypeError, "A string is no selector, got 'w'. Write `sl.where.path('w')`.")
def a_string_beside_a_selector_as_case():
    sl.partition({1: sl.adam(0.1)}, {sl.where.path("b"): 1, "w": 1})


@refused(
    TypeError,
    "`.partition` takes a mapping from selectors to transforms, got sl.where.path('w') of type "
    "_Path.",
    unchecked=True,
)
def a_partition_by_a_selector_alone():
    sl.adam(0.1).partition(sl.where.path("w"), sl.sgd(0.1))


@refused(
    ValueError,
    "`names` must give a name to each of the 1 groups, all different and none of them 'rest', got "
    "('a', 'b').",
)
def names_for_other_groups():
    sl.adam(0.1).partition({sl.where.path("b"): sl.sgd(0.1)}, names=("a", "b"))


@refused(TypeError, "A mask must hold bools, got 1 of type int at 'b' from {'b': 1, 'w': True}.")
def a_mask_of_ints():
    bound(sl.adam(0.1).only({"b": 1, "w": True}))


@refused(TypeError, "A mask must hold bools, got 1 of type int at 'b' from sl.where.leaf(<…>).")
def a_leaf_function_of_ints():
    bound(sl.adam(0.1).only(sl.where.leaf(lambda path, leaf: len(leaf.shape))))


NO_SELECTOR = "A string is no selector, got 'w'. Write `sl.where.path('w')`."


@refused(TypeError, NO_SELECTOR)
def a_string_as_selector():
    sl.adamw(0.1, decay_where="w")


@refused(TypeError, NO_SELECTOR)
def a_string_as_case():
    sl.adam(0.1).partition({"w": sl.sgd(0.1)})


NO_PREFIX = "The mask or label tree is neither a tree like the parameters nor a prefix of one: "


@refused(ValueError, NO_PREFIX + "'v' is in the mask and missing in the parameters.")
def a_mask_of_another_structure():
    bound(sl.adam(0.1).only({"b": True, "v": True}))


@refused(ValueError, NO_PREFIX + "'w' is in the parameters and missing in the mask.")
def a_mask_function_of_another_structure():
    bound(sl.adam(0.1).only(lambda params: {"b": True}))


PYTHON_VALUE = (
    " of dtype bool. What is selected must be known before anything is computed: decide by path, "
    "shape or dtype, for example `sl.where.ndim(min=2)`."
)


@refused(TypeError, "A mask or label must be a Python value, got an array" + PYTHON_VALUE)
def a_mask_of_arrays():
    sl.adam(0.1).only({"b": jnp.array(True), "w": True})


@refused(TypeError, "A mask or label must be a Python value, got a traced array" + PYTHON_VALUE)
def a_traced_mask():
    jax.jit(lambda flag: sl.adam(0.1).only({"b": flag, "w": True}))(True)


ONLY_SHAPES = (
    " It sees shapes and dtypes (`jax.ShapeDtypeStruct` leaves), never values: a mask or label "
    "that depended on values could change between two steps."
)


@refused(
    TypeError,
    "The function <…> failed on the parameter tree: '>' not supported between instances of "
    "'ShapeDtypeStruct' and 'int'." + ONLY_SHAPES,
)
def a_mask_of_values_compared():
    bound(sl.adam(0.1).only(lambda params: jax.tree.map(lambda x: bool(jnp.all(x > 0)), params)))


@refused(
    TypeError,
    "The function <…> failed on the parameter tree: 'ShapeDtypeStruct' object has no attribute "
    "'sum'." + ONLY_SHAPES,
)
def a_mask_of_values_summed():
    bound(sl.adam(0.1).only(lambda params: jax.tree.map(lambda x: bool(x.sum() > 0), params)))


@refused(
    TypeError,
    "The function <…> failed at 'b': '>' not supported between instances of 'ShapeDtypeStruct' and "
    "'int'." + ONLY_SHAPES,
)
def a_leaf_function_of_values():
    bound(sl.adam(0.1).only(sl.where.leaf(lambda path, leaf: bool(jnp.all(leaf > 0)))))
