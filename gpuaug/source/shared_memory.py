"""Tensors that all ranks of a run on one machine share.

torchrun's ranks inherit nothing from each other. So the first rank creates a file without a path (memfd), and claims a
name for it with an abstract socket. The other ranks ask the socket for the owner's process id, and open the memfd in
/proc. The kernel removes the memfd and the socket when their last user ends, also after ``kill -9``. The size of
/dev/shm, 64 MiB in many containers, does not limit a memfd.
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

import torch
from torch import Tensor

from gpuaug import machine

log = logging.getLogger("gpuaug")

SHARED_BYTES = 1 << 16  # smaller tensors are not shared between ranks
TIMEOUT_S = 60.0  # how long a rank waits for the owner
RUN = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "SLURM_JOB_ID"]
RUN += ["SLURM_STEP_ID", "PMIX_NAMESPACE"]  # environment variables that differ between runs on a machine
SUPPORTED = sys.platform == "linux"

_claims: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def share(tensor: Tensor) -> Tensor:
    """Return the tensor in memory that workers share. All ranks share large tensors, so do not write to the result."""
    try:
        if tensor.nbytes < SHARED_BYTES or machine.local_world_size() == 1 or not SUPPORTED:
            return tensor.share_memory_()
        fd, claim = _open_once(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        try:
            storage = torch.UntypedStorage._new_shared_fd_cpu(fd, tensor.nbytes)  # type: ignore[attr-defined]
        finally:
            os.close(fd)  # the storage has its own descriptor
    except (RuntimeError, OSError) as error:  # for example: a container's /dev/shm is full
        log.warning("source index of %d MB cannot be put into shared memory: %s", tensor.nbytes >> 20, error)
        return tensor
    shared: Tensor = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage).view(tensor.shape)
    if claim is not None:
        weakref.finalize(shared, claim.close)
    return shared


def _open_once(data: memoryview) -> tuple[int, socket.socket | None]:
    """Open this run's shared memory that holds ``data``. The first rank of a machine creates the memory.

    Returns:
        The file descriptor of the memory, and the socket that claims the name. Other ranks find the memory while this
        socket is open. Ranks that do not own the memory get None as the socket.
    """
    run = [os.environ.get(name, "") for name in RUN]
    identity = repr((os.getuid(), run, hashlib.blake2b(data, digest_size=16).hexdigest()))
    name = "gpuaug-" + hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    deadline, reason = time.monotonic() + TIMEOUT_S, f"the memory was not ready within {TIMEOUT_S:g} s"
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
            fd = _new_memory(name, data)
            claim.listen(4096)
            _claims.add(claim)
            return fd, claim
        except (ConnectionRefusedError, BlockingIOError, ProcessLookupError):  # the owner is not ready, or has ended
            time.sleep(0.02)
        except OSError as error:
            reason = str(error)
            break
    log.warning("the ranks of this machine cannot share memory, so this rank keeps its own copy: %s", reason)
    return _new_memory("gpuaug", data), None


def _new_memory(name: str, data: memoryview) -> int:
    # not through a mapping: if memory runs out, a write to a mapping would kill the process
    with open(os.memfd_create(name), "wb") as file:
        file.write(data)
        file.flush()
        return os.dup(file.fileno())


def _open_theirs(name: str) -> int:
    """Raise ConnectionRefusedError if the memory is not ready, and ProcessLookupError if its owner has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        caller.connect("\0" + name)
        pid, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise PermissionError(f"another user (id {uid}) has already taken the name of this memory")
    if not pid:
        raise PermissionError("the process that owns the memory is in another container")
    with contextlib.suppress(FileNotFoundError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"/memfd:{name} "):
                    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    raise ProcessLookupError(f"process {pid} no longer has the memory open")


def _close_claims() -> None:
    # otherwise a forked worker would keep the names claimed after its parent has closed the sockets
    for claim in list(_claims):
        claim.close()


os.register_at_fork(after_in_child=_close_claims)
