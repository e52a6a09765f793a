"""What the compiled step does to memory: scratch, copies, and where the work stands."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import slalom as sl
from helpers import kernels, slow_except
from slalom._core.state.walk import transforms

SHAPE = (256, 512)
LEAVES = 3
params = {f"layer{i}": jnp.full(SHAPE, 0.1 * (i + 1)) for i in range(LEAVES)}
size = sum(p.nbytes for p in jax.tree.leaves(params))

clip = sl.ClipByGlobalNorm(1.0)
first = sl.where.path("layer0")


def compiled(tx, verb="step", params=params):
    opt = sl.Optimizer(tx, params)
    step = jax.jit(
        lambda params, opt, grads: getattr(opt, verb)(params, grads), donate_argnums=(0, 1)
    )
    return step.lower(params, opt, params).compile()


LEAN = {
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
    "simplified_ademamix": sl.simplified_ademamix(1e-3, alpha=2.0),
    "adopt": sl.adopt(1e-3),
    "laprop": sl.laprop(1e-3),
    "madgrad": sl.madgrad(1e-3),
    "adadelta": sl.ScaleByAdadelta() | sl.Scale(-1.0),
    "rprop": sl.rprop(1e-3),
    "adafactor, whole": sl.adafactor(1e-3, factored=False),
    "block rms": sl.ClipByBlockRms(1.0) | sl.adamw(1e-3),
    "distance": sl.ScaleByDistanceOverGradients(1e-2) | sl.Scale(-1.0),
    "normalized": sl.NormalizeByUpdateNorm() | sl.adamw(1e-3),
    "fromage": sl.fromage(1e-3),
    "schedule-free": sl.schedule_free_sgd(1e-3, weight_decay=0.1),
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
# The same ones in each test, which share their programs.
QUICK = [
    "adamw",
    "clip, lion",
    "rmsprop",
    "adafactor, whole",
    "distance",
    "fromage",
    "partition",
    "only",
    "flatten, large leaves",
    "every_k of clip, adamw",
    "every_k in partition",
    "if_finite",
    "every_k of if_finite",
    "when, passing",
    "when, zero",
]


@functools.cache
def lean(name):
    return compiled(LEAN[name])


def is_parameter(text):
    """How many arrays of a parameter's shape are in a type."""
    return text.count(f"f32[{','.join(map(str, SHAPE))}]")


def test_corrections_of_the_bias_are_computed_once_for_all_leaves():
    loops = re.findall(r"^%fused_computation.*?^}", lean("adamw").as_text(), re.M | re.S)
    of_leaves = [loop for loop in loops if is_parameter(loop)]
    assert of_leaves
    assert not any("s32[]" in loop for loop in of_leaves)  # the age of the means


@pytest.mark.parametrize("name", slow_except(LEAN, *QUICK))
def test_scratch_is_at_most_one_percent_of_the_parameters(name):
    program = lean(name)
    assert program.memory_analysis().temp_size_in_bytes <= 0.01 * size
    copied = re.findall(r"= (\S+) copy\(", program.as_text())
    assert not any(map(is_parameter, copied))


# What passes through is added after the conditional, to parameters that a branch may have written.
ONCE = [name for name in LEAN if name != "when, passing"]


@pytest.mark.parametrize("name", slow_except(ONCE, *QUICK))
def test_no_array_is_written_twice(name):
    # Every kernel with a result as large as a parameter passes over memory once.
    results = re.findall(r" = (\(.*?\)|\S+) fusion\(", lean(name).as_text())
    kept = jax.tree.leaves((params, sl.Optimizer(LEAN[name], params).state))
    assert sum(map(is_parameter, results)) <= sum(x.shape == SHAPE for x in kept)


# Norms whose sums of squares overflow or underflow are computed once more, all of them together. On
# a CPU, another conditional gives each leaf its own norm.
CONDITIONAL_NORMS = {"normalized": 1, "fromage": 2}


@pytest.mark.parametrize("name", slow_except(LEAN, *QUICK))
def test_there_are_as_many_conditionals_as_decisions(name):
    kinds = (sl.wrappers.AbstractPacedWrapper, sl.wrappers.When)
    decisions = [part for part in transforms(LEAN[name]) if isinstance(part.module, kinds)]
    assert lean(name).as_text().count(" conditional(") == len(decisions) + CONDITIONAL_NORMS.get(
        name, 0
    )


PACED = [name for name, tx in LEAN.items() if isinstance(tx, sl.wrappers.AbstractPacedWrapper)]


@pytest.mark.parametrize(
    "name", slow_except([*PACED, "every_k in partition", "when, zero"], *QUICK)
)
def test_nothing_of_a_paced_transform_stands_outside_of_its_conditional(name):
    assert_roots_stand_in_branches(lean(name).as_text())


HALF = {
    "adamw": sl.adamw(1e-3),
    "amsgrad": sl.amsgrad(1e-3),
    "ema": sl.Ema(0.9) | sl.Scale(-1.0),
    "every_k of adamw": sl.adamw(1e-3).every_k(4),
    "lion": sl.lion(1e-3),
    "nesterov": sl.sgd(1e-3, momentum=0.9, nesterov=True),
    "radam": sl.radam(1e-3),
}
halves = {name: p.astype(jnp.bfloat16) for name, p in params.items()}


