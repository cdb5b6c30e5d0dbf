// Reads the input as a config.json, with the text part of a model of several taken out as for a
// checkpoint.
#include <cstdint>
#include <string_view>

#include "core/error.h"
#include "io/checkpoint.h"
#include "io/json.h"
#include "io/text_part.h"
#include "models/config_reader.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace llmserve;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const Checkpoint checkpoint = take_text_part(
        Checkpoint("config", "config.json", JsonDocument::parse("config.json", text), {}, {}));
    read_model_config(checkpoint.config());
  } catch (const CorruptFile&) {
  } catch (const NotSupported&) {
  } catch (const InvalidArgument&) {
  }
  return 0;
}
