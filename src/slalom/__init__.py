"""Slalom: composable, typed, compiled optimizers for JAX and Equinox."""

import contextlib as _contextlib
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _os.environ.get("SLALOM_TYPECHECK", "0") not in ("", "0"):
    try:
        import beartype as _beartype
    except ImportError as _error:
        raise ImportError(
            "SLALOM_TYPECHECK=1 checks types with beartype: pip install beartype."
        ) from _error
    from jaxtyping import install_import_hook as _install_import_hook

    del _beartype
    _checked = _install_import_hook("slalom", "beartype.beartype")
else:
    _checked = _contextlib.nullcontext()

with _checked:
    from . import (
        checkpoint as checkpoint,
        codecs as codecs,
        combine as combine,
        fields as fields,
        interop as interop,
        projections as projections,
        schedules as schedules,
        tree as tree,
        where as where,
        wrappers as wrappers,
    )
    from ._core.fields.declare import Hyperparameter as Hyperparameter
    from ._core.protocol.chain import (
        Chain as Chain,
        Identity as Identity,
        chain as chain,
        named_chain as named_chain,
    )
    from ._core.protocol.context import Context as Context
    from ._core.protocol.per_example import (
        AbstractPerExampleTransform as AbstractPerExampleTransform,
    )
    from ._core.protocol.rule import AbstractRule as AbstractRule
    from ._core.protocol.stateless import AbstractStatelessTransform as AbstractStatelessTransform
    from ._core.protocol.transform import AbstractTransform as AbstractTransform
    from ._core.state.marks import map_params as map_params
    from ._core.text.mistakes import absent as _absent
    from ._loop.binding.model import apply_updates as apply_updates
    from ._loop.binding.optimizer import Optimizer as Optimizer
    from ._loop.reports.plan import plan as plan
    from ._loop.reports.target import (
        incremental_update as incremental_update,
        periodic_update as periodic_update,
    )
    from ._loop.residual_losses import (
        LeastSquares as LeastSquares,
        OutputLoss as OutputLoss,
        VariationalEnergy as VariationalEnergy,
    )
    from ._loop.tools.lr_range_test import (
        LRRangeTestResult as LRRangeTestResult,
        lr_range_test as lr_range_test,
    )
    from ._loop.tools.minimize import MinimizeResult as MinimizeResult, minimize as minimize
    from ._loop.tools.plots import plot_metrics as plot_metrics
    from ._loop.tools.sweep import sweep as sweep
    from ._loop.tools.sweep_result import SweepResult as SweepResult
    from ._loop.training.keep_best import KeepBest as KeepBest
    from ._loop.training.train_step import train_step as train_step
    from .rules import (
        AdaptiveGradClip as AdaptiveGradClip,
        AddDecayedWeights as AddDecayedWeights,
        AddDecayToInitialParams as AddDecayToInitialParams,
        AddNoise as AddNoise,
        ApplyEvery as ApplyEvery,
        Cautious as Cautious,
        Centralize as Centralize,
        CheckFinite as CheckFinite,
        Clip as Clip,
        ClipByBlockRms as ClipByBlockRms,
        ClipByGlobalNorm as ClipByGlobalNorm,
        CorrectByMars as CorrectByMars,
        DifferentiallyPrivateAggregate as DifferentiallyPrivateAggregate,
        Ema as Ema,
        KeepInitialNorm as KeepInitialNorm,
        KeepParamsNonnegative as KeepParamsNonnegative,
        MeasureGradientNoise as MeasureGradientNoise,
        MeasureWithEma as MeasureWithEma,
        Monitor as Monitor,
        NormalizeByUpdateNorm as NormalizeByUpdateNorm,
        NormalizeColumns as NormalizeColumns,
        Orthogonalize as Orthogonalize,
        PerExampleGlobalNormClip as PerExampleGlobalNormClip,
        PerExampleLayerNormClip as PerExampleLayerNormClip,
        PinRadius as PinRadius,
        QKClip as QKClip,
        RadialBrake as RadialBrake,
        Scale as Scale,
        ScaleBy as ScaleBy,
        ScaleByAcprop as ScaleByAcprop,
        ScaleByAdadelta as ScaleByAdadelta,
        ScaleByAdam as ScaleByAdam,
        ScaleByAdamax as ScaleByAdamax,
        ScaleByAdamMini as ScaleByAdamMini,
        ScaleByAdan as ScaleByAdan,
        ScaleByAdemamix as ScaleByAdemamix,
        ScaleByAdopt as ScaleByAdopt,
        ScaleByAmsgrad as ScaleByAmsgrad,
        ScaleByApollo as ScaleByApollo,
        ScaleByBacktrackingLinesearch as ScaleByBacktrackingLinesearch,
        ScaleByBelief as ScaleByBelief,
        ScaleByCocob as ScaleByCocob,
        ScaleByDAdaptAdam as ScaleByDAdaptAdam,
        ScaleByDion as ScaleByDion,
        ScaleByDistanceOverGradients as ScaleByDistanceOverGradients,
        ScaleByDog as ScaleByDog,
        ScaleByDowg as ScaleByDowg,
        ScaleByFactoredRms as ScaleByFactoredRms,
        ScaleByFanIn as ScaleByFanIn,
        ScaleByFromage as ScaleByFromage,
        ScaleByGalore as ScaleByGalore,
        ScaleByGaussNewton as ScaleByGaussNewton,
        ScaleByIvon as ScaleByIvon,
        ScaleByKlSoap as ScaleByKlSoap,
        ScaleByKron as ScaleByKron,
        ScaleByLaprop as ScaleByLaprop,
        ScaleByLbfgs as ScaleByLbfgs,
        ScaleByLearningRate as ScaleByLearningRate,
        ScaleByLearningRateWithCorrectedDecay as ScaleByLearningRateWithCorrectedDecay,
        ScaleByLevenbergMarquardt as ScaleByLevenbergMarquardt,
        ScaleByLion as ScaleByLion,
        ScaleByMadgrad as ScaleByMadgrad,
        ScaleByMars as ScaleByMars,
        ScaleByMomo as ScaleByMomo,
        ScaleByMomoAdam as ScaleByMomoAdam,
        ScaleByNovograd as ScaleByNovograd,
        ScaleByOptimisticGradient as ScaleByOptimisticGradient,
        ScaleByParamBlockNorm as ScaleByParamBlockNorm,
        ScaleByParamBlockRms as ScaleByParamBlockRms,
        ScaleByPolyak as ScaleByPolyak,
        ScaleByProdigy as ScaleByProdigy,
        ScaleByRadam as ScaleByRadam,
        ScaleByRms as ScaleByRms,
        ScaleByRowRms as ScaleByRowRms,
        ScaleByRprop as ScaleByRprop,
        ScaleByRss as ScaleByRss,
        ScaleBySchedule as ScaleBySchedule,
        ScaleBySelfScaledBroyden as ScaleBySelfScaledBroyden,
        ScaleByShampoo as ScaleByShampoo,
        ScaleBySign as ScaleBySign,
        ScaleBySimplifiedAdemamix as ScaleBySimplifiedAdemamix,
        ScaleBySm3 as ScaleBySm3,
        ScaleBySoap as ScaleBySoap,
        ScaleBySophia as ScaleBySophia,
        ScaleBySplus as ScaleBySplus,
        ScaleByStableAdam as ScaleByStableAdam,
        ScaleByStddev as ScaleByStddev,
        ScaleByTrustRatio as ScaleByTrustRatio,
        ScaleByYogi as ScaleByYogi,
        ScaleByZoomLinesearch as ScaleByZoomLinesearch,
        SetToZero as SetToZero,
        Snapshot as Snapshot,
        Stateless as Stateless,
        StatelessPerLeaf as StatelessPerLeaf,
        SubtractDecayedWeights as SubtractDecayedWeights,
        Trace as Trace,
        UnitwiseClip as UnitwiseClip,
        UpdateFloor as UpdateFloor,
        ZClip as ZClip,
        ZeroNans as ZeroNans,
        acprop as acprop,
        adabelief as adabelief,
        adadelta as adadelta,
        adafactor as adafactor,
        adagrad as adagrad,
        adam as adam,
        adam_mini as adam_mini,
        adamax as adamax,
        adamaxw as adamaxw,
        adamc as adamc,
        adamw as adamw,
        adan as adan,
        ademamix as ademamix,
        adopt as adopt,
        amsgrad as amsgrad,
        apollo as apollo,
        cocob as cocob,
        dadapt_adamw as dadapt_adamw,
        dion as dion,
        dog as dog,
        dowg as dowg,
        dpsgd as dpsgd,
        freeze as freeze,
        fromage as fromage,
        galore as galore,
        gauss_newton as gauss_newton,
        gradient_noise_scale as gradient_noise_scale,
        ivon as ivon,
        kron as kron,
        lamb as lamb,
        laprop as laprop,
        lars as lars,
        layerwise_decay as layerwise_decay,
        lbfgs as lbfgs,
        levenberg_marquardt as levenberg_marquardt,
        lion as lion,
        madgrad as madgrad,
        mars as mars,
        momo as momo,
        momo_adam as momo_adam,
        muon as muon,
        mup as mup,
        nadam as nadam,
        nadamw as nadamw,
        natural_gradient as natural_gradient,
        noisy_sgd as noisy_sgd,
        norm_muon as norm_muon,
        novograd as novograd,
        optimistic_adam_v2 as optimistic_adam_v2,
        optimistic_gradient_descent as optimistic_gradient_descent,
        polyak_sgd as polyak_sgd,
        prodigy as prodigy,
        radam as radam,
        rmsprop as rmsprop,
        rprop as rprop,
        schedule_free_adamw as schedule_free_adamw,
        schedule_free_sgd as schedule_free_sgd,
        scion as scion,
        sgd as sgd,
        shampoo as shampoo,
        sign_sgd as sign_sgd,
        signum as signum,
        simplified_ademamix as simplified_ademamix,
        sm3 as sm3,
        soap as soap,
        sophia as sophia,
        ss_broyden as ss_broyden,
        stable_adamw as stable_adamw,
        yogi as yogi,
    )
    from .tree.types import Params as Params, Scalar as Scalar, Updates as Updates
    from .wrappers.gradients.skip import (
        SkipLargeUpdates as SkipLargeUpdates,
        SkipNotFinite as SkipNotFinite,
    )
    from .wrappers.scope.partitions import partition as partition

__version__ = "0.1.0"

if not _TYPE_CHECKING:  # to a type checker it would mean that every name is there
    __getattr__ = _absent(__name__)
    checkpoint.__getattr__ = _absent(f"{__name__}.checkpoint")
    combine.__getattr__ = _absent(f"{__name__}.combine")
    codecs.__getattr__ = _absent(f"{__name__}.codecs")
    fields.__getattr__ = _absent(f"{__name__}.fields")
    interop.__getattr__ = _absent(f"{__name__}.interop")
    projections.__getattr__ = _absent(f"{__name__}.projections")
    schedules.__getattr__ = _absent(f"{__name__}.schedules")
    where.__getattr__ = _absent(f"{__name__}.where")
    wrappers.__getattr__ = _absent(f"{__name__}.wrappers")
