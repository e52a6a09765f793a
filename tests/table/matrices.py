"""Rules that read a parameter as a matrix: Muon and its relatives."""

from typing import Any

import slalom as sl

matrices = sl.where.matrix()

RULES: dict[str, Any] = {
    # Rules for matrices refuse vectors.
    "Orthogonalize": sl.Orthogonalize().mask(matrices),
    "Orthogonalize, aol": sl.Orthogonalize("tuned", 4, "spectral", preconditioning="aol").mask(
        matrices
    ),
    "Orthogonalize, bfloat16": sl.Orthogonalize(
        ns_coeffs="polar_express", scale="match_rms_adamw", compute_dtype="bfloat16"
    ).mask(matrices),
    "Orthogonalize, balance": sl.Orthogonalize(balance=2).mask(matrices),
    "CorrectByMars": sl.contrib.CorrectByMars().mask(matrices) | sl.Scale(-0.1),
    "ScaleByDion": sl.contrib.ScaleByDion(0.5).mask(matrices) | sl.Scale(-0.1),
    "ScaleByRowRms": sl.ScaleByRowRms().mask(matrices),
    "RadialBrake, UpdateFloor, PinRadius": (
        sl.contrib.RadialBrake()
        | sl.contrib.UpdateFloor(0.5)
        | sl.Scale(-0.1)
        | sl.contrib.PinRadius()
    ).only(matrices),
    "NormalizeColumns": sl.NormalizeColumns(),
    "ScaleByFanIn": sl.ScaleByFanIn(),
    "Ema, nesterov": sl.Ema(0.9, nesterov=True),
}

RECIPES: dict[str, Any] = {
    "muon": sl.muon(0.1, weight_decay=0.1),
    "norm_muon": sl.norm_muon(0.1),
    "dion": sl.contrib.dion(0.1, weight_decay=0.1),
    "scion": sl.scion(1e-3),
}
