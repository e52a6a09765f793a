"""The errors of networks that solve differential equations over CPU seconds, by several rules.

    python -m benchmarks.curvature poisson --seeds 3 --results curvature.json
    python -m benchmarks.curvature --results curvature.json --docs docs/guides/curvature.md

Each name is a group of runs: `poisson`, `rates`, `float32`, `broyden`, `burgers`, `fixed`,
`optimistix` or `autoencoder`. `rates` tries six learning rates of the first-order rules, of which
the other groups have the best.
Runs that the file of results has already are not repeated, so it can be filled in pieces. `--docs`
writes the tables of the guide and its picture.

Poisson's equation on the unit square has the solution sin(πx)·sin(πy); 400 points inside and 80 on
the boundary, always the same, and an MLP 2-32-32-1 with tanh. Burgers' equation has viscosity
0.03/π and the initial value −sin(πx); 1 000 new points in each step, and an MLP 2-24-24-1 with the
initial and boundary values built in. Errors are relative, in L², on a grid.

On one thread, with float64 where nothing else is said. Seconds are those of the process, without
compilation and without the computation of errors. kfac-jax does not work with the versions of JAX
that Slalom needs: `benchmarks.kfac_rival` runs it in an environment of its own, into the same file.
"""

import argparse
import json
import re
import time
from pathlib import Path
from typing import NamedTuple

from .one_thread import use_one_thread

if __name__ == "__main__":
    use_one_thread()

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import slalom as sl

from . import kfac_rival
from .docs import _table, replace_between

BEGIN = "<!-- errors: python -m benchmarks.curvature --docs docs/guides/curvature.md -->"
END = "<!-- end of errors -->"
CALIBRATION = 50
"""How many steps of a rule are timed to see how many it takes in the seconds that it has."""
CHECKS = 25
"""How often a run computes the error."""

# --- problems: a loss, a model, the data of a step, and the error of a model ----------------------


def solution(x):
    return jnp.sin(jnp.pi * x[0]) * jnp.sin(jnp.pi * x[1])


def pde(model, x):
    """Δu + 2π²·solution at one point."""
    hessian = jax.hessian(lambda x: model(x)[0])(x)
    return hessian[0, 0] + hessian[1, 1] + 2 * jnp.pi**2 * solution(x)


def boundary(model, x):
    return model(x)[0]


def poisson(seed):
    """Poisson's equation."""
    keys = jax.random.split(jax.random.key(seed), 4)
    model = eqx.nn.MLP(2, 1, 32, 2, jnp.tanh, key=keys[0])
    inside = jax.random.uniform(keys[1], (400, 2))
    t = jax.random.uniform(keys[2], (20,))
    zero, one = jnp.zeros(20), jnp.ones(20)
    edges = [jnp.stack(pair, 1) for pair in ((t, zero), (t, one), (zero, t), (one, t))]
    batch = ({"pde": inside, "boundary": jnp.concatenate(edges)},)
    axis = jnp.linspace(0, 1, 50)
    grid = jnp.stack(jnp.meshgrid(axis, axis), -1).reshape(-1, 2)
    exact = jax.vmap(solution)(grid)

    @eqx.filter_jit
    def error(model):
        return jnp.linalg.norm(jax.vmap(model)(grid)[:, 0] - exact) / jnp.linalg.norm(exact)

    loss_fn = sl.LeastSquares({"pde": pde, "boundary": boundary}, weights={"boundary": 100.0})
    return loss_fn, model, lambda _: batch, error


VISCOSITY = 0.03 / np.pi


class Wave(eqx.Module):
    """u(t, x) with the initial and the boundary values of Burgers' equation."""

    mlp: eqx.nn.MLP

    def __call__(self, t, x):
        return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * self.mlp(jnp.stack([2 * t - 1, x]))


def burgers_residual(u, t, x):
    u_x = jax.jacfwd(u, argnums=1)
    u_t, u_xx = jax.jacfwd(u, argnums=0), jax.jacfwd(u_x, argnums=1)
    return u_t(t, x) + u(t, x) * u_x(t, x) - VISCOSITY * u_xx(t, x)


