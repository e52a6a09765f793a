"""PyTorch's optimizers on the same shapes, if PyTorch is installed."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np

FOUND = importlib.util.find_spec("torch") is not None
_OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 1e-4},
    "SGD": {"lr": 1e-3, "momentum": 0.9},
}


def steps(name: str, params: list[Any]) -> dict[str, Callable[[], None]]:
    """Steps of a class in `torch.optim`: the fused and the `foreach` implementation."""
    # Otherwise its threads keep spinning after each step, while the next library runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    def step(implementation: str) -> Callable[[], None]:
        # Through float32, because PyTorch cannot read NumPy arrays of bfloat16.
        tensors = [
            torch.tensor(
                np.asarray(p, np.float32), dtype=getattr(torch, p.dtype.name), requires_grad=True
            )
            for p in params
        ]
        for tensor in tensors:
            tensor.grad = 0.01 * tensor.detach() + 0.001
        optimizer = getattr(torch.optim, name)(tensors, **_OPTIONS[name], **{implementation: True})
        return optimizer.step

    return {f"torch {kind}": step(kind) for kind in ("fused", "foreach")}


def version() -> str | None:
    """The installed version, if any."""
    return importlib.metadata.version("torch") if FOUND else None
