// What one rank computed in a step, bit by bit: for the comparison of ranks that compute the same.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/worker.h"

namespace llmserve {

// Keeps a copy of all that it is given, and hands it on where somebody else wants it, too.
class RankOutputs final : public StepSink {
 public:
  // Begins a step. The tensors lie in `memory`; `next` may be null.
  void begin(Memory& memory, StepSink* next);

  void take_hidden(const ConstTensor& hidden) override;
  void take_pooled_logits(const ConstTensor& logits, const PooledRows& rows) override;
  void take_logits(const ConstTensor& logits, size_t begin) override;

  // The first place where two ranks differ: "logits row 3, element 17: 0.25 and 0.5". Empty if all
  // bits are equal, NaNs included.
  std::string difference_from(const RankOutputs& other) const;

 private:
  struct Rows {
    const char* name;  // of the output
    int64_t width = 0;
    std::vector<float> values;  // [rows, width]
  };

  void keep(Rows& rows, const ConstTensor& tensor);
  static std::string difference(const Rows& a, const Rows& b);

  Memory* memory_ = nullptr;
  StepSink* next_ = nullptr;
  Rows hidden_{"hidden state"};
  Rows pooled_{"pooled logits"};
  Rows logits_{"logits"};
};

}  // namespace llmserve
