"""The search behind the schedule `auto`: orders, recomputed layers and layouts together, under a memory budget."""
