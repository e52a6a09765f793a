"""Transforms around a transform. Each is also a method of every transform."""

from .every_k import EveryK as EveryK
from .mask import Masked as Masked, Only as Only
from .partition import Partition as Partition, partition as partition
