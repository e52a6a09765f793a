"""Adam's later relatives walk the paths that Optax, PyTorch packages and textbooks walk."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_same_path,
    gradients,
    lenient,
    nested_dict,
    optax_trajectory,
    params_of,
    slalom_trajectory,
    slow_except,
)
from slalom.tree.paths import leaf_paths

STEPS = 20
S = sl.schedules
MATRICES = sl.where.ndim(min=2)
contrib = optax.contrib


def matrices(params):
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def widely(schedule):
    """The schedule in the widest float: of an int32 step Optax computes it in float32 always."""
    return lambda step: schedule(step.astype(jnp.result_type(float)))


def later(step):
    return 2 + step / 4


OPTAX = {
    "ademamix": (sl.ademamix(0.05), contrib.ademamix(0.05)),
    "ademamix, numbers": (
        sl.ademamix(0.05, 0.8, 0.95, 0.99, 2.0, 1e-3, 1e-4, None, 0.1, MATRICES),
        contrib.ademamix(0.05, 0.8, 0.95, 0.99, 2.0, 1e-3, 1e-4, None, 0.1, matrices),
    ),
    "ademamix, scheduled": (
        sl.ScaleByAdemamix(b3=S.linear(0.9, 0.99, 10), alpha=S.linear(0.0, 5.0, 10)),
        contrib.scale_by_ademamix(
            b3=widely(optax.linear_schedule(0.9, 0.99, 10)),
            alpha=widely(optax.linear_schedule(0.0, 5.0, 10)),
        ),
    ),
    "simplified_ademamix": (
        sl.simplified_ademamix(0.01, alpha=3.0, weight_decay=0.1, decay_where=MATRICES),
        contrib.simplified_ademamix(0.01, alpha=3.0, weight_decay=0.1, mask=matrices),
    ),
    "simplified_ademamix, numbers": (
        sl.simplified_ademamix(0.01, 0.9, 0.99, 1.0, 1e-3, 1e-4),
        contrib.simplified_ademamix(0.01, 0.9, 0.99, 1.0, 1e-3, 1e-4),
    ),
    "adopt": (sl.adopt(0.05), contrib.adopt(0.05)),
    "adopt, nesterov": (
        sl.adopt(0.05, 0.8, 0.95, 1e-2, nesterov=True),
        contrib.adopt(0.05, 0.8, 0.95, 1e-2, nesterov=True),
    ),
    "adopt, unclipped": (
        sl.adopt(0.05, 0.8, 0.9, 0.5, use_clipping=False),
        contrib.adopt(0.05, 0.8, 0.9, 0.5, use_clipping=False),
    ),
    "adopt, clip_value_fn": (
        sl.adopt(0.05, b2=0.9, clip_value_fn=later),
        contrib.adopt(0.05, b2=0.9, clip_value_fn=later),
    ),
    # Optax adds ε to the learning rate, and takes the root of the count in float32.
    "madgrad": (sl.madgrad(0.05 + 1e-6), contrib.madgrad(0.05)),
    "madgrad, numbers": (
        sl.madgrad(S.linear(0.06, 0.03, 10), 0.5, 0.1, 0.01),
        contrib.madgrad(widely(optax.linear_schedule(0.05, 0.02, 10)), 0.5, 0.1, 0.01),
    ),
}


def both(name):
    ours, theirs = OPTAX[name]
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, STEPS)
    return (
        params,
        slalom_trajectory(ours, params, grads)[0],
        optax_trajectory(theirs, params, grads)[0],
    )


@pytest.mark.parametrize("name", slow_except(OPTAX, "adopt", "madgrad"))
def test_same_path_as_optax_in_double_precision(name, x64):
    _, ours, theirs = both(name)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype == jnp.float64
        rtol, atol = (1e-7, 1e-7) if "madgrad" in name else (1e-9, 1e-13)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTAX)
def test_same_path_as_optax_in_single_precision(name):
    start, ours, theirs = both(name)
    assert_same_path(ours, theirs, start, 2e-5)


# --- packages for PyTorch -------------------------------------------------------------------

PYTORCH = {
    "MADGRAD": (sl.madgrad(0.05 + 1e-6), {"lr": 0.05}),
    "LaProp": (sl.laprop(0.05, 0.8, 0.95), {"lr": 0.05, "betas": (0.8, 0.95)}),
    "MARS": (
        sl.mars(0.05, weight_decay=0.1),
        {"lr": 0.05, "optimize_1d": True, "weight_decay": 0.1},
    ),
    "MARS, strong": (
        sl.mars(0.05, 0.8, 0.9, 0.3),
        {"lr": 0.05, "betas": (0.8, 0.9), "gamma": 0.3, "optimize_1d": True},
    ),
    "StableAdamW": (
        sl.stable_adamw(0.05),
        {"lr": 0.05, "weight_decay": 0.2, "kahan_sum": False},
    ),
    "StableAdamW, numbers": (
        sl.stable_adamw(0.05, 0.5, 0.9, 0.1, 0.0),
        {"lr": 0.05, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.0, "kahan_sum": False},
    ),
}


def torch_trajectory(make, options, params, grads):
    """The parameters after each step of an optimizer for PyTorch, stacked."""
    torch = pytest.importorskip("torch", reason="PyTorch is in no extra")
    leaves, structure = jax.tree.flatten(params)
    tensors = [torch.nn.Parameter(torch.tensor(np.asarray(x))) for x in leaves]
    optimizer = make(tensors, **options)
    history = []
    for n in range(STEPS):
        for tensor, g in zip(tensors, jax.tree.leaves(grads), strict=True):
            tensor.grad = torch.tensor(np.asarray(g[n]))
        optimizer.step()
        history.append([x.detach().numpy().copy() for x in tensors])
    return structure.unflatten([np.stack(column) for column in zip(*history, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("name", PYTORCH)
def test_same_path_as_pytorch_optimizer(name, x64):
    theirs = pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is in no extra")
    ours, options = PYTORCH[name]
    params = nested_dict(jax.random.key(0))
    # The first change of MARS is 0 in Slalom, and the gradient there: after zeros, both are 0. And
    # the gradients grow, so that StableAdamW clips in some steps.
    growth = jnp.where(jnp.arange(STEPS) == 0, 0, 1.0 + jnp.arange(STEPS) ** 2 / 40)
    if name.startswith("StableAdamW"):
        growth = growth.at[0].set(1.0)
    grads = jax.tree.map(
        lambda g: g * growth.reshape(STEPS, *[1] * (g.ndim - 1)), gradients(params, STEPS)
    )
    make = getattr(theirs, name.partition(",")[0])
    expected = torch_trajectory(make, options, params, grads)
    found, _ = slalom_trajectory(ours, params, grads)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # The package computes LaProp's step sizes in float32, and corrects the bias of ε in MARS.
        rtol = 1e-6 if name == "LaProp" or name.startswith("MARS") else 1e-9
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10)


# --- closed forms ---------------------------------------------------------------------------


def updates_of(tx, grads, params=None):
    """All updates of a rule, for parameters that stay where they are."""
    params = jnp.zeros(grads.shape[1:], grads.dtype) if params is None else params

    def step(state, given):
        n, g = given
        updates, state = tx.update(g, state, params, sl.Context(step=n))
        return state, updates

    return jax.lax.scan(step, tx.init(params), (jnp.arange(len(grads)), grads))[1]


GRADS = np.random.default_rng(0).standard_normal((6, 3))


@pytest.mark.slow
def test_acprop_is_that_of_the_paper_and_optax_is_smaller_by_the_first_decay(x64):
    b1, b2, eps = 0.8, 0.9, 1e-3
    mean, square = 0.0, 0.0
    expected = []
    for t, g in enumerate(GRADS, start=1):
        scale = 1 if t == 1 else np.sqrt(square / (1 - b2 ** (t - 1))) + eps
        expected.append(g / scale)
        mean = b1 * mean + (1 - b1) * g
        square = b2 * square + (1 - b2) * (g - mean) ** 2 + 1e-4
    found = updates_of(sl.ScaleByAcprop(b1, b2, eps, 1e-4), jnp.asarray(GRADS))
    np.testing.assert_allclose(found, expected, rtol=1e-12)

    tiny = (b1, b2, 1e-30, 1e-30)
    found = updates_of(sl.ScaleByAcprop(*tiny), jnp.asarray(GRADS))
    theirs = contrib.scale_by_acprop(*tiny)
    state = theirs.init(jnp.zeros(3))
    for n, g in enumerate(GRADS):
        with lenient():
            updates, state = theirs.update(jnp.asarray(g), state)
        np.testing.assert_allclose(updates, found[n] * (1 if n == 0 else b1), rtol=1e-9)


@pytest.mark.slow
def test_laprop_without_momentum_is_rmsprop_and_ademamix_without_the_slow_mean_is_adam():
    grads = jnp.asarray(GRADS, jnp.float32)
    for ours, same in {
        sl.ScaleByLaprop(b1=0.0, eps=1e-8): sl.ScaleByRms(
            0.999, 1e-8, eps_in_sqrt=False, bias_correction=True
        ),
        sl.ScaleByAdemamix(alpha=0.0): sl.ScaleByAdam(),
        sl.ScaleByMars(gamma=0.0): sl.ClipByBlockRms(3**-0.5) | sl.ScaleByAdam(0.95, 0.99),
        # The sum is 1 / (1 − b1) times the mean, whose bias is corrected.
        sl.ScaleBySimplifiedAdemamix(0.0, 0.9): sl.ScaleByAdam(0.0, 0.9),
    }.items():
        np.testing.assert_allclose(updates_of(ours, grads), updates_of(same, grads), rtol=1e-5)


def test_the_first_step_of_adopt_and_of_mars_is_as_documented():
    grads = jnp.asarray([[3e-3, -1e-3], [3e-3, -1e-3]], jnp.float32)
    first, second = updates_of(sl.ScaleByAdopt(), grads)
    np.testing.assert_array_equal(first, 0)
    np.testing.assert_allclose(second, 0.1 * jnp.sign(grads[0]), rtol=1e-6)
    # There is no change yet, and equal gradients have none.
    np.testing.assert_allclose(
        updates_of(sl.ScaleByMars(), grads), jnp.sign(grads), rtol=1e-4, atol=0
    )


@pytest.mark.slow
def test_adopt_clips_the_norm_of_complex_numbers():
    grads = jnp.asarray([[0.1 + 0.1j], [3.0 + 4.0j]], jnp.complex64)
    updates = updates_of(sl.ScaleByAdopt(0.0), grads)
    np.testing.assert_allclose(updates[1], [0.6 + 0.8j], rtol=1e-6)


@pytest.mark.slow
def test_stable_adamw_shortens_the_decay_with_the_step():
    params = jnp.asarray([2.0, -2.0])
    grads = jnp.asarray([[1e-2, 1e-2], [1.0, 1.0]])
    whole = updates_of(
        sl.ScaleByStableAdam(weight_decay=0.1, clipping_threshold=1e9), grads, params
    )
    short = updates_of(sl.ScaleByStableAdam(weight_decay=0.1), grads, params)
    np.testing.assert_array_equal(short[0], whole[0])
    square = 0.995 * (1e-4 - 1) / 0.995 * 0.99 / 1.99 + 1
    np.testing.assert_allclose(short[1], whole[1] * square**0.5, rtol=1e-5)


@pytest.mark.slow
def test_a_learning_rate_of_zero_leaves_the_sums_of_madgrad_as_they_are():
    params = jnp.asarray([1.0, -1.0])
    tx = sl.ScaleByMadgrad(0.0)
    updates, state = tx.update(jnp.ones(2), tx.init(params), params, sl.Context(step=0))
    np.testing.assert_array_equal(updates, 0)
    np.testing.assert_array_equal(state.grad_sum, 0)


# --- blocks -------------------------------------------------------------------------------


class Attention(eqx.Module):
    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    conv: eqx.nn.Conv1d
    output: eqx.nn.Linear

    def __init__(self, key):
        self.embed = eqx.nn.Embedding(5, 4, key=key)
        self.attention = eqx.nn.MultiheadAttention(2, 4, use_query_bias=True, key=key)
        self.norm = eqx.nn.LayerNorm(4)
        self.conv = eqx.nn.Conv1d(4, 3, 2, key=key)
        self.output = eqx.nn.Linear(3, 5, key=key)


BLOCKS = {
    "embed.weight": (5, 1),
    "attention.query_proj.weight": (2, 1),
    "attention.query_proj.bias": (4,),
    "attention.key_proj.weight": (2, 1),
    "attention.value_proj.weight": (4, 1),
    "attention.output_proj.weight": (4, 1),
    "norm.weight": (1,),
    "norm.bias": (4,),
    "conv.weight": (3, 1, 1),
    "conv.bias": (3, 1),
    "output.weight": (5, 1),
    "output.bias": (5,),
}


@pytest.mark.slow
def test_adam_mini_has_a_mean_for_each_token_head_output_and_bias():
    params = params_of(Attention(jax.random.key(0)))
    nu = jax.tree.leaves(sl.ScaleByAdamMini().init(params).nu)
    assert dict(zip(leaf_paths(params), [x.shape for x in nu], strict=True)) == BLOCKS

    @eqx.filter_vmap
    def stack(key):
        return Attention(key)

    params = params_of(stack(jax.random.split(jax.random.key(0), 3)))
    nu = jax.tree.leaves(sl.ScaleByAdamMini().init(params).nu)
    assert [x.shape for x in nu] == [(3, *shape) for shape in BLOCKS.values()]
    told = sl.ScaleByAdamMini(layout={sl.where.path("output.weight"): "(1o)i"})
    assert told.notes(params)[-2:] == ("15 blocks", "15 blocks")


@pytest.mark.slow
def test_adam_mini_is_adam_with_means_over_blocks():
    # The mean over a block of Adam's means of squares is the mean of the means over the block.
    model = Attention(jax.random.key(0))
    params, grads = params_of(model), gradients(model, 3)
    mini, adam = sl.ScaleByAdamMini(), sl.ScaleByAdam()
    state, other = mini.init(params), adam.init(params)
    for n in range(3):
        g = jax.tree.map(lambda g, n=n: g[n], grads)
        updates, state = mini.update(g, state)
        _, other = adam.update(g, other)
    columns = (jax.tree.leaves(tree) for tree in (updates, other.mu, other.nu))
    for (path, counts), u, mu, nu in zip(BLOCKS.items(), *columns, strict=True):
        if "query_proj.weight" in path or "key_proj.weight" in path:
            mean = np.repeat(nu.reshape(2, 8).mean(1), 2)[:, None]
        else:
            within = tuple(a for a, n in enumerate(counts) if n == 1)
            mean = np.mean(nu, within, keepdims=True)
        expected = mu / (1 - 0.9**3) / (np.sqrt(mean / (1 - 0.999**3)) + 1e-8)
        np.testing.assert_allclose(u, expected, rtol=1e-4, err_msg=path)


@pytest.mark.slow
def test_adam_mini_divides_by_heads_as_pytorch_optimizer_does(x64):
    torch = pytest.importorskip("torch", reason="PyTorch is in no extra")
    theirs = pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is in no extra")
    attention = eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))
    grads = gradients(attention, STEPS)
    found, _ = slalom_trajectory(sl.adam_mini(0.05, weight_decay=0.1), attention, grads)

    layer = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
    model = torch.nn.ModuleDict({"wq": layer})
    layer.weight.data = torch.tensor(np.asarray(attention.query_proj.weight))
    optimizer = theirs.AdamMini(model, 0.05, num_embeds=4, num_heads=2)
    for n in range(STEPS):
        layer.weight.grad = torch.tensor(np.asarray(grads.query_proj.weight[n]))
        optimizer.step()
        # The package computes in float32.
        np.testing.assert_allclose(
            found.query_proj.weight[n], layer.weight.detach().numpy(), rtol=1e-4, atol=1e-6
        )


# --- low rank -------------------------------------------------------------------------------


@pytest.mark.slow
def test_galore_is_that_of_optax_for_square_matrices(x64):
    # Of a square matrix stored as in × out, Optax projects the inputs unless it is told otherwise.
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(3)}
    grads = gradients(params, 7)
    numbers = contrib.GaLoreDimensionNumbers(1, 0)
    theirs = contrib.galore(0.05, 2, 3, 0.7, weight_dimension_numbers=numbers)
    ours, _ = slalom_trajectory(sl.galore(0.05, 2, 3, 0.7), params, grads)
    expected, _ = optax_trajectory(theirs, params, grads)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        # Optax computes the singular vectors in float32.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_galore_projects_the_shorter_side_as_pytorch_optimizer_does(shape, x64):
    torch = pytest.importorskip("torch", reason="PyTorch is in no extra")
    theirs = pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is in no extra")
    start = np.random.default_rng(1).standard_normal(shape)
    grads = gradients(jnp.asarray(start), 4)
    # Once in all of these steps, since the package has another rhythm.
    found, opt = slalom_trajectory(sl.galore(0.05, 2, scale=0.7), jnp.asarray(start), grads)
    state = opt.state_of(sl.ScaleByGalore)
    assert [x.shape for x in jax.tree.leaves((state.projector, state.mu))] == [(1, 3, 2), (1, 2, 5)]

    weight = torch.nn.Parameter(torch.tensor(start))
    group = {"params": [weight], "rank": 2, "update_proj_gap": 200, "scale": 0.7}
    group["projection_type"] = "std"
    optimizer = theirs.GaLore([group], lr=0.05, betas=(0.9, 0.999), eps=1e-12)
    for n in range(4):
        weight.grad = torch.tensor(np.asarray(grads[n]))
        optimizer.step()
        np.testing.assert_allclose(found[n], weight.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_galore_of_full_rank_keeps_what_a_rotation_keeps():
    # The first update is P·sign(PᵀG): for a matrix of one row it is the sign of G.
    grads = jnp.asarray([[[3.0, -2.0, 1.0]]])
    update = updates_of(sl.ScaleByGalore(), grads, jnp.zeros((1, 3)))
    np.testing.assert_allclose(update[0], jnp.sign(grads[0]), rtol=1e-5)


@pytest.mark.slow
def test_galore_projects_each_matrix_of_a_stack_and_only_when_it_is_due():
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 3, 5)), jnp.float32)
    tx = sl.ScaleByGalore(2, 3, layout="soi")
    alone = sl.ScaleByGalore(2, 3, layout="oi")
    found = updates_of(tx, grads)
    for i in range(2):
        np.testing.assert_allclose(found[:, i], updates_of(alone, grads[:, i]), rtol=1e-4)

    state, projectors = tx.init(grads[0]), []
    for g in grads:
        _, state = tx.update(g, state)
        projectors.append(state.projector[0])
    np.testing.assert_array_equal(projectors[0], projectors[2])
    assert jnp.max(jnp.abs(projectors[3] - projectors[2])) > 0.1
    eye = jnp.broadcast_to(jnp.eye(2), (2, 2, 2))
    np.testing.assert_allclose(jnp.matrix_transpose(projectors[3]) @ projectors[3], eye, atol=1e-6)
    assert tx.notes(grads[0]) == ("2 of 3 × 5 at rank 2",)


@pytest.mark.slow
def test_idle_steps_of_galore_decompose_nothing():
    grads = jnp.ones((8, 16))
    tx = sl.ScaleByGalore(2)
    text = jax.jit(tx.update).lower(grads, tx.init(grads)).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert " conditional(" in entry
    assert "lapack" not in entry


def apollo(grads, rank, gap, alpha, *, per_tensor):
    """The updates of APOLLO as the paper states them, for matrices that are not tall."""
    key, (steps, rows, _) = jax.random.fold_in(jax.random.key(0), 0), grads.shape
    m, v, last, updates = 0.0, 0.0, 0.0, []
    for t in range(1, steps + 1):
        drawn = jax.random.normal(jax.random.fold_in(key, (t - 1) // gap), (1, rank, rows))
        r = np.asarray(drawn[0]) / rank**0.5 @ grads[t - 1]
        m, v = 0.9 * m + 0.1 * r, 0.999 * v + 0.001 * r**2
        n = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
        axis = None if per_tensor else 0
        s = np.linalg.norm(n, axis=axis) / np.linalg.norm(r, axis=axis) * grads[t - 1]
        norm = np.linalg.norm(s)
        if t > 1 and norm > 1.01 * last:
            s *= 1.01 * last / norm
        last = np.linalg.norm(s)
        updates.append(alpha * s)
    return np.stack(updates)


@pytest.mark.slow
@pytest.mark.parametrize("per_tensor", [False, True])
def test_apollo_is_that_of_the_paper(per_tensor, x64):
    grads = np.random.default_rng(0).standard_normal((6, 3, 5))
    grads[3] *= 9
    tx = sl.ScaleByApollo(2, 3, 0.5, per_tensor)
    expected = apollo(grads, 2, 3, 0.5, per_tensor=per_tensor)
    np.testing.assert_allclose(updates_of(tx, jnp.asarray(grads)), expected, rtol=1e-10)
    # The transpose of a tall matrix.
    tall = updates_of(tx, jnp.asarray(grads.transpose(0, 2, 1)))
    np.testing.assert_allclose(tall, expected.transpose(0, 2, 1), rtol=1e-10)
    free = sl.ScaleByApollo(2, 3, 0.5, per_tensor, max_growth=jnp.inf)
    assert jnp.max(jnp.abs(updates_of(free, jnp.asarray(grads)) / expected)) > 1.5


@pytest.mark.slow
def test_apollo_draws_other_projections_for_each_seed_matrix_and_window():
    grads = {"a": jnp.ones((5, 3, 4)), "b": jnp.ones((5, 3, 4))}
    tx = sl.ScaleByApollo(1, 2, max_growth=jnp.inf)

    def run(tx):
        def step(state, g):
            updates, state = tx.update(g, state)
            return state, updates

        return jax.lax.scan(step, tx.init(jax.tree.map(lambda g: g[0], grads)), grads)[1]

    updates = run(tx)
    assert not np.allclose(updates["a"], updates["b"])
    np.testing.assert_allclose(updates["a"][0], updates["a"][1], rtol=1e-5)
    assert not np.allclose(updates["a"][1], updates["a"][2])
    assert not np.allclose(run(sl.ScaleByApollo(1, 2, key=1))["a"][0], updates["a"][0])
    assert tx.notes({"a": jnp.ones((3, 4)), "b": jnp.ones(3)}) == ("4 × 3 at rank 1", None)


# --- the schedule of a decay ----------------------------------------------------------------


@pytest.mark.slow
def test_the_half_life_of_a_decay_is_linear(x64):
    decays = S.linear_half_life(0.9, 0.9999, 8).values(11)
    half_lives = np.log(0.5) / np.log(decays)
    ends = np.log(0.5) / np.log([0.9, 0.9999])
    np.testing.assert_allclose(half_lives, np.interp(np.arange(11), [0, 8], ends), rtol=1e-10)
    assert decays[0] == 0.9
    assert decays[8] == decays[-1] == 0.9999


# --- memory ---------------------------------------------------------------------------------

SHAPE = (128, 256)
WEIGHTS = {name: jnp.ones(SHAPE) for name in "abc"}
SIZE = 3 * 4 * SHAPE[0] * SHAPE[1]

# Scratch memory, as a fraction of the parameters. `test_compiled.py` has those that need none.
SCRATCH = {
    "mars": (sl.mars(1e-3), 0.01),
    "adam_mini": (sl.adam_mini(1e-3), 0.02),
    # A number that XLA broadcasts for a sum.
    "stable_adamw": (sl.stable_adamw(1e-3), 0.34),
    # The old mean of squares is read for the step and overwritten by the new one.
    "acprop": (sl.acprop(1e-3), 1.01),
    "adopt, nesterov": (sl.adopt(1e-3, nesterov=True), 1.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRATCH)
def test_scratch_is_small(name):
    tx, limit = SCRATCH[name]

    def step(params, opt, grads):
        return opt.step(params, grads)

    step = jax.jit(step, donate_argnums=(0, 1))
    program = step.lower(WEIGHTS, sl.Optimizer(tx, WEIGHTS), WEIGHTS).compile()
    assert program.memory_analysis().temp_size_in_bytes <= limit * SIZE
