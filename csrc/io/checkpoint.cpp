#include "io/checkpoint.h"

#include <algorithm>
#include <sstream>

#include "core/error.h"

namespace llmserve {

namespace {

std::string describe_shape(std::string_view type, const TensorShape& shape) {
  std::ostringstream out;
  out << type << " [";
  for (size_t d = 0; d < shape.size(); ++d) out << (d ? ", " : "") << shape[d];
  out << "]";
  return out.str();
}

}  // namespace

std::string describe(const TensorEntry& entry) {
  return describe_shape(name(entry.dtype), entry.shape);
}

std::string_view Checkpoint::storage_name(const TensorEntry& entry) const {
  const QuantFormat* blocks = storage(entry).blocks;
  return blocks ? blocks->name : name(entry.dtype);
}

std::string Checkpoint::describe(const TensorEntry& entry) const {
  return describe_shape(storage_name(entry), entry.shape);
}

Checkpoint::Checkpoint(std::string_view format, std::string path, JsonDocument config,
                       std::vector<std::shared_ptr<const MappedFile>> files,
                       std::vector<TensorEntry> tensors, std::vector<TensorStorage> storages)
    : format_(format),
      path_(std::move(path)),
      config_(std::move(config)),
      files_(std::move(files)),
      tensors_(std::move(tensors)),
      storages_(std::move(storages)) {
  std::sort(tensors_.begin(), tensors_.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  for (size_t i = 1; i < tensors_.size(); ++i) {
    if (tensors_[i].name == tensors_[i - 1].name)
      throw CorruptFile(concat(file(tensors_[i])->path().string(), ": the tensor \"",
                               tensors_[i].name, "\" comes twice"));
  }
}

const TensorEntry* Checkpoint::find(std::string_view name) const {
  const auto it =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const TensorEntry& entry, std::string_view n) { return entry.name < n; });
  return it != tensors_.end() && it->name == name ? &*it : nullptr;
}

ConstTensor Checkpoint::view(const TensorEntry& entry) const {
  check_internal(!storage(entry).blocks, "blocks have no view");
  const int rank = static_cast<int>(entry.shape.size());
  if (rank > kMaxRank)
    throw NotSupported(concat(file(entry)->path().string(), ": tensor \"", entry.name, "\" has ",
                              rank, " dimensions; at most ", kMaxRank, " are supported"));
  ConstTensor tensor(file(entry)->bytes().data() + entry.offset, entry.dtype, {});
  tensor.rank = rank;
  int64_t stride = 1;
  for (int d = rank - 1; d >= 0; --d) {
    tensor.shape[d] = entry.shape[d];
    tensor.strides[d] = stride;
    stride *= entry.shape[d];
  }
  return tensor;
}

}  // namespace llmserve
