"""The NVIDIA driver and the cards, read without torch, which may not be there yet or may be what is broken."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from env.doctor.facts.probing import read, run

SMI_SECONDS = 20.0
"""`nvidia-smi` without persistence mode initialises every card first: seconds on a node with eight of them."""

ASK_CUDA = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
number, text = ctypes.c_int(), ctypes.create_string_buffer(256)
print("init", cuda.cuInit(0))
cuda.cuDriverGetVersion(ctypes.byref(number))
print("version", number.value)
count = ctypes.c_int(0)
cuda.cuDeviceGetCount(ctypes.byref(count))
for index in range(count.value):
    device, size, major, minor = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(text, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    print("card", f"{major.value}.{minor.value}", size.value // 2**20, text.value.decode("utf-8", "replace"))
"""
"""Asked in a process of its own: a broken driver library may crash or hang whoever loads it. No context is made, so no
memory of a card is taken and a card in exclusive mode stays free. 75 and 76 are the two halves of the capability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One GPU."""

    name: str
    """Exact device name, which also enters kernels' cache keys."""

    capability: str | None = None
    """Compute capability, `9.0`."""

    memory_mib: int | None = None
    """The card's whole memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvidia:
    """What this host says about NVIDIA hardware and its driver."""

    driver: str | None = None
    """Version of the loaded kernel driver; None where none is loaded or none can be seen."""

    driver_from: str | None = None
    """Where the version was read."""

    cards: tuple[Card, ...] | None = None
    """The GPUs, in `nvidia-smi`'s order; None if neither it nor the CUDA library answers."""

    shown: tuple[Card, ...] | None = None
    """The GPUs that the CUDA library shows to this process, in its order; None if it does not start."""

    bus: int | None = None
    """NVIDIA display and 3D controllers on the PCI bus, driver or not; None where the bus cannot be seen."""

    nodes: int | None = None
    """Device files /dev/nvidia0, 1, …: a container started without GPUs has none, though the driver is loaded."""

    smi: str | None = None
    """What `nvidia-smi` said where it said something else than cards."""

    cuda_init: int | None = None
    """What the CUDA library's `cuInit` returns; None without the library, or if it crashed or hung."""

    cuda_version: str | None = None
    """Newest CUDA that the driver's own library implements, `13.0`."""

    visible: str | None = None
    """CUDA_VISIBLE_DEVICES as it is set."""


def usable(found: Nvidia) -> tuple[Card, ...] | None:
    """The GPUs that a run would see: what the CUDA library shows, else all but those hidden on purpose."""
    if found.shown is not None:
        return found.shown
    return () if hidden(found) else found.cards


def hidden(found: Nvidia) -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides every card on purpose: empty, or with a first entry that is no card."""
    return found.visible is not None and found.visible.split(",")[0].strip() in ("", "-1", "NoDevFiles")


def look(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Nvidia:
    """Read driver and cards: the kernel's files first, then `nvidia-smi`, then the CUDA library."""
    driver, source = kernel_driver(root)
    cards, said, smi_driver = ask_smi(environ)
    if driver is None and smi_driver is not None:
        driver, source = smi_driver, "nvidia-smi"
    answer = run([sys.executable, "-I", "-S", "-c", ASK_CUDA], seconds=SMI_SECONDS, environ=environ)
    init, version, shown = parse_cuda(answer.output if answer else "")
    return Nvidia(
        driver=driver,
        driver_from=source,
        cards=cards or shown or cards,
        shown=shown if init == 0 else None,
        bus=_controllers(root),
        nodes=_nodes(root),
        smi=said,
        cuda_init=init,
        cuda_version=version,
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
    )


def kernel_driver(root: Path) -> tuple[str | None, str | None]:
    """The loaded kernel driver's version and the file that says so; (None, None) where there is none."""
    for name in ("sys/module/nvidia/version", "proc/driver/nvidia/version"):
        text = read(root / name)
        if text is None:
            continue
        # «NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build …», or the number alone.
        found = re.search(r"(?<![\w.])(\d{3,}(?:\.\d+){1,2})(?![\w.])", text)
        if found:
            return found.group(1), f"/{name}"
    return None, None


def ask_smi(environ: Mapping[str, str]) -> tuple[tuple[Card, ...] | None, str | None, str | None]:
    """The cards by `nvidia-smi`, what it said instead of naming cards, and the driver's version by it."""
    said, code = "", 0
    for fields in ("name,driver_version,memory.total,compute_cap", "name,driver_version,memory.total"):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        answer = run(command, seconds=SMI_SECONDS, environ=environ)
        if answer is None:
            return None, None, None
        cards, driver = parse_smi(answer.output)
        if cards:
            return cards, None, driver
        said, code = " ".join(answer.output.split()), answer.code
        if "compute_cap" not in said:  # drivers before 470 do not know that field, and say so
            break
    return (() if code == 0 or "No devices were found" in said else None), said[:300] or None, None


def parse_smi(output: str) -> tuple[tuple[Card, ...], str | None]:
    """Cards and driver from the lines of a query; lines that are something else (warnings) are passed over."""
    cards, driver = [], None
    for line in output.splitlines():
        name, *rest = [part.strip() for part in line.split(",")]
        if len(rest) not in (2, 3) or not re.fullmatch(r"\d+(\.\d+)+", rest[0]):
            continue
        driver = rest[0]
        memory = int(rest[1]) if rest[1].isdecimal() else None
        capability = rest[2] if len(rest) == 3 and re.fullmatch(r"\d+\.\d", rest[2]) else None
        cards.append(Card(name=name, capability=capability, memory_mib=memory))
    return tuple(cards), driver


def parse_cuda(output: str) -> tuple[int | None, str | None, tuple[Card, ...]]:
    """`cuInit`'s result, the library's CUDA version and the cards that it shows, from what `ASK_CUDA` prints."""
    init, version, cards = None, None, []
    for line in output.splitlines():
        kind, _, value = line.partition(" ")
        if kind == "init" and re.fullmatch(r"-?\d+", value):
            init = int(value)
        elif kind == "version" and value.isdecimal() and int(value) > 0:
            version = f"{int(value) // 1000}.{int(value) % 1000 // 10}"
        elif kind == "card" and (match := re.fullmatch(r"(\d+\.\d+) (\d+) (.+)", value)):
            cards.append(Card(name=match[3], capability=match[1], memory_mib=int(match[2])))
    return init, version, tuple(cards)


def _controllers(root: Path) -> int | None:
    folder = root / "sys/bus/pci/devices"
    try:
        devices = list(folder.iterdir())
    except OSError:
        return None
    return sum(
        (read(device / "vendor") or "").strip() == "0x10de"
        and (read(device / "class") or "").startswith(("0x0300", "0x0302"))
        for device in devices
    )


def _nodes(root: Path) -> int | None:
    try:
        return sum(bool(re.fullmatch(r"nvidia\d+|dxg", entry.name)) for entry in (root / "dev").iterdir())
    except OSError:
        return None
