"""Muon next to Optax, PyTorch and plain matrix products: `python -m benchmarks.matrices`.

On the 148 leaves of GPT-2 small, of which 48 are matrices for Muon and the others go to AdamW. The
contenders take turns in one run. The limit is the time of the matrix products that
`sl.Orthogonalize` makes, on their own: the same shapes, as often. PyTorch iterates in bfloat16, the
others in float32.
"""

import argparse
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib

import slalom as sl

from . import torch_rival
from .measure import interleave, ratio, spread, step_of, trace_once
from .rows import ROWS
from .shapes import gpt2

Tree = dict[str, Any]


def leaves(fraction: int = 1) -> Tree:
    """Random leaves with the shapes of GPT-2 small, with all sides divided by `fraction`."""
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal([max(1, n // fraction) for n in leaf.shape], np.float32)
        for name, leaf in jax.eval_shape(gpt2).items()
    }


def is_hidden(name: str, leaf: Any) -> bool:
    """Whether it is a matrix that is not an embedding."""
    return leaf.ndim == 2 and name.startswith("block")


# --- the contenders -------------------------------------------------------------------------


def ours() -> sl.AbstractTransform:
    return sl.muon(0.02, where=sl.where.leaf(is_hidden), adam_learning_rate=1e-3)


def of_optax(params: Tree) -> Any:
    """Optax's, with the same matrices."""
    dimensions: Any = {
        name: optax.contrib.MuonDimensionNumbers() if is_hidden(name, leaf) else None
        for name, leaf in params.items()
    }
    return optax.contrib.muon(
        0.02, adam_learning_rate=1e-3, muon_weight_dimension_numbers=dimensions
    )


def of_torch(params: Tree, grads: Tree) -> Callable[[], None]:
    """PyTorch's, with its fused AdamW for the others."""
    # Otherwise its threads keep spinning after each step, while the next library runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    tensors = {name: torch.tensor(p, requires_grad=True) for name, p in params.items()}
    for name, tensor in tensors.items():
        tensor.grad = torch.tensor(grads[name])
    hidden = [t for name, t in tensors.items() if is_hidden(name, t)]
    others = [t for name, t in tensors.items() if not is_hidden(name, t)]
    muon = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.0)
    adamw = torch.optim.AdamW(others, lr=1e-3, weight_decay=0.0, fused=True)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


# --- the limit ------------------------------------------------------------------------------


class Products:
    """The matrix products of a function, on their own."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self.counts = _products(jax.make_jaxpr(function)(*args).jaxpr)
        self.calls = [_Product(count, *kind) for kind, count in self.counts.items()]

    def __call__(self) -> None:
        for call in self.calls:
            call()


class _Product:
    """A number of products of the same shapes, which write to the same memory."""

    def __init__(self, count: int, dimensions: Any, left: Any, right: Any):
        def once(_: Any, carry: Any) -> Any:
            # Otherwise XLA may take the product out of the loop.
            out, a, b = jax.lax.optimization_barrier(carry)
            del out
            return jax.lax.dot_general(a, b, dimensions), a, b

        def products(*carry: Any) -> Any:
            return jax.lax.fori_loop(0, count, once, carry)

        keys = jax.random.split(jax.random.key(0))
        a, b = (
            jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, (left, right), strict=True)
        )
        self.carry = (jax.lax.dot_general(a, b, dimensions), a, b)
        self.program: Any = jax.jit(products, donate_argnums=(0, 1, 2)).lower(*self.carry).compile()

    def __call__(self) -> None:
        self.carry = jax.block_until_ready(self.program(*self.carry))


def _products(jaxpr: Any) -> Counter[Any]:
    """How often each kind of product occurs, in inner functions and loops too."""
    counts: Counter[Any] = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            left, right = (x.aval for x in equation.invars)
            counts[equation.params["dimension_numbers"], left, right] += 1
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                for kind, count in _products(inner).items():
                    counts[kind] += count * equation.params.get("length", 1)
    return counts


# --- what is printed ------------------------------------------------------------------------


def compare(params: Tree, repetitions: int, *, with_torch: bool) -> dict[str, Any]:
    """Measures all contenders with these parameters.

    **Returns:** the costs of the programs, the times of other libraries divided by ours, and the
    share of the limit that each of our two steps reaches.
    """
    grads = {name: 0.01 * p[::-1].copy() for name, p in params.items()}
    arrays, given = jax.device_put((params, grads))
    hidden, updates = (
        {name: leaf for name, leaf in leaves.items() if is_hidden(name, leaf)}
        for leaves in (arrays, given)
    )
    trace_once(ROWS["AdamW"])
    adamw = step_of(sl.adamw(1e-3), arrays, given).cost
    link = sl.Orthogonalize()
    steps = {
        "muon": step_of(ours(), arrays, given),
        "Orthogonalize": step_of(link | sl.ScaleByLearningRate(0.02), hidden, updates),
        "optax": step_of(of_optax(params), arrays, given),
    }
    state = link.init(hidden)
    limit = Products(lambda updates: link.update(updates, state), updates)
    calls: dict[str, Callable[[], Any]] = {**steps, "limit": limit}
    if with_torch:
        calls["torch"] = of_torch(params, grads)
    times = interleave(calls, repetitions) if repetitions else {}
    return {
        "costs": {"AdamW": adamw, **{name: step.cost for name, step in steps.items()}},
        "seconds": {name: spread(each) for name, each in times.items()},
        "ratios": {
            name: ratio(times[name], times["muon"]) for name in ("optax", "torch") if name in times
        },
        "shares": {
            name: ratio(times["limit"], times[name])
            for name in ("muon", "Orthogonalize")
            if name in times
        },
        "products": limit.counts.total(),
    }


def lines(found: dict[str, Any], params: Tree) -> list[str]:
    """The results as text."""
    hidden = sum(is_hidden(name, p) for name, p in params.items())
    size, adamw = sum(p.nbytes for p in params.values()), found["costs"]["AdamW"]
    text = [f"{len(params)} leaves, {hidden} matrices, {found['products']} products"]
    for name, cost in found["costs"].items():
        text.append(
            f"{name}: trace {cost.trace_s:.2f} s, compile {cost.compile_s:.2f} s "
            f"({cost.compile_s / adamw.compile_s:.2f} × AdamW), "
            f"scratch {cost.scratch_bytes / size:.1%} of the parameters"
        )
    for name, seconds in found["seconds"].items():
        text.append(f"{name}: {1e3 * seconds['median']:.1f} ms")
    for name, each in found["ratios"].items():
        text.append(f"{name} / slalom: {each['median']:.2f} ({each['low']:.2f}–{each['high']:.2f})")
    for name, each in found["shares"].items():
        text.append(
            f"{name}: {each['median']:.0%} of the limit ({each['low']:.0%}–{each['high']:.0%})"
        )
    return text


def main(argv: list[str] | None = None) -> None:
    """Measures, and prints what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.matrices",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of each side")
    parser.add_argument("--repetitions", type=int, default=8, help="steps of each; 0: no times")
    parser.add_argument("--no-torch", action="store_true", help="exclude PyTorch (2.9 or later)")
    args = parser.parse_args(argv)
    params = leaves(4 if args.quick else 1)
    with_torch = torch_rival.FOUND and not args.no_torch
    found = compare(params, args.repetitions, with_torch=with_torch)
    print("\n".join(lines(found, params)))


if __name__ == "__main__":
    main()
