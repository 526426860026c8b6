// The device: its guard, its memory, and one kernel for every operator, which runs the CPU's on the same memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <map>
#include <set>

#include "runtime.h"

using at::Tensor;
using namespace gpu_sim;

// ---------------------------------------------------------------- the guard: current device, streams, events
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override { auto before = getDevice(); set_current_device(d.index()); return before; }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, current_device()); }
  void setDevice(c10::Device d) const override { set_current_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { set_current_device(d.index()); }
  c10::Stream getStream(c10::Device d) const override { return torch_stream(d.index()); }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, d.index() < 0 ? current_device() : d.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return as_torch_stream(new_stream(d.index() < 0 ? current_device() : d.index()));
  }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStreamFromGlobalPool(d, false); }
  c10::Stream exchangeStream(c10::Stream s) const override { return exchange_torch_stream(s); }
  // cudaGetDeviceCount initialises the driver; autograd asks for it at a process's first backward (engine.cpp,
  // start_device_threads), and from then on a fork has no backward of its own, whatever device it is on.
  c10::DeviceIndex deviceCount() const noexcept override { use_driver_quietly(); return (c10::DeviceIndex)device_count(); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    gpu_sim::record(*static_cast<Event*>(*event), stream_of(s.device_index(), s.id()));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) gpu_sim::block(*static_cast<Event*>(event), stream_of(s.device_index(), s.id()));
  }
  bool queryEvent(void* event) const override { return !event || query(*static_cast<Event*>(event)); }
  bool queryStream(const c10::Stream& s) const override { return query(end_of(stream_of(s.device_index(), s.id()))); }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(end_of(stream_of(s.device_index(), s.id())), "stream.synchronize"); }
  void synchronizeEvent(void* event) const override { if (event) synchronize(*static_cast<Event*>(event), "event.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all("synchronize"); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override { used_on(data.get(), stream_of(s.device_index(), s.id())); }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    TORCH_CHECK(a && b, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(query(*static_cast<Event*>(a)) && query(*static_cast<Event*>(b)), "CUDA error: device not ready");  // cudaErrorNotReady
    return (static_cast<Event*>(b)->at - static_cast<Event*>(a)->at) * 1e3;
  }
  static void use_driver_quietly() { try { use_driver(); } catch (...) { /* noexcept: the next real use raises */ } }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ---------------------------------------------------------------- memory
struct DeviceAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Device device(c10::DeviceType::CUDA, current_device());
    if (!n) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    void* p = gpu_sim::allocate(n, device.index());
    return {p, p, &drop, device};
  }
  static void drop(void* p) { release(p, [p] { std::free(p); }); }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};
static DeviceAllocator& allocator = *new DeviceAllocator;
static const bool allocator_set = [] { c10::SetAllocator(c10::DeviceType::CUDA, &allocator); return true; }();

static auto& pinned_mutex = *new std::mutex;
static auto& pinned = *new std::map<const char*, size_t>;
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
static PinnedAllocator& pinned_allocator = *new PinnedAllocator;
bool gpu_sim::is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto at = pinned.upper_bound((const char*)data);
  if (at == pinned.begin()) return false;
  --at;
  return (const char*)data < at->first + at->second;
}

// Each GPU has a random stream of its own: a generator of the CPU's kind, put in the CPU's place while a kernel draws.
static auto& generators_mutex = *new std::mutex;
static at::Generator& generator_of(c10::DeviceIndex device) {
  static auto& all = *new std::map<int, at::Generator>;
  auto at = all.find(device);
  if (at == all.end()) at = all.emplace(device, at::detail::createCPUGenerator(67280421310721ULL)).first;  // c10's default seed
  return at->second;
}
class DrawsFrom {
 public:
  explicit DrawsFrom(c10::DeviceIndex device) : lock_(generators_mutex), own_(generator_of(device)), cpu_(at::detail::getDefaultCPUGenerator()),
      before_(cpu_.get_state()) { cpu_.set_state(own_.get_state()); }
  ~DrawsFrom() { own_.set_state(cpu_.get_state()); cpu_.set_state(before_); }
 private:
  std::lock_guard<std::mutex> lock_;
  at::Generator& own_;
  at::Generator cpu_;
  Tensor before_;
};

struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return driver_used(); }
  c10::DeviceIndex current_device() const override { return gpu_sim::current_device(); }
  c10::DeviceIndex deviceCount() const override { return (c10::DeviceIndex)device_count(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return gpu_sim::current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { auto b = gpu_sim::current_device(); set_current_device(d); return b; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  int getNumGPUs() const override { return device_count(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(at::kCUDA, gpu_sim::current_device()); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    std::lock_guard<std::mutex> lock(generators_mutex);
    return generator_of(d < 0 ? gpu_sim::current_device() : d);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { synchronize_all("synchronize"); }
};
namespace at {  // before those of a torch that is built for CUDA
using ::CUDAHooks;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}

// ---------------------------------------------------------------- labels
Tensor gpu_sim::as_cpu(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto options = t.options().device(at::kCPU).pinned_memory(false);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), options);
}
struct Adopted { Tensor owner; void* start; };
static Tensor as_cuda(const Tensor& c, c10::DeviceIndex index) {  // what a CPU kernel has made is memory of the device
  if (!c.defined() || c.is_cuda()) return c;
  auto storage = c.storage();
  c10::Device device(c10::DeviceType::CUDA, index);
  void* start = storage.mutable_data();
  c10::DataPtr data(nullptr, device);
  if (start) {
    adopt(start, storage.nbytes(), index);
    data = c10::DataPtr(start, new Adopted{c, start}, [](void* kept) {
      auto* adopted = static_cast<Adopted*>(kept);
      release(adopted->start, [adopted] { delete adopted; });
    }, device);
  }
  auto impl = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), &allocator, true);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(impl), c10::DispatchKeySet(c10::DispatchKey::CUDA), c.dtype());
  t.unsafeGetTensorImpl()->set_storage_offset(c.storage_offset());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(c.sizes(), c.strides());
  return t;
}

// ---------------------------------------------------------------- every kernel
// Those whose result's shape depends on values: CUDA's copy a number to the host (aten/src/ATen/native/cuda/Nonzero.cu …).
static const std::set<std::string>& shaped_by_values() {
  static const auto& names = *new std::set<std::string>{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
      "aten::repeat_interleave.Tensor", "aten::bincount", "aten::_local_scalar_dense", "aten::multinomial"};
  return names;
}
static bool writes_to(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (!alias) return false;
  if (alias->isWrite()) return true;
  for (auto& inner : alias->containedTypes()) if (inner.isWrite()) return true;
  return false;
}
static void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  use_driver();
  const int stream = current_stream();
  settle(stream);
  kernels++;
  const uint64_t time = launch(stream, options().kernel_seconds);
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t n = schema.arguments().size();
  const auto site = here();
  auto begin = stack->end() - n;
  std::vector<c10::IValue> original(begin, stack->end());
  c10::DeviceIndex index = current_device();
  bool has_cuda = false, has_cpu = false, has_mask = false;
  const bool fused = name.find("_fused_") != std::string::npos, indexes = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
  auto look = [&](const Tensor& t, bool writes) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      has_cuda = true;
      index = t.get_device();
      touch(t, writes, name.c_str(), stream, time, site);
      TORCH_CHECK(t.numel() == 0 || t.const_data_ptr() != nullptr, "CUDA error: an illegal memory access was encountered (", name, " of a storage of no bytes)");
    } else if (t.is_cpu() && (t.dim() > 0 || fused)) {
      has_cpu = true;  // numbers may lie on the host, except for the fused optimizers' steps (torch/optim/adam.py)
    }
  };
  for (size_t i = 0; i < n; i++) {
    auto& v = *(begin + i);
    const bool writes = writes_to(schema.arguments()[i]);
    if (v.isTensor()) { look(v.toTensor(), writes); v = c10::IValue(as_cpu(v.toTensor())); }
    else if (v.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) { look(t, writes); list.push_back(as_cpu(t)); }
      v = c10::IValue(list);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : v.toOptionalTensorList()) {
        if (t) { look(*t, writes); has_mask |= t->defined() && t->scalar_type() == at::kBool; }
        list.push_back(t ? std::optional<Tensor>(as_cpu(*t)) : std::nullopt);
      }
      v = c10::IValue(list);
    } else if (v.isDevice() && v.toDevice().is_cuda()) {
      if (v.toDevice().index() >= 0) index = v.toDevice().index();
      v = c10::IValue(c10::Device(at::kCPU));
    }
  }
  if (has_cuda && has_cpu && !indexes)
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", name, " was given tensors on cuda:", (int)index, " and on cpu");
  std::string full = schema.overload_name().empty() ? name : name + "." + schema.overload_name();
  // A mask as an index asks for nonzero, which index.Tensor calls by itself; index_put_ of one number needs none (TensorAdvancedIndexing.cpp).
  const bool puts_by_mask = has_mask && name.find("index_put") != std::string::npos && original[2].toTensor().numel() > 1;
  if (shaped_by_values().count(full) || shaped_by_values().count(name) || puts_by_mask) host_sync(full.c_str());
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    DrawsFrom gpu(index);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  const auto& returns = schema.returns();
  auto out = stack->end() - returns.size();
  auto fresh = [&](const Tensor& made) {
    Tensor t = as_cuda(made, index);
    touch(t, true, name.c_str(), stream, time, site);
    return t;
  };
  for (size_t i = 0; i < returns.size(); i++) {
    auto& v = *(out + i);
    const auto* alias = returns[i].alias_info();
    bool same = false;
    if (alias && alias->isWrite()) {
      for (size_t a = 0; a < n && !same; a++) {
        const auto* theirs = schema.arguments()[a].alias_info();
        if (!theirs || !(*theirs == *alias)) continue;
        if (v.isTensor() && original[a].isTensor()) {
          const Tensor &before = original[a].toTensor(), &after = v.toTensor();
          if (before.is_cuda() && before.sizes() != after.sizes()) {  // out= was resized
            before.unsafeGetTensorImpl()->set_storage_keep_dtype(as_cuda(after, index).storage());
            before.unsafeGetTensorImpl()->set_storage_offset(after.storage_offset());
            before.unsafeGetTensorImpl()->set_sizes_and_strides(after.sizes(), after.strides());
          }
        }
        v = original[a];
        same = true;
      }
    }
    if (same) continue;
    if (v.isTensor()) v = c10::IValue(fresh(v.toTensor()));
    else if (v.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(fresh(t));
      v = c10::IValue(list);
    }
  }
}

