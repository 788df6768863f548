// A convolution's tensors as the families' parameter structs take them: pointers, sizes and strides, no torch. Strides
// are in elements; dims are ordered depth, height, width, and a 2D convolution has depth 1.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"

namespace kgopt {

struct ConvOperands {
  const void* x = nullptr;
  int64_t x_stride_n = 0, x_stride_c = 0, x_stride[3] = {};
  const void* weight = nullptr;
  int64_t w_stride_out = 0, w_stride_in = 0, w_stride_k[3] = {};
  int64_t w_stride_group = 0;  // from one conv group's weights to the next
  const void* bias = nullptr;  // dense, or null
  Dtype dtype, weight_dtype;   // of x; of the weight and the bias
  int64_t n, c_in, c_out;      // of all conv groups
  int64_t groups;
  int64_t in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
};

// x, channels of a conv group and sizes, which all parameter structs hold under the same names.
template <typename Params>
void set_input(Params* p, const ConvOperands& o) {
  p->x = o.x;
  p->x_stride_n = o.x_stride_n;
  p->x_stride_c = o.x_stride_c;
  std::copy(o.x_stride, o.x_stride + 3, p->x_stride);
  p->c_in = static_cast<int>(o.c_in / o.groups);
  p->c_out = static_cast<int>(o.c_out / o.groups);
  p->groups = static_cast<int>(o.groups);
  for (int i = 0; i < 3; ++i) {
    p->in[i] = static_cast<int>(o.in[i]);
    p->out[i] = static_cast<int>(o.out[i]);
  }
}

// The weight as it lies, for the kernels that read it so, and the bias.
template <typename Params>
void set_weight(Params* p, const ConvOperands& o) {
  p->weight = o.weight;
  p->w_stride_out = o.w_stride_out;
  p->w_stride_in = o.w_stride_in;
  p->w_stride_group = o.w_stride_group;
  std::copy(o.w_stride_k, o.w_stride_k + 3, p->w_stride_k);
  p->bias = o.bias;
}

// The same for a kernel that packs the weights of one conv group ahead of the convolution.
template <typename Params>
void set_packed_weight(Params* p, const ConvOperands& o) {
  p->weight = o.weight;
  p->stride_out = o.w_stride_out;
  p->stride_in = o.w_stride_in;
  std::copy(o.w_stride_k, o.w_stride_k + 3, p->stride_k);
  p->bias = o.bias;
  p->c_in = static_cast<int>(o.c_in / o.groups);
  p->c_out = static_cast<int>(o.c_out / o.groups);
  p->dtype = o.weight_dtype;
}

// Half types: whether two neighbouring channels can be read as one aligned word.
template <typename Params>
bool has_channel_pairs(const Params& p, Dtype dtype) {
  return dtype_size(dtype) == 2 && p.x_stride_c == 1 && p.c_in % 2 == 0 && p.x_stride_n % 2 == 0 &&
         p.x_stride[0] % 2 == 0 && p.x_stride[1] % 2 == 0 && p.x_stride[2] % 2 == 0 &&
         reinterpret_cast<uintptr_t>(p.x) % 4 == 0;
}

// Whether `vector` neighbours along the width can be read at once, from every multiple of it on.
inline bool rows_in_vectors(const ConvOperands& o, int64_t vector = 4) {
  return o.x_stride[2] == 1 && o.in[2] % vector == 0 && o.x_stride_n % vector == 0 && o.x_stride_c % vector == 0 &&
         o.x_stride[0] % vector == 0 && o.x_stride[1] % vector == 0 &&
         reinterpret_cast<uintptr_t>(o.x) % (vector * dtype_size(o.dtype)) == 0;
}

}  // namespace kgopt
