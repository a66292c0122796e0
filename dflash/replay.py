"""One real training step in a fresh process, and what the compile caches answered: the proof of a baked cache.

    python -m dflash.replay --config qwen3-8b

Prints one JSON object. The cache is the one that `TORCHINDUCTOR_CACHE_DIR` names; nothing is trained or kept.
"""

from __future__ import annotations

import time

BEGUN = time.perf_counter()

import argparse  # noqa: E402  # the clock above comes first: imports are part of what is reported
import base64  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from contextlib import ExitStack  # noqa: E402
from types import TracebackType  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from dflash import config, graphs, timeline  # noqa: E402
from dflash.warm import warm_up  # noqa: E402
from env.cache import factors, fitting, store  # noqa: E402
from env.errors import Exit, Failure, report  # noqa: E402

SAYINGS = {
    "AOTAutograd cache hit for key %s": ("autograd", "hit"),
    "AOTAutograd cache miss for key %s": ("autograd", "miss"),
    "fx graph cache hit for key %s": ("fx", "hit"),
    "fx graph cache miss for key %s": ("fx", "miss"),
}
"""What torch's caches log for each key (2.10 to 2.15), and what it means; counters hold no keys."""

LOGGERS = ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache")


class Observer(logging.Filter):
    """Notes what torch's and Triton's caches answer while it is entered, key by key.

    A count of zero misses proves nothing when nothing was asked, so hits and bypasses are counted too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[str, list[str]] = {
            f"{cache}_{answer}": [] for cache in ("autograd", "fx") for answer in ("hit", "miss")
        }
        self.keys |= {"triton_hit": [], "triton_miss": []}
        self._levels: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._listener: Any = None
        self.details: dict[str, tuple[str, ...]] = {}
        """What torch hashed for each key that was asked for, a line a field: it explains a miss."""
        self._noting = factors.details()

    def __enter__(self) -> Observer:
        self._before = self._counted()
        for name in LOGGERS:
            logger = logging.getLogger(name)
            self._levels[name] = logger.level
            logger.addFilter(self)
            if not logger.isEnabledFor(logging.INFO):
                logger.setLevel(logging.INFO)
        knobs = _triton_knobs()
        if knobs is not None:
            self._listener = knobs.compilation.listener
            knobs.compilation.listener = self._compiled
        self.details = self._noting.__enter__().lines
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._noting.__exit__(kind, error, trace)
        for name, level in self._levels.items():
            logger = logging.getLogger(name)
            logger.removeFilter(self)
            logger.setLevel(level)
        knobs = _triton_knobs()
        if knobs is not None:
            knobs.compilation.listener = self._listener

    def filter(self, record: logging.LogRecord) -> bool:
        """Note a cache's answer; let through only what would have been printed anyway."""
        said = SAYINGS.get(str(record.msg))
        if said is not None and isinstance(record.args, tuple) and record.args:
            self.keys["_".join(said)].append(str(record.args[0]))
        level = self._levels.get(record.name, 0)
        return record.levelno >= (level or logging.getLogger("torch").getEffectiveLevel())

    def _compiled(
        self, *, src: Any, metadata: dict[str, Any], metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        # as Triton names the folder of a kernel, and a manifest its key
        key = base64.b32encode(bytes.fromhex(metadata["hash"])).decode().rstrip("=")
        self.keys["triton_hit" if cache_hit else "triton_miss"].append(key)
        if self._listener is not None:
            self._listener(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)

    def counts(self) -> dict[str, int]:
        """Hits, misses and bypasses of AOTAutograd, FX and Triton since this was entered.

        A Triton kernel that comes ready for launching out of an FX entry is a hit like one that Triton finds itself.
        """
        counted = {name: value - self._before[name] for name, value in self._counted().items()}
        loaded = counted.pop("kernels_loaded")
        counted["triton_hit"] = loaded + len(self.keys["triton_hit"])
        counted["triton_miss"] = len(self.keys["triton_miss"])
        return counted

    @staticmethod
    def _counted() -> dict[str, int]:
        autograd, inductor = counters["aot_autograd"], counters["inductor"]
        return {
            "autograd_hit": autograd["autograd_cache_hit"],
            "autograd_miss": autograd["autograd_cache_miss"],
            "autograd_bypass": autograd["autograd_cache_bypass"],
            "fx_hit": inductor["fxgraph_cache_hit"],
            "fx_miss": inductor["fxgraph_cache_miss"],
            "fx_bypass": inductor["fxgraph_cache_bypass"],
            "kernels_loaded": inductor["triton_bundler_load_static_autotuner"],
        }


def replay(settings: config.Config, device: torch.device, *, steps: int = 1, timed: bool = False) -> dict[str, Any]:
    """Run a configuration's step on a device; seconds of each part and what the caches answered.

    With `timed`, also when each phase of the first step began and ended (`dflash.timeline`).

    Raises:
        Failure: Exit.HOST, when there is no C++ compiler or no such device.
    """
    imported = time.perf_counter()
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        fitting.fit([str(device)])
        found = store.here(graphs.graph_id(settings, device.type), str(device)).flat()
        identified = time.perf_counter()
        with Observer() as observer:
            warm_up(settings, device)
            warm = time.perf_counter()
            rehearsal = graphs.Rehearsal(settings, device)
            _finish(device)
            built, begun_at = time.perf_counter(), timeline.now()
            with ExitStack() as stack:
                spans = stack.enter_context(timeline.watched()) if timed else []
                loss = rehearsal()
                _finish(device)
            first, ended_at = time.perf_counter(), timeline.now()
    except (RuntimeError, AssertionError) as error:
        if device.type != "cuda" or torch.cuda.is_available():
            raise
        raise Failure(Exit.HOST, "there is no GPU here to replay on", details=[str(error).splitlines()[0]]) from error
    later = []
    for _ in range(steps - 1):
        begun = time.perf_counter()
        rehearsal()
        _finish(device)
        later.append(time.perf_counter() - begun)
    return {
        **({"timeline": timeline.segments(spans, begun_at, ended_at)} if timed else {}),
        "seconds": {
            "imports": imported - BEGUN,
            "identity": identified - imported,
            "warm_up": warm - identified,
            "construction": built - warm,
            "first_step": first - built,
            "later_steps": later,
        },
        "loss": loss.item(),
        "counts": observer.counts(),
        "keys": observer.keys,
        "details": observer.details,
        "identity": found,
        "benchmarked": counters["inductor"]["benchmarking.InductorBenchmarker.benchmark_gpu"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m dflash.replay`; prints one JSON object on standard output, or a failure's sentence."""
    parser = argparse.ArgumentParser(prog="python -m dflash.replay", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="a preset's name or a TOML file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1")
    parser.add_argument("--steps", type=int, default=1, help="how many steps to time, the first included")
    parser.add_argument("--timeline", action="store_true", help="also tell where the first step's time went")
    options = parser.parse_args(argv)
    try:
        device = torch.device(options.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", 0)  # as the trainer's: the index is part of every key
        outcome = replay(config.load(options.config), device, steps=options.steps, timed=options.timeline)
    except Failure as failure:
        return report(failure)
    print(json.dumps(outcome, indent=1))
    return 0


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _triton_knobs() -> Any:
    """Triton's settings, which have had a listener for compilations since 3.4; None where there is no Triton."""
    try:
        from triton import knobs  # type: ignore[import-untyped]  # has no types
    except ImportError:
        return None
    return knobs if hasattr(knobs.compilation, "listener") else None


if __name__ == "__main__":
    sys.exit(main())
