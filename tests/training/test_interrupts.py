"""Signals during a training step: the caller keeps the old model and optimizer, or gets the new."""

import functools
import gc
import itertools
import signal
import sys
import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import slalom as sl
from helpers import assert_same_bits, slow_except, unchecked
from slalom._loop.programs.interrupts import HeldSignals

MODEL = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3)}


class Preempted(Exception):
    pass


def end(number, frame):
    raise Preempted


@pytest.fixture(autouse=True)
def interruptible():
    """Tests that a shell has started in the background ignore Ctrl-C."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(number=signal.SIGINT):
    signal.raise_signal(number)


def make(donate="opt"):
    def loss_fn(model, x):
        return sum(jnp.sum(jnp.square(p * x)) for p in jax.tree.leaves(model))

    model = jax.tree.map(jnp.copy, MODEL)
    return sl.train_step(loss_fn, donate=donate), model, sl.Optimizer(sl.adam(0.1), model)


def interrupted_before_its_assignment(results):
    raise KeyboardInterrupt


def test_results_are_kept_and_interrupted_traces_are_no_other_error():
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


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_signals_without_a_handler_are_left_alone(handler):
    step, model, opt = make()
    signal.signal(signal.SIGINT, handler)  # the fixture brings the old one back
    step(model, opt, 1.0)
    assert signal.getsignal(signal.SIGINT) is handler


def test_all_signals_that_wait_are_delivered_once_even_if_their_handlers_raise():
    held = HeldSignals(()).__enter__()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        interrupt(number)
    assert set(held.waiting) == {signal.SIGTERM, signal.SIGINT}
    with pytest.raises((KeyboardInterrupt, Preempted)) as caught:
        held.__exit__()
    assert {type(caught.value), type(caught.value.__context__)} == {KeyboardInterrupt, Preempted}
    assert not held.waiting


@pytest.mark.slow
def test_threads_that_step_at_once_keep_no_batch_and_others_may_step():
    both, kept = threading.Barrier(2), []

    def loss_fn(model, x):
        both.wait(30)  # so that each begins before the other ends
        return jnp.sum(model["b"] * x)

    def train(step):
        _, model, opt = make()
        x = jnp.ones(3)
        kept.append(weakref.ref(x))
        step(model, opt, x)
        both.wait(30)

    steps = [sl.train_step(functools.partial(loss_fn)), sl.train_step(lambda *a: loss_fn(*a))]
    threads = [threading.Thread(target=train, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert [x() for x in kept] == [None, None]

    step, model, opt = make()
    found = []
    thread = threading.Thread(target=lambda: found.append(step(model, opt, 1.0)))
    thread.start()
    thread.join()
    assert found[0][1].count == 1


SOURCE = str(Path(sl.__file__).parent)


def interrupting(number, sent):
    """A trace function that sends a signal before the line of Slalom with this number."""
    lines = itertools.count(1)

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line" and next(lines) == number:
            interrupt(sent)
        return trace

    return trace


def is_interrupted(call, number, sent=signal.SIGINT):
    """Calls, and says whether it was interrupted at this line, or was over before."""
    before = sys.gettrace()
    sys.settrace(interrupting(number, sent))
    try:
        call()
    except (KeyboardInterrupt, Preempted):
        return True
    finally:
        sys.settrace(before)
    return False


def copies(*trees):
    return jax.tree.map(jnp.copy, trees)


@pytest.fixture
def two_signals(monkeypatch):
    """Leaves out the others, for which a loop has a line each."""
    numbers = [int(signal.SIGINT), int(signal.SIGTERM)]
    monkeypatch.setattr("slalom._loop.programs.interrupts._SIGNALS", numbers)


@pytest.mark.parametrize("donate", slow_except(["opt", "all", False], "all"))
@pytest.mark.parametrize("sent", slow_except([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
@pytest.mark.usefixtures("two_signals")
def test_a_signal_at_any_line_loses_nothing(donate, sent):
    step, model, opt = make(donate)
    with unchecked():
        expected = step(*copies(model, opt), 1.0)[:2]
        kept = 0
        for number in itertools.count(1):
            given = copies(model, opt)
            if not is_interrupted(lambda given=given: step(*given, 1.0), number, sent):
                break
            if any(x.is_deleted() for x in jax.tree.leaves(given)):
                assert_same_bits(step.last[:2], expected)
                kept += 1
    assert (kept > 0) == bool(donate)
    assert number > kept + 5


@pytest.mark.usefixtures("two_signals")
def test_a_handler_that_does_not_raise_gets_the_signal_and_the_caller_the_results():
    seen, found = [], []

    def handler(number, frame):
        seen.append((number, frame.f_code.co_name))

    step, model, opt = make()
    signal.signal(signal.SIGINT, handler)
    with unchecked():
        for number in itertools.count(1, 5):
            given = copies(model, opt)
            seen.clear()
            assert not is_interrupted(lambda given=given: found.append(step(*given, 1.0)), number)
            assert signal.getsignal(signal.SIGINT) is handler
            assert found.pop()[1].count == 1
            if not seen:
                break
            assert seen == [(signal.SIGINT, "interrupt")]
    assert number > 20
