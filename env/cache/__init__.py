"""The compile cache: what it is for, sealed so that it can be trusted, seeded so that it can be used, and explained."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """`python -m env cache COMMAND`: list, seal, seed, verify, prune, explain, trust, factors; see `env.cache.cli`."""
    from env.cache.cli import main as run

    return run(argv)
