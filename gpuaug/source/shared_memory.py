"""Memory that all ranks of a run on one machine share.

torchrun's ranks inherit nothing from each other, so the first rank that asks for a memory opens an unnamed file (memfd)
and claims its name as an abstract socket. The other ranks learn the owner's process from the socket, and open the
memory through the owner's files in /proc. The kernel removes both with their last user, also after ``kill -9``, and a
memfd is not limited by the size of /dev/shm, which is 64 MiB in many containers. A file in /dev/shm and
``multiprocessing.shared_memory`` have neither property.
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

import torch
from torch import Tensor

from gpuaug import machine

log = logging.getLogger("gpuaug")

SHARED_BYTES = 1 << 16  # smaller tensors are not shared between ranks
TIMEOUT_S = 60.0  # for the owner to fill its memory
RUN = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "SLURM_JOB_ID"]
RUN += ["SLURM_STEP_ID", "PMIX_NAMESPACE"]  # environment variables that differ between runs on a machine
SUPPORTED = sys.platform == "linux"

_claims: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def share_once(what: str, make: Callable[[int], None]) -> tuple[int, socket.socket | None]:
    """Open the memory called ``what`` of this run on this machine; the first rank that asks for it makes it.

    Args:
        what: the same on all ranks for the same content.
        make: sizes and fills the empty memory of a file descriptor; called on one rank only.

    Returns:
        The file descriptor, and the owner's claim to the name: other ranks find the memory while the claim is open.
    """
    if machine.local_world_size() == 1:
        return _new_memory("gpuaug", make), None
    run = [os.environ.get(name, "") for name in RUN]
    name = "gpuaug-" + hashlib.blake2b(repr((os.getuid(), run, what)).encode(), digest_size=16).hexdigest()
    deadline, reason = time.monotonic() + TIMEOUT_S, "no rank has it ready"
    while time.monotonic() < deadline:
        try:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                claim.bind("\0" + name)
            except OSError as error:
                claim.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                return _open_theirs(name), None
            fd = _new_memory(name, make)
            claim.listen(4096)
            _claims.add(claim)
            return fd, claim
        except (ConnectionRefusedError, BlockingIOError):  # the owner is still filling it, or has just ended
            time.sleep(0.02)
        except ProcessLookupError:  # the owner has ended, and its children still hold the socket
            time.sleep(0.1)
        except OSError as error:
            reason = str(error)
            break
    log.warning("memory of the ranks on this machine cannot be shared, and this rank keeps its own copy: %s", reason)
    return _new_memory("gpuaug", make), None


def share(tensor: Tensor) -> Tensor:
    """The tensor in shared memory, so that workers of every start method use it without a copy.

    All ranks of a machine share one copy of a large tensor, so it must not be written to.
    """
    try:
        if tensor.nbytes < SHARED_BYTES or machine.local_world_size() == 1 or not SUPPORTED:
            return tensor.share_memory_()
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        fd, claim = share_once(f"{tensor.dtype} {tuple(tensor.shape)} {digest}", lambda fd: write(fd, data))
        try:
            storage = torch.UntypedStorage._new_shared_fd_cpu(fd, data.nbytes)  # type: ignore[attr-defined]
        finally:
            os.close(fd)  # the storage has its own
    except (RuntimeError, OSError) as error:  # a container's /dev/shm may be 64 MB
        log.warning("source index of %d MB stays outside shared memory: %s", tensor.nbytes >> 20, error)
        return tensor
    whole: Tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    shared = whole.view(tensor.dtype).view(tensor.shape)
    if claim is not None:
        weakref.finalize(shared, claim.close)
    return shared


def _new_memory(name: str, make: Callable[[int], None]) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        make(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_theirs(name: str) -> int:
    """Open the memory that another process owns under this name.

    Raises:
        OSError: ConnectionRefusedError if it is not ready, ProcessLookupError if its owner has ended.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        caller.connect("\0" + name)
        pid, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise PermissionError(f"another user (id {uid}) has taken its name")
    if not pid:
        raise PermissionError("its process is in another container")
    with contextlib.suppress(FileNotFoundError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"/memfd:{name} "):
                    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    raise ProcessLookupError(f"process {pid} has it no more")


def write(fd: int, data: memoryview | bytes, begin: int = 0) -> None:
    """Write by the file: OSError if there is no memory left, where writing through a map would end the process."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], begin + done)


def _close_claims() -> None:
    # a forked worker must not keep a claim open that its parent has closed
    for claim in list(_claims):
        claim.close()


if SUPPORTED:
    os.register_at_fork(after_in_child=_close_claims)
