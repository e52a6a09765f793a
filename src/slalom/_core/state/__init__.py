"""The fields of states, and the walk over the parts of a composition."""
