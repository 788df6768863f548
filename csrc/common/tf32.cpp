#include "common/tf32.h"

#include <atomic>

namespace kgopt {
namespace {
std::atomic<int (*)()> tf32_query{nullptr};
}  // namespace

bool tf32_allowed_by_default() {
  int (*query)() = tf32_query.load(std::memory_order_acquire);
  return query == nullptr || query() != 0;
}

}  // namespace kgopt

// Called through ctypes; null removes the query.
extern "C" __attribute__((visibility("default"))) void kgopt_set_tf32_query(int (*query)()) {
  kgopt::tf32_query.store(query, std::memory_order_release);
}
