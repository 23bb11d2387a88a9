"""Cost formulas shared by planner, recompute and moe: hardware, collectives, transformer layers. No torch."""
