"""Errors, registry and the pydantic base model; imports nothing of the package and no torch."""
