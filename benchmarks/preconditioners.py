"""SOAP and Kron next to their PyTorch peers: `python -m benchmarks.preconditioners`.

Prints, for matrices of the shapes of a transformer block, the time of a step of pytorch-optimizer
divided by that of Slalom, and what a step of Slalom costs besides. With `f = 10` a window of ten
steps has one refresh. Both libraries take turns in one run.
"""

import argparse
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import slalom as sl

from .measure import Step, interleave, ratio, spread, step_of, windows

WINDOW = 10


def block(width: int, blocks: int) -> dict[str, np.ndarray]:
    """The matrices of some transformer blocks."""
    random = np.random.default_rng(0)
    shapes = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    return {
        f"{name}{i}": random.standard_normal(shape).astype(np.float32)
        for i in range(blocks)
        for name, shape in shapes.items()
    }


def ours(name: str, f: int) -> sl.AbstractTransform:
    """A recipe without AdamW, since all parameters are matrices."""
    if name == "SOAP":
        return sl.ScaleBySoap(precondition_frequency=f) | sl.ScaleByLearningRate(1e-3)
    return (
        sl.Ema(0.9) | sl.ScaleByKron(1 / f) | sl.ClipByBlockRms(1.1) | sl.ScaleByLearningRate(1e-3)
    )


def theirs(name: str, f: int, params: dict[str, Any], grads: dict[str, Any]) -> Callable[[], Any]:
    """The step of the class of pytorch-optimizer with the same refreshes."""
    # Otherwise its threads keep spinning after each step, while the other library runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import pytorch_optimizer
    import torch

    tensors = [torch.tensor(p, requires_grad=True) for p in params.values()]
    for tensor, g in zip(tensors, grads.values(), strict=True):
        tensor.grad = torch.tensor(g)
    if name == "SOAP":
        options = {"precondition_frequency": f}
    else:
        options = {"pre_conditioner_update_probability": 1 / f}
    optimizer: Any = getattr(pytorch_optimizer, name if name == "SOAP" else "Kron")
    return optimizer(tensors, lr=1e-3, weight_decay=0.0, **options).step


def main(argv: list[str] | None = None) -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256, help="the width of the transformer")
    parser.add_argument("--blocks", type=int, default=2, help="the number of blocks")
    parser.add_argument("--windows", type=int, default=3, help="the number of windows of ten steps")
    parser.add_argument("--no-times", action="store_true", help="only what compiling tells")
    args = parser.parse_args(argv)
    params = block(args.width, args.blocks)
    grads = {k: 0.01 * v[::-1].copy() for k, v in params.items()}
    size = sum(p.nbytes for p in params.values())
    arrays, given = jax.device_put((params, grads))
    adamw = step_of(sl.adamw(1e-3), arrays, given).cost
    print(f"AdamW: compile {adamw.compile_s:.2f} s, trace {adamw.trace_s:.2f} s")
    with_torch = not args.no_times and importlib.util.find_spec("pytorch_optimizer") is not None
    for name in ("SOAP", "Kron"):
        for f in (1, WINDOW):
            step: Step = step_of(ours(name, f), arrays, given)
            cost = step.cost
            line = (
                f"{name}, f = {f}: compile {cost.compile_s:.2f} s, trace {cost.trace_s:.2f} s, "
                f"scratch {cost.scratch_bytes / size:.0%} of the parameters"
            )
            if not args.no_times:
                calls: dict[str, Callable[[], Any]] = {"slalom": step}
                if with_torch:
                    calls["torch"] = theirs(name, f, params, grads)
                times = interleave(calls, args.windows * WINDOW)
                means = {key: windows(seconds, WINDOW) for key, seconds in times.items()}
                line += f", {1e3 * spread(means['slalom'])['median']:.1f} ms"
                if with_torch:
                    line += f", torch {ratio(means['torch'], means['slalom'])['median']:.2f}×"
            print(line, flush=True)


if __name__ == "__main__":
    main()
