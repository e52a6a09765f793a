"""Saves in the background, as other calls, threads and processes see them."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trained import MODEL

import slalom as sl
from helpers import assert_same_bits
from slalom.checkpoint import _file, _saving


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
    assert not _saving._unfinished
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
        return f"in process {os.getppid()}" in repr(saving) and not _saving._unfinished

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
