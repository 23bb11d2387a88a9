"""Plans: schedules, passes, validation and simulation, all free of torch."""
