#include <pybind11/pybind11.h>

#include <exception>
#include <new>
#include <string_view>

#include "bindings/register.h"
#include "core/error.h"
#include "engine/engine.h"

namespace py = pybind11;

namespace llmserve {
namespace {

// The Python classes live in llmserve.errors, where they can have two bases and docstrings; this
// only finds them.
void raise(const char* class_name, const Error& error) {
  const py::object type = py::module_::import("llmserve.errors").attr(class_name);
  // Messages may quote bytes of a file that are not UTF-8.
  const std::string_view what = error.what();
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(what.data(), static_cast<py::ssize_t>(what.size()), "replace"));
  PyErr_SetObject(type.ptr(), message.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const PromptTooLong& error) {
    raise("PromptTooLong", error);
  } catch (const InvalidArgument& error) {
    raise("InvalidArgument", error);
  } catch (const NotSupported& error) {
    raise("NotSupported", error);
  } catch (const QueueFull& error) {
    raise("QueueFull", error);
  } catch (const ResourceExhausted& error) {
    raise("ResourceExhausted", error);
  } catch (const std::bad_alloc&) {
    raise(
        "ResourceExhausted",
        ResourceExhausted("the system gives this process no more memory; ask for a smaller model, "
                          "max_model_len or KV cache, or raise its limit"));
  } catch (const CorruptFile& error) {
    raise("CorruptFile", error);
  } catch (const DeviceError& error) {
    raise("DeviceError", error);
  } catch (const Error& error) {
    raise("InternalError", error);
  }
}

}  // namespace

void register_errors(py::module_& module) {
  (void)module;
  py::register_exception_translator(&translate);
}

}  // namespace llmserve
