#include "io/packed_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "core/mix.h"
#include "core/token_hash.h"
#include "io/json_reader.h"
#include "io/safetensors.h"

namespace llmserve {
namespace {

// Of the format below; what the bytes of a weight mean is the variant's.
constexpr std::string_view kFormat = "llmserve packed weights 1";
// Tensors begin on a page, and so does every cache line of a panel on a cache line.
constexpr size_t kDataAlignment = 4096;
// A thread's share at a time of what is summed; two fit an L2.
constexpr int64_t kChunkBytes = 1 << 18;
// Of a tensor's beginning, middle and end, that a key looks at.
constexpr int64_t kSampleBytes = 512;
// The reader's bound on names is 4096, and several may be stacked in one weight.
constexpr size_t kMaxNameBytes = 1024;

void update(Sha256& hash, std::string_view text) {
  hash.update({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  const uint8_t end = 0;
  hash.update({&end, 1});
}

void update(Sha256& hash, uint64_t number) {
  uint8_t bytes[sizeof(number)];
  std::memcpy(bytes, &number, sizeof(number));
  hash.update(bytes);
}

// Sums of words, and sums of these, in lanes that vectorize: at memory speed. Against accidents,
// not against attackers. Fletcher 1982.
uint64_t sum_chunk(std::span<const std::byte> bytes) {
  constexpr size_t kLanes = 8;
  uint64_t sums[kLanes] = {}, totals[kLanes] = {}, words[kLanes] = {};
  const auto add = [&] {
    for (size_t i = 0; i < kLanes; ++i) sums[i] += words[i];
    for (size_t i = 0; i < kLanes; ++i) totals[i] += sums[i];
  };
  size_t at = 0;
  for (; at + sizeof(words) <= bytes.size(); at += sizeof(words)) {
    std::memcpy(words, bytes.data() + at, sizeof(words));
    add();
  }
  if (at < bytes.size()) {
    std::fill_n(words, kLanes, 0);
    std::memcpy(words, bytes.data() + at, bytes.size() - at);
    add();
  }
  uint64_t all = bytes.size();
  for (size_t i = 0; i < kLanes; ++i) all = mix64(mix64(all, sums[i]), totals[i]);
  return all;
}

// `file`: where the bytes are fetched from, if they lie in one.
std::string checksum(std::span<const PackedTensor> tensors, const RunOnThreads& run,
                     const MappedFile* file) {
  std::vector<std::span<const std::byte>> chunks;
  Sha256 hash;
  for (const PackedTensor& tensor : tensors) {
    update(hash, tensor.name);
    update(hash, tensor.bytes.size());
    for (size_t at = 0; at < tensor.bytes.size(); at += kChunkBytes)
      chunks.push_back(
          tensor.bytes.subspan(at, std::min<size_t>(kChunkBytes, tensor.bytes.size() - at)));
  }
  std::vector<uint64_t> sums(chunks.size());
  run(std::ssize(chunks), [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      if (file) file->fetch(chunks[i].data() - file->bytes().data(), std::ssize(chunks[i]));
      sums[i] = sum_chunk(chunks[i]);
    }
  });
  for (const uint64_t sum : sums) update(hash, sum);
  return to_hex(hash.finish());
}

// As a JSON string. Bytes that are no UTF-8, which a path may have, become question marks.
std::string json_string(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20)
      out += concat("\\u00", kHex[byte >> 4], kHex[byte & 15]);
    else
      out += c == '"' || c == '\\' ? std::string{'\\', c} : std::string{c};
  }
  out += '"';
  try {
    JsonReader("", out).read_string();
  } catch (const CorruptFile&) {
    for (char& c : out)
      if (static_cast<unsigned char>(c) >= 0x80) c = '?';
  }
  return out;
}

std::string stored_name(const std::string& name) {
  if (name.size() <= kMaxNameBytes) return name;
  Sha256 hash;
  update(hash, name);
  return to_hex(hash.finish());
}

std::string find_value(const MappedFile& file, std::string_view name) {
  for (auto& [key, value] : read_safetensors_metadata(file))
    if (key == name) return value;
  throw CorruptFile(concat(file.path().string(), ": has no \"", name,
                           "\" in its metadata; it is not a file of packed weights"));
}

}  // namespace

