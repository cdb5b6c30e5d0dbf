#include "engine/exchange_log.h"

#include "core/clock.h"

namespace llmserve {
namespace {

// Those of a hundred steps of 32 layers.
constexpr size_t kNumLogged = 16384;

}  // namespace

void ExchangeLog::add(const ExchangeRecord& record) {
  const std::lock_guard lock(mutex_);
  if (records_.empty()) records_.resize(kNumLogged);
  records_[num_added_++ % kNumLogged] = record;
}

std::vector<ExchangeRecord> ExchangeLog::records() const {
  const std::lock_guard lock(mutex_);
  std::vector<ExchangeRecord> kept;
  const size_t first = num_added_ > kNumLogged ? num_added_ - kNumLogged : 0;
  for (size_t i = first; i < num_added_; ++i) kept.push_back(records_[i % kNumLogged]);
  return kept;
}

void LoggedExchanges::begin_exchange(const char* name) {
  range_.emplace(name);
  name_ = name;
  start_us_ = SteadyClock().now_us();
}

void LoggedExchanges::end_exchange() noexcept {
  range_.reset();
  if (log_ == nullptr) return;
  log_->add({.name = name_,
             .half = half_,
             .start_us = start_us_,
             .duration_us = SteadyClock().now_us() - start_us_});
}

}  // namespace llmserve
