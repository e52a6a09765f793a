"""Codecs of state, policies for parameters, and wrappers that write parameters."""

import jax.numpy as jnp

import slalom as sl

from .messages import bound, params, refused

CODECS = (
    "'bfloat16', 'float16', 'float8_e4m3fn', 'int8', 'dynamic8', 'int4', or a codec such as "
    "`sl.codecs.int8()`"
)


def test_codecs_and_fields():
    with refused(TypeError, "Store.codec … got 'int3'", CODECS):
        sl.adam(0.1).store("int3")
    with refused(
        TypeError,
        "Store.codec … 'int4', or a codec … got slalom.codecs.blocks.int8",
        "Call it: `sl.codecs.int8(...)`",
    ):
        sl.adam(0.1).store(sl.codecs.int8)
    with refused(TypeError, "The codec of 'mu' … got 'float32'", CODECS):
        sl.adam(0.1).store({"mu": "float32"})
    with refused(
        TypeError,
        "`.store` … got sl.where.ndim(2) as a name",
        "names of fields to codecs, such as {'mu': 'bfloat16'} … `tx.store(codec, where=selector)`",
    ):
        sl.adam(0.1).store({sl.where.ndim(2): "int8"})
    with refused(
        ValueError, "`.store` names the field 'mo'", "'scale_by_adam.mu', 'scale_by_adam.nu'"
    ):
        sl.Optimizer(sl.adam(0.1).store({"mo": "int8"}), params())
    with refused(
        ValueError,
        "'scale_by_adam.nu.b' … sl.codecs.int8(companded=False) … ≥ 0",
        '`"int8"` … `"dynamic8"`',
    ):
        codec = sl.codecs.int8(companded=False)
        sl.Optimizer(sl.adam(0.1).store(codec, min_size=1), params())
    with refused(
        ValueError,
        "'store.scale_by_adam.mu.b' … sl.codecs.int8() … an inner `.store`",
        "Store each field once",
    ):
        tx = sl.adam(0.1).store("int8", min_size=1).store("int4", min_size=1)
        sl.Optimizer(tx, params())
    with refused(
        ValueError,
        "'scale_by_adam.mu.b' … 'tape' … backend 'cpu'",
        "'device', 'pinned_host', 'unpinned_host'",
    ):
        sl.Optimizer(sl.adam(0.1).store(sl.codecs.offload("tape"), min_size=1), params())
    with refused(
        TypeError,
        "cast.dtype … got 'int8'",
        "8 or 16 bits, such as 'bfloat16', 'float16' or 'float8_e4m3fn'",
    ):
        sl.codecs.cast("int8")
    with refused(
        ValueError,
        "`stored` … got 'big' … `tx.store`",
        "'signed', 'nonnegative', 'exact' or 'copy'",
    ):
        sl.fields.param_like("big")
    with refused(ValueError, "`stored` … got 'big' … `opt.rebind`", "'reduced', 'copy' or None"):
        sl.fields.per_param(stored="big")


def test_write_policies():
    half = {"w": jnp.ones((3, 2), jnp.bfloat16)}
    with refused(
        ValueError,
        "Write.policy … got 'bfloat16'",
        "'master', 'kahan', 'ecc', 'stochastic' or 'nearest'",
    ):
        sl.sgd(0.1).write("bfloat16")
    with refused(ValueError, "Write.key … got -1", "[0, 2**31) … `jax.random.key(-1)`"):
        sl.sgd(0.1).write("stochastic", key=-1)
    with refused(
        TypeError,
        '`.write("kahan")` … lost',
        "`model, opt = opt.step(model, grads)` instead of `opt.update(model, grads)` … pass its "
        "own `write` on",
    ):
        sl.Optimizer(sl.sgd(0.1).write("kahan"), half).update(half, half)
    with refused(
        ValueError,
        "`.write('ecc')` wraps … `.write('kahan')`",
        "remove one … each group of a partition",
    ):
        sl.sgd(0.1).write("kahan").every_k(2).write("ecc")
    with refused(
        ValueError,
        "`.outer(...)` … cannot be around `.write('kahan')`",
        "`tx.outer(...).write('kahan')` … in each group",
    ):
        sl.sgd(0.1).write("kahan").lookahead(5, 0.5)
    with refused(
        ValueError,
        "`.project(...)` … cannot be around `.write('kahan')`",
        "`tx.project(...).write('kahan')` … in each group",
    ):
        sl.sgd(0.1).write("kahan").project(sl.projections.simplex())
    with refused(TypeError, "Write needs 'step'", "`context=sl.Context(step=n)`"):
        tx = sl.sgd(0.1).write("stochastic")
        tx.step(half, tx.init(half), half)


