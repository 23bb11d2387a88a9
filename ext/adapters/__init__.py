"""Subclasses of the hosts' engines, layers and dispatchers; the only place that names the hosts."""
