"""Rules that read a parameter as a matrix: Muon and its relatives, SOAP, Shampoo and Kron."""

from typing import Any

import slalom as sl

matrices, min_2d = sl.where.matrix(), sl.where.ndim(min=2)

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
    "Cautious": sl.ScaleByAdam() | sl.Cautious() | sl.Scale(-0.1),
    "KeepInitialNorm": sl.sgd(0.1) | sl.KeepInitialNorm(),
    # The tests have a 1 × 2 array, which is a matrix only where the layout says so.
    "ScaleBySoap": sl.ScaleBySoap(layout="io").mask(min_2d) | sl.Scale(-0.1),
    "ScaleBySoap, one side": (
        sl.ScaleBySoap(0.9, precondition_frequency=1, max_size=2, layout="io").mask(min_2d)
        | sl.Scale(-0.1)
    ),
    "ScaleByKlSoap": sl.contrib.ScaleByKlSoap(layout="io").mask(min_2d) | sl.Scale(-0.1),
    "ScaleByKlSoap, one side": (
        sl.contrib.ScaleByKlSoap(precondition_frequency=2, max_size=2, layout="io").mask(min_2d)
        | sl.Scale(-0.1)
    ),
    "ScaleBySplus": (
        sl.contrib.ScaleBySplus(precondition_frequency=2, layout="io").mask(min_2d) | sl.Scale(-0.1)
    ),
    "ScaleByKron": sl.ScaleByKron(layout="io").mask(min_2d) | sl.Scale(-0.1),
    "ScaleByKron, diagonal": (
        sl.ScaleByKron(0.5, max_size=2, layout="io").mask(min_2d) | sl.Scale(-0.1)
    ),
    "ScaleByShampoo": sl.ScaleByShampoo(layout="io").mask(min_2d) | sl.Scale(-0.1),
    "ScaleByShampoo, grafted blocks": (
        sl.ScaleByShampoo(1.0, block_size=2, precondition_frequency=2, layout="io")
        .mask(min_2d)
        .graft(sl.ScaleByAdam())
        | sl.Scale(-0.1)
    ),
    "AddDecayedWeights, cautious": sl.Trace(0.9)
    | sl.AddDecayedWeights(0.1, cautious=True)
    | sl.Scale(-0.1),
}

RECIPES: dict[str, Any] = {
    "muon": sl.muon(0.1, weight_decay=0.1),
    "norm_muon": sl.norm_muon(0.1),
    "dion": sl.contrib.dion(0.1, weight_decay=0.1),
    "scion": sl.scion(1e-3),
    "soap": sl.soap(0.1, weight_decay=0.1),
    "kron": sl.kron(0.1, update_probability=0.5),
    "shampoo": sl.shampoo(0.1, adam_weight_decay=0.1),
}

WRAPPERS: dict[str, Any] = {
    "Graft, every_k": sl.sgd(1.0, momentum=0.9).graft(sl.adam(0.1)).every_k(2),
    "Graft, paced": sl.Trace(0.9).every_k(2).graft(sl.ScaleByRms()) | sl.Scale(-0.1),
}
