"""What the compiled step does to memory: scratch, copies, and where the work stands."""

import re

import jax
import jax.numpy as jnp
import pytest

import slalom as sl
from helpers import Counting, kernels, outside_of_conditionals, sampled, slow_except, transforms_in

SHAPE = (256, 512)
LEAVES = 3
params = {f"layer{i}": jnp.full(SHAPE, 0.1 * (i + 1)) for i in range(LEAVES)}
halves = {name: p.astype(jnp.bfloat16) for name, p in params.items()}
size = sum(p.nbytes for p in jax.tree.leaves(params))

clip = sl.ClipByGlobalNorm(1.0)
first = sl.where.path("layer0")


def compiled(tx, verb="step", params=params):
    opt = sl.Optimizer(tx, params)
    step = jax.jit(
        lambda params, opt, grads: getattr(opt, verb)(params, grads), donate_argnums=(0, 1)
    )
    return step.lower(params, opt, params).compile()


def is_parameter(text):
    """How many arrays of a parameter's shape are in a type."""
    return text.count(f"f32[{','.join(map(str, SHAPE))}]")


def copies(text):
    return sum(map(is_parameter, re.findall(r"= (\S+) copy\(", text)))


RULES = {
    "adamw": sl.adamw(1e-3),
    "clip, adamw": clip | sl.adamw(1e-3),
    "lion": sl.lion(1e-3),
    "clip, lion": clip | sl.lion(1e-3),
    "rmsprop": sl.rmsprop(1e-3, centered=True, momentum=0.9),
    "sgd, momentum": sl.sgd(1e-3, momentum=0.9),
    "adabelief": sl.adabelief(1e-3),
    "adan": sl.adan(1e-3),
    "clip, adan": clip | sl.adan(1e-3),
    "ademamix": sl.ademamix(1e-3),
    "simplified_ademamix": sl.contrib.simplified_ademamix(1e-3, alpha=2.0),
    "adopt": sl.adopt(1e-3),
    "laprop": sl.contrib.laprop(1e-3),
    "madgrad": sl.contrib.madgrad(1e-3),
    "adadelta": sl.ScaleByAdadelta() | sl.Scale(-1.0),
    "rprop": sl.rprop(1e-3),
    "adafactor, whole": sl.adafactor(1e-3, factored=False),
    "block rms": sl.ClipByBlockRms(1.0) | sl.adamw(1e-3),
    "distance": sl.ScaleByDistanceOverGradients(1e-2) | sl.Scale(-1.0),
    "normalized": sl.NormalizeByUpdateNorm() | sl.adamw(1e-3),
    "fromage": sl.fromage(1e-3),
    "schedule-free": sl.schedule_free_sgd(1e-3, weight_decay=0.1),
}
WRAPPED = {
    "decay on some": sl.adamw(1e-3, decay_where=first),
    "partition": sl.adamw(1e-3).partition({first: sl.sgd(1e-2)}),
    "only": sl.adamw(1e-3).only(first),
    "flatten, large leaves": sl.adamw(1e-3).flatten(),
    "every_k": sl.adamw(1e-3).every_k(4),
    "every_k of clip, adamw": (clip | sl.adamw(1e-3)).every_k(4),
    "every_k of partition": sl.adamw(1e-3).partition({first: sl.sgd(1e-2)}).every_k(4),
    "every_k in partition": sl.adamw(1e-3).every_k(4).partition({first: sl.sgd(1e-2)}),
    "every_k of every_k": sl.adamw(1e-3).every_k(2).every_k(2),
    "if_finite": (clip | sl.adamw(1e-3)).if_finite(),
    "if_finite, raise": (clip | sl.adamw(1e-3)).if_finite(on_limit="raise"),
    "every_k of if_finite": (clip | sl.adamw(1e-3)).if_finite().every_k(4),
    "if_finite of every_k": (clip | sl.adamw(1e-3)).every_k(4).if_finite(),
    "when, passing": sl.Trace(0.9).when(lambda c, u: c.step < 1),
    "when, zero": (clip | sl.adamw(1e-3)).when(lambda c, u: c.step < 1, otherwise="zero"),
    "every_k, scheduled": sl.adamw(1e-3).every_k(lambda n: n + 1),
    "every_k, skip": (clip | sl.adamw(1e-3)).every_k(
        4, skip=sl.SkipNotFinite() | sl.SkipLargeUpdates(9.0)
    ),
}
LEAN = RULES | WRAPPED
# Rules with and without sums, and with conditionals of norms; wrappers differ in what they decide.
KINDS = ("clip, adamw", "adafactor, whole", "fromage")
DECISIONS = ("every_k in partition", "every_k of if_finite", "when, passing", "when, zero")
# Norms whose sums of squares overflow or underflow are computed once more, all of them together. On
# a CPU, another conditional gives each leaf its own norm. L-DoG has both.
NORMS = sl.ClipByGlobalNorm | sl.NormalizeByUpdateNorm | sl.ScaleByTrustRatio
OTHER_CONDITIONALS = {"adafactor, whole": 2, "fromage": 1, "distance": 2}
PACED = [name for name, tx in LEAN.items() if isinstance(tx, sl.wrappers.AbstractPacedWrapper)]


