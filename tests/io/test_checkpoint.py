"""Checkpoints: what is saved comes back, by name and to the last bit."""

import errno
import json
import os
import zlib
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from trained import GRADS, MODEL, after_steps, blank

import slalom as sl
from helpers import assert_same_bits, kind_of, mlp
from slalom.checkpoint import _rolling


@pytest.mark.slow
def test_models_and_several_optimizers_come_back_by_name(path, adam):
    model, fresh = mlp(), mlp(1)
    grads = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_inexact_array))
    tx = sl.ClipByGlobalNorm(1.0) | sl.adam(0.1)
    model, opt = after_steps(tx, 2, model, grads)
    sl.checkpoint.save(path, model=model, opt=opt)

    stored = safetensors.numpy.load_file(path)
    assert "model.layers.0.weight" in stored
    mean = opt.state_of("scale_by_adam").mu.layers[0].weight
    np.testing.assert_array_equal(stored["opt.scale_by_adam.mu.layers.0.weight"], mean)
    loaded = sl.checkpoint.load(path, model=fresh, opt=sl.Optimizer(tx, fresh))
    assert list(loaded) == ["model", "opt"]
    assert loaded.report.fits
    assert_same_bits(loaded["model"], model)
    assert_same_bits(loaded["opt"], opt)
    assert kind_of(loaded["opt"]) == kind_of(opt)

    model, opt, other = adam.model, adam.opt, sl.Optimizer(sl.sgd(0.1), adam.model)
    sl.checkpoint.save(path, opt={"gen": opt, "disc": other}, ema=(model, opt))
    with safetensors.safe_open(path, framework="numpy") as file:
        names = file.keys()
    assert {"opt.gen.scale_by_adam.mu.w", "opt.disc.count", "ema.1.count"} <= {*names}
    fresh = {"gen": blank(opt), "disc": blank(other)}
    like = {"opt": fresh, "ema": (blank(model), fresh["gen"])}
    loaded = sl.checkpoint.load(path, **like, hyperparams="file")
    assert_same_bits(loaded["opt"], {"gen": opt, "disc": other})
    assert_same_bits(loaded["ema"], (model, opt))
    assert sl.checkpoint.header(path)["count"] == "opt.disc: 0\nopt.gen: 3\nema.1: 3"


DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16"),
    *("float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e3m4"),
    *("float8_e8m0fnu", "int4", "uint4"),
]


def test_arrays_of_every_dtype_and_of_numpy_survive_to_the_last_bit(path):
    def sample(name, shape):
        numbers = np.arange(np.prod(shape)).reshape(shape) % 7
        return jax.device_put(numbers.astype(jnp.dtype(name)))

    shapes = ((2, 3), (), (0, 2))
    tree = {name: [sample(name, shape) for shape in shapes] for name in DTYPES}
    special = jnp.array([jnp.nan, -jnp.nan, jnp.inf, -0.0, 1e-45], "float32")
    tree["special"] = jax.lax.bitcast_convert_type(special, jnp.float32)
    sl.checkpoint.save(path, model=tree)
    assert_same_bits(sl.checkpoint.load(path, model=blank(tree))["model"], tree)

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


