#include "engine/replicas.h"

#include <future>
#include <thread>
#include <utility>

#include "core/start_thread.h"
#include "engine/rank_devices.h"
#include "engine/step_runner.h"

namespace llmserve {

// One after another: the first has all the threads of the machine for its look at the weights.
Executors make_executors(const EngineConfig& config, const Checkpoint& checkpoint,
                         const std::stop_token& given_up) {
  Executors executors;
  if (config.parallel.data == 1) {
    executors.push_back(std::make_unique<StepRunner>(config, checkpoint, &StepRunner::make_group,
                                                     nullptr, given_up));
    return executors;
  }
  // On devices of their own each replica has its own copy.
  const auto shared = has_rank_devices(config)
                          ? nullptr
                          : std::make_shared<SharedModels>(config.parallel.num_ranks());
  for (int32_t replica = 0; replica < config.parallel.data; ++replica) {
    EngineConfig own = config;
    own.parallel.replica = replica;
    std::packaged_task<std::unique_ptr<Executor>()> make([&own, &checkpoint, &shared] {
      return std::make_unique<StepRunner>(own, checkpoint, &StepRunner::make_group, shared);
    });
    std::future<std::unique_ptr<Executor>> made = make.get_future();
    start_thread(std::move(make)).join();
    executors.push_back(made.get());
  }
  return executors;
}

}  // namespace llmserve
