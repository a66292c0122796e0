"""Fixtures that more than one room's tests use; a room's own conftest.py adds to them."""

from __future__ import annotations

import os

from fixtures import clone, package_index, tools

from env import variants
from env.cache.pins import PROBING

__all__ = ["clone", "package_index", "tools"]

os.environ.update(PROBING)  # processes that tests start without the launch are to find what others baked
os.environ.pop(variants.NAMED, None)  # the default is the matrix's
os.environ.pop("CI", None)  # torch reads it into a key: a launch takes it away, and says so
