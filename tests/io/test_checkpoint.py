"""Checkpoints: what is saved comes back, and every difference is reported by path."""

import json
import subprocess
import sys
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slalom as sl
from helpers import assert_same_bits, kind_of, mlp, slow_except

MODEL = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3)}
GRADS = jax.tree.map(lambda p: 0.3 * p + 0.1, MODEL)


def blank(tree):
    """The same tree with zeros, as a new run of the program has it."""

    def zeros(x):
        # `jnp.zeros_like` compiles a program for every shape and dtype.
        return jax.device_put(np.zeros(x.shape, x.dtype)) if eqx.is_array(x) else x

    return jax.tree.map(zeros, tree)


def after_steps(tx, n=3, model=MODEL, grads=GRADS):
    opt = sl.Optimizer(tx, model)
    for _ in range(n):
        model, opt = opt.step(model, grads)
    return model, opt


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.safetensors"


# --- what is saved --------------------------------------------------------------------------


def test_a_model_and_its_optimizer_come_back_by_name(path):
    model = mlp(depth=1)
    grads = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_inexact_array))
    model, opt = after_steps(sl.ClipByGlobalNorm(1.0) | sl.adam(0.1), 2, model, grads)
    sl.checkpoint.save(path, model=model, opt=opt)

    stored = safetensors.numpy.load_file(path)
    assert "model.layers.0.weight" in stored
    np.testing.assert_array_equal(
        stored["opt.scale_by_adam.mu.layers.0.weight"],
        opt.state_of("scale_by_adam").mu.layers[0].weight,
    )
    fresh = mlp(1, depth=1)
    loaded = sl.checkpoint.load(
        path, model=fresh, opt=sl.Optimizer(sl.ClipByGlobalNorm(1.0) | sl.adam(0.1), fresh)
    )
    assert list(loaded) == ["model", "opt"]
    assert loaded.report.fits
    assert_same_bits(loaded["model"], model)
    assert_same_bits(loaded["opt"], opt)
    assert kind_of(loaded["opt"]) == kind_of(opt)


DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16"),
    *("float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e3m4"),
    *("float8_e8m0fnu", "int4", "uint4"),
]


def test_every_dtype_survives_to_the_last_bit(path):
    def sample(name, shape):
        numbers = np.arange(np.prod(shape)).reshape(shape) % 7
        return jax.device_put(numbers.astype(jnp.dtype(name)))

    shapes = ((2, 3), (), (0, 2))
    tree = {name: [sample(name, shape) for shape in shapes] for name in DTYPES}
    special = jnp.array([jnp.nan, -jnp.nan, jnp.inf, -0.0, 1e-45], "float32")
    tree["special"] = jax.lax.bitcast_convert_type(special, jnp.float32)
    sl.checkpoint.save(path, model=tree)
    assert_same_bits(sl.checkpoint.load(path, model=blank(tree))["model"], tree)


@pytest.mark.usefixtures("x64")
def test_double_precision_survives(path):
    tree = {
        "f": jnp.array([1 / 3, -0.0]),
        "z": jnp.array([[1 / 3 + 2j], [-0.0 - 1j]]),
        "scalar": jnp.array(1 / 3 + 1j),
        "empty": jnp.zeros((0, 3), complex),
        "i": jnp.array([2**62 + 1]),
    }
    sl.checkpoint.save(path, model=tree)
    assert_same_bits(sl.checkpoint.load(path, model=blank(tree))["model"], tree)
    dtypes = json.loads(sl.checkpoint.header(path)["dtypes"])
    assert dtypes == dict.fromkeys(("model.z", "model.scalar", "model.empty"), "complex128")
    assert safetensors.numpy.load_file(path)["model.z"].shape == (2, 1, 2)


