// A CUDA device that is CPU memory with a CUDA label, on the CPU build of torch; and a process group with NCCL's habits.
#include <torch/extension.h>
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <unordered_set>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <pthread.h>
#include <torch/csrc/utils/pybind.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

using at::Tensor;

// ---------------------------------------------------------------- devices
static int device_count() {
  const char* n = std::getenv("GPU_SIM");
  return n ? std::atoi(n) : 0;
}
static thread_local c10::DeviceIndex current_device = 0;
static thread_local int64_t current_stream = 0;
static std::atomic<int64_t> next_stream{1};
static std::atomic<int64_t> guard_asked{0};  // cudaGetDeviceCount, which initialises the driver
static bool driver_lost = false;
static bool watch_forks = [] { pthread_atfork(nullptr, nullptr, [] { driver_lost = guard_asked > 0; }); return true; }();

static double now_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static double reached();  // when the device will be done with what was launched so far, on the clock of now_seconds
static void wait_until(double at) {
  double left = at - now_seconds();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}
struct FakeEvent { double at; };

struct FakeGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    if (d.index() >= 0) current_device = d.index();
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, current_device); }
  void setDevice(c10::Device d) const override { if (d.index() >= 0) current_device = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, d.index() < 0 ? current_device : d.index()), current_stream);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, d.index() < 0 ? current_device : d.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, d.index() < 0 ? current_device : d.index()), next_stream++);
  }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStreamFromGlobalPool(d, false); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    current_stream = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { guard_asked++; return (c10::DeviceIndex)device_count(); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new FakeEvent;
    static_cast<FakeEvent*>(*event)->at = reached();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override { return !event || now_seconds() >= static_cast<FakeEvent*>(event)->at; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override;
  void synchronizeEvent(void*) const override;
  void synchronizeDevice(const c10::DeviceIndex) const override;
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<FakeEvent*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return (static_cast<FakeEvent*>(b)->at - static_cast<FakeEvent*>(a)->at) * 1e3;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);

// ---------------------------------------------------------------- memory
static std::atomic<int64_t> held{0}, most{0};
struct Block { void* p; size_t n; };
struct FakeAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Device device(c10::DeviceType::CUDA, current_device);
    TORCH_CHECK(!driver_lost, "CUDA error: initialization error (fakecuda: the driver was initialised before the fork)");
    if (!n) return {nullptr, nullptr, &drop, device};
    void* p = nullptr;
    if (posix_memalign(&p, 64, n)) throw std::bad_alloc();
    std::memset(p, 0x7f, n);  // fresh device memory holds anything
    int64_t now = (held += (int64_t)n);
    int64_t seen = most.load();
    while (now > seen && !most.compare_exchange_weak(seen, now)) {}
    return {p, new Block{p, n}, &drop, device};
  }
  static void drop(void* ctx) {
    if (!ctx) return;
    auto* b = static_cast<Block*>(ctx);
    held -= (int64_t)b->n;
    std::free(b->p);
    delete b;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};
static FakeAllocator allocator;
struct SetAllocator { SetAllocator() { c10::SetAllocator(c10::DeviceType::CUDA, &allocator); } };
static SetAllocator set_allocator;

// ---------------------------------------------------------------- pinned host memory, and what ATen asks of CUDA
static std::mutex pinned_mutex;
static std::map<const char*, size_t> pinned;
struct PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n && posix_memalign(&p, 64, n)) throw std::bad_alloc();
    if (p) { std::lock_guard<std::mutex> lock(pinned_mutex); pinned[(const char*)p] = n; }
    return {p, p, &drop, c10::Device(at::kCPU)};
  }
  static void drop(void* p) {
    if (!p) return;
    { std::lock_guard<std::mutex> lock(pinned_mutex); pinned.erase((const char*)p); }
    std::free(p);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};
