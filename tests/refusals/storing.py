"""State that cannot be stored."""

import slalom as sl

from ._table import params, refused

CODECS = (
    "must be one of 'bfloat16', 'float16', 'float8_e4m3fn', 'int8', 'dynamic8', 'int4', or a codec "
    "such as `sl.codecs.int8()`, got "
)


@refused(TypeError, f"Store.codec {CODECS}'int3'.")
def an_unknown_codec():
    sl.adam(0.1).store("int3")


@refused(
    TypeError,
    f"Store.codec {CODECS}slalom.codecs.integers.int8. Call it: `sl.codecs.int8(...)`.",
)
def a_codec_that_was_not_called():
    sl.adam(0.1).store(sl.codecs.int8)


@refused(TypeError, f"The codec of 'mu' {CODECS}'float32'.")
def an_unknown_codec_of_a_field():
    sl.adam(0.1).store({"mu": "float32"})


@refused(
    ValueError,
    "`.store` names the field 'mo', which is not in the state of this transform. Its fields: "
    "'scale_by_adam.mu', 'scale_by_adam.nu'.",
)
def an_unknown_field():
    sl.Optimizer(sl.adam(0.1).store({"mo": "int8"}), params())


@refused(
    ValueError,
    "'scale_by_adam.nu.b' cannot be stored: sl.codecs.int8(companded=False) is a linear map, which "
    "cannot hold a field that must stay ≥ 0, such as a mean of squares: small entries would become "
    '0, and updates are divided by their roots. Write `"int8"`, which stores the root, or '
    '`"dynamic8"`.',
)
def a_linear_map_of_a_mean_of_squares():
    codec = sl.codecs.int8(companded=False)
    sl.Optimizer(sl.adam(0.1).store(codec, min_size=1), params())


@refused(
    ValueError,
    "'store.scale_by_adam.mu.b' is stored in sl.codecs.int8() by an inner `.store` already. Store "
    "each field once.",
)
def a_field_that_is_stored_twice():
    tx = sl.adam(0.1).store("int8", min_size=1).store("int4", min_size=1)
    sl.Optimizer(tx, params())


@refused(
    ValueError,
    "'scale_by_adam.mu.b' cannot be stored in the memory 'tape', which the backend 'cpu' has not. "
    "Its memories: 'device', 'pinned_host', 'unpinned_host'.",
)
def a_memory_that_is_not_there():
    sl.Optimizer(sl.adam(0.1).store(sl.codecs.offload("tape"), min_size=1), params())


@refused(
    TypeError,
    "cast.dtype must be a floating dtype of 8 or 16 bits, such as 'bfloat16', 'float16' or "
    "'float8_e4m3fn', got 'int8'.",
)
def a_cast_to_integers():
    sl.codecs.cast("int8")


@refused(
    ValueError,
    "`stored` must be 'signed', 'nonnegative' or 'exact', got 'big': how `tx.store` may encode the "
    "field.",
)
def a_field_with_an_unknown_declaration():
    sl.fields.param_like("big")
