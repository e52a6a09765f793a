"""Checkpoints as other calls, threads, processes and devices see them, as files and by Orbax."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from trained import MODEL

import slalom as sl
from helpers import assert_close, assert_same_bits, kind_of
from slalom.checkpoint import _file, _save


def test_donation_takes_nothing_from_a_save_and_may_take_what_is_loaded(path, adam):
    def loss_fn(model):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(model))

    model, opt = jax.tree.map(jnp.copy, (adam.model, adam.opt))
    loader = np.zeros(3)
    step = sl.train_step(loss_fn, donate="all")
    saving = sl.checkpoint.save(path, model=model, opt=opt, loader=loader, background=True)
    loader += 1
    *stepped, _ = step(model, opt)
    assert saving.wait() == path
    assert saving.done
    fresh = sl.Optimizer(sl.adam(0.1), MODEL)
    loaded = sl.checkpoint.load(path, model=MODEL, opt=fresh, loader=loader)
    assert_same_bits((loaded["model"], loaded["opt"]), (adam.model, adam.opt))
    assert not loaded["loader"].any()
    *again, _ = step(loaded["model"], loaded["opt"])
    assert_same_bits(again, stepped)


def test_an_error_is_raised_once_by_wait_or_by_the_next_save_or_load(tmp_path):
    (tmp_path / "file").touch()
    saving = sl.checkpoint.save(tmp_path / "file" / "x", n=1, background=True)
    with pytest.raises(NotADirectoryError, match="is a file") as caught:
        saving.wait()
    assert "in the background" in caught.value.__notes__[0]
    sl.checkpoint.save(tmp_path / "other", n=1)
    sl.checkpoint.save(tmp_path / "file" / "x", n=1, background=True)
    with pytest.raises(NotADirectoryError) as caught:
        sl.checkpoint.save(tmp_path / "file" / "y", n=1)
    assert "file/x' was saved in the background" in caught.value.__notes__[0]
    sl.checkpoint.save(tmp_path / "file" / "x", n=1, background=True)
    for message in ("cannot be written", "There is no checkpoint"):
        with pytest.raises(NotADirectoryError, match=message):
            sl.checkpoint.load(tmp_path / "file" / "x", n=0)


@pytest.fixture
def slow_writes(monkeypatch):
    """Writing a file takes a while."""
    write = _file.write

    def slow(*args, **kwargs):
        time.sleep(0.2)
        write(*args, **kwargs)

    monkeypatch.setattr(_file, "write", slow)


@pytest.mark.parametrize("where", ["start", "wait"])
def test_ctrl_c_does_not_change_the_order_of_saves(where, tmp_path, monkeypatch):
    path, write, times = tmp_path / "run", _file.write, iter((0.5, 0.0))
    start = threading.Thread.start

    def slower_at_first(*args, **kwargs):
        time.sleep(next(times))
        write(*args, **kwargs)

    def interrupted(thread):
        start(thread)
        if where == "start":
            signal.raise_signal(signal.SIGINT)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.1)

    numbers = signal.SIGINT, signal.SIGALRM
    handlers = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        monkeypatch.setattr(_file, "write", slower_at_first)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sl.checkpoint.save(path, n=1, background=True).wait()
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
    sl.checkpoint.save(path, n=2, background=True).wait()
    time.sleep(0.5)  # for one that nobody waits for
    assert sl.checkpoint.load(path, n=0)["n"] == 2


@pytest.mark.usefixtures("slow_writes")
@pytest.mark.parametrize("through_link", [False, True])
def test_a_load_waits_for_the_save_that_is_under_way(through_link, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    path = tmp_path / "real" / "run"
    sl.checkpoint.save(path, n=1)
    sl.checkpoint.save(path, n=2, background=True)
    read_from = tmp_path / "link" / "run" if through_link else path
    assert sl.checkpoint.load(read_from, n=0)["n"] == 2
    sl.checkpoint.save(path, n=3, background=True)
    assert sl.checkpoint.header(read_from)["values"] == '{"n": 3}'


def test_without_another_thread_a_save_is_done_at_once(tmp_path, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    saving = sl.checkpoint.save(tmp_path / "run", x=np.arange(2e6), background=True)
    assert saving.done
    assert not _save._unfinished
    assert sl.checkpoint.load(tmp_path / "run", x=np.zeros(2_000_000))["x"][-1] == 2e6 - 1
    monkeypatch.undo()
    sl.checkpoint.save(tmp_path / "run", x=np.ones(3), background=True).wait()


def in_child(check):
    """Runs a function in a forked process, and returns its exit code."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*os.fork.*")
