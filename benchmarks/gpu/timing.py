"""How steps are timed: dispatched one after the other, and awaited together."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..measure import Step

ROUNDS = 5


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class Chained:
    """A call that starts a step without waiting for it, and the wait for all of them."""

    def __init__(self, step: Step):
        self.step = step

    def start(self) -> None:
        self.step.carry = self.step.program(*self.step.carry, self.step.grads)

    def wait(self) -> None:
        jax.block_until_ready(self.step.carry)


def seconds(calls: dict[str, Any], repetitions: int) -> dict[str, float]:
    """The median time of a step of each, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repetitions):
                call.start()
            call.wait()
            if number:  # the first round is a warm-up
                times[name].append((time.perf_counter() - start) / repetitions)
    return {name: statistics.median(each) for name, each in times.items()}


class Copy:
    """x ← x + 1, which reads and writes each number once."""

    def __init__(self, entries: int):
        self.x = jnp.zeros(entries)
        self.bytes = 8 * entries
        self.add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def start(self) -> None:
        self.x = self.add(self.x)

    def wait(self) -> None:
        jax.block_until_ready(self.x)


class Repeated:
    """A call that blocks by itself."""

    def __init__(self, call: Callable[[], Any]):
        self.start = call

    def wait(self) -> None:
        pass
