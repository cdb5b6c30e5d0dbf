#include "core/draw_settings.h"

#include "core/error.h"

namespace llmserve {

void DrawSettings::validate() const {
  for_each_draw_field([&](const auto& field) {
    const auto value = this->*field.member;
    if (!field.is_valid(value)) throw InvalidArgument(concat(field.rule, ", got ", value));
  });
}

}  // namespace llmserve
