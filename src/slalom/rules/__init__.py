"""The rules: a file for each purpose."""

from .adaptive.acprop import ScaleByAcprop as ScaleByAcprop
from .adaptive.adam import (
    ScaleByAdam as ScaleByAdam,
    ScaleByAdamax as ScaleByAdamax,
    ScaleByAdamState as ScaleByAdamState,
    ScaleByAmsgrad as ScaleByAmsgrad,
    ScaleByAmsgradState as ScaleByAmsgradState,
)
from .adaptive.adam_mini import (
    ScaleByAdamMini as ScaleByAdamMini,
    ScaleByAdamMiniState as ScaleByAdamMiniState,
)
from .adaptive.adam_variants import (
    ScaleByBelief as ScaleByBelief,
    ScaleByRadam as ScaleByRadam,
    ScaleByYogi as ScaleByYogi,
)
from .adaptive.adan import ScaleByAdan as ScaleByAdan, ScaleByAdanState as ScaleByAdanState
from .adaptive.ademamix import (
    ScaleByAdemamix as ScaleByAdemamix,
    ScaleByAdemamixState as ScaleByAdemamixState,
    ScaleBySimplifiedAdemamix as ScaleBySimplifiedAdemamix,
)
from .adaptive.adopt import ScaleByAdopt as ScaleByAdopt
from .adaptive.laprop import ScaleByLaprop as ScaleByLaprop
from .adaptive.mars import (
    CorrectByMars as CorrectByMars,
    CorrectByMarsState as CorrectByMarsState,
    ScaleByMars as ScaleByMars,
    ScaleByMarsState as ScaleByMarsState,
)
from .adaptive.novograd import (
    ScaleByNovograd as ScaleByNovograd,
    ScaleByNovogradState as ScaleByNovogradState,
)
from .adaptive.stable_adam import ScaleByStableAdam as ScaleByStableAdam
from .curvature import (
    ScaleByGaussNewton as ScaleByGaussNewton,
    ScaleByGaussNewtonState as ScaleByGaussNewtonState,
    ScaleByLevenbergMarquardt as ScaleByLevenbergMarquardt,
    ScaleByLevenbergMarquardtState as ScaleByLevenbergMarquardtState,
    ScaleBySelfScaledBroyden as ScaleBySelfScaledBroyden,
    ScaleBySelfScaledBroydenState as ScaleBySelfScaledBroydenState,
)
from .curvature.ivon import ScaleByIvon as ScaleByIvon, ScaleByIvonState as ScaleByIvonState
from .curvature.lbfgs import ScaleByLbfgs as ScaleByLbfgs, ScaleByLbfgsState as ScaleByLbfgsState
from .curvature.sophia import (
    ScaleBySophia as ScaleBySophia,
    ScaleBySophiaState as ScaleBySophiaState,
)
from .linesearch import (
    ScaleByBacktrackingLinesearch as ScaleByBacktrackingLinesearch,
    ScaleByBacktrackingLinesearchState as ScaleByBacktrackingLinesearchState,
    ScaleByZoomLinesearch as ScaleByZoomLinesearch,
    ScaleByZoomLinesearchState as ScaleByZoomLinesearchState,
)
from .low_memory.adafactor import (
    ScaleByFactoredRms as ScaleByFactoredRms,
    ScaleByFactoredRmsState as ScaleByFactoredRmsState,
)
from .low_memory.apollo import (
    ScaleByApollo as ScaleByApollo,
    ScaleByApolloState as ScaleByApolloState,
)
from .low_memory.galore import (
    ScaleByGalore as ScaleByGalore,
    ScaleByGaloreState as ScaleByGaloreState,
)
from .low_memory.rms import (
    ScaleByRms as ScaleByRms,
    ScaleByRmsState as ScaleByRmsState,
    ScaleByStddev as ScaleByStddev,
    ScaleByStddevState as ScaleByStddevState,
)
from .low_memory.sm3 import ScaleBySm3 as ScaleBySm3, ScaleBySm3State as ScaleBySm3State
from .matrices.dion import ScaleByDion as ScaleByDion, ScaleByDionState as ScaleByDionState
from .matrices.kron import ScaleByKron as ScaleByKron, ScaleByKronState as ScaleByKronState
from .matrices.matrix_norms import (
    NormalizeColumns as NormalizeColumns,
    ScaleByFanIn as ScaleByFanIn,
    ScaleByRowRms as ScaleByRowRms,
    ScaleByRowRmsState as ScaleByRowRmsState,
)
from .matrices.orthogonalize import Orthogonalize as Orthogonalize
from .matrices.radius import (
    PinRadius as PinRadius,
    RadialBrake as RadialBrake,
    UpdateFloor as UpdateFloor,
)
from .matrices.shampoo import (
    ScaleByShampoo as ScaleByShampoo,
    ScaleByShampooState as ScaleByShampooState,
)
from .matrices.soap import (
    ScaleByKlSoap as ScaleByKlSoap,
    ScaleByKlSoapState as ScaleByKlSoapState,
    ScaleBySoap as ScaleBySoap,
    ScaleBySoapState as ScaleBySoapState,
)
from .matrices.splus import ScaleBySplus as ScaleBySplus, ScaleBySplusState as ScaleBySplusState
from .matrices.unitwise import AdaptiveGradClip as AdaptiveGradClip, UnitwiseClip as UnitwiseClip
from .measuring.check_finite import CheckFinite as CheckFinite, CheckFiniteState as CheckFiniteState
from .measuring.monitor import (
    MeasureWithEma as MeasureWithEma,
    Monitor as Monitor,
    Snapshot as Snapshot,
)
from .measuring.noise import AddNoise as AddNoise, AddNoiseState as AddNoiseState
from .measuring.noise_scale import (
    MeasureGradientNoise as MeasureGradientNoise,
    MeasureGradientNoiseState as MeasureGradientNoiseState,
    gradient_noise_scale as gradient_noise_scale,
)
from .measuring.private_gradients import (
    DifferentiallyPrivateAggregate as DifferentiallyPrivateAggregate,
    DifferentiallyPrivateAggregateState as DifferentiallyPrivateAggregateState,
    PerExampleClipState as PerExampleClipState,
    PerExampleGlobalNormClip as PerExampleGlobalNormClip,
    PerExampleLayerNormClip as PerExampleLayerNormClip,
    PerExampleLayerNormClipState as PerExampleLayerNormClipState,
)
from .momentum.accumulate import (
    ScaleByAdadelta as ScaleByAdadelta,
    ScaleByAdadeltaState as ScaleByAdadeltaState,
    ScaleByRss as ScaleByRss,
    ScaleByRssState as ScaleByRssState,
)
from .momentum.apply_every import ApplyEvery as ApplyEvery, ApplyEveryState as ApplyEveryState
from .momentum.madgrad import (
    ScaleByMadgrad as ScaleByMadgrad,
    ScaleByMadgradState as ScaleByMadgradState,
)
from .momentum.momentum import (
    Ema as Ema,
    EmaState as EmaState,
    Trace as Trace,
    TraceState as TraceState,
)
from .momentum.optimistic import (
    ScaleByOptimisticGradient as ScaleByOptimisticGradient,
    ScaleByOptimisticGradientState as ScaleByOptimisticGradientState,
)
from .momentum.rprop import ScaleByRprop as ScaleByRprop, ScaleByRpropState as ScaleByRpropState
from .momentum.sign import (
    ScaleByLion as ScaleByLion,
    ScaleByLionState as ScaleByLionState,
    ScaleBySign as ScaleBySign,
)
from .rate_free.cocob import ScaleByCocob as ScaleByCocob, ScaleByCocobState as ScaleByCocobState
from .rate_free.dadapt import (
    ScaleByDAdaptAdam as ScaleByDAdaptAdam,
    ScaleByDAdaptAdamState as ScaleByDAdaptAdamState,
)
from .rate_free.dog import (
    ScaleByDog as ScaleByDog,
    ScaleByDogState as ScaleByDogState,
    ScaleByDowg as ScaleByDowg,
    ScaleByDowgState as ScaleByDowgState,
)
from .rate_free.l_dog import (
    ScaleByDistanceOverGradients as ScaleByDistanceOverGradients,
    ScaleByDistanceOverGradientsState as ScaleByDistanceOverGradientsState,
)
from .rate_free.momo import (
    ScaleByMomo as ScaleByMomo,
    ScaleByMomoAdam as ScaleByMomoAdam,
    ScaleByMomoAdamState as ScaleByMomoAdamState,
    ScaleByMomoState as ScaleByMomoState,
)
from .rate_free.polyak import ScaleByPolyak as ScaleByPolyak
from .rate_free.prodigy import (
    ScaleByProdigy as ScaleByProdigy,
    ScaleByProdigyState as ScaleByProdigyState,
)
from .shaping.cautious import Cautious as Cautious
from .shaping.clip import (
    Clip as Clip,
    ClipByBlockRms as ClipByBlockRms,
    ClipByGlobalNorm as ClipByGlobalNorm,
    ClipByGlobalNormState as ClipByGlobalNormState,
)
from .shaping.constrain import (
    KeepInitialNorm as KeepInitialNorm,
    KeepInitialNormState as KeepInitialNormState,
    KeepParamsNonnegative as KeepParamsNonnegative,
    SetToZero as SetToZero,
    ZeroNans as ZeroNans,
    ZeroNansState as ZeroNansState,
    freeze as freeze,
)
from .shaping.decay import (
    AddDecayedWeights as AddDecayedWeights,
    AddDecayToInitialParams as AddDecayToInitialParams,
    AddDecayToInitialParamsState as AddDecayToInitialParamsState,
    ScaleByLearningRateWithCorrectedDecay as ScaleByLearningRateWithCorrectedDecay,
    SubtractDecayedWeights as SubtractDecayedWeights,
)
from .shaping.normalize import (
    Centralize as Centralize,
    NormalizeByUpdateNorm as NormalizeByUpdateNorm,
)
from .shaping.qk_clip import QKClip as QKClip
from .shaping.rate_factors import layerwise_decay as layerwise_decay, mup as mup
from .shaping.scale import (
    Scale as Scale,
    ScaleByLearningRate as ScaleByLearningRate,
    ScaleBySchedule as ScaleBySchedule,
)
from .shaping.scale_by import ScaleBy as ScaleBy
from .shaping.stateless import Stateless as Stateless, StatelessPerLeaf as StatelessPerLeaf
from .shaping.trust import (
    ScaleByFromage as ScaleByFromage,
    ScaleByParamBlockNorm as ScaleByParamBlockNorm,
    ScaleByParamBlockRms as ScaleByParamBlockRms,
    ScaleByTrustRatio as ScaleByTrustRatio,
)
from .shaping.zclip import ZClip as ZClip, ZClipState as ZClipState
