// Tensor names of one layout in those of another.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace llmserve {

// "blk.{}.attn_q" and "model.layers.{}.self_attn.q_proj": {} is a layer's number, and what follows
// the last dot of a tensor's name (".weight", ".bias") is kept.
struct RenamingRow {
  std::string_view from;
  std::string_view to;
};

// Empty if no row fits.
std::string rename_tensor(std::span<const RenamingRow> rows, std::string_view name);

}  // namespace llmserve
