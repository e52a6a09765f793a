"""Learns to balance a pole with double DQN and a slowly moving target network, in seconds.

    pip install -e ".[examples]" && python examples/dqn.py

A cart moves along a track, pushed left or right in every step, and must keep the pole on it
upright. An episode ends when the pole falls or the cart leaves the track, or after 200 steps.
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

CARTS = 32  # that move at the same time
LONGEST = 200  # steps of an episode
BATCH = 256
CAPACITY = 20_000  # of the replay buffer
DISCOUNT = 0.98


# --- the cart and its pole ------------------------------------------------------------------------


def fresh_carts(key):
    """Carts near the middle, with poles that are nearly upright."""
    return jax.random.uniform(key, (CARTS, 4), minval=-0.05, maxval=0.05)


def push(cart, action):
    """One step of 0.02 s. Returns the cart and whether it failed.

    A cart has a position and a velocity, and its pole an angle and an angular velocity.

    The equations of motion are those of Barto, Sutton & Anderson, "Neuronlike adaptive elements
    that can solve difficult learning control problems", 1983, without friction.
    """
    gravity, cart_mass, pole_mass, half_length, dt = 9.8, 1.0, 0.1, 0.5, 0.02
    _, velocity, angle, spin = cart
    force = jnp.where(action == 1, 10.0, -10.0)
    mass = cart_mass + pole_mass
    forward = (force + pole_mass * half_length * spin**2 * jnp.sin(angle)) / mass
    turning = (gravity * jnp.sin(angle) - jnp.cos(angle) * forward) / (
        half_length * (4 / 3 - pole_mass * jnp.cos(angle) ** 2 / mass)
    )
    acceleration = forward - pole_mass * half_length * turning * jnp.cos(angle) / mass
    cart = cart + dt * jnp.stack([velocity, acceleration, spin, turning])
    failed = (jnp.abs(cart[0]) > 2.4) | (jnp.abs(cart[2]) > jnp.deg2rad(12.0))
    return cart, failed


@eqx.filter_jit
def explore(model, carts, ages, epsilon, key):
    """One step of all carts, each with a random action with probability epsilon.

    Carts that failed, or whose episode was long enough, start again.
    """
    key1, key2, key3 = jax.random.split(key, 3)
    greedy = jnp.argmax(jax.vmap(model)(carts), axis=1)
    any_action = jax.random.randint(key1, (CARTS,), 0, 2)
    actions = jnp.where(jax.random.uniform(key2, (CARTS,)) < epsilon, any_action, greedy)
    after, failed = jax.vmap(push)(carts, actions)
    over = failed | (ages + 1 >= LONGEST)
    transitions = {"before": carts, "action": actions, "after": after, "failed": failed}
    carts = jnp.where(over[:, None], fresh_carts(key3), after)
    return transitions, carts, jnp.where(over, 0, ages + 1)


@eqx.filter_jit
def steps_upright(model, key):
    """The mean length of greedy episodes."""

    def one_step(carry, _):
        carts, alive = carry
        carts, failed = jax.vmap(push)(carts, jnp.argmax(jax.vmap(model)(carts), axis=1))
        alive = alive & ~failed
        return (carts, alive), alive

    start = fresh_carts(key), jnp.ones(CARTS, bool)
    _, alive = jax.lax.scan(one_step, start, length=LONGEST)
    return jnp.mean(jnp.sum(alive, axis=0))


# --- learning -------------------------------------------------------------------------------------


class Replay:
    """The last transitions, in NumPy arrays."""

    def __init__(self):
        self.arrays = {
            "before": np.zeros((CAPACITY, 4), np.float32),
            "action": np.zeros(CAPACITY, np.int32),
            "after": np.zeros((CAPACITY, 4), np.float32),
            "failed": np.zeros(CAPACITY, bool),
        }
        self.added = 0

    def add(self, transitions):
        places = np.arange(self.added, self.added + CARTS) % CAPACITY
        for name, array in self.arrays.items():
            array[places] = transitions[name]
        self.added += CARTS

    def sample(self, rng):
        rows = rng.integers(min(self.added, CAPACITY), size=BATCH)
        return {name: array[rows] for name, array in self.arrays.items()}


def loss_fn(model, target, batch):
    """The Huber loss of the temporal differences.

    The model chooses the next action, and the target network values it. Each step is worth 1.
    """
    values = jax.vmap(model)(batch["before"])
    value = jnp.take_along_axis(values, batch["action"][:, None], axis=1)[:, 0]
    best = jnp.argmax(jax.vmap(model)(batch["after"]), axis=1)
    next_value = jnp.take_along_axis(jax.vmap(target)(batch["after"]), best[:, None], axis=1)[:, 0]
    wanted = 1 + DISCOUNT * jnp.where(batch["failed"], 0, next_value)
    error = jnp.abs(value - jax.lax.stop_gradient(wanted))
    return jnp.mean(jnp.where(error < 1, 0.5 * error**2, error - 0.5))


def train(steps, seed):
    """Returns the best model, and pairs of a step and the mean length of episodes then."""
    model_key, key = jax.random.split(jax.random.key(seed))
    rng = np.random.default_rng(seed)

    model = eqx.nn.MLP(4, 2, width_size=64, depth=2, key=model_key)
    target = best = model  # the training step donates the optimizer's state, but not the model
    opt = sl.Optimizer(sl.ClipByGlobalNorm(10.0) | sl.adam(1e-3), model)
    print(opt)
    step = sl.train_step(loss_fn)

    replay, carts, ages = Replay(), fresh_carts(key), jnp.zeros(CARTS, jnp.int32)
    lengths = []
    for i in (progress := trange(steps, unit="step")):
        epsilon = max(0.05, 1 - 2 * i / steps)
        transitions, carts, ages = explore(
            model, carts, ages, jnp.array(epsilon), jax.random.fold_in(key, i)
        )
        replay.add(transitions)
        model, opt, loss = step(model, opt, target, replay.sample(rng))
        target = sl.incremental_update(model, target, 0.02)
        if (i + 1) % (steps // 10) == 0:
            length = float(steps_upright(target, jax.random.key(0)))
            if length >= max((n for _, n in lengths), default=0):
                best = target
            lengths.append((i + 1, length))
            progress.set_postfix(loss=f"{loss:.3f}", upright=f"{length:.0f}")
    return best, lengths


def plot(lengths, title, path):
    """Plots how long the pole stays up."""
    figure, axes = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
    axes.plot(*zip(*lengths, strict=True), color="tab:blue", marker="o")
    axes.set(title=title, xlabel="step", ylabel="steps upright", ylim=(0, 1.05 * LONGEST))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000, help="number of updates (3000)")
    parser.add_argument("--quick", action="store_true", help="make 600 updates only")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("--out", type=Path, default=Path("dqn.png"), help="file of the plot")
    args = parser.parse_args()

    start = time.perf_counter()
    best, lengths = train(600 if args.quick else args.steps, args.seed)
    length = steps_upright(best, jax.random.key(1))
    print(f"the pole stays up for {length:.1f} of {LONGEST} steps")
    print(f"{time.perf_counter() - start:.1f} s, compilation included")

    plot(lengths, f"Balancing a pole: {length:.0f} of {LONGEST} steps", args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