static PinnedAllocator pinned_allocator;
static bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto it = pinned.upper_bound((const char*)data);
  if (it == pinned.begin()) return false;
  --it;
  return (const char*)data < it->first + it->second;
}
struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex deviceCount() const override { return (c10::DeviceIndex)device_count(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { ::current_device = d; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { auto b = ::current_device; if (d >= 0) ::current_device = d; return b; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  int getNumGPUs() const override { return device_count(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(at::kCUDA, ::current_device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
namespace at { using ::CUDAHooks; REGISTER_CUDA_HOOKS(CUDAHooks) }

// ---------------------------------------------------------------- what the stream has still to wait for
struct Pending { virtual void deliver() = 0; virtual ~Pending() = default; };
static std::mutex pending_mutex;
static std::deque<std::shared_ptr<Pending>> pending;
static std::atomic<bool> any_pending{false};
static void flush() {  // the stream reaches its waits, in order; a kernel that comes after them finds the data
  while (any_pending) {
    std::shared_ptr<Pending> first;
    {
      std::lock_guard<std::mutex> lock(pending_mutex);
      if (pending.empty()) { any_pending = false; return; }
      first = pending.front();
    }
    first->deliver();
    std::lock_guard<std::mutex> lock(pending_mutex);
    if (!pending.empty() && pending.front() == first) pending.pop_front();
    any_pending = !pending.empty();
  }
}
static void await_later(std::shared_ptr<Pending> each) {
  std::lock_guard<std::mutex> lock(pending_mutex);
  pending.push_back(std::move(each));
  any_pending = true;
}
void FakeGuard::synchronizeStream(const c10::Stream&) const { flush(); wait_until(reached()); }
void FakeGuard::synchronizeEvent(void* event) const { flush(); if (event) wait_until(static_cast<FakeEvent*>(event)->at); }
void FakeGuard::synchronizeDevice(const c10::DeviceIndex) const { flush(); wait_until(reached()); }

static std::atomic<int64_t> host_syncs{0};
static std::atomic<int64_t> kernels{0};
static std::atomic<bool> trace_syncs{false};
static std::mutex syncs_mutex;
static std::vector<std::string> sync_names;
// A GPU's own clock: each kernel takes GPU_SIM_KERNEL_US after the one before, while the host runs on; 1024 fit into the queue.
static double kernel_seconds() {  // read when the device is first used: a process forked from one with the library has its own
  static double seconds = [] { const char* us = std::getenv("GPU_SIM_KERNEL_US"); return us ? std::atof(us) * 1e-6 : 0.0; }();
  return seconds;
}
static std::mutex clock_mutex;
static double gpu_until = 0;
static double reached() {
  if (kernel_seconds() <= 0) return now_seconds();
  std::lock_guard<std::mutex> lock(clock_mutex);
  return std::max(gpu_until, now_seconds());
}
static void launched() {
  if (kernel_seconds() <= 0) return;
  double ahead;
  { std::lock_guard<std::mutex> lock(clock_mutex); gpu_until = std::max(gpu_until, now_seconds()) + kernel_seconds(); ahead = gpu_until - now_seconds(); }
  if (ahead > 1024 * kernel_seconds()) std::this_thread::sleep_for(std::chrono::duration<double>(ahead - 1024 * kernel_seconds()));
}
static void host_sync(const char* what) {
  wait_until(reached());
  host_syncs++;
  if (trace_syncs) { std::lock_guard<std::mutex> lock(syncs_mutex); sync_names.emplace_back(what); }
  flush();
}

// ---------------------------------------------------------------- labels
static Tensor as_cpu(const Tensor& t) {  // the same memory with a CPU label
  if (!t.defined() || !t.is_cuda()) return t;
  auto options = t.options().device(at::kCPU).pinned_memory(false);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), options);
}
static Tensor as_cuda(const Tensor& c, c10::DeviceIndex index) {
  if (!c.defined() || c.is_cuda()) return c;
  auto storage = c.storage();
  auto* keep = new Tensor(c);
  c10::DataPtr ptr(storage.mutable_data(), keep, [](void* k) { delete static_cast<Tensor*>(k); },
                   c10::Device(c10::DeviceType::CUDA, index));
  auto impl = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(ptr),
                                                    &allocator, true);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(impl), c10::DispatchKeySet(c10::DispatchKey::CUDA), c.dtype());
  t.unsafeGetTensorImpl()->set_storage_offset(c.storage_offset());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(c.sizes(), c.strides());
  return t;
}

// ---------------------------------------------------------------- every kernel: run on the same memory as a CPU
static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  flush();
  kernels++;
  launched();
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t n = schema.arguments().size();
  auto begin = stack->end() - n;
  std::vector<c10::IValue> original(begin, stack->end());
  c10::DeviceIndex index = current_device;
  bool has_cuda = false, has_cpu = false;
  auto look = [&](const Tensor& t) {
    if (!t.defined()) return;
    if (t.is_cuda()) { has_cuda = true; index = t.get_device(); }
    else if (t.is_cpu() && t.dim() > 0) has_cpu = true;
    else if (t.is_cpu() && name.find("_fused_") != std::string::npos) has_cpu = true;
  };
  for (size_t i = 0; i < n; i++) {
    auto& v = *(begin + i);
    if (v.isTensor()) { look(v.toTensor()); v = c10::IValue(as_cpu(v.toTensor())); }
    else if (v.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) { look(t); list.push_back(as_cpu(t)); }
      v = c10::IValue(list);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : v.toOptionalTensorList()) {
        if (t) look(*t);
        list.push_back(t ? std::optional<Tensor>(as_cpu(*t)) : std::nullopt);
      }
      v = c10::IValue(list);
    } else if (v.isDevice() && v.toDevice().is_cuda()) {
      if (v.toDevice().index() >= 0) index = v.toDevice().index();
      v = c10::IValue(c10::Device(at::kCPU));
    }
  }
  if (has_cuda && has_cpu && name.find("aten::index") != 0 && name.find("aten::_index") != 0)
    TORCH_CHECK(false, "fakecuda: ", name, " was given CUDA and CPU tensors: on a GPU an error, or an illegal memory access");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto& returns = schema.returns();
  auto out = stack->end() - returns.size();
  for (size_t i = 0; i < returns.size(); i++) {
    auto& v = *(out + i);
    const auto* alias = returns[i].alias_info();
    bool same = false;
    if (alias && alias->isWrite()) {
      for (size_t a = 0; a < n && !same; a++) {
        const auto* theirs = schema.arguments()[a].alias_info();
        if (theirs && *theirs == *alias) {
          if (v.isTensor() && original[a].isTensor()) {
            const Tensor &before = original[a].toTensor(), &after = v.toTensor();
            if (before.is_cuda() && (before.sizes() != after.sizes())) {  // out= was resized
              before.unsafeGetTensorImpl()->set_storage_keep_dtype(as_cuda(after, index).storage());
              before.unsafeGetTensorImpl()->set_storage_offset(after.storage_offset());
              before.unsafeGetTensorImpl()->set_sizes_and_strides(after.sizes(), after.strides());
            }
          }
          v = original[a];
          same = true;
        }
      }
    }
    if (same) continue;
    if (v.isTensor()) v = c10::IValue(as_cuda(v.toTensor(), index));
    else if (v.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(as_cuda(t, index));
      v = c10::IValue(list);
    }
  }
}

static Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                  std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceIndex index = device && device->index() >= 0 ? device->index() : current_device;
  auto before = current_device;
  current_device = index;
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto result = at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                          dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())), format);
  current_device = before;
  return result;
}
static Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceIndex index = device && device->index() >= 0 ? device->index() : current_device;
  auto before = current_device;
  current_device = index;
  auto result = at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                                  c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                  dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())));
  current_device = before;
  return result;
}
static Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  flush();
  bool waits = !non_blocking || (src.is_cpu() && !is_pinned(src.const_data_ptr()));  // of pageable memory a copy blocks
  if (self.is_cuda() != src.is_cuda() && waits && self.numel()) host_sync(self.is_cuda() ? "copy host to device" : "copy device to host");
  else kernels++;
  Tensor there = as_cpu(self);
  there.copy_(as_cpu(src));
  return self;
}
static Tensor _copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor d = dst;
  copy_(d, self, non_blocking);
  return dst;
}
static Tensor _copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  Tensor d = dst;
  copy_(d, self, false);
  return dst;
}
static at::Scalar local_scalar(const Tensor& self) {
  host_sync("item");
  return as_cpu(self).item();
}
static void grow(c10::StorageImpl* storage, size_t bytes) {
  auto fresh = allocator.allocate(bytes);
  size_t kept = std::min(bytes, (size_t)storage->nbytes());
  if (kept) std::memcpy(fresh.get(), storage->mutable_data(), kept);
  storage->set_data_ptr(std::move(fresh));
  storage->set_nbytes(bytes);
}
static const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  size_t need = (self.storage_offset() + self.numel()) * self.element_size();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (need > storage->nbytes()) grow(storage, need);
  return self;
}
static Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
static Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
static Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
static Tensor unfold(const Tensor& self, int64_t d, int64_t size, int64_t step) { return at::native::unfold(self, d, size, step); }
static Tensor& set_source(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}
static Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t n = (int64_t)(source.nbytes() / self.element_size());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({n});
  return self;
}
static Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_storage_offset(source.storage_offset());
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  return self;
}
static Tensor& set_nothing(Tensor& self) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({0});
  return self;
}
static void record_stream(Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", _copy_from);
  m.impl("_copy_from_and_resize", _copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
}

// ================================================================ a process group with NCCL's habits, over gloo
// * a synchronous collective returns no work (ProcessGroupNCCL::collective: `return asyncOp ? work : nullptr`);
// * wait() puts a wait into the stream and returns at once; the data is there for the next kernel, not before;
// * each communicator has one stream: its operations run one after the other, in the order of issue;
// * an unbatched send or receive has a communicator of its own for each pair of ranks;
// * a send ends when it has been received; batched ones run together, on the group's communicator;
// * the first use of a communicator blocks the host until all its ranks have come;
// * host tensors are refused.
struct Race { std::string text; };
static std::mutex races_mutex;
static std::vector<std::string> races;
static void race(const std::string& text) {
  std::lock_guard<std::mutex> lock(races_mutex);
  races.push_back(text);
}
static bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.numel() != b.numel()) return false;
  auto x = a.contiguous(), y = b.contiguous();
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}
static void poison(Tensor& t) {  // what a reader finds that does not wait
  if (t.numel() == 0) return;
  // Not NaN: arithmetic leaves a NaN's bits as they are, and a write would go unseen.
  if (t.is_floating_point()) t.fill_(t.scalar_type() == at::kHalf ? 12345.0 : 1.2345e30);
  else t.fill_(77);
}

