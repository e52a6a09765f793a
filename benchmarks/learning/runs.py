"""Trains with one optimizer: all learning rates and seeds side by side."""

import dataclasses
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl

from .recipes import Recipe
from .tasks import Task

FACTOR = 10**0.5
"""Neighboring learning rates differ by this factor."""
WARM_UP = 0.1
"""The share of the steps in which the learning rate rises from 0."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much each optimizer is given.

    **Arguments:**

    - `rates`: how many learning rates are tried, around the middle of the recipe.
    - `seeds`: how many models are trained with each, on batches of their own.
    - `evaluations`: how often each is evaluated.
    - `share`: the share of the task's steps.
    """

    rates: int = 5
    seeds: int = 3
    evaluations: int = 30
    share: float = 1.0


FULL = Budget()
QUICK = Budget(rates=2, seeds=2, evaluations=3, share=0.02)


class Runs:
    """The runs of a task with all learning rates and seeds.

    The gradients and scores are programs that all optimizers share. Each program computes one run
    after the other: under `vmap`, the conditionals of rules that refresh a preconditioner in some
    steps would become selections, and these rules would pay for it in every step.
    """

    def __init__(self, task: Task, budget: Budget):
        self.task, self.budget = task, budget
        self.every = max(1, round(task.steps * budget.share / budget.evaluations))
        self.steps = self.every * budget.evaluations
        _, static = eqx.partition(task.model(jax.random.key(0)), eqx.is_array)

        def keys(seed: Any) -> Any:
            return jax.random.split(jax.random.key(seed))

        def start(seed: Any) -> Any:
            return eqx.filter(task.model(keys(seed)[0]), eqx.is_array)

        def gradient(arrays: Any, seed: Any, i: Any) -> Any:
            batch = task.batch(jax.random.fold_in(keys(seed)[1], i))
            return eqx.filter_value_and_grad(task.loss)(eqx.combine(arrays, static), batch)

        self.whole = lambda arrays: eqx.combine(arrays, static)
        self.seeds = jnp.tile(jnp.arange(budget.seeds), budget.rates)
        self.start = jax.jit(lambda seeds: jax.lax.map(start, seeds))(self.seeds)
        self.gradients = jax.jit(
            lambda arrays, seeds, i: jax.lax.map(
                lambda run: gradient(run[0], run[1], i), (arrays, seeds)
            )
        )
        self.scores = jax.jit(
            lambda models: jax.lax.map(lambda model: task.evaluate(self.whole(model)), models)
        )
        jax.block_until_ready(self.gradients(self.start, self.seeds, 0))
        jax.block_until_ready(self.scores(self.start))

    def schedule(self, recipe: Recipe, peak: Any) -> Any:
        """A linear warm-up, and then a cosine to 0."""
        warm_up = max(1, round(WARM_UP * self.steps))
        if recipe.constant:
            return sl.schedules.linear(0.0, 1.0, warm_up) * peak
        return sl.schedules.warmup_cosine_decay(0.0, 1.0, warm_up, self.steps) * peak

    def train(self, name: str, recipe: Recipe) -> dict[str, Any]:
        """The scores of an optimizer.

        The learning rate is the one with the lowest training loss in the last tenth of the steps,
        in the mean over the seeds. So the scores are not used to choose it.
        """
        rates = recipe.learning_rates(self.budget.rates, FACTOR)
        peaks = jnp.repeat(jnp.asarray(rates, jnp.float32), self.budget.seeds)

        def bind(arrays: Any, peak: Any) -> sl.Optimizer:
            transform = recipe.transform(name, self.schedule(recipe, peak))
            return sl.Optimizer(transform, self.whole(arrays))

        def step(arrays: Any, opt: sl.Optimizer, loss: Any, grads: Any) -> Any:
            model, opt = opt.step(self.whole(arrays), grads, value=loss)
            return eqx.filter(model, eqx.is_array), opt

        def evaluated(arrays: Any, opt: sl.Optimizer) -> Any:
            return eqx.filter(opt.eval_params(self.whole(arrays)), eqx.is_array)

        def mapped(function: Any) -> Any:
            return jax.jit(lambda *runs: jax.lax.map(lambda run: function(*run), runs))

        advance, to_evaluate = mapped(step), mapped(evaluated)
        arrays, opts = self.start, mapped(bind)(self.start, peaks)
        loss, grads = self.gradients(arrays, self.seeds, 0)
        jax.block_until_ready(advance(arrays, opts, loss, grads))  # compiles

        losses, scores, seconds = [], [], 0.0
        for _ in range(self.budget.evaluations):
            begin = time.perf_counter()
            for _ in range(self.every):
                loss, grads = self.gradients(arrays, self.seeds, len(losses))
                arrays, opts = advance(arrays, opts, loss, grads)
                losses.append(loss)
            jax.block_until_ready(arrays)
            seconds += time.perf_counter() - begin
            scores.append(self.scores(to_evaluate(arrays, opts)))
        return self._entry(name, rates, np.array(losses), np.array(scores), seconds)

    def _entry(
        self, name: str, rates: np.ndarray, losses: np.ndarray, scores: np.ndarray, seconds: float
    ) -> dict[str, Any]:
        by_rate = (-1, self.budget.rates, self.budget.seeds)
        losses, scores = losses.reshape(by_rate), scores.reshape(by_rate)
        last = np.mean(losses[-max(1, self.steps // 10) :].astype(float), axis=(0, 2))
        best = int(np.argmin(np.where(np.isfinite(last), last, np.inf)))
        chosen = scores[:, best].T.astype(float)
        return {
            "optimizer": name,
            "rate": float(rates[best]),
            "at_edge": best in (0, self.budget.rates - 1),
            "final": chosen[:, -1].tolist(),
            "to_target": [self._steps_to_target(scores) for scores in chosen],
            "seconds_per_step": seconds / (self.steps * len(self.seeds)),
        }

    def _steps_to_target(self, scores: np.ndarray) -> int | None:
        """The number of steps until a score is at most the target, or `None` if none is."""
        reached = np.flatnonzero(scores <= self.task.target)
        return (int(reached[0]) + 1) * self.every if reached.size else None
