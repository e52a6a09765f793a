"""Everything public that transforms updates, in a representative form: the rows of many tests.

A file of this folder has a part of the table. A property takes its rows from `rows`, which says
when each of them runs.
"""

import zlib

import pytest

from helpers import EXHAUSTIVE, ONE_IN, SLOW, transforms_in

from . import adaptive, catalogue, losses, matrices, storage
from .catalogue import PER_EXAMPLE as PER_EXAMPLE, halving as halving

_PARTS = (catalogue, matrices, storage, adaptive, losses)


def _joined(which):
    rows = {}
    for part in _PARTS:
        more = getattr(part, which, {})
        assert not rows.keys() & more.keys(), rows.keys() & more.keys()
        rows |= more
    return rows


RULES, RECIPES, WRAPPERS = map(_joined, ("RULES", "RECIPES", "WRAPPERS"))
EVERYTHING = RULES | RECIPES | WRAPPERS
# What a gradient is enough for. The others linearize a loss, and `tests/curvature/` is about them,
# or combine several, as in `tests/training/test_combine.py`, or know attention logits.
OTHER_INPUTS = {"residuals", "terms", "max_logits"}
WITH_GRADIENT = {
    name: tx
    for name, tx in EVERYTHING.items()
    if not any(OTHER_INPUTS & {*part.needs} for part in transforms_in(tx))
}
BUT_RECIPES = {name: tx for name, tx in EVERYTHING.items() if name not in RECIPES}
GRADIENT_ROWS = [name for name in WITH_GRADIENT if name in BUT_RECIPES]

ONE_OF_EACH_KIND = (
    "ScaleByAdam",  # number by number
    "ScaleByFactoredRms, factored",  # leaf by leaf
    "ScaleByProdigy",  # with sums over all leaves
    "Store",  # a codec
    "Write",  # a write policy
    "IfFinite, both",  # a wrapper that skips
    "EveryK in Partition",  # a wrapper that accumulates, and structure
    "muon",  # a recipe, with matrices
)


def rows(names=EVERYTHING, *, everyday=ONE_OF_EACH_KIND, ci=()):
    """Gives a property its rows, each in its tier, as the argument `row`.

    Rows run every day if they are named. One in `ONE_IN` of the others runs in CI, drawn anew for
    each property, with those named in `ci`, which differ in what the property checks. The rest of
    the product is exhaustive, and so are recipes, which are chains of other rows.
    """

    def give(test):
        def tier(name):
            if name in everyday:
                return []
            drawn = zlib.crc32(f"{test.__name__}[{name}]".encode()) % ONE_IN == 0
            return [SLOW if name in ci or (drawn and name in BUT_RECIPES) else EXHAUSTIVE]

        # Workers take whole groups, so the tests of a row find its programs.
        values = [
            pytest.param(name, marks=(pytest.mark.xdist_group(name), *tier(name))) for name in names
        ]
        return pytest.mark.parametrize("row", values, indirect=True)(test)

    return give
