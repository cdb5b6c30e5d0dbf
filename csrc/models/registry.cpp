// The architectures that this build runs.
#include <sstream>

#include "core/error.h"
#include "io/text_part.h"
#include "models/architectures.h"
#include "models/decoder.h"
#include "models/model.h"

namespace llmserve {
namespace {

constexpr ArchitectureRow kArchitectures[] = {
    {"ArceeForCausalLM", "arcee", "AFM 4.5B", &configure_arcee, &build_decoder},
    {"CohereForCausalLM", "cohere", "Command R and R+", &configure_cohere, &build_decoder},
    {"Cohere2ForCausalLM", "cohere2", "Command R7B and kin, with sliding windows",
     &configure_cohere2, &build_decoder},
    {"Ernie4_5ForCausalLM", "ernie4_5", "ERNIE 4.5, dense", &configure_ernie4_5, &build_decoder},
    {"Exaone4ForCausalLM", "exaone4", "EXAONE 4.0, with windows or without", &configure_exaone4,
     &build_decoder},
    {"FalconForCausalLM", "falcon", "Falcon 7B, 40B, 180B and 11B; ALiBi (Falcon-RW) is refused",
     &configure_falcon, &build_decoder},
    {"GPT2LMHeadModel", "gpt2", "GPT-2 and models of the same layout", &configure_gpt2,
     &build_decoder},
    {"GPTBigCodeForCausalLM", "gpt_bigcode", "StarCoder and SantaCoder", &configure_gpt_bigcode,
     &build_decoder},
    {"GPTJForCausalLM", "gptj", "GPT-J", &configure_gptj, &build_decoder},
    {"GPTNeoXForCausalLM", "gpt_neox", "GPT-NeoX, Pythia and kin", &configure_gpt_neox,
     &build_decoder},
    {"GemmaForCausalLM", "gemma", "Gemma 1", &configure_gemma, &build_decoder},
    {"Gemma2ForCausalLM", "gemma2", "Gemma 2", &configure_gemma2, &build_decoder},
    {"Gemma3ForCausalLM", "gemma3_text", "Gemma 3, text", &configure_gemma3, &build_decoder},
    {"GlmForCausalLM", "glm", "GLM-4 9B and GLM-Edge", &configure_glm, &build_decoder},
    {"Glm4ForCausalLM", "glm4", "GLM-4 0414, dense", &configure_glm4, &build_decoder},
    {"GraniteForCausalLM", "granite", "Granite 3, dense", &configure_granite, &build_decoder},
    {"HeliumForCausalLM", "helium", "Helium 1", &configure_helium, &build_decoder},
    {"HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", "Hunyuan 0.5B to 7B, dense",
     &configure_hunyuan_v1_dense, &build_decoder},
    {"LlamaForCausalLM", "llama", "Llama 1, 2, 3.x and models of the same layout", &configure_llama,
     &build_decoder},
    {"MinistralForCausalLM", "ministral", "Ministral 8B, windowed and full layers",
     &configure_ministral, &build_decoder},
    {"Ministral3ForCausalLM", "ministral3", "Ministral 3, text", &configure_ministral3,
     &build_decoder},
    {"MistralForCausalLM", "mistral", "Mistral 7B and kin, with sliding window", &configure_mistral,
     &build_decoder},
    {"NemotronForCausalLM", "nemotron", "Nemotron 3 and 4, Minitron", &configure_nemotron,
     &build_decoder},
    {"Olmo2ForCausalLM", "olmo2", "OLMo 2", &configure_olmo2, &build_decoder},
    {"Olmo3ForCausalLM", "olmo3", "OLMo 3, windowed and full layers", &configure_olmo3,
     &build_decoder},
    {"OPTForCausalLM", "opt", "OPT; 350M, which projects embeddings, is refused", &configure_opt,
     &build_decoder},
    {"PersimmonForCausalLM", "persimmon", "Persimmon 8B", &configure_persimmon, &build_decoder},
    {"PhiForCausalLM", "phi", "Phi-1, Phi-1.5 and Phi-2", &configure_phi, &build_decoder},
    {"Phi3ForCausalLM", "phi3", "Phi-3, Phi-3.5 and Phi-4, dense, with longrope", &configure_phi3,
     &build_decoder},
    {"Qwen2ForCausalLM", "qwen2", "Qwen2 and Qwen2.5, dense", &configure_qwen2, &build_decoder},
    {"Qwen3ForCausalLM", "qwen3", "Qwen3, dense", &configure_qwen3, &build_decoder},
    {"SeedOssForCausalLM", "seed_oss", "Seed-OSS", &configure_seed_oss, &build_decoder},
    {"SmolLM3ForCausalLM", "smollm3", "SmolLM3, some layers without positions", &configure_smollm3,
     &build_decoder},
    {"StableLmForCausalLM", "stablelm", "StableLM 3B and StableLM 2", &configure_stablelm,
     &build_decoder},
    {"Starcoder2ForCausalLM", "starcoder2", "StarCoder2", &configure_starcoder2, &build_decoder},
};

}  // namespace

std::span<const ArchitectureRow> architecture_registry() { return kArchitectures; }

const ArchitectureRow& find_architecture(std::string_view name, std::string_view where) {
  std::ostringstream known;
  for (const ArchitectureRow& row : kArchitectures) {
    if (row.name == name) return row;
    known << (known.tellp() > 0 ? ", " : "") << row.name;
  }
  known << ", and the text parts of ";
  for (const WrapperRow& row : wrapper_registry())
    known << (&row == &wrapper_registry().front() ? "" : ", ") << row.name;
  throw NotSupported(concat(where, ": architecture \"", name.substr(0, 80),
                            "\" is not supported; supported are ", known.str()));
}

}  // namespace llmserve
