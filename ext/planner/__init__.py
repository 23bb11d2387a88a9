"""Choosing schedules and layouts: searches and reports."""
