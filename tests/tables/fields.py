"""The table of foreign fields, from the data that translates them."""

from __future__ import annotations

from server.foreign_fields import FIELDS, HINTS, Honoured, Refused


def field_table() -> str:
    """Markdown: fields that are honoured, fields that are refused, and hints."""
    honoured: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for name, row in FIELDS.items():
        if isinstance(row, Honoured):
            honoured.setdefault(row.ours, []).append(name)
        elif isinstance(row, Refused):
            refused.setdefault(row.advice, []).append(name)
    lines = ["| field | taken as |", "|---|---|"]
    for ours, names in honoured.items():
        lines.append(f"| {_code(names)} | {_code(ours.split(', '))} |")
    lines += ["", "| field | refused |", "|---|---|"]
    for advice, names in refused.items():
        lines.append(f"| {_code(names)} | {advice} |")
    return "\n".join([*lines, "", f"Hints without effect: {_code(sorted(HINTS))}.", ""])


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
