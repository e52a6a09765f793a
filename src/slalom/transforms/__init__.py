"""The rules: a file for each purpose."""

from .adaptive import (
    ScaleByAdam as ScaleByAdam,
)
from .adaptive import (
    ScaleByAdamState as ScaleByAdamState,
)
from .adaptive import (
    ScaleByLion as ScaleByLion,
)
from .adaptive import (
    ScaleByLionState as ScaleByLionState,
)
from .adaptive import (
    ScaleByRms as ScaleByRms,
)
from .adaptive import (
    ScaleByRmsState as ScaleByRmsState,
)
from .adaptive import (
    ScaleByStddev as ScaleByStddev,
)
from .adaptive import (
    ScaleByStddevState as ScaleByStddevState,
)
from .clip import Clip as Clip
from .clip import ClipByGlobalNorm as ClipByGlobalNorm
from .constrain import SetToZero as SetToZero
from .decay import AddDecayedWeights as AddDecayedWeights
from .momentum import Trace as Trace
from .momentum import TraceState as TraceState
from .scale import (
    Scale as Scale,
)
from .scale import (
    ScaleByLearningRate as ScaleByLearningRate,
)
from .scale import (
    ScaleBySchedule as ScaleBySchedule,
)
