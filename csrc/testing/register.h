// One register_testing_*() a part of the core; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace llmserve {

void register_testing_array(pybind11::module_& testing);
void register_testing_ops(pybind11::module_& testing);
void register_testing_comm(pybind11::module_& testing);
void register_testing_hand_over(pybind11::module_& testing);
void register_testing_nodes(pybind11::module_& testing);
void register_testing_halves(pybind11::module_& testing);
void register_testing_io(pybind11::module_& testing);
void register_testing_models(pybind11::module_& testing);
void register_testing_weights(pybind11::module_& testing);
void register_testing_rank_cut(pybind11::module_& testing);
void register_testing_grammar(pybind11::module_& testing);
void register_testing_control(pybind11::module_& testing);
void register_testing_kv_cache(pybind11::module_& testing);
void register_testing_scheduler(pybind11::module_& testing);
void register_testing_memory(pybind11::module_& testing);
void register_testing_soak(pybind11::module_& testing);
void register_testing_threads(pybind11::module_& testing);
void register_testing_engine(pybind11::module_& testing);
void register_testing_sampling(pybind11::module_& testing);
void register_testing_speculation(pybind11::module_& testing);

}  // namespace llmserve
