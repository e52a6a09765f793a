"""Training steps in Slalom, in Optax under `eqx.filter_jit`, and in PyTorch."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import slalom as sl

from .. import gpt
from ..docs import _table
from .timing import log, seconds

TOKENS = 2**19
"""The tokens of a large batch, for the share of Muon in a training step."""


class SlalomTraining:
    def __init__(self, size: gpt.Size, tokens: Any):
        self.model = gpt.GPT(size, jax.random.key(0))
        tx = sl.ClipByGlobalNorm(1.0) | sl.adamw(3e-4)
        self.opt = sl.Optimizer(tx, self.model)
        self.step = sl.train_step(gpt.loss_fn, compute_dtype="bfloat16", donate="all")
        self.tokens, self.loss = tokens, None

    def start(self) -> None:
        self.model, self.opt, self.loss = self.step(self.model, self.opt, self.tokens)

    def wait(self) -> None:
        jax.block_until_ready((self.loss, jax.tree.leaves(self.opt)))


class OptaxTraining:
    """As in Equinox's documentation, with the model in bfloat16 inside of the loss."""

    def __init__(self, size: gpt.Size, tokens: Any):
        self.model = gpt.GPT(size, jax.random.key(0))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
        self.state = tx.init(eqx.filter(self.model, eqx.is_inexact_array))
        self.tokens, self.loss = tokens, None

        def half(x: Any) -> Any:
            return x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x

        @eqx.filter_jit(donate="all-except-first")
        def step(tokens: Any, model: Any, state: Any) -> Any:
            loss, grads = eqx.filter_value_and_grad(
                lambda model: gpt.loss_fn(jax.tree.map(half, model), tokens)
            )(model)
            updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
            return eqx.apply_updates(model, updates), state, loss

        self.step = step

    def start(self) -> None:
        self.model, self.state, self.loss = self.step(self.tokens, self.model, self.state)

    def wait(self) -> None:
        jax.block_until_ready((self.loss, self.state))


class TorchTraining:
    def __init__(self, size: gpt.Size, tokens: Any, *, compiled: bool):
        import torch

        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_float32_matmul_precision("high")
        self.model = gpt.torch_model(size).to(self.device)
        self.loss_of = torch.compile(self.model) if compiled else self.model
        self.tokens = torch.tensor(np.asarray(tokens), dtype=torch.long, device=self.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)

    def start(self) -> None:
        half = self.torch.autocast(self.device, dtype=self.torch.bfloat16)
        with half if self.device == "cuda" else nullcontext():
            loss = self.loss_of(self.tokens)
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)

    def wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


PADDED = 50304
"""The vocabulary of GPT-2, 50257, up to a multiple of 128."""


CONTENDERS: dict[str, tuple[str, Callable[[gpt.Size], Any]]] = {
    "slalom": (
        'Slalom, `sl.train_step(donate="all")`',
        lambda size: SlalomTraining(size, gpt.batch(size)),
    ),
    "optax": ("Optax, `eqx.filter_jit`", lambda size: OptaxTraining(size, gpt.batch(size))),
    "torch": (
        "PyTorch, fused",
        lambda size: TorchTraining(size, gpt.batch(size), compiled=False),
    ),
    "torch-compiled": (
        "PyTorch, fused, compiled",
        lambda size: TorchTraining(size, gpt.batch(size), compiled=True),
    ),
}
"""The title of each training step, and a function that makes it for a size."""


def measured(name: str, size: gpt.Size, repetitions: int) -> list[dict[str, Any]]:
    """A training step with the vocabulary of GPT-2, and with one that is padded."""
    title, make = CONTENDERS[name]
    rows = []
    for vocabulary in (size.vocabulary, PADDED):
        contender = make(size._replace(vocabulary=vocabulary))
        start = time.perf_counter()
        contender.start()
        contender.wait()
        first = time.perf_counter() - start
        took = seconds({"step": contender}, repetitions)["step"]
        rows.append(
            {
                "step": title,
                "vocabulary": vocabulary,
                "milliseconds": 1e3 * took,
                "first_s": first,
                "tokens": size.batch * size.length,
            }
        )
        log(f"{name}, {vocabulary}: {1e3 * took:.1f} ms, the first after {first:.1f} s")
        del contender
    return rows


def text(found: dict[str, Any]) -> list[str]:
    """The tables and sentences for the page."""
    rows = [row for name in CONTENDERS for row in found.get(f"training-{name}", ())]
    if not rows:
        return []
    first, tokens = rows[0], rows[0]["tokens"]
    heads = [f"training step, {tokens} tokens", "vocabulary", "time", "first step"]
    lines = [
        [
            row["step"],
            f"{row['vocabulary']}",
            f"{row['milliseconds']:.1f} ms",
            f"{row['first_s']:.0f} s" if row["vocabulary"] == first["vocabulary"] else "",
        ]
        for row in rows
    ]
    parts = [_table(heads, lines)]
    for row in found.get("bandwidth", []):
        if row["step"] == "clip, AdamW" and row["leaves"] > 16:
            share = row["milliseconds"] / first["milliseconds"]
            parts.append(f"The update alone, clip and AdamW, is {share:.0%} of the first row.")
    for row in found.get("matrices", []):
        if row["precision"] == "TensorFloat32":
            batch = first["milliseconds"] * TOKENS / tokens
            parts.append(
                f"With {TOKENS} tokens a training step takes about {batch:.0f} ms, of which the "
                f"{row['milliseconds']:.1f} ms of Muon are {row['milliseconds'] / batch:.1%}."
            )
    return parts
