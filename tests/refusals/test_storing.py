"""State that cannot be stored."""

import slalom as sl

from .messages import params, refused

CODECS = (
    "'bfloat16', 'float16', 'float8_e4m3fn', 'int8', 'dynamic8', 'int4', or a codec such as "
    "`sl.codecs.int8()`"
)


def test_codecs_and_fields():
    with refused(TypeError, "Store.codec … got 'int3'", CODECS):
        sl.adam(0.1).store("int3")
    with refused(
        TypeError,
        "Store.codec … 'int4', or a codec … got slalom.codecs.integers.int8",
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
        ValueError, "`stored` … got 'big' … `tx.store`", "'signed', 'nonnegative' or 'exact'"
    ):
        sl.fields.param_like("big")
