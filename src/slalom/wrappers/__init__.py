"""Transforms that wrap another transform. Each is also a method of every transform."""

from .average import Average as Average
from .drive import Driven as Driven
from .every_k import EveryK as EveryK
from .flatten import Flatten as Flatten
from .if_finite import IfFinite as IfFinite
from .mask import Masked as Masked, Only as Only
from .maximize import Maximized as Maximized
from .mechanize import Mechanized as Mechanized
from .outer import Outer as Outer
from .partitions import Partition as Partition, partition as partition
from .project import Projected as Projected
from .record import Recorded as Recorded
from .sam import Sam as Sam
from .scale_loss import ScaleLoss as ScaleLoss
from .schedule_free import ScheduleFree as ScheduleFree
from .skip import SkipLargeUpdates as SkipLargeUpdates, SkipNotFinite as SkipNotFinite
from .skip_spikes import SkipSpikes as SkipSpikes
from .split_complex import SplitRealAndImaginary as SplitRealAndImaginary
from .store import Stored as Stored
from .when import When as When
from .write import Written as Written
