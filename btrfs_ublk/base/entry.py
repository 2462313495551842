"""Run a click command and turn its errors into messages and an exit status.

Also here: groups of commands, and options that commands have in common."""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from btrfs_ublk.base.log import log, setup_logging
from btrfs_ublk.base.signals import exit_status_of, importing, interruptible
from btrfs_ublk.base.text import table, visible
from btrfs_ublk.errors import BtrfsUblkError, UsageError, why_unread
from btrfs_ublk.units import parse_size

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: Finds a command's help in the source of its module: the docstring of ``command``.
_HELP = re.compile(r'^def command\(.*?\) -> \w+:\n    """(.*?)"""', re.M | re.S)

#: For every command that prints data.
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
#: Without effect: OPTIONS= of a unit may have it since 0.2.
former_realtime_option = click.option(
    "--realtime/--no-realtime", hidden=True, expose_value=False
)
#: For commands that print long lists, which they do while they read them.
json_lines_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one object per line."
)

_Completion = Callable[[click.Context, click.Parameter, str], list[str]]


class PathType(click.Path):
    """The type of options and arguments that are paths. It refuses empty ones: from a
    shell variable that is not set, they would mean the current directory."""

    def __init__(self, **options: bool) -> None:
        super().__init__(path_type=Path, **options)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """Return the path. Raises click.BadParameter."""
        if not os.fspath(value):
            self.fail("the path is empty: is a variable not set?", param, ctx)
        return super().convert(value, param, ctx)


class SecondsType(click.FloatRange):
    """The type of options that are a time. It refuses what is no number."""

    name = "number of seconds, such as 30 or 0.5"  # for click's message

    def get_metavar(self, *_args: Any, **_keys: Any) -> str:
        return "SECONDS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the time, in seconds. Raises click.BadParameter."""
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        return seconds


class CountType(click.IntRange):
    """The type of options that are a whole number."""

    name = "whole number, such as 4"

    def get_metavar(self, *_args: Any, **_keys: Any) -> str:
        return "N"


class SizeType(click.ParamType):  # type: ignore[type-arg]
    """The type of options and arguments that are a size, in bytes: "4096", "256K". With
    ``parse``, one with more conditions than parse_size().
    """

    name = "size"

    def __init__(self, parse: Callable[..., int] = parse_size) -> None:
        self._parse = parse

    def get_metavar(self, param: click.Parameter, *_args: Any, **_keys: Any) -> Any:
        return "SIZE" if isinstance(param, click.Option) else None

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the size. Raises UsageError, which names the option."""
        if isinstance(value, int):
            return value
        is_option = isinstance(param, click.Option)
        name = param.opts[-1] if param is not None else "SIZE"
        return self._parse(value, what=name if is_option else name.upper())


def stacked(*each: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make one decorator of several options, in the order of help."""

    def decorate(function: Any) -> Any:
        for option in reversed(each):
            function = option(function)
        return function

    return decorate


def completing(names: Callable[[], Iterable[str]]) -> _Completion:
    """Make the ``shell_complete=`` of an argument whose value is one of ``names()``."""

    def complete(
        _context: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[str]:
        try:
            return [name for name in names() if name.startswith(incomplete)]
        except (BtrfsUblkError, OSError):
            return []  # Completion shows no errors (directories of others, say).

    return complete


def run_command(command: click.Command, *, name: str) -> NoReturn:
    """Run a command and exit: 0 for success, 1 for failure, 2 for usage errors, 3 where
    this machine lacks what the command needs, 128 + N after signal N.

    Messages on stderr begin with ``name``.
    """
    _open_standard_streams()
    try:
        with interruptible(exiting=True):
            status = command(standalone_mode=False, prog_name=name)
            sys.stdout.flush()
    except BtrfsUblkError as error:
        click.echo(f"{name}: error: {visible(str(error))}", err=True)
        _tell_notes(error)
        status = error.exit_status
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (OSError, UnicodeEncodeError) as error:
        log.info("the error that ends this command:", exc_info=True)
        _discard_output()
        click.echo(f"{name}: error: {visible(_describe(error))}", err=True)
        _tell_notes(error)
        status = 1
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        click.echo(f"{name}: interrupted", err=True)
        # NB: click turns every KeyboardInterrupt into an Abort.
        signalled = error if isinstance(error, KeyboardInterrupt) else error.__cause__
        status = 130
        if isinstance(signalled, KeyboardInterrupt):
            status = exit_status_of(signalled)
            _tell_notes(signalled)
    sys.exit(status)


def end_process(status: int) -> NoReturn:
    """End this process as sys.exit() does, but leave it to the kernel to free what was
    imported: Python does that piece by piece, which takes a tenth of a short command.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # It joins all threads.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # Nobody reads it any more.
                stream.flush()
    finally:
        os._exit(status)


def _open_standard_streams() -> None:
    """Open /dev/null in the place of standard streams that are closed (``<&-``). The
    next files to be opened would get their numbers, and Python has None for them."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It gets the lowest free number, fd.
        if getattr(sys, name) is None:
            mode = "w" if fd else "r"
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))


