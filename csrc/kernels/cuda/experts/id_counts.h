// Counts of ids that lie on the device (kernels/device_steps.h).
#pragma once

#include <functional>

#include "core/buffer.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/experts/experts.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/device_steps.h"

namespace llmserve::cuda {

// Each add() is a kernel, which writes the sums that it changes to mapped memory, too: they are
// there before the step's number is.
class DeviceIdCounts final : public IdCounts {
 public:
  // find_header: the header of the step under way, on the device, if it is recorded.
  using FindHeader = std::function<const StepHeader*()>;
  DeviceIdCounts(int64_t size, DeviceMemory& memory, PinnedMemory& pinned, FindHeader find_header);

  void add(const ConstTensor& ids, int64_t begin, int64_t num_ids) override;
  int64_t count(int64_t i) const override;

 private:
  DeviceMemory& memory_;
  const FindHeader find_header_;
  Buffer totals_;  // [size] i64
  Buffer seen_;    // [size] i64, mapped
};

}  // namespace llmserve::cuda