def burgers_solution(t, x):
    """By Cole and Hopf, for t > 0, as a quotient of two Gaussian integrals."""
    z, weights = np.polynomial.hermite.hermgauss(100)
    y = x[..., None] - np.sqrt(4 * VISCOSITY * t[..., None]) * z
    kernel = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * VISCOSITY))
    return -np.sum(np.sin(np.pi * y) * kernel, axis=-1) / np.sum(kernel, axis=-1)


def burgers(seed, number=1000):
    """Burgers' equation, with new points in each step."""
    model = Wave(eqx.nn.MLP(2, "scalar", 24, 2, jnp.tanh, key=jax.random.key(seed)))
    t, x = np.meshgrid(np.linspace(0.01, 1, 50), np.linspace(-1, 1, 101), indexing="ij")
    exact = burgers_solution(t, x)

    def points(i):
        rng = np.random.default_rng((seed, i))
        return rng.uniform(0, 1, number), rng.uniform(-1, 1, number)

    @eqx.filter_jit
    def predict(model):
        return jax.vmap(jax.vmap(model))(t, x)

    def error(model):
        return np.linalg.norm(predict(model) - exact) / np.linalg.norm(exact)

    return sl.LeastSquares(burgers_residual), model, points, error


def fixed_burgers(seed):
    """The same with the same few points in each step."""
    loss_fn, model, points, error = burgers(seed, 100)
    same = points(0)
    return loss_fn, model, lambda _: same, error


def autoencoder(seed):
    """An autoencoder of small images. Its error is its loss."""
    params = jax.tree.map(jnp.asarray, kfac_rival.weights(seed))
    x = jnp.asarray(kfac_rival.images(seed))
    loss_fn = sl.LeastSquares(lambda params, x: kfac_rival.autoencoder(params, x) - x)
    compiled = eqx.filter_jit(loss_fn)
    return loss_fn, params, lambda _: (x,), lambda params: compiled(params, x)


# --- runs -----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One rule on one problem. In its code, `steps` is the number of steps that it will take."""

    problem: str
    code: str
    seconds: float | None = None
    steps: int | None = None
    adam: int = 0
    """How many steps of Adam come before, as the same start of all rules."""
    x64: bool = True


def _decayed(rule, rate):
    return f"sl.{rule}(sl.schedules.cosine_decay({rate}, decay_steps=steps))"


RATES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
GROUPS = {
    "poisson": [
        Case("poisson", "sl.gauss_newton()", steps=250),
        Case("poisson", "sl.levenberg_marquardt()", steps=300),
        Case("poisson", _decayed("adam", 0.1), seconds=8),
        Case("poisson", _decayed("soap", 3e-3), seconds=8),
        Case("poisson", "sl.lbfgs()", seconds=8),
    ],
    "float32": [Case("poisson", "sl.levenberg_marquardt()", steps=660, x64=False)],
    "broyden": [
        Case("poisson", f'sl.contrib.ss_broyden("{family}")', steps=2000, adam=1000)
        for family in ("broyden", "plain")
    ],
    "burgers": [
        Case("burgers", "sl.levenberg_marquardt()", seconds=10),
        Case("burgers", _decayed("soap", 0.1), seconds=10),
        Case("burgers", _decayed("adam", 0.1), seconds=10),
    ],
    "fixed": [Case("fixed_burgers", "sl.levenberg_marquardt()", steps=100)],
    "optimistix": [
        Case("poisson", "optimistix.LevenbergMarquardt", steps=20),
        Case("poisson", "sl.levenberg_marquardt()", steps=20),
    ],
    "autoencoder": [
        Case("autoencoder", "sl.levenberg_marquardt()", steps=80),
        Case("autoencoder", _decayed("soap", 0.1), steps=6000),
        Case("autoencoder", _decayed("adam", 0.1), steps=20_000),
        Case("autoencoder", kfac_rival.NAME),
    ],
    "rates": [
        Case(problem, _decayed(rule, rate), seconds=seconds)
        for problem, seconds in (("poisson", 8), ("burgers", 10))
        for rule in ("adam", "soap")
        for rate in RATES
    ],
}
PROBLEMS = {
    "poisson": poisson,
    "burgers": burgers,
    "fixed_burgers": fixed_burgers,
    "autoencoder": autoencoder,
}