@pytest.mark.usefixtures("slow_writes")
def test_a_forked_process_knows_nothing_of_the_save(tmp_path):
    saving = sl.checkpoint.save(tmp_path / "run", n=1, background=True)

    def check():
        for ask in (saving.wait, lambda: saving.done):
            with pytest.raises(RuntimeError, match="is being saved by the process"):
                ask()
        return f"in process {os.getppid()}" in repr(saving) and not _save._unfinished

    assert in_child(check) == 0
    assert saving.wait().exists()


@pytest.mark.slow
def test_saves_that_the_program_does_not_wait_for_are_finished_and_their_errors_printed(tmp_path):
    (tmp_path / "file").touch()
    code = """
import numpy as np, slalom as sl, sys
assert not {"safetensors", "orbax"} & {*sys.modules}
sl.checkpoint.save(sys.argv[1] + "/file/run", n=1, background=True)
sl.checkpoint.save(sys.argv[1] + "/run", x=np.arange(5e6), background=True)
print("trained")
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "trained\n"
    assert "NotADirectoryError: " in done.stderr
    assert "in the background" in done.stderr
    loaded = sl.checkpoint.load(tmp_path / "run", x=np.zeros(5_000_000))
    assert loaded["x"][-1] == 5e6 - 1


ON_EIGHT = """
import jax, jax.numpy as jnp, numpy as np, slalom as sl, sys
from importlib.util import find_spec
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
def put(x, *axes):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))
model = {"w": put(jnp.arange(32.0).reshape(8, 4), "data", "model"), "b": put(jnp.ones(4), "model")}
opt = sl.Optimizer(sl.adam(0.1), model)
for _ in range(3):
    model, opt = opt.step(model, jax.tree.map(jnp.sin, model))
