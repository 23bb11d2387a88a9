"""Recomputation under all-reduces, and sub-pipelining, of two tensor-parallel ranks over a shaped link."""
