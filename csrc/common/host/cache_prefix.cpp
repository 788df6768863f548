#include "common/host/cache_prefix.h"

#include <atomic>
#include <mutex>

namespace kgopt {
namespace {
std::mutex mutex;
std::string prefix;
std::atomic<int64_t> generation{0};
}  // namespace

std::string cache_prefix() {
  const std::lock_guard<std::mutex> lock(mutex);
  return prefix;
}

int64_t cache_generation() { return generation; }

}  // namespace kgopt

// Called through ctypes; null: nothing is kept.
extern "C" __attribute__((visibility("default"))) void kgopt_set_cache_prefix(const char* prefix) {
  const std::lock_guard<std::mutex> lock(kgopt::mutex);
  kgopt::prefix = prefix ? prefix : "";
}

// Also through ctypes. Files are the caller's to remove, before this is called.
extern "C" __attribute__((visibility("default"))) void kgopt_forget_measurements() { ++kgopt::generation; }