def run(case, seed):
    """Steps, seconds, errors and losses along one run."""
    loss_fn, model, points, error = PROBLEMS[case.problem](seed)
    if case.code.startswith("optimistix"):
        return run_optimistix(loss_fn, model, points(0), error, case.steps)
    step = sl.train_step(loss_fn, donate=False)
    history, clock = [], 0.0

    def train(code, model, steps, before):
        nonlocal clock
        opt = sl.Optimizer(eval(code, {"sl": sl, "steps": steps}), model)
        jax.block_until_ready(step(model, opt, *points(0)))  # compiles
        for part in np.array_split(np.arange(before, before + steps), min(CHECKS, steps)):
            start = time.process_time()
            for i in part:
                model, opt, loss = step(model, opt, *points(int(i)))
            loss = float(loss)
            clock += time.process_time() - start
            history.append((int(part[-1]) + 1, clock, float(error(model)), loss))
        return model

    if case.adam:
        model = train("sl.adam(3e-3)", model, case.adam, 0)
    steps = case.steps
    if steps is None:
        train(case.code, model, CALIBRATION, 0)
        steps = int(case.seconds / clock * CALIBRATION)
        history, clock = [], 0.0
    train(case.code, model, steps, case.adam)
    return history


def run_optimistix(loss_fn, model, batch, error, steps):
    """The same with Optimistix, on all residuals as one vector. It reports only the end."""
    import optimistix

    params, static = eqx.partition(model, eqx.is_inexact_array)

    def residuals(params, batch):
        return loss_fn.on(*batch).at(eqx.combine(params, static), linear=False).vector

    def solve(params, batch):
        solver = optimistix.LevenbergMarquardt(rtol=1e-12, atol=1e-12)
        return optimistix.least_squares(
            residuals, solver, params, batch, max_steps=steps, throw=False
        )

    compiled = eqx.filter_jit(solve).lower(params, batch).compile()
    start = time.process_time()
    found = jax.block_until_ready(compiled(params, batch))
    seconds, model = time.process_time() - start, eqx.combine(found.value, static)
    loss = float(loss_fn(model, *batch))
    return [(int(found.stats["num_steps"]), seconds, float(error(model)), loss)]


# --- the page -------------------------------------------------------------------------------------

TITLES = {
    "poisson": "Poisson's equation, the same points in each step",
    "float32": "The same in float32",
    "broyden": "The same, after 1 000 steps of Adam, whose seconds are included",
    "burgers": "Burgers' equation, new points in each step",
    "fixed": "Burgers' equation, the same 100 points in each step",
    "optimistix": "Poisson's equation to the loss that Optimistix reaches in 20 steps",
    "autoencoder": "A small autoencoder, against kfac-jax",
    "rates": "Errors by learning rates, with the first seed and the same seconds as above",
}
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#8cc6a0", "#c44e52", "#8172b3", "#937860", "#b8a58f")


def markdown(results, picture):
    """The tables, with the errors of all seeds."""
    sections = [f"![Errors over seconds]({picture})\n"]
    for group, cases in GROUPS.items():
        rows = []
        for case in cases:
            runs = runs_of(results, group, case)
            if group == "optimistix":
                theirs = runs_of(results, group, cases[0])
                runs = [until(a, b[-1][-1]) for a, b in zip(runs, theirs, strict=True)]
            if runs:
                steps, seconds, errors, losses = zip(*(run[-1] for run in runs), strict=True)
                rows.append(
                    [
                        f"`{case.code}`",
                        _range(steps, "{:.0f}"),
                        _range(seconds, "{:.1f}"),
                        ", ".join(f"{error:.1e}" for error in errors),
                        ", ".join(f"{loss:.0e}" for loss in losses),
                    ]
                )
        if group == "rates":
            rows = rates_of(results)
            heads = ["problem and rule", *map(str, RATES)]
            sections.append(f"**{TITLES[group]}**\n\n{_table(heads, rows)}")
        elif rows:
            heads = ["rule", "steps", "CPU seconds", "error of each seed", "losses"]
            sections.append(f"**{TITLES[group]}**\n\n{_table(heads, rows)}")
    return "\n".join(sections)


