"""How the state of a transform is stored."""

from typing import Any

RULES: dict[str, Any] = {}

RECIPES: dict[str, Any] = {}

WRAPPERS: dict[str, Any] = {}

QUICK: set[str] = set()
