"""Rules, recipes and wrappers that few people use."""

from .adaptive.adam_variants import (
    ScaleByAcprop as ScaleByAcprop,
    ScaleByLaprop as ScaleByLaprop,
    ScaleByLearningRateWithCorrectedDecay as ScaleByLearningRateWithCorrectedDecay,
    ScaleBySimplifiedAdemamix as ScaleBySimplifiedAdemamix,
    acprop as acprop,
    adamc as adamc,
    laprop as laprop,
    simplified_ademamix as simplified_ademamix,
)
from .adaptive.madgrad import ScaleByMadgrad as ScaleByMadgrad, madgrad as madgrad
from .adaptive.mars import CorrectByMars as CorrectByMars, ScaleByMars as ScaleByMars, mars as mars
from .curvature.broyden import (
    ScaleBySelfScaledBroyden as ScaleBySelfScaledBroyden,
    ss_broyden as ss_broyden,
)
from .curvature.ivon import ScaleByIvon as ScaleByIvon, ivon as ivon
from .curvature.sophia import ScaleBySophia as ScaleBySophia, sophia as sophia
from .low_memory.adam_mini import ScaleByAdamMini as ScaleByAdamMini, adam_mini as adam_mini
from .low_memory.low_rank import (
    ScaleByApollo as ScaleByApollo,
    ScaleByGalore as ScaleByGalore,
    apollo as apollo,
    galore as galore,
)
from .matrices.dion import ScaleByDion as ScaleByDion, dion as dion
from .matrices.soap_variants import ScaleByKlSoap as ScaleByKlSoap, ScaleBySplus as ScaleBySplus
from .rate_free.momo import (
    ScaleByMomo as ScaleByMomo,
    ScaleByMomoAdam as ScaleByMomoAdam,
    momo as momo,
    momo_adam as momo_adam,
)
from .rate_free.step_sizes import (
    ScaleByCocob as ScaleByCocob,
    ScaleByDAdaptAdam as ScaleByDAdaptAdam,
    ScaleByDowg as ScaleByDowg,
    cocob as cocob,
    dadapt_adamw as dadapt_adamw,
    dowg as dowg,
)
from .scaling.noise_scale import (
    MeasureGradientNoise as MeasureGradientNoise,
    gradient_noise_scale as gradient_noise_scale,
)
from .scaling.rate_factors import layerwise_decay as layerwise_decay, mup as mup
from .scaling.transfer import transfer as transfer
from .shaping.qk_clip import QKClip as QKClip
from .shaping.radius import (
    PinRadius as PinRadius,
    RadialBrake as RadialBrake,
    UpdateFloor as UpdateFloor,
)
