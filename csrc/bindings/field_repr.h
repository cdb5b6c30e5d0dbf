// How a record of read-only fields prints.
#pragma once

#include <pybind11/pybind11.h>

namespace llmserve {

// "Name(field=value, ...)": the properties of the object's class, as they were defined.
pybind11::str field_repr(const pybind11::object& record);

}  // namespace llmserve