def test_numpy_arrays_come_back_as_numpy_arrays(path):
    tree = {
        "wide": np.array([1 / 3]),
        "big": np.arange(3, dtype=">f4"),
        "scalar": np.float64(1 / 3),
        "strided": np.arange(6.0).reshape(2, 3)[:, ::2],
        "half": np.ones(2, ml_dtypes.bfloat16),
    }
    sl.checkpoint.save(path, model=tree)
    like = jax.tree.map(lambda x: np.zeros_like(x) if x.ndim else type(x)(0), tree)
    loaded = sl.checkpoint.load(path, model=like)["model"]
    for name, x in tree.items():
        assert type(loaded[name]) is type(x)
        assert loaded[name].dtype.name == x.dtype.name
        np.testing.assert_array_equal(loaded[name], x)
    loaded["wide"][0] = 1  # its own memory, to be written to


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_survive_with_their_implementation(path, impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 2)
    sl.checkpoint.save(path, key=keys, raw=jax.random.PRNGKey(1))
    blank = jax.random.split(jax.random.key(0, impl=impl), 2)
    loaded = sl.checkpoint.load(path, key=blank, raw=jax.random.PRNGKey(0))
    assert loaded["key"].dtype == keys.dtype
    assert_same_bits(loaded["key"], keys)
    assert_same_bits(loaded["raw"], jax.random.PRNGKey(1))


def test_keys_of_another_implementation_do_not_fit(path):
    sl.checkpoint.save(path, key=jax.random.key(3))
    with pytest.raises(sl.checkpoint.MismatchError, match=r"key is key<threefry2x32> in the file"):
        sl.checkpoint.load(path, key=jax.random.key(3, impl="rbg"))


def test_batch_norm_frozen_layers_and_a_loader_come_back(path):
    def make(seed):
        key = jax.random.key(seed)
        net, state = eqx.nn.make_with_state(eqx.nn.Sequential)(
            [
                eqx.nn.Linear(2, 3, key=key),
                eqx.nn.BatchNorm(3, axis_name="batch", mode="batch"),
                eqx.nn.Dropout(0.1 + 0.1 * seed),
            ]
        )
        return net, state, sl.Optimizer(sl.adam(0.1), net, trainable=sl.where.path("layers.1.**"))

    def apply(net, state, x):
        axes = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
        return jax.vmap(lambda x, s: net(x, s, key=jax.random.key(0)), **axes)(x, state)

    net, state, opt = make(0)
    _, state = apply(net, state, jnp.arange(8.0).reshape(4, 2))
    bits = np.random.default_rng(5)
    loader = {
        "epoch": 3,
        "fraction": 0.1,
        "shuffle": True,
        "name": "digits",
        "best": float("inf"),
        "none": None,
        "phase": 1 + 2j,
        "generator": bits.bit_generator.state,
        "order": np.arange(4),
    }
    sl.checkpoint.save(path, model=net, opt=opt, state=state, loader=loader)

    net2, state2, opt2 = make(1)
    start = jax.tree.map(lambda x: type(x)() if not hasattr(x, "shape") else 0 * x, loader)
    loaded = sl.checkpoint.load(path, model=net2, opt=opt2, state=state2, loader=start)
    assert_same_bits(loaded["model"].layers[0], net.layers[0])
    assert loaded["model"].layers[2].p == 0.2  # numbers in the model belong to the program
    assert_same_bits(jax.tree.leaves(loaded["state"]), jax.tree.leaves(state))
    np.testing.assert_array_equal(loaded["loader"].pop("order"), loader.pop("order"))
    assert loaded["loader"] == loader
    found = jax.tree.map(type, loaded["loader"])
    assert found == jax.tree.map(type, loader)
    assert json.loads(sl.checkpoint.header(path)["values"])["loader.epoch"] == 3


def test_several_optimizers_in_one_tree(path):
    model, opt = after_steps(sl.adam(0.1), 2)
    other = sl.Optimizer(sl.sgd(0.1), model)
    sl.checkpoint.save(path, opt={"gen": opt, "disc": other}, ema=(model, opt))
    with safetensors.safe_open(path, framework="numpy") as file:
        names = file.keys()
    assert {"opt.gen.scale_by_adam.mu.w", "opt.disc.count", "ema.1.count"} <= {*names}
    start = blank(opt), blank(other)
    loaded = sl.checkpoint.load(
        path,
        opt={"gen": start[0], "disc": start[1]},
        ema=(blank(model), start[0]),
        hyperparams="file",
    )
    assert_same_bits(loaded["opt"], {"gen": opt, "disc": other})
    assert_same_bits(loaded["ema"], (model, opt))
    assert sl.checkpoint.header(path)["count"] == "opt.disc: 0\nopt.gen: 2\nema.1: 2"


