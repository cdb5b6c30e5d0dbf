#include "engine/node_settings.h"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <sstream>
#include <string_view>

#include "core/error.h"
#include "core/token_hash.h"
#include "io/head_checkpoint.h"
#include "kernels/backend.h"
#include "models/draft_heads/registry.h"
#include "speculation/registry.h"

namespace llmserve {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kNumPages = 64;  // of a file, evenly spaced, its first and last among them
constexpr size_t kShownDigits = 16;

void update(Sha256& sha, std::string_view text) {
  sha.update({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

// The linker's digest of this library, in hexadecimal; empty where it was made without one.
std::string build_id() {
  struct Found {
    std::string id;
  } found;
  const auto look = [](dl_phdr_info* info, size_t, void* data) -> int {
    const auto self = reinterpret_cast<uintptr_t>(&build_id);
    bool is_own = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const ElfW(Phdr) & part = info->dlpi_phdr[i];
      const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
      is_own |= part.p_type == PT_LOAD && self >= begin && self < begin + part.p_memsz;
    }
    if (!is_own) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const ElfW(Phdr) & part = info->dlpi_phdr[i];
      if (part.p_type != PT_NOTE) continue;
      const auto* next = reinterpret_cast<const char*>(info->dlpi_addr + part.p_vaddr);
      const char* const end = next + part.p_memsz;
      while (next + sizeof(ElfW(Nhdr)) <= end) {
        ElfW(Nhdr) note;
        std::memcpy(&note, next, sizeof(note));
        const char* const owner = next + sizeof(note);
        const char* const value = owner + (note.n_namesz + 3) / 4 * 4;
        next = value + (note.n_descsz + 3) / 4 * 4;
        if (next > end) break;
        if (note.n_type != NT_GNU_BUILD_ID || std::string_view(owner, 3) != "GNU") continue;
        std::ostringstream text;
        for (uint32_t j = 0; j < note.n_descsz; ++j) {
          constexpr std::string_view kDigits = "0123456789abcdef";
          const auto byte = static_cast<uint8_t>(value[j]);
          text << kDigits[byte >> 4] << kDigits[byte & 15];
        }
        static_cast<Found*>(data)->id = text.str();
      }
    }
    return 1;
  };
  dl_iterate_phdr(look, &found);
  return found.id.substr(0, kShownDigits);
}

// Names and sizes, and of each file a sample: two checkpoints that differ in training differ in
// every page.
std::string weights_digest(const Checkpoint& checkpoint) {
  Sha256 sha;
  for (const TensorEntry& entry : checkpoint.tensors()) {
    update(sha, entry.name);
    update(sha, checkpoint.describe(entry));
  }
  for (const auto& file : checkpoint.files()) {
    update(sha, concat(file->num_bytes(), "\n"));
    const int64_t last = std::max<int64_t>(file->num_bytes() - kPageBytes, 0);
    for (int64_t i = 0; i < kNumPages; ++i) {
      const auto page = file->bytes().subspan(static_cast<size_t>(last * i / (kNumPages - 1)));
      const auto part = page.first(std::min<size_t>(page.size(), kPageBytes));
      sha.update({reinterpret_cast<const uint8_t*>(part.data()), part.size()});
    }
  }
  return to_hex(sha.finish()).substr(0, kShownDigits);
}

std::map<std::string, std::string> read_lines(const std::string& text) {
  std::map<std::string, std::string> values;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find('=');
    if (at != std::string::npos) values[line.substr(0, at)] = line.substr(at + 1);
  }
  return values;
}

}  // namespace

std::string node_settings(const EngineConfig& config, const Checkpoint& checkpoint) {
  const std::string runs = make_backend(config.device, {.num_threads = 1})->description();
  std::ostringstream text;
  const auto line = [&](const char* name, const auto& value) {
    text << name << '=' << value << '\n';
  };
  line("build", build_id());
  line("runs on", runs.substr(0, runs.find(',')));
  line("weights", weights_digest(checkpoint));
  line("dtype", name(config.dtype));
  line("kv_cache_dtype", kv_cache_dtype_name(config.kv_cache_dtype));
  line("quantization", config.quantization);
  line("max_model_len", config.scheduler.max_model_len);
  line("max_num_batched_tokens", config.scheduler.max_num_batched_tokens);
  line("max_num_seqs", config.scheduler.max_num_seqs);
  line("block_size", config.cache.block_size);
  line("tensor_parallel_size", config.parallel.tensor);
  line("decode_context_parallel_size", config.parallel.decode_context);
  line("pipeline_parallel_size", config.parallel.pipeline);
  line("enable_expert_parallel", config.parallel.has_whole_experts);
  line("tensor_parallel_cut", config.parallel.cut);
  line("nnodes", config.parallel.nodes);
  line("enable_dbo", config.parallel.has_halves());
  line("hidden states that drafts want", config.max_wanted_layers);
  const bool has_head = config.draft && find_drafter(config.speculation.method).has_head();
  const bool is_apart = has_head && head_kind(config.speculation.method) != HeadKind::kMtp;
  line("head that drafts", has_head ? config.speculation.method : "none");
  line("its weights",
       is_apart ? weights_digest(open_head_checkpoint(config.draft->model_path)) : "none");
  return text.str();
}

std::string describe_difference(const std::string& there, const std::string& here) {
  const auto theirs = read_lines(there);
  std::string text;
  for (const auto& [name, value] : read_lines(here)) {
    const auto found = theirs.find(name);
    const std::string other = found == theirs.end() ? "" : found->second;
    if (other == value) continue;
    text += concat(text.empty() ? "" : "; ", name, " is ", other.empty() ? "none" : other,
                   " there and ", value.empty() ? "none" : value, " here");
  }
  return text;
}

std::string decided_settings(const EngineConfig& config) {
  return concat("num_blocks=", config.cache.num_blocks, "\n");
}

int32_t read_decided_blocks(const std::string& text) {
  const std::string value = read_lines(text)["num_blocks"];
  int32_t num_blocks = 0;
  std::from_chars(value.data(), value.data() + value.size(), num_blocks);
  if (num_blocks < 1) throw DeviceError("node 0 does not say how large its KV cache is");
  return num_blocks;
}

}  // namespace llmserve
