"""Fixtures of the images' tests: an engine and a registry of their own, or one reason why there is none."""

from __future__ import annotations

from engine import (
    docker_engine,
    empty_engine,
    loopback_registry,
    pytest_collection_modifyitems,
    pytest_configure,
)
from toys import keys, signed

__all__ = [
    "docker_engine",
    "empty_engine",
    "keys",
    "loopback_registry",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "signed",
]
