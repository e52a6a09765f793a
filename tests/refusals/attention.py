"""`sl.QKClip`, told wrongly which arrays are queries and keys, and blocks of unequal sizes."""

from typing import Any

import jax.numpy as jnp

import slalom as sl

from ._table import refused

QUERIES, KEYS = {sl.where.path("q"): "q"}, {sl.where.path("k"): "k"}
MODEL = {"q": jnp.ones((4, 2)), "k": jnp.ones((4, 2))}
PARTS = {"w": jnp.ones((6, 2))}


def heads(where: Any, *, heads: int = 2, layout: Any = "oi", **shapes: tuple[int, ...]) -> Any:
    model = {name: jnp.ones(shape) for name, shape in shapes.items()}
    return sl.Optimizer(sl.sgd(0.1) | sl.QKClip(heads=heads, where=where, layout=layout), model)


@refused(
    TypeError,
    "QKClip.where takes a mapping … got sl.where.path('q')",
    "{sl.where.path('**.wq'): 'q', sl.where.path('**.wk'): 'k'}",
    unchecked=True,
)
def a_selector_without_a_role():
    sl.QKClip(heads=2, where=sl.where.path("q"))


@refused(
    ValueError,
    "QKClip.where has 'o'",
    "Write 'q' for queries, 'k' for keys, '4q:k:v' for … '8(2q:r)' for",
)
def an_unknown_role():
    sl.QKClip(heads=2, where={sl.where.path("q"): "o"})


@refused(ValueError, "QKClip has no keys for 'q'", "Select them in `where` too")
def queries_without_keys():
    heads(QUERIES, q=(4, 2))


@refused(
    ValueError,
    "QKClip … `where` selects 2 of 'k' (weights), 1 of 'q' (weights)",
    "Select all layers, or none, and stacks of layers by their layout, such as 'soi'",
)
def keys_of_more_layers_than_queries():
    heads(QUERIES | KEYS, layout="soi", q=(1, 4, 2), k=(2, 4, 2))


@refused(ValueError, "QKClip reads 'q' as '2q:k'", "its 4 outputs are not a multiple of 3")
def outputs_that_cannot_be_divided_into_parts():
    heads({sl.where.path("q"): "2q:k"}, q=(4, 2))


@refused(ValueError, "QKClip reads 4 queries in 'q'", "cannot be divided into heads=3")
def queries_that_cannot_be_divided_into_heads():
    heads(QUERIES | KEYS, heads=3, q=(4, 2), k=(4, 2))


@refused(
    ValueError,
    "QKClip reads 8 queries in 'q', 2 in each of 4 heads, and 6 keys in 'k'",
    "must divide the number of heads of queries",
)
def keys_of_three_heads_for_queries_of_four():
    heads(QUERIES | KEYS, heads=4, q=(8, 2), k=(6, 2))


@refused(
    ValueError,
    "QKClip does not know which axes of 'q', of shape (1, 2, 3, 4, 5, 6)",
    "`layout={sl.where.path('q'): 'oi'}`",
)
def heads_without_a_layout():
    heads(QUERIES | KEYS, layout=None, q=(1, 2, 3, 4, 5, 6), k=(4, 2))


@refused(
    ValueError,
    "QKClip takes `max_logits` … got (2,), (2,)",
    "of shape (1, 2), the layers that `where` selects × heads",
)
def logits_of_too_many_layers():
    heads(QUERIES | KEYS, q=(4, 2), k=(4, 2)).step(MODEL, MODEL, max_logits=[jnp.ones(2)] * 2)


@refused(
    TypeError,
    "QKClip ('qkclip') needs 'max_logits'",
    'return `(loss, {"max_logits": S})` … train with `sl.train_step(loss_fn, has_aux=True)` … '
    "`opt.step(model, grads, max_logits=S)`",
)
def a_clip_without_logits():
    heads(QUERIES | KEYS, q=(4, 2), k=(4, 2)).step(MODEL, MODEL)


@refused(
    ValueError,
    "'qkclip' cannot be inside `.schedule_free`",
    "Leave out one of the two",
)
def a_clip_inside_of_schedule_free():
    (sl.sgd(0.1) | sl.QKClip(heads=2, where=QUERIES | KEYS)).schedule_free()


@refused(
    ValueError,
    "'graft.qkclip' cannot be inside `.graft`",
    "Write it after `.graft`: `direction.graft(magnitude) | sl.QKClip(...)`",
)
def a_clip_inside_of_a_graft():
    (sl.sgd(0.1) | sl.QKClip(heads=2, where=QUERIES | KEYS)).graft(sl.sgd(0.1))


@refused(
    ValueError,
    "ScaleBySoap cannot read 'w' in blocks of unequal sizes, as `sl.Orthogonalize` does",
    "Give it a layout of equal blocks, or of one matrix, or split the parameter in the model",
)
def unequal_blocks_for_a_rule_of_equal_ones():
    sl.ScaleBySoap(layout="(2:1o)i").init(PARTS)


@refused(
    ValueError,
    "ScaleByGalore cannot read 'w' in blocks of unequal sizes, as `sl.Orthogonalize` does",
    "Give it a layout of equal blocks, or of one matrix, or split the parameter in the model",
)
def unequal_blocks_for_a_rule_of_low_rank():
    sl.ScaleByGalore(rank=1, layout="(2:1o)i").init(PARTS)


@refused(
    ValueError,
    "mup has no factor for 'w': its blocks of unequal sizes need different ones",
    '`sl.Orthogonalize(scale="spectral")`, or split the parameter in the model',
)
def unequal_blocks_of_different_factors():
    wide = {"w": jnp.ones((12, 8))}
    sl.mup(wide, PARTS, rule=sl.Orthogonalize(), layout="(5:1o)i")


@refused(
    ValueError,
    "`.graft` cannot read 'w' in blocks of unequal sizes, as `sl.Orthogonalize` does",
    "Give it a layout of equal blocks, or of one matrix, or split the parameter in the model",
)
def unequal_blocks_in_a_graft():
    tx = sl.Orthogonalize(layout="(2:1o)i").graft(sl.ScaleByAdam())
    tx.update(PARTS, tx.init(PARTS))


@refused(
    ValueError,
    "'w' is given the layout '(3:2o)i', but its shape is (6, 2)",
    "6 is not a multiple of the 5 blocks of '(3:2o)'",
)
def unequal_blocks_that_do_not_divide():
    sl.Orthogonalize(layout="(3:2o)i").init(PARTS)
