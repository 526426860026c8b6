"""Makes the CPU build of torch believe in GPUs (memory and kernels of the CPU with CUDA's label) and in NCCL.

Install with `import fakecuda; fakecuda.install()` before anything else touches torch.cuda.
FAKE_GPUS: how many. GPU_SIM_TIMEOUT: seconds that a communicator's initialisation waits.
"""
import atexit, ctypes, datetime, importlib.util, json, os, sys, time, types
HERE = os.path.dirname(os.path.abspath(__file__))


def _cache():
    import hashlib
    from importlib.metadata import version
    text = open(os.path.join(HERE, "gpu_sim.cpp"), "rb").read() + version("torch").encode() + sys.version.encode()
    return os.path.join(os.path.dirname(os.path.dirname(HERE)), ".cache", "gpu_sim", hashlib.sha256(text).hexdigest()[:16])


def _built():
    import subprocess, fcntl
    where = _cache()
    library = os.path.join(where, "gpu_sim_ext.so")
    if not os.path.exists(library):
        os.makedirs(where, exist_ok=True)
        with open(os.path.join(where, "building"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(library):
                code = ("from torch.utils.cpp_extension import load; load(name='gpu_sim_ext', sources=[%r], build_directory=%r, "
                        "extra_cflags=['-O1', '-g0', '-w'])" % (os.path.join(HERE, "gpu_sim.cpp"), where))
                subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "GPU_SIM": "0", "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]})
    return library

LIBRARY = _built()
assert "torch" not in sys.modules, "import gpu_sim before torch"
_lib = os.path.join(os.path.dirname(importlib.util.find_spec("torch").origin), "lib")
for _name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libtorch.so", "libshm.so", "libtorch_python.so"):
    ctypes.CDLL(os.path.join(_lib, _name), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ext = None
_initialised = False
_bad_fork = False


def _load():
    import importlib.util
    path = LIBRARY
    spec = importlib.util.spec_from_file_location("gpu_sim_ext", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _index(device):
    if device is None:
        return ext.current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return ext.current_device() if device.index is None else device.index


class Event:
    def __init__(self, device=None, enable_timing=False, blocking=False, interprocess=False, external=False):
        self.enable_timing, self.at = enable_timing, None
    def record(self, stream=None): self.at = ext.reached()  # steady_clock is perf_counter's clock on Linux
    def synchronize(self):
        if self.at is not None: ext.wait_until(self.at)
    def wait(self, stream=None): pass
    def query(self): return self.at is None or time.perf_counter() >= self.at
    def elapsed_time(self, other):
        assert self.enable_timing and other.enable_timing
        return (other.at - self.at) * 1e3


class Stream:
    def __init__(self, device=None, priority=0, **kw): self.device = torch.device("cuda", _index(device)); self.stream_id = id(self)
    def wait_stream(self, other): pass
    def wait_event(self, event): pass
    def record_event(self, event=None):
        event = event or Event(); event.record(self); return event
    def synchronize(self): ext.synchronize()
    def query(self): return True
    def __enter__(self): return self
    def __exit__(self, *a): pass
    @property
    def cuda_stream(self): return 0


class StreamContext:
    def __init__(self, stream=None): self.stream = stream
    def __enter__(self): return self.stream
    def __exit__(self, *a): pass


class device_context:
    def __init__(self, device): self.idx = _index(device)
    def __enter__(self): self.before = ext.current_device(); ext.set_device(self.idx)
    def __exit__(self, *a): ext.set_device(self.before)


def _init(*_):
    global _initialised
    if _bad_fork:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
                           "the 'spawn' start method")
    _initialised = True


def _after_fork():
    global _bad_fork, _initialised
    if _initialised:
        _bad_fork = True
        _initialised = False


def install():
    global ext
    if ext is not None:
        return
    ext = _load()
    c = torch.cuda
    streams = {}

    def current(f):
        def g(*a, **k):
            _init(); return f(*a, **k)
        return g

    def properties(device=None):
        _init()
        return types.SimpleNamespace(name="Fake H100", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132,
                                     L2_cache_size=50 << 20, uuid="0", gcnArchName="", warp_size=32)

    def set_device(device):
        _init(); ext.set_device(_index(device))

    def states(device="cuda"):
        _init(); return torch.zeros(16, dtype=torch.uint8)

    def set_state(state, device="cuda"):
        if not _initialised or _bad_fork:  # torch queues it until CUDA is used
            return
        i = _index(None if device in ("cuda", torch.device("cuda")) else device)
        if i >= ext.device_count():
            raise IndexError("tuple index out of range")

    def set_all(new):
        for i, s in enumerate(new): set_state(s, i)

    stats = lambda *a, **k: {"allocated_bytes.all.current": ext.allocated(), "allocated_bytes.all.peak": ext.max_allocated()}
    new = dict(
        is_available=lambda: ext.device_count() > 0, _is_compiled=lambda: True, device_count=ext.device_count,
        is_initialized=lambda: _initialised and not _bad_fork, init=_init, _lazy_init=_init, _is_in_bad_fork=lambda: _bad_fork,
        current_device=current(ext.current_device), set_device=set_device, device=device_context,
        _exchange_device=lambda d: (lambda b: (ext.set_device(d) if d >= 0 else None, b)[1])(ext.current_device()),
        _maybe_exchange_device=lambda d: (lambda b: (ext.set_device(d) if d >= 0 else None, b)[1])(ext.current_device()),
        get_device_properties=properties, get_device_name=lambda d=None: "Fake H100", get_device_capability=lambda d=None: (_init(), (9, 0))[1],
        is_bf16_supported=lambda including_emulation=True: (_init(), True)[1], synchronize=lambda device=None: (_init(), ext.synchronize())[1],
        Event=Event, Stream=Stream, StreamContext=StreamContext, stream=StreamContext,
        current_stream=lambda device=None: streams.setdefault(_index(device), Stream(device)), default_stream=lambda device=None: streams.setdefault(_index(device), Stream(device)),
        set_stream=lambda s: None,
        memory_allocated=lambda d=None: ext.allocated(), max_memory_allocated=lambda d=None: ext.max_allocated(),
        memory_reserved=lambda d=None: ext.allocated(), max_memory_reserved=lambda d=None: ext.max_allocated(),
        reset_peak_memory_stats=lambda d=None: ext.reset_peak(), reset_max_memory_allocated=lambda d=None: ext.reset_peak(),
        empty_cache=lambda: None, ipc_collect=lambda: None, mem_get_info=lambda d=None: ((80 << 30) - ext.allocated(), 80 << 30),
        memory_stats=stats, memory_cached=lambda d=None: ext.allocated(), max_memory_cached=lambda d=None: ext.max_allocated(),
        manual_seed=lambda s: None, manual_seed_all=lambda s: None, seed=lambda: None, seed_all=lambda: None, initial_seed=lambda: 0,
        get_rng_state=states, set_rng_state=set_state, get_rng_state_all=lambda: [states(i) for i in range(ext.device_count())], set_rng_state_all=set_all,
        default_generators=(), is_current_stream_capturing=lambda: False, get_arch_list=lambda: ["sm_90"], can_device_access_peer=lambda a, b: True,
    )
    for name, value in new.items():
        setattr(c, name, value)
    torch._C._cuda_getCurrentRawStream = lambda d=0: 0
    torch._C._cuda_getDeviceCount = ext.device_count
    torch._C._cuda_synchronize = lambda: ext.synchronize()
    torch.version.cuda = "12.8"
    import torch.cuda.amp.common as common
    common.amp_definitely_not_available = lambda: False
    import torch.cuda.nccl as nccl
    nccl.version = lambda: (2, 27, 5)
    torch.cuda.nccl = nccl
    import torch.cuda.nvtx as nvtx
    for each in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(nvtx, each, lambda *a, **k: 0)
    os.register_at_fork(after_in_child=_after_fork)

    plain = torch.UntypedStorage.resize_
    def resize(storage, size):
        if storage.device.type != "cuda":
            return plain(storage, size)
        if storage.nbytes() != size:
            ext.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage
    torch.UntypedStorage.resize_ = resize

    torch.Tensor.record_stream = lambda self, stream: None

    # NCCL
    class Meta(type):
        def __call__(cls, store, rank, size, options):
            timeout = float(os.environ.get("GPU_SIM_TIMEOUT", "60"))
            gloo = c10d.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=datetime.timedelta(seconds=timeout * 4))
            return ext.nccl(gloo, dist.PrefixStore("fake/", store), rank, size, timeout)
        def __instancecheck__(cls, it):
            return isinstance(it, torch._C._distributed_c10d.Backend) and it.name() == "nccl"
    class ProcessGroupNCCL(metaclass=Meta):
        class Options(types.SimpleNamespace):
            pass
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    dist.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    if report := os.environ.get("GPU_SIM_REPORT"):
        def say():
            with open(f"{report}.{os.environ.get('RANK', 'x')}.{os.getpid()}.json", "w") as out:
                json.dump({"races": ext.races(), "host_syncs": ext.host_syncs(), "kernels": ext.kernels(), "argv": sys.argv}, out)
        atexit.register(say)


def findings(): return list(ext.races())
def host_syncs(): return ext.host_syncs()
def kernels(): return ext.kernels()
