"""What of torch.cuda the CPU build lacks, over the simulated device."""

import datetime
import functools
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

NAME, CAPABILITY, MEMORY = "Simulated H100 80GB HBM3", (9, 0), 80 << 30
NCCL_TIMEOUT = datetime.timedelta(minutes=10)  # distributed_c10d.py, default_pg_nccl_timeout

_ext: Any = None
_initialised = _forked = False


def _index(device: Any = None) -> int:
    if device is None:
        return _ext.current_device()
    if isinstance(device, int):
        return device if device >= 0 else _ext.current_device()
    index = torch.device(device).index
    return _ext.current_device() if index is None else index


def _init() -> None:
    """torch/cuda/__init__.py, _lazy_init."""
    global _initialised
    if _forked:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
            "use the 'spawn' start method"
        )
    _ext.use_driver()
    _initialised = True


def _after_fork() -> None:
    global _initialised, _forked
    if _initialised:
        _initialised, _forked = False, True


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Its first use initialises CUDA."""

    @functools.wraps(function)
    def initialised(*args: Any, **kwargs: Any) -> Any:
        _init()
        return function(*args, **kwargs)

    return initialised


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        _init()
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event() if isinstance(other, Stream) else torch.Stream.record_event(other))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        here = torch.device("cuda", _ext.current_device())
        return super().__new__(cls, here, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: Any) -> float:  # torch.Event's own takes no subclass of itself
        return _ext.elapsed_ms(self.event_id, end_event.event_id)


def current_stream(device: Any = None) -> Stream:
    _init()
    number, index = _ext.stream(_index(device))
    return Stream(stream_id=number, device_index=index, device_type=1)  # c10::DeviceType::CUDA


def default_stream(device: Any = None) -> Stream:
    _init()
    return Stream(stream_id=0, device_index=_index(device), device_type=1)


def set_stream(stream: Any) -> None:
    if stream is not None:
        _ext.set_device(stream.device.index)
        _ext.set_stream(stream.device.index, stream.stream_id)


class StreamContext:
    """torch.cuda.StreamContext."""

    def __init__(self, stream: Any):
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self.device = _ext.current_device()
        _ext.set_device(self.stream.device.index)
        self.before = _ext.set_stream(self.stream.device.index, self.stream.stream_id)

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            _ext.set_stream(self.stream.device.index, self.before)
            _ext.set_device(self.device)


class device:
    """torch.cuda.device."""

    def __init__(self, device: Any):
        self.idx = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self.before = _exchange(self.idx)

    def __exit__(self, *_: Any) -> None:
        _ext.set_device(self.before)


def _exchange(index: int) -> int:
    before = _ext.current_device()
    if index >= 0:
        _init()
        _ext.set_device(index)
    return before


def set_device(device: Any) -> None:
    index = _index(device)
    if index >= 0:
        _init()
        if index >= _ext.device_count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        _ext.set_device(index)


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    _init()
    return _ext.generator_state(_index(None if device == "cuda" else device))


def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    index = _index(None if device in ("cuda", torch.device("cuda")) else device)
    if index >= _ext.device_count():
        raise IndexError("tuple index out of range")  # of torch.cuda.default_generators
    _ext.set_generator_state(index, state)


def set_rng_state_all(states: Any) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _ext.seed_generator(_ext.current_device(), int(seed) % 2**64)


def manual_seed_all(seed: int) -> None:  # where CUDA is not yet in use, torch notes it for later: no driver is needed
    for index in range(_ext.device_count()):
        _ext.seed_generator(index, int(seed) % 2**64)


def memory_stats(device: Any = None) -> dict[str, int]:
    index = _index(device)
    return {
        "allocated_bytes.all.current": _ext.allocated(index),
        "allocated_bytes.all.peak": _ext.max_allocated(index),
        "reserved_bytes.all.current": _ext.allocated(index),
        "reserved_bytes.all.peak": _ext.max_allocated(index),
        "allocation.all.allocated": _ext.allocations(index),
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME,
        total_memory=MEMORY,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        uuid="0",
        gcnArchName="",
        warp_size=32,
    )


def set_sync_debug_mode(mode: int | str) -> None:
    _init()
    _ext.set_sync_debug_mode({"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode)


timeouts: list[datetime.timedelta] = []
"""What NCCL's groups of this process were given after they were made."""


class _Named(type):
    """``isinstance`` by the backend's name: the class itself is C++'s."""

    def __call__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        prefix = functools.partial(dist.PrefixStore, store=store)
        gloo = c10d.ProcessGroupGloo(prefix("data/"), rank, size, timeout=datetime.timedelta(hours=1))
        return _ext.nccl(gloo, prefix("calls/"), rank, size, str(getattr(options, "group_name", "") or "default"))

    def __instancecheck__(cls, it: Any) -> bool:
        return isinstance(it, torch._C._distributed_c10d.Backend) and it.name() == "nccl"


