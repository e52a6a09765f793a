"""Optax's main catalogue, the wrappers, and the rules for per-example gradients."""

import jax

import slalom as sl

matrices = sl.where.ndim(min=2)
halving = sl.schedules.linear(1.0, 0.5, transition_steps=10)

# The rules: one row for each class and for each option that changes what is computed.
RULES = {
    "Identity": sl.Identity(),
    "SetToZero": sl.SetToZero(),
    "Scale": sl.Scale(-0.1),
    "ScaleByLearningRate": sl.ScaleByLearningRate(0.1),
    "ScaleByLearningRate, scheduled": sl.ScaleByLearningRate(halving),
    "ScaleBySchedule": sl.ScaleBySchedule(halving),
    "ScaleBy": sl.ScaleBy({matrices: 0.5, sl.where.ndim(1): halving}),
    "ScaleByAdam": sl.ScaleByAdam(),
    "ScaleByAdam, nesterov": sl.ScaleByAdam(nesterov=True),
    "ScaleByAdam, dtypes": sl.ScaleByAdam(mu_dtype="bfloat16"),
    "ScaleByAmsgrad": sl.ScaleByAmsgrad(),
    "ScaleByAmsgrad, uncorrected": sl.ScaleByAmsgrad(
        bias_correction_mu=False, bias_correction_nu=False
    ),
    "ScaleByAdamax": sl.ScaleByAdamax(),
    "ScaleByBelief": sl.ScaleByBelief(),
    "ScaleByBelief, nesterov": sl.ScaleByBelief(nesterov=True),
    "ScaleByYogi": sl.ScaleByYogi(),
    "ScaleByRadam": sl.ScaleByRadam(),
    "ScaleByRadam, nesterov": sl.ScaleByRadam(b2=0.9, nesterov=True),
    "ScaleByNovograd": sl.ScaleByNovograd(weight_decay=0.1),
    "ScaleByAdan": sl.ScaleByAdan(),
    "ScaleByFactoredRms": sl.ScaleByFactoredRms(),
    "ScaleByFactoredRms, factored": sl.ScaleByFactoredRms(
        min_dim_size_to_factor=2, clipping_threshold=0.5
    ),
    "ScaleByRss": sl.ScaleByRss(),
    "ScaleByRss, from zero": sl.ScaleByRss(0.0, eps=0.0),
    "ScaleByAdadelta": sl.ScaleByAdadelta(),
    "ScaleBySign": sl.ScaleBySign(),
    "ScaleByRprop": sl.ScaleByRprop(0.1),
    "ScaleBySm3": sl.ScaleBySm3(),
    "ScaleBySm3, decaying": sl.ScaleBySm3(b2=0.9),
    "ScaleByLion": sl.ScaleByLion(),
    "ScaleByLion, smooth": sl.ScaleByLion(mode="smooth", smooth_beta=2.0),
    "ScaleByRms": sl.ScaleByRms(),
    "ScaleByRms, bias correction": sl.ScaleByRms(bias_correction=True, eps_in_sqrt=False),
    "ScaleByStddev": sl.ScaleByStddev(),
    "ScaleByStddev, bias correction": sl.ScaleByStddev(
        # The variance of one gradient is 0, and the first update g / ε infinite in float16.
        initial_scale=1.0,
        bias_correction=True,
        eps_in_sqrt=False,
    ),
    "Trace": sl.Trace(0.9),
    "Trace, nesterov": sl.Trace(0.9, nesterov=True),
    "AddDecayedWeights": sl.AddDecayedWeights(0.1),
    "Clip": sl.Clip(0.5),
    "ClipByGlobalNorm": sl.ClipByGlobalNorm(1.0),
    "ScaleByTrustRatio": sl.ScaleByTrustRatio(0.1, 0.5, 1e-3),
    "ScaleByParamBlockNorm": sl.ScaleByParamBlockNorm(),
    "ScaleByParamBlockRms": sl.ScaleByParamBlockRms(),
    "ScaleByFromage": sl.ScaleByFromage(0.1),
    "ClipByBlockRms": sl.ClipByBlockRms(0.1),
    "AdaptiveGradClip": sl.AdaptiveGradClip(0.1),
    "UnitwiseClip": sl.UnitwiseClip(0.1),
    "ScaleByDistanceOverGradients": sl.ScaleByDistanceOverGradients(1e-2, global_scale=-1.0),
    "Centralize": sl.Centralize(),
    "NormalizeByUpdateNorm": sl.NormalizeByUpdateNorm(0.1),
    "ScaleByOptimisticGradient": sl.ScaleByOptimisticGradient(),
    "PerExampleGlobalNormClip, of one": sl.PerExampleGlobalNormClip(1.0, True),
    "AddNoise": sl.AddNoise(0.01, 0.55, key=3),
    "ScaleByPolyak": sl.ScaleByPolyak(),
    "ScaleByPolyak, sps+": sl.ScaleByPolyak(0.1, 0.2, 1e-3, "sps+"),
    "ScaleByLbfgs": sl.ScaleByLbfgs(3) | sl.Scale(-1.0),
    "ScaleByBacktrackingLinesearch": (
        sl.sgd(1.0) | sl.ScaleByBacktrackingLinesearch(8, store_grad=True)
    ),
    "ScaleByZoomLinesearch": sl.sgd(1.0) | sl.ScaleByZoomLinesearch(8, approx_dec_rtol=None),
    "KeepParamsNonnegative": sl.KeepParamsNonnegative(),
    "ZeroNans": sl.ZeroNans(),
    "ApplyEvery": sl.ApplyEvery(2),
    "Freeze": sl.freeze(matrices) | sl.Scale(-0.1),
    "Stateless": sl.Stateless(lambda u, p: jax.tree.map(lambda u: -0.1 * u, u)),
    "StatelessPerLeaf": sl.StatelessPerLeaf(lambda u, p: -0.1 * u * p),
    "Snapshot": sl.Snapshot("norm", sl.tree.global_norm),
    "MeasureWithEma": sl.MeasureWithEma(sl.tree.global_norm, 0.9),
    "CheckFinite": sl.CheckFinite(),
    "Monitor": sl.Monitor(
        {
            "norm": sl.tree.global_norm,
            "first": lambda u: jax.tree.leaves(u)[:1],
            "long": sl.MeasureWithEma(lambda u: sl.tree.global_norm(u) > 1, 0.9, debias=False),
        }
    ),
    "Ema": sl.Ema(0.9),
    "Ema, without debias": sl.Ema(0.9, debias=False, accumulator_dtype="float32"),
}

