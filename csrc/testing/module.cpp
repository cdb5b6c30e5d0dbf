#include <pybind11/pybind11.h>

#include "bindings/register.h"
#include "testing/register.h"

PYBIND11_MODULE(_core_testing, testing) {
  testing.doc() = "Internals of llmserve's C++ core, for its tests and benchmarks.";
  // Its types are those of what is bound here.
  pybind11::module_::import("llmserve._core");
  // Each of the two modules has a copy of the core, and with it of the exceptions. A platform may
  // take them for different types.
  llmserve::register_errors(testing);
  llmserve::register_testing_array(testing);
  llmserve::register_testing_ops(testing);
  llmserve::register_testing_comm(testing);
  llmserve::register_testing_hand_over(testing);
  llmserve::register_testing_nodes(testing);
  llmserve::register_testing_halves(testing);
  llmserve::register_testing_io(testing);
  llmserve::register_testing_models(testing);
  llmserve::register_testing_weights(testing);
  llmserve::register_testing_rank_cut(testing);
  llmserve::register_testing_grammar(testing);
  llmserve::register_testing_control(testing);
  llmserve::register_testing_kv_cache(testing);
  llmserve::register_testing_scheduler(testing);
  llmserve::register_testing_memory(testing);
  llmserve::register_testing_soak(testing);
  llmserve::register_testing_threads(testing);
  llmserve::register_testing_speculation(testing);  // what engines are given
  llmserve::register_testing_engine(testing);
  llmserve::register_testing_sampling(testing);
}
