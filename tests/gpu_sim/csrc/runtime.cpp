#include "runtime.h"

#include <pthread.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace gpu_sim {

// ---------------------------------------------------------------- where in Python
namespace {
struct Code { std::string file, function; };
const Code& code_of(PyCodeObject* code) {  // with the GIL; codes are kept, so that their addresses stay theirs
  static std::unordered_map<PyCodeObject*, Code> known;
  auto at = known.find(code);
  if (at != known.end()) return at->second;
  Py_INCREF(code);
  auto text = [](PyObject* s) { const char* c = PyUnicode_AsUTF8(s); return std::string(c ? c : "?"); };
  return known.emplace(code, Code{text(code->co_filename), text(code->co_name)}).first->second;
}
PyFrameObject* frame_of_main_thread() {  // a new reference, or null
  static const unsigned long main_thread = [] {
    PyObject* threading = PyImport_ImportModule("threading");
    PyObject* thread = PyObject_CallMethod(threading, "main_thread", nullptr);
    PyObject* ident = PyObject_GetAttrString(thread, "ident");
    unsigned long found = PyLong_AsUnsignedLong(ident);
    Py_XDECREF(ident); Py_XDECREF(thread); Py_XDECREF(threading);
    return found;
  }();
  for (auto* state = PyInterpreterState_ThreadHead(PyInterpreterState_Main()); state; state = PyThreadState_Next(state))
    if (state->thread_id == main_thread) return PyThreadState_GetFrame(state);
  return nullptr;
}
bool installed(const std::string& file) {
  return file.find("site-packages") != std::string::npos || file.find("/lib/python3") != std::string::npos ||
         file.find("gpu_sim/__init__") != std::string::npos || (!file.empty() && file[0] == '<' && file.find("ipython") == std::string::npos);
}
}  // namespace

SitePtr here() {
  static const SitePtr nowhere = std::make_shared<Site>();
  if (!Py_IsInitialized()) return nowhere;
  auto state = PyGILState_Ensure();
  auto site = std::make_shared<Site>();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  if (!frame) frame = frame_of_main_thread();
  while (frame && site->frames.size() < 48) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const Code& known = code_of(code);
    site->frames.push_back({&known.file, &known.function, PyFrame_GetLineNumber(frame)});
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyGILState_Release(state);
  return site;
}
std::string Site::text() const {
  std::string out;
  for (auto at = frames.rbegin(); at != frames.rend(); ++at)
    out += "  File \"" + *at->file + "\", line " + std::to_string(at->line) + ", in " + *at->function + "\n";
  return out;
}
std::string Site::where() const {
  for (auto& frame : frames)
    if (!installed(*frame.file)) return *frame.file + ":" + std::to_string(frame.line);
  return frames.empty() ? "?" : *frames[0].file + ":" + std::to_string(frames[0].line);
}

// ---------------------------------------------------------------- what was found
namespace {
auto& findings_mutex = *new std::mutex;
// Never destroyed, like all state here: tensors are let go of after the process's last line.
auto& all_findings = *new std::vector<Finding>;
auto& known_findings = *new std::set<std::string>;
}  // namespace
void found(Finding finding) {
  std::lock_guard<std::mutex> lock(findings_mutex);
  if (!known_findings.insert(finding.kind + finding.where + finding.text).second) return;
  if (std::getenv("GPU_SIM_SAY")) std::fprintf(stderr, "gpu_sim: %s: %s\n", finding.kind.c_str(), finding.text.c_str());
  all_findings.push_back(std::move(finding));
}
std::vector<Finding> findings() { std::lock_guard<std::mutex> lock(findings_mutex); return all_findings; }
void forget_findings() { std::lock_guard<std::mutex> lock(findings_mutex); all_findings.clear(); known_findings.clear(); }

