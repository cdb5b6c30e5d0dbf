// Plain structs made from keyword arguments, so that a binding lists each field once.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace llmserve {

// A T whose bound attributes are set from the keywords; an unknown name is Python's AttributeError.
template <class T>
std::unique_ptr<T> from_kwargs(const pybind11::kwargs& fields) {
  auto value = std::make_unique<T>();
  const pybind11::object view =
      pybind11::cast(value.get(), pybind11::return_value_policy::reference);
  for (const auto& [name, field] : fields) view.attr(name) = field;
  return value;
}

}  // namespace llmserve
