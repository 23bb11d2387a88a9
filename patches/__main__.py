"""``python -m patches``: list every patch, what it replaces, and why."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from patches.manager import all_patches


def main() -> None:
    table = Table(show_lines=True)
    for column in ("patch", "replaces", "by", "host", "why"):
        table.add_column(column, overflow="fold")
    for name, patch in sorted(all_patches().items()):
        host = f"{patch.distribution} {patch.versions}"
        table.add_row(name, "\n".join(patch.places), patch.replacement, host, patch.reason)
    Console().print(table)


if __name__ == "__main__":
    main()
