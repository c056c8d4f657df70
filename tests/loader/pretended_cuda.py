"""Finds missing waits between CUDA streams, without a CUDA device.

Inside :func:`pretended_cuda`, torch's CPU build has two CUDA devices. A tensor on them is a :class:`DeviceTensor`: it
says `cuda:1`, and keeps its values in a CPU tensor. So the real Loader runs, with real images, labels and targets.
Every operation on such a tensor goes through :meth:`Recorder.dispatch`, which computes the result at once and records:

- the operation, the stream that it is queued on, and the memory that it reads and writes;
- the events and waits of the fakes of ``torch.cuda.Stream``, ``torch.cuda.Event``, and of what selects the current
  stream and device. ``torch.cuda.stream`` and ``torch.cuda.device`` are torch's own and call the fakes;
- when memory is allocated and freed, on which stream, and for which streams ``record_stream`` was called;
- which memory of the host is pinned, and its bytes when a copy from it is queued.

Vector clocks decide about order. Each stream counts its operations. For each stream, each operation knows how many
operations of that stream have ended before it begins: those that its own stream has waited for, and those that the
host had waited for when it queued the operation. Two operations are ordered if the later one knows the earlier one. So
a missing wait is found even if the threads happened to run in a good order.

Messages, in :attr:`Recorder.found`:

- ``race``: two operations on the same memory, at least one of them writes, and nothing orders them. Allocating counts
  as writing, because the stream of the allocation may still use the memory for a tensor that was freed before;
- ``freed too early``: at the time of freeing, the stream of the allocation has not waited for an operation of another
  stream, and ``record_stream`` was not called for that stream;
- ``not pinned``: a copy with ``non_blocking=True`` from memory that is not pinned;
- ``overwritten``: the host has written pinned memory after a copy from it was queued, without waiting for the copy;
- ``waits``: the host waits for the device: ``.item()``, ``.cpu()``, results whose size depends on values, indices from
  the host, copies that block, and ``synchronize``;
- ``two devices``: an operation of a device takes a tensor of the host. CUDA's kernels raise an error;
- ``not current``: an operation on a device that is not the thread's current device. Triton and DALI would use the
  current device;
- ``new context``: a stream of a device that nobody uses becomes current. This creates a CUDA context on that device.

Besides ``torch.cuda``, four things are replaced. ``dali.CudaPipeline.run`` allocates the views and records a write.
``cuda._queue`` records that a Triton kernel reads and writes all its tensors; it computes nothing. Threads enter the
recorder first. torch's guard of the current device in C++ does nothing. New memory is zero, so that results repeat.

Not seen: the order inside DALI, Triton's launches and torch's kernels; DALI's own memory and its copy of its outputs;
the order between threads of the host, which counts as one thread; time and memory size; what a run did not reach, such
as what follows from the values of Triton's results; kernels that a library launches past torch's dispatcher.
"""

import ctypes
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import gpuaug
from gpuaug.decode import dali

pytest.importorskip("triton", reason="Triton is not installed")

from gpuaug.augment.fused import cuda

index_of = torch.cuda._utils._get_device_index
PACKAGE = gpuaug.__file__.removesuffix("__init__.py")
SKIPPED = (str(Path(torch.__file__).parent), __file__)  # no frame of these says where an operation comes from
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def join(seen, other):
    """Let one who knows `seen` also know `other`: how many operations of each stream have ended."""
    for stream, count in other.items():
        seen[stream] = max(seen.get(stream, 0), count)


def site():
    """The package's innermost line that is running, and the function of another library that it has called."""
    frame, called = sys._getframe(1), ""
    while frame is not None:
        path, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if not path.startswith(SKIPPED) and "SplitProducts" not in function:  # it passes on every call of torch
            if path.startswith(PACKAGE):
                return f"{path.removeprefix(PACKAGE)}:{frame.f_lineno} {function}{called and f' calls {called}'}"
            called = called or f"{path.rpartition('/')[2]} {function}"
        frame = frame.f_back
    return called


class Op(NamedTuple):
    name: str
    where: str
    stream: "Stream"
    count: int  # number on its stream
    seen: dict["Stream", int]

    def __str__(self):
        return f"`{self.name}` on stream {self.stream.name} ({self.where})"


class Stream:
    """``torch.cuda.Stream``. ``name`` appears in messages."""

    def __init__(self, recorder, device=None, name=""):
        self.recorder, self.name, self.device = recorder, name, torch.device("cuda", index_of(device, True))
        self.seen, self.count = {}, 0

    def record_event(self, event=None):
        event = event or Event(self.recorder)
        event.record(self)
        return event

    def wait_event(self, event):
        with self.recorder.lock:
            join(self.seen, event.seen)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def synchronize(self):
        self.recorder.wait("Stream.synchronize", self.seen)


class Event:
    """``torch.cuda.Event``. To wait for an event that was never recorded does nothing, as in CUDA."""

    def __init__(self, recorder):
        self.recorder, self.seen = recorder, {}

    def record(self, stream=None):
        stream = stream or torch.cuda.current_stream()
        with self.recorder.lock:
            join(stream.seen, self.recorder.host)
            self.seen = dict(stream.seen)

    def synchronize(self):
        self.recorder.wait("Event.synchronize", self.seen)


