"""Times saving and loading a checkpoint of a model with Adam.

python -m benchmarks.checkpoint [gigabytes] [directory]
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds that a call takes until its arrays are there, and its result."""
    start = time.perf_counter()
    result = jax.block_until_ready(fn())
    return time.perf_counter() - start, result


def run(gigabytes: float, directory: Path) -> dict[str, list[float]]:
    """The seconds of saving, of its call in the background, and of loading, in each repetition."""
    # Twelve leaves, and two moments for each: three arrays of float32 per parameter.
    size = int(gigabytes * 1e9 / 12 / 12)
    draw = jax.jit(lambda key: jax.random.normal(key, (size,)))
    model = {f"w{i}": draw(key) for i, key in enumerate(jax.random.split(jax.random.key(0), 12))}
    opt = sl.Optimizer(sl.adam(1e-3), model)
    model, opt = jax.block_until_ready(opt.step(model, jax.tree.map(jnp.sin, model)))
    trees, path = {"model": model, "opt": opt}, directory / "run.safetensors"
    found: dict[str, list[float]] = {"save": [], "save, call only": [], "load": []}
    for _ in range(5):
        found["save"].append(timed(lambda: sl.checkpoint.save(path, **trees).wait())[0])
        call, saving = timed(lambda: sl.checkpoint.save(path, **trees, background=True))
        found["save, call only"].append(call)
        saving.wait()
        seconds, loaded = timed(lambda: sl.checkpoint.load(path, **trees))
        found["load"].append(seconds)
        assert loaded.report.fits
    return found


if __name__ == "__main__":
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as directory:
        for name, seconds in run(gigabytes, Path(directory)).items():
            median, best = float(np.median(seconds)), min(seconds)
            print(f"{name:<16} median {median:5.2f} s, best {best:5.2f} s")
