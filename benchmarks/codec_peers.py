"""AdamW with 8-bit state in PyTorch, beside Slalom's, for `python -m benchmarks.codecs --peers`.

The gradients are those that JAX computes. PyTorch only updates the parameters.
"""

import importlib
import importlib.util
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

PEERS = {
    "torch AdamW": ("torch.optim", "AdamW", {"fused": True}),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", {}),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {"min_8bit_size": 1}),
}
"""The module, the class, and its options besides the learning rate and the weight decay."""


def available(name: str) -> bool:
    """Whether the package of a peer is installed."""
    package = PEERS[name][0].partition(".")[0]
    return importlib.util.find_spec(package) is not None


def make(name: str, params: list[Any], learning_rate: float = 1e-3) -> Any:
    """The optimizer of PyTorch for these parameters, with the weight decay of `codecs`."""
    module, cls, options = PEERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rule = getattr(importlib.import_module(module), cls)
    return rule(params, lr=learning_rate, weight_decay=0.01, **options)


def losses(runs: Any, name: str, peak: float) -> list[float]:
    """The held-out loss of each seed of `codecs.Runs`."""
    import torch

    gradient = eqx.filter_jit(eqx.filter_grad(runs.task.loss))
    models = []
    for seed in range(jax.tree.leaves(runs.starts)[0].shape[0]):
        start, batches = jax.tree.map(lambda x, i=seed: x[i], (runs.starts, runs.batches))
        leaves, structure = jax.tree.flatten(start)
        params = [torch.nn.Parameter(torch.from_numpy(np.array(x))) for x in leaves]
        opt = make(name, params)
        for i in range(jax.tree.leaves(batches)[0].shape[0]):
            arrays = structure.unflatten([jnp.array(p.detach().numpy()) for p in params])
            batch = jax.tree.map(lambda x, i=i: x[i], batches)
            grads = jax.tree.leaves(eqx.filter(gradient(runs.whole(arrays), batch), eqx.is_array))
            for p, g in zip(params, grads, strict=True):
                p.grad = torch.from_numpy(np.array(g))
            rate = float(runs.schedule(jnp.int32(i))) * peak
            for group in opt.param_groups:
                # Some compile a step for each learning rate that is a number.
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            opt.step()
        models.append(structure.unflatten([jnp.array(p.detach().numpy()) for p in params]))
    whole = jax.tree.map(lambda *xs: jnp.stack(xs), *models)
    return np.asarray(runs.scores(whole), float).tolist()


def bytes_per_parameter(name: str, shapes: dict[str, tuple[int, ...]]) -> float:
    """The bytes of state that exists after a step for each parameter."""
    import torch

    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes.values()]
    opt = make(name, params)
    for p in params:
        p.grad = torch.full(p.shape, 1e-3)
    opt.step()
    sizes: dict[int, int] = {}

    def add(x: Any) -> None:
        if hasattr(x, "__tensor_flatten__") and type(x) is not torch.Tensor:
            for inner in x.__tensor_flatten__()[0]:
                add(getattr(x, inner))
        elif isinstance(x, torch.Tensor):
            sizes[x.data_ptr()] = x.numel() * x.element_size()

    for p in params:
        for x in opt.state[p].values():
            add(x)
    return sum(sizes.values()) / sum(p.numel() for p in params)
