// Configs know their fields by name: one list beside each struct, from which are made the keywords
// that Python gives it and the refusal of what is too small.
#pragma once

#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>

#include "core/error.h"

namespace llmserve {

inline constexpr int64_t kNoMinimum = std::numeric_limits<int64_t>::min();

template <class Config, class Value>
struct ConfigField {
  constexpr ConfigField(const char* name, Value Config::* member, int64_t minimum = kNoMinimum)
      : name(name), member(member), minimum(minimum) {}

  const char* name;  // the keyword
  Value Config::* member;
  int64_t minimum;  // of a number
};

// visit(field) for each of Config::fields(), in their order.
template <class Config, class Visit>
void for_each_field(const Visit& visit) {
  std::apply([&](const auto&... field) { (visit(field), ...); }, Config::fields());
}

// Throws InvalidArgument that names the first field that is below its minimum.
template <class Config>
void check_minimums(const Config& config) {
  for_each_field<Config>([&](const auto& field) {
    const auto& value = config.*field.member;
    if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(value)>>) {
      if (field.minimum != kNoMinimum && static_cast<int64_t>(value) < field.minimum) {
        throw InvalidArgument(
            concat(field.name, " must be at least ", field.minimum, ", got ", value));
      }
    }
  });
}

}  // namespace llmserve
