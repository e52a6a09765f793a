"""The optimizers that are compared. To add one, add a line to `RECIPES`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import slalom as sl


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An optimizer with everything but its learning rate.

    **Arguments:**

    - `middle`: the middle of the learning rates to try.
    - `make`: the recipe in `sl`, by its name, or a function of the learning rate.
    - `options`: its keywords.
    - `constant`: whether the learning rate stays constant after the warm-up, for rules that replace
        its decay.
    """

    middle: float
    make: str | Callable[[Any], Any] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    constant: bool = False

    def transform(self, name: str, learning_rate: Any) -> sl.AbstractTransform:
        """The optimizer with this learning rate."""
        make = name if self.make is None else self.make
        if isinstance(make, str):
            home = sl if hasattr(sl, make) else sl.contrib
            return getattr(home, make)(learning_rate, **self.options)
        return make(learning_rate)

    def learning_rates(self, number: int, factor: float) -> np.ndarray:
        """The learning rates to try: neighboring ones differ by a factor."""
        return self.middle * factor ** (np.arange(number) - (number - 1) / 2)

    def exists(self, name: str) -> bool:
        """Whether `sl` has it."""
        make = name if self.make is None else self.make
        return not isinstance(make, str) or hasattr(sl, make)


DECAY = {"weight_decay": 0.01}


def matrices(rule: sl.AbstractTransform, learning_rate: Any, adam_learning_rate: Any) -> Any:
    """A rule for matrices, and Adam for all else."""
    scaled = rule | sl.ScaleByLearningRate(learning_rate)
    return sl.adam(adam_learning_rate).partition({sl.where.matrix(): scaled})


def ada_muon(rate: Any) -> sl.AbstractTransform:
    signs = sl.Ema(0.95, debias=False, nesterov=True) | sl.ScaleBySign()
    direction = signs | sl.Orthogonalize(scale=None) | sl.ScaleByRms(0.95, eps_in_sqrt=False)
    return matrices(direction.graft(sl.ScaleBySign() | sl.Scale(0.2)), rate, rate)


def mars_m(rate: Any) -> sl.AbstractTransform:
    mean = sl.contrib.CorrectByMars() | sl.Ema(0.95, debias=False)
    return matrices(mean | sl.Orthogonalize(scale="match_rms_adamw"), rate, rate)


def aurora(rate: Any) -> sl.AbstractTransform:
    mean = sl.Ema(0.95, debias=False, nesterov=True)
    return matrices(mean | sl.Orthogonalize((2.0, -1.5, 0.5), 12, balance=2), rate, rate)


RECIPES: dict[str, Recipe] = {
    "adamw": Recipe(1e-2, options=DECAY),
    "muon": Recipe(0.02, lambda rate: sl.muon(rate, adam_learning_rate=rate)),
    "sgd with momentum": Recipe(0.1, "sgd", {"momentum": 0.9, "nesterov": True}),
    "soap": Recipe(1e-2),
    "lion": Recipe(3e-3, options={"weight_decay": 0.1}),
    "schedule_free_adamw": Recipe(1e-2, constant=True),
    "adam": Recipe(1e-2),
    "adam with b1=0.5": Recipe(1e-2, "adam", {"b1": 0.5}),
    "shampoo": Recipe(1e-2),
    "kron": Recipe(3e-3),
    "norm_muon": Recipe(0.02, lambda rate: sl.norm_muon(rate, adam_learning_rate=rate)),
    "scion": Recipe(1e-3),
    "nadamw": Recipe(1e-2, options=DECAY),
    "prodigy": Recipe(1.0),
    "adafactor": Recipe(0.1),
    "rmsprop": Recipe(1e-2),
    "lamb": Recipe(0.03, options=DECAY),
    "ademamix": Recipe(1e-2),
    "adan": Recipe(0.03),
    "mars": Recipe(1e-2),
    "adopt": Recipe(1e-2),
    "dion": Recipe(0.02, lambda rate: sl.contrib.dion(rate, adam_learning_rate=rate)),
    "AdaMuon": Recipe(1e-2, ada_muon),
    "MARS-M": Recipe(1e-2, mars_m),
    "Aurora": Recipe(0.02, aurora),
    # Its learning rates are about twice those of Adam times the width, here 32 to 64.
    "SPlus": Recipe(0.16, lambda rate: matrices(sl.contrib.ScaleBySplus(), rate, rate / 64)),
}
