#include "text/grammar_compiler.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/pin_thread.h"
#include "core/start_thread.h"

namespace llmserve {
namespace {

using SteadyTime = std::chrono::steady_clock::time_point;

// Measured with llguidance 1.9.1: at most 250 KB for a schema of everyday use, and 110 bytes a byte
// of large alternatives.
constexpr int64_t kBytesPerGrammar = 256 << 10;
constexpr int64_t kBytesPerTextByte = 128;

// One text being compiled. Guarded by the mutex of Shared.
struct Job {
  std::string kind;
  std::string text;
  bool is_done = false;
  bool is_given_up = false;  // took too long for whoever asked
  int64_t thread_id = 0;     // once it has begun
  std::shared_ptr<TokenGrammar> grammar;
  std::exception_ptr error;
};

struct CachedGrammar {
  std::string key;
  std::shared_ptr<TokenGrammar> grammar;
  int64_t num_bytes = 0;
};

}  // namespace

struct GrammarCompiler::Shared {
  std::function<Compile()> make_compile;
  GrammarLimits limits;
  std::once_flag once;
  Compile compile;

  mutable std::mutex mutex;
  std::condition_variable changed;  // a job is done, a thread is free
  int32_t num_threads = 0;          // that somebody waits for
  int32_t num_given_up = 0;         // threads that nobody does
  int64_t num_compiled = 0;
  std::unordered_map<std::string, std::shared_ptr<Job>> jobs;  // under way, by key
  std::list<CachedGrammar> cache;                              // the latest used first
  std::unordered_map<std::string, std::list<CachedGrammar>::iterator> places;
  int64_t cached_bytes = 0;

  std::shared_ptr<TokenGrammar> find(const std::string& key);
  void keep(const std::string& key, const Job& job);
  void run(const std::string& key, Job& job);
  bool has_thread() const;
  void give_up(const std::string& key, Job& job);
};

std::shared_ptr<TokenGrammar> GrammarCompiler::Shared::find(const std::string& key) {
  const auto place = places.find(key);
  if (place == places.end()) return nullptr;
  cache.splice(cache.begin(), cache, place->second);
  return cache.front().grammar;
}

void GrammarCompiler::Shared::keep(const std::string& key, const Job& job) {
  const int64_t num_bytes = kBytesPerGrammar + kBytesPerTextByte * std::ssize(job.text);
  cache.push_front({key, job.grammar, num_bytes});
  places[key] = cache.begin();
  cached_bytes += num_bytes;
  while (cached_bytes > limits.cache_bytes) {
    cached_bytes -= cache.back().num_bytes;
    places.erase(cache.back().key);
    cache.pop_back();
  }
}

// On a thread of its own.
void GrammarCompiler::Shared::run(const std::string& key, Job& job) {
  {
    const std::lock_guard lock(mutex);
    job.thread_id = current_thread_id();
    if (job.is_given_up) lower_priority(job.thread_id);
  }
  std::shared_ptr<TokenGrammar> grammar;
  std::exception_ptr error;
  try {
    std::call_once(once, [this] { compile = make_compile(); });
    grammar = compile(job.kind, job.text);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex);
  job.grammar = std::move(grammar);
  job.error = error;
  job.is_done = true;
  --(job.is_given_up ? num_given_up : num_threads);
  ++num_compiled;
  // What took too long is refused every time, however full the machine was.
  if (!job.is_given_up) {
    jobs.erase(key);
    if (job.grammar) keep(key, job);
  }
  changed.notify_all();
}

bool GrammarCompiler::Shared::has_thread() const {
  const int32_t num_too_many = std::max(0, num_given_up - limits.max_num_given_up);
  return num_threads + num_too_many < limits.max_num_threads;
}

void GrammarCompiler::Shared::give_up(const std::string& key, Job& job) {
  if (std::exchange(job.is_given_up, true)) return;
  jobs.erase(key);
  --num_threads;
  ++num_given_up;
  if (job.thread_id != 0) lower_priority(job.thread_id);
  changed.notify_all();
}

GrammarCompiler::GrammarCompiler(std::function<Compile()> make_compile, const GrammarLimits& limits)
    : shared_(std::make_shared<Shared>()) {
  shared_->make_compile = std::move(make_compile);
  shared_->limits = limits;
}

GrammarCompiler::~GrammarCompiler() = default;

std::shared_ptr<TokenGrammar> GrammarCompiler::compile(const std::string& field,
                                                       const std::string& kind,
                                                       const std::string& text) {
  Shared& shared = *shared_;
  const GrammarLimits& limits = shared.limits;
  if (std::ssize(text) > limits.max_text_bytes) {
    throw InvalidArgument(concat(field, " must be at most ", limits.max_text_bytes, " bytes, got ",
                                 text.size(), "; make it smaller"));
  }
  const SteadyTime deadline =
      std::chrono::steady_clock::now() + std::chrono::duration_cast<SteadyTime::duration>(
                                             std::chrono::duration<double>(limits.timeout_s));
  const std::string key = concat(kind, '\0', text);
  std::unique_lock lock(shared.mutex);
  std::shared_ptr<Job> job;
  const auto can_begin = [&] {
    return shared.places.contains(key) || shared.jobs.contains(key) || shared.has_thread();
  };
  if (!shared.changed.wait_until(lock, deadline, can_begin)) {
    throw ResourceExhausted(concat(field, " waited ", limits.timeout_s,
                                   " s for other grammars to be compiled; retry later"));
  }
  if (auto grammar = shared.find(key)) return grammar;
  if (const auto found = shared.jobs.find(key); found != shared.jobs.end()) {
    job = found->second;
  } else {
    job = std::make_shared<Job>(Job{.kind = kind, .text = text});
    start_thread([shared = shared_, key, job] { shared->run(key, *job); }).detach();
    shared.jobs[key] = job;
    ++shared.num_threads;
  }
  if (!shared.changed.wait_until(lock, deadline, [&] { return job->is_done; })) {
    shared.give_up(key, *job);
    throw InvalidArgument(concat(field, " took more than ", limits.timeout_s,
                                 " s to compile; make it smaller or simpler"));
  }
  if (!job->error) return job->grammar;
  try {
    std::rethrow_exception(job->error);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat(field, ": ", error.what()));
  }
}

int64_t GrammarCompiler::num_compiled() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->num_compiled;
}

int64_t GrammarCompiler::cached_bytes() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->cached_bytes;
}

}  // namespace llmserve