class Block:
    """Memory of one or several tensors on a device, from its allocation until its last tensor is gone."""

    def __init__(self, recorder, stream, text):
        self.recorder, self.stream, self.text = recorder, stream, text
        self.last = {}  # by stream and whether it wrote: the last operation
        self.recorded = {stream}  # those of `record_stream`, and the own one

    def __del__(self):
        self.recorder.freed(self)


class DeviceTensor(torch.Tensor):
    """A tensor on a pretended CUDA device. ``inner`` has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, block):
        place = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "device": block.stream.device}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, **place)
        made.inner, made.block = inner, block
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return on_device(tree_leaves((args, kwargs)))[0].block.recorder.dispatch(func, args, kwargs or {})

    def data_ptr(self):
        return self.inner.data_ptr()

    def record_stream(self, stream):
        self.block.recorded.add(stream)


def on_device(values):
    return [x for x in values if isinstance(x, DeviceTensor)]


class Recorder:
    """Everything that was recorded. ``found``: the messages, without repetitions."""

    def __init__(self):
        self.found, self.host, self.local = {}, {}, threading.local()
        self.lock = threading.RLock()  # reentrant, because freeing may happen anywhere
        self.streams = [Stream(self, k, f"default of cuda:{k}") for k in range(2)]  # first, each device's default
        self.used = set()  # devices that somebody uses
        self.pinned = {}  # tensors by address; kept, so that no address is used again
        self.copies = []  # queued copies from pinned memory: operation, source and its bytes

    def say(self, text):
        self.found[text] = None

    # --- torch.cuda

    def current_device(self):
        return getattr(self.local, "device", 0)

    def exchange_device(self, index):
        before, self.local.device = self.current_device(), self.current_device() if index < 0 else index
        return before

    def current_stream(self, device=None):
        index = index_of(device, True)
        return getattr(self.local, "streams", {}).get(index, self.streams[index])

    def set_stream(self, stream):
        if stream.device not in self.used:
            self.say(f"new context: {stream.device} gets one from {site()}")
        self.local.device = stream.device.index
        self.local.streams = {**getattr(self.local, "streams", {}), self.local.device: stream}

    def new_stream(self, device=None, priority=0, name=""):
        self.streams.append(Stream(self, device, name or str(len(self.streams))))
        self.used.add(self.streams[-1].device)
        return self.streams[-1]

    def synchronize(self, device=None):
        self.wait("torch.cuda.synchronize", {stream: stream.count for stream in self.streams})

    def wait(self, name, seen):
        """The host waits until the operations ``seen`` have ended."""
        with self.lock:
            self.say(f"waits: the host, in `{name}` ({site()})")
            self.check_copies()
            join(self.host, seen)
            self.copies = [copy for copy in self.copies if self.host.get(copy[0].stream, 0) < copy[0].count]

    # --- memory

    def queue(self, name, stream, reads=(), writes=()):
        """Record an operation on the blocks that it reads and writes."""
        with self.lock:
            join(stream.seen, self.host)
            stream.count += 1
            stream.seen[stream] = stream.count
            op = Op(name, site(), stream, stream.count, dict(stream.seen))
            if self.current_device() != stream.device.index:
                self.say(f"not current: {op} runs on {stream.device} while cuda:{self.current_device()} is current")
            for verb, block in [("reads", block) for block in reads] + [("writes", block) for block in writes]:
                for (other, before), earlier in block.last.items():
                    racing = "writes" in (verb, before) and op.seen.get(other, 0) < earlier.count
                    if racing and block.recorder is self:  # Kornia's caches may be from an earlier recorder
                        self.say(f"race: {op} {verb} {block.text}, which {earlier} {before}; no wait orders them")
                block.last[stream, verb] = op
            return op

    def freed(self, block):
        with self.lock:
            known, owner = dict(block.stream.seen), block.stream.name
            join(known, self.host)
            for (stream, _), op in block.last.items():
                if stream not in block.recorded and known.get(stream, 0) < op.count:
                    self.say(
                        f"freed too early: {block.text} of stream {owner} while {op} may run: {owner} did not wait"
                    )

    def pin(self, tensor):
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.pinned

    def check_copies(self):
        """Look for pinned memory that has changed since a copy from it was queued."""
        for op, source, before in self.copies:
            if source.numpy().tobytes() != before:
                self.say(f"overwritten: pinned memory that {op} may still read; the host has not waited")

    # --- operations of torch

    def dispatch(self, func, args, kwargs):
        """Run an operation of torch, and record it if it uses a pretended device."""
        name, kwargs = str(func.overloadpacket).removeprefix("aten."), dict(kwargs)
        pinned = kwargs.pop("pin_memory", False)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        given = on_device(tensors)
        if name == "is_pinned":
            return not given and self.is_pinned(args[0])
        if name == "_pin_memory":
            return self.pin(args[0].clone())
        if name == "cudnn_grid_sampler":  # in torch's builds for CUDA
            func, args = torch.ops.aten.grid_sampler_2d.default, (*args, 0, 0, True)
        written = [k for k, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
        changed = [*(args[k] for k in written if k < len(args)), *on_device([kwargs.get("out")])]
        device = torch.device(kwargs.get("device") or [*changed, *given, torch.empty(0, device="cpu")][0].device)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        inner = tree_map_only(DeviceTensor, lambda x: x.inner, (args, kwargs)) if given else (args, kwargs)
        made = func(*inner[0], **inner[1])
        if device.type == "cpu" and not given:
            return self.pin(made) if pinned else made
        if "empty" in name:
            made.zero_()
        result, new = (made, []) if device.type == "cpu" else self._wrapped(made, given, device, name)
        read = [x for x in tensors if all(x is not y for y in changed)]
        self._record(func, name, args, kwargs, device, read, [*new, *(x.block for x in on_device(changed))])
        return result

    def _wrapped(self, made, given, device, name):
        """Results on a device, and their new blocks. A result may be an argument, or a view of it."""
        new, blocks = [], {x.inner.untyped_storage()._cdata: x.block for x in given}

        def wrapped(x):
            if same := [y for y in given if y.inner is x]:
                return same[0]
            if (block := blocks.get(x.untyped_storage()._cdata)) is None:
                what = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} (allocated by `{name}`, {site()})"
                new.append(block := Block(self, self.current_stream(device), what))
                self.used.add(device)
            return DeviceTensor(x, block)

        return tree_map_only(torch.Tensor, wrapped, made), new

    def _record(self, func, name, args, kwargs, device, read, writes):
        waits = WAITING & {*func.tags} or name == "_local_scalar_dense" or device.type == "cpu"
        if name in INDEXING:  # it waits only for masks
            waits = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if not (writes or waits):
            return  # a view: no memory is touched
        given, host = on_device(read), [x for x in read if not isinstance(x, DeviceTensor) and x.dim() and x.numel()]
        stream = self.current_stream(device if device.type == "cuda" else given[0].device)
        op = self.queue(name, stream, [x.block for x in given], writes)
        if waits or (host and name in INDEXING):
            self.wait(name, stream.seen)
        elif host and name not in ("_to_copy", "copy_"):
            self.say(f"two devices: {op} takes {list(host[0].shape)} from the host, which torch refuses")
        elif host and not kwargs.get("non_blocking", args[2:3] == (True,)):
            self.wait(f"{name} from the host", op.seen)
        elif host and not self.is_pinned(host[0]):
            self.say(f"not pinned: the source of {op}, which claims not to block")
        elif host:
            self.copies.append((op, host[0], host[0].numpy().tobytes()))


class _Mode(TorchDispatchMode):
    """Sends this thread's operations to a recorder, also those without a tensor on a pretended device."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.recorder.dispatch(func, args, kwargs or {})