def test_names_that_coincide_are_told_apart(path):
    tree = {"a.b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}
    sl.checkpoint.save(path, model=tree)
    assert_same_bits(sl.checkpoint.load(path, model=blank(tree))["model"], tree)


def test_only_what_is_asked_for_is_loaded(path):
    model, opt = after_steps(sl.adam(0.1), 1)
    sl.checkpoint.save(path, model=model, opt=opt, epoch=1)
    assert list(sl.checkpoint.load(path, model=blank(model))) == ["model"]
    assert sl.checkpoint.load(path, epoch=0) == {"epoch": 1}


def test_the_header_is_readable(path):
    model, opt = after_steps(sl.adam(0.1), 3)
    sl.checkpoint.save(path, model=model, opt=opt)
    header = sl.checkpoint.header(path)
    assert (header["format"], header["format_version"]) == ("slalom.checkpoint", "1")
    assert header["count"] == "3"
    assert header["optimizer"] == repr(opt)
    assert json.loads(header["versions"])["jax"] == jax.__version__
    assert json.loads(header["checksums"])["model.w"] == f"{zlib.crc32(np.asarray(model['w'])):08x}"
    assert json.loads(header["trees"]) == ["model", "opt"]


def test_loaded_arrays_can_be_donated(path):
    def loss_fn(model):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(model))

    model, opt = after_steps(sl.adam(0.1))
    sl.checkpoint.save(path, model=model, opt=opt)
    loaded = sl.checkpoint.load(path, model=blank(model), opt=sl.Optimizer(sl.adam(0.1), model))
    step = sl.train_step(loss_fn, donate="all")
    twice = [step(loaded["model"], loaded["opt"]), step(model, opt)]
    assert_same_bits(*[(m, o) for m, o, _ in twice])


def test_a_weak_type_is_kept_so_that_nothing_recompiles(path):
    tree = {"x": jnp.asarray(1.0), "n": jnp.asarray(2), "strong": jnp.float32(1.0)}
    sl.checkpoint.save(path, model=tree)
    loaded = sl.checkpoint.load(path, model=jax.tree.map(lambda x: x * 0, tree))["model"]
    assert kind_of(loaded) == kind_of(tree)


def test_equinox_serialization_still_works(tmp_path):
    model, opt = after_steps(sl.adam(0.1).every_k(2), 3)
    eqx.tree_serialise_leaves(tmp_path / "run.eqx", (model, opt))
    like = blank(model), sl.Optimizer(sl.adam(0.1).every_k(2), MODEL)
    assert_same_bits(eqx.tree_deserialise_leaves(tmp_path / "run.eqx", like), (model, opt))


# --- where arrays are put -------------------------------------------------------------------


def test_arrays_are_put_where_those_of_the_program_are(path):
    model, opt = after_steps(sl.adam(0.1))
    sl.checkpoint.save(path, model=model, opt=opt)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    sharded = {
        "w": jax.device_put(blank(MODEL)["w"], split),
        "b": jax.device_put(MODEL["b"], whole),
    }
    loaded = sl.checkpoint.load(path, model=sharded, opt=sl.Optimizer(sl.adam(0.1), sharded))
    assert loaded["model"]["w"].sharding == split
    assert kind_of(loaded["opt"]) == kind_of(sl.Optimizer(sl.adam(0.1), sharded))
    assert_same_bits(loaded["opt"].state, opt.state)

    # And back onto one device.
    sl.checkpoint.save(path, model=loaded["model"], opt=loaded["opt"])
    again = sl.checkpoint.load(path, model=blank(MODEL), opt=sl.Optimizer(sl.adam(0.1), MODEL))
    assert kind_of(again["model"]) == kind_of(MODEL)
    assert_same_bits(again["model"], model)


def test_abstract_trees_are_filled(path):
    model, opt = after_steps(sl.adam(0.3))
    sl.checkpoint.save(path, model=model, opt=opt, key=jax.random.key(3))
    like = eqx.filter_eval_shape(
        lambda: (MODEL, sl.Optimizer(sl.adam(0.1), MODEL), jax.random.key(0))
    )
    loaded = sl.checkpoint.load(path, model=like[0], opt=like[1], key=like[2])
    assert_same_bits((loaded["model"], loaded["opt"]), (model, opt))
    assert_same_bits(loaded["key"], jax.random.key(3))

    device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    like = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=device)
    loaded = sl.checkpoint.load(path, model={"w": MODEL["w"], "b": like})
    assert loaded["model"]["b"].sharding == device


