"""How rules run: in which batches, from which storage, in which precision, and in which order.

`run.py` takes the phases of `sl.AbstractRule` to every leaf. `pieces.py` does so where leaves are
encoded, piece by piece. `decoding.py` runs transforms that know nothing of encoded leaves.
"""
