// One register_*() a public class; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace llmserve {

void register_errors(pybind11::module_& module);
void register_checkpoint(pybind11::module_& module);
void register_inspect(pybind11::module_& module);
void register_array(pybind11::module_& module);
void register_block_allocator(pybind11::module_& module);
void register_vocabulary(pybind11::module_& module);
void register_layer_runner(pybind11::module_& module);
void register_line_template(pybind11::module_& module);
void register_grammar(pybind11::module_& module);
void register_sampling_params(pybind11::module_& module);
void register_processor_queue(pybind11::module_& module);
void register_request_kinds(pybind11::module_& module);
void register_engine_config(pybind11::module_& module);
void register_machine(pybind11::module_& module);
void register_memory_plan(pybind11::module_& module);
void register_node_follower(pybind11::module_& module);
void register_engine(pybind11::module_& module);
void register_ops(pybind11::module_& module);
void register_scheduler(pybind11::module_& module);
void register_router(pybind11::module_& module);

}  // namespace llmserve