class ProcessGroupNCCL(metaclass=_Named):
    """torch.distributed.ProcessGroupNCCL."""

    class Options(types.SimpleNamespace):
        is_high_priority_stream = False


def install(ext: Any) -> None:
    """Put all of it in torch.cuda's place."""
    global _ext
    _ext = ext
    cuda = torch.cuda
    count = ext.device_count
    here: dict[str, Any] = dict(  # noqa: C408 - names, as torch.cuda has them
        is_available=lambda: count() > 0,
        _is_compiled=lambda: True,
        device_count=count,
        init=_init,
        _lazy_init=_init,
        is_initialized=lambda: _initialised and not _forked,
        _is_in_bad_fork=lambda: _forked,
        current_device=_on_device(ext.current_device),
        set_device=set_device,
        device=device,
        _exchange_device=_exchange,
        _maybe_exchange_device=_exchange,
        get_device_properties=_on_device(properties),
        get_device_name=lambda device=None: NAME,
        get_device_capability=_on_device(lambda device=None: CAPABILITY),
        get_arch_list=lambda: ["sm_90"],
        is_bf16_supported=_on_device(lambda including_emulation=True: True),
        can_device_access_peer=lambda a, b: True,
        synchronize=_on_device(lambda device=None: ext.synchronize()),
        Event=Event,
        Stream=Stream,
        StreamContext=StreamContext,
        stream=StreamContext,
        current_stream=current_stream,
        default_stream=default_stream,
        set_stream=set_stream,
        is_current_stream_capturing=lambda: False,
        memory_allocated=lambda device=None: ext.allocated(_index(device)),
        max_memory_allocated=lambda device=None: ext.max_allocated(_index(device)),
        memory_reserved=lambda device=None: ext.allocated(_index(device)),
        max_memory_reserved=lambda device=None: ext.max_allocated(_index(device)),
        reset_peak_memory_stats=lambda device=None: ext.reset_peak(_index(device)),
        reset_max_memory_allocated=lambda device=None: ext.reset_peak(_index(device)),
        set_per_process_memory_fraction=lambda fraction, device=None: ext.limit_memory(int(fraction * MEMORY)),
        mem_get_info=lambda device=None: (MEMORY - ext.allocated(_index(device)), MEMORY),
        memory_stats=memory_stats,
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed_all,
        seed=lambda: manual_seed(torch.seed()),
        seed_all=lambda: manual_seed_all(torch.seed()),
        initial_seed=torch.initial_seed,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        set_rng_state_all=set_rng_state_all,
        get_rng_state_all=lambda: [get_rng_state(index) for index in range(count())],
        default_generators=(),
        set_sync_debug_mode=set_sync_debug_mode,
        get_sync_debug_mode=ext.sync_debug_mode,
    )
    for name, value in here.items():
        setattr(cuda, name, value)
    import torch.cuda.amp.common as amp
    import torch.cuda.memory as memory
    import torch.cuda.nccl as nccl
    import torch.cuda.nvtx as nvtx
    import torch.cuda.random as random

    for module in (memory, random):
        for name in here.keys() & vars(module).keys():
            setattr(module, name, here[name])
    torch._C._cuda_getCurrentRawStream = lambda index=0: ext.stream(index)[0]
    torch._C._cuda_getDeviceCount = count
    torch._C._cuda_synchronize = ext.synchronize
    torch.version.cuda = "12.8"
    amp.amp_definitely_not_available = lambda: False
    nccl.version = lambda: (2, 27, 5)
    cuda.nccl = nccl
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(nvtx, name, lambda *_, **__: 0)
    os.register_at_fork(after_in_child=_after_fork)

    resize = torch.UntypedStorage.resize_

    def resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize(storage, size)
        if storage.nbytes() != size:
            ext.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    torch.UntypedStorage.resize_ = resize_storage
    to = torch.UntypedStorage.to

    def storage_to(
        storage: torch.UntypedStorage, *, device: torch.device | str, non_blocking: bool = False
    ) -> torch.UntypedStorage:
        """``torch.load(…, map_location="cuda")`` moves storages; the CPU build cannot make one on a GPU by itself."""
        if torch.device(device).type != "cuda" or storage.device.type != "cpu":
            return to(storage, device=device, non_blocking=non_blocking)
        there = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        there.copy_(torch.empty(0, dtype=torch.uint8).set_(storage), non_blocking=non_blocking)
        return there.untyped_storage()

    torch.UntypedStorage.to = storage_to
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    # ProcessGroupNCCL has this, its base class has not (torch/csrc/distributed/c10d/init.cpp).
    torch._C._distributed_c10d.Backend._set_default_timeout = lambda self, timeout: timeouts.append(timeout)
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = NCCL_TIMEOUT
