"""Suggestions for names that do not exist."""

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Callable
from typing import NoReturn

from ..methods.fluent import FLUENT
from .messages import PACKAGE

ELSEWHERE = {
    "GradientTransformation": "sl.AbstractTransform",
    "GradientTransformationExtraArgs": "sl.AbstractTransform",
    "ScalarOrSchedule": "sl.Hyperparameter",
    "MultiSteps": "tx.every_k(k)",
    "apply_if_finite": "tx.if_finite(n)",
    "conditionally_mask": 'tx.when(condition, otherwise="zero")',
    "conditionally_transform": "tx.when(condition)",
    "inject_hyperparams": "sl.adam(lr), read opt.hyperparams and change opt.with_hyperparams(...)",
    "inject_stateful_hyperparams": 'tx.drive({"learning_rate": schedule})',
    "join_schedules": "sl.schedules.join(...)",
    "masked": "tx.mask(where), or tx.only(where)",
    "microbatch": "sl.train_step(loss_fn, microbatches=m)",
    "microbatching": "sl.train_step(loss_fn, microbatches=m)",
    "multi_transform": "sl.partition(transforms, labels)",
    "params_ema": "tx.average(decay)",
    "polyak_averaging": "tx.average(), or sl.incremental_update(new, old, step_size)",
    "reduce_on_plateau": 'tx.drive({"learning_rate": sl.schedules.ReduceOnPlateau(...)})',
    "restore": "sl.checkpoint.load(path, model=model, opt=opt)",
    "safe_increment": "sl.tree.increment",
    "safe_int32_increment": "sl.tree.increment",
    "selective_transform": "tx.only(where)",
    "skip_large_updates": "tx.every_k(k, skip=sl.SkipLargeUpdates(c))",
    "skip_not_finite": "tx.every_k(k, skip=sl.SkipNotFinite())",
    "split_real_and_imaginary": "tx.split_complex()",
    "stateless_with_tree_map": "sl.StatelessPerLeaf(fn)",
    "tree_map_params": "sl.map_params(fn, state, params)",
    "tree_utils": "sl.tree",
    "value_and_grad_from_state": "sl.train_step(loss_fn, reuse_linesearch=True)",
} | {
    "AveragedModel": "tx.average()",
    "CosineAnnealingLR": "sl.adam(sl.schedules.cosine_decay(1e-3, steps))",
    "CosineAnnealingWarmRestarts": "sl.schedules.sgdr(cycles)",
    "CosineDecay": "sl.schedules.cosine_decay(init_value, decay_steps)",
    "ExponentialLR": "sl.schedules.exponential_decay(1e-3, 1, gamma)",
    "GradScaler": "tx.scale_loss()",
    "LambdaLR": "sl.adam(lambda step: ...)",
    "LinearLR": "sl.schedules.linear(init_value, end_value, transition_steps)",
    "MultiStepLR": "sl.schedules.piecewise_constant(1e-3, {30_000: 0.1, 60_000: 0.1})",
    "OneCycleLR": "sl.schedules.cosine_onecycle(steps, peak_value)",
    "PolynomialLR": "sl.schedules.polynomial(init_value, end_value, power, transition_steps)",
    "SequentialLR": "sl.schedules.join(...)",
    "StepLR": "sl.schedules.exponential_decay(1e-3, step_size, gamma, staircase=True)",
    "SWALR": "tx.average()",
    "bias": 'sl.where.path("**.bias")',
    "clip_grad_norm": "sl.ClipByGlobalNorm(1.0) | tx",
    "clip_grad_norm_": "sl.ClipByGlobalNorm(1.0) | tx",
    "clip_grad_value_": "sl.Clip(1.0) | tx",
    "cosine": "sl.schedules.cosine_decay(init_value, decay_steps)",
    "lr_finder": "sl.lr_range_test(loss_fn, tx, model, batches)",
    "optim": "sl.adam(1e-3): the recipes are names of the package itself",
}
"""What to write instead of well-known names from Optax, and from PyTorch and Keras."""

LEFT_TO_OPTAX = frozenset(
    [
        "assignment",
        "convex_kl_divergence",
        "cosine_distance",
        "cosine_similarity",
        "ctc_loss",
        "ctc_loss_with_forward_probs",
        "generalized_kl_divergence",
        "hinge_loss",
        "huber_loss",
        "kl_divergence",
        "l2_loss",
        "log_cosh",
        "losses",
        "matrix_inverse_pth_root",
        "multi_normal",
        "nnls",
        "ntxent",
        "perturbations",
        "power_iteration",
        "safe_softmax_cross_entropy",
        "scale_gradient",
        "second_order",
        "sigmoid_binary_cross_entropy",
        "sigmoid_focal_loss",
        "smooth_labels",
        "softmax_cross_entropy",
        "softmax_cross_entropy_with_integer_labels",
        "squared_error",
    ]
)
"""Names of Optax for things that are not optimization: losses above all."""