def test_a_missing_abstract_array_is_an_error_even_if_not_strict(path):
    sl.checkpoint.save(path, model={"w": jnp.ones(2)})
    like = {"w": jnp.ones(2), "new": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(sl.checkpoint.MismatchError, match=r"'model[.]new'.*it is abstract"):
        sl.checkpoint.load(path, model=like, strict=False)


# --- differences ----------------------------------------------------------------------------


def test_every_difference_is_reported_by_path(path):
    tree = {"same": jnp.ones(2), "grown": jnp.ones(2), "cast": jnp.ones(2), "old": jnp.ones(2)}
    sl.checkpoint.save(path, model=tree, n=1.5)
    mine = {
        "same": jnp.zeros(2),
        "grown": jnp.zeros(3),
        "cast": jnp.zeros(2, "float16"),
        "new": jnp.zeros(2),
    }
    with pytest.raises(sl.checkpoint.MismatchError) as caught:
        sl.checkpoint.load(path, model=mine, n=1)
    assert str(caught.value) == (
        f"The checkpoint '{path}' does not fit this program:\n"
        "  only in the program: model.new\n"
        "  only in the file: model.old\n"
        "  other shapes: model.grown is (2,) in the file and (3,) here\n"
        "  other dtypes: model.cast is float32 in the file and float16 here, "
        "n is a Python float in the file and a Python int here\n"
        "Pass the same model and optimizer as when it was saved, or `strict=False` to load what "
        "fits and keep the program's values for the rest."
    )
    loaded = sl.checkpoint.load(path, model=mine, n=1, strict=False)
    assert_same_bits(loaded["model"], mine | {"same": jnp.ones(2)})
    assert loaded["n"] == 1
    assert repr(loaded.report) == (
        "loaded:      model.same\n"
        "missing:     model.new\n"
        "unexpected:  model.old\n"
        "reshaped:    model.grown is (2,) in the file and (3,) here\n"
        "retyped:     model.cast is float32 in the file and float16 here, "
        "n is a Python float in the file and a Python int here\n"
        "hyperparams: –"
    )


def saved(path, tx):
    model, opt = after_steps(tx)
    sl.checkpoint.save(path, model=model, opt=opt)
    return opt.state_of("scale_by_adam")


@pytest.mark.parametrize(
    "tx",
    [
        sl.ClipByGlobalNorm(1e9) | sl.adam(0.1),
        sl.named_chain(rest=sl.adam(0.1)),
        sl.ScaleByLearningRate(0.1) | sl.ScaleByAdam(),
        sl.Clip(3.0) | sl.Scale(2.0) | sl.adam(0.1),
    ],
    ids=["clipped", "named", "reordered", "longer"],
)
def test_a_changed_chain_loads_all_its_state(path, tx):
    old = saved(path, sl.adam(0.1))
    loaded = sl.checkpoint.load(path, opt=sl.Optimizer(tx, MODEL))
    assert loaded.report.fits
    assert_same_bits(loaded["opt"].state_of("scale_by_adam"), old)
    assert int(loaded["opt"].count) == 3


def test_a_lost_wrapper_is_reported_and_what_fits_is_loaded(path):
    old = saved(path, sl.adam(0.1).every_k(1))
    opt = sl.Optimizer(sl.adam(0.1), MODEL)
    with pytest.raises(sl.checkpoint.MismatchError, match=r"only in the file: opt[.]every_k"):
        sl.checkpoint.load(path, opt=opt)
    loaded = sl.checkpoint.load(path, opt=opt, strict=False)
    assert_same_bits(loaded["opt"].state_of("scale_by_adam"), old)
    assert all("every_k" in name for name in loaded.report.unexpected)


def test_a_checkpoint_loads_into_an_optimizer_with_another_wrapper(path):
    old = saved(path, sl.adam(0.1))
    opt = sl.Optimizer(sl.adam(0.1).average(0.9), MODEL)
    loaded = sl.checkpoint.load(path, opt=opt, strict=False)
    assert_same_bits(loaded["opt"].state_of("scale_by_adam"), old)
    assert all(name.startswith("opt.average") for name in loaded.report.missing)


CHANGED = {
    "clip and record": sl.ClipByGlobalNorm(1.0) | sl.adam(0.1).record(),
    "partition": sl.adam(0.1).partition({sl.where.path("b"): sl.adam(0.1)}),
    "average of every_k": sl.adam(0.1).every_k(2).average(0.9),
    "lion": sl.lion(0.1),
    "sgd": sl.sgd(0.1, momentum=0.9),
    "two": sl.adam(0.1) | sl.ScaleByAdam(),
}


@pytest.mark.parametrize("name", slow_except(CHANGED, "clip and record", "lion"))
@pytest.mark.parametrize("grown", [False, True], ids=["same model", "grown model"])
def test_a_loaded_state_is_what_rebind_makes(path, name, grown):
    model = {"w": MODEL["w"], "b": jnp.ones(5), "new": jnp.ones(2)} if grown else MODEL
    _, opt = after_steps(sl.adam(0.1))
    sl.checkpoint.save(path, opt=opt)
    fresh = sl.Optimizer(CHANGED[name], model)
    loaded = sl.checkpoint.load(path, opt=fresh, strict=False)
    expected, report = opt.rebind(model, tx=CHANGED[name])
    assert_same_bits(loaded["opt"], expected)
    assert {f"opt.{name}" for name in report.carried} <= {*loaded.report.loaded}
    assert {*loaded.report.reshaped} <= {f"opt.{name}" for name in report.reshaped}
    assert {f"opt.{name}" for name in report.dropped} >= {*loaded.report.unexpected}


def test_a_model_that_is_one_array(path):
    model, opt = after_steps(sl.adam(0.1), 2, jnp.ones(2), jnp.ones(2))
    sl.checkpoint.save(path, model=model, opt=opt)
    loaded = sl.checkpoint.load(path, model=model * 0, opt=sl.Optimizer(sl.adam(0.1), model))
    assert_same_bits((loaded["model"], loaded["opt"]), (model, opt))
    wrapped = sl.Optimizer(sl.Clip(9.0) | sl.adam(0.1).record(), model)
    loaded = sl.checkpoint.load(path, opt=wrapped, strict=False)
    assert_same_bits(loaded["opt"].state_of("scale_by_adam"), opt.state_of("scale_by_adam"))


def test_ages_of_single_parameters_come_back(path):
    model, opt = after_steps(sl.adam(0.1))
    opt = opt.reset(model, where=sl.where.path("b"))
    sl.checkpoint.save(path, model=model, opt=opt)
    loaded = sl.checkpoint.load(path, opt=sl.Optimizer(sl.adam(0.1), MODEL))
    assert_same_bits(loaded["opt"], opt)


def test_moments_of_another_dtype_are_converted(path):
    _, opt = after_steps(sl.adam(0.1))
    sl.checkpoint.save(path, opt=opt)
    tx = sl.ScaleByAdam(mu_dtype="bfloat16") | sl.ScaleByLearningRate(0.1)
    loaded = sl.checkpoint.load(path, opt=sl.Optimizer(tx, MODEL))
    assert loaded.report.recoded == ("opt.scale_by_adam.mu.b", "opt.scale_by_adam.mu.w")
    assert_same_bits(loaded["opt"], opt.rebind(MODEL, tx=tx)[0])


def test_a_batch_of_runs_comes_back_by_name(path):
    def make(rate):
        return sl.Optimizer(sl.adam(rate), MODEL)

    opts = eqx.filter_vmap(make)(jnp.array([0.1, 0.2]))
    sl.checkpoint.save(path, opt=opts)
    loaded = sl.checkpoint.load(path, opt=eqx.filter_vmap(make)(jnp.zeros(2)), hyperparams="file")
    assert_same_bits(loaded["opt"], opts)
    with pytest.raises(sl.checkpoint.MismatchError, match=r"count is \(2,\) in the file"):
        sl.checkpoint.load(path, opt=make(0.1))


# --- hyperparameters ------------------------------------------------------------------------


def test_hyperparameters_are_those_of_the_program_with_a_warning(path):
    _, opt = after_steps(sl.adam(0.1, b1=0.5))
    sl.checkpoint.save(path, opt=opt)
    mine = sl.Optimizer(sl.adam(0.01, b1=0.5), MODEL)
    with pytest.warns(UserWarning, match="other hyperparameters") as caught:
        loaded = sl.checkpoint.load(path, opt=mine)
    assert str(caught[0].message) == (
        f"The checkpoint '{path}' has other hyperparameters, and those of the program are kept: "
        "opt.scale_by_learning_rate.learning_rate is 0.1 in the file and 0.01 here. To continue "
        'with those of the file, pass `hyperparams="file"`.'
    )
    assert caught[0].filename == __file__
    assert float(loaded["opt"].hyperparams["learning_rate"]) == pytest.approx(0.01)
    assert loaded.report.hyperparams.keys() == {"opt.scale_by_learning_rate.learning_rate"}


def test_hyperparameters_of_the_file_on_request(path):
    schedule = sl.schedules.linear(0.1, 0.0, transition_steps=10)
    _, opt = after_steps(sl.adam(schedule, b1=0.5))
    sl.checkpoint.save(path, opt=opt)
    tx = sl.ClipByGlobalNorm(1.0) | sl.adam(sl.schedules.linear(0.3, 0.2, transition_steps=9))
    mine = sl.Optimizer(tx, MODEL)
    only_here = r"program:\n  only in the program: opt[.]clip_by_global_norm[.]max_norm\nPass"
    with pytest.raises(sl.checkpoint.MismatchError, match=only_here):
        sl.checkpoint.load(path, opt=mine, hyperparams="file")
    loaded = sl.checkpoint.load(path, opt=mine, hyperparams="file", strict=False)["opt"]
    assert loaded.hyperparams["learning_rate"] == opt.hyperparams["learning_rate"]
    assert loaded.hyperparams["b1"] == 0.5
    assert loaded.hyperparams["max_norm"] == 1.0


def test_hyperparameters_that_only_the_file_has_are_unexpected_if_its_are_asked_for(path):
    saved(path, sl.ClipByGlobalNorm(1.0) | sl.adam(0.1))
    opt = sl.Optimizer(sl.adam(0.1), MODEL)
    assert sl.checkpoint.load(path, opt=opt).report.fits
    with pytest.raises(sl.checkpoint.MismatchError, match=r"in the file: opt[.]clip_by_gl"):
        sl.checkpoint.load(path, opt=opt, hyperparams="file")


def test_a_schedule_in_place_of_a_number_needs_no_file(path):
    saved(path, sl.adam(0.1))
    opt = sl.Optimizer(sl.adam(sl.schedules.linear(0.1, 0.0, transition_steps=5)), MODEL)
    assert sl.checkpoint.load(path, opt=opt).report.fits


# --- in the background ----------------------------------------------------------------------


def test_a_save_in_the_background_keeps_what_donation_takes(path):
    def loss_fn(model):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(model))

    model, opt = after_steps(sl.adam(0.1))
    model = jax.tree.map(jnp.copy, model)
    expected = jax.tree.map(jnp.copy, (model, opt))
    loader = np.zeros(3)
    step = sl.train_step(loss_fn, donate="all")
    saving = sl.checkpoint.save(path, model=model, opt=opt, loader=loader, background=True)
    loader += 1
    for _ in range(3):
        model, opt, _ = step(model, opt)
    assert saving.wait() == path
    assert saving.done
    loaded = sl.checkpoint.load(
        path, model=MODEL, opt=sl.Optimizer(sl.adam(0.1), MODEL), loader=loader
    )
    assert_same_bits((loaded["model"], loaded["opt"]), expected)
    assert not loaded["loader"].any()


