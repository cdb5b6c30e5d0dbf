// An NCCL for ranks that are threads of one process with emulated devices: the calls that
// csrc/comm/nccl_api.h declares, by the words of NVIDIA's documentation. A call is work of its
// stream, which comes when all ranks have made it. A captured one is made by each launch of the
// graph, and a communicator does not end while a graph has it. Tests set the faults by ctypes.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/nccl_api.h"

namespace nccl = llmserve::nccl;
using nccl::Result;

namespace {

constexpr Result kUnhandled = 1;
constexpr Result kInvalidArgument = 4;
constexpr Result kInvalidUsage = 5;
constexpr Result kRemoteError = 6;

// The emulated device's streams (streams.cpp).
struct Streams {
  uint64_t (*enqueue)(void* stream, bool (*is_ready)(void*), void (*run)(void*), void* context);
  void (*run_before)(void* stream, uint64_t place);
  void (*change)(void (*act)(void*), void* context);
  void (*record)(void* stream, const std::function<void()>& launch);
  int (*is_captured)(void* stream);
  int (*device)();
};

const Streams& streams() {
  static const Streams found = [] {
    void* library = dlopen("libllmserve_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    const auto find = [library](const char* name, auto& function) {
      void* symbol = library != nullptr ? dlsym(library, name) : nullptr;
      if (symbol == nullptr) std::abort();
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    Streams streams{};
    find("llmserve_emulator_enqueue", streams.enqueue);
    find("llmserve_emulator_run_before", streams.run_before);
    find("llmserve_emulator_change", streams.change);
    find("llmserve_emulator_record", streams.record);
    find("llmserve_emulator_is_captured", streams.is_captured);
    find("llmserve_emulator_device", streams.device);
    return streams;
  }();
  return found;
}

// With the streams locked.
template <class Act>
void change(const Act& act) {
  streams().change([](void* context) { (*static_cast<const Act*>(context))(); },
                   const_cast<Act*>(&act));
}

enum class Kind { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kReduce, kMessage };

// One rank's side of an exchange.
struct Part {
  const void* from = nullptr;
  void* to = nullptr;
  void* stream = nullptr;
  uint64_t place = 0;  // of the stream; 0: the rank has not come yet
};

struct Exchange {
  Kind kind{};
  size_t count = 0;
  int type = 0;
  int op = 0;
  int root = 0;
  bool is_of_graph = false;
  std::vector<Part> parts;  // a message has two: who sends, who receives
  bool is_done = false;

  bool is_alike(const Exchange& other) const {
    return kind == other.kind && count == other.count && type == other.type && op == other.op &&
           root == other.root && is_of_graph == other.is_of_graph;
  }
};
using Shared = std::shared_ptr<Exchange>;

struct World {
  int num_ranks = 0;
  std::vector<int> devices;                                     // of those that have come
  std::vector<Shared> exchanges;                                // in the order that all ranks have
  std::map<std::pair<int, int>, std::vector<Shared>> messages;  // by who sends and who receives
};

struct Comm {
  std::shared_ptr<World> world;
  int rank = 0;
  Result error = nccl::kSuccess;
  bool is_aborted = false;
  size_t num_exchanges = 0;
  std::map<std::pair<int, int>, size_t> num_sent;  // by the ends
  std::map<std::pair<int, int>, size_t> num_received;
  std::shared_ptr<int> in_graphs = std::make_shared<int>(0);  // each graph has it, too
};

// What one piece of a stream's work exchanges.
struct Item {
  std::shared_ptr<Comm> comm;
  std::vector<Shared> exchanges;
};

size_t bytes_of(const Exchange& exchange) {
  const bool is_wide = exchange.type == nccl::kFloat32 || exchange.type == nccl::kInt32;
  const size_t width = exchange.type == nccl::kInt8 ? 1 : is_wide ? 4 : 2;
  return exchange.count * width;
}

float as_float(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

// Of the elements [begin, begin + count) of all ranks, in the ranks' order. No float16: no model
// has any.
std::vector<char> reduced(const Exchange& exchange, size_t begin) {
  std::vector<char> out(bytes_of(exchange));
  const auto element = [&](const Part& part, size_t i) {
    return exchange.type == nccl::kFloat32
               ? static_cast<const float*>(part.from)[begin + i]
               : as_float(static_cast<const uint16_t*>(part.from)[begin + i]);
  };
  for (size_t i = 0; i < exchange.count && exchange.type == nccl::kInt32; ++i) {
    uint32_t sum = 0;
    for (const Part& part : exchange.parts)
      sum += static_cast<const uint32_t*>(part.from)[begin + i];
    std::memcpy(out.data() + 4 * i, &sum, 4);
  }
  if (exchange.type == nccl::kInt32) return out;
  for (size_t i = 0; i < exchange.count; ++i) {
    float sum = element(exchange.parts[0], i);
    for (size_t rank = 1; rank < exchange.parts.size(); ++rank) {
      const float x = element(exchange.parts[rank], i);
      sum = exchange.op == nccl::kSum ? sum + x : std::max(sum, x);
    }
    if (exchange.type == nccl::kFloat32) {
      std::memcpy(out.data() + 4 * i, &sum, 4);
    } else {
      const auto bits = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, sum) >> 16);
      std::memcpy(out.data() + 2 * i, &bits, 2);
    }
  }
  return out;
}

void move_all(const Exchange& exchange) {
  const size_t bytes = bytes_of(exchange);
  const std::vector<Part>& parts = exchange.parts;
  const auto root = static_cast<size_t>(exchange.root);
  switch (exchange.kind) {
    case Kind::kAllGather:
      for (size_t from = 0; from < parts.size(); ++from)
        for (const Part& part : parts)
          std::memmove(static_cast<char*>(part.to) + from * bytes, parts[from].from, bytes);
      break;
    case Kind::kBroadcast:
      for (const Part& part : parts) std::memmove(part.to, parts[root].from, bytes);
      break;
    case Kind::kMessage:
      std::memcpy(parts[1].to, parts[0].from, bytes);
      break;
    case Kind::kReduce:
      std::memcpy(parts[root].to, reduced(exchange, 0).data(), bytes);
      break;
    case Kind::kAllReduce: {
      const std::vector<char> sum = reduced(exchange, 0);
      for (const Part& part : parts) std::memcpy(part.to, sum.data(), bytes);
      break;
    }
    case Kind::kReduceScatter: {
      std::vector<std::vector<char>> sums;
      for (size_t rank = 0; rank < parts.size(); ++rank)
        sums.push_back(reduced(exchange, rank * exchange.count));
      for (size_t rank = 0; rank < parts.size(); ++rank)
        std::memcpy(parts[rank].to, sums[rank].data(), bytes);
      break;
    }
  }
}

bool is_ready(void* context) {
  const Item& item = *static_cast<Item*>(context);
  if (item.comm->is_aborted) return true;
  return std::ranges::all_of(item.exchanges, [](const Shared& exchange) {
    return std::ranges::all_of(exchange->parts, [](const Part& part) { return part.place > 0; });
  });
}

// The first rank whose turn it is moves the bytes of all, as soon as these are there.
void run(void* context) {
  const std::unique_ptr<Item> item(static_cast<Item*>(context));
  if (item->comm->is_aborted) return;
  for (const Shared& exchange : item->exchanges) {
    if (exchange->is_done) continue;
    for (const Part& part : exchange->parts) streams().run_before(part.stream, part.place);
    if (exchange->is_done) continue;  // meanwhile
    move_all(*exchange);
    exchange->is_done = true;
  }
}

std::map<std::string, std::shared_ptr<World>> worlds;  // by their ids
std::vector<std::shared_ptr<Comm>> comms;              // handles are places in it, from 1
int64_t next_id = 1;

std::shared_ptr<Comm> at(nccl::Comm handle) {
  std::shared_ptr<Comm> comm;
  change([&] { comm = comms[reinterpret_cast<uintptr_t>(handle) - 1]; });
  return comm;
}

// What a call asks for beside the exchange itself.
struct Call {
  Exchange exchange;
  Part part;
  int peer = -1;  // of a message
  bool sends = false;
};

struct Group {
  int depth = 0;
  std::shared_ptr<Comm> comm;
  void* stream = nullptr;
  std::vector<Call> calls;
};
thread_local Group group;

}  // namespace

