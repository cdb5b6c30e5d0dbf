// What a request may want besides sampled tokens, or bring instead of token ids.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>

#include "api/beam_search_params.h"
#include "api/pooling.h"
#include "bindings/array.h"
#include "bindings/from_kwargs.h"
#include "bindings/register.h"
#include "core/error.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

// A copy in float32 of [T, E] numbers, so that the caller may change theirs.
std::shared_ptr<HostArray> take_prompt_embeds(const std::string& name, py::handle object) {
  const ImportedArray imported(name, object);
  const ConstTensor& view = imported.view();
  const bool is_float =
      view.dtype == DType::kF32 || view.dtype == DType::kBF16 || view.dtype == DType::kF16;
  if (view.rank != 2 || view.shape[0] < 1 || !is_float) {
    throw InvalidArgument(concat(name,
                                 ": expected float32, bfloat16 or float16 [tokens, hidden size], "
                                 "one token at least, got ",
                                 describe(view)));
  }
  const Array copy = Array::convert(view, DType::kF32);
  const float* values = copy.tensor().as<float>();
  const int64_t count = view.num_elements();
  auto embeds = std::make_shared<HostArray>(view.shape[0], view.shape[1]);
  std::copy_n(values, count, embeds->row(0));
  const float* bad =
      std::find_if(values, values + count, [](float x) { return !std::isfinite(x); });
  if (bad != values + count) {
    const int64_t idx = bad - values;
    throw InvalidArgument(concat(name, ": expected finite numbers, got ", *bad, " at [",
                                 idx / view.shape[1], ", ", idx % view.shape[1], "]"));
  }
  return embeds;
}

}  // namespace

void register_request_kinds(py::module_& module) {
  py::class_<PoolingParams>(module, "PoolingParams")
      .def(py::init(&from_kwargs<PoolingParams>))
      .def_property(
          "task", [](const PoolingParams& self) { return name(self.task); },
          [](PoolingParams& self, const std::string& task) { self.task = pooling_task(task); })
      .def_property(
          "pooling", [](const PoolingParams& self) { return name(self.pooling); },
          [](PoolingParams& self, const std::string& type) { self.pooling = pooling_type(type); })
      .def_readwrite("normalize", &PoolingParams::normalize)
      .def_readwrite("dimensions", &PoolingParams::dimensions)
      .def("validate", &PoolingParams::validate);
  py::class_<BeamSearchParams>(module, "BeamSearchParams")
      .def(py::init(&from_kwargs<BeamSearchParams>))
      .def_readwrite("beam_width", &BeamSearchParams::beam_width)
      .def_readwrite("length_penalty", &BeamSearchParams::length_penalty)
      .def("validate", &BeamSearchParams::validate);
  py::class_<HostArray, std::shared_ptr<HostArray>>(module, "PromptEmbeds")
      .def(py::init(&take_prompt_embeds), "name"_a, "array"_a)
      .def_property_readonly(
          "shape", [](const HostArray& self) { return py::make_tuple(self.num_rows, self.width); });
}

}  // namespace llmserve
