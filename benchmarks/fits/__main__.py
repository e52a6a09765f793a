"""Fits by several solvers: which minima they find, and whether they say so.

    python -m benchmarks.fits rosenbrock meyer --results fits.json
    python -m benchmarks.fits --results fits.json --docs docs/coming-from-scipy.md

The problems are the 40 of Moré, Garbow and Hillstrom from 77 starts, and ten fits of NIST's in the
units of their data, from the far start. Runs that the file of results has already are not repeated.
`--docs` writes the tables between the two markers of a page. SciPy computes in float64 always, here
with the exact Jacobian; so it has no row in float32.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

import slalom as sl

from ..docs import _table, replace_between
from . import nist
from .problems import PROBLEMS, RUNS

BEGIN = "<!-- fits: python -m benchmarks.fits --docs docs/coming-from-scipy.md -->"
END = "<!-- end of fits -->"
APPLIED = [
    *("Bennett5", "Chwirut2", "DanWood", "Eckerle4", "ENSO"),
    *("Hahn1", "Misra1a", "Rat43", "Roszman1", "Thurber"),
]
STEPS = 2000
LBFGS = "`sl.lbfgs()`"
SCIPY = '`minimize(method="L-BFGS-B")`'
TO_SCIPY = f"{LBFGS} to the loss of {SCIPY}"


def applied(name):
    """The residuals of a fit, its far start, and the certified sum of squares."""
    residual, data = nist.residual_of(name)
    known = nist.PROBLEMS[name]

    def residuals(b):
        return jax.vmap(lambda *row: residual(b, *row))(*(jnp.asarray(x, b.dtype) for x in data))

    squares = float(jnp.sum(residuals(jnp.asarray(known["certified"])) ** 2))
    return residuals, known["starts"][0], (squares,)


def problem_of(name):
    """Residuals, a start and the sums of squares at minima."""
    return applied(name) if name in APPLIED else tuple(PROBLEMS[name])


def half_squares(residuals):
    return lambda x: jnp.sum(residuals(x) ** 2) / 2


def slalom(tx, of_residuals=True):
    def make(residuals):
        loss_fn = sl.LeastSquares(lambda x: residuals(x), per_example=False)
        if not of_residuals:
            loss_fn = half_squares(residuals)
        solve = jax.jit(lambda x: sl.minimize(loss_fn, tx, x, max_steps=STEPS))

        def run(start):
            found = solve(start)
            return found.model, bool(found.converged), int(found.evaluations)

        return run

    return make


def slalom_to_scipy(residuals):
    """L-BFGS until it has the loss where SciPy's ends, to five digits, or has converged."""
    reference, loss_fn = scipy_lbfgs(residuals), half_squares(residuals)

    @jax.jit
    def solve(x, enough):
        reached = lambda _, loss: loss <= enough  # noqa: E731
        return sl.minimize(loss_fn, sl.lbfgs(), x, max_steps=STEPS, stop=reached)

    def run(start):
        end, _, _ = reference(start)
        found = solve(start, loss_fn(end) * (1 + 1e-5))
        return found.model, found.reason == "function", int(found.evaluations)

    return run


def scipy_lm(residuals):
    f, jac = jax.jit(residuals), jax.jit(jax.jacfwd(residuals))

    def run(start):
        found = scipy.optimize.least_squares(
            lambda x: np.asarray(f(x)),
            start,
            lambda x: np.asarray(jac(x)),
            method="lm" if len(f(start)) >= len(start) else "trf",
            max_nfev=STEPS,
        )
        return found.x, bool(found.success), int(found.nfev)

    return run


def scipy_lbfgs(residuals):
    both = jax.jit(jax.value_and_grad(half_squares(residuals)))

    def run(start):
        found = scipy.optimize.minimize(
            lambda x: tuple(map(np.asarray, both(x))),
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": STEPS, "maxfun": 10 * STEPS},
        )
        return found.x, bool(found.success), int(found.nfev)

    return run


def optimistix(residuals):
    import optimistix

    tolerance = float(jnp.finfo(jnp.zeros(()).dtype).eps) ** 0.5

    @jax.jit
    def solve(x):
        solver = optimistix.LevenbergMarquardt(rtol=tolerance, atol=tolerance)
        found = optimistix.least_squares(
            lambda x, _: residuals(x), solver, x, max_steps=STEPS, throw=False
        )
        good = found.result == optimistix.RESULTS.successful
        return found.value, good, found.stats["num_steps"]

    def run(start):
        model, good, steps = solve(start)
        return model, bool(good), int(steps)

    return run


SOLVERS = {
    "`sl.levenberg_marquardt()`": slalom(sl.levenberg_marquardt()),
    LBFGS: slalom(sl.lbfgs(), of_residuals=False),
    '`least_squares(method="lm")`': scipy_lm,
    SCIPY: scipy_lbfgs,
    "`optimistix.LevenbergMarquardt`": optimistix,
    TO_SCIPY: slalom_to_scipy,
}


