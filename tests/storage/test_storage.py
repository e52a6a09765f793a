"""State that rests in codecs: `tx.store` and `sl.codecs`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.shapes import gpt2
from benchmarks.stored_scratch import scratch_per_parameter
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import slalom as sl
from helpers import after_steps, assert_close, assert_same_bits, kernels, sampled, slow_except
from slalom._core.engine.encoded import Encoded, random_bits, seeds_of

C = sl.codecs
# The largest error, as a share of the largest number (of a field ≥ 0, of the roots).
BOUNDS = {
    C.int8(): (0.008, 1 / 255),
    C.dynamic8(): (0.0071, 0.0111),
    C.int4(): (0.207, 1 / 16),
    C.cast("bfloat16"): (2**-8, 2**-8),
    C.cast("float16"): (2**-11, 2**-10),
    C.cast("float8_e4m3fn"): (2**-3, 2**-3),
}
CODECS = pytest.mark.parametrize("codec", slow_except(BOUNDS, C.int8()), ids=repr)


def matrix(rows=8, width=300, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def round_trip(x, codec, nonnegative, bits=False):
    form = Encoded({}, codec, x.shape, x.dtype, nonnegative)
    seed = seeds_of(["x"], jnp.int32(1))["x"] if bits else None
    return form.encode(x, seed).decode()


@CODECS
@pytest.mark.parametrize("nonnegative", [False, True])
def test_errors_are_bounded_at_any_magnitude(codec, nonnegative):
    for magnitude in (1e-30, 1e-15, 1e-7, 1.0, 1e15, 1e30):
        x = matrix() * np.float32(magnitude)
        x = np.abs(x) if nonnegative else x
        root = np.sqrt if nonnegative else np.asarray
        for bits in (False, True):
            y = np.asarray(round_trip(x, codec, nonnegative, bits))
            error = np.max(np.abs(root(y) - root(x))) / np.max(np.abs(root(x)))
            assert error <= 1.001 * BOUNDS[codec][nonnegative]
            if nonnegative:
                assert np.all(y[x > 0] > 0)


@CODECS
@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(exponents=st.lists(st.floats(-30, 30), min_size=64, max_size=64))
def test_mixed_magnitudes_stay_finite_and_keep_their_sign(codec, exponents):
    x = (10.0 ** np.array(exponents)).astype(np.float32).reshape(1, 64)
    for nonnegative in (False, True):
        y = np.asarray(round_trip(x, codec, nonnegative))
        assert np.all(np.isfinite(y))
        assert np.all(y >= 0)
        # A block has at most 64 entries here that matter, of which the largest is kept.
        np.testing.assert_allclose(np.max(y), np.max(x), rtol=0.3)


@pytest.mark.slow
@CODECS
def test_zeros_stay_zeros_huge_numbers_are_kept_and_what_is_not_finite_stays_so(codec):
    # A float8 has three digits, of the root here.
    rtol = 0.15 if codec == C.cast("float8_e4m3fn") else 0.01
    for nonnegative in (False, True):
        x = np.zeros((2, 600), np.float32)
        assert not np.any(round_trip(x, codec, nonnegative))
        for size in np.float32([2.0**126, 2.0**127, 3e38]):
            x[0, :2] = size, 0.3 * size
            np.testing.assert_allclose(round_trip(x, codec, nonnegative)[0, 0], size, rtol=rtol)
        x[:] = 1
        for bad in (np.nan, np.inf) if nonnegative else (np.nan, np.inf, -np.inf):
            x[0, 3] = bad
            y = np.asarray(round_trip(x, codec, nonnegative))
            assert np.isnan(y[0, 3]) or y[0, 3] == bad
            assert np.all(np.isfinite(y[1]))  # another block


@pytest.mark.parametrize(
    "codec", slow_except([C.int8(), C.dynamic8(), C.int4(), C.cast("float8_e4m3fn")], C.int8())
)
def test_a_positive_mean_of_squares_stays_positive(codec):
    x = jnp.ones((4, 256)).at[:, 1:].set(1e-12)
    form = Encoded({}, codec, x.shape, x.dtype, True)
    for seed in (None, seeds_of(["x"], jnp.int32(1))["x"]):
        assert jnp.all(form.encode(x, seed).decode() > 0)


@pytest.mark.slow
def test_codecs_follow_what_is_stored_share_kernels_and_need_no_scratch():
    whole = random_bits(seeds_of(["w"], jnp.int32(7))["w"], (6, 50))
    bits = np.unpackbits(np.asarray(whole).view(np.uint8).reshape(-1, 4), axis=1)
    np.testing.assert_allclose(np.mean(bits, axis=0), 0.5, atol=0.15)

    stored, _ = run(sl.adam(0.1).store({"mu": "bfloat16"}, min_size=1))
    own, _ = run(sl.adam(0.1, mu_dtype="bfloat16"))
    assert_same_bits(stored, own)

    assert scratch_of(sl.lion(1e-3).store("bfloat16"), EQUAL) <= 0.04
    assert scratch_per_parameter(CLIPPED.store("int8"), jax.eval_shape(gpt2)) <= 3.5
    tx, shape = sl.adamw(1e-3).store("int8"), (256, 1024)
    assert kernels(tx, [shape] * 6) == kernels(tx, [shape] * 3)


PARAMS = {"w": jnp.asarray(matrix(64, 96) * 0.1), "b": jnp.ones(96)}
GRADS = jax.tree.map(lambda p: 0.1 * p + 0.01, PARAMS)
matrices = sl.where.ndim(min=2)


def run(tx, steps=4, params=PARAMS, grads=GRADS):
    step = jax.jit(lambda params, opt: opt.step(params, grads))
    opt = sl.Optimizer(tx, params)
    for _ in range(steps):
        params, opt = step(params, opt)
    return params, opt


def test_other_fields_and_small_leaves_stay_and_bytes_are_counted():
    def shapes(tx):
        return jax.eval_shape(lambda: sl.Optimizer(tx, PARAMS)).state.inner

    tx = sl.adam(0.1).average(0.9)
    state = shapes(tx.store("int8", min_size=1))
    assert state.average["w"].dtype == jnp.float32
    assert isinstance(state.inner[0].mu["w"], C.Encoded)
    # Unless they are named.
    state = shapes(tx.store({"average": "int8"}, min_size=1))
    assert isinstance(state.average["w"], C.Encoded)
    assert state.inner[0].mu["w"].dtype == jnp.float32

    # A floating dtype changes no shape.
    half = jax.tree.leaves(shapes(sl.adam(0.1).store("bfloat16", min_size=1)))
    assert [x.shape for x in half] == [x.shape for x in jax.tree.leaves(sl.adam(0.1).init(PARAMS))]

    state = shapes(sl.lion(0.1).store("int8", min_size=1000))[0]
    assert isinstance(state.mu["w"], C.Encoded)
    assert state.mu["b"].dtype == jnp.float32
    state = shapes(sl.lion(0.1).store("int8", where=~matrices, min_size=1))[0]
    assert isinstance(state.mu["b"], C.Encoded)
    assert state.mu["w"].dtype == jnp.float32

    opt = sl.Optimizer(sl.adam(0.1).store("int8"), PARAMS)
    rows = opt.describe(PARAMS).to_dict()
    n = PARAMS["w"].size
    assert rows["w"]["state_bytes"] == 2 * (n + 2 * n // 32)
    assert rows["b"]["state_bytes"] == 2 * 4 * 96

    for first in (True, False):
        assert sl.tree.after(jnp.float32(3), [jnp.array([first, True])]) == 3


STORED_AND_WRITTEN = {
    "inside": lambda tx, store, write: write(store(tx)),
    "outside": lambda tx, store, write: store(write(tx)),
    "inside, paced": lambda tx, store, write: write(store(tx)).every_k(2),
    "outside, paced": lambda tx, store, write: store(write(tx).every_k(2)),
    "paced between": lambda tx, store, write: store(write(tx.every_k(2))),
    "each group": lambda tx, store, write: store(write(tx).partition({matrices: write(tx)})),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["kahan", "stochastic"])
def test_parameters_are_written_the_same_inside_and_outside(policy):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), GRADS)

    def after(place):
        tx = STORED_AND_WRITTEN[place](
            sl.lion(1e-3),
            # Its accumulator would be rounded outside of `.every_k` only.
            lambda tx: tx.store({"mu": "int8"}, min_size=1),
            lambda tx: tx.write(policy),
        )
        params, opt = run(tx, params=half, grads=grads)
        return jax.tree.leaves((params, opt.eval_params(params, full_precision=True)))

    pairs = [("inside", "outside"), ("inside", "each group"), ("inside, paced", "outside, paced")]
    if policy != "stochastic":  # its bits follow the clock at the place of `.write`
        pairs.append(("inside, paced", "paced between"))
    found = {place: after(place) for place in STORED_AND_WRITTEN}
    for a, b in pairs:
        for x, y in zip(found[a], found[b], strict=True):
            assert jnp.array_equal(x, y), (a, b)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["master", "kahan", "ecc"])
def test_policies_write_parameters_of_every_shape_beside_stored_state(policy):
    shapes = {"matrix": (8, 96), "narrow": (64, 8), "kernel": (4, 4, 3, 3), "one": (1,), "": ()}
    params = {name: jnp.full(shape, 0.5, jnp.bfloat16) for name, shape in shapes.items()}
    # Codecs join the axes of narrow leaves, but parameters keep their shape.
    tx = sl.adam(0.1).if_finite().store("bfloat16", min_size=1)
    blocks = sl.adam(0.1).if_finite().store({"mu": "int8", "nu": "bfloat16"}, min_size=1)
    found = []
    for how in (tx, blocks):
        model, opt = after_steps(how.write(policy), 2, params, params)
        assert {name: x.shape for name, x in model.items()} == shapes
        found.append(opt.eval_params(model, full_precision=True))
    # All gradients are equal, so int8 scales each block to them.
    assert_close(*found, rtol=0.02)


@pytest.mark.slow
def test_rebind_and_reset_keep_what_is_stored():
    params, opt = run(sl.adam(0.1))
    stored, report = opt.rebind(params, tx=sl.adam(0.1).store("int8"))
    assert report.recoded == ("store.scale_by_adam.mu.w", "store.scale_by_adam.nu.w")
    assert "recoded" in repr(report)
    mu, before = stored.state_of("scale_by_adam").mu["w"], opt.state_of("scale_by_adam").mu["w"]
    np.testing.assert_allclose(mu.decode(), before, atol=0.008 * float(jnp.max(jnp.abs(before))))
    again, report = stored.rebind(params)
    assert report.recoded == ()
    codes = again.state_of("scale_by_adam").mu["w"].arrays["codes"]
    assert jnp.array_equal(codes, mu.arrays["codes"])
    back, report = stored.rebind(params, tx=sl.adam(0.1))
    assert len(report.recoded) == 2
    assert jnp.array_equal(back.state_of("scale_by_adam").mu["w"], mu.decode())

    tx = sl.adam(0.1).store("int8")
    params, opt = run(tx)
    fresh = opt.reset(params, sl.where.path("w"))
    assert not jnp.any(fresh.state_of("scale_by_adam").mu["w"].decode())
    assert jnp.any(fresh.state_of("scale_by_adam").mu["b"])
    trained, _ = fresh.step(params, GRADS)
    assert all(jnp.all(jnp.isfinite(p)) for p in jax.tree.leaves(trained))


@pytest.mark.slow
def test_stored_state_is_partitioned_and_may_be_on_the_host():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    home = NamedSharding(mesh, P())
    params = jax.tree.map(lambda x: jax.device_put(x, home), PARAMS)
    grads = jax.tree.map(lambda x: jax.device_put(x, home), GRADS)
    opt, report = sl.Optimizer(sl.adam(0.1).store("int8"), params).shard_state(mesh)
    mu = opt.state_of("scale_by_adam").mu["w"]
    assert mu.arrays["codes"].sharding.spec == mu.arrays["scales"].sharding.spec == P("data")
    assert "store.scale_by_adam.mu.w.codes" in report.partitioned
    new, opt = opt.step(params, grads)
    assert opt.state_of("scale_by_adam").mu["w"].arrays["codes"].sharding.spec == P("data")
    expected, _ = run(sl.adam(0.1).store("int8"), 1)
    np.testing.assert_allclose(new["w"], expected["w"], rtol=1e-5, atol=1e-7)

    tx = sl.adam(0.1).store(C.offload("pinned_host"), min_size=1)
    params, opt = run(tx)
    mu = opt.state_of("scale_by_adam").mu["w"]
    assert mu.sharding.memory_kind == "pinned_host"
    expected, _ = run(sl.adam(0.1))
    np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-6)
    both = sl.adam(0.1).store("int8").store(C.offload("pinned_host"))
    params, opt = run(both)
    codes = opt.state_of("scale_by_adam").mu["w"].arrays["codes"]
    assert codes.sharding.memory_kind == "pinned_host"


CLIPPED = sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)
SCRATCH = {
    "block codec": CLIPPED.store("int8"),
    "inside of every_k": CLIPPED.store("int8").every_k(4),
    "outside of if_finite": CLIPPED.if_finite().store("int8"),
    "outside of every_k": sl.adamw(1e-3).every_k(4).store("int8"),
    "outside of every_k, clipped": CLIPPED.every_k(4).store("int8"),
    "after other links": sl.adafactor(1e-3, momentum=0.9).store("int8"),
}
EQUAL = [(1536, 1024)] * 8


def scratch_of(tx, shapes):
    """The bytes of scratch memory of a compiled step for each parameter."""
    params = {f"w{i:02}": jax.ShapeDtypeStruct(s, jnp.float32) for i, s in enumerate(shapes)}
    return scratch_per_parameter(tx, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRATCH)
def test_scratch_is_that_of_a_few_leaves(name):
    assert scratch_of(SCRATCH[name], EQUAL) <= 3.5


TRAINED = {
    "adamw": lambda rate: sl.adamw(rate * 1e-2),
    "lion": lambda rate: sl.lion(rate * 2e-3),
    "momentum": lambda rate: sl.sgd(rate * 0.1, momentum=0.9),
    "adafactor": lambda rate: sl.adafactor(rate * 3e-2, momentum=0.9),
}
# How far the loss may be from that in float32, as a share of it.
DISTANCES = {"bfloat16": 0.01, "float16": 0.002, "float8_e4m3fn": 0.05}
DISTANCES |= {"int8": 0.02, "dynamic8": 0.02}


def regression_loss(model, x, y):
    hidden = jnp.tanh(jnp.tanh(x @ model["in"]) @ model["mid"])
    return jnp.mean((hidden @ model["out"] - y) ** 2)


def final_loss(tx, steps=300):
    """The loss of a small network that is trained on four functions of eight numbers."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"in": (8, 64), "mid": (64, 64), "out": (64, 4)}
    named = zip(shapes.items(), keys, strict=False)
    model = {x: jax.random.normal(key, n) / np.sqrt(n[0]) for (x, n), key in named}
    x = jax.random.normal(keys[3], (8, 32, 8))
    y = jnp.stack([jnp.sin(2 * x[..., 0]), x[..., 1] * x[..., 2], jnp.abs(x[..., 3])], axis=-1)
    y = jnp.concatenate([y, jnp.tanh(x[..., 4:5] + x[..., 5:6])], axis=-1)

    def step(carry, i):
        grads = jax.grad(regression_loss)(carry[0], x[i % 8], y[i % 8])
        return carry[1].step(carry[0], grads), None

    start = model, sl.Optimizer(tx, model)
    (model, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(steps)))(start)
    return float(regression_loss(model, x, y)), float(regression_loss(start[0], x, y))


@pytest.mark.parametrize("name", sampled(TRAINED))
def test_training_stays_near_float32(name):
    tx = TRAINED[name](sl.schedules.cosine_decay(1.0, 300))
    exact, first = final_loss(tx)
    assert exact < 0.4 * first
    for codec, most in DISTANCES.items():
        if codec in ("bfloat16", "int8") or name == "lion":
            loss, _ = final_loss(tx.store(codec, min_size=1))
            assert abs(loss / exact - 1) <= most, (codec, loss, exact)


SMALL = {
    "equal": [(512, 512)] * 10,
    "many": [(128, 128)] * 80,
    "of many widths": [(256, 128 + 32 * i) for i in range(12)],
    "of many ranks": [(384, 384), (3, 3, 32, 128), (8192,), (200, 300)] * 10,
}
PLACES = {"alone": sl.adamw(1e-3), "in a branch": CLIPPED.if_finite()}
SCALED = [*itertools.product(PLACES, SMALL)]


@pytest.mark.parametrize("case", sampled(SCALED, ("alone", "equal")), ids=", ".join)
def test_scratch_of_small_leaves(case):
    assert scratch_of(PLACES[case[0]].store("int8"), SMALL[case[1]]) <= 3.5