def test_an_error_in_the_background_is_raised_by_wait(tmp_path):
    (tmp_path / "file").touch()
    saving = sl.checkpoint.save(tmp_path / "file" / "x", n=1, background=True)
    with pytest.raises(NotADirectoryError, match="is a file") as caught:
        saving.wait()
    assert "in the background" in caught.value.__notes__[0]
    sl.checkpoint.save(tmp_path / "other", n=1)  # the error is not raised again


def test_an_error_in_the_background_is_raised_by_the_next_save(tmp_path):
    (tmp_path / "file").touch()
    sl.checkpoint.save(tmp_path / "file" / "x", n=1, background=True)
    with pytest.raises(NotADirectoryError):
        sl.checkpoint.save(tmp_path / "file" / "y", n=1)


# --- the last few -----------------------------------------------------------------------------


def test_rolling_keeps_the_last_ones_and_finds_the_newest_whole_one(tmp_path):
    rolling = sl.checkpoint.Rolling(tmp_path / "runs", keep=2)
    assert rolling.latest() is None
    with pytest.raises(FileNotFoundError, match="There is no checkpoint in"):
        rolling.load(n=0)
    for step in (1, 2, 9, 10):
        rolling.save(step, n=step)
    assert rolling.steps == (9, 10)
    assert rolling.load(n=0)["n"] == 10
    newest = rolling.latest()
    assert newest.name == "step-00000010.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"00000010.* It is skipped"):
        assert rolling.load(n=0)["n"] == 9
    with pytest.warns(UserWarning, match=r"00000010.* It is skipped"):
        assert rolling.latest().name == "step-00000009.safetensors"


