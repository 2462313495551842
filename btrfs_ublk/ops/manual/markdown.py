"""The reference of all commands, as one document."""

from __future__ import annotations

from collections.abc import Iterator

from btrfs_ublk.ops.manual.contents import EXIT_STATUS, NAME, Command, Manual

#: The command that makes it, run in the project's directory.
COMMAND = "python -m btrfs_ublk.ops.manual markdown docs/reference/commands.md"


def markdown(manual: Manual) -> str:
    """Return the document; nothing in it depends on time or machine."""
    lines = [
        "# Commands",
        "",
        f"Made of the commands' own help, by `{COMMAND}`.",
        "",
        *_section(manual.root, "##"),
        "| command | |",
        "|---|---|",
    ]
    for noun, *_ in manual.nouns:
        lines.append(f"| [`{noun.path}`](#{_anchor(noun)}) | {_cell(noun.summary)} |")
    lines += ["", "| exit status | |", "|---|---|"]
    lines += [f"| {status} | {text} |" for status, text in EXIT_STATUS]
    lines.append("")
    for commands in manual.nouns:
        for command in commands:
            depth = "#" * len(command.path.split())
            lines += _section(command, depth)
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(command: Command, marks: str) -> Iterator[str]:
    yield f"{marks} {command.path}"
    yield ""
    if not command.is_group or command.path == NAME:
        yield from ("```text", command.usage, "```", "")
    yield command.summary
    yield ""
    for paragraph in command.paragraphs:
        if paragraph.verbatim:
            yield from ("```text", paragraph.text, "```")
        else:
            yield paragraph.text
        yield ""
    options = [x for x in command.options if not x.names.startswith("-h,")]
    if options:
        yield "| option | |"
        yield "|---|---|"
        for option in options:
            yield f"| `{_cell(option.names)}` | {_cell(option.text)} |"
        yield ""


def _anchor(command: Command) -> str:
    return command.path.replace(" ", "-")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