def rates_of(results):
    """A row for each problem and rule, with the error at each learning rate."""
    rows = {}
    for case in GROUPS["rates"]:
        rule = case.code[: case.code.index("(")]
        runs = runs_of(results, "rates", case)
        row = rows.setdefault(f"{case.problem}, `{rule}`", [])
        row.append(f"{runs[0][-1][2]:.1e}" if runs else "")
    return [[name, *row] for name, row in rows.items()]


def runs_of(results, group, case):
    """The history of each seed."""
    names = (_name(group, case, seed) for seed in range(100))
    return [results[name] for name in names if name in results]


def _name(group, case, seed):
    problem = f"{case.problem}, " if group == "rates" else ""
    return f"{group}: {problem}{case.code}, {seed}"


def until(run, tolerance):
    """The history up to the first loss within a tolerance, or all of it."""
    reached = [i for i, (*_, loss) in enumerate(run) if loss <= tolerance]
    return run[: reached[0] + 1] if reached else run


def _range(numbers, form):
    ends = [form.format(end) for end in (min(numbers), max(numbers))]
    return "–".join(dict.fromkeys(ends))


def draw(results, path):
    """Plots the errors of all seeds over seconds."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    panels = {"Poisson's equation": ("poisson", "broyden"), "Burgers' equation": ("burgers",)}
    for axes, (title, groups) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        lines = [(group, case) for group in groups for case in GROUPS[group]]
        drawn = {}
        for group, case in lines:
            rule = re.sub(r"sl\.schedules.*?\(([\d.]+),.*", r"\1)", case.code.removeprefix("sl."))
            label = ("Adam, then " if case.adam else "") + rule
            color = drawn.setdefault(label, COLORS[len(drawn) % len(COLORS)])
            for i, run in enumerate(runs_of(results, group, case)):
                _, seconds, errors, _ = zip(*run, strict=True)
                known = label in [line.get_label() for line in axes.lines]
                axes.plot(
                    seconds,
                    errors,
                    color=color,
                    linewidth=1,
                    alpha=0.8,
                    label=None if known or i else label,
                )
        axes.set(title=title, xlabel="CPU seconds", ylabel="relative error", yscale="log")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", help="which runs: " + ", ".join(GROUPS))
    parser.add_argument("--seeds", type=int, default=1, help="number of random seeds (1)")
    parser.add_argument("--results", type=Path, default=Path("curvature.json"), help="the file")
    parser.add_argument("--docs", type=Path, help="the page whose tables to write")
    parser.add_argument("--picture", type=Path, default=Path("docs/assets/curvature.png"))
    args = parser.parse_args(arguments)
    for group in args.groups:
        for case in GROUPS[group]:
            # kfac-jax needs an environment of its own.
            for seed in range(args.seeds if case.code != kfac_rival.NAME else 0):
                name = _name(group, case, seed)
                if name not in read(args.results):
                    with jax.enable_x64(case.x64):
                        history = run(case, seed)
                    # Read again, since another process may fill the same file.
                    args.results.write_text(json.dumps(read(args.results) | {name: history}))
                step, seconds, error, loss = read(args.results)[name][-1]
                print(f"{name}: step {step}, {seconds:.1f} s, error {error:.1e}, loss {loss:.1e}")
    if args.docs:
        results = read(args.results)
        draw(results, args.picture)
        picture = f"../assets/{args.picture.name}"
        replace_between(args.docs, BEGIN, END, lambda: markdown(results, picture))


def read(path):
    """The results so far."""
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