def test_batch_norm_frozen_layers_and_a_loader_come_back(path):
    def make(seed):
        key = jax.random.key(seed)
        norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        layers = [eqx.nn.Linear(2, 3, key=key), norm, eqx.nn.Dropout(0.1 + 0.1 * seed)]
        net, state = eqx.nn.make_with_state(eqx.nn.Sequential)(layers)
        return net, state, sl.Optimizer(sl.adam(0.1), net, trainable=sl.where.path("layers.1.**"))

    @eqx.filter_jit
    def apply(net, state, x):
        axes = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
        return jax.vmap(lambda x, s: net(x, s, key=jax.random.key(0)), **axes)(x, state)

    net, state, opt = make(0)
    _, state = apply(net, state, jnp.arange(8.0).reshape(4, 2))
    bits = np.random.default_rng(5)
    loader = {"epoch": 3, "fraction": 0.1, "shuffle": True, "name": "digits", "none": None}
    loader |= {"best": float("inf"), "phase": 1 + 2j, "order": np.arange(4)}
    loader |= {"generator": bits.bit_generator.state}
    sl.checkpoint.save(path, model=net, opt=opt, state=state, loader=loader)

    net2, state2, opt2 = make(1)
    start = jax.tree.map(lambda x: type(x)() if not hasattr(x, "shape") else 0 * x, loader)
    loaded = sl.checkpoint.load(path, model=net2, opt=opt2, state=state2, loader=start)
    assert_same_bits(loaded["model"].layers[0], net.layers[0])
    assert loaded["model"].layers[2].p == 0.2  # numbers in the model belong to the program
    assert_same_bits(jax.tree.leaves(loaded["state"]), jax.tree.leaves(state))
    np.testing.assert_array_equal(loaded["loader"].pop("order"), loader.pop("order"))
    assert loaded["loader"] == loader
    assert jax.tree.map(type, loaded["loader"]) == jax.tree.map(type, loader)
    assert json.loads(sl.checkpoint.header(path)["values"])["loader.epoch"] == 3


def test_a_header_is_readable_and_a_dict_goes_there_and_back(adam):
    header = sl.checkpoint.header(adam.path)
    assert (header["format"], header["format_version"]) == ("slalom.checkpoint", "1")
    assert header["count"] == "3"
    assert header["optimizer"] == repr(adam.opt)
    assert json.loads(header["versions"])["jax"] == jax.__version__
    checksum = f"{zlib.crc32(np.asarray(adam.model['w'])):08x}"
    assert json.loads(header["checksums"])["model.w"] == checksum
    assert json.loads(header["trees"]) == ["model", "opt"]

    trees = {"model": adam.model, "opt": adam.opt, "key": jax.random.key(1), "epoch": 3}
    items = sl.checkpoint.to_dict(**trees)
    assert items["opt.scale_by_adam.mu.w"] is adam.opt.state_of("scale_by_adam").mu["w"]
    opt = sl.Optimizer(sl.adam(0.1), MODEL)
    fresh = {"model": blank(MODEL), "opt": opt, "key": jax.random.key(0), "epoch": 0}
    back = sl.checkpoint.from_dict(items, **fresh)
    assert_same_bits({**back}, trees)
    assert type(back["epoch"]) is int
    del items["model.w"]
    with pytest.raises(sl.checkpoint.MismatchError, match=r"in the program: model[.]w"):
        sl.checkpoint.from_dict(items, model=MODEL)


