"""Hypothesis for plans: no deadline for single examples, as the machine may be busy, and few of them."""

from hypothesis import settings

settings.register_profile("plans", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("plans")
