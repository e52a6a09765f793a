"""Programs: compiled once per structure of their arguments, and safe to interrupt."""
