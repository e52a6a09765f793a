"""The rules: a file for each purpose."""

from .adaptive import (
    ScaleByAdam as ScaleByAdam,
    ScaleByAdamState as ScaleByAdamState,
    ScaleByLion as ScaleByLion,
    ScaleByLionState as ScaleByLionState,
    ScaleByRms as ScaleByRms,
    ScaleByRmsState as ScaleByRmsState,
    ScaleByStddev as ScaleByStddev,
    ScaleByStddevState as ScaleByStddevState,
)
from .clip import Clip as Clip, ClipByGlobalNorm as ClipByGlobalNorm
from .constrain import SetToZero as SetToZero
from .decay import AddDecayedWeights as AddDecayedWeights
from .momentum import Trace as Trace, TraceState as TraceState
from .scale import (
    Scale as Scale,
    ScaleByLearningRate as ScaleByLearningRate,
    ScaleBySchedule as ScaleBySchedule,
)
