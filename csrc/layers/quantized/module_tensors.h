// The tensors that one linear weight is made of: found by their suffixes, checked, read.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "core/float_types.h"
#include "io/checkpoint.h"

namespace llmserve {

// A tensor's elements in the mapping, at any address.
struct StoredArray {
  const std::byte* data = nullptr;
  const TensorEntry* entry = nullptr;

  explicit operator bool() const { return entry != nullptr; }
  int64_t size() const { return entry->num_bytes / size_bytes(entry->dtype); }
  uint32_t word(int64_t i) const {
    uint32_t x;
    std::memcpy(&x, data + 4 * i, sizeof(x));
    return x;
  }
  uint64_t long_word(int64_t i) const {
    uint64_t x;
    std::memcpy(&x, data + 8 * i, sizeof(x));
    return x;
  }
  uint8_t byte(int64_t i) const { return static_cast<uint8_t>(data[i]); }
  // Of F32, F16, BF16; of F8_E4M3 and F8_E5M2; of U8 the power of two 2^(x - 127), NaN for 255.
  float value(int64_t i) const;
};

// Which weight, and what the model takes it for.
struct ModuleRequest {
  std::string name;            // "model.layers.0.mlp.up_proj.weight"
  int64_t rows = 0;            // N, of one of the matrices
  int64_t columns = 0;         // K
  int64_t num_matrices = 0;    // of a tensor [X, N, K]; 0: it is [N, K]
  bool is_transposed = false;  // as floats the file would have it as [K, N]
  // "model.layers.0.mlp.up_proj"; of a name without ".weight" the name itself.
  std::string module() const;
};

// Every tensor that is looked up counts as used. Errors are CorruptFile: file, tensor, expected,
// got.
class ModuleTensors {
 public:
  ModuleTensors(const Checkpoint& checkpoint, const ModuleRequest& request,
                std::unordered_set<std::string>& used)
      : checkpoint_(checkpoint), request_(request), module_(request.module()), used_(used) {}

  const ModuleRequest& request() const { return request_; }
  const std::string& module() const { return module_; }
  int64_t rows() const { return request_.rows; }        // N
  int64_t columns() const { return request_.columns; }  // K
  // False for a config.json by itself: then nothing may be looked up.
  bool exist() const { return checkpoint_.has_tensors(); }

  // "weight…" is the weight's own name with what follows; other suffixes are the module's.
  // An empty array if there is none.
  StoredArray find(std::string_view suffix);
  bool has(std::string_view suffix) const { return look_up(suffix) != nullptr; }
  bool has_type(std::string_view suffix, DType dtype) const {
    const TensorEntry* entry = look_up(suffix);
    return entry && entry->dtype == dtype;
  }
  // Throws unless it is there, of one of the types and of the shape. A dimension of -1 is any.
  StoredArray need(std::string_view suffix, std::initializer_list<DType> dtypes,
                   std::initializer_list<int64_t> shape);
  static constexpr int64_t kAnyCount = -1;
  // Any shape of so many elements.
  StoredArray need_elements(std::string_view suffix, std::initializer_list<DType> dtypes,
                            int64_t count);
  // Those of the suffixes that are there, and do not matter here, count as used.
  void ignore(std::initializer_list<std::string_view> suffixes);
  // What need() found so far.
  const std::vector<const TensorEntry*>& entries() const { return entries_; }

  // "file: tensor "name": <reason>".
  [[noreturn]] void fail(const StoredArray& array, std::string_view reason) const;
  std::string full_name(std::string_view suffix) const;

 private:
  const TensorEntry* look_up(std::string_view suffix) const;
  StoredArray need_any(std::string_view suffix, std::initializer_list<DType> dtypes,
                       const std::string& expected);

  const Checkpoint& checkpoint_;
  const ModuleRequest& request_;
  const std::string module_;
  std::unordered_set<std::string>& used_;
  std::vector<const TensorEntry*> entries_;
};

}  // namespace llmserve
