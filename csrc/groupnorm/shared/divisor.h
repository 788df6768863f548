// Division by a number that the host knows.
#pragma once

#include <cstdint>

namespace kgopt {

// n / d for n below 2^31, as (n * magic >> 32) >> shift. Granlund, Montgomery 1994.
inline void set_divisor(uint32_t d, uint32_t* magic, int32_t* shift) {
  int bits = 0;
  while ((uint64_t(1) << bits) < d) ++bits;
  *magic = static_cast<uint32_t>(((uint64_t(1) << (31 + bits)) + d - 1) / d);
  *shift = bits - 1;
}

}  // namespace kgopt
