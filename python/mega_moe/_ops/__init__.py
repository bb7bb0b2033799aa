"""Schemas, fakes, autograd formulas and library loading: how a call runs, never why its backend was chosen."""
