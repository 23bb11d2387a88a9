"""Process groups by node and all-to-all in one or two hops; imports only ext.core and torch."""
