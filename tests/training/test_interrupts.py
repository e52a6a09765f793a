"""Ctrl-C during a training step: the caller keeps the old model and optimizer, or gets the new."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import slalom as sl
from helpers import assert_same_bits
from slalom._loop.programs import program

MODEL = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3)}


@pytest.fixture(autouse=True)
def interruptible():
    """Tests that a shell has started in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def make(donate="opt"):
    def loss_fn(model, x):
        return sum(jnp.sum(jnp.square(p * x)) for p in jax.tree.leaves(model))

    model = jax.tree.map(jnp.copy, MODEL)
    return sl.train_step(loss_fn, donate=donate), model, sl.Optimizer(sl.adam(0.1), model)


@pytest.fixture
def after_dispatch(monkeypatch):
    """Interrupts the next call when its program has run."""

    def unpack(packed):
        monkeypatch.undo()
        interrupt()
        return program.unpack(packed)

    return lambda: monkeypatch.setattr(program, "unpack", unpack)


@pytest.mark.slow
@pytest.mark.parametrize("donate", ["opt", "all"])
def test_results_that_were_not_returned_are_kept(donate, after_dispatch):
    step, model, opt = make(donate)
    expected, expected_opt, _ = step(*jax.tree.map(jnp.copy, (model, opt)), 1.0)
    after_dispatch()
    with pytest.raises(KeyboardInterrupt):
        step(model, opt, 1.0)
    assert_same_bits(step.last[:2], (expected, expected_opt))
    with pytest.raises(ValueError, match=r"\n    model, opt, loss = step[.]last\n"):
        step(model, opt, 1.0)
    model, opt, _ = step.last
    model, opt, _ = step(model, opt, 1.0)
    assert_same_bits((model, opt), step(expected, expected_opt, 1.0)[:2])


def interrupted_before_its_assignment(results):
    raise KeyboardInterrupt


def test_results_that_were_not_assigned_are_kept():
    step, model, opt = make()
    with pytest.raises(KeyboardInterrupt):
        model, opt, _ = interrupted_before_its_assignment(step(model, opt, 1.0))
    model, opt, _ = step.last
    assert opt.count == 1
    with pytest.raises(KeyboardInterrupt):
        model, opt, _ = interrupted_before_its_assignment(step.scan(model, opt, jnp.ones(3)))
    model, opt, losses = step.last
    assert opt.count == 4
    assert losses.shape == (3,)
    # What was traced for another program must not outlive it.
    jax.eval_shape(step, model, opt, 1.0)
    assert step.last is None


def test_an_interrupt_while_an_outer_program_is_traced_is_not_another_error():
    _, model, opt = make()

    def loss_fn(model):
        interrupt()
        return jnp.sum(model["b"] ** 2)

    with pytest.raises(KeyboardInterrupt):
        jax.jit(sl.train_step(loss_fn))(model, opt)


def test_nothing_is_donated_by_a_call_that_is_interrupted_while_it_compiles():
    model = jax.tree.map(jnp.copy, MODEL)
    opt = sl.Optimizer(sl.adam(0.1), model)
    do = [interrupt]

    @sl.train_step(donate="all")
    def step(model):
        if do:
            do.pop()()
        return jnp.sum(model["w"] ** 2)

    with pytest.raises(KeyboardInterrupt):
        step(model, opt)
    assert step.last is None
    _, opt, _ = step(model, opt)
    assert opt.count == 1


def test_without_donation_the_arguments_are_still_there(after_dispatch):
    step, model, opt = make(donate=False)
    after_dispatch()
    with pytest.raises(KeyboardInterrupt):
        step(model, opt, 1.0)
    assert step(model, opt, 1.0)[1].count == 1


def test_a_handler_that_does_not_raise_gets_the_signal_and_the_caller_the_results(after_dispatch):
    step, model, opt = make()
    seen = []

    def handler(number, frame):
        seen.append((number, frame.f_code.co_name))

    before = signal.signal(signal.SIGINT, handler)
    try:
        after_dispatch()
        model, opt, _ = step(model, opt, 1.0)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [(signal.SIGINT, "interrupt")]
    assert opt.count == 1


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_signal_without_a_handler_is_left_alone(handler):
    step, model, opt = make()
    before = signal.signal(signal.SIGINT, handler)
    try:
        step(model, opt, 1.0)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_may_step():
    step, model, opt = make()
    found = []
    thread = threading.Thread(target=lambda: found.append(step(model, opt, 1.0)))
    thread.start()
    thread.join()
    assert found[0][1].count == 1


PROGRAM = """
import signal, sys, jax, jax.numpy as jnp, slalom as sl

# A process that a shell has started in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
size, donate = int(sys.argv[1]), sys.argv[2]
model = {"w": jnp.ones((size, size)) / size, "b": jnp.ones(size)}
opt = sl.Optimizer(sl.adam(1e-3), model)
step = sl.train_step(
    lambda m, x: jnp.mean((jnp.tanh(x @ m["w"]) @ m["w"] + m["b"]) ** 2), donate=donate
)
x = jnp.ones((16, size))
model, opt, loss = step(model, opt, x)
found, n = "ready", 1

def is_deleted(*trees):
    return any(x.is_deleted() for x in jax.tree.leaves(trees))

while True:
    print(found, flush=True)
    try:
        while True:
            model, opt, loss = step(model, opt, x)
    except KeyboardInterrupt:
        found = "whole"
        if is_deleted(model, opt):
            found = "lost"
            if step.last is not None and not is_deleted(step.last):
                found = "kept"
                model, opt, loss = step.last
        if found == "lost":
            model = {"w": jnp.ones((size, size)) / size, "b": jnp.ones(size)}
            opt, n = sl.Optimizer(sl.adam(1e-3), model), 0
        count, n = n, int(opt.count)
        assert n >= count
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("4", "opt"), ("4", "all"), ("600", "opt"), ("600", "all")])
def test_real_signals_lose_nothing(arguments):
    environment = os.environ | {"SLALOM_TYPECHECK": "0"}
    moment = random.Random(0)
    counts = {"ready": 0, "whole": 0, "kept": 0, "lost": 0}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as training:
        for _ in range(150):
            counts[training.stdout.readline().strip()] += 1
            time.sleep(moment.uniform(0.005, 0.03))
            training.send_signal(signal.SIGINT)
        training.kill()
    assert counts["lost"] == 0, counts
    assert counts["kept"] > 20, counts