@pytest.mark.parametrize("tx", HALF.values(), ids=HALF.keys())
def test_no_mean_is_copied_that_is_stored_in_half_precision(tx):
    memory = compiled(tx, params=halves).memory_analysis()
    assert memory.temp_size_in_bytes <= 0.01 * size


@pytest.mark.parametrize("mu_dtype", ["bfloat16", "float32"])
def test_no_mean_is_copied_that_is_stored_in_another_precision_than_the_parameters(mu_dtype):
    parameters = params if mu_dtype == "bfloat16" else halves
    memory = compiled(sl.adamw(1e-3, mu_dtype=mu_dtype), params=parameters).memory_analysis()
    assert memory.temp_size_in_bytes <= 0.01 * size


@pytest.mark.parametrize("store", [None, "bfloat16"])
def test_no_state_is_copied_that_is_measured_before_it_is_written(store):
    tx = sl.ScaleByDAdaptAdam()
    copied = re.findall(r"= (\S+) copy\(", compiled(tx.store(store) if store else tx).as_text())
    assert not any(",".join(map(str, SHAPE)) in text for text in copied)


FEW_VECTORS = {
    "adafactor": sl.adafactor(1e-3),
    "adafactor, momentum": sl.adafactor(1e-3, momentum=0.9, weight_decay=0.1),
    "adaptive clip": sl.AdaptiveGradClip(0.1) | sl.sgd(1e-3, momentum=0.9),
    "every_k of adafactor": sl.adafactor(1e-3).every_k(2),
}


@pytest.mark.parametrize("tx", FEW_VECTORS.values(), ids=FEW_VECTORS.keys())
def test_scratch_is_a_few_rows_and_columns_where_a_rule_sums_along_both(tx):
    assert compiled(tx).memory_analysis().temp_size_in_bytes <= 0.02 * size


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


@pytest.mark.parametrize("tx", ONE_BUFFER.values(), ids=ONE_BUFFER.keys())
def test_scratch_is_one_buffer_at_most_where_a_rule_needs_one(tx):
    assert compiled(tx).memory_analysis().temp_size_in_bytes <= 1.1 * size


@pytest.mark.parametrize("name", slow_except(LEAN, *QUICK))
def test_parameters_and_state_are_written_in_place(name):
    opt = sl.Optimizer(LEAN[name], params)
    state = sum(leaf.nbytes for leaf in opt.arrays[opt.binding.rules :])
    alias = lean(name).memory_analysis().alias_size_in_bytes
    assert alias >= 0.99 * (size + state)


CONDITIONAL = {
    "every_k": (clip | sl.adamw(1e-3)).every_k(4),
    "if_finite": (clip | sl.adamw(1e-3)).if_finite(),
    "if_finite, both": (clip | sl.adamw(1e-3)).if_finite(check="both"),
    "when": (clip | sl.adamw(1e-3)).when(lambda c, u: c.step < 1, otherwise="zero"),
}


@pytest.mark.parametrize("tx", CONDITIONAL.values(), ids=CONDITIONAL.keys())
@pytest.mark.parametrize("verb", slow_except(["step", "update"], "step"))
def test_idle_steps_execute_nothing_of_the_inner_transform(verb, tx):
    assert_roots_stand_in_branches(compiled(tx, verb).as_text())


def assert_roots_stand_in_branches(text):
    """Adam takes square roots; what paces it takes none. None may stand outside a branch."""
    entry = text[text.index("ENTRY") :]
    assert " conditional(" in entry
    assert "sqrt" in text
    assert "sqrt" not in _reachable(text, entry, stop_at_conditionals=True)


def _reachable(text, entry, stop_at_conditionals):
    """The text of the entry computation and of everything it calls outside of conditionals."""
    bodies = dict(re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    seen, todo, out = set(), [entry], []
    while todo:
        body = todo.pop()
        out.append(body)
        for line in body.splitlines():
            if stop_at_conditionals and " conditional(" in line:
                continue
            for name in re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line):
                if name not in seen and name in bodies:
                    seen.add(name)
                    todo.append(bodies[name])
    # Names in metadata would count as uses otherwise.
    return re.sub(r"metadata=\{[^}]*\}", "", "\n".join(out))


def test_leaves_of_equal_shape_share_one_trace_of_the_rule():
    calls = 0

    class Count(sl.AbstractTransform):
        def init(self, params):
            return None

        def update(self, updates, state, params=None, context=None):
            from slalom.tree import map_leaves

            def rule(now, u):
                nonlocal calls
                calls += 1
                return u * 2

            return map_leaves(rule, (updates,)), state

    compiled(Count())
    assert calls == 1


def test_every_transform_has_its_path_in_the_profile():
    tx = clip | sl.adamw(1e-3).partition({first: sl.sgd(1e-2)}, names=("first",)).every_k(2)
    text = compiled(tx).as_text()
    # Between a wrapper that paces and its inner transform JAX names the branch it stands in.
    for scope in ("clip_by_global_norm/", "every_k/", "partition/rest/scale_by_adam/", "first/"):
        assert scope in text


def test_leaves_of_equal_shape_share_one_kernel():
    # A kernel that read its own entry of a vector would be compiled by itself.
    assert " slice(" not in compiled(sl.adamw(1e-3)).as_text()


def test_leaves_with_norms_of_their_own_share_kernels():
    # One for each leaf would read its own entry of the norms, or compute all of them again.
    assert kernels(sl.lamb(1e-3), [(16, 64)] * 6) == kernels(sl.lamb(1e-3), [(16, 64)] * 3)
