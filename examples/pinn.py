"""Solves Burgers' equation with a physics-informed network, in a minute.

    pip install -e ".[examples]" && python examples/pinn.py

The network u(t, x) is trained to satisfy u_t + u·u_x = ν·u_xx for −1 < x < 1 and 0 < t < 1, with
u(0, x) = −sin(πx) and u(t, ±1) = 0 (Raissi, Perdikaris & Karniadakis, 2019). The wave steepens at
x = 0. The exact solution is known, so the error is too. Levenberg–Marquardt, L-BFGS and Adam train
the same network on the same loss.
"""

import argparse
import time
from pathlib import Path

try:
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

# Near a minimum, losses differ by less than float32 resolves, and line searches fail.
jax.config.update("jax_enable_x64", True)

VISCOSITY = 0.03 / np.pi


def exact(t, x):
    """The solution by Cole and Hopf, for t > 0, as a quotient of two Gaussian integrals."""
    z, weights = np.polynomial.hermite.hermgauss(100)
    y = x[..., None] - np.sqrt(4 * VISCOSITY * t[..., None]) * z
    kernel = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * VISCOSITY))
    return -np.sum(np.sin(np.pi * y) * kernel, axis=-1) / np.sum(kernel, axis=-1)


class Solution(eqx.Module):
    """u(t, x). The initial and boundary values are built in, and need no loss of their own."""

    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(2, "scalar", 24, 3, jnp.tanh, key=key)

    def __call__(self, t, x):
        free = self.mlp(jnp.stack([2 * t - 1, x]))
        return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * free


def residual(u, t, x):
    """What the equation leaves over at one point."""
    u_t = jax.jacfwd(u, argnums=0)
    u_x = jax.jacfwd(u, argnums=1)
    u_xx = jax.jacfwd(u_x, argnums=1)
    return u_t(t, x) + u(t, x) * u_x(t, x) - VISCOSITY * u_xx(t, x)


# The mean squared residual. Levenberg–Marquardt also uses the residuals themselves.
loss_fn = sl.LeastSquares(residual)


def collocation_points(count, *seed):
    """Random points (t, x) where the equation should hold."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0, 1, count), rng.uniform(-1, 1, count)


@eqx.filter_jit
def predict(model, t, x):
    return jax.vmap(jax.vmap(model))(t, x)


def relative_error(model):
    """The L² error relative to the solution, on a grid."""
    t, x = np.meshgrid(np.linspace(0.01, 1, 100), np.linspace(-1, 1, 201), indexing="ij")
    solution = exact(t, x)
    return np.linalg.norm(predict(model, t, x) - solution) / np.linalg.norm(solution)


def solve(name, tx, model, points, steps, **options):
    """Returns the model, and the loss and the CPU seconds of each step, without compilation.

    `points` is a function of the step.
    """
    opt = sl.Optimizer(tx, model)
    print(opt)
    step = sl.train_step(loss_fn, **options)
    losses, times = [], []
    for i in (progress := trange(steps, unit="step", desc=name)):
        model, opt, loss = step(model, opt, *points(i))
        losses.append(float(loss))
        times.append(time.process_time())
        progress.set_postfix(loss=f"{loss:.1e}", refresh=False)
    print(f"{name}: relative error {relative_error(model):.1e}, loss {losses[-1]:.1e}")
    return model, np.array(losses), np.array(times) - times[0]


def plot(runs, path):
    """Shows the solution at three times, and the losses."""
    model = runs["Levenberg–Marquardt"][0]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(5.5, 6.5), layout="constrained")
    x = np.linspace(-1, 1, 400)
    for time_, color in ((0.2, "tab:cyan"), (0.4, "tab:blue"), (0.9, "navy")):
        t = np.full_like(x, time_)
        top.plot(x, predict(model, t[None], x[None])[0], color=color, label=f"t = {time_}")
        top.plot(x[::10], exact(t, x)[::10], ".", color=color, markersize=4)
    top.set(title="by Levenberg–Marquardt, and exactly (dots)", xlabel="x", ylabel="u(t, x)")
    for (name, (_, losses, seconds)), color in zip(
        runs.items(), ("tab:blue", "tab:orange", "gray"), strict=True
    ):
        bottom.semilogy(seconds, losses, color=color, label=name)
    bottom.set(xlabel="CPU seconds", ylabel="mean squared residual")
    for axes in (top, bottom):
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1200, help="steps of L-BFGS and Adam (1200)")
    parser.add_argument("--lm-steps", type=int, default=200, help="of Levenberg–Marquardt (200)")
    parser.add_argument("--quick", action="store_true", help="take 40 steps on few points only")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("--out", type=Path, default=Path("pinn.png"), help="file of the plot")
    args = parser.parse_args()

    start = time.perf_counter()
    new, fixed = (200, 200) if args.quick else (500, 2000)
    points = collocation_points(fixed, args.seed)
    model = Solution(jax.random.key(args.seed))
    steps, lm_steps = (40, 40) if args.quick else (args.steps, args.lm_steps)
    runs = {
        # New points in each step. With fewer points than parameters, it could satisfy the equation
        # there and nowhere else.
        "Levenberg–Marquardt": solve(
            "Levenberg–Marquardt",
            sl.levenberg_marquardt(),
            model,
            lambda i: collocation_points(new, args.seed, i),
            lm_steps,
        ),
        # L-BFGS needs the same points in each step, so it has more of them. Its line search ends
        # with the loss and the gradient that the next step starts from.
        "L-BFGS": solve(
            "L-BFGS",
            sl.lbfgs(memory_size=50),
            model,
            lambda i: points,
            steps,
            reuse_linesearch=True,
        ),
        "Adam": solve(
            "Adam",
            sl.adam(sl.schedules.cosine_decay(3e-3, decay_steps=steps)),
            model,
            lambda i: points,
            steps,
        ),
    }
    print(f"{time.perf_counter() - start:.1f} s, compilation included")
    plot(runs, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