sl.checkpoint.save(sys.argv[1] + "/file", model=model, opt=opt)
if find_spec("orbax"):
    import orbax.checkpoint as ocp
    items = sl.checkpoint.to_dict(model=model, opt=opt, key=jax.random.key(3), epoch=3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(sys.argv[1] + "/orbax", items)
"""
"""A program on 8 devices that trains a sharded model, and saves it as a file and with Orbax."""


def environment(devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": flags, "SLALOM_TYPECHECK": "0"}


@pytest.fixture(scope="module")
def of_eight_devices(tmp_path_factory):
    """The folder of what that program saved."""
    folder = tmp_path_factory.mktemp("eight")
    command = [sys.executable, "-c", ON_EIGHT, str(folder)]
    subprocess.run(command, env=environment(8), check=True)
    return folder


def same_on_one_device():
    """The model and optimizer of that program."""
    model = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(4)}
    opt = sl.Optimizer(sl.adam(0.1), model)
    for _ in range(3):
        model, opt = opt.step(model, jax.tree.map(jnp.sin, model))
    return model, opt


def on_four_devices():
    """A fresh model on half as many devices, along the other axis, and its optimizer."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    specs = {"w": PartitionSpec(None, "x"), "b": PartitionSpec()}
    homes = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    model = jax.device_put({"w": np.zeros((8, 4), np.float32), "b": np.zeros(4, np.float32)}, homes)
    return model, sl.Optimizer(sl.adam(0.1), model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_eight_devices_loads_on_four_and_on_one(of_eight_devices):
    expected = jax.tree.leaves(same_on_one_device())
    one = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
    for model, opt in (on_four_devices(), (one, sl.Optimizer(sl.adam(0.1), one))):
        loaded = sl.checkpoint.load(of_eight_devices / "file", model=model, opt=opt)
        assert kind_of(loaded["model"]) == kind_of(model)
        assert_close(jax.tree.leaves({**loaded}), expected, rtol=1e-6)

    ocp = pytest.importorskip("orbax.checkpoint")
    model, opt = on_four_devices()
    trees = {"model": model, "opt": opt, "key": jax.random.key(0), "epoch": 0}
    with ocp.StandardCheckpointer() as checkpointer:
        # Without a template, Orbax looks for the eight devices.
        with pytest.raises(ValueError, match="Topology mismatch"):
            checkpointer.restore(of_eight_devices / "orbax")
        template = sl.checkpoint.to_dict(**trees)
        items = checkpointer.restore(of_eight_devices / "orbax", template)
    loaded = sl.checkpoint.from_dict(items, **trees)
    assert loaded.report.fits
    assert loaded["epoch"] == 3
    assert_same_bits(loaded["key"], jax.random.key(3))
    assert kind_of(loaded["model"]) == kind_of(model)
    assert_close(jax.tree.leaves((loaded["model"], loaded["opt"])), expected, rtol=1e-6)


OF_TWO = """
import jax, jax.numpy as jnp, numpy as np, slalom as sl, sys
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

port, rank, whole, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60)

def like(mesh, spec):
    def put(x):
        home = NamedSharding(mesh, spec if len(x.shape) == 2 else PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home)
    return put

def build():
    model = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
    return {"model": model, "opt": sl.Optimizer(sl.adam(0.1), model)}

# A file of one process starts a run of two.
line = Mesh(np.array(jax.devices()), ("data",))
trees = jax.tree.map(like(line, PartitionSpec("data")), jax.eval_shape(build))
loaded = sl.checkpoint.load(whole, **trees)
assert not loaded["model"]["w"].is_fully_addressable
try:
    sl.checkpoint.save(whole, **loaded)
except ValueError as error:
    print(error)

# What Orbax saved comes back on another mesh.
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, sl.checkpoint.to_dict(**loaded))
square = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
trees = jax.tree.map(like(square, PartitionSpec("y", "x")), jax.eval_shape(build))
with ocp.StandardCheckpointer() as checkpointer:
    items = checkpointer.restore(path, sl.checkpoint.to_dict(**trees))
again = sl.checkpoint.from_dict(items, **trees)
assert again["model"]["w"].sharding.mesh == square
for a, b in zip(jax.tree.leaves({**loaded}), jax.tree.leaves({**again}), strict=True):
    a, b = (multihost_utils.process_allgather(x, tiled=True) for x in (a, b))
    assert np.array_equal(a, b)
"""
"""A program of two processes with two devices each."""


@pytest.mark.slow
def test_two_processes_share_checkpoints_with_one(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    whole, path = tmp_path / "run.safetensors", tmp_path / "orbax"
    model, opt = same_on_one_device()
    sl.checkpoint.save(whole, model=model, opt=opt)
    before = whole.read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    commands = [
        [sys.executable, "-c", OF_TWO, *map(str, (port, rank, whole, path))] for rank in range(2)
    ]
    processes = [subprocess.Popen(command, env=environment(2), **pipes) for command in commands]
    try:
        for process in processes:
            said, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            assert (
                "'model.w' is spread over several processes, and this process has only a part of "
                "it. Save `sl.checkpoint.to_dict(model=model, opt=opt)` with Orbax.\n"
            ) in said  # among lines of the library that connects them
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert whole.read_bytes() == before
    trees = {"model": model, "opt": sl.Optimizer(sl.adam(0.1), model)}
    with ocp.StandardCheckpointer() as checkpointer:
        items = checkpointer.restore(path, sl.checkpoint.to_dict(**trees))
    loaded = sl.checkpoint.from_dict(items, **trees)
    assert_same_bits({**loaded}, {"model": model, "opt": opt})