RECIPES = {
    "sgd": sl.sgd(0.1),
    "sgd, momentum": sl.sgd(0.1, momentum=0.9),
    "adam": sl.adam(0.1),
    "adamw": sl.adamw(0.1, decay_where=matrices),
    "nadam": sl.nadam(0.1),
    "nadamw": sl.nadamw(0.1, decay_where=matrices),
    "amsgrad": sl.amsgrad(0.1),
    "adamax": sl.adamax(0.1),
    "adamaxw": sl.adamaxw(0.1, decay_where=matrices),
    "adabelief": sl.adabelief(0.1),
    "yogi": sl.yogi(0.1),
    "radam": sl.radam(0.1),
    "novograd": sl.novograd(0.1),
    "novograd, decay_where": sl.novograd(0.1, weight_decay=0.1, decay_where=matrices),
    "adan": sl.adan(0.1, weight_decay=0.1, decay_where=matrices),
    "adafactor": sl.adafactor(0.1, min_dim_size_to_factor=2),
    "adafactor, momentum": sl.adafactor(
        0.1, momentum=0.9, weight_decay=0.01, factored=False, decay_where=matrices
    ),
    "adagrad": sl.adagrad(0.1),
    "adadelta": sl.adadelta(weight_decay=0.1, decay_where=matrices),
    "sign_sgd": sl.sign_sgd(0.01),
    "signum": sl.signum(0.01),
    "rprop": sl.rprop(0.01),
    "sm3": sl.sm3(0.1),
    "lion": sl.lion(0.01),
    "lamb": sl.lamb(0.1, weight_decay=0.1, decay_where=matrices),
    "lbfgs": sl.lbfgs(),
    "lars": sl.lars(0.1, weight_decay=0.1, trust_ratio_where=matrices),
    "fromage": sl.fromage(0.1),
    "optimistic_gradient_descent": sl.optimistic_gradient_descent(0.1),
    "optimistic_adam_v2": sl.optimistic_adam_v2(0.1),
    "noisy_sgd": sl.noisy_sgd(0.1),
    "polyak_sgd": sl.polyak_sgd(),
    "rmsprop": sl.rmsprop(0.01, momentum=0.9),
    "rmsprop, centered": sl.rmsprop(0.01, centered=True),
}

