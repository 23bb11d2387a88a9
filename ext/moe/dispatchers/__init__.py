"""The torch part of the dispatchers."""
