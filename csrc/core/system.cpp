#include "core/system.h"

#include <sched.h>
#include <unistd.h>

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

// The folders of the process's control groups for one controller ("" is v2), outermost first;
// those that a container does not show do not exist.
std::vector<fs::path> cgroup_folders(const std::string& controller, const fs::path& root = "/") {
  const fs::path mount = root / "sys/fs/cgroup";
  std::ifstream file(root / "proc/self/cgroup");
  std::vector<fs::path> folders;
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    const bool has_controller =
        is_v2 ? controller.empty()
              : !controller.empty() &&
                    ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
    if (!has_controller) continue;
    const fs::path top = is_v2 ? mount : mount / controller;
    // A group outside the process's namespace begins with ".."; what is mounted is its own top.
    const fs::path group = fs::path(line.substr(second + 1)).relative_path().lexically_normal();
    folders.push_back(top);
    if (group.empty() || *group.begin() == ".." || group == ".") continue;
    fs::path folder = top;
    for (const fs::path& part : group) folders.push_back(folder /= part);
  }
  return folders;
}

// What a control group's files are called.
struct MemoryFiles {
  std::vector<const char*> limits;
  const char* usage;
  std::vector<const char*> reclaimable;  // keys of memory.stat
  const char* inherited_limit;           // likewise: the smallest of groups that may not be visible
};

void lower_to_cgroup(MemoryLimits& limits, const fs::path& folder, const MemoryFiles& files) {
  const auto usage = read_number(folder / files.usage);
  if (!usage) return;
  int64_t used = *usage;
  for (const char* key : files.reclaimable) used -= read_field(folder / "memory.stat", key);
  // The files are read one after another and the kernel's statistics lag: the difference can fall
  // below zero, and v1's "no limit" is so near the largest integer that nothing may be added to it.
  used = std::max<int64_t>(used, 0);
  const auto lower = [&](int64_t limit, const char* file) {
    limits.total_bytes = std::min(limits.total_bytes, limit);
    if (limit - used >= limits.available_bytes) return;
    limits.available_bytes = limit - used;
    limits.bounded_by = (folder / file).string();
  };
  for (const char* file : files.limits) {
    if (const auto limit = read_number(folder / file)) lower(*limit, file);
  }
  const int64_t inherited = read_field(folder / "memory.stat", files.inherited_limit);
  if (inherited > 0) lower(inherited, "memory.stat");
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

MemoryLimits read_memory_limits(const fs::path& root) {
  const fs::path meminfo = root / "proc/meminfo";
  MemoryLimits limits{.total_bytes = read_field(meminfo, "MemTotal:") * 1024,
                      .available_bytes = read_field(meminfo, "MemAvailable:") * 1024};
  const MemoryFiles v2{{"memory.max", "memory.high"},
                       "memory.current",
                       {"inactive_file", "active_file", "slab_reclaimable"},
                       ""};
  const MemoryFiles v1{{"memory.limit_in_bytes"},
                       "memory.usage_in_bytes",
                       {"total_inactive_file", "total_active_file"},
                       "hierarchical_memory_limit"};
  for (const fs::path& folder : cgroup_folders("", root)) lower_to_cgroup(limits, folder, v2);
  for (const fs::path& folder : cgroup_folders("memory", root)) lower_to_cgroup(limits, folder, v1);
  limits.available_bytes = std::max<int64_t>(limits.available_bytes, 0);
  return limits;
}

std::vector<int> physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(getpid(), sizeof(allowed), &allowed) != 0) return {};
  std::set<std::string> seen;
  std::vector<int> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                       "/topology/thread_siblings_list");
    std::string siblings;
    if (!std::getline(file, siblings)) siblings = std::to_string(cpu);
    if (seen.insert(siblings).second) cores.push_back(cpu);
  }
  return cores;
}

int32_t default_num_threads() {
  const double limit = std::min(static_cast<double>(physical_cores().size()), cpu_quota());
  return std::max(1, static_cast<int32_t>(limit));
}

}  // namespace llmserve
