// Suffix decoding: guesses what most often followed the longest end of the newest tokens that is
// found again, in the same sequence or in finished outputs (Oliaro, Jia, Campos, Qiao 2024,
// "SuffixDecoding", arXiv 2411.04975). The places that are found are the leaves of the tree of
// suffixes below that end; it is walked along its most frequent edges. Agents and chats that say
// again what others were told gain most.
//
// Outputs are shared within one cache salt alone, as cached blocks are.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/speculation_config.h"
#include "speculation/drafter.h"
#include "speculation/ngram_index.h"
#include "speculation/output_corpus.h"

namespace llmserve {

class SuffixDrafter final : public Drafter {
 public:
  explicit SuffixDrafter(const SpeculationConfig& config);

  void draft(std::span<const DraftTask> tasks, std::span<std::vector<int32_t>> drafts) override;
  void begin(const Request& request) override;
  void take_output(RequestId request_id, int32_t sample_index, std::span<const int32_t> token_ids,
                   int64_t num_generated) override;
  void forget(RequestId request_id, int32_t sample_index, bool is_last) override;
  int64_t num_sequences() const override {
    return static_cast<int64_t>(indices_.size() + outputs_.size());
  }

 private:
  // A place where the suffix was found: what follows is text[next].
  struct Place {
    std::span<const int32_t> text;
    int64_t next = 0;
  };
  struct Outputs {
    std::string cache_salt;
    std::vector<std::vector<int32_t>> by_sample;
  };

  void find_places(const DraftTask& task);
  void walk(int32_t max_tokens, std::vector<int32_t>& draft);
  OutputCorpus& corpus_of(const std::string& salt);

  const SpeculationConfig config_;
  std::map<std::pair<RequestId, int32_t>, NgramIndex> indices_;  // by request and sample
  std::unordered_map<RequestId, Outputs> outputs_;               // of unfinished requests
  // By salt, the one that was used last first.
  std::list<std::pair<std::string, OutputCorpus>> corpora_;
  // Of the task at hand.
  std::vector<NgramIndex::Match> matches_;
  std::vector<Place> places_;
  int32_t match_size_ = 0;
};

}  // namespace llmserve
