"""Where the arrays of an optimizer are on a mesh."""
