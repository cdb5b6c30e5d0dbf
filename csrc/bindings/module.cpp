#include <pybind11/pybind11.h>

#include "bindings/register.h"

namespace {

// pybind11 would wait for the main interpreter's lock for ever.
bool is_sub_interpreter() { return PyInterpreterState_Get() != PyInterpreterState_Main(); }

}  // namespace

// What Python calls is PyInit__core(), below; the module's name comes from its place.
PYBIND11_MODULE(_core_of_main_interpreter, module) {
  module.doc() = "llmserve's C++ core; use the names that the llmserve package re-exports.";
  llmserve::register_errors(module);
  llmserve::register_checkpoint(module);
  llmserve::register_inspect(module);
  llmserve::register_array(module);
  llmserve::register_block_allocator(module);
  llmserve::register_vocabulary(module);
  llmserve::register_grammar(module);
  llmserve::register_sampling_params(module);
  llmserve::register_processor_queue(module);
  llmserve::register_request_kinds(module);
  llmserve::register_engine_config(module);
  llmserve::register_machine(module);
  llmserve::register_memory_plan(module);
  llmserve::register_node_follower(module);
  llmserve::register_engine(module);
  llmserve::register_layer_runner(module);
  llmserve::register_line_template(module);
  llmserve::register_ops(module);
  llmserve::register_scheduler(module);
  llmserve::register_router(module);
}

extern "C" PYBIND11_EXPORT PyObject* PyInit__core() {
  if (is_sub_interpreter()) {
    PyErr_SetString(PyExc_ImportError,
                    "llmserve runs in the main interpreter only; use threads or processes there");
    return nullptr;
  }
  return PyInit__core_of_main_interpreter();
}
