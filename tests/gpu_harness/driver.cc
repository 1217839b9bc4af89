#include "driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace harness {

Driver driver;

namespace {
// cuda.h maps most names to a versioned symbol (cuMemAlloc -> cuMemAlloc_v2); the macro argument is
// expanded first, so the string below is the versioned one.
#define HARNESS_STRING(name) #name
#define HARNESS_SYMBOL(name) HARNESS_STRING(name)

void* Symbol(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) Fail(__FILE__, __LINE__, std::string("libcuda.so.1 has no ") + name);
  return symbol;
}
}  // namespace

void LoadDriver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) Fail(__FILE__, __LINE__, dlerror());
#define HARNESS_LOAD(name) \
  driver.name = reinterpret_cast<decltype(&::name)>(Symbol(library, HARNESS_SYMBOL(name)));
  HARNESS_DRIVER_FUNCTIONS(HARNESS_LOAD)
#undef HARNESS_LOAD
  HARNESS_CHECK(driver.cuInit(0));
}

void Fail(const char* file, int line, const std::string& message) {
  std::fprintf(stderr, "FAIL %s:%d: %s\n", file, line, message.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

void CheckResult(CUresult result, const char* expression, const char* file, int line) {
  if (result == CUDA_SUCCESS) return;
  const char* name = "?";
  const char* text = "?";
  if (driver.cuGetErrorName != nullptr) driver.cuGetErrorName(result, &name);
  if (driver.cuGetErrorString != nullptr) driver.cuGetErrorString(result, &text);
  Fail(file, line, std::string(expression) + ": " + name + ": " + text);
}

DeviceBuffer::DeviceBuffer(size_t bytes) : bytes_(bytes) {
  HARNESS_CHECK(driver.cuMemAlloc(&ptr_, bytes > 0 ? bytes : 16));
}
DeviceBuffer::~DeviceBuffer() {
  if (ptr_ != 0) HARNESS_CHECK(driver.cuMemFree(ptr_));
}
DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : ptr_(std::exchange(other.ptr_, 0)), bytes_(std::exchange(other.bytes_, 0)) {}
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(ptr_, other.ptr_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace harness