struct Lane {  // a communicator's stream
  std::mutex m;
  std::condition_variable cv;
  std::deque<std::function<void()>> jobs;
  std::thread thread;
  Lane() : thread([this] { run(); }) { thread.detach(); }
  void run() {
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> lock(m);
        cv.wait(lock, [&] { return !jobs.empty(); });
        job = std::move(jobs.front());
        jobs.pop_front();
      }
      job();
    }
  }
  void push(std::function<void()> job) {
    { std::lock_guard<std::mutex> lock(m); jobs.push_back(std::move(job)); }
    cv.notify_one();
  }
};

struct Job final : public Pending {
  std::string what;
  std::vector<Tensor> inputs, outputs;                 // the user's, CPU labels
  std::vector<Tensor> kept;                            // bits of the inputs at the issue
  std::vector<Tensor> poisoned;                        // bits of the poisoned outputs
  std::vector<Tensor> results;                         // what arrives for each output
  std::vector<Tensor> alive;                           // stashed, as NCCL's work does
  std::mutex m;
  std::condition_variable cv;
  bool done = false, delivered = false;
  std::atomic<bool> is_done_{false};  // asked by threads that hold the GIL: no lock there
  std::exception_ptr error;
  void finish(std::exception_ptr e) {
    { std::lock_guard<std::mutex> lock(m); done = true; error = e; }
    is_done_ = true;
    cv.notify_all();
  }
  bool is_done() { return is_done_; }
  void deliver() override {
    std::unique_lock<std::mutex> lock(m);
    if (delivered) return;
    if (PyGILState_Check()) {
      lock.unlock();
      pybind11::gil_scoped_release release;
      lock.lock();
      cv.wait(lock, [&] { return done; });
      lock.unlock();
      // the GIL is taken back here
    } else {
      cv.wait(lock, [&] { return done; });
      lock.unlock();
    }
    lock.lock();
    if (delivered) return;
    delivered = true;
    if (error) std::rethrow_exception(error);
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < inputs.size(); i++)
      if (!same_bits(inputs[i], kept[i])) race(what + ": an input was written to before it was waited for");
    for (size_t i = 0; i < outputs.size(); i++) {
      if (!same_bits(outputs[i], poisoned[i])) race(what + ": an output was written to before it was waited for");
      outputs[i].copy_(results[i]);
    }
    std::vector<Tensor> let_go = std::move(alive), ins = std::move(inputs), outs = std::move(outputs);
    inputs.clear(); outputs.clear(); alive.clear();
    lock.unlock();  // what Python holds of them is let go of with the GIL
  }
};