def test_schedule_free_and_outer_optimizers():
    with refused(ValueError, "`.outer` and `.lookahead` … 'schedule_free'", "Leave out one"):
        sl.sgd(0.1).schedule_free().lookahead(5, 0.5)
    with refused(ValueError, "`.outer` and `.lookahead` … 'outer'", "Leave out one"):
        sl.sgd(0.1).lookahead(5, 0.5).lookahead(5, 0.5)
    with refused(ValueError, "'outer' inside `.schedule_free`", "Leave out one"):
        sl.sgd(0.1).lookahead(5, 0.5).schedule_free()
    with refused(ValueError, "Outer.optimizer contains 'average'", "`tx.outer(...).average(...)`"):
        sl.sgd(0.1).outer(sl.sgd(0.7).average(), 5)
    using = {
        "scale_by_polyak": sl.polyak_sgd(),
        "scale_by_zoom_linesearch": sl.lbfgs(),
        "scale_by_levenberg_marquardt": sl.levenberg_marquardt(),
        "scale_by_ivon": sl.contrib.ivon(0.1, 100),
        **{name: getattr(sl.sgd(0.7), name)() for name in ("sam", "maximize", "scale_loss")},
        "combine": sl.sgd(0.7).combine(sl.combine.MGDA(), ("a", "b")),
    }
    for name, optimizer in using.items():
        with refused(ValueError, f"`.outer` … '{name}' in it", "before `.outer` … `sl.sgd(0.7)`"):
            sl.sgd(0.1).outer(optimizer, 5)

    with refused(
        ValueError,
        "`.schedule_free` has `decay_where` without a `weight_decay`",
        "Add one, or remove `decay_where`",
    ):
        sl.sgd(0.1).schedule_free(decay_where=sl.where.ndim(2))
    with refused(
        ValueError,
        "`.schedule_free` has `polyak_beta` … without `polyak=True`",
        "Add it, or remove `polyak_beta`",
    ):
        sl.sgd(0.1).schedule_free(polyak_beta=0.5)
    with refused(ValueError, "ScheduleFree.average_after … got -1", "at least 0"):
        sl.sgd(0.1).schedule_free(average_after=-1)
    with refused(
        TypeError,
        "ScheduleFree … needs 'value'",
        "`opt.step(model, grads, value=loss)` … `sl.train_step` passes value",
    ):
        bound(sl.adam(1.0).schedule_free(polyak=True)).step(params(), params())
    with refused(
        ValueError,
        "'every_k' inside `.schedule_free(polyak=True)`",
        "`tx.schedule_free(polyak=True).every_k(...)`",
    ):
        sl.adam(1.0).every_k(2).schedule_free(polyak=True)


def test_mechanize_and_graft():
    with refused(
        ValueError,
        "'keep_initial_norm' cannot be inside `.mechanize`",
        "Write it after `.mechanize`: `tx.mechanize(...) | sl.KeepInitialNorm(...)`",
    ):
        (sl.sgd(1.0) | sl.KeepInitialNorm()).mechanize()
    with refused(ValueError, "'outer' inside `.mechanize`", "`tx.mechanize(...).outer(...)`"):
        sl.sgd(1.0).lookahead(2, 0.5).mechanize()
    with refused(
        ValueError, "'average' inside `.graft`", "`direction.graft(magnitude).average(...)`"
    ):
        sl.sgd(0.1).graft(sl.adam(0.1).average())
    with refused(TypeError, "Graft.magnitude … got 'adam' of type str", "a transform"):
        sl.sgd(0.1).graft("adam")
    with refused(TypeError, "Outer.optimizer … got 0.7 of type float", "a transform"):
        sl.sgd(0.1).outer(0.7, 5)
    with refused(ValueError, "`.outer` … sl.ScaleByAdam()", "`sl.sgd(0.7)`"):
        bound(sl.sgd(0.1).outer(sl.ScaleByAdam(), 5))
