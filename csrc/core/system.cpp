#include "core/system.h"

#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace llmserve {
namespace {

namespace fs = std::filesystem;

std::optional<int64_t> read_number(const fs::path& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;  // "max" does not parse: no limit
  return std::nullopt;
}

// A "key value" line of a file such as memory.stat or /proc/meminfo.
int64_t read_field(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    int64_t value = 0;
    if (words >> word >> value && word == key) return value;
  }
  return 0;
}

// The folders of the process's control groups for one controller ("" is v2), innermost first.
std::vector<fs::path> cgroup_folders(const std::string& controller) {
  std::ifstream file("/proc/self/cgroup");
  std::vector<fs::path> folders;
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    if (controller.empty() != is_v2 ||
        (!is_v2 && controllers.find(controller) == std::string::npos))
      continue;
    const fs::path root =
        is_v2 ? fs::path("/sys/fs/cgroup") : fs::path("/sys/fs/cgroup") / controller;
    fs::path folder = root / fs::path(line.substr(second + 1)).relative_path();
    while (folder.string().size() >= root.string().size()) {
      folders.push_back(folder);
      if (folder == root || !folder.has_parent_path()) break;
      folder = folder.parent_path();
    }
  }
  return folders;
}

void lower_to_cgroup(int64_t& available, const fs::path& folder, const char* limit_file,
                     const char* usage_file, const char* cache_key) {
  const auto limit = read_number(folder / limit_file);
  const auto usage = read_number(folder / usage_file);
  if (!limit || !usage) return;
  const int64_t reclaimable = read_field(folder / "memory.stat", cache_key);
  available = std::min(available, *limit - *usage + reclaimable);
}

double cpu_quota() {
  double quota = std::numeric_limits<double>::infinity();
  for (const fs::path& folder : cgroup_folders("")) {
    std::ifstream file(folder / "cpu.max");
    double limit = 0;
    double period = 0;
    if (file >> limit >> period && period > 0) quota = std::min(quota, limit / period);
  }
  for (const fs::path& folder : cgroup_folders("cpu")) {
    const auto limit = read_number(folder / "cpu.cfs_quota_us");
    const auto period = read_number(folder / "cpu.cfs_period_us");
    if (limit && period && *limit > 0 && *period > 0)
      quota = std::min(quota, double(*limit) / double(*period));
  }
  return quota;
}

}  // namespace

int64_t available_memory_bytes() {
  int64_t available = read_field("/proc/meminfo", "MemAvailable:") * 1024;
  for (const fs::path& folder : cgroup_folders("")) {
    lower_to_cgroup(available, folder, "memory.max", "memory.current", "inactive_file");
  }
  for (const fs::path& folder : cgroup_folders("memory")) {
    lower_to_cgroup(available, folder, "memory.limit_in_bytes", "memory.usage_in_bytes",
                    "total_inactive_file");
  }
  return std::max<int64_t>(available, 0);
}

int32_t default_num_threads() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                       "/topology/thread_siblings_list");
    std::string siblings;
    if (!std::getline(file, siblings)) siblings = std::to_string(cpu);
    cores.insert(siblings);
  }
  const double limit = std::min(static_cast<double>(cores.size()), cpu_quota());
  return std::max(1, static_cast<int32_t>(limit));
}

}  // namespace llmserve
