"""Updates alone: the bytes that they move per second, and the memory that they take."""

import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slalom as sl

from .. import codec_peers
from ..docs import _table
from ..measure import Step, step_of
from .timing import Chained, Copy, log, seconds, seconds_on_device


def stacked(params: dict[str, Any]) -> dict[str, Any]:
    """The same parameters with the blocks stacked, as for a `jax.lax.scan` over them."""
    groups: dict[str, list[Any]] = {}
    for name, p in params.items():
        groups.setdefault(re.sub(r"block\d+", "blocks", name), []).append(p)
    return {name: jnp.stack(each) if len(each) > 1 else each[0] for name, each in groups.items()}


def contenders() -> dict[str, tuple[Any, Any]]:
    """Transforms by name, and the dtype of their parameters."""
    clip, theirs = sl.ClipByGlobalNorm(1.0), optax.clip_by_global_norm(1.0)
    single: dict[str, Any] = {
        "AdamW": sl.adamw(1e-3),
        "AdamW, Optax": optax.adamw(1e-3),
        "clip, AdamW": clip | sl.adamw(1e-3),
        "clip, AdamW, Optax": optax.chain(theirs, optax.adamw(1e-3)),
        "Lion": sl.lion(1e-4),
        "clip, Lion": clip | sl.lion(1e-4),
        "clip, Lion, Optax": optax.chain(theirs, optax.lion(1e-4)),
        "LAMB": sl.lamb(1e-3),
        "LAMB, Optax": optax.lamb(1e-3),
        "Adafactor": sl.adafactor(1e-3),
        "Adafactor, Optax": optax.adafactor(1e-3),
        "AdamW, `.every_k(4)`": sl.adamw(1e-3).every_k(4),
        "AdamW, Optax, `MultiSteps`": optax.MultiSteps(optax.adamw(1e-3), 4),
        'AdamW, `.store("bfloat16")`': sl.adamw(1e-3).store("bfloat16"),
        'AdamW, `.store("int8")`': sl.adamw(1e-3).store("int8"),
    }
    half: dict[str, Any] = {
        "AdamW, bfloat16": sl.adamw(1e-3),
        "AdamW, bfloat16, Optax": optax.adamw(1e-3),
    }
    for policy in ("stochastic", "master", "ecc"):
        half[f'AdamW, bfloat16, `.write("{policy}")`'] = sl.adamw(1e-3).write(policy)
    return {name: (tx, jnp.float32) for name, tx in single.items()} | {
        name: (tx, jnp.bfloat16) for name, tx in half.items()
    }


WITH_ALL_LEAVES = ("AdamW", "clip, AdamW", "LAMB")
"""The rows that are also measured with the blocks apart, in Optax too."""
ACCUMULATING = ("AdamW, `.every_k(4)`", "AdamW, Optax, `MultiSteps`")
"""The rows whose steps move all bytes of the program only once in four."""


def _compiled(tx: Any, dtype: Any, leaves: dict[str, Any]) -> Step:
    arrays = {path: p.astype(dtype) for path, p in leaves.items()}
    grads = jax.tree.map(lambda p: 0.01 * p + 0.001, arrays)
    return step_of(tx, arrays, grads)


def bandwidth(params: dict[str, Any], repetitions: int, entries: int) -> list[dict[str, Any]]:
    """The bytes that a step moves per second, relative to a copy.

    A step must read all its arguments and write all its results, and a clip reads the gradients
    twice. Only a quarter of the steps of `every_k` moves all of this. With many small leaves the
    host takes longer to start a step than the device to run it, and not equally long at all times,
    so steps of Slalom and Optax take turns.
    """
    copy, known, few = Copy(entries), contenders(), stacked(params)
    cases = [(names, few) for names in _with_peers(known)]
    cases += [([name, f"{name}, Optax"], params) for name in WITH_ALL_LEAVES]
    rows = []
    for names, leaves in cases:
        calls = {name: Chained(_compiled(*known[name], leaves)) for name in names}
        took = seconds({**calls, "copy": copy}, repetitions)
        rows += [
            _row(name, leaves, call, took[name], copy.bytes / took["copy"])
            for name, call in calls.items()
        ]
        del calls  # before the next ones are made
    return rows


