"""How steps are timed: dispatched one after the other, and awaited together."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..measure import Step

ROUNDS = 11


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


def seconds_on_device(call: Any, steps: int = 5) -> float | None:
    """The time of a step that its kernels run, from a profile; `None` on a CPU.

    The rest of the time of a step the device waits for the host to start the next kernel.
    """
    if jax.default_backend() == "cpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        # The first profile of a process loses kernels, and the second one may show them.
        for name in ("first", "second", "third"):
            with jax.profiler.trace(f"{folder}/{name}"):
                for _ in range(steps):
                    call.start()
                call.wait()
        (path,) = Path(folder, "third").rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines]
        kernels = [e for line in lines if "Stream" in line.name for e in line.events]
        return sum(e.duration_ns for e in kernels) / 1e9 / steps


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
