"""`python -m env scale`: what going past one machine costs, by plain arithmetic from what was measured.

Bandwidths are bounds, not promises: nothing here knows about retries, disks or other users of the network.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from env import remote
from env.errors import Exit

LAYERS = (110.4, 410.5, 347.0, 466.5, 632.6, 175.8, 480.2, 141.6, 0.3, 32.3, 2.6, 1.5)
"""MB of each layer of an image of cu130 with kernels for two cards, the lowest first, as `nox -s image` built it."""

COLD, SEEDED, WARM = 14.59, 2.42, 1.10
"""Seconds of a process's first step on an H200 at the shapes of qwen3-8b: cold, from a cache just seeded, from one that
has run before (docs/compile.md)."""

SEAL = 14.0
"""MB of the sealed cache of one card (docs/compile.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Who pulls, and through what."""

    nodes: int
    processes: int
    """Processes that compile, a node: one a GPU."""
    registry: float
    """Gbit/s that the registry can send."""
    node: float
    """Gbit/s that a node can receive."""
    mirror: int
    """Nodes that share one mirror."""


def seconds(megabytes: float, gigabits: float) -> float:
    """Seconds that so many MB take at so many Gbit/s."""
    return megabytes * 8e6 / (gigabits * 1e9)


def pulls(size: float, cluster: Cluster) -> list[tuple[str, float, float]]:
    """Ways to bring an image of so many MB to every node: in words, GB that the registry sends, seconds at least."""
    every = size * cluster.nodes
    mirrors = math.ceil(cluster.nodes / cluster.mirror)
    one = seconds(size, cluster.node)
    return [
        ("every node from the registry", every / 1e3, max(seconds(every, cluster.registry), one)),
        (
            f"{mirrors} mirrors, one for {cluster.mirror} nodes",
            size * mirrors / 1e3,
            seconds(size * mirrors, cluster.registry) + seconds(size * cluster.mirror, cluster.node),
        ),
        # each piece goes on as soon as it is there, so the tree's depth costs pieces, not images
        ("from node to node, in pieces", size / 1e3, max(seconds(size, cluster.registry), one)),
    ]


def table(layers: Sequence[float], cluster: Cluster) -> str:
    """The whole answer as lines of text."""
    size, edit = sum(layers), layers[-1]
    ranks = cluster.nodes * cluster.processes
    links = f"registry {cluster.registry:g} Gbit/s, node {cluster.node:g} Gbit/s"
    alone = seconds(SEAL * cluster.nodes, cluster.registry)
    lines = [
        f"{cluster.nodes:,} nodes of {cluster.processes}, {links}",
        "",
        f"{'the image, ' + format(size, ',.0f') + ' MB':<44}{'registry sends':>16}{'takes at least':>16}",
    ]
    for name, gigabytes, least in pulls(size, cluster):
        lines.append(f"  {name:<42}{_amount(gigabytes):>16}{_time(least):>16}")
    lines.append(f"after an edit, {edit:,.1f} MB")
    for name, gigabytes, least in pulls(edit, cluster):
        lines.append(f"  {name:<42}{_amount(gigabytes):>16}{_time(least):>16}")
    lines += [
        "",
        f"{'the first step':<44}{'each process':>16}{'GPU time':>16}",
        f"  {'cold: every process compiles':<42}{_time(COLD):>16}{_time(COLD * ranks):>16}",
        f"  {'from the sealed cache, just seeded':<42}{_time(SEEDED):>16}{_time(SEEDED * ranks):>16}",
        f"  {'from a folder that has run before':<42}{_time(WARM):>16}{_time(WARM * ranks):>16}",
        f"  {'saved by a sealed cache, a launch':<42}{_time(COLD - SEEDED):>16}{_time((COLD - SEEDED) * ranks):>16}",
        "",
        f"the sealed cache alone, {SEAL:.0f} MB: {_amount(SEAL * cluster.nodes / 1e3)}, {_time(alone)} of the registry",
    ]
    return "\n".join(lines)


def _amount(gigabytes: float) -> str:
    for unit, factor in (("TB", 1e3), ("GB", 1.0), ("MB", 1e-3)):
        if gigabytes >= factor:
            return f"{gigabytes / factor:,.1f} {unit}"
    return f"{gigabytes * 1e6:,.0f} kB"


def _time(length: float) -> str:
    for unit, factor in (("h", 3600), ("min", 60)):
        if length >= 2 * factor:
            return f"{length / factor:,.1f} {unit}"
    return f"{length:,.1f} s" if length >= 0.1 else f"{length * 1e3:,.0f} ms"


def main(argv: Sequence[str]) -> int:
    """`python -m env scale [--image REF] [--nodes 1000]`: print the arithmetic."""
    parser = argparse.ArgumentParser(prog="python -m env scale", description="What going past one machine costs.")
    parser.add_argument("--image", metavar="REF", help="take the layers of this image in its registry")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=8, help="a node, one a GPU")
    parser.add_argument("--registry", type=float, default=40.0, metavar="GBIT", help="what the registry can send")
    parser.add_argument("--node", type=float, default=25.0, metavar="GBIT", help="what a node can receive")
    parser.add_argument("--mirror", type=int, default=32, metavar="NODES", help="nodes that share a mirror")
    options = parser.parse_args(argv)
    if min(options.nodes, options.processes, options.mirror) < 1 or min(options.registry, options.node) <= 0:
        parser.error("every number must be positive")
    layers: Sequence[float] = LAYERS
    if options.image is not None:
        image = remote.reference(options.image)
        layers = [each["size"] / 1e6 for each in remote.manifest(image)["layers"] if each["size"] > 1000]
    cluster = Cluster(
        nodes=options.nodes,
        processes=options.processes,
        registry=options.registry,
        node=options.node,
        mirror=options.mirror,
    )
    print(table(layers, cluster))
    return int(Exit.DONE)
