"""Times saving and loading a checkpoint of a model with Adam.

In turn with a plain write of as many bytes and `fsync`, and with loading by Equinox. All files are
new: to remove an old one takes time, too.

python -m benchmarks.checkpoint [gigabytes] [directory]
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds that a call takes until its arrays are there, and its result."""
    start = time.perf_counter()
    result = jax.block_until_ready(fn())
    return time.perf_counter() - start, result


def write(path: Path, arrays: list[np.ndarray]) -> None:
    """Writes arrays one after the other, and waits until the disk has them."""
    with path.open("wb", buffering=0) as file:
        for x in arrays:
            file.write(x.data)
        os.fsync(file.fileno())


def run(gigabytes: float, directory: Path) -> dict[str, list[float]]:
    """The seconds of each way to write and to read, in each repetition."""
    # Twelve leaves, and two moments for each: three arrays of float32 per parameter.
    size = int(gigabytes * 1e9 / 12 / 12)
    draw = jax.jit(lambda key: jax.random.normal(key, (size,)))
    model = {f"w{i}": draw(key) for i, key in enumerate(jax.random.split(jax.random.key(0), 12))}
    opt = sl.Optimizer(sl.adam(1e-3), model)
    model, opt = jax.block_until_ready(opt.step(model, jax.tree.map(jnp.sin, model)))
    trees, path = {"model": model, "opt": opt}, directory / "run.safetensors"
    names = ("write, fsync", "save", "save, call only", "load", "load, Equinox")
    found: dict[str, list[float]] = {name: [] for name in names}
    plain, other = directory / "plain", directory / "run.eqx"
    arrays = [np.asarray(x) for x in jax.tree.leaves((model, opt))]
    eqx.tree_serialise_leaves(other, (model, opt))
    for _ in range(8):
        plain.unlink(missing_ok=True)
        found["write, fsync"].append(timed(lambda: write(plain, arrays))[0])
        path.unlink(missing_ok=True)
        found["save"].append(timed(lambda: sl.checkpoint.save(path, **trees).wait())[0])
        call, saving = timed(lambda: sl.checkpoint.save(path, **trees, background=True))
        found["save, call only"].append(call)
        saving.wait()
        seconds, loaded = timed(lambda: sl.checkpoint.load(path, **trees))
        found["load"].append(seconds)
        assert loaded.report.fits
        del loaded
        seconds, _ = timed(lambda: eqx.tree_deserialise_leaves(other, (model, opt)))
        found["load, Equinox"].append(seconds)
    return found


if __name__ == "__main__":
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as directory:
        for name, seconds in run(gigabytes, Path(directory)).items():
            median, best = float(np.median(seconds)), min(seconds)
            print(f"{name:<16} median {median:5.2f} s, best {best:5.2f} s")
