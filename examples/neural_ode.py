"""Learns the equation of a spiral from noisy trajectories with a neural ODE, in a minute.

    pip install -e ".[examples]" && python examples/neural_ode.py

A network f(y) is trained so that the solutions of dy/dt = f(y), which Diffrax computes, go through
the data (Chen et al., 2018). Levenberg–Marquardt takes a few dozen steps. The result is tested from
unseen starts, and for twice as long.
"""

import argparse
import time
from pathlib import Path

try:
    import diffrax
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import matplotlib
    import numpy as np
    from tqdm import trange

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TRAJECTORIES = 128
BATCH = 64
TIMES = np.linspace(0, 10, 101, dtype=np.float32)
SEEN = 51  # the times in the training data, from the first on
PIECE = 16  # times of a trajectory that a step looks at
NOISE = 0.01


def spiral(t, y, args):
    """The true equation: the cubes of y, rotated and slightly damped."""
    return jnp.array([[-0.1, 2.0], [-2.0, -0.1]]) @ y**3


class Field(eqx.Module):
    """dy/dt as a function of y."""

    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(2, 2, width_size=16, depth=2, activation=jax.nn.tanh, key=key)

    def __call__(self, t, y, args):
        return self.mlp(y)


def solve(field, start, times):
    """The solution at some times."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=times[0],
        t1=times[-1],
        dt0=TIMES[1],
        y0=start,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.ConstantStepSize(),
        # Levenberg–Marquardt takes derivatives in both directions.
        adjoint=diffrax.DirectAdjoint(),
        max_steps=times.size,
        # A field that cannot be solved gives infinities, and the step is rejected.
        throw=False,
    )
    return solution.ys


@eqx.filter_jit
def solve_all(field, starts, times):
    return jax.vmap(solve, in_axes=(None, 0, None))(field, starts, times)


def draw_starts(rng, count):
    """Points on a ring around the center of the spiral."""
    angle, radius = rng.uniform(0, 2 * np.pi, count), rng.uniform(0.5, 1.25, count)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)


def residual(field, trajectory, times):
    """The distance of the solution from the data of one trajectory, from its first point on."""
    return solve(field, trajectory[0], times) - trajectory


def train(trajectories, steps, seed):
    """Returns the field that was fitted to the trajectories."""
    rng = np.random.default_rng(seed)
    field = Field(jax.random.key(seed))
    opt = sl.Optimizer(sl.levenberg_marquardt(), field)
    print(opt)

    # The times are the same for all trajectories.
    step = sl.train_step(sl.LeastSquares(residual, in_axes=(0, None)))
    for i in (progress := trange(steps, unit="step")):
        # Short pieces: over long times, the solutions of a bad field say little about it.
        rows = rng.integers(len(trajectories), size=(BATCH, 1))
        columns = rng.integers(SEEN - PIECE + 1, size=(BATCH, 1)) + np.arange(PIECE)
        field, opt, loss = step(field, opt, trajectories[rows, columns], TIMES[:PIECE])
        if (i + 1) % 5 == 0:
            progress.set_postfix(loss=f"{loss:.5f}")
    return field


def plot(exact, learned, errors, path):
    """Shows trajectories from unseen starts, and how the error grows with time."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(5.5, 7), height_ratios=[2, 1], layout="constrained"
    )
    radius = np.linalg.norm(exact[:, 0], axis=1)
    for i in (np.argmax(radius), np.argmin(radius)):
        top.plot(*exact[i].T, color="tab:orange", alpha=0.5, linewidth=4, label="exact")
        top.plot(*learned[i].T, color="tab:blue", linestyle="--", label="learned")
        top.plot(*exact[i, 0], "o", color="black", label="start")
    top.set(title="From unseen starts", xlabel="y₁", ylabel="y₂", aspect="equal")
    handles, labels = top.get_legend_handles_labels()
    top.legend(handles[:3], labels[:3], loc="center", frameon=False)
    bottom.plot(TIMES, errors, color="tab:blue")
    bottom.axvspan(
        0, TIMES[SEEN - 1], color="gray", alpha=0.15, linewidth=0, label="times in the data"
    )
    bottom.set(xlabel="t", ylabel="RMS error", xlim=(0, TIMES[-1]), ylim=(0, None))
    bottom.legend(frameon=False, loc="lower right")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="number of updates (60)")
    parser.add_argument("--quick", action="store_true", help="make 10 updates only")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("--out", type=Path, default=Path("neural_ode.png"), help="file of the plot")
    args = parser.parse_args()

    start = time.perf_counter()
    rng = np.random.default_rng(args.seed)
    starts = draw_starts(rng, TRAJECTORIES + 64)  # the last 64 are for testing
    exact = np.asarray(solve_all(spiral, starts, TIMES))
    noise = NOISE * rng.standard_normal((TRAJECTORIES, SEEN, 2), dtype=np.float32)
    data = exact[:TRAJECTORIES, :SEEN] + noise
    field = train(data, 10 if args.quick else args.steps, args.seed)

    exact, learned = exact[TRAJECTORIES:], solve_all(field, starts[TRAJECTORIES:], TIMES)
    errors = np.sqrt(np.mean((exact - learned) ** 2, axis=(0, 2)))
    print(
        f"RMS error from unseen starts: {errors[SEEN - 1]:.3f} at t = {TIMES[SEEN - 1]:g}, "
        f"{errors[-1]:.3f} at t = {TIMES[-1]:g}"
    )
    print(f"{time.perf_counter() - start:.1f} s, compilation included")

    plot(exact, learned, errors, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
