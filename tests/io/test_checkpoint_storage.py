"""Optimizer state that the program stores in another way than the file does."""

import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import slalom as sl
from helpers import assert_same_bits, sampled, slow_except

PARAMS = {"w": jnp.linspace(-1, 1, 8192).reshape(64, 128), "b": jnp.ones(5)}


def saved(path, tx, params=PARAMS):
    grads = jax.tree.map(lambda p: jnp.sin(9 * p), params)
    _, opt = sl.Optimizer(tx, params).step(params, grads)
    sl.checkpoint.save(path, opt=opt)
    return opt


class halves(sl.codecs.AbstractCodec):
    """A codec that Slalom does not have."""

    def encode(self, x, spec, bits=None):
        return {"codes": x.astype(jnp.float16)}

    def decode(self, arrays, spec):
        return arrays["codes"].astype(spec.dtype)


STORED = {
    "plain": lambda tx: tx,
    "int8": lambda tx: tx.store("int8"),
    "dynamic8 and int4": lambda tx: tx.store({"nu": "dynamic8", "mu": "int4"}),
    "float8": lambda tx: tx.store("float8_e4m3fn"),
    "bfloat16": lambda tx: tx.store("bfloat16"),
    "mine": lambda tx: tx.store({"mu": halves()}),
}
PAIRS = [pair for pair in itertools.permutations(STORED, 2) if pair[0] != "mine"]
CASES = [(*pair, complex) for pair in PAIRS for complex in (False, True)]


@pytest.mark.parametrize("case", sampled(CASES, ("plain", "int8", False)), ids=repr)
def test_a_load_into_another_storage_is_what_rebind_makes(case, path):
    *pair, complex = case
    w = PARAMS["w"]
    params = {"w": jax.lax.complex(w, 2 * w) if complex else w, "b": PARAMS["b"]}
    before, after = (STORED[name](sl.adam(0.1)) for name in pair)
    opt = saved(path, before, params)
    expected, report = opt.rebind(params, tx=after)
    loaded = sl.checkpoint.load(path, opt=sl.Optimizer(after, params))
    assert_same_bits(loaded["opt"], expected)
    assert {*loaded.report.recoded} == {f"opt.{name}" for name in report.recoded} != set()
    assert loaded.report.fits
    assert "recoded:" in repr(loaded.report)
    abstract = eqx.filter_eval_shape(lambda: sl.Optimizer(after, params))
    assert_same_bits(sl.checkpoint.load(path, opt=abstract)["opt"], expected)


@pytest.mark.parametrize("outer", slow_except(["every_k", "average"], "average"))
def test_storage_changes_together_with_a_wrapper(outer, path):
    opt = saved(path, sl.adam(0.1))
    stored = sl.adam(0.1).store("int8")
    tx = stored.every_k(2) if outer == "every_k" else stored.average(0.9)
    loaded = sl.checkpoint.load(path, opt=sl.Optimizer(tx, PARAMS), strict=False)
    expected, _ = opt.rebind(PARAMS, tx=tx)
    assert_same_bits(loaded["opt"], expected)


CHANGES = {
    "missing": lambda x: None,
    "reshaped": lambda x: jnp.concatenate([x, x]),
    "retyped": lambda x: x.astype("float32" if x.dtype != jnp.float32 else "int32"),
}


@pytest.mark.parametrize("codec", slow_except(["int8", "dynamic8", "int4"], "int8"))
def test_arrays_of_an_encoded_leaf_are_taken_together_or_not_at_all(codec, path):
    tx = sl.adam(0.1).store(codec, min_size=1)
    opt, fresh = saved(path, tx), sl.Optimizer(tx, PARAMS)
    items, initial = (sl.checkpoint.to_dict(opt=x) for x in (opt, fresh))
    of_w = [name for name in items if ".mu.w." in name]
    assert len(of_w) > 1
    for name, (field, change) in itertools.product(of_w, CHANGES.items()):
        changed = {n: change(x) if n == name else x for n, x in items.items()}
        changed = {n: x for n, x in changed.items() if x is not None}
        with pytest.raises(sl.checkpoint.MismatchError, match=re.escape(name.rpartition(".")[0])):
            sl.checkpoint.from_dict(changed, opt=fresh)
        loaded = sl.checkpoint.from_dict(changed, opt=fresh, strict=False)
        assert not loaded.report.fits, field
        found = sl.checkpoint.to_dict(**loaded)
        assert_same_bits([found[n] for n in of_w], [initial[n] for n in of_w])
        # The other mean of the parameter starts anew with it, and those of others go on.
        for n in items:
            if ".nu.w" in n or ".mu.b" in n:
                assert_same_bits(found[n], (initial if ".nu.w" in n else items)[n])


def test_state_in_another_code_or_shape_or_with_another_is_reported_once(path):
    tx = sl.lion(0.1).store({"mu": halves()})
    sl.checkpoint.save(path, opt=sl.Optimizer(tx, PARAMS))
    name = "opt.store.scale_by_lion.mu.w.codes is halves() in the file and sl.codecs.int8() here"
    with pytest.raises(sl.checkpoint.MismatchError, match=re.escape(f"other dtypes: {name}\n")):
        sl.checkpoint.load(path, opt=sl.Optimizer(sl.lion(0.1).store("int8"), PARAMS))
    # Its own optimizer has it.
    assert sl.checkpoint.load(path, opt=sl.Optimizer(tx, PARAMS)).report.fits

    sl.checkpoint.save(path, opt=sl.Optimizer(sl.lion(0.1).store("int8"), PARAMS))
    params = {"w": jnp.ones((128, 64)), "b": jnp.ones(5)}
    for tx in (sl.lion(0.1).store("int8"), sl.lion(0.1).store("int4"), sl.lion(0.1)):
        loaded = sl.checkpoint.load(path, opt=sl.Optimizer(tx, params), strict=False)
        report = loaded.report
        assert [*report.reshaped.values()] == [("(64, 128)", "(128, 64)")]
        assert [*report.missing, *report.unexpected, *report.retyped] == []

    saved(path, sl.adam(0.1))
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(6)}
    with pytest.raises(sl.checkpoint.MismatchError) as caught:
        sl.checkpoint.load(path, opt=sl.Optimizer(sl.adam(0.1), params))
    assert "only in" not in str(caught.value)
    loaded = sl.checkpoint.load(path, opt=sl.Optimizer(sl.adam(0.1), params), strict=False)
    assert loaded.report.restarted == ("opt.scale_by_adam.age",)
    assert len(loaded.report.reshaped) == 4
    assert "restarted:   opt.scale_by_adam.age" in repr(loaded.report).splitlines()


def test_an_optimizer_whose_paths_collide_loads_into_itself(path):
    params = {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)}
    _, opt = sl.Optimizer(sl.adam(0.1), params).step(params, params)
    sl.checkpoint.save(path, model=params, opt=opt)
    like = jax.tree.map(jnp.zeros_like, params)
    loaded = sl.checkpoint.load(path, model=like, opt=sl.Optimizer(sl.adam(0.1), like))
    assert loaded.report.fits
    assert_same_bits((loaded["model"], loaded["opt"]), (params, opt))
