// A model's weights in memory, and what else their load has told; replicas compute with the same.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/bus_errors.h"
#include "layers/deferred_weight.h"
#include "models/model.h"

namespace llmserve {

struct LoadedModel {
  std::unique_ptr<const Model> model;
  // Of the files that its weights came from, of which some are read in place.
  std::vector<std::shared_ptr<const ReadState>> files;
  std::string warning;  // what was not as it should be, and did no harm
  int32_t replica = 0;  // that has loaded it, and counts its bytes
};

// What the replicas of a process have loaded, by rank. The first to ask for a rank's share loads
// it, and it is there for as long as one of them has it.
class SharedModels {
 public:
  using Load = std::function<std::shared_ptr<const LoadedModel>()>;

  explicit SharedModels(int num_ranks) : places_(static_cast<size_t>(num_ranks)) {}

  // Any thread. Others that ask for the same share wait until it is loaded. Throws what `load`
  // throws, and the next one to ask loads then.
  std::shared_ptr<const LoadedModel> get(int rank, const Load& load) {
    Place& place = places_[static_cast<size_t>(rank)];
    const std::lock_guard lock(place.mutex);
    std::shared_ptr<const LoadedModel> loaded = place.loaded.lock();
    if (!loaded) place.loaded = loaded = load();
    return loaded;
  }

 private:
  struct Place {
    std::mutex mutex;
    std::weak_ptr<const LoadedModel> loaded;
  };
  std::vector<Place> places_;  // [ranks]
};

}  // namespace llmserve
