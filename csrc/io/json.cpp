#include "io/json.h"

#include <algorithm>
#include <sstream>
#include <unordered_set>

#include "core/error.h"
#include "io/json_reader.h"

namespace llmserve {
namespace {

class TreeParser {
 public:
  explicit TreeParser(JsonReader& reader) : reader_(reader) {}

  JsonValue parse() {
    if (++num_values_ > JsonDocument::kMaxValues)
      reader_.fail(concat("more than ", JsonDocument::kMaxValues, " values"));
    switch (reader_.peek()) {
      case JsonReader::Kind::kNull:
        reader_.read_null();
        return {};
      case JsonReader::Kind::kBool:
        return {reader_.read_bool()};
      case JsonReader::Kind::kInt:
        return {reader_.read_int()};
      case JsonReader::Kind::kFloat:
        return {reader_.read_number()};
      case JsonReader::Kind::kString:
        return {reader_.read_string()};
      case JsonReader::Kind::kArray:
        return parse_array();
      case JsonReader::Kind::kObject:
        return parse_object();
    }
    return {};
  }

 private:
  JsonValue parse_array() {
    JsonValue::Array array;
    for (reader_.begin_array(); reader_.next_element();) array.push_back(parse());
    return {std::move(array)};
  }

  JsonValue parse_object() {
    JsonValue::Object object;
    std::unordered_set<std::string> keys;
    std::string key;
    for (reader_.begin_object(); reader_.next_key(key);) {
      if (!keys.insert(key).second)
        reader_.fail(concat("the key \"", key.substr(0, 64), "\" comes twice"));
      object.push_back({key, parse()});
    }
    return {std::move(object)};
  }

  JsonReader& reader_;
  int64_t num_values_ = 0;
};

std::string_view kind_name(const JsonValue& value) {
  static constexpr std::string_view kNames[] = {"null",     "a boolean", "an integer", "a number",
                                                "a string", "an array",  "an object"};
  return kNames[value.data.index()];
}

}  // namespace

JsonDocument JsonDocument::parse(std::string_view file, std::string_view text) {
  if (static_cast<int64_t>(text.size()) > kMaxBytes)
    throw CorruptFile(
        concat(file, ": is ", text.size(), " bytes long; at most ", kMaxBytes, " are read"));
  JsonReader reader(file, text);
  auto tree = std::make_shared<Tree>();
  tree->file = file;
  tree->root = TreeParser(reader).parse();
  reader.end();
  JsonDocument document;
  document.tree_ = std::move(tree);
  return document;
}

JsonDocument JsonDocument::make(std::string_view file, JsonValue root, std::string_view path) {
  auto tree = std::make_shared<Tree>();
  tree->file = file;
  tree->root = std::move(root);
  tree->path = path;
  JsonDocument document;
  document.tree_ = std::move(tree);
  return document;
}

JsonNode JsonNode::operator[](std::string_view key) const {
  const auto* object = value_ ? std::get_if<JsonValue::Object>(&value_->data) : nullptr;
  if (!object) fail(concat("expected an object, got ", describe()));
  std::string path = path_.empty() ? std::string(key) : concat(path_, ".", key);
  for (const JsonMember& member : *object) {
    if (member.key == key) return JsonNode(&member.value, file_, std::move(path));
  }
  return JsonNode(nullptr, file_, std::move(path));
}

bool JsonNode::is_null() const {
  return !value_ || std::holds_alternative<std::monostate>(value_->data);
}
bool JsonNode::is_object() const {
  return value_ && std::holds_alternative<JsonValue::Object>(value_->data);
}
bool JsonNode::is_array() const {
  return value_ && std::holds_alternative<JsonValue::Array>(value_->data);
}
bool JsonNode::is_string() const {
  return value_ && std::holds_alternative<std::string>(value_->data);
}

bool JsonNode::as_bool() const {
  if (value_) {
    if (const auto* value = std::get_if<bool>(&value_->data)) return *value;
  }
  fail(concat("expected true or false, got ", describe()));
}

int64_t JsonNode::as_int(int64_t min, int64_t max) const {
  if (value_) {
    if (const auto* value = std::get_if<int64_t>(&value_->data)) {
      if (*value >= min && *value <= max) return *value;
    }
  }
  fail(concat("expected an integer from ", min, " to ", max, ", got ", describe()));
}

double JsonNode::as_number(double min, double max) const {
  if (value_) {
    double value = 0;
    bool is_number = true;
    if (const auto* integer = std::get_if<int64_t>(&value_->data)) {
      value = static_cast<double>(*integer);
    } else if (const auto* number = std::get_if<double>(&value_->data)) {
      value = *number;
    } else {
      is_number = false;
    }
    if (is_number && value >= min && value <= max) return value;
  }
  fail(concat("expected a number from ", min, " to ", max, ", got ", describe()));
}

const std::string& JsonNode::as_string() const {
  if (value_) {
    if (const auto* value = std::get_if<std::string>(&value_->data)) return *value;
  }
  fail(concat("expected a string, got ", describe()));
}

std::vector<JsonNode> JsonNode::as_array() const {
  const auto* array = value_ ? std::get_if<JsonValue::Array>(&value_->data) : nullptr;
  if (!array) fail(concat("expected an array, got ", describe()));
  std::vector<JsonNode> nodes;
  for (const JsonValue& value : *array)
    nodes.push_back(JsonNode(&value, file_, concat(path_, "[", nodes.size(), "]")));
  return nodes;
}

std::vector<std::pair<std::string, JsonNode>> JsonNode::as_object() const {
  const auto* object = value_ ? std::get_if<JsonValue::Object>(&value_->data) : nullptr;
  if (!object) fail(concat("expected an object, got ", describe()));
  std::vector<std::pair<std::string, JsonNode>> members;
  for (const JsonMember& member : *object) members.emplace_back(member.key, (*this)[member.key]);
  return members;
}

std::string JsonNode::where() const { return path_.empty() ? *file_ : concat(*file_, ": ", path_); }

std::string JsonNode::describe() const {
  if (!value_) return "nothing";
  if (const auto* value = std::get_if<bool>(&value_->data)) return *value ? "true" : "false";
  if (const auto* value = std::get_if<int64_t>(&value_->data)) return concat(*value);
  if (const auto* value = std::get_if<double>(&value_->data)) return concat(*value);
  if (const auto* value = std::get_if<std::string>(&value_->data)) {
    static constexpr size_t kShown = 60;  // enough for any name that means something
    return value->size() <= kShown ? concat("\"", *value, "\"")
                                   : concat("a string of ", value->size(), " bytes");
  }
  return std::string(kind_name(*value_));
}

void JsonNode::fail(std::string_view reason) const {
  throw CorruptFile(concat(where(), ": ", reason));
}

}  // namespace llmserve