def _with_peers(names: Iterable[str]) -> list[list[str]]:
    """Each step of Slalom with those of Optax that follow it, which take turns."""
    groups: list[list[str]] = []
    for name in names:
        if "Optax" in name:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _row(
    name: str, leaves: dict[str, Any], call: Chained, took: float, copied: float
) -> dict[str, Any]:
    step = call.step
    memory = step.program.memory_analysis()
    moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
    moved += sum(g.nbytes for g in jax.tree.leaves(step.grads)) * ("clip" in name)
    on_device, share = seconds_on_device(call), moved / took / copied
    row = {
        "step": name,
        "leaves": len(leaves),
        "milliseconds": 1e3 * took,
        "kernels_ms": on_device and 1e3 * on_device,
        "bytes_per_parameter": moved / sum(p.size for p in leaves.values()),
        "share_of_copy": None if name in ACCUMULATING else share,
        "fusions": step.cost.fusions,
        "copy_bytes_per_second": copied,
    }
    times = [row[each] or 0 for each in ("milliseconds", "kernels_ms")]
    log(f"{name}, {len(leaves)} leaves: {times} ms, {share:.0%} of a copy")
    return row


class TorchUpdate:
    """A step of PyTorch's AdamW with 8-bit state, or in float32, by the name of the peer."""

    def __init__(self, name: str, params: dict[str, Any]):
        import torch

        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        tensors = [torch.randn(p.shape, device=self.device) for p in params.values()]
        self.params = [torch.nn.Parameter(x) for x in tensors]
        for p in self.params:
            p.grad = 0.01 * p.detach() + 0.001
        self.start = codec_peers.make(name, self.params).step

    def wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def peers(params: dict[str, Any], repetitions: int) -> list[dict[str, Any]]:
    """Steps of the packages for PyTorch that are installed, on the same leaves."""
    rows = []
    for name in filter(codec_peers.available, codec_peers.PEERS):
        call = TorchUpdate(name, stacked(params))
        took = seconds({"step": call}, repetitions)["step"]
        rows.append({"step": name, "milliseconds": 1e3 * took})
        log(f"{name}: {1e3 * took:.3f} ms")
    return rows


def memory(make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """The bytes that `sl.plan` predicts for a step, those in use before it, and the peak.

    The allocator counts whole chunks, so arrays take more than their bytes. The peak covers the
    whole process, so this part comes first.
    """
    tx, params = sl.adamw(1e-3), make()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    planned = sl.plan(tx, params, mesh)
    opt, grads = sl.Optimizer(tx, params), jax.tree.map(jnp.zeros_like, params)
    step = jax.jit(lambda p, opt, g: opt.step(p, g), donate_argnums=(0, 1))
    jax.block_until_ready((jax.tree.leaves(opt), grads))
    before = _memory_stats().get("bytes_in_use")
    jax.block_until_ready(step(params, opt, grads))
    peak = _memory_stats().get("peak_bytes_in_use")
    return [{"step": "AdamW", "planned": planned.total, "before": before, "peak": peak}]


def _memory_stats() -> dict[str, int]:
    return jax.devices()[0].memory_stats() or {}


def text(found: dict[str, Any]) -> list[str]:
    """The tables and sentences for the page."""
    rows = found.get("bandwidth", [])
    parts = []
    if rows:
        copy = statistics.median(row["copy_bytes_per_second"] for row in rows)
        heads = ["step", "leaves", "kernels", "time", "of which kernels run"]
        heads += ["bytes per parameter", "share of a copy"]
        lines = [
            [
                row["step"],
                f"{row['leaves']}",
                f"{row['fusions']}",
                f"{row['milliseconds']:.2f} ms",
                f"{row['kernels_ms']:.2f} ms" if row["kernels_ms"] else "",
                f"{row['bytes_per_parameter']:.1f}",
                f"**{row['share_of_copy']:.0%}**" if row["share_of_copy"] else "",
            ]
            for row in rows
        ]
        parts += [f"A copy moves {copy / 1e12:.2f} TB/s.", _table(heads, lines)]
    if rows := found.get("peers"):
        times = ", ".join(f"{row['milliseconds']:.2f} ms with {row['step']}" for row in rows)
        parts.append(f"In PyTorch a step on the 16 leaves takes {times}.")
    for row in found.get("memory", []):
        if row["peak"]:
            parts.append(
                f"A step of AdamW takes {row['planned'] / 1e9:.3f} GB according to `sl.plan`. The "
                f"allocator had {row['before'] / 1e9:.3f} GB in use before the step, and at most "
                f"{row['peak'] / 1e9:.3f} GB in it."
            )
    return parts
