"""Rules that precondition both sides of a matrix: SOAP, Shampoo, Kron."""

from typing import Any

RULES: dict[str, Any] = {}

RECIPES: dict[str, Any] = {}

WRAPPERS: dict[str, Any] = {}

QUICK: set[str] = set()
