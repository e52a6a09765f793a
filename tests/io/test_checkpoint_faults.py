"""Faults: whatever happens, the old checkpoint is intact, and the error says what to do."""

import errno
import fcntl
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import slalom as sl
from helpers import assert_same_bits
from slalom.checkpoint import _file, _format

DAMAGED = "Load an older checkpoint; `sl.checkpoint.Rolling` finds the newest complete one."

WRITER = f"""
import importlib, os, sys, types
import numpy as np

sys.modules["alone"] = types.ModuleType("alone")
sys.modules["alone"].__path__ = [{str(Path(_file.__file__).parent)!r}]
file = importlib.import_module("alone._file")
assert "jax" not in sys.modules


def write(path, n, size=250_000):
    arrays = {{name: np.full(size, n, np.float32) for name in "abcd"}}
    file.write(path, arrays, values={{"n": n}}, header={{"layouts": "{{}}"}})


"""
"""The start of a program without JAX that writes checkpoints."""


def program(code):
    return [sys.executable, "-c", WRITER + textwrap.dedent(code)]


def read(path):
    """All arrays in a file, and its numbers."""
    with _file.File(path) as file:
        return {name: x.read() for name, x in file.arrays.items()}, file.values()


def generation(path):
    """The number that everything in a file of `write` consists of."""
    arrays, values = read(path)
    n = values["n"]
    assert [*arrays] == [*"abcd"]
    assert all(np.all(x == n) for x in arrays.values())
    return n


def leftovers(directory):
    return [path for path in directory.iterdir() if path.name.endswith(".partial")]


