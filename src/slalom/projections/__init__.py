"""Euclidean projections of whole trees, for `tx.project`.

A projection is called like a function, so these classes have lower-case names, as
`functools.partial` has. Each maps a tree x to the nearest tree of a set, where the distance is that
of all entries of all leaves together:

    argmin ‖p − x‖₂  over p in the set

Those of `sphere`, `stiefel` and `psd` act on each leaf separately.

The sets of `sphere`, `l2_sphere`, `stiefel`, `hyperplane` and `vector` are smooth, and `tx.project`
uses their tangent spaces.

They compute in at least float32 and return every leaf in its own dtype. To project each leaf
separately, map over the leaves: `lambda tree: jax.tree.map(sl.projections.l2_ball(1.0), tree)`. A
complex entry counts as a point of the plane: |z| is its modulus, and ⟨a, x⟩ is Re Σ āᵢ·xᵢ.
"""

from ._projection import AbstractProjection as AbstractProjection
from .balls import (
    l1_ball as l1_ball,
    l1_sphere as l1_sphere,
    l2_ball as l2_ball,
    l2_sphere as l2_sphere,
    linf_ball as linf_ball,
    simplex as simplex,
    sphere as sphere,
)
from .matrices import psd as psd, stiefel as stiefel
from .polyhedra import (
    box as box,
    halfspace as halfspace,
    hypercube as hypercube,
    hyperplane as hyperplane,
    non_negative as non_negative,
    vector as vector,
)