@pytest.mark.parametrize("name", [*sampled(RULES, *KINDS), *slow_except(WRAPPED, *DECISIONS)])
def test_a_step_works_in_place_without_scratch(name):
    tx, program = LEAN[name], compiled(LEAN[name])
    text, memory = program.as_text(), program.memory_analysis()
    state = jax.tree.leaves(sl.Optimizer(tx, params).state)

    assert memory.temp_size_in_bytes <= 0.01 * size
    assert copies(text) == 0
    assert memory.alias_size_in_bytes >= 0.99 * (size + sum(x.nbytes for x in state))

    # Every kernel with a result as large as a parameter passes over memory once. What passes
    # through `when` is added after the conditional, to parameters that a branch may have written.
    results = re.findall(r" = (\(.*?\)|\S+) fusion\(", text)
    written = LEAVES + sum(x.shape == SHAPE for x in state)
    assert name == "when, passing" or sum(map(is_parameter, results)) <= written

    kinds = (sl.wrappers.AbstractPacedWrapper, sl.wrappers.When)
    decisions = sum(isinstance(part, kinds) for part in transforms_in(tx))
    norms = sum(isinstance(part, NORMS) for part in transforms_in(tx))
    assert text.count(" conditional(") == decisions + norms + OTHER_CONDITIONALS.get(name, 0)

    if name in (*PACED, "every_k in partition", "when, zero"):
        assert_roots_stand_in_branches(text)


BOTH = (clip | sl.adamw(1e-3)).if_finite(check="both")
IDLE = {
    "update, every_k": (LEAN["every_k"], "update"),
    "update, if_finite": (LEAN["if_finite"], "update"),
    "update, if_finite, both": (BOTH, "update"),
    "update, when": (LEAN["when, zero"], "update"),
    "step, if_finite, both": (BOTH, "step"),
}
"""What the test above does not compile."""


@pytest.mark.parametrize("name", sampled(IDLE, "update, every_k"))
def test_idle_calls_execute_nothing_of_the_inner_transform(name):
    assert_roots_stand_in_branches(compiled(*IDLE[name]).as_text())


def assert_roots_stand_in_branches(text):
    """Adam takes square roots; what paces it takes none. None may stand outside a branch."""
    assert " conditional(" in text[text.index("ENTRY") :]
    assert "sqrt" in text
    assert "sqrt" not in outside_of_conditionals(text)


IN_HALF_PRECISION = {
    "adamw": sl.adamw(1e-3),
    "amsgrad": sl.amsgrad(1e-3),
    "ema": sl.Ema(0.9) | sl.Scale(-1.0),
    "every_k of adamw": sl.adamw(1e-3).every_k(4),
    "lion": sl.lion(1e-3),
    "nesterov": sl.sgd(1e-3, momentum=0.9, nesterov=True),
    "radam": sl.radam(1e-3),
    "adamw, wide mean": sl.adamw(1e-3, mu_dtype="float32"),
}


@pytest.mark.parametrize("name", sampled(IN_HALF_PRECISION, "every_k of adamw", "adamw, wide mean"))
def test_no_mean_of_half_precision_parameters_is_copied(name):
    memory = compiled(IN_HALF_PRECISION[name], params=halves).memory_analysis()
    assert memory.temp_size_in_bytes <= 0.01 * size


