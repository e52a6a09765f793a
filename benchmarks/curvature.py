"""The error of a physics-informed network over CPU seconds, by several rules.

    python -m benchmarks.curvature "sl.gauss_newton()" "sl.levenberg_marquardt()" --steps 250

Poisson's equation on the unit square with the solution sin(πx)·sin(πy): 400 points inside and 80 on
the boundary, an MLP 2-32-32-1 with tanh, float64, one thread. Seconds are those of the process,
without compilation.
"""

import argparse
import os
import time

# Before JAX is imported: with several threads, a small Cholesky factorization takes far longer on a
# busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import equinox as eqx
import jax
import jax.numpy as jnp

import slalom as sl


def solution(x):
    return jnp.sin(jnp.pi * x[0]) * jnp.sin(jnp.pi * x[1])


def pde(model, x):
    """Δu + 2π²·solution at one point."""
    hessian = jax.hessian(lambda x: model(x)[0])(x)
    return hessian[0, 0] + hessian[1, 1] + 2 * jnp.pi**2 * solution(x)


def boundary(model, x):
    return model(x)[0]


def problem(seed):
    """The model and the points."""
    keys = jax.random.split(jax.random.key(seed), 4)
    model = eqx.nn.MLP(2, 1, 32, 2, jnp.tanh, key=keys[0])
    inside = jax.random.uniform(keys[1], (400, 2))
    t = jax.random.uniform(keys[2], (20,))
    zero, one = jnp.zeros(20), jnp.ones(20)
    edges = [jnp.stack(pair, 1) for pair in ((t, zero), (t, one), (zero, t), (one, t))]
    return model, {"pde": inside, "boundary": jnp.concatenate(edges)}


@eqx.filter_jit
def relative_error(model):
    axis = jnp.linspace(0, 1, 50)
    grid = jnp.stack(jnp.meshgrid(axis, axis), -1).reshape(-1, 2)
    exact = jax.vmap(solution)(grid)
    return jnp.linalg.norm(jax.vmap(model)(grid)[:, 0] - exact) / jnp.linalg.norm(exact)


def run(rule, seed, steps):
    """Trains with one rule, and prints errors and seconds."""
    model, batch = problem(seed)
    opt = sl.Optimizer(eval(rule, {"sl": sl}), model)
    step = sl.train_step(
        sl.LeastSquares({"pde": pde, "boundary": boundary}, weights={"boundary": 100.0})
    )
    model, opt, loss = step(model, opt, batch)
    jax.block_until_ready(loss)
    start = time.process_time()
    for i in range(1, steps):
        model, opt, loss = step(model, opt, batch)
        if (i + 1) % max(steps // 10, 1) == 0:
            error = float(relative_error(model))
            seconds = time.process_time() - start
            print(f"{rule}, seed {seed}: step {i + 1}, {seconds:.1f} s, error {error:.1e}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rules", nargs="+", help='rules as code, such as "sl.adam(1e-2)"')
    parser.add_argument("--steps", type=int, default=250, help="steps of each (250)")
    parser.add_argument("--seeds", type=int, default=1, help="number of random seeds (1)")
    parser.add_argument("--float32", action="store_true", help="instead of float64")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", not args.float32)
    for rule in args.rules:
        for seed in range(args.seeds):
            run(rule, seed, args.steps)


if __name__ == "__main__":
    main()
