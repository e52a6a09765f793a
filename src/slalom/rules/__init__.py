"""The rules and their recipes: a room for each family."""

from .adaptive._adam import ScaleByAdamState as ScaleByAdamState
from .adaptive.acprop import ScaleByAcprop as ScaleByAcprop, acprop as acprop
from .adaptive.adam import (
    ScaleByAdam as ScaleByAdam,
    adam as adam,
    adamw as adamw,
    nadam as nadam,
    nadamw as nadamw,
)
from .adaptive.adam_mini import (
    ScaleByAdamMini as ScaleByAdamMini,
    ScaleByAdamMiniState as ScaleByAdamMiniState,
    adam_mini as adam_mini,
)
from .adaptive.adam_variants import (
    ScaleByBelief as ScaleByBelief,
    ScaleByRadam as ScaleByRadam,
    ScaleByYogi as ScaleByYogi,
    adabelief as adabelief,
    radam as radam,
    yogi as yogi,
)
from .adaptive.adamax import ScaleByAdamax as ScaleByAdamax, adamax as adamax, adamaxw as adamaxw
from .adaptive.adamc import (
    ScaleByLearningRateWithCorrectedDecay as ScaleByLearningRateWithCorrectedDecay,
    adamc as adamc,
)
from .adaptive.adan import (
    ScaleByAdan as ScaleByAdan,
    ScaleByAdanState as ScaleByAdanState,
    adan as adan,
)
from .adaptive.ademamix import (
    ScaleByAdemamix as ScaleByAdemamix,
    ScaleByAdemamixState as ScaleByAdemamixState,
    ScaleBySimplifiedAdemamix as ScaleBySimplifiedAdemamix,
    ademamix as ademamix,
    simplified_ademamix as simplified_ademamix,
)
from .adaptive.adopt import ScaleByAdopt as ScaleByAdopt, adopt as adopt
from .adaptive.amsgrad import (
    ScaleByAmsgrad as ScaleByAmsgrad,
    ScaleByAmsgradState as ScaleByAmsgradState,
    amsgrad as amsgrad,
)
from .adaptive.laprop import ScaleByLaprop as ScaleByLaprop, laprop as laprop
from .adaptive.mars import (
    CorrectByMars as CorrectByMars,
    CorrectByMarsState as CorrectByMarsState,
    ScaleByMars as ScaleByMars,
    ScaleByMarsState as ScaleByMarsState,
    mars as mars,
)
from .adaptive.novograd import (
    ScaleByNovograd as ScaleByNovograd,
    ScaleByNovogradState as ScaleByNovogradState,
    novograd as novograd,
)
from .adaptive.optimistic import (
    ScaleByOptimisticGradient as ScaleByOptimisticGradient,
    ScaleByOptimisticGradientState as ScaleByOptimisticGradientState,
    optimistic_adam_v2 as optimistic_adam_v2,
    optimistic_gradient_descent as optimistic_gradient_descent,
)
from .adaptive.stable_adam import (
    ScaleByStableAdam as ScaleByStableAdam,
    stable_adamw as stable_adamw,
)
from .adaptive.trust import (
    ScaleByFromage as ScaleByFromage,
    ScaleByParamBlockNorm as ScaleByParamBlockNorm,
    ScaleByParamBlockRms as ScaleByParamBlockRms,
    ScaleByTrustRatio as ScaleByTrustRatio,
    fromage as fromage,
    lamb as lamb,
    lars as lars,
)
from .curvature.broyden import (
    ScaleBySelfScaledBroyden as ScaleBySelfScaledBroyden,
    ScaleBySelfScaledBroydenState as ScaleBySelfScaledBroydenState,
    ss_broyden as ss_broyden,
)
from .curvature.gauss_newton import (
    ScaleByGaussNewton as ScaleByGaussNewton,
    ScaleByGaussNewtonState as ScaleByGaussNewtonState,
    gauss_newton as gauss_newton,
    natural_gradient as natural_gradient,
)
from .curvature.ivon import (
    ScaleByIvon as ScaleByIvon,
    ScaleByIvonState as ScaleByIvonState,
    ivon as ivon,
)
from .curvature.lbfgs import (
    ScaleByLbfgs as ScaleByLbfgs,
    ScaleByLbfgsState as ScaleByLbfgsState,
    lbfgs as lbfgs,
)
from .curvature.levenberg_marquardt import (
    ScaleByLevenbergMarquardt as ScaleByLevenbergMarquardt,
    ScaleByLevenbergMarquardtState as ScaleByLevenbergMarquardtState,
    levenberg_marquardt as levenberg_marquardt,
)
from .curvature.sophia import (
    ScaleBySophia as ScaleBySophia,
    ScaleBySophiaState as ScaleBySophiaState,
    sophia as sophia,
)
from .linesearch.backtracking import (
    ScaleByBacktrackingLinesearch as ScaleByBacktrackingLinesearch,
    ScaleByBacktrackingLinesearchState as ScaleByBacktrackingLinesearchState,
)
from .linesearch.zoom import (
    ScaleByZoomLinesearch as ScaleByZoomLinesearch,
    ScaleByZoomLinesearchState as ScaleByZoomLinesearchState,
)
from .low_memory.adafactor import (
    ScaleByFactoredRms as ScaleByFactoredRms,
    ScaleByFactoredRmsState as ScaleByFactoredRmsState,
    adafactor as adafactor,
)
from .low_memory.rms import (
    ScaleByRms as ScaleByRms,
    ScaleByRmsState as ScaleByRmsState,
    ScaleByStddev as ScaleByStddev,
    ScaleByStddevState as ScaleByStddevState,
    rmsprop as rmsprop,
)
from .low_memory.sm3 import ScaleBySm3 as ScaleBySm3, ScaleBySm3State as ScaleBySm3State, sm3 as sm3
from .matrices.apollo import (
    ScaleByApollo as ScaleByApollo,
    ScaleByApolloState as ScaleByApolloState,
    apollo as apollo,
)
from .matrices.dion import (
    ScaleByDion as ScaleByDion,
    ScaleByDionState as ScaleByDionState,
    dion as dion,
)
from .matrices.galore import (
    ScaleByGalore as ScaleByGalore,
    ScaleByGaloreState as ScaleByGaloreState,
    galore as galore,
)
from .matrices.kl_soap import (
    ScaleByKlSoap as ScaleByKlSoap,
    ScaleByKlSoapState as ScaleByKlSoapState,
)
from .matrices.kron import (
    ScaleByKron as ScaleByKron,
    ScaleByKronState as ScaleByKronState,
    kron as kron,
)
from .matrices.matrix_norms import (
    NormalizeColumns as NormalizeColumns,
    ScaleByFanIn as ScaleByFanIn,
    ScaleByRowRms as ScaleByRowRms,
    ScaleByRowRmsState as ScaleByRowRmsState,
    norm_muon as norm_muon,
    scion as scion,
)
from .matrices.orthogonalize import Orthogonalize as Orthogonalize, muon as muon
from .matrices.qk_clip import QKClip as QKClip
from .matrices.radius import (
    PinRadius as PinRadius,
    RadialBrake as RadialBrake,
    UpdateFloor as UpdateFloor,
)
from .matrices.shampoo import (
    ScaleByShampoo as ScaleByShampoo,
    ScaleByShampooState as ScaleByShampooState,
    shampoo as shampoo,
)
from .matrices.soap import (
    ScaleBySoap as ScaleBySoap,
    ScaleBySoapState as ScaleBySoapState,
    soap as soap,
)
from .matrices.splus import ScaleBySplus as ScaleBySplus, ScaleBySplusState as ScaleBySplusState
from .matrices.unitwise import AdaptiveGradClip as AdaptiveGradClip, UnitwiseClip as UnitwiseClip
from .measuring.check_finite import CheckFinite as CheckFinite, CheckFiniteState as CheckFiniteState
from .measuring.monitor import (
    MeasureWithEma as MeasureWithEma,
    Monitor as Monitor,
    Snapshot as Snapshot,
)
from .measuring.noise import (
    AddNoise as AddNoise,
    AddNoiseState as AddNoiseState,
    noisy_sgd as noisy_sgd,
)
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
    dpsgd as dpsgd,
)
from .momentum.accumulate import (
    ScaleByAdadelta as ScaleByAdadelta,
    ScaleByAdadeltaState as ScaleByAdadeltaState,
    ScaleByRss as ScaleByRss,
    ScaleByRssState as ScaleByRssState,
    adadelta as adadelta,
    adagrad as adagrad,
)
from .momentum.apply_every import ApplyEvery as ApplyEvery, ApplyEveryState as ApplyEveryState
from .momentum.madgrad import (
    ScaleByMadgrad as ScaleByMadgrad,
    ScaleByMadgradState as ScaleByMadgradState,
    madgrad as madgrad,
)
from .momentum.momentum import (
    Ema as Ema,
    EmaState as EmaState,
    Trace as Trace,
    TraceState as TraceState,
    sgd as sgd,
)
from .momentum.rprop import (
    ScaleByRprop as ScaleByRprop,
    ScaleByRpropState as ScaleByRpropState,
    rprop as rprop,
)
from .momentum.sign import (
    ScaleByLion as ScaleByLion,
    ScaleByLionState as ScaleByLionState,
    ScaleBySign as ScaleBySign,
    lion as lion,
    sign_sgd as sign_sgd,
    signum as signum,
)
from .rate_factors import layerwise_decay as layerwise_decay, mup as mup
from .rate_free.cocob import (
    ScaleByCocob as ScaleByCocob,
    ScaleByCocobState as ScaleByCocobState,
    cocob as cocob,
)
from .rate_free.dadapt import (
    ScaleByDAdaptAdam as ScaleByDAdaptAdam,
    ScaleByDAdaptAdamState as ScaleByDAdaptAdamState,
    dadapt_adamw as dadapt_adamw,
)
from .rate_free.dog import (
    ScaleByDog as ScaleByDog,
    ScaleByDogState as ScaleByDogState,
    ScaleByDowg as ScaleByDowg,
    ScaleByDowgState as ScaleByDowgState,
    dog as dog,
    dowg as dowg,
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
    momo as momo,
    momo_adam as momo_adam,
)
from .rate_free.polyak import ScaleByPolyak as ScaleByPolyak, polyak_sgd as polyak_sgd
from .rate_free.prodigy import (
    ScaleByProdigy as ScaleByProdigy,
    ScaleByProdigyState as ScaleByProdigyState,
    prodigy as prodigy,
)
from .rate_free.schedule_free import (
    schedule_free_adamw as schedule_free_adamw,
    schedule_free_sgd as schedule_free_sgd,
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
    SubtractDecayedWeights as SubtractDecayedWeights,
)
from .shaping.normalize import (
    Centralize as Centralize,
    NormalizeByUpdateNorm as NormalizeByUpdateNorm,
)
from .shaping.scale import (
    Scale as Scale,
    ScaleByLearningRate as ScaleByLearningRate,
    ScaleBySchedule as ScaleBySchedule,
)
from .shaping.scale_by import ScaleBy as ScaleBy
from .shaping.stateless import Stateless as Stateless, StatelessPerLeaf as StatelessPerLeaf
from .shaping.zclip import ZClip as ZClip, ZClipState as ZClipState