// ---------------------------------------------------------------- options
const Options& options() {
  static const Options chosen = [] {
    auto number = [](const char* name, double otherwise) { const char* s = std::getenv(name); return s && *s ? std::atof(s) : otherwise; };
    const char* mismatch = std::getenv("GPU_SIM_ON_MISMATCH");
    double link = number("GPU_SIM_LINK_GBS", 0);
    return Options{number("GPU_SIM_KERNEL_US", 0) * 1e-6, link > 0 ? 1e-9 / link : 0, number("GPU_SIM_EARLY", 0),
                   (uint64_t)number("GPU_SIM_SEED", 0), number("GPU_SIM_TIMEOUT", 60), mismatch && std::string(mismatch) == "raise"};
  }();
  return chosen;
}
int device_count() {  // as torch.cuda.device_count has it: GPUs, of which CUDA_VISIBLE_DEVICES may show fewer
  const char *n = std::getenv("GPU_SIM"), *shown = std::getenv("CUDA_VISIBLE_DEVICES");
  int count = n ? std::atoi(n) : 0;
  if (!shown) return count;
  int listed = 0;
  for (const char* at = shown; *at; at++) {
    if (!std::isdigit(*at) || std::atoi(at) >= count) break;  // it ends at the first that is not there
    listed++;
    while (std::isdigit(at[1])) at++;
    if (at[1] == ',') at++;
  }
  return listed;
}

// ---------------------------------------------------------------- the driver
namespace {
std::atomic<bool> used{false};
bool lost = false;  // "CUDA error: initialization error": a driver does not survive a fork (CUDA C++ Programming Guide, 3.2.9)
const bool watching_forks = [] { pthread_atfork(nullptr, nullptr, [] { lost = used; }); return true; }();
}  // namespace
void use_driver() {
  TORCH_CHECK(!lost, "CUDA error: initialization error (the driver was used before this process was forked)");
  used = true;
}
bool driver_used() { return used; }

// ---------------------------------------------------------------- streams and events
namespace {
struct Stream { c10::DeviceIndex device; int64_t id; Clock seen; uint64_t issued = 0; double until = 0; };
auto& mutex = *new std::mutex;  // of all that follows; nobody takes the GIL, or lets a tensor go, while holding it
auto& streams = *new std::deque<Stream>;
auto& numbers = *new std::map<std::pair<int, int64_t>, int>;
std::atomic<int64_t> next_id{1};
auto& host = *new Clock;  // what the host knows to have happened
auto& graveyard = *new std::vector<std::function<void()>>;
auto& pending = *new std::deque<std::shared_ptr<Pending>>;
std::atomic<bool> any_pending{false};
thread_local c10::DeviceIndex device_now = 0;
thread_local std::map<int, int64_t> stream_now;

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void sleep_until(double time) {
  double left = time - now();
  if (options().kernel_seconds + options().byte_seconds <= 0 || left <= 0) return;
  WithoutGil released;
  std::this_thread::sleep_for(std::chrono::duration<double>(left));
}
int number_of(c10::DeviceIndex device, int64_t id) {  // under the mutex
  auto [at, is_new] = numbers.try_emplace({device, id}, (int)streams.size());
  if (is_new) streams.push_back(Stream{device, id});
  return at->second;
}
std::vector<std::shared_ptr<Pending>> covered(const Clock& clock) {  // under the mutex
  std::vector<std::shared_ptr<Pending>> out;
  for (auto& work : pending) if (happened(clock, work->stream, work->time)) out.push_back(work);
  return out;
}
void deliver(const std::vector<std::shared_ptr<Pending>>& works) {
  for (auto& work : works) {
    work->deliver();
    std::shared_ptr<Pending> gone;
    std::lock_guard<std::mutex> lock(mutex);
    auto at = std::find(pending.begin(), pending.end(), work);
    if (at != pending.end()) { gone = std::move(*at); pending.erase(at); }
    any_pending = !pending.empty();
  }
  std::vector<std::function<void()>> burials;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!any_pending) burials.swap(graveyard);
  }
  for (auto& bury : burials) bury();
}
}  // namespace

