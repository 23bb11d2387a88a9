"""Helpers for tests of this package and of code built on it: real ranks over gloo, the one-process oracle."""
