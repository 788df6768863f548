// Sizes of a tensor with its outermost positions repeated around it.
#pragma once

#include <cstdint>

namespace kgopt {

// Depth, height, width.
struct PaddedShape {
  int32_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, before[3] = {0, 0, 0};
};

}  // namespace kgopt