class NcclWork final : public c10d::Work {
 public:
  NcclWork(std::shared_ptr<Job> job, int rank, c10d::OpType type, std::vector<Tensor> outputs)
      : c10d::Work(rank, type, "fakenccl"), job_(std::move(job)), outputs_(std::move(outputs)) {}
  ~NcclWork() override {
    if (!waited_) race(job_->what + ": its work was dropped without a wait");
  }
  bool isCompleted() override { return job_->is_done(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { synchronize(); return true; }
  void synchronize() override { waited_ = true; await_later(job_); }
  void blockCurrentStream() override { synchronize(); }
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future_) {  // complete from the start; what is done with its value comes after the data, in stream order
      waited_ = true;
      await_later(job_);
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{c10::Device(at::kCUDA, current_device)});
      future_->markCompleted(c10::IValue(outputs_));
    }
    return future_;
  }
 private:
  std::shared_ptr<Job> job_;
  std::vector<Tensor> outputs_;
  bool waited_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class FakeNccl final : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  FakeNccl(BackendPtr gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size, double timeout)
      : c10d::Backend(rank, size), gloo_(std::move(gloo)), store_(std::move(store)), timeout_(timeout) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return serial_; }

  void startCoalescing() override { coalescing_ = true; coalesced_async_ = false; batch_.clear(); }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    if (batch_.empty()) return nullptr;
    auto job = std::make_shared<Job>();
    job->what = "batch of " + std::to_string(batch_.size());
    auto begun = std::move(batch_);
    batch_.clear();
    std::vector<std::function<std::function<void()>()>> starts;
    std::stable_sort(begun.begin(), begun.end(), [](auto& a, auto& b) { return a.first->outputs.size() > b.first->outputs.size(); });
    for (auto& [one, start] : begun) {  // a send is ended by the receipt that its receiver gives
      for (auto& t : one->inputs) job->inputs.push_back(t);
      for (auto& t : one->kept) job->kept.push_back(t);
      for (auto& t : one->outputs) job->outputs.push_back(t);
      for (auto& t : one->poisoned) job->poisoned.push_back(t);
      for (auto& t : one->results) job->results.push_back(t);
      for (auto& t : one->alive) job->alive.push_back(t);
      starts.push_back(start);
    }
    meet("all");
    lane("all").push([job, starts] {
      std::exception_ptr error;
      try {
        std::vector<std::function<void()>> ends;
        for (auto& start : starts) ends.push_back(start());
        for (auto& end : ends) end();
      } catch (...) { error = std::current_exception(); }
      job->finish(error);
    });
    return c10::make_intrusive<NcclWork>(job, rank_, c10d::OpType::COALESCED, std::vector<Tensor>{});
  }

  WorkPtr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    auto op = opts.reduceOp;
    TORCH_CHECK(op != c10d::ReduceOp::BAND && op != c10d::ReduceOp::BOR && op != c10d::ReduceOp::BXOR,
                "Cannot use ReduceOp.BAND/BOR/BXOR with NCCL");
    bool average = op == c10d::ReduceOp::AVG;
    auto o = opts;
    if (average) o.reduceOp = c10d::ReduceOp::SUM;
    o.asyncOp = true;
    return run("allreduce", tensors, tensors, opts.asyncOp, c10d::OpType::ALLREDUCE,
               [this, o, average](std::vector<Tensor>, std::vector<Tensor> out) {
                 auto t = out;
                 gloo_->allreduce(t, o)->wait();
                 if (average) for (auto& each : t) each.div_(size_);
               });
  }
  WorkPtr allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }
  WorkPtr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    return run("broadcast", tensors, tensors, opts.asyncOp, c10d::OpType::BROADCAST,
               [this, o](std::vector<Tensor>, std::vector<Tensor> out) { auto t = out; gloo_->broadcast(t, o)->wait(); });
  }
  WorkPtr reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    return run("reduce", tensors, tensors, opts.asyncOp, c10d::OpType::REDUCE,
               [this, o](std::vector<Tensor>, std::vector<Tensor> out) { auto t = out; gloo_->reduce(t, o)->wait(); });
  }
  WorkPtr allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                    const c10d::AllgatherOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    return run("allgather", inputs, outputs[0], opts.asyncOp, c10d::OpType::ALLGATHER,
               [this, o](std::vector<Tensor> in, std::vector<Tensor> out) {
                 std::vector<std::vector<Tensor>> lists{out};
                 gloo_->allgather(lists, in, o)->wait();
               });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    std::vector<Tensor> ins{input}, outs{output};
    return run("_allgather_base", ins, outs, opts.asyncOp, c10d::OpType::_ALLGATHER_BASE,
               [this, o](std::vector<Tensor> in, std::vector<Tensor> out) {
                 std::vector<std::vector<Tensor>> lists{{}};
                 auto flat = out[0].view({-1});
                 auto mine = in[0].contiguous().view({-1});
                 for (auto& part : flat.chunk(size_)) lists[0].push_back(part);
                 std::vector<Tensor> one{mine};
                 gloo_->allgather(lists, one, o)->wait();
               });
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    return run("allgather_into_tensor_coalesced", inputs, outputs, opts.asyncOp, c10d::OpType::COALESCED,
               [this, o](std::vector<Tensor> in, std::vector<Tensor> out) {
                 for (size_t i = 0; i < in.size(); i++) {
                   std::vector<std::vector<Tensor>> lists{{}};
                   for (auto& part : out[i].view({-1}).chunk(size_)) lists[0].push_back(part);
                   std::vector<Tensor> one{in[i].contiguous().view({-1})};
                   gloo_->allgather(lists, one, o)->wait();
                 }
               });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    bool average = opts.reduceOp == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions o;
    o.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : opts.reduceOp;
    std::vector<Tensor> ins{input}, outs{output};
    return run("_reduce_scatter_base", ins, outs, opts.asyncOp, c10d::OpType::_REDUCE_SCATTER_BASE,
               [this, o, average](std::vector<Tensor> in, std::vector<Tensor> out) {
                 auto whole = in[0].contiguous().clone();
                 std::vector<Tensor> t{whole};
                 gloo_->allreduce(t, o)->wait();
                 if (average) whole.div_(size_);
                 out[0].view({-1}).copy_(whole.view({-1}).chunk(size_)[rank_]);
               });
  }
  WorkPtr reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    c10d::AllreduceOptions o;
    o.reduceOp = opts.reduceOp;
    return run("reduce_scatter", inputs[0], outputs, opts.asyncOp, c10d::OpType::REDUCE_SCATTER,
               [this, o](std::vector<Tensor> in, std::vector<Tensor> out) {
                 for (int r = 0; r < size_; r++) {
                   std::vector<Tensor> t{in[r].clone()};
                   gloo_->allreduce(t, o)->wait();
                   if (r == rank_) out[0].copy_(t[0]);
                 }
               });
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    c10d::AllreduceOptions o;
    o.reduceOp = opts.reduceOp;
    return run("reduce_scatter_tensor_coalesced", inputs, outputs, opts.asyncOp, c10d::OpType::COALESCED,
               [this, o](std::vector<Tensor> in, std::vector<Tensor> out) {
                 for (size_t i = 0; i < in.size(); i++) {
                   std::vector<Tensor> t{in[i].contiguous().clone()};
                   gloo_->allreduce(t, o)->wait();
                   out[i].view({-1}).copy_(t[0].view({-1}).chunk(size_)[rank_]);
                 }
               });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& outs, std::vector<int64_t>& ins,
                        const c10d::AllToAllOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    std::vector<Tensor> i{input}, u{output};
    return run("alltoall_base", i, u, opts.asyncOp, c10d::OpType::ALLTOALL_BASE,
               [this, o, outs, ins](std::vector<Tensor> in, std::vector<Tensor> out) {
                 auto a = outs, b = ins;
                 gloo_->alltoall_base(out[0], in[0], a, b, o)->wait();
               });
  }
  WorkPtr gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs, const c10d::GatherOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    std::vector<Tensor> outs = rank_ == opts.rootRank ? outputs[0] : std::vector<Tensor>{};
    return run("gather", inputs, outs, opts.asyncOp, c10d::OpType::GATHER,
               [this, o](std::vector<Tensor> in, std::vector<Tensor> out) {
                 std::vector<std::vector<Tensor>> lists;
                 if (!out.empty()) lists.push_back(out);
                 gloo_->gather(lists, in, o)->wait();
               });
  }
  WorkPtr scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs, const c10d::ScatterOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    std::vector<Tensor> ins = rank_ == opts.rootRank ? inputs[0] : std::vector<Tensor>{};
    return run("scatter", ins, outputs, opts.asyncOp, c10d::OpType::SCATTER,
               [this, o](std::vector<Tensor> in, std::vector<Tensor> out) {
                 std::vector<std::vector<Tensor>> lists;
                 if (!in.empty()) lists.push_back(in);
                 gloo_->scatter(out, lists, o)->wait();
               });
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    std::vector<Tensor> token{at::zeros({1}, at::TensorOptions().device(c10::Device(at::kCUDA, current_device)))};
    c10d::AllreduceOptions o;
    o.asyncOp = opts.asyncOp;
    auto work = allreduce(token, o);
    if (!opts.asyncOp) { host_sync("barrier"); return nullptr; }
    return work;
  }
  WorkPtr send(std::vector<Tensor>& tensors, int to, int tag) override { return message(tensors, to, tag, true); }
  WorkPtr recv(std::vector<Tensor>& tensors, int from, int tag) override { return message(tensors, from, tag, false); }

 private:
  using Body = std::function<void(std::vector<Tensor>, std::vector<Tensor>)>;

  static void check(const std::vector<Tensor>& tensors) {
    for (auto& t : tensors) {
      TORCH_CHECK(t.is_cuda(), "No backend type associated with device type cpu (fakenccl)");
      TORCH_CHECK(t.is_non_overlapping_and_dense() || t.is_contiguous(), "Tensors must be contiguous");
      TORCH_CHECK(t.scalar_type() != at::kShort, "Input tensor data type is not supported for NCCL process group: Short");
    }
  }
  std::shared_ptr<Job> prepare(const std::string& name, const std::vector<Tensor>& ins, const std::vector<Tensor>& outs) {
    at::NoGradGuard no_grad;
    flush();  // what the stream waits for comes first
    auto job = std::make_shared<Job>();
    job->what = "rank " + std::to_string(rank_) + " " + name + " #" + std::to_string(++serial_);
    auto overlaps = [&](const Tensor& t) {  // all-gathers are often given a part of their output as the input
      auto* b = static_cast<const char*>(t.const_data_ptr());
      for (auto& o : outs) {
        auto* a = static_cast<const char*>(o.const_data_ptr());
        if (b < a + o.nbytes() && a < b + t.nbytes()) return true;
      }
      return false;
    };
    for (auto& t : ins) {
      job->alive.push_back(t);
      if (overlaps(t)) continue;
      job->inputs.push_back(as_cpu(t.detach()));
      job->kept.push_back(job->inputs.back().clone());
    }
    for (auto& t : outs) {
      job->alive.push_back(t);
      auto c = as_cpu(t.detach());
      job->results.push_back(c.clone());  // an all-reduce finds its input here
      job->outputs.push_back(c);
    }
    for (auto& t : job->outputs) poison(t);
    for (auto& t : job->outputs) job->poisoned.push_back(t.clone());
    return job;
  }
  WorkPtr run(const std::string& name, const std::vector<Tensor>& ins, const std::vector<Tensor>& outs, bool async,
              c10d::OpType type, Body body) {
    check(ins);
    check(outs);
    // what is sent must be read before outputs that overlap it are poisoned
    std::vector<Tensor> snapshot;
    { at::NoGradGuard no_grad; flush(); for (auto& t : ins) snapshot.push_back(as_cpu(t.detach()).clone()); }
    auto job = prepare(name, ins, outs);
    if (coalescing_) {  // NCCL's group: nothing is enqueued before its end, and nothing is returned for a single call
      batch_.emplace_back(job, [body, snapshot, job]() -> std::function<void()> {
        return [body, snapshot, job] { body(snapshot, job->results); };
      });
      return async ? WorkPtr(c10::make_intrusive<NcclWork>(finished(), rank_, type, outs)) : nullptr;
    }
    meet("all");
    lane("all").push([job, body, snapshot] {
      std::exception_ptr error;
      try { at::NoGradGuard no_grad; body(snapshot, job->results); } catch (...) { error = std::current_exception(); }
      job->finish(error);
    });
    if (!async) {  // on the current stream itself
      await_later(job);
      return nullptr;
    }
    return c10::make_intrusive<NcclWork>(job, rank_, type, outs);
  }
  std::shared_ptr<Job> finished() {
    auto job = std::make_shared<Job>();
    job->done = job->delivered = true;
    job->is_done_ = true;
    return job;
  }
  WorkPtr message(std::vector<Tensor>& tensors, int peer, int tag, bool sends) {
    check(tensors);
    std::vector<Tensor> none;
    std::string pair = std::to_string(std::min(rank_, peer)) + ":" + std::to_string(std::max(rank_, peer));
    std::vector<Tensor> snapshot;
    { at::NoGradGuard no_grad; flush(); for (auto& t : tensors) snapshot.push_back(as_cpu(t.detach()).contiguous().clone()); }
    auto job = prepare((sends ? "send to " : "recv from ") + std::to_string(peer), sends ? tensors : none, sends ? none : tensors);
    int wire = coalescing_ ? 2000 : 1000;  // batched and unbatched ones never meet
    auto start = [this, job, peer, sends, snapshot, wire]() -> std::function<void()> {
      std::vector<Tensor> data = sends ? snapshot : job->results;
      auto token = at::zeros({1}, at::kByte);
      std::vector<Tensor> receipt{token};
      auto moved = sends ? gloo_->send(data, peer, wire) : gloo_->recv(data, peer, wire);
      // a send ends only when it has been received
      auto back = sends ? gloo_->recv(receipt, peer, wire + 1) : WorkPtr();
      return [this, job, moved, back, receipt, data, peer, sends, wire]() mutable {
        moved->wait();
        if (sends) back->wait();
        else gloo_->send(receipt, peer, wire + 1)->wait();
      };
    };
    if (coalescing_) {
      batch_.emplace_back(job, start);
      return nullptr;
    }
    static const bool eager = std::getenv("GPU_SIM_EAGER") != nullptr;  // init_process_group(device_id=...): one communicator
    if (eager) pair = "all"; else meet(pair);
    lane(pair).push([job, start] {
      std::exception_ptr error;
      try { start()(); } catch (...) { error = std::current_exception(); }
      job->finish(error);
    });
    return c10::make_intrusive<NcclWork>(job, rank_, sends ? c10d::OpType::SEND : c10d::OpType::RECV, tensors);
  }
  void meet(const std::string& communicator) {  // ncclCommInitRank: blocks the host until all its ranks have come
    if (met_.count(communicator)) return;
    pybind11::gil_scoped_release* released = PyGILState_Check() ? new pybind11::gil_scoped_release : nullptr;
    std::exception_ptr error;
    try {
      int wanted = communicator == "all" ? size_ : 0;
      if (wanted > size_) wanted = size_;
      std::string key = "init/" + communicator;
      store_->add(key, 1);
      auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_);
      while (store_->add(key, 0) < wanted) {
        TORCH_CHECK(std::chrono::steady_clock::now() < until, "fakenccl: rank ", rank_, " waits to initialise communicator '",
                    communicator, "', to which only ", store_->add(key, 0), " of ", wanted, " ranks have come");
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    } catch (...) { error = std::current_exception(); }
    delete released;
    if (error) std::rethrow_exception(error);
    met_.insert(communicator);
  }
  Lane& lane(const std::string& communicator) {
    auto& found = lanes_[communicator];
    if (!found) found = new Lane;  // never ended: its thread waits
    return *found;
  }

  BackendPtr gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  double timeout_;
  uint64_t serial_ = 0;
  bool coalescing_ = false, coalesced_async_ = false;
  std::vector<std::pair<std::shared_ptr<Job>, std::function<std::function<void()>()>>> batch_;
  std::set<std::string> met_;
  std::map<std::string, Lane*> lanes_;
};

