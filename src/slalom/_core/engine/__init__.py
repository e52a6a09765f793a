"""How rules run: in which batches, from which storage, in which precision, and in which order.

`run.py` takes the phases of `sl.AbstractRule` to every leaf. `pieces.py` does so where leaves are
encoded, piece by piece. `matrices.py` reads leaves as matrices, and refreshes what is computed in
some steps only. `decoding.py` runs transforms that know nothing of encoded leaves.
"""
