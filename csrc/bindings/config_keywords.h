// Configs made from Python's keywords, by the lists of their fields.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <string_view>

#include "api/config_fields.h"
#include "core/error.h"

namespace llmserve {

// Sets the field of that name; false if there is none. Throws TypeError for a value that does not
// fit the field's type.
template <class Config>
bool set_field(Config& config, std::string_view name, pybind11::handle value) {
  bool is_known = false;
  for_each_field<Config>([&](const auto& field) {
    if (name != field.name) return;
    is_known = true;
    auto& member = config.*field.member;
    try {
      member = value.cast<std::remove_reference_t<decltype(member)>>();
    } catch (const pybind11::cast_error&) {
      throw pybind11::type_error(
          concat(name, " cannot be ", std::string(pybind11::repr(value)).substr(0, 80)));
    }
  });
  return is_known;
}

// A Config from keywords; each of `parts`, functions of the config, gives a struct that has some of
// them, and the first that knows a name takes it.
template <class Config, class... Parts>
std::unique_ptr<Config> from_keywords(const pybind11::kwargs& keywords, const Parts&... parts) {
  auto config = std::make_unique<Config>();
  for (const auto& [key, value] : keywords) {
    const auto name = key.template cast<std::string>();
    if (!(set_field(*config, name, value) || ... || set_field(parts(*config), name, value)))
      throw pybind11::type_error(concat("there is no setting ", name));
  }
  return config;
}

}  // namespace llmserve
