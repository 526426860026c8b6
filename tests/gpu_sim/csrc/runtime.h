// What a GPU's driver keeps: streams, events, the order in which work is done, and who touches which memory when.
//
// Kernels run at once, on the caller's thread, on CPU memory; what is simulated is *order*. Each stream is a logical
// clock (Lamport 1978; vector clocks, Mattern 1989): work number n of stream s has "happened before" work on stream t
// if t has waited, by an event or through the host, for at least n of s. Two accesses to the same bytes, one of them a
// write, of which neither happened before the other are a race on a GPU, whatever this machine did with them. torch's
// own CUDA sanitizer (torch/cuda/_sanitizer.py) applies the same rule to streams; here it holds for NCCL's too.
#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace gpu_sim {

// ---------------------------------------------------------------- where in Python
struct Site {  // a Python stack, innermost frame first
  struct Frame { const std::string* file; const std::string* function; int line; };
  std::vector<Frame> frames;
  std::string text() const;   // the whole stack, as Python prints it
  std::string where() const;  // "file:line" of the innermost frame that is not torch's or another installed package's
};
using SitePtr = std::shared_ptr<const Site>;
// The calling thread's stack; on autograd's threads, which have none, the main thread's. Takes the GIL.
SitePtr here();

// ---------------------------------------------------------------- what was found
struct Finding { std::string kind, text, where, other; };
void found(Finding finding);
std::vector<Finding> findings();
void forget_findings();

// ---------------------------------------------------------------- options, from the environment, at the first use
struct Options {
  double kernel_seconds;     // GPU_SIM_KERNEL_US: what a kernel takes on the virtual clock; 0: the clock stands still
  double byte_seconds;       // GPU_SIM_LINK_GBS: of a collective's bytes, by the link's GB/s
  double early;              // GPU_SIM_EARLY: odds that a result arrives before it is waited for, drawn at each kernel
  uint64_t seed;             // GPU_SIM_SEED: of those draws
  double timeout;            // GPU_SIM_TIMEOUT: seconds until a collective that nobody joins is given up
  bool raise_on_mismatch;    // GPU_SIM_ON_MISMATCH=raise: else it hangs, as NCCL does, until the timeout
};
const Options& options();
int device_count();  // GPU_SIM

// ---------------------------------------------------------------- streams and events
using Clock = std::vector<uint64_t>;  // by stream: how much of its work has happened before
bool happened(const Clock& clock, int stream, uint64_t time);

int stream_of(c10::DeviceIndex device, int64_t id);  // streams are numbered as they are first used
int new_stream(c10::DeviceIndex device);
int current_stream();                                 // of this thread, on its current device
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream torch_stream(c10::DeviceIndex device);    // this thread's current stream of a device
c10::Stream exchange_torch_stream(c10::Stream stream);
c10::Stream as_torch_stream(int stream);

struct Event { Clock clock; double at = 0; bool recorded = false; };
void record(Event& event, int stream);
void block(const Event& event, int stream);           // cudaStreamWaitEvent
void block(const Clock& clock, double at, int stream);
bool query(const Event& event);                        // cudaEventQuery: true also tells the host
Event end_of(int stream);
void synchronize(const Event& event, const char* what);  // the host waits: a host sync, counted
void synchronize_all(const char* what);

// Work that the host has issued and that is still to arrive: collectives, and copies into pinned memory.
struct Pending {
  int stream = 0;
  uint64_t time = 0;
  virtual bool done() = 0;                 // may be asked on any thread
  virtual void deliver() = 0;              // wait until it is done and put the results in place
  virtual ~Pending() = default;
};
void enqueue(std::shared_ptr<Pending> work);
void settle(int stream);                   // deliver what the stream's next kernel finds there
uint64_t launch(int stream, double seconds);  // one more piece of work on a stream; its time

// ---------------------------------------------------------------- memory
void* allocate(size_t bytes, c10::DeviceIndex device);
void adopt(void* start, size_t bytes, c10::DeviceIndex device);  // of memory that a CPU kernel allocated
void release(void* start, std::function<void()> free);           // remembers which streams still use it
void used_on(const void* start, int stream);                     // Tensor.record_stream
void touch(const at::Tensor& tensor, bool writes, const char* what, int stream, uint64_t time, const SitePtr& site);
void limit_memory(int64_t bytes);                                // of each device
int64_t allocated(c10::DeviceIndex device);
int64_t most_allocated(c10::DeviceIndex device);
void reset_most_allocated(c10::DeviceIndex device);
int64_t allocations(c10::DeviceIndex device);

// ---------------------------------------------------------------- counted
extern std::atomic<int64_t> kernels, host_syncs;
void host_sync(const char* what);          // of the current stream, counted; its site is kept while traced
void trace_syncs(bool on);
struct Sync { std::string what; SitePtr site; };
std::vector<Sync> traced_syncs();
extern std::atomic<int> sync_debug_mode;   // torch.cuda.set_sync_debug_mode: 0, 1 warn, 2 error

// ---------------------------------------------------------------- the driver
void use_driver();                         // raises in a process forked from one that had used it
bool driver_used();

at::Tensor as_cpu(const at::Tensor& tensor);   // the same memory under a CPU label
bool is_pinned(const void* data);

struct WithoutGil {  // for waits
  PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() { if (state) PyEval_RestoreThread(state); }
};

}  // namespace gpu_sim
