"""Transforms around other transforms, and helpers for their authors.

Each class is made by the method of the same name: `tx.every_k(k)` returns a
`sl.wrappers.EveryK`. Use the classes to find a part, as in `opt.state_of(sl.wrappers.EveryK)`, and
the base classes to write a wrapper.
"""

from .._core.protocol.bases import AbstractParameterWriter as AbstractParameterWriter
from .._core.protocol.parts import Part as Part
from .._core.protocol.wrapper import (
    AbstractPacedWrapper as AbstractPacedWrapper,
    AbstractWrapper as AbstractWrapper,
    run_if as run_if,
)
from .._core.protocol.writer import Writer as Writer
from .gradients.combine import Combine as Combine
from .gradients.conditional import IfFinite as IfFinite, SkipSpikes as SkipSpikes, When as When
from .gradients.every_k import EveryK as EveryK
from .gradients.graft import Graft as Graft
from .gradients.loss import Maximize as Maximize, ScaleLoss as ScaleLoss
from .gradients.sam import Sam as Sam
from .parameters.average import Average as Average
from .parameters.mechanize import Mechanize as Mechanize
from .parameters.outer import Outer as Outer
from .parameters.project import Project as Project
from .parameters.schedule_free import ScheduleFree as ScheduleFree
from .parameters.write import Write as Write
from .scope.drive import Drive as Drive
from .scope.forms import Flatten as Flatten, SplitComplex as SplitComplex
from .scope.partitions import Mask as Mask, Only as Only, Partition as Partition
from .scope.record import Record as Record
from .scope.store import Store as Store
