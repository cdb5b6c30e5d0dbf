#include "text/llguidance_api.h"

#include <dlfcn.h>

#include "core/error.h"

namespace llmserve::llg {
namespace {

template <class Function>
void find(void* library, const std::string& path, const char* name, Function& function) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) {
    throw NotSupported(concat(path, " has no function ", name,
                              "; structured outputs need llguidance 1.9.1 or later: pip install "
                              "'llmserve[structured]'"));
  }
  function = reinterpret_cast<Function>(symbol);
}

}  // namespace

Functions load_functions(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw NotSupported(concat("llguidance cannot be loaded (", dlerror(),
                              "); structured outputs need it: pip install 'llmserve[structured]'"));
  }
  Functions functions{};
  find(library, path, "llg_new_tokenizer_v2", functions.new_tokenizer);
  find(library, path, "llg_free_tokenizer", functions.free_tokenizer);
  find(library, path, "llg_constraint_init_set_defaults", functions.set_defaults);
  find(library, path, "llg_new_matcher", functions.new_matcher);
  find(library, path, "llg_clone_matcher", functions.clone_matcher);
  find(library, path, "llg_free_matcher", functions.free_matcher);
  find(library, path, "llg_matcher_get_error", functions.get_error);
  find(library, path, "llg_matcher_is_stopped", functions.is_stopped);
  find(library, path, "llg_matcher_consume_token", functions.consume_token);
  find(library, path, "llg_matcher_rollback", functions.roll_back);
  find(library, path, "llg_matcher_compute_mask_into", functions.compute_mask);
  find(library, path, "llg_matcher_get_cancellation_handle", functions.get_cancellation_handle);
  find(library, path, "llg_cancel", functions.cancel);
  find(library, path, "llg_free_cancellation_handle", functions.free_cancellation_handle);
  return functions;
}

}  // namespace llmserve::llg
