"""Common optimizers, each a function that returns a chain of transforms."""

from .adaptive.accumulate import (
    adadelta as adadelta,
    adagrad as adagrad,
    madgrad as madgrad,
    sm3 as sm3,
)
from .adaptive.adam import (
    adam as adam,
    adamax as adamax,
    adamaxw as adamaxw,
    adamc as adamc,
    adamw as adamw,
    amsgrad as amsgrad,
    nadam as nadam,
    nadamw as nadamw,
)
from .adaptive.descendants import (
    acprop as acprop,
    ademamix as ademamix,
    adopt as adopt,
    laprop as laprop,
    mars as mars,
    simplified_ademamix as simplified_ademamix,
    stable_adamw as stable_adamw,
)
from .adaptive.factored import adafactor as adafactor
from .adaptive.large_batch import fromage as fromage, lamb as lamb, lars as lars
from .adaptive.low_memory import adam_mini as adam_mini, apollo as apollo, galore as galore
from .adaptive.variants import (
    adabelief as adabelief,
    adan as adan,
    novograd as novograd,
    radam as radam,
    yogi as yogi,
)
from .curvature.least_squares import (
    gauss_newton as gauss_newton,
    levenberg_marquardt as levenberg_marquardt,
    natural_gradient as natural_gradient,
)
from .curvature.quasi_newton import lbfgs as lbfgs, ss_broyden as ss_broyden
from .curvature.second_order import ivon as ivon, sophia as sophia
from .first_order import rmsprop as rmsprop, sgd as sgd
from .gradient import (
    noisy_sgd as noisy_sgd,
    optimistic_adam_v2 as optimistic_adam_v2,
    optimistic_gradient_descent as optimistic_gradient_descent,
    polyak_sgd as polyak_sgd,
)
from .matrix_rules import dion as dion, muon as muon, norm_muon as norm_muon, scion as scion
from .preconditioned import kron as kron, shampoo as shampoo, soap as soap
from .private import dpsgd as dpsgd
from .rate_free import (
    cocob as cocob,
    dadapt_adamw as dadapt_adamw,
    dog as dog,
    dowg as dowg,
    momo as momo,
    momo_adam as momo_adam,
    prodigy as prodigy,
)
from .schedule_free import (
    schedule_free_adamw as schedule_free_adamw,
    schedule_free_sgd as schedule_free_sgd,
)
from .sign import lion as lion, rprop as rprop, sign_sgd as sign_sgd, signum as signum
