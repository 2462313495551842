"""Fixtures of tests of images as volumes."""

from __future__ import annotations

from support.volumes import place

__all__ = ["place"]
