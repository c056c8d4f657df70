"""Memory that all ranks of a run on one machine hold once, without a name that could be left behind.

Ranks that torchrun started are no relatives, so nothing is inherited. The first one to ask for a thing claims its name
as an abstract socket (which ends with its process), and opens the memory; the others learn from the socket which
process that is, and take the memory from its open files in /proc. No thread serves it, and no file exists.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gpuaug import machine

log = logging.getLogger("gpuaug")

PATIENCE = 60.0  # seconds that another rank may take to fill in what it claimed
SUPPORTED = sys.platform == "linux"

_claims: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Once(NamedTuple):
    """A file descriptor, and the claim to its name: as long as that is open, others find it."""

    fd: int
    claim: socket.socket | None


def once(what: str, make: Callable[[int], None]) -> Once:
    """The unnamed memory that stands for ``what`` on this machine and in this run, made by whoever asks first.

    Args:
        what: equal on all ranks for the same thing, and for nothing else.
        make: sizes and fills the empty memory of this descriptor; called on one rank only.
    """
    if machine.local_world_size() == 1:
        return Once(_memory("gpuaug", make), None)
    run = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    run += [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")]
    run += [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")]
    name = "gpuaug-" + hashlib.blake2b(repr((os.getuid(), run, what)).encode(), digest_size=16).hexdigest()
    deadline, reason = time.monotonic() + PATIENCE, "no rank has it ready"
    while time.monotonic() < deadline:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind("\0" + name)
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                reason = str(error)
                break
            try:
                return Once(_theirs(name), None)
            except (ConnectionRefusedError, BlockingIOError):  # still at work; or gone, and then bind succeeds
                time.sleep(0.02)
            except ProcessLookupError:  # ended, and its children hold the socket until they notice
                time.sleep(0.1)
            except OSError as error:
                reason = str(error)
                break
            continue
        fd = _memory(name, make)
        claim.listen(4096)
        _claims.add(claim)
        return Once(fd, claim)
    log.warning("memory of the ranks on this machine cannot be shared, and this rank keeps its own copy: %s", reason)
    return Once(_memory("gpuaug", make), None)


def tensor(values: Tensor) -> Tensor:
    """The same values in memory that every rank on this machine with the same values shares; to be read only."""
    data = values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data

    def make(fd: int) -> None:
        _write(fd, data)

    what = hashlib.blake2b(data, digest_size=16).hexdigest()
    found = once(f"{values.dtype} {tuple(values.shape)} {what}", make)
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(found.fd, data.nbytes)  # type: ignore[attr-defined]
    finally:
        os.close(found.fd)  # the storage has its own
    whole: Tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    shared = whole.view(values.dtype).view(values.shape)
    if found.claim is not None:
        weakref.finalize(shared, found.claim.close)
    return shared


def _memory(name: str, make: Callable[[int], None]) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        make(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _theirs(name: str) -> int:
    """The descriptor that another process holds under this name.

    Raises:
        OSError: ConnectionRefusedError before it is ready, ProcessLookupError if its process is gone.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        caller.connect("\0" + name)
        pid, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise PermissionError(f"another user (id {uid}) has taken its name")
    if not pid:
        raise PermissionError("its process is in another container")
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"/memfd:{name} "):
                    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        pass
    raise ProcessLookupError(f"process {pid} has it no more")


def _write(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], done)


def _forget() -> None:
    # a forked worker must not keep a claim alive that its parent has given up
    for claim in list(_claims):
        claim.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
