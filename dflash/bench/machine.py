"""What this machine can do at most: the rates that floors are made of, measured in the same run as what they judge.

The fastest of several tries: a floor must not be lifted by what else the machine was doing.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

TRIES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How much of something the machine does in a second."""

    value: float
    """A second."""
    unit: str
    """FLOP, or B for bytes."""
    how: str
    """How it was measured."""

    @property
    def sentence(self) -> str:
        """Rate and how it came about."""
        from dflash.bench.measure import quantity

        return f"{quantity(self.value, self.unit)}/s ({self.how})"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class Machine:
    """The rates of one device and its host, each measured when it is first asked for."""

    def __init__(self, device: torch.device, folder: Path, *, scale: float = 1.0) -> None:
        """Measure nothing yet.

        Args:
            device: whose products and copies count.
            folder: on the disk that counts.
            scale: share of the sizes that a fair measurement needs; less only where rates do not matter, as in tests.
        """
        self.device, self.folder = device, folder
        self._scale = scale
        self._products: dict[torch.dtype, Rate] = {}

    def products(self, dtype: torch.dtype) -> Rate:
        """Operations of one large matrix product of that dtype; an addition counts as one and a multiplication too."""
        if dtype not in self._products:
            side = max(64, int((8192 if self.device.type == "cuda" else 2048) * self._scale))
            left, right = (torch.randn(side, side, device=self.device, dtype=dtype) for _ in range(2))
            out = torch.empty_like(left)
            spent = self._fastest(lambda: torch.mm(left, right, out=out))
            name = str(dtype).removeprefix("torch.")
            self._products[dtype] = Rate(value=2 * side**3 / spent, unit="FLOP", how=f"mm of {side:,}², {name}")
        return self._products[dtype]

    @cached_property
    def copying(self) -> Rate:
        """Bytes read and written by one large copy in the device's memory."""
        return self._copied(self.device)

    @cached_property
    def copying_on_host(self) -> Rate:
        """The same in the host's memory."""
        return self.copying if self.device.type == "cpu" else self._copied(torch.device("cpu"))

    @cached_property
    def hashing(self) -> Rate:
        """Bytes of memory through one sha256."""
        size = int((64 << 20) * self._scale)
        content = bytes(size)
        spent = self._fastest(lambda: hashlib.sha256(content).digest())
        return Rate(value=size / spent, unit="B", how="sha256 of memory, one thread")

    @cached_property
    def writing(self) -> Rate:
        """Bytes of one new file, forced to the disk."""
        size = int((64 << 20) * self._scale)
        content, path = os.urandom(size), self.folder / "written"

        def write() -> None:
            with path.open("wb", buffering=0) as file:
                file.write(content)
                os.fsync(file.fileno())

        spent = self._fastest(write)
        path.unlink()
        return Rate(value=size / spent, unit="B", how="one file and fsync")

    @cached_property
    def sending(self) -> Rate:
        """Bytes through one TCP connection of this host with itself."""
        size = int((256 << 20) * self._scale)
        content = memoryview(bytearray(size))
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
            receiver, _ = server.accept()
            with receiver:

                def send() -> None:
                    thread = threading.Thread(target=sender.sendall, args=(content,))
                    thread.start()
                    into, left = memoryview(bytearray(1 << 20)), size
                    while left:
                        left -= receiver.recv_into(into)
                    thread.join()

                spent = self._fastest(send)
        return Rate(value=size / spent, unit="B", how="one TCP connection, loopback")

    def _copied(self, device: torch.device) -> Rate:
        source = torch.ones(int((256 << 20) * self._scale), dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        spent = self._fastest(lambda: target.copy_(source))
        return Rate(value=2 * source.numel() / spent, unit="B", how="copy of 256 MiB, read and written")

    def _fastest(self, call: Callable[[], Any]) -> float:
        """Seconds of the fastest of several calls; the device's work included."""
        call()
        spent = []
        for _ in range(TRIES):
            self._finish()
            start = time.perf_counter()
            call()
            self._finish()
            spent.append(time.perf_counter() - start)
        return min(spent)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def describe(self) -> dict[str, Any]:
        """Whose figures these are."""
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "load": os.getloadavg()[0],
        }
