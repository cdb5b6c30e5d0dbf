// Linear layers of which each row has one of several: y = x W_i^T + b_i, with i a row's own.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/weight_loader.h"

namespace llmserve {

// Part i of expert e is parts[i] with e in place of "{}" and ".weight" behind it, or, without "{}",
// matrix e of the tensor.
struct ExpertLinearSpec {
  std::vector<WeightPart> parts;
  std::vector<WeightPart> biases;  // of tensors [X, N_i]; none: no biases
  int64_t num_experts = 0;         // X
  int64_t in_features = 0;         // K
  int64_t rows_per_token = 0;      // that a step asks for: k
  bool is_transposed = false;
  Shard shard;         // the rank's columns of each part, or its part of K
  IndexRange experts;  // those that the rank has, whole; of size 0: all
};

class ExpertLinear {
 public:
  ExpertLinear(WeightLoader& weights, const ExpertLinearSpec& spec);

  // At multiples of how many elements K of each expert can be cut; 0: it cannot be.
  static int64_t input_unit(WeightLoader& weights, const ExpertLinearSpec& spec);

  // The experts of all ranks, where each has some, whole. It refers to the ranks' weights.
  struct Joined {
    std::vector<std::vector<const LinearWeight*>> stacks;  // [stacks][X]
    std::vector<float> bias;                               // [X * N] or empty
  };
  // Throws NotSupported where ranks have theirs in different formats.
  static Joined join(std::span<const ExpertLinear* const> ranks);

  int64_t out_features() const { return out_features_; }  // N, of a share its own

  // What an expert of the rank is made of, in the backend's memory: as many pieces of as many bytes
  // each for all experts of all ranks. They may be overwritten by another one's.
  std::vector<std::span<std::byte>> pieces(int64_t place) const;

  // out [R, N] of x [T, K] and ids [R]: grouped_linear. The ids count from the rank's first expert,
  // or, if the experts of all ranks are given, from the first of these.
  void forward(const ForwardContext& context, const ConstTensor& x, const ConstTensor& ids,
               const Tensor& out, const Joined* all = nullptr) const;
  // The op of forward(), where it is one: none if an expert's weight is of several kinds, or if the
  // context's observer has to see x.
  std::optional<GroupedLinearArgs> as_one(const ForwardContext& context, const ConstTensor& x,
                                          const ConstTensor& ids, const Tensor& out) const;

 private:
  // Weights that lie side by side along N; one, but for files of mixed blocks.
  struct Stack {
    std::vector<LinearWeight> weights;          // [X]
    std::vector<const LinearWeight*> pointers;  // to them
  };
  void add(int64_t expert, std::vector<LinearWeight> made, const std::string& name);
  // Of stack `idx`, which begins at column `begin`.
  GroupedLinearArgs part(size_t idx, int64_t begin, const ConstTensor& x, const ConstTensor& ids,
                         const Tensor& out, const Joined* all) const;
  // Shows the rows that each expert reads.
  void show(LinearObserver& observer, const ConstTensor& x, const ConstTensor& ids) const;

  std::vector<std::vector<std::string>> names_;  // [X] of an expert's tensors
  std::vector<Stack> stacks_;
  int64_t num_experts_;  // that the rank has
  int64_t out_features_ = 0;
  VectorWeight bias_;  // [X * N] or empty
};

}  // namespace llmserve
