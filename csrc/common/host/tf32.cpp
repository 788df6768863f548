#include "common/host/tf32.h"

#include <atomic>

namespace kgopt {
namespace {

std::atomic<int (*)()> tf32_query{nullptr};
std::atomic<void (*)(int)> tf32_turn{nullptr};
constexpr int kTurnBack = -1;

}  // namespace

bool tf32_allowed_by_default() {
  int (*query)() = tf32_query.load(std::memory_order_acquire);
  return query == nullptr || query() != 0;
}

Tf32Switch::Tf32Switch(std::optional<bool> allow_tf32) {
  void (*turn)(int) = tf32_turn.load(std::memory_order_acquire);
  if (turn == nullptr || !allow_tf32 || *allow_tf32 == tf32_allowed_by_default()) return;
  turn(*allow_tf32 ? 1 : 0);
  turned_ = true;
}

Tf32Switch::~Tf32Switch() {
  void (*turn)(int) = tf32_turn.load(std::memory_order_acquire);
  if (turned_ && turn != nullptr) turn(kTurnBack);
}

}  // namespace kgopt

// Called through ctypes; null removes the functions. `turn` is given 1 to allow TF32, 0 to forbid it, and then -1,
// after which the switch is as it was.
extern "C" __attribute__((visibility("default"))) void kgopt_set_tf32_switch(int (*query)(), void (*turn)(int)) {
  kgopt::tf32_query.store(query, std::memory_order_release);
  kgopt::tf32_turn.store(turn, std::memory_order_release);
}