@pytest.mark.parametrize("store", sampled([None, "bfloat16"], "bfloat16"))
def test_no_state_is_copied_that_is_measured_before_it_is_written(store):
    tx = sl.contrib.ScaleByDAdaptAdam()
    text = compiled(tx.store(store) if store else tx).as_text()
    copied = re.findall(r"= (\S+) copy\(", text)
    assert not any(",".join(map(str, SHAPE)) in kind for kind in copied)


# As a fraction of the parameters.
SCRATCH = {
    "mars": (sl.contrib.mars(1e-3), 0.01),
    "adam_mini": (sl.contrib.adam_mini(1e-3), 0.02),
    # A number that XLA broadcasts for a sum.
    "stable_adamw": (sl.stable_adamw(1e-3), 0.34),
    # The old mean of squares is read for the step and overwritten by the new one.
    "acprop": (sl.contrib.acprop(1e-3), 1.01),
    "adopt, nesterov": (sl.adopt(1e-3, nesterov=True), 1.01),
}
FEW_VECTORS = {
    "adafactor": sl.adafactor(1e-3),
    "adafactor, momentum": sl.adafactor(1e-3, momentum=0.9, weight_decay=0.1),
    "adaptive clip": sl.AdaptiveGradClip(0.1) | sl.sgd(1e-3, momentum=0.9),
    "every_k of adafactor": sl.adafactor(1e-3).every_k(2),
}
ONE_BUFFER = {
    # The trust ratio must know all of an update before it writes any of it.
    "lamb": sl.lamb(1e-3),
    "lamb, decay": sl.lamb(1e-3, weight_decay=0.1),
    "clip, lamb": clip | sl.lamb(1e-3, weight_decay=0.1),
    "lars": sl.lars(1e-3, weight_decay=0.1),
    # Three sums and a product read the clipped gradient.
    "clip, adafactor": clip | sl.adafactor(1e-3),
    # The gradients, end to end.
    "flatten": sl.adamw(1e-3, weight_decay=0.1).flatten(max_size=SHAPE[0] * SHAPE[1]),
    # The old update is read for the step and overwritten by the new one: XLA keeps a copy.
    "optimistic": sl.optimistic_gradient_descent(1e-3),
    # Two means of squares and the step read the gradient with the decay in it.
    "adadelta, decay": sl.adadelta(1e-3, weight_decay=0.1),
    # The iterate and the parameters are both written from the update, which divides by a root.
    "schedule-free": sl.schedule_free_adamw(1e-3, weight_decay=0.1),
    # The bounded squares are read along every axis, and once more to divide.
    "sm3": sl.sm3(1e-3),
}


NEEDED = {name: (tx, 0.02) for name, tx in FEW_VECTORS.items()}
NEEDED |= {name: (tx, 1.1) for name, tx in ONE_BUFFER.items()}
EVERYDAY = "adafactor, momentum", "clip, lamb", "flatten", "sm3"


@pytest.mark.parametrize("name", [*sampled(NEEDED, *EVERYDAY), *slow_except(SCRATCH)])
def test_scratch_is_small_a_few_rows_or_one_buffer_where_a_rule_needs_them(name):
    tx, bound = (NEEDED | SCRATCH)[name]
    assert compiled(tx).memory_analysis().temp_size_in_bytes <= bound * size


@pytest.mark.slow
def test_leaves_share_kernels_corrections_and_one_trace_of_the_rule():
    text = compiled(sl.adamw(1e-3)).as_text()
    # A kernel that read its own entry of a vector would be compiled by itself.
    assert " slice(" not in text
    loops = re.findall(r"^%fused_computation.*?^}", text, re.M | re.S)
    of_leaves = [loop for loop in loops if is_parameter(loop)]
    assert of_leaves
    assert not any("s32[]" in loop for loop in of_leaves)  # the age of the means

    # One for each leaf would read its own entry of the norms, or compute all of them again.
    assert kernels(sl.lamb(1e-3), [(16, 64)] * 4) == kernels(sl.lamb(1e-3), [(16, 64)] * 2)
    memory = compiled(sl.adamw(1e-3, mu_dtype="bfloat16")).memory_analysis()
    assert memory.temp_size_in_bytes <= 0.01 * size

    rule = Counting(lambda now, u: u * 2)
    compiled(sl.Stateless(lambda updates, params: sl.tree.map_leaves(rule, (updates,))))
    assert rule.traces == 1
