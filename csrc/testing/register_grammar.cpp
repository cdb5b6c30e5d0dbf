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

// Another's masks, each after a while.
class SlowMatcher final : public TokenMatcher {
 public:
  SlowMatcher(std::unique_ptr<TokenMatcher> inner, double delay_s)
      : inner_(std::move(inner)), delay_s_(delay_s) {}
  void append(int32_t token_id) override { inner_->append(token_id); }
  void roll_back(int64_t num_tokens) override { inner_->roll_back(num_tokens); }
  std::unique_ptr<TokenMatcher> clone() const override {
    return std::make_unique<SlowMatcher>(inner_->clone(), delay_s_);
  }
  void fill(std::span<uint32_t> mask) override {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::duration<double>(delay_s_),
                          [this] { return is_cancelled_; }))
      throw InvalidArgument("the grammar cannot be followed: it was cancelled");
    inner_->fill(mask);
  }
  void cancel() override {
    const std::lock_guard lock(mutex_);
    is_cancelled_ = true;
    changed_.notify_all();
  }

 private:
  const std::unique_ptr<TokenMatcher> inner_;
  const double delay_s_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_cancelled_ = false;
};

class SlowGrammar final : public TokenGrammar {
 public:
  SlowGrammar(std::shared_ptr<TokenGrammar> inner, double delay_s)
      : inner_(std::move(inner)), delay_s_(delay_s) {}
  std::unique_ptr<TokenMatcher> make_matcher() const override {
    return std::make_unique<SlowMatcher>(inner_->make_matcher(), delay_s_);
  }
  std::span<const int32_t> end_token_ids() const override { return inner_->end_token_ids(); }

 private:
  const std::shared_ptr<TokenGrammar> inner_;
  const double delay_s_;
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
  py::class_<SlowGrammar, TokenGrammar, std::shared_ptr<SlowGrammar>>(testing, "SlowGrammar")
      .def(py::init<std::shared_ptr<TokenGrammar>, double>(), "inner"_a, "delay_s"_a);
}

}  // namespace llmserve
