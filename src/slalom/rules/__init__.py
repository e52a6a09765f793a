"""The rules and their recipes: a room for each family."""
