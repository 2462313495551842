"""Functions of the package that fail when a test wants it."""

from __future__ import annotations

import functools
from typing import Any

import pytest


def fail_at(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    when: str,
    error: BaseException,
) -> None:
    """Have what ``module`` calls as ``name`` raise an error, instead of its work or
    ("after") when it is done. A context manager's work is done when it is left."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, module)
    real = getattr(owner, last)

    def failing(*arguments: Any, **keywords: Any) -> Any:
        if when == "after":
            result = real(*arguments, **keywords)
            if hasattr(result, "__enter__"):
                result.__enter__()
                result.__exit__(type(error), error, None)
        raise error

    monkeypatch.setattr(owner, last, failing)
