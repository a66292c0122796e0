"""Whether the folders lie on this machine."""

from __future__ import annotations

from env.doctor.facts.folders import ROLES, Folder
from env.doctor.finding import Finding, Severity
from env.doctor.host import Host
from env.doctor.plan import Plan

NETWORK = frozenset(
    (
        *(
            "nfs",
            "nfs4",
            "cifs",
            "smb3",
            "smbfs",
            "ncpfs",
            "afs",
            "davfs",
            "9p",
            "virtiofs",
            "vboxsf",
            "prl_fs",
            "fakeowner",
        ),
        *("lustre", "gpfs", "mmfs", "beegfs", "ceph", "glusterfs", "orangefs", "pvfs2", "panfs", "wekafs", "vastfs"),
        *("ocfs2", "gfs2", "acfs"),
    )
)
"""File system types (of /proc/self/mountinfo) whose files live on a server, on a disk that several machines write, or
on the machine around a virtual one."""

LOCAL_FUSE = frozenset(
    ("fuse.fuse-overlayfs", "fuse.squashfuse", "fuse.squashfuse_ll", "fuse.lxcfs", "fuse.ntfs-3g", "fuseblk")
)
"""FUSE types that are local disks or a container's own layers; any other `fuse.*` is taken for a network file
system."""


def judge(host: Host, _plan: Plan) -> Finding | None:
    """Compiled kernels and temporary files belong on a local disk.

    Many processes write a compile cache at once, by renaming; over a network that gives stale handles, busy files and
    half-seen directories (pytorch#173679, triton#2688, triton#11512). HOME, runs and models may lie on one: that is
    slower, not wrong.
    """
    if not host.folders:
        return None
    if all(folder.mount is None for folder in host.folders):
        return Finding(Severity.UNKNOWN, "the mounts could not be read, so nothing says which folders are local")
    far = [folder for folder in host.folders if folder.mount is not None and is_network(folder.mount.kind)]
    bad = [folder for folder in far if folder.role in ("kernels", "triton", "temporary")]
    if bad:
        return Finding(
            Severity.WARNING,
            f"on a network file system: {', '.join(map(_name, bad))}",
            tuple(map(_evidence, far)),
            remedy="; ".join(dict.fromkeys(f"set {_variable(folder)} to a folder on a local disk" for folder in bad)),
        )
    if far:
        return Finding(
            Severity.OK,
            f"kernels and temporary files are local; on a network file system, slower: {', '.join(map(_name, far))}",
            tuple(map(_evidence, far)),
        )
    return Finding(Severity.OK, "every folder is on a local file system")


def is_network(kind: str) -> bool:
    """Whether a file system type is one whose files are elsewhere."""
    return kind in NETWORK or ((kind == "fuse" or kind.startswith("fuse.")) and kind not in LOCAL_FUSE)


def _name(folder: Folder) -> str:
    return f"{folder.path} ({ROLES.get(folder.role, folder.role)})"


def _evidence(folder: Folder) -> str:
    assert folder.mount is not None
    return f"{folder.path}: {folder.mount.kind}, mounted at {folder.mount.point} from {folder.mount.source}"


def _variable(folder: Folder) -> str:
    return folder.named_by or ("TMPDIR" if folder.role == "temporary" else "XDG_CACHE_HOME")