WRAPPERS = {
    "Chain": sl.ClipByGlobalNorm(1.0) | sl.adamw(0.1),
    "Mask": sl.Trace(0.9).mask(matrices) | sl.Scale(-0.1),
    "Only": sl.adam(0.1).only(matrices),
    "Partition": sl.adam(0.1).partition({matrices: sl.sgd(0.1, momentum=0.9)}),
    "partition": sl.partition({2: sl.adam(0.1), 1: sl.sgd(0.1)}, {matrices: 2, ~matrices: 1}),
    "Outer": sl.adam(0.1).outer(sl.sgd(0.7, momentum=0.9, nesterov=True), 2),
    "Outer, lookahead": sl.adam(0.1).lookahead(2, 0.5),
    "Outer, reset_state": sl.adam(0.1).lookahead(1, 0.5, reset_state=True),
    "Average": sl.adam(0.1).average(0.9),
    "Average, uniform": sl.adam(0.1).every_k(2).average(),
    "Project": sl.adam(0.1).project(sl.projections.l2_ball(halving)),
    "Project, every_k": sl.adam(0.1)
    .every_k(2)
    .project(sl.projections.l1_ball(0.5), where=matrices)
    .record(),
    "Record": sl.adam(halving).record(),
    "Record, every_k": (sl.Clip(1.0) | sl.adam(0.1).every_k(2)).record(),
    "SplitComplex": sl.rprop(0.1).split_complex(),
    "SplitComplex, masked": (
        sl.ScaleByFactoredRms(min_dim_size_to_factor=2).mask(matrices) | sl.adam(0.1)
    ).split_complex(),
    "Drive": (sl.ClipByGlobalNorm(1.0) | sl.adam(0.1)).drive(
        {"learning_rate": sl.schedules.ReduceOnPlateau(0.1, 0.5, 1)}
    ),
    "Drive, every_k": sl.sgd(0.1)
    .drive({"learning_rate": sl.schedules.ReduceOnPlateau(0.1, patience=2)})
    .every_k(2),
    "EveryK": sl.adam(0.1).every_k(2),
    "EveryK, scheduled": sl.adam(0.1).every_k(lambda n: n + 1, mean=False),
    "EveryK, skip": sl.adam(0.1).every_k(2, skip=sl.SkipNotFinite() | sl.SkipLargeUpdates(9.0)),
    "EveryK in Partition": sl.adam(0.1).every_k(2).partition({matrices: sl.sgd(0.1)}),
    "Maximize": (sl.Clip(1.0) | sl.sgd(0.1).every_k(2)).maximize(),
    "Flatten": sl.ClipByGlobalNorm(1.0) | sl.adamw(halving).flatten(max_size=4),
    "Flatten, every_k": (sl.ClipByGlobalNorm(1.0) | sl.adam(0.1)).every_k(2).flatten(),
    "IfFinite": (sl.ClipByGlobalNorm(1.0) | sl.adam(halving)).if_finite(),
    "IfFinite, both": sl.adam(0.1).if_finite(0, on_limit="skip", check="both"),
    "IfFinite, raise": sl.Trace(0.9).if_finite(on_limit="raise") | sl.Scale(-0.1),
    "When": sl.Trace(0.9).when(lambda context, updates: context.step != 1) | sl.Scale(-0.1),
    "When, last": sl.sgd(0.1) | sl.Clip(0.01).when(lambda context, updates: context.step < 1),
    "When, zero": sl.adam(halving).when(lambda c, u: c.step != 1, otherwise="zero"),
    "nested": (sl.ClipByGlobalNorm(1.0) | sl.adam(0.1).only(matrices)).every_k(2).every_k(2),
}

PER_EXAMPLE = {
    "PerExampleGlobalNormClip": sl.PerExampleGlobalNormClip(1.0) | sl.adam(0.1),
    "PerExampleLayerNormClip": sl.PerExampleLayerNormClip(1.0),
    "PerExampleLayerNormClip, by size": sl.PerExampleLayerNormClip(1.0, uniform=False),
    "MeasureGradientNoise": sl.contrib.MeasureGradientNoise(0.9) | sl.adam(0.1),
    "DifferentiallyPrivateAggregate": sl.DifferentiallyPrivateAggregate(1.0, 0.5, key=3),
}
"""What takes a gradient for each example: `test_per_example.py` has its properties."""
