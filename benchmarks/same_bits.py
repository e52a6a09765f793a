"""Compares what all rows of the tests' table compute before and after a change of the source.

    python -m benchmarks.same_bits --write before.npz     # five minutes
    python -m benchmarks.same_bits --against before.npz   # after the change

Each row takes three steps on small arrays of mixed dtypes and on a multilayer perceptron. Rows that
store encoded state also have a large matrix. The parameters and the state must have the same bits
afterwards. Where a rule multiplies or factorizes matrices, they may differ by 1e-5 of the largest
number of an array.
"""

import argparse
import functools
import hashlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl
from slalom._core.protocol.parts import transforms

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers import known
from table import EVERYTHING, PER_EXAMPLE

STEPS = 3
TOLERANCE = 1e-5
EXAMPLES = 4

Arrays = dict[str, np.ndarray]


@functools.cache
def make_params(large: bool) -> Any:
    """The parameters of a step."""
    random = np.random.default_rng(0)

    def normal(*shape: int, dtype: str = "float32") -> Any:
        return jnp.asarray(random.standard_normal(shape), dtype)

    model = {
        "w": normal(2, 3),
        "b": (normal(3, dtype="bfloat16"), normal(dtype="float16")),
        "empty": jnp.zeros((0, 2)),
        "hole": None,
        "mlp": eqx.nn.MLP(24, 8, 32, 2, key=jax.random.key(0)),
    }
    if large:
        model["large"] = normal(600, 512)
    return eqx.filter(model, eqx.is_inexact_array)


def gradients(params: Any, step: int, examples: tuple[int, ...]) -> Any:
    """The gradient of `loss_of_any`, with some noise."""
    random = np.random.default_rng(step)

    def at_leaf(x: Any) -> Any:
        noise = random.standard_normal((*examples, *x.shape)) / 8
        return jnp.asarray(0.5 + 0.1 * np.asarray(x, float) + noise, x.dtype)

    return jax.tree.map(at_leaf, params)


def result(tx: sl.AbstractTransform, examples: tuple[int, ...]) -> Arrays:
    """The parameters and the state after a few steps, by path."""
    params = make_params(any(isinstance(p.module, sl.wrappers.Store) for p in transforms(tx)))
    opt = sl.Optimizer(tx, params)

    @jax.jit
    def step(params: Any, opt: Any, grads: Any) -> tuple[Any, Any]:
        mean = jax.tree.map(lambda g: jnp.mean(g, 0), grads) if examples else grads
        return opt.step(params, grads, **known(params, mean))

    for i in range(STEPS):
        params, opt = step(params, opt, gradients(params, i, examples))
    return dict(_arrays({"params": params, "state": opt.state}))


def _arrays(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not eqx.is_array(x):
            continue
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        array = np.asarray(x)
        # NumPy cannot load bfloat16 and other narrow types. They fit into float32.
        wide = array.astype(np.float32) if array.dtype.kind == "V" else array
        yield f"{jax.tree_util.keystr(path)}: {x.dtype}", wide


def digest(arrays: Arrays) -> str:
    """A short hash of names and bits."""
    content = hashlib.sha256()
    for name, x in arrays.items():
        content.update(name.encode() + x.tobytes())
    return content.hexdigest()[:12]


def multiplies_matrices(tx: sl.AbstractTransform) -> bool:
    """Whether the result depends on products of matrices, whose sums the compiler orders."""
    return any(part.module.over == "matrix" for part in transforms(tx))


def difference(before: Arrays, after: Arrays, tolerance: float) -> str | None:
    """What differs, or `None`."""
    if before.keys() != after.keys():
        return f"other arrays: {sorted(before.keys() ^ after.keys())}"
    for name, old in before.items():
        new = after[name]
        if old.shape != new.shape:
            return f"{name}: {old.shape} became {new.shape}"
        if old.tobytes() == new.tobytes():
            continue
        a, b = old.astype(complex), new.astype(complex)
        with np.errstate(invalid="ignore"):
            apart = np.max(np.abs(a - b)) / np.max(np.abs(a))
        if not apart <= tolerance:
            return f"{name}: {apart:.1e} apart"
    return None


def compare(before: Arrays | None, part_of_name: str | None = None) -> tuple[Arrays, int]:
    """Prints a line for each row whose name contains this, and returns what they compute, and how
    many differ from the results before."""
    by_row: dict[str, Arrays] = {}
    for key, x in (before or {}).items():
        row, _, path = key.partition("\t")
        by_row.setdefault(row, {})[path] = x
    after: Arrays = {}
    different = 0
    for i, (row, tx) in enumerate((EVERYTHING | PER_EXAMPLE).items()):
        if part_of_name is not None and part_of_name not in row:
            continue
        arrays = result(tx, (EXAMPLES,) if row in PER_EXAMPLE else ())
        after |= {f"{row}\t{path}": x for path, x in arrays.items()}
        verdict = ""
        if before is not None:
            tolerance = TOLERANCE if multiplies_matrices(tx) else 0.0
            found = difference(by_row.pop(row, {}), arrays, tolerance)
            different += found is not None
            verdict = found or "same"
        print(f"{row:48s} {digest(arrays)} {verdict}", flush=True)
        if i % 20 == 19:
            jax.clear_caches()  # programs take memory
    if before is not None:
        missing = [] if part_of_name else sorted(by_row)
        print(f"{different} rows differ, {len(missing)} are missing", *missing)
        different += len(missing)
    return after, different


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.same_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", help="only rows whose name contains this")
    parser.add_argument("--write", type=Path, help="write the results to this file")
    parser.add_argument("--against", type=Path, help="compare with the results in this file")
    args = parser.parse_args(argv)
    before = dict(np.load(args.against)) if args.against else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some rows are rules that ascend
        after, different = compare(before, args.rows)
    if args.write:
        np.savez(args.write, **after)
    return int(different > 0)


if __name__ == "__main__":
    # LLVM contracts products and sums differently in programs that compute the same.
    jax.config.update("jax_disable_most_optimizations", True)
    sys.exit(main())
