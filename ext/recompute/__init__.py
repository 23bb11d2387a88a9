"""What to recompute (policies) and how (regions, units)."""
