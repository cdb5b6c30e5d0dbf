#include "engine/rank_devices.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "core/error.h"
#include "engine/worker_plan.h"
#include "kernels/cuda_loader.h"

namespace llmserve {
namespace {

constexpr std::string_view kCuda = "cuda";

// Which device a rank has, and how many ranks have it.
struct Place {
  int device = 0;
  int num_ranks = 1;
};

// "tensor_parallel_size=2, data_parallel_size=2"
std::string sizes_of(const ParallelConfig& parallel) {
  std::string sizes = concat("tensor_parallel_size=", parallel.tensor);
  if (parallel.pipeline > 1) sizes += concat(", pipeline_parallel_size=", parallel.pipeline);
  if (parallel.data > 1) sizes += concat(", data_parallel_size=", parallel.data);
  return sizes;
}

// Among those of all replicas in this process, where those of a replica follow one another.
int worker_of(const ParallelConfig& parallel, int rank) {
  return parallel.replica * parallel.num_local_ranks() + rank - parallel.first_rank();
}

Place place_of(const ParallelConfig& parallel, int worker) {
  const int num_ranks = parallel.num_workers();
  const int num_devices = num_cuda_devices();
  const char* shared = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (num_ranks > num_devices && (shared == nullptr || std::string_view(shared) != "1"))
    throw NotSupported(
        concat(sizes_of(parallel), " on device 'cuda': ", num_devices,
               num_devices == 1 ? " GPU is" : " GPUs are",
               " visible, and each rank needs one of its own; use a smaller number, or set "
               "NCCL_MULTI_RANK_GPU_ENABLE=1, which lets ranks share a GPU for trials"));
  const int device = worker % num_devices;
  return {.device = device, .num_ranks = (num_ranks - device - 1) / num_devices + 1};
}

}  // namespace

bool has_rank_devices(const EngineConfig& config) {
  return config.device == kCuda && config.parallel.data * config.parallel.num_ranks() > 1;
}

std::unique_ptr<Backend> make_rank_backend(const EngineConfig& config, int rank) {
  const BackendOptions options{.num_threads = thread_share(config, rank).count};
  if (!has_rank_devices(config)) return make_backend(config.device, options);
  const Place place = place_of(config.parallel, worker_of(config.parallel, rank));
  return make_cuda_backend_on(place.device, options);
}

int64_t free_rank_bytes(const EngineConfig& config) {
  const int num_ranks = config.parallel.num_workers();
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int worker = 0; worker < num_ranks; ++worker) {
    const Place place = place_of(config.parallel, worker);
    least = std::min(least, free_cuda_bytes(place.device) / place.num_ranks);
  }
  return least * num_ranks;
}

// What is gathered is read by another linear layer, or is logits.
int64_t gathered_bytes(const EngineConfig& config, const StepShape& shape) {
  if (config.device != kCuda || config.parallel.tensor == 1) return 0;
  return static_cast<int64_t>(sizeof(float)) * std::max(shape.max_tokens * shape.max_in_features,
                                                        shape.max_logit_rows * shape.vocab_size);
}

RankPlace rank_place(Backend& backend, int64_t staging_bytes) {
  RankPlace place{.memory = &backend.memory()};
  if (!place.memory->is_host()) {
    place.queue = cuda_queue(backend);
    place.staging_bytes = staging_bytes;
    return place;
  }
  place.run = [&backend](int64_t count, const auto& work) {
    backend.run_on_host_threads(count, 1, work);
  };
  return place;
}

}  // namespace llmserve
