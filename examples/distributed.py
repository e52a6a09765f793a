"""Trains one network over two processes with two devices each, on one machine, in seconds.

    pip install -e ".[examples]" && python examples/distributed.py

The parameters and the optimizer's state are spread over a mesh of 2 × 2 devices: along `data`,
which crosses the processes, and along `model`, which stays inside each of them. The same program
then runs in a single process, and the parameters of both are compared.
docs/guides/sharding.md says what changes on a cluster.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

try:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import matplotlib
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from sklearn.datasets import load_digits

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PROCESSES = 2
DEVICES = 2  # of each process
BATCH = 128
HEARTBEAT = 10  # seconds until a process that has died is noticed
LONGEST = 100  # seconds that the processes may take together
# Four devices compute the same bits in one process as in two, because a sum of two terms does not
# depend on their order. One device adds up a batch in another order.
TOLERANCE = 1e-5  # relative to the largest parameter


# --- the program of every process -----------------------------------------------------------------


def make_network(key):
    return eqx.nn.MLP(64, 10, width_size=256, depth=1, key=key)


def spec(leaf):
    """Rows along `model` and columns along `data`: tensor sharding and FSDP at once."""
    return P(*("model", "data")[: leaf.ndim])


def loss_fn(model, images, labels):
    """Mean cross-entropy of a batch."""
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(images))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))


def shuffled_batches(rng, size):
    """The batches of one epoch as rows of indices. Leftover examples are dropped."""
    return rng.permutation(size)[: size // BATCH * BATCH].reshape(-1, BATCH)


def train(mesh, epochs, seed):
    """Returns the parameters, as NumPy arrays by path, and the loss of every step."""
    images, labels = load_digits(return_X_y=True)
    images, labels = images.astype(np.float32) / 16, labels.astype(np.int32)
    rows = NamedSharding(mesh, P("data"))
    rng = np.random.default_rng(seed)  # the same in every process

    # Compiled with the shardings of its results, so that no device ever holds a whole network.
    @eqx.filter_jit
    def make(key):
        arrays, rest = eqx.partition(make_network(key), eqx.is_array)
        homes = jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), arrays)
        return eqx.combine(jax.lax.with_sharding_constraint(arrays, homes), rest)

    model = make(jax.random.key(seed))
    tx = sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3, weight_decay=0.1)
    opt = sl.Optimizer(tx, model)  # its state is sharded like the parameters
    step = sl.train_step(loss_fn, donate="all")
    if mesh.size > 1:
        print(sl.plan(tx, model, mesh.abstract_mesh))

    first, last = (jax.process_index() + np.arange(2)) * BATCH // jax.process_count()
    losses = []
    for _ in range(epochs):
        for batch in shuffled_batches(rng, len(images)):
            own = batch[first:last]  # every process reads its own part of the batch
            x = jax.make_array_from_process_local_data(rows, images[own])
            y = jax.make_array_from_process_local_data(rows, labels[own])
            model, opt, loss = step(model, opt, x, y)
            # Waits for the step: on CPUs, processes that run far ahead of each other can exhaust
            # their threads, with each waiting for a collective that the other cannot start.
            losses.append(float(loss))

    params = multihost_utils.process_allgather(eqx.filter(model, eqx.is_array), tiled=True)
    paths = jax.tree_util.tree_leaves_with_path(params)
    arrays = {jax.tree_util.keystr(path): np.asarray(x) for path, x in paths}
    return arrays, np.array(losses)


def make_mesh(shape):
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "model"), (AxisType.Auto,) * 2, devices=devices)


def work(args):
    """One of the processes."""
    threading.Thread(target=end_with_the_launcher, daemon=True).start()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Nothing outside this machine can reach the coordinator. Gloo listens on the address that the
    # machine's own name stands for.
    address = f"127.0.0.1:{args.port}"
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=address,
        num_processes=PROCESSES,
        process_id=args.process,
        cluster_detection_method="deactivate",  # even if this runs in a job of SLURM
        initialization_timeout=30,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=30,
    )
    params, losses = train(make_mesh((PROCESSES, DEVICES)), args.epochs, args.seed)
    if args.process == 0:
        np.savez(args.out, **params, losses=losses)
    jax.distributed.shutdown()


def end_with_the_launcher():
    """The launcher holds the other end of standard input, which closes however it ends."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


# --- the launcher ---------------------------------------------------------------------------------


def launch(epochs, seed, path):
    """Runs all processes, and ends them if one fails or if they take too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--port", port, "--epochs", epochs, "--seed", seed, "--out", path]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    children = []
    deadline = time.monotonic() + LONGEST
    try:
        for i in range(PROCESSES):
            command = [sys.executable, __file__, "--process", i, *common]
            children.append(
                subprocess.Popen(
                    list(map(str, command)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,  # where the collectives report every connection
                    env=environment,
                )
            )
        while any(child.poll() is None for child in children):
            if any(child.poll() for child in children):
                break
            if time.monotonic() > deadline:
                raise SystemExit(f"The processes took longer than {LONGEST} s.")
            time.sleep(0.05)
        for i, child in enumerate(children):
            if child.poll():
                raise SystemExit(f"Process {i} failed with exit status {child.returncode}.")
    finally:
        for child in children:
            child.kill()
            child.wait()


def compare(name, together, alone):
    """Prints how far apart the parameters of two runs are. Returns the largest difference."""
    largest = max(np.abs(x).max() for x in alone.values())
    apart = max(np.abs(together[path] - x).max() for path, x in alone.items()) / largest
    how = "the same bits" if apart == 0 else f"apart by {apart:.1e} of the largest parameter"
    print(f"{name}: {how}")
    return apart


def plot(together, alone, title, path):
    """Plots the losses of both runs."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.semilogy(alone, color="tab:orange", linewidth=3, alpha=0.4, label="one process")
    axes.semilogy(together, color="tab:blue", linewidth=1, label=f"{PROCESSES} processes")
    axes.set(title=title, xlabel="step", ylabel="training loss", xlim=(0, len(together)))
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20, help="number of epochs (20)")
    parser.add_argument("--quick", action="store_true", help="train for 2 epochs only")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument(
        "--out", type=Path, default=Path("distributed.png"), help="file of the plot"
    )
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        work(args)
        return

    start = time.perf_counter()
    epochs = 2 if args.quick else args.epochs
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "together.npz"
        launch(epochs, args.seed, path)
        together = dict(np.load(path))
    losses = together.pop("losses")
    print(f"{PROCESSES} processes with {DEVICES} devices each: loss {losses[-1]:.4f}")

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", PROCESSES * DEVICES)
    four, _ = train(make_mesh((PROCESSES, DEVICES)), epochs, args.seed)
    moved = compare("one process with 4 devices", together, four)
    one, alone = train(make_mesh((1, 1)), epochs, args.seed)
    apart = compare("one process with 1 device", together, one)
    print(f"{time.perf_counter() - start:.1f} s, compilation included")

    plot(losses, alone, f"Two processes and one: parameters apart by {apart:.1e}", args.out)
    print(f"wrote {args.out}")
    if not max(moved, apart) <= TOLERANCE:
        raise SystemExit(f"The parameters differ by more than {TOLERANCE}.")


if __name__ == "__main__":
    main()
