// A small JSON tree with typed access, for configuration files of untrusted origin. Every error
// names the file and the key path: "config.json: rope_parameters.factor: expected a number, got a
// string".
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace llmserve {

struct JsonMember;

struct JsonValue {
  using Array = std::vector<JsonValue>;
  using Object = std::vector<JsonMember>;  // in the file's order, keys unique
  std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object> data;
};

struct JsonMember {
  std::string key;
  JsonValue value;
};

// A whole file's tree. Copies share it.
class JsonDocument {
 public:
  // Configuration files are a few kilobytes; tokenizer-sized ones are not read here.
  static constexpr int64_t kMaxBytes = 16 << 20;
  static constexpr int64_t kMaxValues = 1 << 20;

  // Throws CorruptFile (file, byte, reason): bad syntax, duplicate keys, too deep or too large.
  static JsonDocument parse(std::string_view file, std::string_view text);

  // A tree that was made from another description; errors name `file`, and `path` before a key.
  static JsonDocument make(std::string_view file, JsonValue root, std::string_view path = "");

  const std::string& file() const { return tree_->file; }
  const JsonValue& root() const { return tree_->root; }
  const std::string& path() const { return tree_->path; }

 private:
  struct Tree {
    std::string file;
    JsonValue root;
    std::string path;
  };
  std::shared_ptr<const Tree> tree_;  // shared: nodes and documents are passed about as values
};

// One value of a document with its key path. Absent and null values are nodes too, so that optional
// fields read naturally. Valid while its document (or a copy of it) is.
class JsonNode {
 public:
  explicit JsonNode(const JsonDocument& document)
      : value_(&document.root()), file_(&document.file()), path_(document.path()) {}

  // A member; an absent node if there is none. Throws CorruptFile unless this is an object.
  JsonNode operator[](std::string_view key) const;

  bool is_absent() const { return value_ == nullptr; }
  // Absent or null: transformers writes unset fields either way.
  bool is_null() const;
  bool is_object() const;
  bool is_array() const;
  bool is_string() const;

  // The tree below. Precondition: it is not absent.
  const JsonValue& value() const { return *value_; }

  // Each throws CorruptFile, naming file and path, on another type, an absent value, or a number
  // outside [min, max].
  bool as_bool() const;
  int64_t as_int(int64_t min, int64_t max) const;
  double as_number(double min, double max) const;
  const std::string& as_string() const;
  std::vector<JsonNode> as_array() const;
  std::vector<std::pair<std::string, JsonNode>> as_object() const;

  // The fallback where the value is absent or null.
  bool as_bool_or(bool fallback) const { return is_null() ? fallback : as_bool(); }
  int64_t as_int_or(int64_t fallback, int64_t min, int64_t max) const {
    return is_null() ? fallback : as_int(min, max);
  }
  double as_number_or(double fallback, double min, double max) const {
    return is_null() ? fallback : as_number(min, max);
  }

  // "config.json: rope_parameters.factor", for messages.
  std::string where() const;
  // The value as the user wrote it, shortened, for messages.
  std::string describe() const;
  // Throws CorruptFile "<where>: <reason>".
  [[noreturn]] void fail(std::string_view reason) const;

 private:
  JsonNode(const JsonValue* value, const std::string* file, std::string path)
      : value_(value), file_(file), path_(std::move(path)) {}

  const JsonValue* value_;
  const std::string* file_;
  std::string path_;
};

}  // namespace llmserve
