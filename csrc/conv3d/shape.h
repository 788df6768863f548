// Output sizes of convolutions. Plain arithmetic without torch, so that tests can look at it.
#pragma once

#include <cstdint>

namespace kgopt {

// Output size along one dim, as torch.nn documents it; below 1 when nothing fits. output_padding is 0 for a regular
// convolution.
inline int64_t conv_out_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation,
                             bool transposed, int64_t output_padding) {
  const int64_t reach = dilation * (kernel - 1);
  if (transposed) return (size - 1) * stride - 2 * padding + reach + output_padding + 1;
  const int64_t room = size + 2 * padding - reach - 1;
  return room < 0 ? room : room / stride + 1;
}

}  // namespace kgopt