// ---------------------------------------------------------------- what makes, copies and views
static c10::DispatchKeySet cuda_key(c10::DispatchKey::CUDA);
struct OnDevice {
  explicit OnDevice(std::optional<c10::Device> d) : before(current_device()) { if (d && d->index() >= 0) set_current_device(d->index()); }
  ~OnDevice() { set_current_device(before); }
  c10::DeviceIndex before;
};
static at::ScalarType dtype_of(std::optional<at::ScalarType> dtype) { return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())); }
static Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                  std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice there(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, cuda_key, dtype_of(dtype), format);
}
static Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice there(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, cuda_key, dtype_of(dtype));
}

// A copy between the device and pinned memory goes on while the host does: what arrives on the host is garbage until
// the host has waited; what leaves the host must not be changed before.
struct HostCopy final : public Pending {
  Tensor host, value;  // host: to be filled, or, of one that leaves the host, its bits at the start
  bool arrives;
  std::string where;
  bool done() override { return true; }
  void deliver() override {
    at::NoGradGuard no_grad;
    if (arrives) host.copy_(value);
    else if (std::memcmp(host.const_data_ptr(), value.const_data_ptr(), value.nbytes()))
      found({"written in flight", "pinned memory was written to while it was being copied to the device, at " + where, where, ""});
  }
};
static Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  use_driver();
  const int stream = current_stream();
  settle(stream);
  kernels++;
  const auto site = here();
  const uint64_t time = launch(stream, options().kernel_seconds);
  touch(src, false, "copy_", stream, time, site);
  touch(self, true, "copy_", stream, time, site);
  const bool crosses = self.is_cuda() != src.is_cuda() && self.numel();
  const Tensor& host = self.is_cuda() ? src : self;
  const bool runs_on = crosses && non_blocking && is_pinned(host.const_data_ptr());  // with pageable memory cudaMemcpyAsync waits
  Tensor there = as_cpu(self), from = as_cpu(src);
  if (runs_on && host.is_contiguous()) {
    auto copy = std::make_shared<HostCopy>();
    copy->stream = stream;
    copy->time = time;
    copy->arrives = !self.is_cuda();
    copy->host = host.detach();
    copy->where = site->where();
    at::NoGradGuard no_grad;
    if (copy->arrives) {
      copy->value = from.detach().to(self.scalar_type(), false, true);
      std::memset(self.mutable_data_ptr(), 0x5b, self.nbytes());
    } else {
      copy->value = host.detach().clone();
      there.copy_(from);
    }
    enqueue(copy);
    return self;
  }
  if (crosses) host_sync(self.is_cuda() ? "copy host to device" : "copy device to host");
  there.copy_(from);
  return self;
}
static Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) { Tensor d = dst; copy_(d, self, non_blocking); return dst; }
static Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) { dst.resize_(self.sizes()); return copy_from(self, dst, false); }
static at::Scalar local_scalar(const Tensor& self) {
  const int stream = current_stream();
  settle(stream);
  touch(self, false, "item", stream, launch(stream, 0), here());
  host_sync("item");
  return as_cpu(self).item();
}
static void grow(c10::StorageImpl* storage, size_t bytes) {
  OnDevice there(storage->device());
  auto fresh = allocator.allocate(bytes);
  size_t kept = std::min(bytes, (size_t)storage->nbytes());
  if (kept) std::memcpy(fresh.get(), storage->mutable_data(), kept);
  storage->set_data_ptr(std::move(fresh));
  storage->set_nbytes(bytes);
}
static const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t need = (self.storage_offset() + self.numel()) * self.element_size();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (need > storage->nbytes()) grow(storage, need);
  return self;
}
static Tensor as_strided_of(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
static Tensor view_of(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
static Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
static Tensor unfold_of(const Tensor& self, int64_t d, int64_t size, int64_t step) { return at::native::unfold(self, d, size, step); }
static Tensor& set_on(Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}
static Tensor& set_source(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return set_on(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
static Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t n = (int64_t)(source.nbytes() / self.element_size());
  return set_on(self, std::move(source), 0, {n}, {1});
}
static Tensor& set_tensor(Tensor& self, const Tensor& source) { return set_on(self, source.storage(), source.storage_offset(), source.sizes(), source.strides()); }
static Tensor& set_nothing(Tensor& self) {
  return set_on(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0, {0}, {1});
}
static void record_stream(Tensor& self, at::Stream s) {
  if (self.numel()) used_on(self.const_data_ptr(), stream_of(s.device_index(), s.id()));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
static const std::set<std::string> own = {
  "aten::empty.memory_format", "aten::empty_strided", "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize",
  "aten::_local_scalar_dense", "aten::resize_", "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold",
  "aten::set_.source_Storage_storage_offset", "aten::set_.source_Storage", "aten::set_.source_Tensor", "aten::set_",
  "aten::record_stream"};
// A torch that is built for CUDA has kernels of its own, which come before the fallback.
void cover_kernels(const std::vector<std::string>& operators) {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(nullptr);  // it asks the driver
  static auto& libraries = *new std::map<std::string, torch::Library>;
  for (const auto& name : operators) {
    auto at = name.find("::");
    if (own.count(name) || at == std::string::npos || name.substr(0, at) == "c10d") continue;
    auto space = name.substr(0, at);
    auto library = libraries.try_emplace(space, torch::Library::IMPL, space, c10::DispatchKey::CUDA, __FILE__, __LINE__).first;
    library->second.impl(name.substr(at + 2).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
  }
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided_of);
  m.impl("view", view_of);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold_of);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
}

namespace c10d { namespace {  // DDP's reducer times itself on the device
class DeviceTimer final : public Timer {
 public:
  explicit DeviceTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto a = getTimestamp(start), b = getTimestamp(end);
    return a && b && *b >= *a ? std::optional<int64_t>(*b - *a) : std::nullopt;
  }
};
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, DeviceTimer);
} }

void resize_storage(const Tensor& t, int64_t bytes) {
  settle(current_stream());
  grow(t.storage().unsafeGetStorageImpl(), (size_t)bytes);
}
Tensor generator_state(int device) { std::lock_guard<std::mutex> lock(generators_mutex); return generator_of((c10::DeviceIndex)device).get_state(); }
void set_generator_state(int device, const Tensor& state) { std::lock_guard<std::mutex> lock(generators_mutex); generator_of((c10::DeviceIndex)device).set_state(state); }
void seed_generator(int device, uint64_t seed) { std::lock_guard<std::mutex> lock(generators_mutex); generator_of((c10::DeviceIndex)device).set_current_seed(seed); }
