"""Masks and labels that select nothing, or not what they say."""

import jax
import jax.numpy as jnp

import slalom as sl

from ._table import bound, mlp, refused

GLOBS = (
    " matches no parameter. A glob must match the whole path; `*` matches one segment and `**` any "
    "number of segments. Paths: "
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
    "sl.where.regex('^layers') matches no parameter. Paths: 'b', 'w'.",
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


SEVERAL = " To select by several, combine selectors: `sl.where.path(...) | sl.where.path(...)`."


@refused(TypeError, "sl.where.path takes one glob, got ['b', 'w']." + SEVERAL, unchecked=True)
def a_list_of_globs():
    sl.where.path(["b", "w"])


@refused(
    TypeError,
    "A selector has no truth value. Combine selectors with `&`, `|` and `~` instead of `and`, `or` "
    "and `not`.",
)
def selectors_joined_by_and():
    sl.where.path("b") and sl.where.path("w")


@refused(TypeError, "None is not a selector. Write `sl.where.everything()` or `.nothing()`.")
def none_as_selector():
    sl.adam(0.1).only(None)


@refused(TypeError, "A string is not a selector, got 'w'. Write `sl.where.path('w')`.")
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


@refused(
    TypeError, "A mask must consist of bools, got 1 of type int at 'b' from {'b': 1, 'w': True}."
)
def a_mask_of_ints():
    bound(sl.adam(0.1).only({"b": 1, "w": True}))


@refused(
    TypeError, "A mask must consist of bools, got 1 of type int at 'b' from sl.where.leaf(<…>)."
)
def a_leaf_function_of_ints():
    bound(sl.adam(0.1).only(sl.where.leaf(lambda path, leaf: len(leaf.shape))))


NO_SELECTOR = "A string is not a selector, got 'w'. Write `sl.where.path('w')`."


@refused(TypeError, NO_SELECTOR)
def a_string_as_selector():
    sl.adamw(0.1, decay_where="w")


@refused(TypeError, NO_SELECTOR)
def a_string_as_case():
    sl.adam(0.1).partition({"w": sl.sgd(0.1)})


NO_PREFIX = (
    "The tree of masks or labels must have the structure of the parameters, or be a prefix of it: "
)


@refused(ValueError, NO_PREFIX + "'v' is in the mask but not in the parameters.")
def a_mask_of_another_structure():
    bound(sl.adam(0.1).only({"b": True, "v": True}))


@refused(ValueError, NO_PREFIX + "'w' is in the parameters but not in the mask.")
def a_mask_function_of_another_structure():
    bound(sl.adam(0.1).only(lambda params: {"b": True}))


PYTHON_VALUE = (
    " of dtype bool. The selection must be known at trace time, so select by path, shape or dtype, "
    "for example with `sl.where.ndim(min=2)`."
)


@refused(TypeError, "A mask or label must be a Python value, got an array" + PYTHON_VALUE)
def a_mask_of_arrays():
    sl.adam(0.1).only({"b": jnp.array(True), "w": True})


@refused(TypeError, "A mask or label must be a Python value, got a traced array" + PYTHON_VALUE)
def a_traced_mask():
    jax.jit(lambda flag: sl.adam(0.1).only({"b": flag, "w": True}))(True)


ONLY_SHAPES = (
    " It is called with shapes and dtypes (`jax.ShapeDtypeStruct` leaves), not with values, "
    "because a mask or label must not change between steps."
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


@refused(
    ValueError,
    "sl.where.matrix() & sl.where.path('b') selects nothing: none of these parameters is a matrix. "
    "Matrices are the weights of `Linear` and `Conv` layers and other arrays with two axes; a "
    'layout makes matrices of others, such as `sl.where.matrix({sl.where.path("experts"): '
    "\"soi\"})`. Paths: 'b', 'w'.",
)
def muon_without_a_matrix():
    bound(sl.muon(0.02, where=sl.where.path("b")))
