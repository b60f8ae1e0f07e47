"""The table of flags, from the data that `--help` prints."""

from __future__ import annotations

from server.flags.command_line import GROUPS, all_flags, default_text, value_name


def flag_table() -> str:
    """Markdown: one table for each group of flags."""
    lines: list[str] = []
    group = ""
    for flag in all_flags().values():
        if flag.group != group:
            group = flag.group
            lines += ["", f"### {group}: {GROUPS[group]}", "", "| flag | default | |", "|---|---|---|"]
        value = value_name(flag).strip().replace("|", "\\|")
        name = f"`--{flag.name}`" + (f" {value}" if value else "")
        lines.append(f"| {name} | {default_text(flag)} | {flag.hints['help']} |".replace("*", "\\*"))
    return "\n".join([*lines[1:], ""])
