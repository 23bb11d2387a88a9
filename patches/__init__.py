"""Replacements for names of the hosts, only where a host chooses the class or function itself.

Nothing is patched on import. Each file of this package but ``manager`` and ``__main__`` holds one `Patch`.
"""

from patches.manager import Patch, all_patches, applied, apply, is_applied, undo

__all__ = ["Patch", "all_patches", "applied", "apply", "is_applied", "undo"]
