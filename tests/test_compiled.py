"""What the compiled step does to memory: scratch, copies, and where the work stands."""

import re

import jax
import jax.numpy as jnp
import pytest

import slalom as sl

SHAPE = (256, 512)
LEAVES = 3
params = {f"layer{i}": jnp.full(SHAPE, 0.1 * (i + 1)) for i in range(LEAVES)}
size = sum(p.nbytes for p in jax.tree.leaves(params))

clip = sl.ClipByGlobalNorm(1.0)
first = sl.where.path("layer0")


def compiled(tx, verb="step"):
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
    "adadelta": sl.ScaleByAdadelta() | sl.Scale(-1.0),
    "rprop": sl.rprop(1e-3),
    "adafactor, whole": sl.adafactor(1e-3, factored=False),
    "block rms": sl.ClipByBlockRms(1.0) | sl.adamw(1e-3),
    "distance": sl.ScaleByDistanceOverGradients(1e-2) | sl.Scale(-1.0),
    "normalised": sl.NormalizeByUpdateNorm() | sl.adamw(1e-3),
    "decay on some": sl.adamw(1e-3, decay_where=first),
    "partition": sl.adamw(1e-3).partition({first: sl.sgd(1e-2)}),
    "only": sl.adamw(1e-3).only(first),
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


@pytest.mark.parametrize("tx", LEAN.values(), ids=LEAN.keys())
def test_scratch_is_at_most_one_percent_of_the_parameters(tx):
    program = compiled(tx)
    assert program.memory_analysis().temp_size_in_bytes <= 0.01 * size
    shape = ",".join(map(str, SHAPE))
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", program.as_text())


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
    "flatten": sl.adamw(1e-3, weight_decay=0.1).flatten(),
    # The old update is read for the step and overwritten by the new one: XLA keeps a copy.
    "optimistic": sl.optimistic_gradient_descent(1e-3),
    # Two means of squares and the step read the gradient with the decay in it.
    "adadelta, decay": sl.adadelta(1e-3, weight_decay=0.1),
    # The bounded squares are read along every axis, and once more to divide.
    "sm3": sl.sm3(1e-3),
}


@pytest.mark.parametrize("tx", ONE_BUFFER.values(), ids=ONE_BUFFER.keys())
def test_scratch_is_one_buffer_at_most_where_a_rule_needs_one(tx):
    assert compiled(tx).memory_analysis().temp_size_in_bytes <= 1.1 * size


@pytest.mark.parametrize("tx", LEAN.values(), ids=LEAN.keys())
def test_parameters_and_state_are_written_in_place(tx):
    opt = sl.Optimizer(tx, params)
    state = sum(leaf.nbytes for leaf in opt.leaves[opt.binding.rules :])
    alias = compiled(tx).memory_analysis().alias_size_in_bytes
    assert alias >= 0.99 * (size + state)


CONDITIONAL = {
    "every_k": (clip | sl.adamw(1e-3)).every_k(4),
    "if_finite": (clip | sl.adamw(1e-3)).if_finite(),
    "if_finite, both": (clip | sl.adamw(1e-3)).if_finite(check="both"),
    "when": (clip | sl.adamw(1e-3)).when(lambda c, u: c.step < 1, otherwise="zero"),
}


@pytest.mark.parametrize("tx", CONDITIONAL.values(), ids=CONDITIONAL.keys())
@pytest.mark.parametrize("verb", ["step", "update"])
def test_idle_steps_execute_nothing_of_the_inner_transform(verb, tx):
    text = compiled(tx, verb).as_text()
    branches = set(re.findall(r"branch_computations=\{([^}]*)\}", text)) or set(
        re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", text)
    )
    assert branches, "there is no conditional"
    # Adam takes square roots; the accumulator takes none. None may stand outside a branch.
    entry = text[text.index("ENTRY") :]
    reachable = _reachable(text, entry, stop_at_conditionals=True)
    assert "sqrt" not in reachable
    assert "sqrt" in text


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

            def rule(u):
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
