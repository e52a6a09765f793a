"""How updates are written to half-precision parameters."""

from typing import Any

RULES: dict[str, Any] = {}

RECIPES: dict[str, Any] = {}

WRAPPERS: dict[str, Any] = {}

QUICK: set[str] = set()
