#include "common/cache_prefix.h"

#include <mutex>

namespace kgopt {
namespace {
std::mutex mutex;
std::string prefix;
}  // namespace

std::string cache_prefix() {
  const std::lock_guard<std::mutex> lock(mutex);
  return prefix;
}

}  // namespace kgopt

// Called through ctypes; null: nothing is kept.
extern "C" __attribute__((visibility("default"))) void kgopt_set_cache_prefix(const char* prefix) {
  const std::lock_guard<std::mutex> lock(kgopt::mutex);
  kgopt::prefix = prefix ? prefix : "";
}
