"""A row of the table, and what its tests share."""

import functools

import jax
import jax.numpy as jnp

import slalom as sl
from helpers import kind_of, known, transforms_in

from . import EVERYTHING, PER_EXAMPLE

SINGLE = (jnp.float32,) * 3

COMPLEX = {
    name: tx
    for name, tx in (EVERYTHING | PER_EXAMPLE).items()
    # bfloat16 moments cannot hold a complex mean of squares' mean: the twin of bfloat16 is wider.
    if "dtypes" not in name
    # Complex numbers are neither above nor below a bound.
    and not any(bounded in name for bounded in ("Nonnegative", "in a box"))
    # Rprop compares signs, which complex numbers have no two of: `test_adaptive.py` has its error.
    and "rprop" not in name.lower()
    # The diagonal of a complex Hessian has no sign: their own tests have the errors.
    and not {"sophia", "ivon"} & set(name.lower().replace("scaleby", "").split())
}


def make_params(dtypes=SINGLE):
    a, b, c = dtypes
    return {
        "w": jnp.linspace(-1, 1, 6).reshape(2, 3).astype(a),
        "b": (jnp.linspace(0.5, 1, 3).astype(b), jnp.asarray(0.25, c)),
        "empty": jnp.zeros((0, 2), a),
        "hole": None,
    }


def make_grads(params):
    return jax.tree.map(lambda p: (p * 0 + 0.5).astype(p.dtype), params)


def pointers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size]


class TwoSteps:
    """An update and two steps by one program, and how everything was before them."""

    def __init__(self, tx, params, grads, *, updates, donate=False):
        opt, whole = sl.Optimizer(tx, params), make_grads(params)
        self.before = kind_of((params, opt))
        self.pointers = pointers((params, opt))
        self.start = jax.tree.map(jnp.copy, params)

        def both(params, opt):
            known_here = known(params, whole)
            updated = opt.update(params, grads, **known_here) if updates else None
            return updated, opt.step(params, grads, **known_here)

        program = jax.jit(both, donate_argnums=(0, 1) if donate else ())
        self.updated, self.stepped = program(params, opt)
        _, (self.params, self.opt) = program(*jax.tree.map(jnp.copy, self.stepped))
        self.compilations = program._cache_size()


class Row:
    """A transform, and the optimizers and programs that its tests share."""

    def __init__(self, name):
        self.name = name
        self.tx = (EVERYTHING | PER_EXAMPLE)[name]

    @functools.cached_property
    def params(self):
        return make_params()

    @functools.cached_property
    def opt(self):
        """Bound to `params`."""
        return sl.Optimizer(self.tx, self.params)

    @functools.cached_property
    def returns_updates(self):
        """Whether half-precision parameters have updates that can be added to them."""
        return {write.policy for write in transforms_in(self.tx, sl.wrappers.Write)} <= {"nearest"}

    @functools.cached_property
    def mixed(self):
        """Two steps on leaves of several dtypes, which give away their memory."""
        if self.name in PER_EXAMPLE:
            params = make_params((jnp.bfloat16, jnp.float32, jnp.float16))
        else:
            # Compiling takes as long as there are leaves: the others are among those of slow tests.
            params = make_params((jnp.bfloat16, jnp.float32, jnp.float32))
            params["b"] = params["b"][1:]
            del params["empty"]
        if self.name in COMPLEX:
            params["z"] = jnp.array([[1 + 2j, 3 - 1j]], jnp.complex64)
        grads = make_grads(params)
        if self.name in PER_EXAMPLE:
            grads = jax.tree.map(lambda g: jnp.stack([g, 6 * g]), grads)
        return TwoSteps(self.tx, params, grads, updates=self.returns_updates, donate=True)
