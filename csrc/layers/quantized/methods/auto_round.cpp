// AutoRound: GPTQ's or AWQ's tensors, with bits of their own for some modules. Cheng et al. 2023.
#include <map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "layers/quantized/methods/awq.h"
#include "layers/quantized/methods/gptq.h"
#include "layers/quantized/methods/methods.h"

namespace llmserve {
namespace {

class AutoRound final : public QuantizationMethod {
 public:
  explicit AutoRound(const JsonNode& config) : params_(read_params(config, {})) {
    const JsonNode packing = config["packing_format"];
    std::string name = packing.is_null() ? "auto_round:auto_gptq" : packing.as_string();
    if (const size_t colon = name.find(':'); colon != name.npos) name = name.substr(colon + 1);
    if (name == "awq" || name == "auto_awq")
      is_awq_ = true;
    else if (name != "gptq" && name != "auto_gptq")
      throw NotSupported(concat(packing.where(), ": ", packing.describe(),
                                " is not supported (auto_round:auto_gptq, auto_round:auto_awq)"));
    const JsonNode extra = config["extra_config"];
    if (extra.is_null()) return;
    for (const auto& [key, node] : extra.as_object()) {
      if (extra_.size() >= ModuleNames::kMaxNames)
        extra.fail(concat("expected at most ", ModuleNames::kMaxNames, " modules"));
      extra_.emplace(key, Extra{read_params(node, params_), node.where()});
    }
  }

  std::shared_ptr<const QuantizedWeight> find(ModuleTensors& tensors) const override {
    const bool is_quantized =
        tensors.exist() ? tensors.has("qweight") : tensors.module() != "lm_head";
    if (!is_quantized) return nullptr;
    const GptqParams params = params_of(tensors.module());
    if (!is_awq_) return find_gptq_weight(tensors, params);
    if (params.bits != 4)
      throw NotSupported(concat("tensor \"", tensors.full_name("qweight"), "\": ", params.bits,
                                " bits are not supported for AWQ, only 4"));
    return find_awq_weight(tensors, {.group = params.group});
  }

 private:
  struct Extra {
    GptqParams params;
    std::string where;
  };

  static GptqParams read_params(const JsonNode& config, GptqParams params) {
    params.bits = static_cast<int>(config["bits"].as_int_or(params.bits, 1, 32));
    params.group = read_group_size(config["group_size"], params.group);
    params.is_symmetric = config["sym"].as_bool_or(params.is_symmetric);
    return params;
  }

  // By its name, or else by the first pattern. Modules of 16 bits and more are left alone, and have
  // no qweight.
  GptqParams params_of(const std::string& module) const {
    GptqParams params = params_;
    const std::vector<std::string> names = names_of_module(module);
    const auto found = [&]() -> const Extra* {
      for (const std::string& name : names)
        if (const auto it = extra_.find(name); it != extra_.end()) return &it->second;
      for (const auto& [key, extra] : extra_) {
        if (key.find_first_of("*+?[(|^$\\") == key.npos) continue;
        const NamePattern pattern(key, extra.where);
        for (const std::string& name : names)
          if (pattern.matches_anywhere(name)) return &extra;
      }
      return nullptr;
    }();
    if (found) params = found->params;
    if (params.bits != 2 && params.bits != 3 && params.bits != 4 && params.bits != 8)
      throw NotSupported(
          concat("module \"", module, "\": ", params.bits, " bits are not supported (2, 3, 4, 8)"));
    return params;
  }

  GptqParams params_;
  bool is_awq_ = false;
  std::map<std::string, Extra> extra_;
};

}  // namespace

std::unique_ptr<QuantizationMethod> read_auto_round(const JsonNode& config) {
  return std::make_unique<AutoRound>(config);
}

}  // namespace llmserve
