// The control plane for tests and benchmarks: `llmserve._core_testing`. Text and hashes here; the
// cache in register_kv_cache.cpp, the scheduler in register_scheduler.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/mix.h"
#include "core/token_hash.h"
#include "testing/register.h"
#include "text/stop_checker.h"

namespace py = pybind11;

namespace llmserve {
namespace {

using Tokens = std::vector<int32_t>;

py::bytes to_bytes(const TokenHash& hash) {
  return py::bytes(reinterpret_cast<const char*>(hash.bytes.data()), hash.bytes.size());
}

TokenHash to_hash(const std::string& digest) {
  if (digest.size() != 32) throw py::value_error("a token hash has 32 bytes");
  TokenHash hash;
  std::copy(digest.begin(), digest.end(), hash.bytes.begin());
  return hash;
}

// A stop checker with what it refers to.
struct OwnedStopChecker {
  OwnedStopChecker(const std::vector<std::string>& bytes_by_id, const Tokens& special_token_ids,
                   const std::vector<std::string>& stop, StopChecker::Options options)
      : vocabulary(bytes_by_id, special_token_ids),
        stops(stop),
        checker(vocabulary, stops, options) {}
  Vocabulary vocabulary;
  StopStrings stops;
  StopChecker checker;
};

void register_text(py::module_& testing) {
  py::class_<OwnedStopChecker>(testing, "StopChecker")
      .def(py::init([](const std::vector<std::string>& bytes_by_id,
                       const std::vector<std::string>& stop, const Tokens& special_token_ids,
                       bool skip_special_tokens, bool spaces_between_special_tokens,
                       bool include_stop_str_in_output) {
             return std::make_unique<OwnedStopChecker>(
                 bytes_by_id, special_token_ids, stop,
                 StopChecker::Options{skip_special_tokens, spaces_between_special_tokens,
                                      include_stop_str_in_output});
           }),
           py::arg("bytes_by_id"), py::kw_only(), py::arg("stop") = std::vector<std::string>(),
           py::arg("special_token_ids") = Tokens(), py::arg("skip_special_tokens") = true,
           py::arg("spaces_between_special_tokens") = true,
           py::arg("include_stop_str_in_output") = false)
      .def(
          "append",
          [](OwnedStopChecker& self, int32_t token_id, bool can_stop) {
            std::string text;
            const auto stop = self.checker.append(token_id, can_stop, text);
            return std::make_pair(py::bytes(text), stop);
          },
          py::arg("token_id"), py::arg("can_stop") = true)
      .def("flush", [](OwnedStopChecker& self) {
        std::string text;
        const auto stop = self.checker.flush(text);
        return std::make_pair(py::bytes(text), stop);
      });
}

void register_hashes(py::module_& testing) {
  testing.def("sha256", [](const std::vector<std::string>& pieces) {
    Sha256 sha;
    for (const std::string& piece : pieces) {
      sha.update({reinterpret_cast<const uint8_t*>(piece.data()), piece.size()});
    }
    return to_bytes(sha.finish());
  });
  testing.def(
      "root_hash",
      [](const std::string& salt, const std::vector<std::string>& digests) {
        std::vector<TokenHash> hashes;
        for (const std::string& digest : digests) hashes.push_back(to_hash(digest));
        return to_bytes(root_hash(salt, hashes));
      },
      py::arg("salt"), py::arg("digests") = std::vector<std::string>());
  testing.def("chain_hash", [](const std::string& parent, const Tokens& token_ids) {
    return to_bytes(chain_hash(to_hash(parent), token_ids));
  });
  testing.def("sample_seed", &sample_seed);
}

}  // namespace

void register_testing_control(py::module_& testing) {
  register_text(testing);
  register_hashes(testing);
}

}  // namespace llmserve
