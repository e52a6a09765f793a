"""Codecs, which store state in fewer bits, for `tx.store`.

A codec has a method `encode` and a method `decode`, so these classes have lower-case names, as
functions have.
"""

from .._core.engine.encoded import Encoded as Encoded, Spec as Spec
from ._codec import AbstractCodec as AbstractCodec
from .blocks import dynamic8 as dynamic8, int4 as int4, int8 as int8
from .floats import cast as cast
from .names import offload as offload
