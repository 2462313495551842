"""Fixtures of tests of the fetch process."""

from __future__ import annotations

from support.fetch_process import server

__all__ = ["server"]