def absent(module: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` for a module: it raises an error that suggests a name."""

    def raise_error(name: str) -> NoReturn:
        advice = "" if name.startswith("_") else _advice(module, name)
        raise AttributeError(f"module '{module}' has no attribute '{name}'.{advice}", name=name)

    return raise_error


def frozen_attribute(name: str) -> AttributeError:
    """The error for setting an attribute of an optimizer."""
    return dataclasses.FrozenInstanceError(
        f"An optimizer is immutable, so '{name}' cannot be set. To change a hyperparameter, write "
        f"`opt = opt.with_hyperparams({name}=...)`."
    )


_INSTEAD_OF_OPTIMIZER = {
    "add_param_group": "`sl.partition(transforms, labels)`, and `opt.rebind(model, tx=tx)`",
    "apply_gradients": "`model, opt = opt.step(model, grads)`",
    "backward": "`step = sl.train_step(loss_fn)`, which differentiates the loss",
    "compile": "`step = sl.train_step(loss_fn)`, which is compiled",
    "fit": "`step = sl.train_step(loss_fn)` and `model, opt, loss = step(model, opt, x, y)`",
    "init": "`opt = sl.Optimizer(tx, model)`, which has initialized the state",
    "load_state_dict": '`sl.checkpoint.load(path, model=model, opt=opt)["opt"]`',
    "minimize": "`step = sl.train_step(loss_fn)` and `model, opt, loss = step(model, opt, x, y)`",
    "opt_state": "`opt.state`",
    "param_groups": "`opt.describe(model)` to see the groups, and `opt.with_hyperparams(...)`",
    "state_dict": (
        "`sl.checkpoint.save(path, model=model, opt=opt)` to save a run, or `opt.state` to look at "
        "the state"
    ),
    "zero_grad": "nothing: JAX does not accumulate gradients",
}
"""What to write instead of methods of other libraries."""


def no_attribute(optimizer: type, name: str) -> AttributeError:
    """The error for an attribute that optimizers do not have."""
    if name in _INSTEAD_OF_OPTIMIZER:
        return AttributeError(
            f"'{optimizer.__name__}' object has no attribute '{name}'. Write "
            f"{_INSTEAD_OF_OPTIMIZER[name]}.",
            name=name,
        )
    internal = ("binding",)
    known = dict.fromkeys(k for kind in reversed(optimizer.__mro__) for k in vars(kind))
    public = ", ".join(k for k in known if k[0] != "_" and k not in internal)
    return AttributeError(
        f"'{optimizer.__name__}' object has no attribute '{name}'. Its attributes are {public}. "
        'Read hyperparameters with `opt.hyperparams["learning_rate"]` and change them with '
        "`opt = opt.with_hyperparams(learning_rate=1e-4)`. The optimizer does not hold the model.",
        name=name,
    )


def _advice(module: str, name: str) -> str:
    if name in ELSEWHERE:
        return f" Write {ELSEWHERE[name]}."
    if name in LEFT_TO_OPTAX:
        return f" Slalom contains optimizers and leaves this to Optax: use `optax.{name}`."
    known = _known()
    close = [_plain(name)] if _plain(name) in known else []
    # Names that share a word, such as "update" or "increment", are not close.
    close = close or difflib.get_close_matches(_plain(name), known, n=2, cutoff=0.8)
    if close:
        return f" Did you mean {' or '.join(known[n] for n in close)}?"
    names = [] if module == PACKAGE else getattr(sys.modules[module], "__all__", [])
    return f" Its names are {', '.join(names)}." if names else ""


def _known() -> dict[str, str]:
    """The code for each public name, by the name in lower case without underscores."""
    public_modules = (
        "checkpoint",
        "codecs",
        "fields",
        "projections",
        "schedules",
        "tree",
        "where",
        "wrappers",
    )
    top = [
        name
        for name, value in vars(sys.modules[PACKAGE]).items()
        if name[0] != "_" and (not inspect.ismodule(value) or name in public_modules)
    ]
    known = {_plain(name): f"sl.{name}" for name in top}
    for part in public_modules:
        public = sys.modules[f"{PACKAGE}.{part}"].__all__
        known |= {_plain(name): f"sl.{part}.{name}" for name in public}
    return known | {_plain(name): f"tx.{name}(...)" for name in FLUENT if name[0] != "_"}


def _plain(name: str) -> str:
    """A name without its case and underscores, which `clip_by_global_norm` and
    `ClipByGlobalNorm` share."""
    name = name.lower().removeprefix("projection_")
    return name.replace("_", "").removesuffix("schedule")