bool happened(const Clock& clock, int stream, uint64_t time) { return (size_t)stream < clock.size() && clock[stream] >= time; }
int stream_of(c10::DeviceIndex device, int64_t id) { std::lock_guard<std::mutex> lock(mutex); return number_of(device, id); }
int new_stream(c10::DeviceIndex device) { return stream_of(device, next_id++); }
c10::DeviceIndex current_device() { return device_now; }
void set_current_device(c10::DeviceIndex device) { if (device >= 0) device_now = device; }
int current_stream() { return stream_of(device_now, stream_now[device_now]); }
c10::Stream torch_stream(c10::DeviceIndex device) {
  if (device < 0) device = device_now;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device), stream_now[device]);
}
c10::Stream exchange_torch_stream(c10::Stream stream) {
  auto before = torch_stream(stream.device_index());
  stream_now[stream.device_index()] = stream.id();
  return before;
}
c10::Stream as_torch_stream(int stream) {
  std::lock_guard<std::mutex> lock(mutex);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, streams[stream].device), streams[stream].id);
}
void record(Event& event, int stream) {
  std::lock_guard<std::mutex> lock(mutex);
  Stream& s = streams[stream];
  merge(s.seen, host);
  event.clock = s.seen;
  event.at = std::max(s.until, now());
  event.recorded = true;
}
Event end_of(int stream) { Event event; record(event, stream); return event; }
void block(const Clock& clock, double at, int stream) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(streams[stream].seen, clock);
  streams[stream].until = std::max(streams[stream].until, at);
}
void block(const Event& event, int stream) { if (event.recorded) block(event.clock, event.at, stream); }
bool query(const Event& event) {
  if (!event.recorded) return true;
  std::vector<std::shared_ptr<Pending>> works;
  { std::lock_guard<std::mutex> lock(mutex); works = covered(event.clock); }
  for (auto& work : works) if (!work->done()) return false;
  if (event.at > now() && options().kernel_seconds + options().byte_seconds > 0) return false;
  deliver(works);
  std::lock_guard<std::mutex> lock(mutex);
  merge(host, event.clock);
  return true;
}
void enqueue(std::shared_ptr<Pending> work) {
  std::lock_guard<std::mutex> lock(mutex);
  pending.push_back(std::move(work));
  any_pending = true;
}
void settle(int stream) {
  if (!any_pending) return;
  std::vector<std::shared_ptr<Pending>> works;
  {
    std::lock_guard<std::mutex> lock(mutex);
    merge(streams[stream].seen, host);
    works = covered(streams[stream].seen);
    if (options().early > 0) {  // NCCL may be quick: some of what is done arrives though nobody waited for it
      static std::mt19937_64 draw(options().seed * 1000003 + 17);
      std::set<int> held_back;  // on one stream nothing overtakes
      for (auto& work : pending) {
        if (std::find(works.begin(), works.end(), work) != works.end()) continue;
        if (!held_back.count(work->stream) && work->done() && std::uniform_real_distribution<double>()(draw) < options().early)
          works.push_back(work);
        else
          held_back.insert(work->stream);
      }
    }
  }
  deliver(works);
}
uint64_t launch(int stream, double seconds) {
  double ahead = 0;
  uint64_t time;
  {
    std::lock_guard<std::mutex> lock(mutex);
    Stream& s = streams[stream];
    merge(s.seen, host);
    if (s.seen.size() <= (size_t)stream) s.seen.resize(stream + 1);
    time = s.seen[stream] = ++s.issued;
    if (seconds > 0) {
      s.until = std::max(s.until, now()) + seconds;
      ahead = s.until - now() - 1024 * options().kernel_seconds;  // so many launches fit into a stream's queue
    }
  }
  if (ahead > 0 && options().kernel_seconds > 0) sleep_until(now() + ahead);
  return time;
}