def test_models_of_one_array_batches_of_runs_and_typed_keys_come_back(path):
    model, opt = after_steps(sl.adam(0.1), 2, jnp.ones(2), jnp.ones(2))
    sl.checkpoint.save(path, model=model, opt=opt)
    loaded = sl.checkpoint.load(path, model=model * 0, opt=sl.Optimizer(sl.adam(0.1), model))
    assert_same_bits((loaded["model"], loaded["opt"]), (model, opt))
    wrapped = sl.Optimizer(sl.Clip(9.0) | sl.adam(0.1).record(), model)
    loaded = sl.checkpoint.load(path, opt=wrapped, strict=False)
    assert_same_bits(loaded["opt"].state_of("scale_by_adam"), opt.state_of("scale_by_adam"))

    def make(rate):
        return sl.Optimizer(sl.adam(rate), MODEL)

    opts = eqx.filter_vmap(make)(jnp.array([0.1, 0.2]))
    sl.checkpoint.save(path, opt=opts)
    others = eqx.filter_vmap(make)(jnp.zeros(2))
    loaded = sl.checkpoint.load(path, opt=others, hyperparams="file")
    assert_same_bits(loaded["opt"], opts)
    with pytest.warns(UserWarning, match=r"is \[0\.1, 0\.2\] in the file and \[0\.0, 0\.0\] here"):
        sl.checkpoint.load(path, opt=others)
    with pytest.raises(sl.checkpoint.MismatchError, match=r"count is \(2,\) in the file"):
        sl.checkpoint.load(path, opt=make(0.1))

    # They are matched as one run is, and a new parameter has its own age in each of them.
    opts = eqx.filter_vmap(lambda opt: opt.step(MODEL, GRADS)[1])(opts)
    sl.checkpoint.save(path, opt=opts)
    rates, grown = jnp.array([0.1, 0.2]), MODEL | {"new": jnp.ones(2)}
    tx = eqx.filter_vmap(lambda rate: sl.Clip(9.0) | sl.adam(rate).every_k(2))(rates)
    fresh = eqx.filter_vmap(lambda tx: sl.Optimizer(tx, grown))(tx)
    loaded = sl.checkpoint.load(path, opt=fresh, strict=False)["opt"]
    assert loaded.state_of("scale_by_adam").age.tolist() == [[1, 0, 1], [1, 0, 1]]
    rebound = eqx.filter_vmap(lambda opt, tx: opt.rebind(grown, tx=tx)[0])(opts, tx)
    assert_same_bits(loaded, rebound)
    items = sl.checkpoint.to_dict(opt=opts) | {"opt.scale_by_adam.age": jnp.ones(3, jnp.int32)}
    with pytest.raises(sl.checkpoint.MismatchError, match=r"age is \(3,\) in the file and \(2,\)"):
        sl.checkpoint.from_dict(items, opt=opts)

    raw = jax.random.PRNGKey(1)
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        keys, fresh = (jax.random.split(jax.random.key(seed, impl=impl), 2) for seed in (3, 0))
        sl.checkpoint.save(path, key=keys, raw=raw)
        loaded = sl.checkpoint.load(path, key=fresh, raw=jax.random.PRNGKey(0))
        assert loaded["key"].dtype == keys.dtype
        assert_same_bits((loaded["key"], loaded["raw"]), (keys, raw))
    with pytest.raises(sl.checkpoint.MismatchError, match="key is key<unsafe_rbg> in the file"):
        sl.checkpoint.load(path, key=jax.random.split(jax.random.key(3), 2))

    sl.checkpoint.save(path, model=MODEL, opt=sl.Optimizer(sl.adam(0.1), MODEL), epoch=1)
    assert list(sl.checkpoint.load(path, model=blank(MODEL))) == ["model"]
    assert sl.checkpoint.load(path, epoch=0) == {"epoch": 1}

    tree = {"x": jnp.asarray(1.0), "n": jnp.asarray(2), "strong": jnp.float32(1.0)}
    sl.checkpoint.save(path, model=tree)
    loaded = sl.checkpoint.load(path, model=jax.tree.map(lambda x: x * 0, tree))["model"]
    assert kind_of(loaded) == kind_of(tree)


def test_ages_of_parameters_come_back(path, adam):
    opt = adam.opt.reset(adam.model, where=sl.where.path("b"))
    sl.checkpoint.save(path, opt=opt)
    loaded = sl.checkpoint.load(path, opt=sl.Optimizer(sl.adam(0.1), MODEL))
    assert_same_bits(loaded["opt"], opt)