def test_rolling_takes_the_step_from_the_optimizer_and_saves_in_the_background(tmp_path):
    rolling = sl.checkpoint.Rolling(tmp_path, keep=1, background=True)
    for n in (1, 2):
        model, opt = after_steps(sl.sgd(0.1), n)
        saving = rolling.save(model=model, opt=opt)
    saving.wait()
    assert rolling.steps == (2,)
    with pytest.raises(TypeError, match="Pass the step"):
        rolling.save(n=1)


def test_rolling_never_removes_what_it_just_saved(tmp_path):
    rolling = sl.checkpoint.Rolling(tmp_path, keep=1)
    rolling.save(20, n=20)
    with pytest.warns(UserWarning, match="step 20, later than step 10"):
        rolling.save(10, n=10)
    assert rolling.steps == (10, 20)
    with pytest.raises(ValueError, match="`keep` must be at least 1"):
        sl.checkpoint.Rolling(tmp_path, keep=0)


# --- as a dict ------------------------------------------------------------------------------


def test_a_dict_goes_there_and_back():
    model, opt = after_steps(sl.adam(0.1))
    items = sl.checkpoint.to_dict(model=model, opt=opt, key=jax.random.key(1), epoch=3)
    assert items["opt.scale_by_adam.mu.w"] is opt.state_of("scale_by_adam").mu["w"]
    back = sl.checkpoint.from_dict(
        items,
        model=blank(model),
        opt=sl.Optimizer(sl.adam(0.1), MODEL),
        key=jax.random.key(0),
        epoch=0,
    )
    assert_same_bits((back["model"], back["opt"], back["key"]), (model, opt, jax.random.key(1)))
    assert back["epoch"] == 3
    del items["model.w"]
    with pytest.raises(sl.checkpoint.MismatchError, match=r"in the program: model[.]w"):
        sl.checkpoint.from_dict(items, model=model)