// ---------------------------------------------------------------- counted
std::atomic<int64_t> kernels{0}, host_syncs{0};
std::atomic<int> sync_debug_mode{0};
namespace {
std::atomic<bool> tracing{false};
auto& trace_mutex = *new std::mutex;
auto& trace = *new std::vector<Sync>;
void count_sync(const char* what) {
  host_syncs++;
  if (tracing) { auto site = here(); std::lock_guard<std::mutex> lock(trace_mutex); trace.push_back({what, site}); }
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation (", what, ")");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", what, ")");
}
}  // namespace
void trace_syncs(bool on) { tracing = on; }
std::vector<Sync> traced_syncs() { std::lock_guard<std::mutex> lock(trace_mutex); return std::move(trace); }
void synchronize(const Event& event, const char* what) {
  count_sync(what);
  if (!event.recorded) return;
  std::vector<std::shared_ptr<Pending>> works;
  { std::lock_guard<std::mutex> lock(mutex); works = covered(event.clock); }
  deliver(works);
  sleep_until(event.at);
  std::lock_guard<std::mutex> lock(mutex);
  merge(host, event.clock);
}
void synchronize_all(const char* what) {
  Event all;
  {
    std::lock_guard<std::mutex> lock(mutex);
    all.recorded = true;
    for (auto& s : streams) { merge(all.clock, s.seen); all.at = std::max(all.at, s.until); }
  }
  synchronize(all, what);
}
void host_sync(const char* what) { synchronize(end_of(current_stream()), what); }

// ---------------------------------------------------------------- memory
namespace {
struct Access { int stream; uint64_t time; const char *begin, *end; bool writes; const char* what; SitePtr site; };
// Freed memory that another stream still uses. The caching allocator gives it to the next allocation on its own stream
// at once (c10/cuda/CUDACachingAllocator.h; Tensor.record_stream): wrong if what uses that has not waited.
struct Ghost { size_t bytes; Access left; };
using Ghosts = std::vector<std::shared_ptr<Ghost>>;
struct Block { size_t bytes; c10::DeviceIndex device; int stream; std::vector<Access> accesses; std::set<int> streams; Ghosts ghosts; };
auto& freed = *new std::map<int, Ghosts>;  // by the stream whose memory it was
auto& blocks = *new std::map<const char*, Block>;
std::atomic<int64_t> memory_limit{INT64_MAX};
auto &held = *new std::map<int, int64_t>, &most = *new std::map<int, int64_t>, &made = *new std::map<int, int64_t>;

Block* block_at(const void* data, const char** start = nullptr) {  // under the mutex
  auto at = blocks.upper_bound((const char*)data);
  if (at == blocks.begin()) return nullptr;
  --at;
  if ((const char*)data >= at->first + std::max<size_t>(at->second.bytes, 1)) return nullptr;
  if (start) *start = at->first;
  return &at->second;
}
void add_block(const char* start, size_t bytes, c10::DeviceIndex device) {
  int stream = stream_of(device, stream_now[device]);
  std::lock_guard<std::mutex> lock(mutex);
  auto& gone = freed[stream];
  gone.erase(std::remove_if(gone.begin(), gone.end(), [&](auto& g) { return happened(streams[stream].seen, g->left.stream, g->left.time); }), gone.end());
  Ghosts ghosts;
  for (auto& ghost : gone) if (bytes <= ghost->bytes) ghosts.push_back(ghost);
  blocks[start] = Block{bytes, device, stream, {}, {}, std::move(ghosts)};
  held[device] += (int64_t)bytes;
  most[device] = std::max(most[device], held[device]);
  made[device]++;
}
std::string line(const Access& a, const char* verb) { return std::string(a.what) + " " + verb + " at " + (a.site ? a.site->where() : "?"); }
}  // namespace

