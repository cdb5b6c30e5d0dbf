// What a GGUF file calls a model's parts, and how that becomes a Hugging Face description of it.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "io/gguf.h"
#include "io/json.h"
#include "io/tensor_renaming.h"

namespace llmserve {

// Collects the fields of a config.json from a file's metadata.
class GgufConfig {
 public:
  GgufConfig(const GgufFile& file, std::string_view architecture);

  // Of the architecture: "attention.head_count" is "llama.attention.head_count". nullptr: absent.
  const GgufValue* find(std::string_view key) const;
  // The metadata of `key` as `field`, where it is present.
  void copy_integer(std::string_view key, std::string_view field);
  void copy_number(std::string_view key, std::string_view field);
  // The one number of an integer, or of an array of them for each layer. Throws NotSupported where
  // layers differ.
  int64_t uniform_integer(const GgufValue& value) const;

  bool has_tensor(std::string_view name) const { return file_.find_tensor(name) != nullptr; }
  // A short list of numbers that is stored as a tensor of f32. Throws CorruptFile.
  JsonValue::Array small_tensor(std::string_view name) const;

  void set(std::string_view field, JsonValue value);
  // Of what set() was given.
  int64_t integer(std::string_view field) const;

  const GgufFile& file() const { return file_; }
  // The architecture's: "llama.".
  const std::string& prefix() const { return prefix_; }
  JsonDocument finish() &&;

 private:
  const GgufFile& file_;
  std::string prefix_;
  JsonValue::Object fields_;
};

// One row an architecture: the only place that lists them.
struct GgufArchitecture {
  std::string_view name;               // general.architecture
  std::string_view if_tensor = {};     // the row is of files with this tensor; empty: of all others
  std::string_view model_class;        // config.json's architectures[0]
  std::span<const RenamingRow> names;  // where they differ from those that most models share
  // llama.cpp rotates neighbouring elements of a head and the converter brought the rows of q and k
  // into that order.
  bool has_paired_rows = false;
  float norm_added = 0.0f;   // to every norm's weight, by the converter
  bool has_experts = false;  // files of experts are of models that are known
  // What yarn_log_multiplier is of mscale_all_dim, which mscale equals then. 0: it is that itself.
  float yarn_multiplier = 0.0f;
  // Fields beside those that all have; may be null.
  void (*configure)(GgufConfig& config) = nullptr;
};
std::span<const GgufArchitecture> gguf_architecture_registry();

// Throws CorruptFile (no architecture), NotSupported (names those that are).
const GgufArchitecture& find_gguf_architecture(const GgufFile& file);

// The model's name of a tensor, empty for one that no model asks for.
std::string model_tensor_name(const GgufArchitecture& architecture, std::string_view gguf_name);

// What the metadata says of experts, in the spellings of all families. Throws NotSupported for
// experts of an architecture that has none here.
void add_experts(GgufConfig& config, const GgufArchitecture& architecture);

// The fields of config.json that the file implies. Throws CorruptFile, NotSupported.
JsonDocument make_config(const GgufFile& file, const GgufArchitecture& architecture);

}  // namespace llmserve
