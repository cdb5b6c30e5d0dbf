// Who holds the memory of an `llmserve.Array`, for the tests.
#include "bindings/array.h"
#include "testing/register.h"

namespace py = pybind11;

namespace llmserve {

void register_testing_array(py::module_& testing) {
  testing.def("use_count", [](const Array& array) { return array.owner().use_count(); });
  testing.def("freeze", [](const Array& array) {
    return Array(array.tensor(), array.owner(), /*is_read_only=*/true);
  });
}

}  // namespace llmserve
