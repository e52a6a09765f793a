"""State that cannot be stored."""

import slalom as sl

from ._table import params, refused

CODECS = (
    "'bfloat16', 'float16', 'float8_e4m3fn', 'int8', 'dynamic8', 'int4', or a codec such as "
    "`sl.codecs.int8()`"
)


@refused(TypeError, "Store.codec … got 'int3'", CODECS)
def an_unknown_codec():
    sl.adam(0.1).store("int3")


@refused(
    TypeError,
    "Store.codec … 'int4', or a codec … got slalom.codecs.integers.int8",
    "Call it: `sl.codecs.int8(...)`",
)
def a_codec_that_was_not_called():
    sl.adam(0.1).store(sl.codecs.int8)


@refused(TypeError, "The codec of 'mu' … got 'float32'", CODECS)
def an_unknown_codec_of_a_field():
    sl.adam(0.1).store({"mu": "float32"})


@refused(
    TypeError,
    "`.store` … got sl.where.ndim(2) as a name",
    "names of fields to codecs, such as {'mu': 'bfloat16'} … `tx.store(codec, where=selector)`",
    unchecked=True,
)
def a_selector_as_the_name_of_a_field():
    sl.adam(0.1).store({sl.where.ndim(2): "int8"})


@refused(ValueError, "`.store` names the field 'mo'", "'scale_by_adam.mu', 'scale_by_adam.nu'")
def an_unknown_field():
    sl.Optimizer(sl.adam(0.1).store({"mo": "int8"}), params())


@refused(
    ValueError,
    "'scale_by_adam.nu.b' … sl.codecs.int8(companded=False) … ≥ 0",
    '`"int8"` … `"dynamic8"`',
)
def a_linear_map_of_a_mean_of_squares():
    codec = sl.codecs.int8(companded=False)
    sl.Optimizer(sl.adam(0.1).store(codec, min_size=1), params())


@refused(
    ValueError,
    "'store.scale_by_adam.mu.b' … sl.codecs.int8() … an inner `.store`",
    "Store each field once",
)
def a_field_that_is_stored_twice():
    tx = sl.adam(0.1).store("int8", min_size=1).store("int4", min_size=1)
    sl.Optimizer(tx, params())


@refused(
    ValueError,
    "'scale_by_adam.mu.b' … 'tape' … backend 'cpu'",
    "'device', 'pinned_host', 'unpinned_host'",
)
def a_memory_that_is_not_there():
    sl.Optimizer(sl.adam(0.1).store(sl.codecs.offload("tape"), min_size=1), params())


@refused(
    TypeError,
    "cast.dtype … got 'int8'",
    "8 or 16 bits, such as 'bfloat16', 'float16' or 'float8_e4m3fn'",
)
def a_cast_to_integers():
    sl.codecs.cast("int8")


@refused(ValueError, "`stored` … got 'big' … `tx.store`", "'signed', 'nonnegative' or 'exact'")
def a_field_with_an_unknown_declaration():
    sl.fields.param_like("big")
