"""Schedule-free steps, mechanize, SAM, and rules with second-order information."""

from typing import Any

RULES: dict[str, Any] = {}

RECIPES: dict[str, Any] = {}

WRAPPERS: dict[str, Any] = {}

QUICK: set[str] = set()
