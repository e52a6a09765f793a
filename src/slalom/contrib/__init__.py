"""Rules, recipes and wrappers that few people use."""

from ._acprop import ScaleByAcprop as ScaleByAcprop, acprop as acprop
from ._adam_mini import ScaleByAdamMini as ScaleByAdamMini, adam_mini as adam_mini
from ._adamc import (
    ScaleByLearningRateWithCorrectedDecay as ScaleByLearningRateWithCorrectedDecay,
    adamc as adamc,
)
from ._apollo import ScaleByApollo as ScaleByApollo, apollo as apollo
from ._broyden import ScaleBySelfScaledBroyden as ScaleBySelfScaledBroyden, ss_broyden as ss_broyden
from ._cocob import ScaleByCocob as ScaleByCocob, cocob as cocob
from ._dadapt import ScaleByDAdaptAdam as ScaleByDAdaptAdam, dadapt_adamw as dadapt_adamw
from ._dion import ScaleByDion as ScaleByDion, dion as dion
from ._dowg import ScaleByDowg as ScaleByDowg, dowg as dowg
from ._galore import ScaleByGalore as ScaleByGalore, galore as galore
from ._ivon import ScaleByIvon as ScaleByIvon, ivon as ivon
from ._kl_soap import ScaleByKlSoap as ScaleByKlSoap
from ._laprop import ScaleByLaprop as ScaleByLaprop, laprop as laprop
from ._madgrad import ScaleByMadgrad as ScaleByMadgrad, madgrad as madgrad
from ._mars import CorrectByMars as CorrectByMars, ScaleByMars as ScaleByMars, mars as mars
from ._momo import (
    ScaleByMomo as ScaleByMomo,
    ScaleByMomoAdam as ScaleByMomoAdam,
    momo as momo,
    momo_adam as momo_adam,
)
from ._noise_scale import (
    MeasureGradientNoise as MeasureGradientNoise,
    gradient_noise_scale as gradient_noise_scale,
)
from ._qk_clip import QKClip as QKClip
from ._radius import PinRadius as PinRadius, RadialBrake as RadialBrake, UpdateFloor as UpdateFloor
from ._rate_factors import layerwise_decay as layerwise_decay, mup as mup
from ._simplified_ademamix import (
    ScaleBySimplifiedAdemamix as ScaleBySimplifiedAdemamix,
    simplified_ademamix as simplified_ademamix,
)
from ._sophia import ScaleBySophia as ScaleBySophia, sophia as sophia
from ._splus import ScaleBySplus as ScaleBySplus
from ._transfer import transfer as transfer

__all__ = [
    "CorrectByMars",
    "MeasureGradientNoise",
    "PinRadius",
    "QKClip",
    "RadialBrake",
    "ScaleByAcprop",
    "ScaleByAdamMini",
    "ScaleByApollo",
    "ScaleByCocob",
    "ScaleByDAdaptAdam",
    "ScaleByDion",
    "ScaleByDowg",
    "ScaleByGalore",
    "ScaleByIvon",
    "ScaleByKlSoap",
    "ScaleByLaprop",
    "ScaleByLearningRateWithCorrectedDecay",
    "ScaleByMadgrad",
    "ScaleByMars",
    "ScaleByMomo",
    "ScaleByMomoAdam",
    "ScaleBySelfScaledBroyden",
    "ScaleBySimplifiedAdemamix",
    "ScaleBySophia",
    "ScaleBySplus",
    "UpdateFloor",
    "acprop",
    "adam_mini",
    "adamc",
    "apollo",
    "cocob",
    "dadapt_adamw",
    "dion",
    "dowg",
    "galore",
    "gradient_noise_scale",
    "ivon",
    "laprop",
    "layerwise_decay",
    "madgrad",
    "mars",
    "momo",
    "momo_adam",
    "mup",
    "simplified_ademamix",
    "sophia",
    "ss_broyden",
    "transfer",
]


def __dir__() -> list[str]:
    return __all__
