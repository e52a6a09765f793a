"""Runs rules: groups of matrices, storage, precision and order.

`run.py` takes the phases of `sl.AbstractRule` to every leaf. `encoded.py` decodes and encodes them.
`matrices.py` reads leaves as matrices. `phases.py` runs the phases of one leaf, and `refresh.py`
refreshes what is computed in some steps only.

Where a rule is written for XLA rather than for the reader, it is for one of these reasons:

A step is limited by memory traffic, and overwrites the state in place. Two habits of XLA matter.

**An old array that is read after its successor was written is copied first.** So everything that
is derived from a moment, such as the update, is derived from the new moment: `direction` sees the
state that `advance` has assigned. Where the formula has the old moment, `interpolation_of_new`
(Lion), `_size_ratio` (Adadelta) and `ScaleByStddev` solve it for the new one. Where a new array is
derived from no other new array, a rule declares that it is `written_last`. What a rule measures on
old state comes before all that it writes, which the engine sees to.
Belief's sum b₂·ν + (c₂·|g − m|² + ε) is added in this order because XLA would move a last sum of an
array and a number into the kernel that reads ν, which would then read the old ν.

**An expression that two reductions share, or a reduction and a product, is written to memory.**
So Adafactor phrases the square differently for each reduction. A number that is broadcast for
several reductions is written, too, so `tree.NormOf` multiplies each array by factors of its own.

**A kernel that reads one entry of a vector takes several times as long to compile** as one that
reads a scalar. So norms of leaves are scalars from one end to the other: `ScaleByTrustRatio`
divides them in `direction`, not as vectors in `finish`.

`tests/core/test_compiled.py` counts copies, writes and scratch memory.
"""
