// Routers of experts, and the sums of what experts give.
#pragma once

#include "kernels/cpu/cpu_workers.h"

namespace llmserve {

// Floats of a thread that route_experts takes.
inline int64_t router_floats(int64_t num_experts) { return 3 * num_experts; }

// The route_experts op.
void route_rows(CpuWorkers& workers, const RouteExpertsArgs& args);

// The combine_experts op. Slot i of token t is row places[t * k + i] of x; null: row t * k + i.
void combine_rows(CpuWorkers& workers, const CombineExpertsArgs& args, const int32_t* places);

}  // namespace llmserve
