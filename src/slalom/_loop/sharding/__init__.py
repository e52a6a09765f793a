"""The placement of an optimizer's arrays on a mesh."""
