"""Faults that the tests must catch, each one that a careless edit could bring, by name."""

from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    """Text that occurs once in a file of `src/slalom`, what takes its place, and where to look."""

    file: str
    old: str
    new: str
    near: str
    """The tests to run first: paths below `tests` with spaces in between."""


MUTATIONS = {
    "float32 is computed in float64 under x64": Mutation(
        "tree/dtypes.py",
        "bits > 32",
        "bits >= 32",
        "core/test_phases.py storage/test_precision.py",
    ),
    "a matrix is written back in the order in which it was read": Mutation(
        "where/layout.py",
        "back = sorted(range(len(self.order)), key=self.order.__getitem__)",
        "back = self.order",
        "matrices/test_layout.py matrices/test_matrices.py",
    ),
    "an idle step computes what it does not use": Mutation(
        "_core/protocol/wrapper.py",
        "jax.lax.cond(condition, run, idle, *operands)",
        "jax.tree.map(lambda a, b: jax.lax.select(condition, a, b), run(*operands), "
        "idle(*operands))",
        "wrappers/gradients/test_conditional.py core/test_compiled.py",
    ),
    "a master copy overrules parameters that others have changed": Mutation(
        "wrappers/parameters/write.py",
        "return jnp.where(rounding.nearest(kept, self.dtype) == wide, kept, wide)",
        "return kept",
        "storage/test_writing.py storage/test_precision.py",
    ),
    "a hyperparameter may round to zero": Mutation(
        "_core/fields/hyperparams.py",
        "lost = bool(new == 0) and bool(old != 0)",
        "lost = False",
        "core/test_hyperparams.py refusals",
    ),
    "a reset of some parameters restarts what belongs to all": Mutation(
        "_core/state/slots.py",
        "elif slot.mark == UNTIL_RESET:\n            leaves.append(before)",
        "elif slot.mark == UNTIL_RESET:\n            leaves.append(new)",
        "binding/test_reset_and_rebind.py rate_free/test_rate_free.py",
    ),
    "a difference of differences prints without parentheses": Mutation(
        "_core/text/printing.py",
        "inner.precedence < self.precedence + (i > 0)",
        "inner.precedence < self.precedence",
        "core/test_printing.py schedules/test_schedules.py",
    ),
    "a positive mean of squares becomes zero in int8": Mutation(
        "codecs/blocks.py",
        "jnp.clip(rounded_root(255 * z, bits), 1, 255)",
        "jnp.clip(rounded_root(255 * z, bits), 0, 255)",
        "storage/test_precision.py storage/test_storage.py",
    ),
    "a cooldown counts losses instead of their means": Mutation(
        "schedules/plateau.py",
        "cooldown_count=jnp.where(full, cooldown, state.cooldown_count)",
        "cooldown_count=cooldown",
        "wrappers/scope/test_drive.py",
    ),
    "the tangent of a complex sphere misses a conjugate": Mutation(
        "projections/balls.py",
        "jnp.sum((jnp.conj(x) * u).real, axis=self.axis",
        "jnp.sum((x * u).real, axis=self.axis",
        "projections/test_projections.py projections/test_minima.py",
    ),
    "ADOPT clips with the next step's bound": Mutation(
        "rules/adaptive/adam_variants.py",
        "jnp.asarray(state.age, self.b1.dtype)",
        "jnp.asarray(state.age + 1, self.b1.dtype)",
        "rules/test_adam_like.py",
    ),
    "SOAP does not sort the columns of its mean of squares": Mutation(
        "rules/matrices/soap.py",
        "leaf.rotated_nu = nu[rows[:, None], columns]",
        "leaf.rotated_nu = nu[rows]",
        "matrices/test_preconditioners.py",
    ),
    "DoG never takes the first step that it is given": Mutation(
        "rules/rate_free/step_sizes.py",
        "jnp.where(before == 0, self.init_step, self.factor)",
        "jnp.where(squares == 0, self.init_step, self.factor)",
        "rate_free",
    ),
    "QK-clip swaps the shares of queries and keys": Mutation(
        "contrib/shaping/qk_clip.py",
        '"q": ratio**alpha, "k": ratio ** (1 - alpha)',
        '"k": ratio**alpha, "q": ratio ** (1 - alpha)',
        "rules/test_qk_clip.py",
    ),
    "the geodesic acceleration has the wrong sign": Mutation(
        "rules/curvature/levenberg_marquardt.py",
        "turn = -solution.from_rows(system.linear.bend(direction))",
        "turn = solution.from_rows(system.linear.bend(direction))",
        "curvature/test_gauss_newton.py",
    ),
    "backtracking shortens once less than it may": Mutation(
        "rules/linesearch/backtracking.py",
        "t.tried <= self.max_backtracking_steps",
        "t.tried < self.max_backtracking_steps",
        "curvature/test_linesearch.py",
    ),
    "debiased centered RMSProp forgets its first variance": Mutation(
        "rules/low_memory/rms.py",
        "self.keep = jnp.where(first, self.decay / (1 - self.decay), rest)",
        "now.keep = rest",
        "rules/test_numerics.py rules/test_adaptive.py",
    ),
    "a skipped step at the limit counts as an update": Mutation(
        "wrappers/gradients/conditional.py",
        "ran = ran | (state.notfinite_count > self.max_consecutive_errors)",
        "ran = ran | (state.notfinite_count >= self.max_consecutive_errors)",
        "wrappers/gradients/test_conditional.py wrappers/test_wrappers.py",
    ),
    "a schedule-free state keeps its first decay": Mutation(
        "wrappers/parameters/schedule_free.py",
        "dataclasses.replace(new, b1=b1, z=z)",
        "dataclasses.replace(new, z=z)",
        "wrappers/parameters/test_schedule_free.py",
    ),
    "an empty group counts as having updated": Mutation(
        "wrappers/scope/partitions.py",
        "(not empty and group.has_updated(s))",
        "group.has_updated(s)",
        "core/test_where.py core/test_compose.py wrappers/test_wrappers.py",
    ),
    "Polyak's step size sees the loss that is maximized": Mutation(
        "wrappers/gradients/loss.py",
        "value=_negative, grad=_negative",
        "grad=_negative",
        "wrappers/gradients/test_directions.py",
    ),
    "ReLoBRaLo looks back at its first weights too soon": Mutation(
        "combine.py",
        "alpha = jnp.where(state.age == 1, 0, now.alpha)",
        "alpha = now.alpha",
        "training/test_combine.py",
    ),
    "True and 1 share a compiled program": Mutation(
        "_loop/programs/program.py",
        "(i, type(x), identity(x)) for i",
        "(i, identity(x)) for i",
        "binding/test_jit.py",
    ),
    "arrays of transforms are named by the last segment alone": Mutation(
        "_core/state/slots.py",
        "owner, rule = part.name, type",
        "owner, rule = part.name.rpartition('.')[2], type",
        "binding/test_binding.py io/test_checkpoint.py",
    ),
    "a microbatch of padding alone makes the loss NaN": Mutation(
        "_loop/training/batch_loss.py",
        "jnp.sum(jnp.where(weights == 0, 0, losses * shares))",
        "jnp.sum(losses * shares)",
        "training/test_microbatches.py",
    ),
    "state is partitioned along the first dimension that divides": Mutation(
        "_loop/sharding/shard.py",
        "spec[max(free, key=lambda i: sizes[i])] = axis",
        "spec[free[0]] = axis",
        "binding/test_shard_state.py binding/test_plan.py",
    ),
    "a rebound rule takes a part of the state of a parameter": Mutation(
        "_loop/reports/rebind.py",
        "if owners.get(i) not in torn}",
        "if owners.get(i) not in ()}",
        "binding/test_reset_and_rebind.py",
    ),
    "`minimize` stands still for a step too many": Mutation(
        "_loop/tools/solving.py",
        "c.idle >= MOST_IDLE",
        "c.idle > MOST_IDLE",
        "curvature/test_minimize.py",
    ),
    "checkpoints of a later step crowd out the one just saved": Mutation(
        "checkpoint/_rolling.py",
        "earlier = [n for n in sorted(files) if n <= step]",
        "earlier = sorted(files)",
        "io/test_checkpoint.py",
    ),
    "a transform of Optax keeps its first hyperparameters": Mutation(
        "interop/_from_optax.py",
        "hyperparams=state.hyperparams | now)",
        "hyperparams=now | state.hyperparams)",
        "io/test_interop_from_optax.py",
    ),
}


def check_fit(mutations: dict[str, Mutation], checkout: Path) -> None:
    """Raises an error for a mutation that does not fit the checkout."""
    for name, (file, old, _, near) in mutations.items():
        count = (checkout / "src/slalom" / file).read_text().count(old)
        if count != 1:
            raise ValueError(f"'{name}': the old text occurs {count} times in {file}.")
        for path in near.split():
            if not (checkout / "tests" / path).exists():
                raise ValueError(f"'{name}': there is no tests/{path}.")
