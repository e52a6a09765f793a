"""Trains a character-level transformer on Python's own documentation, in a minute or two.

    pip install -e ".[examples]" && python examples/transformer.py

The text is that of `help()`: half a megabyte, which the standard library keeps in
`pydoc_data.topics`. The last tenth is held out. At the end the model continues a sentence.
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
    from tqdm import trange

    import slalom as sl
except ImportError as error:
    raise SystemExit(f'{error}. Install the dependencies: pip install -e ".[examples]"') from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONTEXT = 64  # characters that the model sees
WIDTH = 96
HEADS = 4
BLOCKS = 2
BATCH = 16
ACCUMULATE = 2  # batches per update
PROMPT = "A context manager is an object that an optimizer can use. When the object is called, "


def load_data():
    """The text as integers: the training part, the held-out part, and the characters."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    text = text.encode("ascii", "ignore").decode()
    characters = sorted(set(text))
    number = {c: i for i, c in enumerate(characters)}
    tokens = np.array([number[c] for c in text], np.int32)
    split = len(tokens) * 9 // 10
    return tokens[:split], tokens[split:], characters


class Block(eqx.Module):
    """Attention and an MLP, each after a norm and around a residual connection."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key1)
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
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, vocabulary, key):
        key1, key2, key3, key4 = jax.random.split(key, 4)
        small = jax.nn.initializers.normal(0.02)
        self.embedding = eqx.nn.Embedding(weight=small(key1, (vocabulary, WIDTH)))
        self.position = eqx.nn.Embedding(weight=small(key2, (CONTEXT, WIDTH)))
        self.blocks = [Block(key) for key in jax.random.split(key3, BLOCKS)]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, vocabulary, key=key4)

    def __call__(self, tokens):
        x = self.embedding.weight[tokens] + self.position.weight
        for block in self.blocks:
            x = block(x)
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


def make_optimizer(model, updates):
    # Decay belongs to matrices that multiply activations: not to biases, norms and embeddings.
    matrices = sl.where.ndim(min=2) & ~sl.where.type(eqx.nn.Embedding)
    schedule = sl.schedules.warmup_cosine_decay(
        0.0, 3e-3, warmup_steps=updates // 10, decay_steps=updates, end_value=3e-4
    )
    adamw = sl.adamw(schedule, b2=0.98, weight_decay=0.1, decay_where=matrices)
    tx = (sl.ClipByGlobalNorm(1.0) | adamw).every_k(ACCUMULATE)
    return sl.Optimizer(tx, model)


def train(train_tokens, test_tokens, vocabulary, steps, seed):
    """Returns the model, the loss of every batch, and pairs of a batch and the test loss then."""
    rng = np.random.default_rng(seed)
    model = Transformer(vocabulary, jax.random.key(seed))
    opt = make_optimizer(model, steps // ACCUMULATE)
    print(opt)

    # Idle steps of `every_k` need not copy the parameters if these are donated too.
    step = sl.train_step(loss_fn, donate="all")
    losses, test_losses = [], []
    for i in (progress := trange(steps, unit="batch")):
        starts = rng.integers(len(train_tokens) - CONTEXT, size=BATCH)
        model, opt, loss = step(model, opt, windows_at(train_tokens, starts))
        losses.append(loss)  # `float(loss)` would block until the step finishes
        if (i + 1) % (steps // 10) == 0:
            test_losses.append((i + 1, float(evaluate(model, test_tokens))))
            progress.set_postfix(loss=f"{loss:.3f}", test=f"{test_losses[-1][1]:.3f}")
    return model, np.array(losses), test_losses


@eqx.filter_jit
def sample(model, prompt, length, key):
    """Continues a prompt of CONTEXT characters, at a temperature of 0.7."""

    def one_character(window, key):
        logits = model(window)[-1]
        new = jax.random.categorical(key, logits / 0.7)
        return jnp.append(window[1:], new), new

    return jax.lax.scan(one_character, prompt, jax.random.split(key, length))[1]


def pair_entropy(train_tokens, test_tokens, vocabulary):
    """The loss of the best model that sees only one character: a table of pairs."""
    counts = np.ones((vocabulary, vocabulary))
    np.add.at(counts, (train_tokens[:-1], train_tokens[1:]), 1)
    probabilities = counts / counts.sum(axis=1, keepdims=True)
    return -np.mean(np.log(probabilities[test_tokens[:-1], test_tokens[1:]]))


def plot(losses, test_losses, baseline, title, path):
    """Plots the losses."""
    figure, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
    axes.plot(losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each batch")
    axes.plot(*zip(*test_losses, strict=True), color="tab:orange", marker="o", label="held out")
    axes.axhline(baseline, color="gray", linestyle="--", label="a table of character pairs")
    axes.set(title=title, xlabel="batch", ylabel="loss (nats per character)", ylim=(1, 4))
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1600, help="number of batches (1600)")
    parser.add_argument("--quick", action="store_true", help="train on 60 batches only")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument(
        "--out", type=Path, default=Path("transformer.png"), help="file of the plot"
    )
    args = parser.parse_args()

    start = time.perf_counter()
    train_tokens, test_tokens, characters = load_data()
    steps = 60 if args.quick else args.steps
    model, losses, test_losses = train(train_tokens, test_tokens, len(characters), steps, args.seed)
    baseline = pair_entropy(train_tokens, test_tokens, len(characters))
    final = test_losses[-1][1]
    print(f"held-out loss {final:.3f} nats per character, table of pairs {baseline:.3f}")

    prompt = jnp.array([characters.index(c) for c in PROMPT[-CONTEXT:]])
    written = sample(model, prompt, 500, jax.random.key(args.seed))
    print("-" * 72)
    print(PROMPT + "".join(characters[i] for i in written))
    print("-" * 72)
    print(f"{time.perf_counter() - start:.1f} s, compilation included")

    plot(losses, test_losses, baseline, f"Text: {final:.2f} nats per character", args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
