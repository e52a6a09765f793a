"""The kernels of a step on an H100, counted without one.

    pip install "jax[cuda13]" && JAX_PLATFORMS=cpu python -m benchmarks.gpu.kernels

XLA compiles for the device in `h100.txtpb`, which needs JAX's plugin for CUDA and no GPU.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from ..measure import functions_of, fusions
from ..shapes import gpt2
from .updates import WITH_ALL_LEAVES, contenders, stacked

H100 = Path(__file__).with_name("h100.txtpb")


def count(tx: Any, dtype: Any, leaves: dict[str, Any], sharding: Any) -> int:
    """The number of kernels of a step on parameters of these shapes."""

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    init, step = functions_of(tx)
    params = {name: jax.ShapeDtypeStruct(x.shape, dtype) for name, x in leaves.items()}
    args = placed((params, jax.eval_shape(init, params), params))
    program = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    return fusions(program.as_text() or "")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", help="names of steps, such as 'clip, AdamW'")
    asked = parser.parse_args(arguments).steps
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # it would run kernels
    shape = "1x1x1"
    device = topologies.get_topology_desc(
        topology_name=shape, platform="cuda", target_config=H100.read_text(), topology=shape
    ).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    apart, together = jax.eval_shape(gpt2), jax.eval_shape(lambda: stacked(gpt2()))
    print("| step | leaves | kernels |\n| --- | ---: | ---: |")
    for name, (tx, dtype) in contenders().items():
        if asked and name not in asked:
            continue
        sizes = [together, apart] if name.removesuffix(", Optax") in WITH_ALL_LEAVES else [together]
        for leaves in sizes:
            print(f"| {name} | {len(leaves)} | {count(tx, dtype, leaves, sharding)} |", flush=True)


if __name__ == "__main__":
    main()
