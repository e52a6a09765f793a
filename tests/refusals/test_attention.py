"""QK-clip, told wrongly which arrays are queries and keys, and blocks of unequal sizes."""

from typing import Any

import jax
import jax.numpy as jnp

import slalom as sl

from .messages import refused

QUERIES, KEYS = {sl.where.path("q"): "q"}, {sl.where.path("k"): "k"}
MODEL = {"q": jnp.ones((4, 2)), "k": jnp.ones((4, 2))}
PARTS = {"w": jnp.ones((6, 2))}


def heads(where: Any, *, heads: int = 2, layout: Any = "oi", **shapes: tuple[int, ...]) -> Any:
    model = {name: jnp.ones(shape) for name, shape in shapes.items()}
    return sl.Optimizer(
        sl.sgd(0.1) | sl.contrib.QKClip(heads=heads, where=where, layout=layout), model
    )


def test_roles_and_heads():
    with refused(
        TypeError,
        "QKClip.where takes a mapping … got sl.where.path('q')",
        "{sl.where.path('**.wq'): 'q', sl.where.path('**.wk'): 'k'}",
    ):
        sl.contrib.QKClip(heads=2, where=sl.where.path("q"))
    with refused(
        ValueError,
        "QKClip.where has 'o'",
        "Write 'q' for queries, 'k' for keys, '4q:k:v' for … '8(2q:r)' for",
    ):
        sl.contrib.QKClip(heads=2, where={sl.where.path("q"): "o"})
    with refused(ValueError, "QKClip has no keys for 'q'", "Select them in `where` too"):
        heads(QUERIES, q=(4, 2))
    with refused(
        ValueError,
        "QKClip … `where` selects 2 of 'k' (weights), 1 of 'q' (weights)",
        "Select all layers, or none, and stacks of layers by their layout, such as 'soi'",
    ):
        heads(QUERIES | KEYS, layout="soi", q=(1, 4, 2), k=(2, 4, 2))
    with refused(ValueError, "QKClip reads 'q' as '2q:k'", "its 4 outputs are not a multiple of 3"):
        heads({sl.where.path("q"): "2q:k"}, q=(4, 2))
    with refused(ValueError, "QKClip reads 4 queries in 'q'", "cannot be divided into heads=3"):
        heads(QUERIES | KEYS, heads=3, q=(4, 2), k=(4, 2))
    with refused(
        ValueError,
        "QKClip reads 8 queries in 'q', 2 in each of 4 heads, and 6 keys in 'k'",
        "must divide the number of heads of queries",
    ):
        heads(QUERIES | KEYS, heads=4, q=(8, 2), k=(6, 2))
    with refused(
        ValueError,
        "QKClip does not know which axes of 'q', of shape (1, 2, 3, 4, 5, 6)",
        "`layout={sl.where.path('q'): 'oi'}`",
    ):
        heads(QUERIES | KEYS, layout=None, q=(1, 2, 3, 4, 5, 6), k=(4, 2))


def test_logits_places_and_blocks_of_unequal_sizes():
    with refused(
        ValueError,
        "QKClip takes `max_logits` … got (2,), (2,)",
        "of shape (1, 2), the layers that `where` selects × heads",
    ):
        heads(QUERIES | KEYS, q=(4, 2), k=(4, 2)).step(MODEL, MODEL, max_logits=[jnp.ones(2)] * 2)
    with refused(
        TypeError,
        "QKClip ('qkclip') needs 'max_logits'",
        'return `(loss, {"max_logits": S})` … train with `sl.train_step(loss_fn, has_aux=True)` … '
        "`opt.step(model, grads, max_logits=S)`",
    ):
        heads(QUERIES | KEYS, q=(4, 2), k=(4, 2)).step(MODEL, MODEL)
    clipped = sl.sgd(0.1) | sl.contrib.QKClip(heads=2, where=QUERIES | KEYS)
    with refused(
        ValueError, "'qkclip' cannot be inside `.schedule_free`", "Leave out one of the two"
    ):
        clipped.schedule_free()
    with refused(
        ValueError,
        "'graft.qkclip' cannot be inside `.graft`",
        "Write it after `.graft`: `direction.graft(magnitude) | sl.contrib.QKClip(...)`",
    ):
        clipped.graft(sl.sgd(0.1))

    unequal = "cannot read 'w' in blocks of unequal sizes, as `sl.Orthogonalize` does"
    equal = "a layout of equal blocks, or of one matrix, or split the parameter in the model"
    with refused(ValueError, f"ScaleBySoap {unequal}", f"Give it {equal}"):
        sl.ScaleBySoap(layout="(2:1o)i").init(PARTS)
    with refused(ValueError, f"ScaleByGalore {unequal}", f"Give it {equal}"):
        sl.contrib.ScaleByGalore(rank=1, layout="(2:1o)i").init(PARTS)
    with refused(ValueError, f"`.graft` {unequal}", f"Give it {equal}"):
        tx = sl.Orthogonalize(layout="(2:1o)i").graft(sl.ScaleByAdam())
        jax.eval_shape(lambda: tx.update(PARTS, tx.init(PARTS)))
    with refused(
        ValueError,
        "mup has no factor for 'w': its blocks of unequal sizes need different ones",
        '`sl.Orthogonalize(scale="spectral")`, or split the parameter in the model',
    ):
        wide = {"w": jnp.ones((12, 8))}
        sl.contrib.mup(wide, PARTS, rule=sl.Orthogonalize(), layout="(5:1o)i")
    with refused(
        ValueError,
        "'w' is given the layout '(3:2o)i', but its shape is (6, 2)",
        "6 is not a multiple of the 5 blocks of '(3:2o)'",
    ):
        sl.Orthogonalize(layout="(3:2o)i").init(PARTS)