def test_trees_of_shapes_are_filled_on_the_devices_of_the_program(path, adam):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    sharded = jax.device_put(blank(MODEL), {"w": split, "b": whole})
    opt = sl.Optimizer(sl.adam(0.1), sharded)
    loaded = sl.checkpoint.load(adam.path, model=sharded, opt=opt)
    assert loaded["model"]["w"].sharding == split
    assert kind_of(loaded["opt"]) == kind_of(opt)
    assert_same_bits(loaded["opt"].state, adam.opt.state)

    # And back onto one device.
    sl.checkpoint.save(path, model=loaded["model"], opt=loaded["opt"])
    again = sl.checkpoint.load(path, model=blank(MODEL), opt=sl.Optimizer(sl.adam(0.1), MODEL))
    assert kind_of(again["model"]) == kind_of(MODEL)
    assert_same_bits(again["model"], adam.model)

    model, opt, key = adam.model, adam.opt, jax.random.key(3)
    sl.checkpoint.save(path, model=model, opt=opt, key=key)
    like = {"model": MODEL, "opt": sl.Optimizer(sl.adam(0.2), MODEL), "key": key}
    loaded = sl.checkpoint.load(path, **eqx.filter_eval_shape(lambda: like))
    assert_same_bits((loaded["model"], loaded["opt"], loaded["key"]), (model, opt, key))

    device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    like = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=device)
    loaded = sl.checkpoint.load(path, model={"w": MODEL["w"], "b": like})
    assert loaded["model"]["b"].sharding == device
    # What the file does not have has no value, even if the load is not strict.
    like = {"w": MODEL["w"], "new": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(sl.checkpoint.MismatchError, match=r"'model[.]new'.*it is abstract"):
        sl.checkpoint.load(path, model=like, strict=False)


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
    model, opt = after_steps(sl.sgd(0.1), 1)
    rolling.save(model=model, opt=opt)
    model, opt = opt.step(model, model)
    rolling.save(model=model, opt=opt).wait()
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
    with pytest.raises(TypeError, match=r"integer|Expected type: int"):
        sl.checkpoint.Rolling(tmp_path, keep=1.5)
    with pytest.raises(ValueError, match="`step` must be at least 0, got -1"):
        rolling.save(-1, n=1)


def test_rolling_goes_on_where_an_older_file_cannot_be_removed(tmp_path, monkeypatch):
    rolling = sl.checkpoint.Rolling(tmp_path, keep=1)
    for step in (1, 2):
        sl.checkpoint.save(tmp_path / f"step-{step:08d}.safetensors", n=step)
    unlink = os.unlink

    def refused(path, **kwargs):
        if Path(path).name == "step-00000001.safetensors":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        message = r"step 3 is written, but the older one .*00000001.* Operation not permitted"
        with pytest.warns(UserWarning, match=message):
            rolling.save(3, n=3)
    assert rolling.steps == (1, 3)
    assert rolling.load(n=0)["n"] == 3
    rolling.save(4, n=4)
    assert rolling.steps == (4,)


@pytest.mark.parametrize("where", ["_checked", "load", "_files"])
def test_a_reader_finds_the_newest_file_while_a_trainer_replaces_it(where, tmp_path, monkeypatch):
    rolling = sl.checkpoint.Rolling(tmp_path, keep=1)
    rolling.save(1, n=1)
    owner = sl.checkpoint.Rolling if where == "_files" else _rolling
    original, saves = getattr(owner, where), iter((2, 3))

    def beside_a_trainer(*args, **kwargs):
        step = next(saves, None)
        if step is None:
            return original(*args, **kwargs)
        monkeypatch.setattr(owner, where, original)
        rolling.save(step, n=step)
        monkeypatch.setattr(owner, where, beside_a_trainer)
        # A look at a directory that changes may show neither file.
        return {} if where == "_files" else original(*args, **kwargs)

    monkeypatch.setattr(owner, where, beside_a_trainer)
    if where == "_checked":
        assert rolling.latest().name == "step-00000003.safetensors"
    else:
        assert rolling.load(n=0)["n"] == 3


def test_what_cannot_be_saved_is_refused_by_name(path):
    model = {"w": jnp.ones(2)}
    opt = sl.Optimizer(sl.adam(0.1), model)
    sl.train_step(lambda m: jnp.sum(m["w"] ** 2), donate="all")(model, opt)
    for tree, message in (
        ({"opt": opt}, "This optimizer was donated"),
        ({"model": model}, r"'model[.]w' was donated to a training step"),
        ({"model": {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}}, r"'model[.]w' is abstract"),
        ({"x": np.array([{}])}, "'x' is an array of dtype object, which cannot be saved"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            sl.checkpoint.save(path, **tree)
    with pytest.raises(TypeError, match=r"'x' is being traced"):
        jax.jit(lambda x: sl.checkpoint.save(path, x=x))(1.0)
    assert not path.exists()
    sl.checkpoint.save(path, x=jnp.ones(()))
    with pytest.raises(TypeError, match=r"'x' is being traced: a checkpoint cannot be loaded"):
        jax.jit(lambda x: sl.checkpoint.load(path, x=x))(1.0)
    with pytest.raises(TypeError, match="nothing to save or load"):
        sl.checkpoint.save(path)
    with pytest.raises(ValueError, match="`hyperparams` must be"):
        sl.checkpoint.load(path, n=1, hyperparams="mine")
    with pytest.raises(TypeError, match="'strict' names an option"):
        sl.checkpoint.save(path, strict=True)