def _discard_output() -> None:
    """Discard what standard output did not accept. Otherwise Python tries again when it
    ends, complains once more, and makes the exit status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _describe(error: OSError | UnicodeEncodeError) -> str:
    if isinstance(error, UnicodeEncodeError):
        # Show what cannot be encoded, and what precedes it in its line.
        line = error.object.rfind("\n", 0, error.start) + 1
        culprit = error.object[max(line, error.start - 40) : error.end]
        return f"{culprit!r} cannot be written in {error.encoding}"
    why = error.strerror or str(error) or type(error).__name__
    path = error.filename
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    return why if path is None else f"{path}: {why}"


def _tell_notes(error: BaseException) -> None:
    """Print the notes of an error: on things that could not be cleaned up, say."""
    for note in getattr(error, "__notes__", ()):
        click.echo(f"  note: {visible(note)}", err=True)


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print a table for people: see table()."""
    click.echo(table(rows))


def print_found(found: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print what a command found: as JSON, or else these lines for people."""
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for line in lines:
        click.echo(line)


def read_text(path: Path) -> str:
    """Read a text; "-" is standard input. Raises UsageError."""
    name = "standard input" if str(path) == "-" else path
    try:
        with click.open_file(str(path), encoding="utf-8") as file:
            text: str = file.read()
            return text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name}: {why_unread(error)}") from error


def say_resolved(image: str, digest: str) -> None:
    """Print the digest that the tag of an image stood for when it became a source."""
    click.echo(f"{image} -> {digest}", err=True)


def walk_commands(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[click.Context]:
    """Yield the command and all commands below it, in the order of help. Each is a
    context, which knows its path."""
    settings = command.context_settings
    context = click.Context(command, parent=parent, info_name=name, **settings)
    yield context
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None, below
            yield from walk_commands(found, below, context)


class NounGroup(click.Group):
    """A group whose commands also have aliases: names that people try first. Help does
    not show these. Those of ``elsewhere`` are in other modules, by the names of these,
    which are imported when one of them is used."""

    def __init__(
        self,
        *args: Any,
        aliases: Mapping[str, str],
        elsewhere: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._aliases = aliases
        places = (elsewhere or {}).items()
        self._elsewhere = {name: module for module, names in places for name in names}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *self._elsewhere})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = self._aliases.get(cmd_name, cmd_name)
        if name in self._elsewhere and name not in self.commands:
            with importing():
                module = import_module(self._elsewhere[name])
            # A function ``list`` would hide the type.
            found = getattr(module, f"{name}_command", None) or getattr(module, name)
            _let_speak(found)
            self.add_command(found)
        return super().get_command(ctx, name)


def _set_verbosity(
    ctx: click.Context, _param: click.Parameter, value: int | bool
) -> None:
    """Set the verbosity: -v before the command and -v after it add up."""
    if not value or ctx.resilient_parsing:
        return
    before = ctx.find_root().params.get("verbose") or 0
    setup_logging(verbosity=-1 if value is True else before + value)


def _let_speak(command: click.Command) -> None:
    """Allow -v and -q after a command, too. Only the root command's help shows them."""
    if not any("-v" in parameter.opts for parameter in command.params):
        for option in (
            click.Option(["-v", "--verbose"], count=True, help="Say what is done."),
            click.Option(["-q", "--quiet"], is_flag=True, help="Say only errors."),
        ):
            option.hidden, option.expose_value = True, False
            option.callback = _set_verbosity
            command.params.append(option)
    if isinstance(command, click.Group):
        for below in command.commands.values():
            _let_speak(below)


class ModuleGroup(click.Group):
    """A group whose commands are the modules and packages in a package, each with a
    ``command``. One is imported when its command is used; those in ``but`` have none.
    """

    def __init__(
        self, *args: Any, package: str, but: Collection[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._but = but

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {path.stem for path in self._directory().glob("*.py")}
        names |= {path.parent.name for path in self._directory().glob("*/__init__.py")}
        names.discard("__init__")
        return sorted(name.replace("_", "-") for name in names.difference(self._but))

    def _directory(self) -> Path:
        # NB: pkgutil, which also finds modules, takes long to import.
        package = import_module(self._package)
        assert package.__file__ is not None
        return Path(package.__file__).parent

    def _module_of(self, cmd_name: str) -> str:
        return f"{self._package}.{cmd_name.replace('-', '_')}"

    def _outline(self, ctx: click.Context) -> click.Group:
        """Return a group of the same commands with nothing but their help, for lists.
        It is read from the sources, because importing all modules takes long."""
        commands: dict[str, click.Command] = {}
        for name in self.list_commands(ctx):
            source = self._directory() / f"{name.replace('-', '_')}.py"
            if not source.exists():
                source = source.with_suffix("") / "__init__.py"
            found = _HELP.search(source.read_text(encoding="utf-8"))
            if found:
                commands[name] = click.Command(name, help=found[1])
            elif command := self.get_command(ctx, name):
                commands[name] = command
        return click.Group(commands=commands)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        self._outline(ctx).format_commands(ctx, formatter)

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(name, help=command.get_short_help_str())
            for name, command in self._outline(ctx).commands.items()
            if name.startswith(incomplete)
        ] + click.Command.shell_complete(self, ctx, incomplete)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        with importing():
            command: click.Command = import_module(self._module_of(cmd_name)).command
        _let_speak(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # NB: click itself (since 8.4) suggests only commands that are imported.
        known = self.list_commands(ctx)
        if args[0] not in known and not ctx.resilient_parsing:
            with importing():  # For errors only.
                from difflib import get_close_matches
            if near := get_close_matches(args[0], known):
                meant = " or ".join(map(repr, near))
                ctx.fail(f"No such command {args[0]!r}. Did you mean {meant}?")
        return super().resolve_command(ctx, args)
