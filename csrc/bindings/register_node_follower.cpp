#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/register.h"
#include "engine/node_follower.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {

namespace {

// A thread that hangs leaves it where it is.
struct DeleteUnlessLeft {
  void operator()(NodeFollower* node) const {
    if (node->left().empty()) delete node;
  }
};
using NodeHolder = std::unique_ptr<NodeFollower, DeleteUnlessLeft>;

}  // namespace

void register_node_follower(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<NodeFollower, NodeHolder>(module, "NodeFollower")
      .def(py::init([](const ConfigRequest& request, std::shared_ptr<Checkpoint> checkpoint) {
             const py::gil_scoped_release release;
             return NodeHolder(new NodeFollower(request, std::move(checkpoint)));
           }),
           "request"_a, "checkpoint"_a)
      .def("run", &NodeFollower::run, Release(),
           "Computes what node 0 tells it, until that ends, or stop().")
      .def("stop", &NodeFollower::stop, Release(), "Ends run(). On any thread.")
      .def_property_readonly("left", &NodeFollower::left,
                             "Why a thread of it was left where it hangs; empty: none was.")
      .def_property_readonly("num_steps", &NodeFollower::num_steps, "Steps that it has computed.");
}

}  // namespace llmserve
