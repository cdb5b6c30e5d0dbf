// The text model of a checkpoint that has a vision tower beside it, as if it stood by itself: its
// config with the fields, and its tensors with the names, of that model alone.
#pragma once

#include <span>
#include <string_view>

#include "io/checkpoint.h"

namespace llmserve {

// An architecture that wraps a text model: one row each, the only place that lists them.
struct WrapperRow {
  std::string_view name;  // as in `architectures`
  std::string_view model_type;
  std::string_view summary;
  std::string_view text_model_type;  // of a text_config that does not say
  bool can_be_flat = false;          // older configs have the text model's fields at the top
};
std::span<const WrapperRow> wrapper_registry();

// The text model's checkpoint, or the one that came if its config is of no row. Tensors of the
// other parts are left out; what is not known stays. The config says in "text_part_of" what it was
// cut from, and gets what transformers leaves out of a text_config. Throws CorruptFile (field).
Checkpoint take_text_part(Checkpoint checkpoint);

}  // namespace llmserve
