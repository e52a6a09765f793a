"""Rules that find their learning rate, and other rules beyond Optax's main catalogue."""

from typing import Any

RULES: dict[str, Any] = {}

RECIPES: dict[str, Any] = {}

WRAPPERS: dict[str, Any] = {}

QUICK: set[str] = set()