@contextmanager
def _without_runtime():
    """Let torch's C++ code select a CUDA device without the CUDA runtime, by the guard that selects the CPU."""
    c10 = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/*c10.*"))))
    guards = (ctypes.c_void_p * 2).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")  # of the CPU and CUDA
    before, guards[1] = guards[1], guards[0]
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # so that `torch.tensor` copies to a device by an operation
    try:
        yield
    finally:
        guards[1] = before
        torch._C._set_only_lift_cpu_tensors(lifts)


@contextmanager
def pretended_cuda():
    """Inside the block, torch has pretended CUDA devices. Yields what is recorded."""
    recorder, thread_run = Recorder(), threading.Thread.run

    def run(self):
        with _Mode(recorder):
            thread_run(self)

    def decoded(self, request):
        turned, views = bool(request.headers.swapped[0]), []
        for windows in request.windows:
            size = windows.size[:: -1 if turned else 1]
            views.append(torch.empty((len(request), *size, 3), dtype=torch.uint8, device=self._device))
            recorder.queue("DALI", torch.cuda.current_stream(self._device), writes=[views[-1].block])
        return views

    def queue(kernel, grid, device, *args, reads=(), **constants):
        blocks = ({x.block for x in on_device(tensors)} for tensors in (reads, args))
        recorder.queue(kernel.__name__, torch.cuda.current_stream(device), *blocks)

    fakes = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda device=None: SimpleNamespace(L2_cache_size=60 << 20),  # of an H200
        "Stream": recorder.new_stream,
        "Event": partial(Event, recorder),
        "_exchange_device": recorder.exchange_device,
        "_maybe_exchange_device": recorder.exchange_device,
        "set_device": lambda device: recorder.exchange_device(index_of(device)),
        **{name: getattr(recorder, name) for name in ("current_device", "current_stream", "set_stream", "synchronize")},
    }
    with pytest.MonkeyPatch.context() as patch, _without_runtime(), _Mode(recorder):
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(threading.Thread, "run", run)
        patch.setattr(dali.CudaPipeline, "run", decoded)
        patch.setattr(cuda, "_queue", queue)
        yield recorder
