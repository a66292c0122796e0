"""Fixtures that more than one room's tests use; a room's own conftest.py adds to them."""

from __future__ import annotations

from fixtures import clone, package_index, tools

__all__ = ["clone", "package_index", "tools"]
