"""Mixture of experts: routing, dispatchers, the measured choice between them, and a slow, obvious reference."""
