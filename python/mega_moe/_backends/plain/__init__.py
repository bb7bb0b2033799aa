"""Backends in plain torch: dispatch by all-to-all, the GEMMs of the local experts, combine."""