PackedKey packed_key(const Checkpoint& checkpoint, const std::string& variant) {
  Sha256 hash;
  update(hash, variant);
  std::string files;
  for (const auto& file : checkpoint.files()) {
    files += file->name() + "/";
    update(hash, static_cast<uint64_t>(file->num_bytes()));
    update(hash, static_cast<uint64_t>(file->times().modified_ns));
    update(hash, static_cast<uint64_t>(file->times().changed_ns));
  }
  update(hash, files);
  for (const TensorEntry& entry : checkpoint.tensors()) {
    update(hash, entry.name);
    update(hash, checkpoint.describe(entry));
    const TensorStorage& storage = checkpoint.storage(entry);
    update(hash, concat(entry.file_idx, ' ', entry.offset, ' ', entry.num_bytes, ' ',
                        storage.paired_heads, ' ', storage.added));
    const std::byte* bytes = checkpoint.file(entry)->bytes().data() + entry.offset;
    const int64_t size = std::min(kSampleBytes, entry.num_bytes);
    for (const int64_t at : {int64_t{0}, (entry.num_bytes - size) / 2, entry.num_bytes - size})
      hash.update({reinterpret_cast<const uint8_t*>(bytes + at), static_cast<size_t>(size)});
  }
  std::error_code error;
  const std::filesystem::path path = std::filesystem::canonical(checkpoint.path(), error);
  return {.model = error ? checkpoint.path() : path.string(),
          .files = files,
          .variant = variant,
          .content = to_hex(hash.finish())};
}

PackedFile::PackedFile(std::shared_ptr<const MappedFile> file, const PackedKey& key)
    : file_(std::move(file)), tensors_(read_safetensors_headers({&file_, 1})) {
  if (find_value(*file_, "format") != kFormat || read_packed_key(*file_).content != key.content)
    throw CorruptFile(concat(file_->path().string(),
                             ": the checkpoint, or llmserve, has changed since it was made"));
}

void PackedFile::check(const RunOnThreads& run) const {
  std::vector<PackedTensor> tensors;
  for (const TensorEntry& entry : tensors_) {
    const auto size = static_cast<size_t>(entry.num_bytes);
    tensors.push_back({entry.name, file_->bytes().subspan(entry.offset, size)});
  }
  if (checksum(tensors, run, file_.get()) != find_value(*file_, "checksum"))
    throw CorruptFile(concat(file_->path().string(), ": its checksum is wrong: it was damaged"));
}

std::span<const std::byte> PackedFile::find(const std::string& name, int64_t num_bytes) const {
  const std::string stored = stored_name(name);
  const auto entry = std::ranges::find(tensors_, stored, &TensorEntry::name);
  if (entry == tensors_.end() || entry->num_bytes != num_bytes) return {};
  return file_->bytes().subspan(static_cast<size_t>(entry->offset), static_cast<size_t>(num_bytes));
}

PackedKey read_packed_key(const MappedFile& file) {
  return {.model = find_value(file, "model"),
          .variant = find_value(file, "variant"),
          .content = find_value(file, "content")};
}

std::string packed_header(const PackedKey& key, std::span<const PackedTensor> tensors,
                          const RunOnThreads& run) {
  std::vector<PackedTensor> stored(tensors.begin(), tensors.end());
  for (PackedTensor& tensor : stored) tensor.name = stored_name(tensor.name);
  std::string json = concat(
      "{\"__metadata__\":{\"format\":", json_string(kFormat), ",\"model\":", json_string(key.model),
      ",\"variant\":", json_string(key.variant), ",\"content\":", json_string(key.content),
      ",\"checksum\":", json_string(checksum(stored, run, nullptr)), "}");
  size_t begin = 0;
  for (const PackedTensor& tensor : stored) {
    const size_t end = begin + tensor.bytes.size();
    json += concat(",", json_string(tensor.name), ":{\"dtype\":\"U8\",\"shape\":[",
                   tensor.bytes.size(), "],\"data_offsets\":[", begin, ",", end, "]}");
    begin = end;
  }
  json += "}";
  uint64_t size = json.size() + sizeof(uint64_t);
  size = (size + kDataAlignment - 1) / kDataAlignment * kDataAlignment - sizeof(uint64_t);
  json.resize(size, ' ');
  std::string header(sizeof(size), '\0');  // little-endian, as every supported machine is
  std::memcpy(header.data(), &size, sizeof(size));
  return header + json;
}

}  // namespace llmserve
