"""Backends and the choice between them: plan (once per buffer) > the backends > decide (pure) > facts."""
