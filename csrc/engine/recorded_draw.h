// What a device draws of a step that it may record: all that a plan of recorded_shape() needs, and
// nothing that differs from one to the next.
#pragma once

#include "engine/worker.h"
#include "kernels/device_steps.h"

namespace llmserve {

class RecordedDraw final : public StepSink {
 public:
  RecordedDraw(DeviceSteps& steps, const StepBatch& batch) : steps_(steps), batch_(batch) {}

  void take_hidden(const ConstTensor&) override {}
  void take_pooled_logits(const ConstTensor&, const PooledRows&) override {}
  void take_logits(const ConstTensor& logits, size_t begin) override {
    const auto count = static_cast<size_t>(logits.shape[0]);
    steps_.draw(logits, batch_.draws.subspan(begin, count), static_cast<int64_t>(begin));
  }

 private:
  DeviceSteps& steps_;
  const StepBatch& batch_;
};

}  // namespace llmserve
