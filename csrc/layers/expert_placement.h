// On which ranks the experts of a layer run, and which rank runs which row: numbers alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace llmserve {

// How experts that stand whole on ranks are kept balanced.
struct ExpertBalanceOptions {
  int64_t window_size = 1000;         // steps whose loads count, the last ones before a packing
  int64_t step_interval = 3000;       // steps from one packing to the next; 0: experts stay
  int64_t num_redundant_experts = 0;  // copies beside the first of each
  double capacity_factor = 0;         // as in RowAssigner; 0: a copy runs all that it is given

  // Throws InvalidArgument.
  void validate() const;
};

// The ranks that run each expert: one a copy, all different.
class ExpertHomes {
 public:
  // Experts in blocks, consecutive ones on a rank: as many on each, or one more. There are no
  // fewer than ranks.
  ExpertHomes(int64_t num_experts, int32_t num_ranks);

  std::span<const int32_t> of(int64_t expert) const { return copies_[static_cast<size_t>(expert)]; }
  int64_t num_experts() const { return static_cast<int64_t>(copies_.size()); }
  int32_t num_ranks() const { return num_ranks_; }

  // Where they are to run after such loads [X], rows of each expert. The experts with the most rows
  // a copy get one more copy until there are `num_redundant` beside the first; then copies are
  // packed greedily, the largest first: onto the rank that has the expert in blocks() as long as
  // that stays within a twentieth above the mean, or else onto the rank with the fewest rows. Of
  // `room` [W] a rank has no more copies than that, and there is room for all; without it, any
  // number.
  ExpertHomes packed(std::span<const int64_t> loads, int64_t num_redundant,
                     std::span<const int64_t> room = {}) const;

 private:
  int32_t block_of(int64_t expert) const;

  int32_t num_ranks_;
  std::vector<std::vector<int32_t>> copies_;  // [X]
};

// An expert that is copied from a place on one rank to a place on another, or the same.
struct ExpertMove {
  int32_t from_rank = 0;
  int32_t from_place = 0;
  int32_t to_rank = 0;
  int32_t to_place = 0;
};

// Where a layer's experts lie on ranks that do not read each other's memory: a rank has places for
// so many, and what is to run there is copied there.
class ExpertPlaces {
 public:
  // As they are loaded: those of `blocks` in order on each rank, and no place beside them.
  explicit ExpertPlaces(const ExpertHomes& blocks);

  std::span<const int64_t> room() const { return room_; }  // [W] places
  // Has each expert lie where it is to run, and those that stay where they are. All sources are to
  // be read before any place is written.
  std::vector<ExpertMove> arrange(const ExpertHomes& homes);
  // [X, 3] of a rank, as OwnExperts has it.
  void write(const ExpertHomes& homes, int32_t rank, std::span<int32_t> table) const;

 private:
  std::vector<int64_t> room_;
  std::vector<std::vector<int64_t>> experts_;  // [W][room]
};

// Rows that a copy of an expert has room for in a step of so many rows: `factor` times an even
// share, rounded up, and no fewer than kMinExpertRows.
int64_t expert_capacity(int64_t num_experts, int64_t num_rows, double factor);
// Up to so many rows an expert takes as long as its weights take to be read, and a second rank
// would read them again.
inline constexpr int64_t kMinExpertRows = 16;

// Which rank runs which row of a step. A function of its arguments alone, so that ranks that call
// it with the same ones agree.
class RowAssigner {
 public:
  // The rank of each row, from ids [R], each the row's expert. The copies of an expert share its
  // rows evenly, in the rows' order. With a factor a copy runs at most expert_capacity() of them,
  // and what is beyond goes, in parts as large, to ranks that stand in for it: the largest excess
  // first, each part to the rank that has the fewest rows of the step. No row is left out. Valid
  // until the next call.
  std::span<const int32_t> assign(std::span<const int32_t> ids, const ExpertHomes& homes,
                                  double factor);

 private:
  // Rows of one expert that follow each other, but for others', and run on one rank.
  struct Part {
    int32_t rank = 0;
    int64_t num_rows = 0;
    int32_t next = -1;  // of the same expert, in parts_
  };
  void add_part(int64_t expert, int32_t rank, int64_t num_rows);

  std::vector<int32_t> ranks_;    // [R]
  std::vector<int64_t> counts_;   // [X] rows, and then those that no part has yet
  std::vector<int64_t> of_rank_;  // [W] rows
  std::vector<Part> parts_;
  std::vector<int32_t> first_;    // [X] parts
  std::vector<int32_t> last_;     // [X]
  std::vector<int64_t> crowded_;  // experts with an excess
};

}  // namespace llmserve
