// A process group with NCCL's habits. What moves the data is gloo; when it arrives, and what may not be done meanwhile,
// is as ProcessGroupNCCL has it:
// * a synchronous collective runs on the caller's stream and returns no work (torch 2.8, pytorch/pytorch#148590:
//   `return asyncOp ? work : nullptr`; distributed_c10d.py: "the backend has sync'ed at CPP level");
// * an asynchronous one runs on the communicator's own stream, which first waits for the caller's; `work.wait()` lets
//   the caller's stream wait, and returns at once (ProcessGroupNCCL.hpp, WorkNCCL::synchronize);
// * a communicator does one thing after the other, in the order of issue, which has to be the same on all its ranks
//   (NCCL user guide, "Using multiple NCCL communicators concurrently");
// * its first use is a meeting of all its ranks, for which the host waits (ncclCommInitRank), each on a GPU of its own;
// * an unbatched send or receive has a communicator of its own for each pair of ranks, unless the group was bound to a
//   device (`device_id=`); it ends when the other side has come; batched ones run together;
// * tensors of the host, int16 and bitwise reductions are refused (ProcessGroupNCCL.cpp, getNcclDataType, getNcclReduceOp).
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <set>
#include <thread>

#include "runtime.h"

using at::Tensor;
using namespace gpu_sim;

void resize_storage(const Tensor& t, int64_t bytes);
void cover_kernels(const std::vector<std::string>& operators);
Tensor generator_state(int device);
void set_generator_state(int device, const Tensor& state);
void seed_generator(int device, uint64_t seed);

static bool same_bits(const Tensor& a, const Tensor& b) {
  auto x = a.contiguous(), y = b.contiguous();
  return x.nbytes() == y.nbytes() && (x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}
static void poison(Tensor& t) {  // what a reader finds that has not waited
  if (t.numel() == 0) return;
  // Not NaN: arithmetic leaves a NaN's bits as they are, and a write would go unseen.
  if (t.is_floating_point()) t.fill_(t.scalar_type() == at::kHalf ? 12345.0 : 1.2345e30);
  else if (t.scalar_type() == at::kBool) t.fill_(true);
  else t.fill_(77);
}

// ---------------------------------------------------------------- one call, or one batch
class Call final : public Pending {
 public:
  std::string what;                      // "rank 1: all_reduce #3"
  SitePtr site;
  std::vector<Tensor> inputs, outputs;   // the user's, CPU labels
  std::vector<Tensor> sent, awaited;     // bits of the inputs at the issue; of the poisoned outputs
  std::vector<Tensor> results;           // what arrives, for each output
  std::vector<Tensor> alive;             // NCCL's work keeps its tensors until it is waited for

  void finish(std::exception_ptr error) {
    { std::lock_guard<std::mutex> lock(mutex_); error_ = error; finished_ = true; }
    changed_.notify_all();
  }
  bool done() override { return finished_; }
  void deliver() override {
    std::vector<Tensor> let_go;  // with the GIL, when the lock is free again
    WithoutGil released;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return finished_.load(); });
    if (delivered_) return;
    delivered_ = true;
    let_go.swap(alive);
    if (error_) std::rethrow_exception(error_);
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < inputs.size(); i++)
      if (!same_bits(inputs[i], sent[i])) written("its input");
    for (size_t i = 0; i < outputs.size(); i++) {
      if (!same_bits(outputs[i], awaited[i])) written("its output");
      outputs[i].copy_(results[i]);
    }
    inputs.clear();
    outputs.clear();
  }

 private:
  void written(const char* which) {
    found({"written in flight", what + " at " + site->where() + ": " + which + " was written to before it was waited for", site->where(), site->text()});
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> finished_{false};
  bool delivered_ = false;
  std::exception_ptr error_;
};

