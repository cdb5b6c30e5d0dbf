#include "kernels/cpu/cpu_norm.h"

#include "kernels/host_ops.h"

namespace llmserve {

void norm_rows(CpuWorkers& workers, const RmsNormArgs& args) {
  const int64_t width = args.weight.shape[0];
  workers.pool().parallel_for(
      num_rows(args.x), row_grain(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r)
          workers.kernels().rms_norm(row_of(args.x, r), args.weight.as<float>(), width,
                                     &args.numbers, row_of(args.out, r));
      });
}

}  // namespace llmserve
