"""Recompute policies in a pipeline of two ranks, for bench_recompute.py."""