void* allocate(size_t bytes, c10::DeviceIndex device) {
  use_driver();
  {
    std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, held[device] + (int64_t)bytes <= memory_limit, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ",
                     (int)device, " has a limit of ", memory_limit.load(), " bytes, of which ", held[device], " are allocated");
  }
  void* start = nullptr;
  if (posix_memalign(&start, 64, bytes)) throw std::bad_alloc();
  std::memset(start, 0x7f, bytes);  // fresh device memory holds anything
  add_block((const char*)start, bytes, device);
  return start;
}
void adopt(void* start, size_t bytes, c10::DeviceIndex device) { use_driver(); add_block((const char*)start, bytes, device); }
void release(void* start, std::function<void()> free) {
  Block block;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto at = blocks.find((const char*)start);
    TORCH_INTERNAL_ASSERT(at != blocks.end());
    Clock known = streams[at->second.stream].seen;
    merge(known, host);
    for (auto& a : at->second.accesses)
      if (a.stream != at->second.stream && !at->second.streams.count(a.stream) && !happened(known, a.stream, a.time))
        freed[at->second.stream].push_back(std::make_shared<Ghost>(Ghost{at->second.bytes, a}));
    held[at->second.device] -= (int64_t)at->second.bytes;
    block = std::move(at->second);
    blocks.erase(at);
    if (any_pending) { graveyard.push_back(std::move(free)); return; }  // it may be written to: here the memory has to be there
  }
  free();
}
void used_on(const void* data, int stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (Block* block = block_at(data)) block->streams.insert(stream);
}
void touch(const at::Tensor& tensor, bool writes, const char* what, int stream, uint64_t time, const SitePtr& site) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  const char* begin = (const char*)tensor.const_data_ptr();
  size_t reach = 1;
  for (int64_t d = 0; d < tensor.dim(); d++) reach += (tensor.size(d) - 1) * (size_t)std::abs(tensor.stride(d));
  Access mine{stream, time, begin, begin + reach * tensor.element_size(), writes, what, site};
  std::vector<Finding> news;
  {
    std::lock_guard<std::mutex> lock(mutex);
    Block* block = block_at(begin);
    if (!block) return;
    const Clock& known = streams[stream].seen;
    auto& list = block->accesses;
    for (auto& ghost : block->ghosts) {
      const Access& a = ghost->left;
      if (a.stream != stream && !happened(known, a.stream, a.time))
        news.push_back({"freed in flight", "memory was freed while another stream still used it (" + line(a, a.writes ? "writes it" : "reads it") +
                        "), and may be what " + line(mine, "gets") + ", without having waited", a.site ? a.site->where() : "?",
                        (a.site ? a.site->text() : "") + "--- and ---\n" + (mine.site ? mine.site->text() : "")});
    }
    block->ghosts.clear();
    for (auto& a : list) {
      bool overlap = a.begin < mine.end && mine.begin < a.end;
      if (!overlap || !(a.writes || writes) || a.stream == stream || happened(known, a.stream, a.time)) continue;
      std::string text = line(mine, writes ? "writes" : "reads") + " what " + line(a, a.writes ? "writes" : "reads") + ", and has not waited for it";
      news.push_back({a.writes && !writes ? "read before it was written" : a.writes ? "two writes at once" : "written while it was read", text,
                      mine.site ? mine.site->where() : "?",
                      (mine.site ? mine.site->text() : "") + "--- and ---\n" + (a.site ? a.site->text() : "")});
    }
    auto superseded = [&](const Access& a) {
      bool inside = mine.begin <= a.begin && a.end <= mine.end;
      return inside && (writes ? a.stream == stream || happened(known, a.stream, a.time) : !a.writes && a.stream == stream);
    };
    list.erase(std::remove_if(list.begin(), list.end(), superseded), list.end());
    list.push_back(std::move(mine));
    if (list.size() > 512) list.erase(list.begin(), list.begin() + 256);
  }
  for (auto& each : news) found(std::move(each));
}
void limit_memory(int64_t bytes) { memory_limit = bytes; }
int64_t allocated(c10::DeviceIndex d) { std::lock_guard<std::mutex> lock(mutex); return held[d]; }
int64_t most_allocated(c10::DeviceIndex d) { std::lock_guard<std::mutex> lock(mutex); return most[d]; }
void reset_most_allocated(c10::DeviceIndex d) { std::lock_guard<std::mutex> lock(mutex); most[d] = held[d]; }
int64_t allocations(c10::DeviceIndex d) { std::lock_guard<std::mutex> lock(mutex); return made[d]; }

}  // namespace gpu_sim