def runs_of(name):
    return [1] if name in APPLIED else [f for n, f in RUNS if n == name]


def measure(name, solver, x64):
    """For each start: the position of the minimum that was found, or −1, and what was said."""
    rows = []
    with jax.enable_x64(x64):
        residuals, start, minima = problem_of(name)
        run = SOLVERS[solver](residuals)
        for factor in runs_of(name):
            with np.errstate(all="ignore"):
                try:
                    model, said, evaluations = run(jnp.asarray(np.multiply(factor, start), float))
                except ValueError as error:  # SciPy raises for residuals that are not finite
                    rows.append([-1, False, STEPS, str(error)[:60]])
                    continue
            with jax.enable_x64(True):
                model = jnp.asarray(np.asarray(model, float))
                squares = float(jnp.sum(residuals(model) ** 2))
                # A change of the parameters by their rounding changes the residuals by this.
                eps = float(np.finfo(np.float64 if x64 else np.float32).eps)
                columns = jnp.linalg.norm(jax.jacfwd(residuals)(model) * model, axis=0)
                unit = float(jnp.sum((eps * columns) ** 2))
            relative, absolute = (1e-5, 1e-10) if x64 else (1e-3, 1e-6)
            if name in APPLIED:
                absolute = 0
            near = [abs(squares - m) <= relative * m + absolute + unit for m in minima]
            rows.append([near.index(True) if any(near) else -1, said, evaluations, squares])
    return rows


def key_of(name, solver, x64):
    return f"{name}, {solver}, {'float64' if x64 else 'float32'}"


def markdown(results):
    sections = []
    for x64 in (True, False):
        everything = [*PROBLEMS, *APPLIED]
        sets = {
            s: {
                (n, i): row
                for n in everything
                for i, row in enumerate(results.get(key_of(n, s, x64), []))
            }
            for s in SOLVERS
        }
        sets = {s: found for s, found in sets.items() if found}
        if not sets:
            continue
        to_scipy = sets.pop(TO_SCIPY, {})
        rows = []
        for s, found in sets.items():
            own = {k: r for k, r in found.items() if k[0] in PROBLEMS}
            done = [r for r in own.values() if r[0] >= 0]
            rows.append(
                [
                    s,
                    f"{sum(r[0] == 0 for r in own.values())} of {len(own)}",
                    f"{sum(r[1] for r in done)} of {len(done)}",
                    str(sum(r[1] and r[0] < 0 for r in own.values())),
                    str(sum(r[2] for k, r in own.items() if _all_reach(sets, k))),
                    f"{sum(found[n, 0][0] == 0 for n in APPLIED if (n, 0) in found)} of 10",
                ]
            )
        heads = [
            "solver",
            "global minima",
            "of those at a minimum, say so",
            "say so elsewhere",
            "evaluations where all get there",
            "applied fits",
        ]
        sections.append(f"**{'float64' if x64 else 'float32'}**\n\n{_table(heads, rows)}")
        if to_scipy and SCIPY in sets:
            sections.append(_compared(sets[LBFGS], sets[SCIPY], to_scipy))
    return "\n".join(sections)


def _compared(own, other, to_other):
    """The evaluations of L-BFGS and of SciPy's: to the loss of the latter, and to converge."""
    reached = [k for k, row in to_other.items() if k[0] in PROBLEMS and row[1]]
    same = [k for k in own if k[0] in PROBLEMS and own[k][0] == other[k][0] >= 0]
    ours, theirs = (sum(rows[k][2] for k in reached) for rows in (to_other, other))
    whole, of_scipy = (sum(rows[k][2] for k in same) for rows in (own, other))
    return (
        f"From {len(reached)} starts, {LBFGS} reaches the loss where {SCIPY}\nends. "
        f"It takes {ours} evaluations to get there, and SciPy {theirs}: "
        f"{ours / theirs:.2f} times as many.\nFrom the {len(same)} starts where both end at the "
        f"same minimum, it takes {whole} to converge, and\nSciPy {of_scipy}: "
        f"{whole / of_scipy:.2f} times as many.\n"
    )


def _all_reach(sets, key):
    return all(found.get(key, [-1])[0] >= 0 for found in sets.values())


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="problems; all by default")
    parser.add_argument("--solvers", default="", help="only solvers with this in their name")
    parser.add_argument("--results", type=Path, default=Path("fits.json"), help="the file")
    parser.add_argument("--docs", type=Path, help="write the tables of this page")
    args = parser.parse_args(arguments)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for name in args.names or [*PROBLEMS, *APPLIED]:
        for solver in [s for s in SOLVERS if args.solvers in s]:
            for x64 in (True,) if "method=" in solver else (True, False):
                key = key_of(name, solver, x64)
                if key not in results:
                    results[key] = measure(name, solver, x64)
                    print(key, results[key], flush=True)
                    args.results.write_text(json.dumps(results, indent=0) + "\n")
    if args.docs:
        replace_between(args.docs, BEGIN, END, lambda: markdown(results))
    print(markdown(results))
    return results


if __name__ == "__main__":
    main()