def small(path, n=1.0):
    """A small checkpoint of a model and its optimizer."""
    model = {"w": jnp.full(2, n), "z": jnp.zeros((0, 2), "bfloat16")}
    opt = sl.Optimizer(sl.sgd(0.1, momentum=0.9), model)
    sl.checkpoint.save(path, model=model, opt=opt, epoch=3)
    return model, opt


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path):
    path, moment = tmp_path / "run.safetensors", random.Random(0)
    code = """
        path, n = sys.argv[1], int(sys.argv[2])
        for n in range(n, n + 1_000_000):
            write(path, n)
            print(n, flush=True)
    """
    interrupted, last = 0, 0
    for _ in range(30):
        command = [*program(code), str(path), str(last + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert int(writer.stdout.readline()) == last + 1
            time.sleep(moment.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
            said = [last + 1, *map(int, writer.stdout.read().split())]
        interrupted += len(leftovers(tmp_path))
        assert len(leftovers(tmp_path)) <= 1
        last = generation(path)
        # What was said to be saved is there, or what came after it.
        assert last in (said[-1], said[-1] + 1)
    assert interrupted >= 5, "nearly all of the kills came between two saves"
    _file.write(path, {})
    assert [p.name for p in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.exhaustive
def test_training_that_is_killed_again_and_again_ends_where_it_would_have(tmp_path):
    code = """
        import jax, jax.numpy as jnp, sys, slalom as sl

        model = {"w": jax.random.normal(jax.random.key(0), (300, 300))}
        schedule = sl.schedules.linear(1e-2, 1e-3, transition_steps=15)
        opt = sl.Optimizer((sl.AddNoise(1e-3, 0.5) | sl.adam(schedule)).every_k(2), model)
        step = sl.train_step(lambda model, x: jnp.mean((x @ model["w"] - 1.0) ** 2))
        rolling = sl.checkpoint.Rolling(sys.argv[1], keep=2, background=True)
        n, key = 0, jax.random.key(1)
        if rolling.latest():
            loaded = rolling.load(model=model, opt=opt, n=n, key=key, hyperparams="file")
            model, opt, n, key = (loaded[name] for name in ("model", "opt", "n", "key"))
        while n < 40:
            key, now = jax.random.split(key)
            model, opt, loss = step(model, opt, jax.random.normal(now, (8, 300)))
            n += 1
            rolling.save(n, model=model, opt=opt, n=n, key=key)
            print(n, flush=True)
    """

    def start(directory):
        command = [sys.executable, "-c", textwrap.dedent(code), str(directory)]
        environment = os.environ | {"SLALOM_TYPECHECK": "0"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)

    moment = random.Random(2)
    with start(tmp_path / "whole") as whole:
        whole.communicate()
    for kill in (True, True, False):
        with start(tmp_path / "killed") as training:
            training.stdout.readline()  # every run gets at least one step further
            if kill:
                time.sleep(moment.uniform(0, 0.3))
                training.kill()
            training.communicate()
    ends = [sl.checkpoint.Rolling(tmp_path / name).latest() for name in ("whole", "killed")]
    assert [end.name for end in ends] == ["step-00000040.safetensors"] * 2
    assert ends[0].read_bytes() == ends[1].read_bytes()


@pytest.mark.slow
def test_two_processes_that_write_one_file_leave_it_whole(tmp_path):
    path = tmp_path / "run.safetensors"
    code = "for n in range(40): write(sys.argv[1], n)"
    writers = [subprocess.Popen([*program(code), str(path)]) for _ in range(2)]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            generation(path)
            seen += 1
    assert [writer.wait() for writer in writers] == [0, 0]
    assert seen > 5
    assert generation(path) == 39
    assert not leftovers(tmp_path)


def test_only_temporary_files_of_ended_processes_are_removed(tmp_path):
    path = tmp_path / "step-3.safetensors"
    names = {
        "living": ".step-3.safetensors.00000001.partial",
        "ended": ".step-3.safetensors.00000002.partial",
        "of another": ".step-4.safetensors.00000003.partial",
        "foreign": ".step-3.safetensors.partial",
    }
    for name in names.values():
        (tmp_path / name).touch()

    def present():
        return {key for key, name in names.items() if (tmp_path / name).exists()}

    with (tmp_path / names["living"]).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _file.write(path, {})
        assert present() == {"living", "of another", "foreign"}
    sl.checkpoint.Rolling(tmp_path).save(5, n=5)
    assert present() == {"foreign"}


@pytest.mark.slow
def test_files_are_written_and_read_without_jax(tmp_path):
    path = tmp_path / "run.safetensors"
    tree = {"b": jnp.ones(3, "bfloat16"), "i": jnp.ones(2, "int4")}
    sl.checkpoint.save(path, model=tree)
    code = """
        with file.File(sys.argv[1]) as opened:
            arrays = {name: x.read() for name, x in opened.arrays.items()}
        assert arrays["model.b"].dtype.name == "bfloat16"
        file.write(sys.argv[2], arrays)
        assert "jax" not in sys.modules
    """
    subprocess.run([*program(code), str(path), str(tmp_path / "copy")], check=True)
    arrays, _ = read(tmp_path / "copy")
    assert_same_bits(arrays, {f"model.{name}": np.asarray(x) for name, x in tree.items()})


def refused(call, *args, error=sl.checkpoint.DamagedError, **known):
    """The message of the error of a call."""
    with pytest.raises(error) as caught:
        call(*args, **known)
    return str(caught.value)


def test_damaged_and_foreign_files_are_named(path):
    _, opt = small(path)
    whole = path.read_bytes()
    for length in (0, 7, 8, 100, *range(0, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:length])
        assert f"'{path}' is damaged" in refused(read, path)
    assert refused(read, path).startswith(f"'{path}' is damaged: its arrays have ")
    path.write_bytes(whole + b"\0")
    refused(read, path)
    at = whole.rindex(np.ones(2, np.float32).tobytes())
    for changed, what in (
        (whole.replace(b"sl.Trace", b"os.Trace"), "its header"),
        (whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :], "the array 'model.w'"),
    ):
        path.write_bytes(changed)
        message = f"'{path}' is damaged: {what} does not match its checksum. {DAMAGED}"
        assert refused(read, path) == message
    # What is not asked for is not read.
    assert_same_bits(sl.checkpoint.load(path, opt=opt)["opt"], opt)

    foreign = [b"", b"\0" * 100, b"PK\x03\x04 a zip file", b"text " * 50, b"\xff" * 8]
    foreign += [pickle.dumps({"w": np.ones(3)}), np.random.default_rng(0).bytes(1000)]
    for data in foreign:
        path.write_bytes(data)
        assert f"'{path}' is damaged, or is not a safetensors file (" in refused(read, path)
    safetensors.numpy.save_file({"w": np.ones(3)}, path)
    assert refused(read, path) == (
        f"'{path}' is a safetensors file, but not a checkpoint that Slalom wrote. Read it with "
        "`safetensors.numpy.load_file`."
    )
    # As commits before version 1 was fixed wrote it.
    text = {"format": "slalom.checkpoint", "format_version": "1", "versions": '{"slalom": "0.0"}'}
    safetensors.numpy.save_file({"w": np.ones(3)}, path, text | {"header_checksum": "12345678"})
    assert refused(read, path) == (
        f"'{path}' is a checkpoint of an older form, from before format version 1 was fixed, which "
        "this version of Slalom does not read. Load it with the version that wrote it: "
        '{"slalom": "0.0"}.'
    )


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_anywhere_is_noticed(path, every):
    small(path)
    whole, bit = path.read_bytes(), random.Random(0)
    for i in range(0, len(whole), every):
        changed = bytearray(whole)
        changed[i] ^= 1 << bit.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"damaged|not a checkpoint|format version"):
            read(path)


def test_a_file_of_a_newer_format_is_refused(path, monkeypatch):
    monkeypatch.setattr(_format, "VERSION", 2)
    small(path)
    monkeypatch.undo()
    assert refused(read, path, error=ValueError) == (
        f"'{path}' has format version 2, but this version of Slalom reads up to 1. Upgrade Slalom "
        "to load it."
    )


def test_paths_that_lead_to_no_file(tmp_path):
    missing, below, pipe = tmp_path / "missing", tmp_path / "file" / "run", tmp_path / "pipe"
    (tmp_path / "file").touch()
    os.mkfifo(pipe)
    there_is_none = "There is no checkpoint"
    for path, error, message in (
        (missing, FileNotFoundError, f"{there_is_none} '{missing}'."),
        (below, NotADirectoryError, f"{there_is_none} '{below}': a part of this path is a file."),
        (
            tmp_path,
            IsADirectoryError,
            f"'{tmp_path}' is a directory. To load its newest checkpoint, write "
            f"`sl.checkpoint.Rolling('{tmp_path}').load(...)`.",
        ),
        *(
            (x, OSError, f"[Errno {errno.EINVAL}] '{x}' is a device or a pipe, not a checkpoint.")
            for x in (pipe, Path(os.devnull))
        ),
    ):
        assert refused(sl.checkpoint.load, path, n=0, error=error) == message


def test_paths_where_nothing_can_be_written(tmp_path):
    file, below = tmp_path / "file", tmp_path / "file" / "deep" / "run"
    file.write_text("old")
    assert refused(small, below, error=NotADirectoryError) == (
        f"[Errno {errno.ENOTDIR}] The checkpoint '{below}' cannot be written: '{file}' is a file, "
        "not a directory. Choose another path."
    )
    assert refused(small, tmp_path, error=IsADirectoryError) == (
        f"[Errno {errno.EISDIR}] The checkpoint '{tmp_path}' cannot be written: it is a directory. "
        "Add the name of a file, or use `sl.checkpoint.Rolling`."
    )
    assert file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file]


def test_directories_are_made_and_links_are_followed(tmp_path):
    deep, link = tmp_path / "a" / "b" / "run", tmp_path / "link"
    small(deep)
    link.symlink_to(deep)
    model, _ = small(link, 2.0)
    assert link.is_symlink()
    assert_same_bits(sl.checkpoint.load(deep, model=model)["model"], model)


def failed(code, *arguments, path):
    """The last line of a program without JAX that fails; the file at `path` must stay."""
    before = path.read_bytes() if path.exists() else None
    done = subprocess.run(
        [*program(code), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert (path.read_bytes() if path.exists() else None) == before
    assert not path.parent.is_dir() or not leftovers(path.parent)
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_an_unwritable_directory(tmp_path):
    directory = tmp_path / "locked"
    path = directory / "run"
    directory.mkdir()
    _file.write(path, {})
    directory.chmod(0o555)
    # Root may write everywhere, so it becomes nobody first, who must find the directory.
    if os.geteuid() == 0:
        for parent in directory.parents[:-2]:
            parent.chmod(parent.stat().st_mode | 0o111)
    code = "if os.geteuid() == 0: os.seteuid(65534)\nwrite(sys.argv[1], 1)"
    assert failed(code, path, path=path) == (
        f"PermissionError: [Errno {errno.EACCES}] The checkpoint '{path}' cannot be written: this "
        f"user may not write in '{directory}'. Choose another directory. The old file is intact."
    )


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(tmp_path):
    path = tmp_path / "run"
    _file.write(path, {})
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        write(sys.argv[1], 1)
    """
    assert failed(code, path, path=path) == (
        f"OSError: [Errno {errno.EFBIG}] The checkpoint '{path}' cannot be written: the file would "
        "exceed the size limit of this process (`ulimit -f`). The old file is intact."
    )


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system with 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk(tiny_disk):
    path = tiny_disk / "run"
    small(path)
    assert failed("write(sys.argv[1], 1)", path, path=path) == (
        f"OSError: [Errno {errno.ENOSPC}] The checkpoint '{path}' cannot be written: the disk is "
        "full. Free some space and save again. The old file is intact."
    )
    # Nothing of the failed save takes up space, and the next one succeeds.
    model, _ = small(path, 2.0)
    assert_same_bits(sl.checkpoint.load(path, model=model)["model"], model)


@pytest.mark.slow
def test_a_full_disk_in_the_background(tiny_disk):
    rolling = sl.checkpoint.Rolling(tiny_disk, keep=2, background=True)
    rolling.save(1, x=np.zeros(10))
    rolling.save(2, x=np.zeros(10**6))
    with pytest.raises(OSError, match="the disk is full"):
        rolling.save(3, x=np.zeros(10))
    assert rolling.steps == (1,)
    rolling.save(3, x=np.zeros(10)).wait()
    assert rolling.steps == (1, 3)
