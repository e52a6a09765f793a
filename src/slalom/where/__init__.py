"""Selectors: which leaves a transform acts on.

Every `where` argument accepts a selector from this module, a function of the whole parameter tree
that returns a tree of bools (or a prefix of one), or such a tree.
"""

from .matrices import matrix as matrix
from .resolve import Where as Where
from .selectors import (
    dtype as dtype,
    everything as everything,
    leaf as leaf,
    ndim as ndim,
    nothing as nothing,
    path as path,
    regex as regex,
    type as type,
)
