"""Rules that must know outputs from inputs: Equinox's layers, stacks of them, and plain arrays."""

import inspect
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import assert_close, lenient, params_of, sampled, transforms_in
from slalom.tree.paths import leaf_paths
from slalom.where.layout import as_layout, layouts

keys = jax.random.split(jax.random.key(0), 8)


class Mine(eqx.Module):
    """A layer that nobody knows."""

    weight: jax.Array
    scale: jax.Array


def zoo():
    return {
        "linear": eqx.nn.Linear(3, 4, key=keys[0]),
        "attention": eqx.nn.MultiheadAttention(2, 4, use_query_bias=True, key=keys[1]),
        "conv2": eqx.nn.Conv2d(3, 4, (2, 1), key=keys[2]),
        "conv3": eqx.nn.Conv3d(4, 6, 2, groups=2, key=keys[3]),
        "transposed": eqx.nn.ConvTranspose2d(2, 3, 2, key=keys[4]),
        "embedding": eqx.nn.Embedding(5, 3, key=keys[5]),
        "gru": eqx.nn.GRUCell(2, 3, key=keys[6]),
    }


def inputs_first(tree):
    """The arrays as a library stores them that puts inputs first, as Optax assumes."""

    def turn(path, x):
        where = jax.tree_util.keystr(path)
        if "embedding" in where or "bias" in where:
            return x
        return jnp.moveaxis(x, (0, 1), (-1, -2))  # out, in, kernel → kernel, in, out

    return jax.tree_util.tree_map_with_path(turn, tree)


def drawn(make, seed=0):
    """The parameters of a model that is not made: drawn by NumPy, so that nothing compiles."""
    random = np.random.default_rng(seed)
    shapes = eqx.filter_eval_shape(lambda: params_of(make()))
    return jax.tree.map(lambda s: jnp.asarray(random.normal(size=s.shape), s.dtype), shapes)


FACTORED = (True, 0.8, 0, 3)
PEERS = {
    "AdaptiveGradClip": (sl.AdaptiveGradClip(0.3), optax.adaptive_grad_clip(0.3)),
    "Factored": (sl.ScaleByFactoredRms(*FACTORED), optax.scale_by_factored_rms(*FACTORED)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), PEERS.values(), ids=PEERS)
