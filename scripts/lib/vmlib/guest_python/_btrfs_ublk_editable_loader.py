"""Found before meson-python's module of this name, which each Python of the virtual
environment would import at its start, and which takes a third of that of a command.
The guest has the package on PYTHONPATH instead.
"""


def init() -> None:
    """Install no import hook."""
