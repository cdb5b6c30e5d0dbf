// Reads the input as JSON three ways, which have to agree on whether it is any: token by token, as
// one value that is skipped, and as a tree.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/error.h"
#include "io/json.h"
#include "io/json_reader.h"

namespace {

using namespace llmserve;

void read_value(JsonReader& reader) {
  std::string key;
  switch (reader.peek()) {
    case JsonReader::Kind::kNull: return reader.read_null();
    case JsonReader::Kind::kBool: reader.read_bool(); return;
    case JsonReader::Kind::kInt:
    case JsonReader::Kind::kFloat: reader.read_number(); return;
    case JsonReader::Kind::kString: reader.read_string(); return;
    case JsonReader::Kind::kArray:
      for (reader.begin_array(); reader.next_element();) read_value(reader);
      return;
    case JsonReader::Kind::kObject:
      for (reader.begin_object(); reader.next_key(key);) read_value(reader);
  }
}

template <typename Read>
bool is_taken(std::string_view text, const Read& read) {
  JsonReader reader("a.json", text);
  try {
    read(reader);
    reader.end();
  } catch (const CorruptFile&) {
    return false;
  }
  return true;
}

// Every value by the accessors of a tree, whatever it is.
void visit(const JsonNode& node) {
  if (node.is_object()) {
    for (const auto& [key, value] : node.as_object()) visit(value);
  } else if (node.is_array()) {
    for (const JsonNode& value : node.as_array()) visit(value);
  } else {
    try {
      if (node.is_string()) node.as_string();
      node.as_int_or(0, 0, 1 << 20);
    } catch (const CorruptFile&) {
    }
    node.where();
    node.describe();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const bool is_skipped = is_taken(text, [](JsonReader& reader) { reader.skip(); });
  const bool is_read = is_taken(text, read_value);
  // Only who reads a number finds it too large for a double.
  if (is_read && !is_skipped) std::abort();
  try {
    visit(JsonNode(JsonDocument::parse("a.json", text)));
    if (!is_read) std::abort();
  } catch (const CorruptFile&) {
  }
  return 0;
}
