#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <condition_variable>
#include <mutex>

#include "core/error.h"
#include "testing/register.h"
#include "text/token_mask.h"

namespace py = pybind11;
using namespace py::literals;

namespace llmserve {
namespace {

// Never comes to a mask by itself.
class StuckMatcher final : public TokenMatcher {
 public:
  void append(int32_t) override {}
  void roll_back(int64_t) override {}
  std::unique_ptr<TokenMatcher> clone() const override { return std::make_unique<StuckMatcher>(); }
  void fill(std::span<uint32_t>) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_cancelled_; });
    throw InvalidArgument("the grammar cannot be followed: it was cancelled");
  }
  void cancel() override {
    const std::lock_guard lock(mutex_);
    is_cancelled_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_cancelled_ = false;
};

class StuckGrammar final : public TokenGrammar {
 public:
  std::unique_ptr<TokenMatcher> make_matcher() const override {
    return std::make_unique<StuckMatcher>();
  }
  std::span<const int32_t> end_token_ids() const override { return {}; }
};

}  // namespace

void register_testing_grammar(py::module_& testing) {
  py::class_<TokenMatcher>(testing, "TokenMatcher")
      .def(py::init([](const TokenGrammar& grammar) { return grammar.make_matcher(); }),
           "grammar"_a)
      .def("append", &TokenMatcher::append, "token_id"_a)
      .def("roll_back", &TokenMatcher::roll_back, "num_tokens"_a)
      .def("clone", &TokenMatcher::clone)
      .def(
          "mask",
          [](TokenMatcher& matcher, int64_t vocab_size) {
            py::array_t<uint32_t> mask((vocab_size + 31) / 32);
            matcher.fill({mask.mutable_data(), static_cast<size_t>(mask.size())});
            return mask;
          },
          "vocab_size"_a)
      .def("cancel", &TokenMatcher::cancel);
  py::class_<StuckGrammar, TokenGrammar, std::shared_ptr<StuckGrammar>>(testing, "StuckGrammar")
      .def(py::init<>());
}

}  // namespace llmserve
