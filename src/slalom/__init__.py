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
        contrib as contrib,
        fields as fields,
        interop as interop,
        projections as projections,
        schedules as schedules,
        tree as tree,
        where as where,
        wrappers as wrappers,
    )
    from ._core.protocol.bases import (
        AbstractPerExampleTransform as AbstractPerExampleTransform,
        AbstractStatelessTransform as AbstractStatelessTransform,
    )
    from ._core.protocol.chain import (
        Chain as Chain,
        Identity as Identity,
        chain as chain,
        named_chain as named_chain,
    )
    from ._core.protocol.context import Context as Context
    from ._core.protocol.rule import AbstractRule as AbstractRule
    from ._core.protocol.transform import AbstractTransform as AbstractTransform
    from ._core.state.marks import map_params as map_params
    from ._core.text.mistakes import absent as _absent, list_names as _list_names
    from ._loop.binding.model import apply_updates as apply_updates
    from ._loop.binding.optimizer import Optimizer as Optimizer
    from ._loop.reports.plan import plan as plan
    from ._loop.reports.plots import plot_metrics as plot_metrics
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
    from ._loop.tools.sweep import SweepResult as SweepResult, sweep as sweep
    from ._loop.tools.versions import show_versions as show_versions
    from ._loop.training.keep_best import KeepBest as KeepBest
    from ._loop.training.train_step import train_step as train_step
    from .rules.adaptive.adam import (
        ScaleByAdam as ScaleByAdam,
        adam as adam,
        adamw as adamw,
        nadam as nadam,
        nadamw as nadamw,
    )
    from .rules.adaptive.adam_variants import (
        ScaleByAdopt as ScaleByAdopt,
        ScaleByBelief as ScaleByBelief,
        ScaleByRadam as ScaleByRadam,
        ScaleByYogi as ScaleByYogi,
        adabelief as adabelief,
        adopt as adopt,
        radam as radam,
        yogi as yogi,
    )
    from .rules.adaptive.maxima import (
        ScaleByAdamax as ScaleByAdamax,
        ScaleByAmsgrad as ScaleByAmsgrad,
        adamax as adamax,
        adamaxw as adamaxw,
        amsgrad as amsgrad,
    )
    from .rules.adaptive.more_means import (
        ScaleByAdan as ScaleByAdan,
        ScaleByAdemamix as ScaleByAdemamix,
        ScaleByOptimisticGradient as ScaleByOptimisticGradient,
        adan as adan,
        ademamix as ademamix,
        optimistic_adam_v2 as optimistic_adam_v2,
        optimistic_gradient_descent as optimistic_gradient_descent,
    )
    from .rules.adaptive.per_leaf import (
        ScaleByNovograd as ScaleByNovograd,
        ScaleByStableAdam as ScaleByStableAdam,
        novograd as novograd,
        stable_adamw as stable_adamw,
    )
    from .rules.adaptive.trust import (
        ScaleByFromage as ScaleByFromage,
        ScaleByParamBlockNorm as ScaleByParamBlockNorm,
        ScaleByParamBlockRms as ScaleByParamBlockRms,
        ScaleByTrustRatio as ScaleByTrustRatio,
        fromage as fromage,
        lamb as lamb,
        lars as lars,
    )
    from .rules.curvature.gauss_newton import (
        ScaleByGaussNewton as ScaleByGaussNewton,
        gauss_newton as gauss_newton,
        natural_gradient as natural_gradient,
    )
    from .rules.curvature.lbfgs import ScaleByLbfgs as ScaleByLbfgs, lbfgs as lbfgs
    from .rules.curvature.levenberg_marquardt import (
        ScaleByLevenbergMarquardt as ScaleByLevenbergMarquardt,
        levenberg_marquardt as levenberg_marquardt,
    )
    from .rules.linesearch.backtracking import (
        ScaleByBacktrackingLinesearch as ScaleByBacktrackingLinesearch,
    )
    from .rules.linesearch.zoom import ScaleByZoomLinesearch as ScaleByZoomLinesearch
    from .rules.low_memory.adafactor import (
        ScaleByFactoredRms as ScaleByFactoredRms,
        ScaleBySm3 as ScaleBySm3,
        adafactor as adafactor,
        sm3 as sm3,
    )
    from .rules.low_memory.rms import (
        ScaleByRms as ScaleByRms,
        ScaleByStddev as ScaleByStddev,
        rmsprop as rmsprop,
    )
    from .rules.matrices.kron import ScaleByKron as ScaleByKron, kron as kron
    from .rules.matrices.matrix_norms import (
        NormalizeColumns as NormalizeColumns,
        ScaleByFanIn as ScaleByFanIn,
        ScaleByRowRms as ScaleByRowRms,
        norm_muon as norm_muon,
        scion as scion,
    )
    from .rules.matrices.orthogonalize import Orthogonalize as Orthogonalize, muon as muon
    from .rules.matrices.shampoo import ScaleByShampoo as ScaleByShampoo, shampoo as shampoo
    from .rules.matrices.soap import ScaleBySoap as ScaleBySoap, soap as soap
    from .rules.measuring.monitor import (
        CheckFinite as CheckFinite,
        MeasureWithEma as MeasureWithEma,
        Monitor as Monitor,
        Snapshot as Snapshot,
    )
    from .rules.measuring.noise import (
        AddNoise as AddNoise,
        DifferentiallyPrivateAggregate as DifferentiallyPrivateAggregate,
        PerExampleGlobalNormClip as PerExampleGlobalNormClip,
        PerExampleLayerNormClip as PerExampleLayerNormClip,
        dpsgd as dpsgd,
        noisy_sgd as noisy_sgd,
    )
    from .rules.momentum.accumulate import (
        ApplyEvery as ApplyEvery,
        ScaleByAdadelta as ScaleByAdadelta,
        ScaleByRss as ScaleByRss,
        adadelta as adadelta,
        adagrad as adagrad,
    )
    from .rules.momentum.momentum import Ema as Ema, Trace as Trace, sgd as sgd
    from .rules.momentum.sign import (
        ScaleByLion as ScaleByLion,
        ScaleByRprop as ScaleByRprop,
        ScaleBySign as ScaleBySign,
        lion as lion,
        rprop as rprop,
        sign_sgd as sign_sgd,
        signum as signum,
    )
    from .rules.rate_free.prodigy import ScaleByProdigy as ScaleByProdigy, prodigy as prodigy
    from .rules.rate_free.schedule_free import (
        schedule_free_adamw as schedule_free_adamw,
        schedule_free_sgd as schedule_free_sgd,
    )
    from .rules.rate_free.step_sizes import (
        ScaleByDistanceOverGradients as ScaleByDistanceOverGradients,
        ScaleByDog as ScaleByDog,
        ScaleByPolyak as ScaleByPolyak,
        dog as dog,
        polyak_sgd as polyak_sgd,
    )
    from .rules.shaping.clip import (
        AdaptiveGradClip as AdaptiveGradClip,
        Centralize as Centralize,
        Clip as Clip,
        ClipByBlockRms as ClipByBlockRms,
        ClipByGlobalNorm as ClipByGlobalNorm,
        NormalizeByUpdateNorm as NormalizeByUpdateNorm,
        UnitwiseClip as UnitwiseClip,
        ZClip as ZClip,
    )
    from .rules.shaping.constrain import (
        Cautious as Cautious,
        KeepInitialNorm as KeepInitialNorm,
        KeepParamsNonnegative as KeepParamsNonnegative,
        SetToZero as SetToZero,
        ZeroNans as ZeroNans,
        freeze as freeze,
    )
    from .rules.shaping.descent import (
        AddDecayedWeights as AddDecayedWeights,
        AddDecayToInitialParams as AddDecayToInitialParams,
        ScaleByLearningRate as ScaleByLearningRate,
        SubtractDecayedWeights as SubtractDecayedWeights,
    )
    from .rules.shaping.scale import (
        Scale as Scale,
        ScaleBy as ScaleBy,
        ScaleBySchedule as ScaleBySchedule,
    )
    from .rules.shaping.stateless import (
        Stateless as Stateless,
        StatelessPerLeaf as StatelessPerLeaf,
    )
    from .tree.types import (
        Hyperparameter as Hyperparameter,
        Params as Params,
        Scalar as Scalar,
        Updates as Updates,
    )
    from .wrappers.gradients.skip import (
        SkipLargeUpdates as SkipLargeUpdates,
        SkipNotFinite as SkipNotFinite,
    )
    from .wrappers.scope.partitions import partition as partition

__version__ = "0.1.0"

if not _TYPE_CHECKING:  # to a type checker it would mean that every name is there
    __getattr__ = _absent(__name__)
    for _module in (checkpoint, codecs, combine, contrib, fields, interop, projections, schedules):
        _list_names(_module)
    for _module in (tree, where, wrappers):
        _list_names(_module)
