"""Why a cache does not fit: each factor that differs, both values, and the command that mends it."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from env.cache.canonical import Json
from env.cache.fitting import FACTOR
from env.gpus import DECIDES

ABSENT = "(not there)"
LONG = 60
"""Characters of a value beyond which only what differs in it is shown."""

FAMILIES: tuple[tuple[str, str], ...] = (
    ("graph_id", "sizes, shapes or the code of the graphs differ: `nox -s bake -- --config NAME` bakes these"),
    ("gpu_id", "it is for another GPU: bake for this one (`nox -s bake -- --config NAME --gpu …`)"),
    ("gpu.", "it is for another GPU: bake for this one (`nox -s bake -- --config NAME --gpu …`)"),
    ("system.gpu", "it is for another GPU: bake for this one (`nox -s bake -- --config NAME --gpu …`)"),
    ("device.index",
     "let the process see one GPU (`CUDA_VISIBLE_DEVICES=…`), or `nox -s bake -- --config NAME --gpu … --devices …`"),
    ("device.type", "bake for this kind of device (`nox -s bake -- --config NAME`)"),
    ("python.", "run the Python that baked it (`nox -s train -- --python …`), or bake with this one"),
    ("torch.version", "another torch is installed: `nox -s train -- --repair` brings the locked one"),
    ("torch.git", "another torch is installed: `nox -s train -- --repair` brings the locked one"),
    ("torch.key", "torch's files differ: `nox -s doctor` names them, `nox -s train -- --repair` mends them"),
    ("torch.cuda", "torch is built for another CUDA: choose the variant (`nox -s train -- --variant …`)"),
    ("torch.cache_key_tag", "`unset TORCH_COMPILE_CACHE_KEY_TAG`"),
    ("torch.default_dtype", "something called `torch.set_default_dtype` before the step; take that away"),
    ("torch.deterministic", "something called `torch.use_deterministic_algorithms`; make it as it was in the bake"),
    ("torch.matmul.", "something set `torch.backends.cuda.matmul` or `torch.set_float32_matmul_precision`; undo that"),
    ("triton.ptxas", "another ptxas is used: start through `nox -s train`, which pins TRITON_PTXAS_PATH, or unset it"),
    ("triton.env.", "`unset {variable}`"),
    ("triton.", "another Triton is installed: `nox -s train -- --repair` brings the locked one"),
    ("system.cuda", "torch is built for another CUDA: choose the variant (`nox -s train -- --variant …`)"),
    ("cpu.threads", "set `OMP_NUM_THREADS` to the sealed number, or bake here (`nox -s bake -- --config NAME`)"),
    ("cpu.command", "compiler, flags or folders of CPU kernels differ: bake here (`nox -s bake -- --config NAME`)"),
    ("cpu.", "CPU kernels are for one instruction set and compiler: bake here (`nox -s bake -- --config NAME`)"),
)  # fmt: skip
"""What mends a difference: the first entry that the factor's name begins with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One factor that differs."""

    name: str
    """As the manifest has it: `inductor.cpp.cxx`."""

    sealed: str
    """Its value in the bake, or the part of it that differs."""

    here: str
    """Its value in this process, likewise."""

    mend: str
    """What to do."""

    def sentence(self) -> str:
        """All of it in a line."""
        return f"{self.name}: sealed `{self.sealed}`, here `{self.here}` — {self.mend}"


def differences(
    sealed: Mapping[str, Json],
    here: Mapping[str, Json],
    *,
    variables: Mapping[str, Sequence[str]] | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Difference]:
    """Every factor that differs between a sealed cache's identity and a process's, those that cause others first.

    `variables` says which environment variables feed a setting (`factors.variables`), `environ` which are set here.
    Consequences are left out: another card has other properties, another torch other defaults.
    """
    environ = os.environ if environ is None else environ
    found = []
    same_card = sealed.get("gpu_id") == here.get("gpu_id")
    for name in sorted({*sealed, *here}):
        if name.startswith("gpu.") and (same_card or name.removeprefix("gpu.") not in DECIDES):
            continue  # a row's origin, and what varies among cards whose kernels are the same
        if name not in sealed or name not in here or sealed[name] != here[name]:
            one, other = _shown(sealed.get(name, ABSENT), here.get(name, ABSENT))
            mend = _mend(name, sealed, here, (variables or {}).get(name, ()), environ)
            found.append(Difference(name=name, sealed=one, here=other, mend=mend))
    return _causes(found)


