#include "cuda_driver.h"

#include <dlfcn.h>

#include <cstring>
#include <mutex>

namespace jax_moe::cuda {

namespace {

// Launch attributes, and PTX 8.0, came with CUDA 12.0.
constexpr int kOldestDriver = 12000;

std::mutex open_mutex;
bool is_open = false;
Driver table;

std::string Version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Status Fill(void* library, const std::string& name, Driver& driver) {
#define JAX_MOE_CUDA_LOAD(function, parameters)                                                 \
  driver.function = reinterpret_cast<Result(*) parameters>(dlsym(library, #function));          \
  if (driver.function == nullptr) {                                                             \
    return {StatusCode::kUnimplemented,                                                         \
            name + " has no function " #function "; jax_moe needs an NVIDIA driver for CUDA " + \
                Version(kOldestDriver) + " or later (525 or later)"};                           \
  }
  JAX_MOE_CUDA_FUNCTIONS(JAX_MOE_CUDA_LOAD)
#undef JAX_MOE_CUDA_LOAD
  return {};
}

Status CheckVersion() {
  JAX_MOE_CUDA_RETURN_IF_ERROR(table.cuInit(0));
  int version = 0;
  JAX_MOE_CUDA_RETURN_IF_ERROR(table.cuDriverGetVersion(&version));
  if (version >= kOldestDriver) return {};
  return {StatusCode::kUnimplemented, "the NVIDIA driver supports CUDA " + Version(version) +
                                          ", but jax_moe needs " + Version(kOldestDriver) +
                                          " or later: install driver 525 or later"};
}

}  // namespace

Status OpenDriver(const std::string& path) {
  const std::lock_guard<std::mutex> lock(open_mutex);
  if (is_open) return {};
  const std::string name = path.empty() ? "libcuda.so.1" : path;
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return {StatusCode::kUnimplemented,
            "the NVIDIA driver cannot be opened (" + std::string(reason ? reason : name) +
                "): install it, or in a container start it with --gpus"};
  }
  JAX_MOE_RETURN_IF_ERROR(Fill(library, name, table));
  JAX_MOE_RETURN_IF_ERROR(CheckVersion());
  is_open = true;
  return {};
}

const Driver& driver() { return table; }

Status DriverError(const char* expression, Result result, const char* file, int line) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (table.cuGetErrorName(result, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (table.cuGetErrorString(result, &text) != kSuccess || text == nullptr) text = "no text";
  const char* dot = std::strchr(expression, '.');  // leaves out "driver()."
  if (dot != nullptr) expression = dot + 1;
  const char* slash = std::strrchr(file, '/');
  const bool out_of_memory = result == 2;
  return {out_of_memory ? StatusCode::kResourceExhausted : StatusCode::kInternal,
          std::string(expression) + ": " + name + " (" + std::to_string(result) + "): " + text +
              " [" + (slash ? slash + 1 : file) + ":" + std::to_string(line) + "]"};
}

}  // namespace jax_moe::cuda