namespace c10d { namespace {
class FakeTimer final : public Timer {
 public:
  explicit FakeTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto a = getTimestamp(start), b = getTimestamp(end);
    if (!a || !b || *b < *a) return std::nullopt;
    return *b - *a;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeTimer);
} }

static void resize_storage(const Tensor& t, int64_t bytes) {
  flush();
  grow(t.storage().unsafeGetStorageImpl(), (size_t)bytes);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("current_device", [] { return (int)current_device; });
  m.def("set_device", [](int d) { current_device = (c10::DeviceIndex)d; });
  m.def("device_count", [] { return device_count(); });
  m.def("guard_asked", [] { return guard_asked.load(); });
  m.def("allocated", [] { return held.load(); });
  m.def("max_allocated", [] { return most.load(); });
  m.def("reset_peak", [] { most = held.load(); });
  m.def("flush", [] { flush(); });
  m.def("host_syncs", [] { return host_syncs.load(); });
  m.def("kernels", [] { return kernels.load(); });
  m.def("trace_syncs", [](bool on) { trace_syncs = on; });
  m.def("sync_names", [] { std::lock_guard<std::mutex> lock(syncs_mutex); auto r = sync_names; sync_names.clear(); return r; });
  m.def("synchronize", [] { host_sync("synchronize"); });
  m.def("reached", [] { return reached(); });
  m.def("wait_until", [](double at) { flush(); pybind11::gil_scoped_release release; wait_until(at); });
  m.def("races", [] { std::lock_guard<std::mutex> lock(races_mutex); return races; });
  m.def("resize_storage", &resize_storage);
  m.def("nccl", [](c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                   double timeout) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<FakeNccl>(gloo, store, rank, size, timeout);
  });
}
