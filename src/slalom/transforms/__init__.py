"""The rules: a file for each purpose."""

from .accumulate import (
    ScaleByAdadelta as ScaleByAdadelta,
    ScaleByAdadeltaState as ScaleByAdadeltaState,
    ScaleByRss as ScaleByRss,
    ScaleByRssState as ScaleByRssState,
)
from .adam import (
    ScaleByAdam as ScaleByAdam,
    ScaleByAdamax as ScaleByAdamax,
    ScaleByAdamState as ScaleByAdamState,
    ScaleByAmsgrad as ScaleByAmsgrad,
    ScaleByAmsgradState as ScaleByAmsgradState,
)
from .adam_variants import (
    ScaleByBelief as ScaleByBelief,
    ScaleByRadam as ScaleByRadam,
    ScaleByYogi as ScaleByYogi,
)
from .adan import ScaleByAdan as ScaleByAdan, ScaleByAdanState as ScaleByAdanState
from .clip import Clip as Clip, ClipByGlobalNorm as ClipByGlobalNorm
from .constrain import SetToZero as SetToZero
from .decay import AddDecayedWeights as AddDecayedWeights
from .momentum import Trace as Trace, TraceState as TraceState
from .novograd import (
    ScaleByNovograd as ScaleByNovograd,
    ScaleByNovogradState as ScaleByNovogradState,
)
from .rms import (
    ScaleByRms as ScaleByRms,
    ScaleByRmsState as ScaleByRmsState,
    ScaleByStddev as ScaleByStddev,
    ScaleByStddevState as ScaleByStddevState,
)
from .rprop import ScaleByRprop as ScaleByRprop, ScaleByRpropState as ScaleByRpropState
from .scale import (
    Scale as Scale,
    ScaleByLearningRate as ScaleByLearningRate,
    ScaleBySchedule as ScaleBySchedule,
)
from .sign import (
    ScaleByLion as ScaleByLion,
    ScaleByLionState as ScaleByLionState,
    ScaleBySign as ScaleBySign,
)
from .sm3 import ScaleBySM3 as ScaleBySM3, ScaleBySM3State as ScaleBySM3State