def test_layers_of_equinox_are_what_optax_makes_of_their_transposes(ours, theirs):
    params, grads = drawn(zoo), drawn(zoo, seed=1)

    @jax.jit
    def both(params, grads):
        got, _ = ours.update(grads, ours.init(params), params, sl.Context(step=0))
        with lenient():
            turned = inputs_first(params)
            want, _ = theirs.update(inputs_first(grads), theirs.init(turned), turned)
        return inputs_first(got), want

    changed = False
    for a, b, g in zip(*map(jax.tree.leaves, (*both(params, grads), grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        changed = changed or (a.shape != g.shape)
    assert changed


@pytest.mark.slow
def test_the_norm_of_each_unit_is_bounded_and_no_other_unit_is_touched():
    weight = jnp.array([[3.0, 4.0], [0.3, 0.4]])
    grads = eqx.tree_at(lambda l: l.weight, eqx.nn.Linear(2, 2, key=keys[0]), weight)
    grads = eqx.tree_at(lambda l: l.bias, grads, jnp.array([0.0, 8.0]))
    got, _ = sl.UnitwiseClip(1.0).update(params_of(grads), None)
    np.testing.assert_allclose(got.weight, [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(got.bias, [0.0, 1.0], rtol=1e-6)
    # The same numbers in an array that nothing is known of: inputs first.
    plain, _ = sl.UnitwiseClip(1.0).update({"w": weight.T}, None)
    np.testing.assert_allclose(plain["w"], np.asarray(got.weight).T, rtol=1e-6)
    along, _ = sl.UnitwiseClip(1.0, layout="oi").update({"w": weight}, None)
    np.testing.assert_allclose(along["w"], got.weight, rtol=1e-6)
    whole, _ = sl.UnitwiseClip(1.0, layout="oo").update({"w": weight}, None)
    np.testing.assert_allclose(jnp.linalg.norm(whole["w"]), 1.0, rtol=1e-6)
    # A norm layer is one unit.
    got, _ = sl.UnitwiseClip(0.5).update(drawn(lambda: eqx.nn.LayerNorm((3, 2))), None)
    np.testing.assert_allclose(jnp.linalg.norm(got.weight), 0.5, rtol=1e-6)


def shapes(tx, params):
    return jax.tree.map(jnp.shape, tx.init(params).nu, is_leaf=eqx.is_array)


@pytest.mark.slow
def test_known_layers_are_outputs_times_inputs():
    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=2)
    conv = drawn(lambda: eqx.nn.Conv2d(3, 4, 8, key=keys[0]))
    # Outputs and inputs, although the kernel is longer in both directions.
    assert shapes(tx, conv).weight == ((4, 1, 8, 8), (1, 3, 8, 8))
    assert shapes(tx, conv).bias == ((4, 1, 1),)
    plain = {"w": conv.weight}
    assert shapes(tx, plain)["w"] == ((4, 3, 8, 1), (4, 3, 1, 8))
    chosen = sl.ScaleByFactoredRms(min_dim_size_to_factor=2, layout="okki")
    assert shapes(chosen, plain)["w"] == ((4, 3, 8, 1), (1, 3, 8, 8))
    assert shapes(sl.ScaleByFactoredRms(), plain)["w"] == ((4, 3, 8, 8),)
    unfactored = sl.ScaleByFactoredRms(False, min_dim_size_to_factor=2)
    assert shapes(unfactored, plain)["w"] == ((4, 3, 8, 8),)
    # Factors are kept in single precision, and are finite at zero.
    zeros = {"w": jnp.zeros((4, 3), jnp.float16), "b": jnp.zeros(3, jnp.float16)}
    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=2, clipping_threshold=1.0)
    state = tx.init(zeros)
    assert {x.dtype for x in jax.tree.leaves(state.nu)} == {jnp.dtype("float32")}
    updates, _ = tx.update(zeros, state, zeros, sl.Context(step=0))
    assert not any(u.any() for u in jax.tree.leaves(updates))

    found = dict(zip(leaf_paths(drawn(zoo)), matrices(drawn(zoo)), strict=True))
    assert {found.pop(path) for path in [*found] if "bias" in path} == {"a vector"}
    assert found == {
        **{f"attention.{x}_proj.weight": "4 × 4" for x in ("query", "key", "value", "output")},
        "conv2.weight": "4 × 6",
        "conv3.weight": "2 of 3 × 16",
        "embedding.weight": "an embedding",
        "gru.weight_ih": "9 × 2",
        "gru.weight_hh": "9 × 3",
        "linear.weight": "4 × 3",
        "transposed.weight": "3 × 8",
    }


def test_steps_that_do_not_count_leave_the_first_decay_at_zero():
    tx = sl.ScaleByFactoredRms(step_offset=2)
    state = tx.init(jnp.zeros(()))
    seen = []
    for step, g in enumerate([3.0, 5.0, 7.0, 1.0]):
        _, state = tx.update(jnp.array(g), state, None, sl.Context(step=step))
        seen.append(float(state.nu[0]))
    last = 1 - 2**-0.8
    np.testing.assert_allclose(seen, [9, 25, 49, last * 49 + (1 - last)], rtol=1e-6)


def test_modules_state_layouts_and_unknown_or_tied_ones_say_so():
    params = {"net": Mine(jnp.ones((3, 2)), jnp.ones(3))}
    sl.ScaleByFactoredRms().init(params)  # which of two axes comes first is all the same to it
    sl.AdaptiveGradClip(0.1, layout={sl.where.type(Mine) & sl.where.ndim(2): "io"}).init(params)
    with pytest.warns(UserWarning) as warned:  # noqa: PT030  the whole text is compared
        sl.Optimizer(sl.AdaptiveGradClip(0.1) | sl.sgd(0.1), params)
    assert [str(w.message) for w in warned] == [
        "AdaptiveGradClip does not know how Mine stores 'net.weight', and assumes, as Optax "
        "does, the layout 'io': inputs before outputs. Equinox's own layers store outputs first. "
        "To state the layout and silence this warning, write `__layout__ = {'weight': 'io'}` into "
        "the class Mine, or `sl.AdaptiveGradClip(..., layout={sl.where.type(Mine): 'io'})`."
    ]

    assert matrices(drawn(stated)) == [
        "3 × 2", "an embedding", "3 of 2 × 4", "a vector",
        "2 × 3", "an embedding", "3 of 2 × 4", "a vector",
    ]  # fmt: skip
    # What a rule is told counts more.
    told = {sl.where.path("table"): "io", sl.where.path("inner.0.qkv.weight"): "o(2i)"}
    assert matrices(drawn(stated), told)[1::5] == ["4 × 5", "2 of 6 × 2"]

    pair = eqx.nn.Embedding(5, 3, key=keys[0]), eqx.nn.Linear(3, 5, key=keys[1])
    ties = (
        (lambda p: p[1].weight, lambda p: p[0].weight, ["an embedding", "a vector"]),
        (lambda p: p[0].weight, lambda p: p[1].weight, ["tied to an embedding", "a vector"]),
    )
    for where, get, want in ties:
        model = {"tied": eqx.nn.Shared(pair, where, get), "free": eqx.nn.Linear(3, 5, key=keys[2])}
        params = params_of(model)
        assert matrices(params) == ["5 × 3", "a vector", *want]
        assert matrices(params, {sl.where.path("tied.**") & sl.where.ndim(2): "oi"})[2] == "5 × 3"


def matrices(params, told=None):
    return [str(x.matrix or x.not_a_matrix) for x in layouts(params, as_layout(told))]


class Stated(eqx.Module):
    """A layer that states its layout, also of what is inside it."""

    __layout__: ClassVar = {
        "weight": "io",
        "table": "vo",
        "qkv.weight": "(3o)i",
        "inner.*.weight": "oi",
    }

    weight: jax.Array
    table: jax.Array
    qkv: eqx.nn.Linear
    inner: list[Any]


def stated():
    inner = Stated(jnp.ones((2, 3)), jnp.ones((5, 4)), eqx.nn.Linear(4, 6, key=keys[0]), [])
    return eqx.tree_at(lambda m: m.inner, inner, [inner])


GROUPED = [
    (layer, axes, groups)
    for layer in (eqx.nn.Conv, eqx.nn.ConvTranspose)
    for axes, groups in ((1, 2), (2, 3), (2, 6))
]
# Rules without random numbers, which would be others for each leaf.
OF_MATRICES = (
    *("Orthogonalize", "ScaleByShampoo", "ScaleBySoap", "ScaleByKlSoap", "ScaleBySplus"),
    *("ScaleByRowRms", "UpdateFloor"),
)
OF_LAYERS = (
    *("NormalizeColumns", "ScaleByFanIn", "UnitwiseClip", "AdaptiveGradClip", "Centralize"),
    "ScaleByAdamMini",
)


def grouped(layer, axes, groups):
    return layer(axes, 6, 12, 3, groups=groups, use_bias=False, key=keys[0])


def parts(layer, axes, groups, whole):
    one = layer(axes, 6 // groups, 12 // groups, 3, use_bias=False, key=keys[0])
    made = [eqx.tree_at(lambda c: c.weight, one, w) for w in jnp.split(whole.weight, groups)]
    return [params_of(part) for part in made]


def test_matrices_are_written_as_read_and_groups_see_their_own_inputs():
    for layer, axes, groups in GROUPED:
        conv = grouped(layer, axes, groups)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(6, *(5,) * axes)), jnp.float32)
        pairs = zip(parts(layer, axes, groups, conv), jnp.split(x, groups), strict=True)
        apart = jnp.concatenate([part(own) for part, own in pairs])
        np.testing.assert_allclose(conv(x), apart, rtol=1e-4, atol=1e-5)
    assert (
        matrices([grouped(*kind) for kind in GROUPED])
        == [*("2 of 6 × 9", "3 of 4 × 18", "a depthwise kernel")] * 2
    )

    for shape, layout in (
        *(((3, 4), "oi"), ((3, 4), "io"), ((5, 3, 4), "io"), ((4, 3, 5), "iso"), ((6, 4), "(3o)i")),
        *(((4, 6), "o(2i)"), ((2, 3, 4, 5), "oikk"), ((2, 3, 4, 5), "ikok"), ((2, 6, 4), "(3i)o")),
    ):
        x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        (found,) = layouts({"w": jnp.asarray(x)}, as_layout(layout))
        m = found.matrix
        read = m.read(jnp.asarray(x))
        assert read.shape == (m.batch, m.rows, m.columns), layout
        np.testing.assert_array_equal(m.write(read), x, err_msg=layout)
        # Along one unit only the inputs differ.
        if "(" not in layout:
            turned = np.moveaxis(x, found.unit, range(-len(found.unit), 0))
            units = (sorted(a.reshape(-1, m.columns).tolist()) for a in (turned, np.asarray(read)))
            assert next(units) == next(units), layout


@pytest.mark.parametrize("name", sampled(OF_MATRICES + OF_LAYERS))
def test_a_grouped_convolution_is_updated_as_its_parts_are(name):
    rule = getattr(sl, name, None) or getattr(sl.contrib, name)
    tx = rule(0.1) if name in ("UnitwiseClip", "AdaptiveGradClip", "UpdateFloor") else rule()
    kinds = GROUPED if name in OF_LAYERS else [kind for kind in GROUPED if kind[2] < 6]

    def updated(params, grads):
        state = tx.init(params)
        for step, own in enumerate(grads):
            updates, state = tx.update(own, state, params, sl.Context(step=step))
        return updates

    # Not compiled, as the roots of singular factors are as exact as their rounding is the same.
    for kind in kinds:
        make = lambda kind=kind: grouped(*kind)  # noqa: E731
        whole, grads = drawn(make), [drawn(make, seed) for seed in (1, 2)]
        apart = updated(parts(*kind, whole), [parts(*kind, own) for own in grads])
        assert_close(parts(*kind, updated(whole, grads)), apart, rtol=1e-4, atol=2e-5)


def test_plain_arrays_stacks_and_heads_are_read_as_matrices():
    shapes = [(), (3,), (1, 3), (3, 2), (2, 3, 4), (2, 2, 3, 4), (2,) * 6]
    unknown = [f"an array with {axes} axes of unknown layout" for axes in (3, 4, 6)]
    known = ["a scalar", "a vector", "a vector", "2 × 3"]
    assert matrices([jnp.ones(shape) for shape in shapes]) == known + unknown
    assert matrices({"w": jnp.ones((2, 2, 3, 4))}, "kkio") == ["4 × 12"]

    attention = drawn(lambda: eqx.nn.MultiheadAttention(2, 4, 3, qk_size=5, key=keys[1]))
    assert matrices(attention, "heads") == ["2 of 5 × 4", "2 of 5 × 3", "2 of 2 × 4", "2 of 4 × 2"]
    query, _, _, output = layouts(attention, as_layout("heads"))
    np.testing.assert_array_equal(
        query.matrix.read(attention.query_proj.weight)[1], attention.query_proj.weight[5:]
    )
    np.testing.assert_array_equal(
        output.matrix.read(attention.output_proj.weight)[1], attention.output_proj.weight[:, 2:]
    )

    stack = drawn(lambda: eqx.filter_vmap(lambda k: eqx.nn.Linear(3, 4, key=k))(keys[:5]))
    assert matrices(stack) == ["5 of 4 × 3", "a vector"]
    np.testing.assert_array_equal(layouts(stack)[0].matrix.read(stack.weight), stack.weight)


RULES_WITH_LAYOUT = {
    name: public
    for name, public in (vars(sl) | vars(sl.contrib)).items()
    if callable(public) and "layout" in inspect.signature(public).parameters
}
for name in ("mup", "transfer"):  # they take a model, and build no module with the layout
    del RULES_WITH_LAYOUT[name]


def test_layouts_have_several_selectors_print_as_data_and_are_noted():
    w1, w2, rest = sl.where.path("w1"), sl.where.path("w2") | sl.where.regex("v"), sl.where.ndim(2)
    for name, rule in RULES_WITH_LAYOUT.items():
        parameters = inspect.signature(rule).parameters.values()
        needed = [p for p in parameters if p.default is p.empty]
        numbers = {p.name: 0.1 for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD}
        if rule is sl.contrib.QKClip:
            numbers = {"heads": 1, "where": {w1: "q", w2: "k"}}
        tx = rule(**numbers, layout={w1: "io", w2: "oi", rest: "io"})
        found = [getattr(part, "layout", None) for part in transforms_in(tx)]
        first = next(layout for layout in found if layout is not None)
        assert first.cases == ((w1, "io"), (w2, "oi"), (rest, "io")), name

    tx = sl.UnitwiseClip(1.0, layout={sl.where.path("w"): "(3o)i"})
    assert repr(tx) == "sl.UnitwiseClip(1.0, layout={sl.where.path('w'): '(3o)i'})"
    assert eval(repr(tx), {"sl": sl}) == tx
    told = sl.where.matrix("oi")
    assert eval(repr(told), {"sl": sl}) == told
    assert sl.where.matrix({sl.where.path("w"): "oi"}).evaluate([]) == []

    tx = sl.UnitwiseClip(0.1, layout={sl.where.path("v"): "oi"}) | sl.sgd(0.1)
    with pytest.raises(ValueError, match=r"sl.where.path\('v'\) matches no parameter"):
        sl.Optimizer(tx, {"w": jnp.ones((2, 2))})
    notes = sl.Orthogonalize(layout="i(4:1:1o)").notes({"w": jnp.ones((3, 5, 12))})
    assert notes == ("3 of 8 × 5 and 3 of 2 × 5 and 3 of 2 × 5",)


LETTERS = (
    "A layout has a letter for each axis: o for outputs, i for inputs, k for a kernel, v for a "
    "vocabulary, s for a stack, (3o) for outputs in 3 blocks, (4:1:1o) for blocks of these "
    "proportions; or it is 'heads', for the projections of an eqx.nn.MultiheadAttention."
)
ERRORS = {
    "too many axes": (
        lambda: sl.UnitwiseClip(0.1).init({"w": jnp.ones((2,) * 6)}),
        "UnitwiseClip does not know the units of 'w', which has 6 axes. Say which axes are outputs "
        "(o) and inputs (i), for this array only: "
        "`sl.UnitwiseClip(..., layout={sl.where.path('w'): 'iiiiio'})`.",
    ),
    "too few axes": (
        lambda: sl.Optimizer(sl.AdaptiveGradClip(0.1, layout="io"), {"b": jnp.ones(2)}),
        "'b' is given the layout 'io', with 2 axes, but its shape is (2,).",
    ),
    "blocks that do not divide": (
        lambda: sl.UnitwiseClip(0.1, layout="(3o)i").init({"w": jnp.ones((4, 2))}),
        "'w' is given the layout '(3o)i', but its shape is (4, 2), and 4 is not a multiple of the "
        "3 blocks of '(3o)'.",
    ),
    "no layout": (
        lambda: sl.UnitwiseClip(0.1, layout={sl.where.ndim(2): "oX"}),
        "UnitwiseClip.layout has 'oX', which is not a layout. " + LETTERS,
    ),
    "no layout in a class": (
        lambda: sl.UnitwiseClip(0.1).init(Misstated(jnp.ones((2, 2)))),
        "'weight' has the layout in Misstated.__layout__ 'out', which is not one. " + LETTERS,
    ),
    "no heads": (
        lambda: sl.UnitwiseClip(0.1, layout="heads").init({"w": jnp.ones((4, 2))}),
        "'w' has the layout 'heads', but it does not belong to an eqx.nn.MultiheadAttention. Write "
        "the number of heads, such as '(8o)i'.",
    ),
    "by dtype": (
        lambda: sl.UnitwiseClip(0.1, layout={sl.where.dtype("float32"): "oi"}),
        "UnitwiseClip.layout selects by dtype (sl.where.dtype('float32')), which does not tell "
        "outputs from inputs, and which updates need not share. Select by path, type or number of "
        "axes.",
    ),
    "no mapping": (
        lambda: sl.UnitwiseClip(0.1, layout=3),
        "UnitwiseClip.layout takes a layout such as 'io', or a mapping from selectors to layouts, "
        "such as {sl.where.path('w'): 'io'}, got 3.",
    ),
}


class Misstated(eqx.Module):
    """A layer with a layout that is not one."""

    __layout__: ClassVar = {"weight": "out"}

    weight: jax.Array


@pytest.mark.parametrize(("bad", "message"), ERRORS.values(), ids=ERRORS)
def test_the_whole_message(bad, message):
    with pytest.raises((TypeError, ValueError)) as error:
        bad()
    assert str(error.value) == message
