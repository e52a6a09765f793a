"""Transforms around other transforms, and what their authors need.

Each class is made by the method of the same name: `tx.every_k(k)` returns a
`sl.wrappers.EveryK`. Use the classes to find a part, as in `opt.state_of(sl.wrappers.EveryK)`, and
the base classes to write a wrapper.
"""

from .._core.declared import Part as Part
from .._core.wrapper import (
    AbstractPacedWrapper as AbstractPacedWrapper,
    AbstractWrapper as AbstractWrapper,
    run_if as run_if,
)
from .._core.write import Writer as Writer
from .._core.writer import AbstractParameterWriter as AbstractParameterWriter
from .average import Average as Average
from .drive import Drive as Drive
from .every_k import EveryK as EveryK
from .flatten import Flatten as Flatten
from .if_finite import IfFinite as IfFinite
from .mask import Mask as Mask, Only as Only
from .maximize import Maximize as Maximize
from .mechanize import Mechanize as Mechanize
from .outer import Outer as Outer
from .partitions import Partition as Partition
from .project import Project as Project
from .record import Record as Record
from .sam import Sam as Sam
from .scale_loss import ScaleLoss as ScaleLoss
from .schedule_free import ScheduleFree as ScheduleFree
from .skip_spikes import SkipSpikes as SkipSpikes
from .split_complex import SplitComplex as SplitComplex
from .store import Store as Store
from .when import When as When
from .write import Write as Write

__all__ = [
    "AbstractPacedWrapper",
    "AbstractParameterWriter",
    "AbstractWrapper",
    "Average",
    "Drive",
    "EveryK",
    "Flatten",
    "IfFinite",
    "Mask",
    "Maximize",
    "Mechanize",
    "Only",
    "Outer",
    "Part",
    "Partition",
    "Project",
    "Record",
    "Sam",
    "ScaleLoss",
    "ScheduleFree",
    "SkipSpikes",
    "SplitComplex",
    "Store",
    "When",
    "Write",
    "Writer",
    "run_if",
]


def __dir__() -> list[str]:
    return __all__
