"""The reference of the Python API, as one document: signatures and docstrings."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from re import sub
from types import ModuleType
from typing import Any, is_typeddict

from btrfs_ublk import api
from btrfs_ublk.ops.manual.signatures import (
    one_line,
    returned_by,
    signature,
    value_text,
)

#: The command that makes it, run in the project's directory.
COMMAND = "python -m btrfs_ublk.ops.manual python docs/reference/python.md"
_PACKAGE = "btrfs_ublk"
#: What is to be said of a setting that cannot be changed as others are.
_CHANGES = {
    "never": "It cannot be changed once there is such a volume.",
    "grows": "It can only grow.",
}


def python_reference() -> str:
    """Return the document, in the order and the groups of ``btrfs_ublk.api``; nothing
    in it depends on time or machine.
    """
    groups = _groups()
    lines = [
        "# Python",
        "",
        f"Made of signatures and docstrings, by `{COMMAND}`. How they are used:"
        " [how-to](../how-to/python-api.md).",
        "",
        f"`from {_PACKAGE} import …` gives all of these names. Sizes and offsets are"
        f" bytes, times seconds; what is wrong is a {_link('BtrfsUblkError')}."
        " Parameters of a dataclass are its attributes, too.",
        "",
        "| module | |",
        "|---|---|",
    ]
    for module, names in groups.items():
        links = ", ".join(map(_link, names))
        lines.append(f"| [{module}](#{module.replace('.', '')}) | {links} |")
    for module, names in groups.items():
        about = _paragraphs(import_module(module).__doc__)[0]
        lines += ["", f"## {module}", "", about]
        for name in names:
            lines += ["", f"### {name}", "", *_section(name, module)]
    return "\n".join(lines) + "\n"


def _imports(module: ModuleType) -> Iterator[tuple[str, ast.alias]]:
    """Yield each name that it imports, with the module."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias) for alias in node.names)


def _groups() -> dict[str, list[str]]:
    """Return the names of the API by the modules that they come from."""
    groups: dict[str, list[str]] = {}
    for module, alias in _imports(api):
        if module.startswith(f"{_PACKAGE}."):
            groups.setdefault(module, []).append(alias.asname or alias.name)
    return groups


@cache
def _renamed() -> dict[str, str]:
    """Return the API's names for what has another name in its module."""
    return {alias.name: alias.asname for _, alias in _imports(api) if alias.asname}


def _section(name: str, module: str) -> Iterator[str]:
    thing = getattr(api, name)
    if inspect.isclass(thing):
        yield from _class(name, thing)
    elif inspect.isfunction(thing):
        managed = inspect.isgeneratorfunction(inspect.unwrap(thing))
        head = "@contextmanager\n" * managed + f"def {name}"
        yield from _fenced(signature(head, thing))
        yield from _spaced(_paragraphs(thing.__doc__))
    else:
        definition, comment = _type(name, import_module(module))
        yield from (*_fenced(definition), "", comment)


def _class(name: str, class_: type) -> Iterator[str]:
    if is_typeddict(class_):
        (node,) = ast.parse(inspect.getsource(class_)).body
        assert isinstance(node, ast.ClassDef)
        del node.body[0]  # the docstring, which follows
        yield from _fenced(ast.unparse(node))
    else:
        head = "@dataclass\n" * is_dataclass(class_) + f"class {name}"
        yield from _fenced(signature(head, class_))
    for base in class_.__bases__:
        if _is_public(base):
            yield from ("", f"Base: {_link(base.__name__)}.")
        elif issubclass(base, BaseException):
            yield from ("", f"Base: `{base.__name__}`.")
    yield from _spaced(_paragraphs(class_.__doc__))
    members = list(_members(name, class_))
    yield from ("", *members) if members else ()


def _members(name: str, class_: type) -> Iterator[str]:
    """Yield methods, properties and constants, also those of bases outside the API, but
    not what a base in the API already documents.
    """
    attributes = {x.name: x for x in fields(class_)} if is_dataclass(class_) else {}
    for key, attribute in attributes.items():
        if "help" in attribute.metadata:
            yield f"- `{key}`: {_of_setting(attribute.metadata)}"
    found: dict[str, Any] = {}
    told: set[str] = set()
    for part in reversed(class_.__mro__):
        if part is not class_ and _is_public(part):
            told |= vars(part).keys()
        elif part.__module__.startswith(f"{_PACKAGE}."):
            found |= vars(part)
    for key, member in found.items():
        if key.startswith("_") or key in attributes:
            continue
        if inspect.isdatadescriptor(member) and not isinstance(member, property):
            continue  # such as a named tuple's
        if isinstance(member, int | str):
            yield f"- `{key} = {value_text(member)}`"
        elif member.__doc__ or key not in told:
            said = " ".join(["", *_paragraphs(member.__doc__)])
            yield f"- `{_member(name, class_, key)}`" + f":{said}" * bool(said)


def _of_setting(about: Mapping[str, Any]) -> str:
    """Return what docs/volumes.md says of a setting, in the words of Python."""
    said = " ".join(x for x in (about["help"], about.get("more")) if x)
    said = said.replace("](", "](../")
    if (none := about.get("none")) is not None:
        # Options and files say 0, or a word, where Python has None.
        said = sub(rf"""`"{none}"`|\b{none}(?=:)""", "`None`", said)
    change = _CHANGES.get(about.get("change", ""))
    return f"{said} {change}" if change else said


def _member(name: str, class_: type, key: str) -> str:
    member = inspect.getattr_static(class_, key)
    if isinstance(member, property):
        assert member.fget is not None
        return f"{key}: {returned_by(member.fget)}"
    if isinstance(member, classmethod | staticmethod):
        return one_line(f"{name}.{key}", getattr(class_, key))
    return one_line(key, member)


def _type(name: str, module: ModuleType) -> tuple[str, str]:
    """Return the definition of a type's name, and the comment above it."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            first = node.lineno - 1
            while lines[first - 1].startswith("#:"):
                first -= 1
            comment = " ".join(x[2:].strip() for x in lines[first : node.lineno - 1])
            return ast.unparse(node), _paragraphs(comment)[0]
    for origin, alias in _imports(module):
        if name == (alias.asname or alias.name):
            return _type(name, import_module(origin))
    raise LookupError(name)


def _is_public(class_: type) -> bool:
    return getattr(api, class_.__name__, None) is class_


def _link(name: str) -> str:
    return f"[`{name}`](#{name.lower()})"


def _fenced(code: str) -> list[str]:
    return ["```python", *code.splitlines(), "```"]


def _paragraphs(doc: str | None) -> list[str]:
    """Return each paragraph as a line, with the API's names of functions."""
    text = inspect.cleandoc(doc or "").replace("``", "`")
    for name, other in _renamed().items():
        text = sub(rf"\b{name}\(\)", f"{other}()", text)
    return [" ".join(x.split()) for x in text.split("\n\n")] if text else []


def _spaced(paragraphs: list[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        yield from ("", paragraph)
