"""Trains a small transformer with Muon and with AdamW, for as many steps, in half a minute.

    pip install -e ".[examples]" && python examples/muon.py

The text is Python's own documentation, from `pydoc_data.topics`; the last tenth is held out. Each
rule trains with each of four learning rates, and the best one is shown.
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

try:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import matplotlib
    import numpy as np
    from tqdm import tqdm

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONTEXT = 32  # characters that the model sees
WIDTH = 64
BLOCKS = 2
BATCH = 16
RATES = (3e-3, 1e-2, 3e-2, 1e-1)


def load_data():
    """The text as integers: the training part, the held-out part, and the vocabulary's size."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    text = text.encode("ascii", "ignore").decode()
    number = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = np.array([number[c] for c in text], np.int32)
    split = len(tokens) * 9 // 10
    return tokens[:split], tokens[split:], len(number)


class Block(eqx.Module):
    """Attention and an MLP, each after a norm and around a residual connection."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=key1)
        self.norm2 = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=key2)

    def __call__(self, x):
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask=causal)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class Transformer(eqx.Module):
    """Maps the characters of a context to the logits of the character after each."""

    embedding: eqx.nn.Embedding
    position: eqx.nn.Embedding
    blocks: Block  # a stack: every array has a leading axis of length BLOCKS
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, vocabulary, key):
        key1, key2, key3, key4 = jax.random.split(key, 4)
        small = jax.nn.initializers.normal(0.02)
        self.embedding = eqx.nn.Embedding(weight=small(key1, (vocabulary, WIDTH)))
        self.position = eqx.nn.Embedding(weight=small(key2, (CONTEXT, WIDTH)))
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(key3, BLOCKS))
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, vocabulary, key=key4)

    def __call__(self, tokens):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        x = self.embedding.weight[tokens] + self.position.weight
        x, _ = jax.lax.scan(lambda x, block: (eqx.combine(block, static)(x), None), x, arrays)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss_fn(model, windows):
    """Mean cross-entropy per character, in nats. Each row of `windows` has CONTEXT + 1."""
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(windows[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, windows[:, 1:, None], axis=2))


@eqx.filter_jit
def evaluate(model, tokens):
    """The loss on a fixed choice of windows."""
    return loss_fn(model, windows_at(tokens, np.linspace(0, len(tokens) - CONTEXT - 1, 128)))


def windows_at(tokens, starts):
    return tokens[np.asarray(starts, int)[:, None] + np.arange(CONTEXT + 1)]


def make_optimizer(name, rate, model, steps):
    schedule = sl.schedules.warmup_cosine_decay(0.0, rate, steps // 10, steps)
    if name == "AdamW":
        return sl.Optimizer(sl.adamw(schedule, weight_decay=0.0), model)
    # Muon trains matrices, but the output layer goes to AdamW, as do embeddings and vectors. With
    # this scale both take the learning rates of AdamW.
    tx = sl.muon(schedule, scale="match_rms_adamw", where=~sl.where.path("head.**"))
    return sl.Optimizer(tx, model)


def train(name, rate, train_tokens, test_tokens, vocabulary, steps, seed):
    """Returns pairs of a step and the held-out loss then."""
    rng = np.random.default_rng(seed)
    model = Transformer(vocabulary, jax.random.key(seed))
    opt = make_optimizer(name, rate, model, steps)
    step = sl.train_step(loss_fn)
    test_losses = []
    for i in range(steps):
        starts = rng.integers(len(train_tokens) - CONTEXT, size=BATCH)
        model, opt, _ = step(model, opt, windows_at(train_tokens, starts))
        if (i + 1) % (steps // 10) == 0:
            test_losses.append((i + 1, float(evaluate(model, test_tokens))))
    return test_losses


def final(losses):
    """The last loss, or infinity after a run that diverged."""
    return np.nan_to_num(losses[-1][1], nan=np.inf)


def best_rate(runs):
    """The learning rate of the run with the lowest last loss."""
    return min(runs, key=lambda rate: final(runs[rate]))


def plot(results, title, path):
    """Plots the held-out losses: the best run of each rule, and the others faintly."""
    figure, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
    for color, (name, runs) in zip(("tab:orange", "tab:blue"), results.items(), strict=True):
        best = best_rate(runs)
        for rate, losses in runs.items():
            is_best = rate == best
            style = {"label": f"{name}, {rate:g}", "marker": "o"} if is_best else {"alpha": 0.3}
            axes.plot(*zip(*losses, strict=True), color=color, **style)
    axes.set(title=title, xlabel="step", ylabel="held-out loss (nats per character)")
    axes.set(ylim=(2.0, 3.2))
    axes.legend(frameon=False, title="with its best learning rate")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="number of steps (200)")
    parser.add_argument("--quick", action="store_true", help="train for 50 steps only")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("--out", type=Path, default=Path("muon.png"), help="file of the plot")
    args = parser.parse_args()

    start = time.perf_counter()
    *data, vocabulary = load_data()
    steps = 50 if args.quick else args.steps
    model = Transformer(vocabulary, jax.random.key(args.seed))
    print(make_optimizer("Muon", RATES[0], model, steps).describe(model))

    results = {"AdamW": {}, "Muon": {}}
    for name, rate in tqdm([(name, rate) for name in results for rate in RATES], unit="run"):
        results[name][rate] = train(name, rate, *data, vocabulary, steps, args.seed)
    last = {}
    for name, runs in results.items():
        last[name] = final(runs[best_rate(runs)])
        every = ", ".join(f"{final(losses):.3f} with {rate:g}" for rate, losses in runs.items())
        print(f"{name}: held-out loss {last[name]:.3f} ({every})")
    muon = results["Muon"]
    reached = [i for i, loss in muon[best_rate(muon)] if loss < last["AdamW"]]
    if reached:
        print(f"Muon is below the last loss of AdamW after {reached[0]} of {steps} steps")
    print(f"{time.perf_counter() - start:.1f} s, compilation included")

    title = f"After {steps} steps: AdamW {last['AdamW']:.2f}, Muon {last['Muon']:.2f}"
    plot(results, title, args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