// Tests' variables. What a rank is told to fail at is its fake_fail_call'th call, from 1, counted
// over all its communicators. 1: an error that comes later, 2: nothing comes of the call, ever.
#define FAKE extern "C" __attribute__((visibility("default")))
extern "C" {
#define FAKE_INT __attribute__((visibility("default"))) int
FAKE_INT fake_fail_rank = -1;
FAKE_INT fake_fail_call = 0;
FAKE_INT fake_fault = 0;
FAKE_INT fake_num_faults = 0;  // so often
FAKE_INT fake_num_calls = 0;   // of fake_fail_rank
FAKE_INT fake_num_aborts = 0;
FAKE_INT fake_num_worlds = 0;
FAKE_INT fake_num_failing_captures =
    0;                                 // calls of fake_fail_rank that fail where they are captured
FAKE_INT fake_num_whole_captures = 0;  // before these
FAKE_INT fake_num_stuck = 0;           // communicators that graphs had when they were ended
}

namespace {

bool fails_now(Comm& comm) {
  if (comm.rank != fake_fail_rank || comm.world->num_ranks == 1) return false;
  if (++fake_num_calls < fake_fail_call || fake_num_faults <= 0) return false;
  --fake_num_faults;
  if (fake_fault == 1) comm.error = kRemoteError;
  return true;
}

Shared find(Comm& comm, const Call& call, bool& is_alike) {
  World& world = *comm.world;
  const bool is_message = call.exchange.kind == Kind::kMessage;
  const auto ends = call.sends ? std::pair(comm.rank, call.peer) : std::pair(call.peer, comm.rank);
  std::vector<Shared>& all = is_message ? world.messages[ends] : world.exchanges;
  size_t& next = !is_message  ? comm.num_exchanges
                 : call.sends ? comm.num_sent[ends]
                              : comm.num_received[ends];
  if (next == all.size()) {
    all.push_back(std::make_shared<Exchange>(call.exchange));
    all.back()->parts.resize(is_message ? 2 : static_cast<size_t>(world.num_ranks));
  }
  Shared exchange = all[next++];
  is_alike = exchange->is_alike(call.exchange);
  return exchange;
}

// What a group asks for is one piece of work, so that ranks may send each other at once.
Result submit(const std::shared_ptr<Comm>& self, void* stream, const std::vector<Call>& calls) {
  Result result = nccl::kSuccess;
  Comm& comm = *self;
  change([&] {
    if (comm.is_aborted) {
      result = kInvalidUsage;
      return;
    }
    auto item = std::make_unique<Item>(Item{self, {}});
    bool comes = true;
    std::vector<std::pair<Shared, size_t>> places;
    for (const Call& call : calls) {
      if (fails_now(comm)) comes = false;
      bool is_alike = false;
      Shared exchange = find(comm, call, is_alike);
      if (!is_alike) result = comm.error = kInvalidUsage;
      const bool is_message = call.exchange.kind == Kind::kMessage;
      const size_t mine = is_message ? (call.sends ? 0 : 1) : static_cast<size_t>(comm.rank);
      exchange->parts[mine] = call.part;
      exchange->parts[mine].stream = stream;
      places.emplace_back(exchange, mine);
      item->exchanges.push_back(std::move(exchange));
    }
    const uint64_t place = streams().enqueue(stream, &is_ready, &run, item.release());
    if (comes)
      for (const auto& [exchange, mine] : places) exchange->parts[mine].place = place;
  });
  return result;
}

// While the stream is captured, for each launch.
Result ask(const std::shared_ptr<Comm>& comm, void* stream, std::vector<Call> calls) {
  if (streams().is_captured(stream) == 0) return submit(comm, stream, calls);
  if (comm->rank == fake_fail_rank && fake_num_failing_captures > 0 &&
      fake_num_whole_captures-- <= 0) {
    --fake_num_failing_captures;
    change([&] { comm->error = kUnhandled; });
    return nccl::kInProgress;
  }
  for (Call& call : calls) call.exchange.is_of_graph = true;
  streams().record(stream,
                   [comm, stream, calls, held = comm->in_graphs] { submit(comm, stream, calls); });
  return nccl::kSuccess;
}

// As NCCL does, which asks its graphs' ends. After a while it gives up, and a test fails.
void wait_for_graphs(Comm& comm) {
  for (int looks = 0; comm.in_graphs.use_count() > 1; ++looks) {
    if (looks == 5000) {
      ++fake_num_stuck;
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Result call(nccl::Comm handle, void* stream, Call call) {
  const std::shared_ptr<Comm> comm = at(handle);
  if (group.depth > 0) {
    group.comm = comm;
    group.stream = stream;
    group.calls.push_back(std::move(call));
    return nccl::kSuccess;
  }
  return ask(comm, stream, {call});
}

}  // namespace

FAKE Result ncclGetVersion(int* version) {
  *version = 22703;
  return nccl::kSuccess;
}
FAKE Result ncclGetUniqueId(nccl::UniqueId* id) {
  *id = {};
  change([&] { std::memcpy(id->bytes, &next_id, sizeof next_id), ++next_id; });
  return nccl::kSuccess;
}
// Two ranks on a device are refused, but where NCCL_MULTI_RANK_GPU_ENABLE allows them.
FAKE Result ncclCommInitRankConfig(nccl::Comm* out, int num_ranks, nccl::UniqueId id, int rank,
                                   nccl::Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0) return kInvalidArgument;
  const char* several = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const bool may_share = several != nullptr && std::string(several) == "1";
  const int device = streams().device();
  Result result = nccl::kInProgress;
  change([&] {
    auto& world = worlds[std::string(id.bytes, sizeof id.bytes)];
    if (!world) {
      world = std::make_shared<World>();
      world->num_ranks = num_ranks;
      ++fake_num_worlds;
    }
    if (world->num_ranks != num_ranks) result = kInvalidArgument;
    if (!may_share && std::ranges::find(world->devices, device) != world->devices.end())
      result = kInvalidUsage;
    world->devices.push_back(device);
    comms.push_back(std::make_shared<Comm>(Comm{.world = world, .rank = rank}));
    *out = reinterpret_cast<nccl::Comm>(comms.size());
  });
  return result;
}
FAKE Result ncclCommGetAsyncError(nccl::Comm handle, Result* state) {
  const std::shared_ptr<Comm> found = at(handle);
  change([&] {
    const Comm& comm = *found;
    const bool have_met = static_cast<int>(comm.world->devices.size()) >= comm.world->num_ranks;
    *state = comm.error != nccl::kSuccess ? comm.error
             : have_met                   ? nccl::kSuccess
                                          : nccl::kInProgress;
  });
  return nccl::kSuccess;
}
FAKE Result ncclCommFinalize(nccl::Comm) { return nccl::kSuccess; }
FAKE Result ncclCommDestroy(nccl::Comm handle) {
  wait_for_graphs(*at(handle));
  return nccl::kSuccess;
}
FAKE Result ncclCommAbort(nccl::Comm handle) {
  const std::shared_ptr<Comm> comm = at(handle);
  change([&] {
    comm->is_aborted = true;
    ++fake_num_aborts;
  });
  wait_for_graphs(*comm);
  return nccl::kSuccess;
}
FAKE const char* ncclGetErrorString(Result result) {
  return result == kRemoteError    ? "remote process exited"
         : result == kInvalidUsage ? "invalid usage"
         : result == kUnhandled    ? "unhandled cuda error"
                                   : "error";
}
FAKE const char* ncclGetLastError(nccl::Comm) { return "told to fail"; }

FAKE Result ncclAllReduce(const void* from, void* to, size_t count, int type, int op,
                          nccl::Comm comm, void* stream) {
  return call(comm, stream,
              {.exchange = {.kind = Kind::kAllReduce, .count = count, .type = type, .op = op},
               .part = {.from = from, .to = to}});
}
FAKE Result ncclAllGather(const void* from, void* to, size_t count, int type, nccl::Comm comm,
                          void* stream) {
  return call(comm, stream,
              {.exchange = {.kind = Kind::kAllGather, .count = count, .type = type},
               .part = {.from = from, .to = to}});
}
FAKE Result ncclReduceScatter(const void* from, void* to, size_t count, int type, int op,
                              nccl::Comm comm, void* stream) {
  return call(comm, stream,
              {.exchange = {.kind = Kind::kReduceScatter, .count = count, .type = type, .op = op},
               .part = {.from = from, .to = to}});
}
FAKE Result ncclBroadcast(const void* from, void* to, size_t count, int type, int root,
                          nccl::Comm comm, void* stream) {
  return call(comm, stream,
              {.exchange = {.kind = Kind::kBroadcast, .count = count, .type = type, .root = root},
               .part = {.from = from, .to = to}});
}
FAKE Result ncclReduce(const void* from, void* to, size_t count, int type, int op, int root,
                       nccl::Comm comm, void* stream) {
  return call(
      comm, stream,
      {.exchange = {.kind = Kind::kReduce, .count = count, .type = type, .op = op, .root = root},
       .part = {.from = from, .to = to}});
}
FAKE Result ncclSend(const void* from, size_t count, int type, int to, nccl::Comm comm,
                     void* stream) {
  return call(comm, stream,
              {.exchange = {.kind = Kind::kMessage, .count = count, .type = type},
               .part = {.from = from},
               .peer = to,
               .sends = true});
}
FAKE Result ncclRecv(void* to, size_t count, int type, int from, nccl::Comm comm, void* stream) {
  return call(comm, stream,
              {.exchange = {.kind = Kind::kMessage, .count = count, .type = type},
               .part = {.to = to},
               .peer = from});
}
FAKE Result ncclGroupStart() {
  ++group.depth;
  return nccl::kSuccess;
}
FAKE Result ncclGroupEnd() {
  if (--group.depth > 0 || group.calls.empty()) return nccl::kSuccess;
  const std::vector<Call> calls = std::exchange(group.calls, {});
  return ask(group.comm, group.stream, calls);
}