# --- refusals -------------------------------------------------------------------------------


def test_what_cannot_be_saved_is_refused_by_name(path):
    model = {"w": jnp.ones(2)}
    opt = sl.Optimizer(sl.adam(0.1), model)
    sl.train_step(lambda m: jnp.sum(m["w"] ** 2), donate="all")(model, opt)
    with pytest.raises(ValueError, match="This optimizer was donated"):
        sl.checkpoint.save(path, opt=opt)
    with pytest.raises(ValueError, match=r"'model[.]w' was donated to a training step"):
        sl.checkpoint.save(path, model=model)
    with pytest.raises(TypeError, match=r"'model[.]w' is abstract"):
        sl.checkpoint.save(path, model={"w": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(TypeError, match=r"'x' is being traced"):
        jax.jit(lambda x: sl.checkpoint.save(path, x=x))(1.0)
    with pytest.raises(TypeError, match="'x' is an array of dtype object, which cannot be saved"):
        sl.checkpoint.save(path, x=np.array([{}]))
    assert not path.exists()
    sl.checkpoint.save(path, x=jnp.ones(()))
    with pytest.raises(TypeError, match=r"'x' is being traced: a checkpoint cannot be loaded"):
        jax.jit(lambda x: sl.checkpoint.load(path, x=x))(1.0)


def test_wrong_arguments_are_refused(path):
    sl.checkpoint.save(path, n=1)
    with pytest.raises(TypeError, match="nothing to save or load"):
        sl.checkpoint.save(path)
    with pytest.raises(ValueError, match="`hyperparams` must be"):
        sl.checkpoint.load(path, n=1, hyperparams="mine")
    with pytest.raises(TypeError, match="'strict' names an option"):
        sl.checkpoint.save(path, strict=True)


@pytest.mark.slow
def test_importing_slalom_imports_no_safetensors():
    code = "import slalom, sys; assert not {'safetensors', 'orbax'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
