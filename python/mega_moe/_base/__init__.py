"""Errors, the environment table and the types that every layer may use. Imports nothing of the package."""