class NcclWork final : public c10d::Work {
 public:
  NcclWork(std::shared_ptr<Call> call, Event end, int rank, c10d::OpType type, std::vector<Tensor> outputs)
      : c10d::Work(rank, type, "gpu_sim:nccl"), call_(std::move(call)), end_(std::move(end)), outputs_(std::move(outputs)) {
    // Complete from the start: what is done with its value comes after the data, in the order of streams.
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{c10::Device(at::kCUDA, current_device())});
    auto before = exchange_torch_stream(as_torch_stream(call_->stream));
    future_->markCompleted(c10::IValue(outputs_));
    exchange_torch_stream(before);
  }
  ~NcclWork() override {
    if (!waited_ && !outputs_.empty())
      found({"never waited for", call_->what + " at " + call_->site->where() + ": its work was dropped without a wait", call_->site->where(), call_->site->text()});
  }
  bool isCompleted() override { return call_->done() && query(end_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { synchronize(); return true; }
  void synchronize() override { waited_ = true; block(end_, current_stream()); }
  void blockCurrentStream() override { synchronize(); }
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { waited_ = true; return future_; }

 private:
  std::shared_ptr<Call> call_;
  Event end_;
  std::vector<Tensor> outputs_;
  bool waited_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// ---------------------------------------------------------------- a communicator
class Communicator {  // a thread that does what was issued, one after the other
 public:
  explicit Communicator(int stream) : stream(stream), thread_([this] { run(); }) { thread_.detach(); }
  // Runs a call's part on its thread. After one that was given up the communicator is of no more use.
  void run_call(const std::shared_ptr<Call>& call, std::function<void()> body) {
    push([this, call, body = std::move(body)] {
      at::NoGradGuard no_grad;
      if (!broken_) try { body(); } catch (...) { broken_ = std::current_exception(); }
      call->finish(broken_);
    });
  }
  const int stream;
  Event last;  // a call waits for the one before it, also on another stream (NCCL, src/enqueue.cc: "userStream[0] waits on deviceStream")
  uint64_t issued = 0;

 private:
  void push(std::function<void()> job) {
    { std::lock_guard<std::mutex> lock(mutex_); jobs_.push_back(std::move(job)); }
    changed_.notify_one();
  }
  void run() {
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job();
    }
  }
  std::exception_ptr broken_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::thread thread_;
};

// ---------------------------------------------------------------- the group
class SimulatedNccl final : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  SimulatedNccl(BackendPtr gloo, StorePtr store, int rank, int size, std::string name)
      : c10d::Backend(rank, size), gloo_(std::move(gloo)), store_(std::move(store)), name_(std::move(name)) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return serial_; }
  void eagerConnectSingleDevice(at::Device device) override {
    set_current_device(device.index());
    eager_ = true;
    meet("all");
  }

  void startCoalescing() override { coalescing_ = true; batch_async_ = false; batch_.clear(); }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    if (batch_.empty()) return nullptr;
    auto parts = std::move(batch_);
    batch_.clear();
    meet("all");
    auto& comm = communicator("all");
    const int stream = batch_async_ ? comm.stream : current_stream();
    auto call = std::make_shared<Call>();
    call->site = parts[0].call->site;
    call->what = "rank " + std::to_string(rank_) + ": batch of " + std::to_string(parts.size());
    for (auto& part : parts) {
      auto add = [](std::vector<Tensor>& to, std::vector<Tensor>& from) { to.insert(to.end(), from.begin(), from.end()); };
      add(call->inputs, part.call->inputs); add(call->sent, part.call->sent); add(call->outputs, part.call->outputs);
      add(call->awaited, part.call->awaited); add(call->results, part.call->results); add(call->alive, part.call->alive);
    }
    std::vector<Tensor> reads, writes;
    for (auto& part : parts) { for (auto& t : part.reads) reads.push_back(t); for (auto& t : part.writes) writes.push_back(t); }
    enter(call, comm, stream, reads, writes);
    comm.run_call(call, [this, call, parts] {
      for (auto& part : parts) publish(part.expectation);
      for (auto& part : parts) meet_others(part.expectation, part.call->site);
      std::vector<std::function<void()>> ends;
      for (auto& part : parts) ends.push_back(part.start());
      for (auto& end : ends) end();
      for (size_t i = 0, at = 0; i < parts.size(); i++)
        for (auto& r : parts[i].call->results) call->results[at++] = r;
    });
    if (!batch_async_) return nullptr;
    return c10::make_intrusive<NcclWork>(call, end_of(stream), rank_, c10d::OpType::COALESCED, std::vector<Tensor>{});
  }

  WorkPtr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    const bool average = reduces(opts.reduceOp);
    auto o = opts;
    if (average) o.reduceOp = c10d::ReduceOp::SUM;
    o.asyncOp = true;
    return run("all_reduce", tensors, tensors, opts.asyncOp, c10d::OpType::ALLREDUCE, opts.reduceOp, -1,
               [this, o, average](std::vector<Tensor>, std::vector<Tensor> out) {
                 for (auto& t : out) { std::vector<Tensor> one{t}; gloo_->allreduce(one, o)->wait(); if (average) t.div_(size_); }
               });
  }
  WorkPtr allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override { return allreduce(tensors, opts); }
  WorkPtr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    return run("broadcast", tensors, tensors, opts.asyncOp, c10d::OpType::BROADCAST, {}, opts.rootRank,
               [this, o](std::vector<Tensor>, std::vector<Tensor> out) { auto t = out; gloo_->broadcast(t, o)->wait(); });
  }
  WorkPtr reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& opts) override {
    const bool average = reduces(opts.reduceOp);
    auto o = opts;
    if (average) o.reduceOp = c10d::ReduceOp::SUM;
    o.asyncOp = true;
    return run("reduce", tensors, tensors, opts.asyncOp, c10d::OpType::REDUCE, opts.reduceOp, opts.rootRank,
               [this, o, average](std::vector<Tensor>, std::vector<Tensor> out) {
                 auto t = out;
                 gloo_->reduce(t, o)->wait();
                 if (average && o.rootRank == rank_) t[0].div_(size_);
               });
  }
  WorkPtr allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    return run("all_gather", inputs, outputs[0], opts.asyncOp, c10d::OpType::ALLGATHER, {}, -1,
               [this, o](std::vector<Tensor> in, std::vector<Tensor> out) {
                 std::vector<std::vector<Tensor>> lists{out};
                 gloo_->allgather(lists, in, o)->wait();
               });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    std::vector<Tensor> ins{input}, outs{output};
    return run("all_gather", ins, outs, opts.asyncOp, c10d::OpType::_ALLGATHER_BASE, {}, -1,
               [this](std::vector<Tensor> in, std::vector<Tensor> out) { gather_flat(out[0], in[0]); });
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions& opts) override {
    return run("all_gather", inputs, outputs, opts.asyncOp, c10d::OpType::COALESCED, {}, -1,
               [this](std::vector<Tensor> in, std::vector<Tensor> out) { for (size_t i = 0; i < in.size(); i++) gather_flat(out[i], in[i]); });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    std::vector<Tensor> ins{input}, outs{output};
    return run("reduce_scatter", ins, outs, opts.asyncOp, c10d::OpType::_REDUCE_SCATTER_BASE, opts.reduceOp, -1, scatters(opts));
  }
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::ReduceScatterOptions& opts) override {
    return run("reduce_scatter", inputs, outputs, opts.asyncOp, c10d::OpType::COALESCED, opts.reduceOp, -1, scatters(opts));
  }
  WorkPtr reduce_scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs, const c10d::ReduceScatterOptions& opts) override {
    const bool average = reduces(opts.reduceOp);
    c10d::AllreduceOptions o;
    o.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : opts.reduceOp;
    return run("reduce_scatter", inputs[0], outputs, opts.asyncOp, c10d::OpType::REDUCE_SCATTER, opts.reduceOp, -1,
               [this, o, average](std::vector<Tensor> in, std::vector<Tensor> out) {
                 for (int r = 0; r < size_; r++) {
                   std::vector<Tensor> one{in[r].clone()};
                   gloo_->allreduce(one, o)->wait();
                   if (r == rank_) out[0].copy_(average ? one[0].div_(size_) : one[0]);
                 }
               });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& outs, std::vector<int64_t>& ins, const c10d::AllToAllOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    std::vector<Tensor> i{input}, u{output};
    return run("all_to_all", i, u, opts.asyncOp, c10d::OpType::ALLTOALL_BASE, {}, -1,
               [this, o, outs, ins](std::vector<Tensor> in, std::vector<Tensor> out) {
                 auto a = outs, b = ins;
                 gloo_->alltoall_base(out[0], in[0], a, b, o)->wait();
               }, ins.empty() && outs.empty());
  }
  WorkPtr alltoall(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::AllToAllOptions& opts) override {
    return run("all_to_all", inputs, outputs, opts.asyncOp, c10d::OpType::ALLTOALL, {}, -1,
               [this](std::vector<Tensor> in, std::vector<Tensor> out) {
                 std::vector<c10::intrusive_ptr<c10d::Work>> moves;
                 for (int r = 0; r < size_; r++) {
                   if (r == rank_) { out[r].copy_(in[r]); continue; }
                   std::vector<Tensor> there{in[r].contiguous()}, back{out[r]};
                   moves.push_back(gloo_->send(there, r, 3000));
                   moves.push_back(gloo_->recv(back, r, 3000));
                 }
                 for (auto& move : moves) move->wait();
               }, false);
  }
  WorkPtr gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs, const c10d::GatherOptions& opts) override {
    auto o = opts;
    o.asyncOp = true;
    std::vector<Tensor> outs = rank_ == opts.rootRank ? outputs[0] : std::vector<Tensor>{};
    return run("gather", inputs, outs, opts.asyncOp, c10d::OpType::GATHER, {}, opts.rootRank,
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
    return run("scatter", ins, outputs, opts.asyncOp, c10d::OpType::SCATTER, {}, opts.rootRank,
               [this, o](std::vector<Tensor> in, std::vector<Tensor> out) {
                 std::vector<std::vector<Tensor>> lists;
                 if (!in.empty()) lists.push_back(in);
                 gloo_->scatter(out, lists, o)->wait();
               }, true, /*by_output=*/true);
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {  // an all-reduce of one element, for which the host waits
    if (!opts.device_ids.empty()) set_current_device((c10::DeviceIndex)opts.device_ids[0]);
    std::vector<Tensor> token{at::zeros({1}, at::TensorOptions().device(c10::Device(at::kCUDA, current_device())))};
    c10d::AllreduceOptions o;
    o.asyncOp = opts.asyncOp;
    auto work = allreduce(token, o);
    if (!opts.asyncOp) host_sync("barrier");
    return work;
  }
  WorkPtr send(std::vector<Tensor>& tensors, int to, int) override { return message(tensors, to, true); }
  WorkPtr recv(std::vector<Tensor>& tensors, int from, int) override { return message(tensors, from, false); }

 private:
  using Body = std::function<void(std::vector<Tensor>, std::vector<Tensor>)>;
  struct Expectation {       // what all its ranks have to agree on
    std::string key;         // of this call, the same on all ranks
    std::string described;   // the same on all ranks, or they mismatch
    std::vector<int> ranks;  // who has to come
    std::string what;        // for people
  };
  struct Part { std::shared_ptr<Call> call; Expectation expectation; std::function<std::function<void()>()> start; std::vector<Tensor> reads, writes; };

  static bool reduces(const c10d::ReduceOp& op) {  // whether it is an average
    TORCH_CHECK(op != c10d::ReduceOp::BAND && op != c10d::ReduceOp::BOR && op != c10d::ReduceOp::BXOR, "Cannot use ReduceOp.BAND/BOR/BXOR with NCCL");
    return op == c10d::ReduceOp::AVG;
  }
  void gather_flat(Tensor& out, const Tensor& in) {
    std::vector<std::vector<Tensor>> lists{{}};
    for (auto& part : out.view({-1}).chunk(size_)) lists[0].push_back(part);
    std::vector<Tensor> one{in.contiguous().view({-1})};
    c10d::AllgatherOptions o;
    gloo_->allgather(lists, one, o)->wait();
  }
  Body scatters(const c10d::ReduceScatterOptions& opts) {
    const bool average = reduces(opts.reduceOp);
    c10d::AllreduceOptions o;
    o.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : opts.reduceOp;
    return [this, o, average](std::vector<Tensor> in, std::vector<Tensor> out) {
      for (size_t i = 0; i < in.size(); i++) {
        std::vector<Tensor> one{in[i].contiguous().clone()};
        gloo_->allreduce(one, o)->wait();
        if (average) one[0].div_(size_);
        out[i].view({-1}).copy_(one[0].view({-1}).chunk(size_)[rank_]);
      }
    };
  }
  static void check(const std::vector<Tensor>& tensors) {
    for (auto& t : tensors) {
      TORCH_CHECK(t.is_cuda(), "No backend type associated with device type cpu");
      TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      TORCH_CHECK(t.scalar_type() != at::kShort, "Input tensor data type is not supported for NCCL process group: ", t.scalar_type());
    }
  }
  std::shared_ptr<Call> prepare(const std::string& what, const std::vector<Tensor>& ins, const std::vector<Tensor>& outs, const SitePtr& site) {
    at::NoGradGuard no_grad;
    auto call = std::make_shared<Call>();
    call->site = site;
    call->what = "rank " + std::to_string(rank_) + ": " + what;
    auto overlaps = [&](const Tensor& t) {  // all-gathers are often given a part of their output as the input
      auto* b = static_cast<const char*>(t.const_data_ptr());
      for (auto& o : outs) {
        auto* a = static_cast<const char*>(o.const_data_ptr());
        if (b < a + o.nbytes() && a < b + t.nbytes()) return true;
      }
      return false;
    };
    for (auto& t : ins) {
      call->alive.push_back(t);
      if (overlaps(t)) continue;
      call->inputs.push_back(as_cpu(t.detach()));
      call->sent.push_back(call->inputs.back().clone());
    }
    for (auto& t : outs) {
      call->alive.push_back(t);
      call->outputs.push_back(as_cpu(t.detach()));
      call->results.push_back(call->outputs.back().clone());  // an all-reduce finds its input here
    }
    for (auto& t : call->outputs) poison(t);
    for (auto& t : call->outputs) call->awaited.push_back(t.clone());
    return call;
  }
  // Its place in the order of streams, and its effect on memory.
  void enter(const std::shared_ptr<Call>& call, Communicator& comm, int stream, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes) {
    if (stream == comm.stream) block(end_of(current_stream()), stream);
    if (comm.last.recorded) block(comm.last, stream);
    int64_t bytes = 0;
    for (auto& t : writes) bytes += (int64_t)t.nbytes();
    call->stream = stream;
    call->time = launch(stream, options().kernel_seconds + options().byte_seconds * (double)bytes);
    const char* what = strdup_once(call->what);
    for (auto& t : reads) touch(t, false, what, stream, call->time, call->site);
    for (auto& t : writes) touch(t, true, what, stream, call->time, call->site);
    comm.last = end_of(stream);
    enqueue(call);
  }
  static const char* strdup_once(const std::string& text) {  // records of accesses keep plain pointers
    static auto& mutex = *new std::mutex;
    static auto& kept = *new std::set<std::string>;
    std::lock_guard<std::mutex> lock(mutex);
    return kept.insert(text.substr(0, text.find(" #"))).first->c_str();
  }
  static std::vector<Tensor> snapshot(const std::vector<Tensor>& tensors) {
    at::NoGradGuard no_grad;
    std::vector<Tensor> out;
    for (auto& t : tensors) out.push_back(as_cpu(t.detach()).contiguous().clone());
    return out;
  }
  WorkPtr run(const std::string& kind, const std::vector<Tensor>& ins, const std::vector<Tensor>& outs, bool async, c10d::OpType type,
              std::optional<c10d::ReduceOp> op, int root, Body body, bool equal_sizes = true, bool by_output = false) {
    use_driver();
    check(ins);
    check(outs);
    const auto site = here();
    settle(current_stream());
    const bool batched = coalescing_;
    if (!batched) meet("all");
    auto& comm = communicator("all");
    const uint64_t number = ++comm.issued;
    serial_++;
    std::string what = kind + " #" + std::to_string(number) + " of group " + name_;
    std::string described = kind + (root >= 0 ? " root " + std::to_string(root) : "");
    if (op) described += " op " + std::to_string((int)op->op_);
    const auto& measured = by_output ? outs : ins;
    if (equal_sizes) for (auto& t : measured) described += " " + std::to_string(t.numel());
    for (auto& t : measured) { described += std::string(" ") + c10::toString(t.scalar_type()); if (equal_sizes) continue; break; }
    std::vector<int> all(size_);
    for (int r = 0; r < size_; r++) all[r] = r;
    Expectation expectation{"all/" + std::to_string(number), described, all, what};
    auto data = snapshot(ins);  // before outputs that overlap them are poisoned
    auto call = prepare(what, ins, outs, site);
    if (batched) {  // NCCL's group: nothing is enqueued before its end, and nothing is returned for a single call
      batch_async_ |= async;
      batch_.push_back(Part{call, expectation, [call, body, data]() -> std::function<void()> { return [call, body, data] { body(data, call->results); }; }, ins, outs});
      return async ? WorkPtr(c10::make_intrusive<NcclWork>(finished(site), end_of(current_stream()), rank_, type, std::vector<Tensor>{})) : nullptr;
    }
    const int stream = async ? comm.stream : current_stream();
    enter(call, comm, stream, ins, outs);
    comm.run_call(call, [this, call, body, data, expectation] {
      publish(expectation);
      meet_others(expectation, call->site);
      body(data, call->results);
    });
    return async ? WorkPtr(c10::make_intrusive<NcclWork>(call, end_of(stream), rank_, type, outs)) : nullptr;
  }
  static std::shared_ptr<Call> finished(const SitePtr& site) {
    auto call = std::make_shared<Call>();
    call->site = site;
    call->stream = current_stream();
    call->finish(nullptr);
    return call;
  }
  WorkPtr message(std::vector<Tensor>& tensors, int peer, bool sends) {
    use_driver();
    check(tensors);
    const auto site = here();
    settle(current_stream());
    std::string pair = eager_ ? "all" : std::to_string(std::min(rank_, peer)) + "-" + std::to_string(std::max(rank_, peer));
    const int from = sends ? rank_ : peer, to = sends ? peer : rank_;
    const std::string lane = coalescing_ ? "batched" : pair;  // a batched message and an unbatched one never meet
    std::string channel = lane + "/" + std::to_string(from) + ">" + std::to_string(to);
    std::string what = std::string(sends ? "send to " : "recv from ") + std::to_string(peer) + " #" + std::to_string(++messages_[channel]) + " of group " + name_;
    Expectation expectation{channel + "/" + std::to_string(messages_[channel]),
                            "message " + std::to_string(tensors[0].numel()) + " " + c10::toString(tensors[0].scalar_type()), {from, to}, what};
    std::vector<Tensor> none, data = snapshot(tensors);
    auto call = prepare(what, sends ? tensors : none, sends ? none : tensors, site);
    const int wire = coalescing_ ? 2000 : 1000;
    auto start = [this, call, peer, sends, data, wire]() -> std::function<void()> {
      std::vector<Tensor> moved = sends ? data : call->results;
      auto work = sends ? gloo_->send(moved, peer, wire) : gloo_->recv(moved, peer, wire);
      return [work, moved] { work->wait(); };
    };
    if (coalescing_) {
      batch_async_ = true;
      batch_.push_back(Part{call, expectation, start, sends ? tensors : none, sends ? none : tensors});
      return nullptr;
    }
    meet(pair);
    auto& comm = communicator(pair);
    enter(call, comm, comm.stream, sends ? tensors : none, sends ? none : tensors);
    comm.run_call(call, [this, call, start, expectation] {
      publish(expectation);
      meet_others(expectation, call->site);  // a send ends when it has been received
      start()();
    });
    return c10::make_intrusive<NcclWork>(call, end_of(comm.stream), rank_, sends ? c10d::OpType::SEND : c10d::OpType::RECV, tensors);
  }

  // ------------------------------------------------ meetings
  static std::vector<uint8_t> bytes(const std::string& s) { return {s.begin(), s.end()}; }
  static std::string text(const std::vector<uint8_t>& v) { return {v.begin(), v.end()}; }
  static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
  StorePtr lane_store() {  // a connection of the thread's own: a wait on a shared one would keep all others out
    thread_local std::map<const void*, StorePtr> own;
    auto& mine = own[this];
    if (!mine) mine = store_->clone();
    return mine;
  }
  void publish(const Expectation& e) {
    auto store = lane_store();
    store->set("at/" + std::to_string(rank_), bytes(e.what));
    store->set(e.key + "/" + std::to_string(rank_), bytes(e.described));
  }
  void meet_others(const Expectation& e, const SitePtr& site) {
    auto store = lane_store();
    const double until = now() + options().timeout;
    for (int other : e.ranks) {
      if (other == rank_) continue;
      const std::string key = e.key + "/" + std::to_string(other);
      for (int tries = 0; !store->check({key}); tries++) {
        if (now() > until) {
          std::string at = "at/" + std::to_string(other);
          std::string doing = store->check({at}) ? "is at, or past, its " + text(store->get(at)) : "has called nothing of this group";
          std::string said = "rank " + std::to_string(rank_) + " waits in " + e.what + " at " + site->where() + " for rank " + std::to_string(other) + ", which " + doing;
          found({"nobody came", said, site->where(), site->text()});
          TORCH_CHECK(false, "NCCL would hang: ", said);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(tries < 200 ? 50 : 1000));
      }
      const std::string theirs = text(store->get(key));
      if (theirs == e.described) continue;
      const std::string site_key = e.key + "/site/";
      store->set(site_key + std::to_string(rank_), bytes(site->where() + "\n" + site->text()));
      std::string there = "?", stack;
      for (double end = now() + 5; now() < end;) {
        if (store->check({site_key + std::to_string(other)})) {
          stack = text(store->get(site_key + std::to_string(other)));
          there = stack.substr(0, stack.find('\n'));
          break;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      std::string said = "rank " + std::to_string(rank_) + " called " + e.described + " at " + site->where() + " as " + e.what + ", rank " +
                         std::to_string(other) + " " + theirs + " at " + there;
      found({"mismatch", said, site->where(), site->text() + "--- and rank " + std::to_string(other) + " ---\n" + stack});
      while (!options().raise_on_mismatch && now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      TORCH_CHECK(false, "NCCL would hang: ", said);
    }
  }
  void meet(const std::string& pair) {  // ncclCommInitRank: the host waits until all its ranks have come
    if (!met_.insert(pair).second) return;
    const auto site = here();
    WithoutGil released;
    const std::string key = "init/" + pair + "/";
    const int first = pair == "all" ? 0 : std::atoi(pair.c_str()), last = pair == "all" ? size_ - 1 : std::atoi(pair.c_str() + pair.find('-') + 1);
    std::vector<int> ranks;
    if (pair == "all") for (int r = 0; r < size_; r++) ranks.push_back(r); else ranks = {first, last};
    auto store = lane_store();
    store->set(key + std::to_string(rank_), bytes(std::to_string(current_device())));
    const double until = now() + options().timeout;
    std::map<std::string, int> taken;
    for (int r : ranks) {
      while (!store->check({key + std::to_string(r)})) {
        if (now() > until) {
          std::string said = "rank " + std::to_string(rank_) + " waits to initialise the communicator " + pair + " of group " + name_ + " at " + site->where() +
                             ", to which rank " + std::to_string(r) + " does not come";
          found({"nobody came", said, site->where(), site->text()});
          TORCH_CHECK(false, "NCCL would hang: ", said);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      const std::string device = text(store->get(key + std::to_string(r)));
      auto [at, is_new] = taken.try_emplace(device, r);
      if (!is_new) {
        std::string said = "Duplicate GPU detected : rank " + std::to_string(r) + " and rank " + std::to_string(at->second) + " both on CUDA device " + device;
        found({"duplicate GPU", said, site->where(), site->text()});
        TORCH_CHECK(false, "NCCL error: ncclInvalidUsage: ", said);
      }
    }
  }
  Communicator& communicator(const std::string& pair) {
    auto& one = communicators_[pair];
    if (!one) one = new Communicator(new_stream(current_device()));  // never ended: its thread waits
    return *one;
  }

  BackendPtr gloo_;
  StorePtr store_;
  std::string name_;
  uint64_t serial_ = 0;
  bool coalescing_ = false, batch_async_ = false, eager_ = false;
  std::vector<Part> batch_;
  std::set<std::string> met_;
  std::map<std::string, Communicator*> communicators_;
  std::map<std::string, uint64_t> messages_;
};

// ---------------------------------------------------------------- for Python
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &device_count);
  m.def("cover_kernels", &cover_kernels);
  m.def("current_device", [] { return (int)current_device(); });
  m.def("set_device", [](int d) { set_current_device((c10::DeviceIndex)d); });
  m.def("use_driver", &use_driver);
  m.def("driver_used", &driver_used);
  m.def("stream", [](int device) { auto s = torch_stream((c10::DeviceIndex)device); return std::make_tuple((int64_t)s.id(), (int)s.device_index()); });
  m.def("set_stream", [](int device, int64_t id) {
    return (int64_t)exchange_torch_stream(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, (c10::DeviceIndex)device), id)).id(); });
  m.def("synchronize", [] { synchronize_all("synchronize"); });
  m.def("allocated", [](int d) { return allocated((c10::DeviceIndex)d); });
  m.def("max_allocated", [](int d) { return most_allocated((c10::DeviceIndex)d); });
  m.def("reset_peak", [](int d) { reset_most_allocated((c10::DeviceIndex)d); });
  m.def("limit_memory", &limit_memory);
  m.def("allocations", [](int d) { return allocations((c10::DeviceIndex)d); });
  m.def("kernels", [] { return kernels.load(); });
  m.def("host_syncs", [] { return host_syncs.load(); });
  m.def("trace_syncs", &trace_syncs);
  m.def("traced_syncs", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> out;
    for (auto& sync : traced_syncs()) out.emplace_back(sync.what, sync.site->where(), sync.site->text());
    return out;
  });
  m.def("sync_debug_mode", [] { return sync_debug_mode.load(); });
  m.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });
  m.def("elapsed_ms", [](int64_t a, int64_t b) {  // cudaEventElapsedTime
    auto *start = reinterpret_cast<Event*>(a), *end = reinterpret_cast<Event*>(b);
    TORCH_CHECK(start && end, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(query(*start) && query(*end), "CUDA error: device not ready");
    return (end->at - start->at) * 1e3;
  });
  m.def("findings", [] {
    std::vector<std::tuple<std::string, std::string, std::string, std::string>> out;
    for (auto& f : findings()) out.emplace_back(f.kind, f.text, f.where, f.other);
    return out;
  });
  m.def("forget_findings", &forget_findings);
  m.def("resize_storage", &resize_storage);
  m.def("generator_state", &generator_state);
  m.def("set_generator_state", &set_generator_state);
  m.def("seed_generator", &seed_generator);
  m.def("nccl", [](c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& name)
        -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<SimulatedNccl>(gloo, store, rank, size, name); });
}