def _causes(found: list[Difference]) -> list[Difference]:
    """Without what follows from something else that differs; in the order of `FAMILIES`, then settings by name."""
    names = {difference.name for difference in found}
    dropped: set[str] = set()
    if "system.gpu" in names or any(name.startswith("gpu.") for name in names):
        dropped |= {"gpu_id", FACTOR}  # what fits a card is chosen by its shared memory
    if names & {"torch.version", "torch.git"}:
        # another release has other keys, other settings and other defaults: naming hundreds would hide the one
        dropped |= {name for name in names if name.startswith(("torch.key", "inductor.", "dynamo.", "functorch."))}
        dropped |= {"torch.git"} if "torch.version" in names else set()
        dropped |= {"triton.key", "triton.version", "triton.ptxas"}
    if "python.minor" in names:
        dropped |= {"python.abi", "torch.key", "triton.key"}  # both hash extension modules, which are for one Python
    if "torch.deterministic" in names:
        dropped |= {"inductor.deterministic"}  # set by the same call
    if "inductor.cpp.cxx" in names:
        dropped |= {name for name in names if name.startswith("cpu.c") or name == "cpu.native"}
    if "device.type" in names:
        dropped |= {name for name in names if name.startswith(("cpu.", "triton.ptxas", "triton.arch", "device.index"))}
    kept = [difference for difference in found if difference.name not in dropped]
    order = [prefix for prefix, _ in FAMILIES]

    def rank(difference: Difference) -> tuple[int, str]:
        place = next((at for at, prefix in enumerate(order) if difference.name.startswith(prefix)), len(order))
        return place, difference.name

    return sorted(kept, key=rank)


def _mend(
    name: str,
    sealed: Mapping[str, Json],
    here: Mapping[str, Json],
    variables: Sequence[str],
    environ: Mapping[str, str],
) -> str:
    for prefix, sentence in FAMILIES:
        if name.startswith(prefix):
            if name.startswith("triton.env.") and name in sealed and name not in here:
                return f"it was baked with {name.removeprefix(prefix)}: set it likewise, or bake without it"
            return sentence.format(variable=name.removeprefix(prefix))
    family, _, setting = name.partition(".")
    given = [variable for variable in variables if variable in environ]
    if given:
        return f"`unset {' '.join(given)}`"
    if name not in sealed or name not in here:
        return "the two torches do not have the same settings: `nox -s train -- --repair`"
    return f"something in this process set `torch._{family}.config.{setting}`; take that away, or bake with it"


def _shown(one: Json, other: Json) -> tuple[str, str]:
    """Both values as text; of lists and long texts, only what differs."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        places = [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        if len(places) == 1:
            return _shown(one[places[0]], other[places[0]])
    if isinstance(one, str) and isinstance(other, str) and max(len(one), len(other)) > LONG:
        ours, theirs = re.findall(r"\S+", one), re.findall(r"\S+", other)
        if len(ours) > 1 or len(theirs) > 1:
            gone, new = _only(ours, theirs), _only(theirs, ours)
            if gone or new:
                return " ".join(gone) or ABSENT, " ".join(new) or ABSENT
    return _text(one), _text(other)


def _only(ours: Iterable[str], theirs: Iterable[str]) -> list[str]:
    others = set(theirs)
    return [word for word in ours if word not in others]


def _text(value: Json) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:190]}…"


# Two keys' own details


def _fields(lines: Sequence[str]) -> dict[str, str]:
    """The lines that torch hashed for a key, by the name of the field: `[digest] name: value`."""
    found: dict[str, str] = {}
    for line in lines:
        match = re.match(r"\[\w+\] ([^\n:]+): ?", line)
        if match:
            found[match[1]] = line[match.end() :]
    return found


def nearest(key: str, lines: Sequence[str], sealed: Mapping[str, Sequence[str]]) -> str | None:
    """The sealed key of the same cache that shares most of its fields with a key; None if there is none."""
    ours = set(lines)
    same = [other for other in sealed if other[:1] == key[:1] and other != key]
    return max(same, key=lambda other: (len(ours & set(sealed[other])), other), default=None)


def key_differences(lines: Sequence[str], sealed: Sequence[str]) -> list[str]:
    """What differs between what torch hashed for a key here and for a sealed one, a sentence a field.

    Of a graph's code only the changed lines are shown.
    """
    ours, theirs = _fields(lines), _fields(sealed)
    found = []
    for name in dict.fromkeys([*theirs, *ours]):
        one, other = theirs.get(name, ABSENT), ours.get(name, ABSENT)
        if one == other:
            continue
        if "\n" in one or "\n" in other:
            changes = [
                line.rstrip()
                for line in difflib.unified_diff(one.splitlines(), other.splitlines(), n=0, lineterm="")
                if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip()
            ]
            shown = [f"  {line[:160]}" for line in changes[:8]]
            more = [f"  and {len(changes) - 8} more lines"] if len(changes) > 8 else []
            found.append("\n".join([f"{name} differs (- sealed, + here):", *shown, *more]))
        else:
            found.append(f"{name}: sealed `{_text(one)}`, here `{_text(other)}`")
    return found
