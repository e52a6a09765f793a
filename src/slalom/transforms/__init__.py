"""The rules: a file for each purpose."""

from .accumulate import (
    ScaleByAdadelta as ScaleByAdadelta,
    ScaleByAdadeltaState as ScaleByAdadeltaState,
    ScaleByRss as ScaleByRss,
    ScaleByRssState as ScaleByRssState,
)
from .acprop import ScaleByAcprop as ScaleByAcprop
from .adam import (
    ScaleByAdam as ScaleByAdam,
    ScaleByAdamax as ScaleByAdamax,
    ScaleByAdamState as ScaleByAdamState,
    ScaleByAmsgrad as ScaleByAmsgrad,
    ScaleByAmsgradState as ScaleByAmsgradState,
)
from .adam_mini import (
    ScaleByAdamMini as ScaleByAdamMini,
    ScaleByAdamMiniState as ScaleByAdamMiniState,
)
from .adam_variants import (
    ScaleByBelief as ScaleByBelief,
    ScaleByRadam as ScaleByRadam,
    ScaleByYogi as ScaleByYogi,
)
from .adan import ScaleByAdan as ScaleByAdan, ScaleByAdanState as ScaleByAdanState
from .ademamix import (
    ScaleByAdemamix as ScaleByAdemamix,
    ScaleByAdemamixState as ScaleByAdemamixState,
    ScaleBySimplifiedAdemamix as ScaleBySimplifiedAdemamix,
)
from .adopt import ScaleByAdopt as ScaleByAdopt
from .apollo import ScaleByApollo as ScaleByApollo, ScaleByApolloState as ScaleByApolloState
from .apply_every import ApplyEvery as ApplyEvery, ApplyEveryState as ApplyEveryState
from .cautious import Cautious as Cautious
from .check_finite import CheckFinite as CheckFinite, CheckFiniteState as CheckFiniteState
from .clip import (
    Clip as Clip,
    ClipByBlockRms as ClipByBlockRms,
    ClipByGlobalNorm as ClipByGlobalNorm,
)
from .cocob import ScaleByCocob as ScaleByCocob, ScaleByCocobState as ScaleByCocobState
from .constrain import (
    KeepInitialNorm as KeepInitialNorm,
    KeepInitialNormState as KeepInitialNormState,
    KeepParamsNonnegative as KeepParamsNonnegative,
    SetToZero as SetToZero,
    ZeroNans as ZeroNans,
    ZeroNansState as ZeroNansState,
    freeze as freeze,
)
from .curvature import (
    ScaleByGaussNewton as ScaleByGaussNewton,
    ScaleByGaussNewtonState as ScaleByGaussNewtonState,
    ScaleByLevenbergMarquardt as ScaleByLevenbergMarquardt,
    ScaleByLevenbergMarquardtState as ScaleByLevenbergMarquardtState,
)
from .dadapt import (
    ScaleByDAdaptAdam as ScaleByDAdaptAdam,
    ScaleByDAdaptAdamState as ScaleByDAdaptAdamState,
)
from .decay import (
    AddDecayedWeights as AddDecayedWeights,
    AddDecayToInitialParams as AddDecayToInitialParams,
    AddDecayToInitialParamsState as AddDecayToInitialParamsState,
    ScaleByLearningRateWithCorrectedDecay as ScaleByLearningRateWithCorrectedDecay,
    SubtractDecayedWeights as SubtractDecayedWeights,
)
from .distance import (
    ScaleByDistanceOverGradients as ScaleByDistanceOverGradients,
    ScaleByDistanceOverGradientsState as ScaleByDistanceOverGradientsState,
)
from .dog import (
    ScaleByDog as ScaleByDog,
    ScaleByDogState as ScaleByDogState,
    ScaleByDowg as ScaleByDowg,
    ScaleByDowgState as ScaleByDowgState,
)
from .factored import (
    ScaleByFactoredRms as ScaleByFactoredRms,
    ScaleByFactoredRmsState as ScaleByFactoredRmsState,
)
from .factors import layerwise_decay as layerwise_decay, mup as mup
from .galore import ScaleByGalore as ScaleByGalore, ScaleByGaloreState as ScaleByGaloreState
from .kron import ScaleByKron as ScaleByKron, ScaleByKronState as ScaleByKronState
from .laprop import ScaleByLaprop as ScaleByLaprop
from .lbfgs import ScaleByLbfgs as ScaleByLbfgs, ScaleByLbfgsState as ScaleByLbfgsState
from .linesearch import (
    ScaleByBacktrackingLinesearch as ScaleByBacktrackingLinesearch,
    ScaleByBacktrackingLinesearchState as ScaleByBacktrackingLinesearchState,
    ScaleByZoomLinesearch as ScaleByZoomLinesearch,
    ScaleByZoomLinesearchState as ScaleByZoomLinesearchState,
)
from .madgrad import (
    ScaleByMadgrad as ScaleByMadgrad,
    ScaleByMadgradState as ScaleByMadgradState,
)
from .mars import ScaleByMars as ScaleByMars, ScaleByMarsState as ScaleByMarsState
from .matrix_norms import (
    NormalizeColumns as NormalizeColumns,
    ScaleByFanIn as ScaleByFanIn,
    ScaleByRowRms as ScaleByRowRms,
    ScaleByRowRmsState as ScaleByRowRmsState,
)
from .momentum import Ema as Ema, EmaState as EmaState, Trace as Trace, TraceState as TraceState
from .momo import (
    ScaleByMomo as ScaleByMomo,
    ScaleByMomoAdam as ScaleByMomoAdam,
    ScaleByMomoAdamState as ScaleByMomoAdamState,
    ScaleByMomoState as ScaleByMomoState,
)
from .monitor import MeasureWithEma as MeasureWithEma, Monitor as Monitor, Snapshot as Snapshot
from .noise import AddNoise as AddNoise, AddNoiseState as AddNoiseState
from .noise_scale import (
    MeasureGradientNoise as MeasureGradientNoise,
    MeasureGradientNoiseState as MeasureGradientNoiseState,
    gradient_noise_scale as gradient_noise_scale,
)
from .normalize import Centralize as Centralize, NormalizeByUpdateNorm as NormalizeByUpdateNorm
from .novograd import (
    ScaleByNovograd as ScaleByNovograd,
    ScaleByNovogradState as ScaleByNovogradState,
)
from .optimistic import (
    ScaleByOptimisticGradient as ScaleByOptimisticGradient,
    ScaleByOptimisticGradientState as ScaleByOptimisticGradientState,
)
from .orthogonalize import Orthogonalize as Orthogonalize
from .per_example import (
    DifferentiallyPrivateAggregate as DifferentiallyPrivateAggregate,
    DifferentiallyPrivateAggregateState as DifferentiallyPrivateAggregateState,
    PerExampleClipState as PerExampleClipState,
    PerExampleGlobalNormClip as PerExampleGlobalNormClip,
    PerExampleLayerNormClip as PerExampleLayerNormClip,
    PerExampleLayerNormClipState as PerExampleLayerNormClipState,
)
from .polyak import ScaleByPolyak as ScaleByPolyak
from .prodigy import ScaleByProdigy as ScaleByProdigy, ScaleByProdigyState as ScaleByProdigyState
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
from .scale_by import ScaleBy as ScaleBy
from .shampoo import ScaleByShampoo as ScaleByShampoo, ScaleByShampooState as ScaleByShampooState
from .sign import (
    ScaleByLion as ScaleByLion,
    ScaleByLionState as ScaleByLionState,
    ScaleBySign as ScaleBySign,
)
from .sm3 import ScaleBySm3 as ScaleBySm3, ScaleBySm3State as ScaleBySm3State
from .soap import ScaleBySoap as ScaleBySoap, ScaleBySoapState as ScaleBySoapState
from .sophia import ScaleBySophia as ScaleBySophia, ScaleBySophiaState as ScaleBySophiaState
from .stable_adam import ScaleByStableAdam as ScaleByStableAdam
from .stateless import Stateless as Stateless, StatelessPerLeaf as StatelessPerLeaf
from .trust import (
    ScaleByFromage as ScaleByFromage,
    ScaleByParamBlockNorm as ScaleByParamBlockNorm,
    ScaleByParamBlockRms as ScaleByParamBlockRms,
    ScaleByTrustRatio as ScaleByTrustRatio,
)
from .unitwise import AdaptiveGradClip as AdaptiveGradClip, UnitwiseClip as UnitwiseClip
from .zclip import ZClip as ZClip, ZClipState as ZClipState
