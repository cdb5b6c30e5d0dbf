#include "testing/faulty_ranks.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "core/error.h"

namespace llmserve {
namespace {

// What is left to come, over all groups.
struct Script {
  RankFaultOptions options;
  std::atomic<int64_t> num_exchanges{0};
  std::atomic<int64_t> num_failures{0};

  bool is_time() {
    if (num_failures >= options.num_failures) return false;
    if (++num_exchanges < options.fail_at_exchange) return false;
    ++num_failures;
    return true;
  }
};

// One rank's end, until the script says otherwise.
class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Script> script)
      : rank_(inner->rank()),
        world_size_(inner->world_size()),
        inner_(std::move(inner)),
        script_(std::move(script)) {}

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::string description() const override { return "ranks that fail on request"; }
  void all_reduce(const Tensor& data, Reduction reduction) override {
    inner_->all_reduce(data, reduction);
  }
  void all_gather(const ConstTensor& x, const Tensor& out, Counts counts) override {
    if (rank_ == script_->options.rank && script_->is_time()) fail();
    inner_->all_gather(x, out, counts);
  }
  void gather_columns(const ConstTensor& x, const Tensor& out, Counts counts, int to) override {
    if (rank_ == script_->options.rank && script_->is_time()) fail();
    inner_->gather_columns(x, out, counts, to);
  }
  void reduce_scatter(const ConstTensor& x, const Tensor& out, Reduction reduction,
                      Counts counts) override {
    inner_->reduce_scatter(x, out, reduction, counts);
  }
  void all_to_all(const ConstTensor& x, const Tensor& out, Counts send_counts,
                  Counts receive_counts) override {
    inner_->all_to_all(x, out, send_counts, receive_counts);
  }
  void broadcast(const Tensor& data, int root) override { inner_->broadcast(data, root); }
  void send(const ConstTensor& x, int to) override {
    if (rank_ == script_->options.rank && script_->is_time()) fail();
    inner_->send(x, to);
  }
  void recv(const Tensor& out, int from) override {
    if (rank_ == script_->options.rank && script_->is_time()) fail();
    inner_->recv(out, from);
  }
  void wait() override { inner_->wait(); }
  void barrier() override { inner_->barrier(); }
  void check() override { inner_->check(); }
  void abort() noexcept override {
    is_given_up_ = true;
    if (!has_left_) inner_->abort();
  }

 private:
  [[noreturn]] void fail() {
    const std::string& fault = script_->options.fault;
    if (fault == "leave") {
      has_left_ = true;
      inner_.reset();
    }
    while (fault == "stuck") std::this_thread::sleep_for(std::chrono::hours(1));
    while (fault == "hang") {
      inner_->check();  // throws once the others have given up
      if (is_given_up_) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw DeviceError("the rank was told to fail");
  }

  const int rank_;
  const int world_size_;
  std::atomic<bool> has_left_{false};
  std::atomic<bool> is_given_up_{false};
  std::unique_ptr<Communicator> inner_;
  const std::shared_ptr<Script> script_;
};

class FaultyGroup final : public CommunicatorGroup {
 public:
  FaultyGroup(std::unique_ptr<CommunicatorGroup> inner, std::shared_ptr<Script> script)
      : inner_(std::move(inner)), script_(std::move(script)) {}
  std::unique_ptr<Communicator> join(int rank, const RankPlace& place) override {
    return std::make_unique<FaultyCommunicator>(inner_->join(rank, place), script_);
  }

 private:
  const std::unique_ptr<CommunicatorGroup> inner_;
  const std::shared_ptr<Script> script_;
};

}  // namespace

RankPatience patience_of(const RankFaultOptions& options) {
  const auto ms = [](double seconds) {
    return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
  };
  return {.still = ms(options.still_s), .left = ms(options.left_s)};
}

namespace {

std::shared_ptr<Script> make_script(const RankFaultOptions& options) {
  if (options.fault != "throw" && options.fault != "leave" && options.fault != "hang" &&
      options.fault != "stuck")
    throw InvalidArgument(
        concat("fault: expected throw, leave, hang or stuck, got ", options.fault));
  auto script = std::make_shared<Script>();
  script->options = options;
  return script;
}

}  // namespace

NodeFollower::WrapEnds faulty_ends(const RankFaultOptions& options) {
  return [script = make_script(options)](RankEnds& ends) {
    auto& end = script->options.in_second_half ? ends.second_half : ends.tensor_ranks;
    end = std::make_unique<FaultyCommunicator>(std::move(end), script);
  };
}

StepRunner::MakeGroup faulty_ranks(const RankFaultOptions& options) {
  return
      [script = make_script(options)](
          std::string_view kind, const GroupOptions& asked) -> std::unique_ptr<CommunicatorGroup> {
        const auto timeout_ms = static_cast<int64_t>(script->options.timeout_s * 1000);
        GroupOptions options = asked;
        options.timeout = std::chrono::milliseconds(timeout_ms);
        return std::make_unique<FaultyGroup>(find_communicator(kind).make(options), script);
      };
}

}  // namespace llmserve
