#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace kgopt {

// y = act((y + bias[c] + residual) * scale), in place, y [n, c, s] dense; channels_last: [n, s, c].
struct BiasResidualParams {
  void* y = nullptr;
  const void* bias = nullptr;      // [c] of y's dtype; null: none
  const void* residual = nullptr;  // of y's layout; null: none
  const void* scaled = nullptr;    // fp16, of y's layout: y is at first this times both factors; null: y is there
  const void* factors = nullptr;   // [c, 2] in fp32, powers of two
  int64_t n = 0, c = 0, s = 0;
  double scale = 1;
  ActChain act;
  bool channels_last = false;
  Dtype dtype = Dtype::kFloat32;
};

// y [n, s, c_out] = act(normalized x [n, s, c]) weight + bias
struct NormConv1x1Params {
  const void* x = nullptr;  // aligned to 16 bytes
  void* y = nullptr;
  const void* table = nullptr;   // [n, c] of (mean, rstd, weight, bias) in fp32; null: x is not normalized
  const void* weight = nullptr;  // [c_out, c]
  const void* bias = nullptr;    // [c_out] or null
  int64_t n = 0, s = 0;
  int c = 0, c_out = 0;
  int sm_count = 0;
  int blocks_per_sample = 0;  // set by the launcher
  ActChain act;               // empty without a table
  Dtype dtype = Dtype::kFloat32;
};

// y = convolution of act(normalized x) with a few output channels, stride 1; x, y dense with channels innermost. Images
// are the planes of all samples. Pairs are height, width.
struct NormConvFewParams {
  const void* x = nullptr;      // [n, depth, in..., c], aligned to 16 bytes
  void* y = nullptr;            // [n, depth, out..., c_out]
  const void* table = nullptr;  // [n, c] of (mean, rstd, weight, bias) in fp32; null: x is not normalized
  const void* weight = nullptr;
  const void* bias = nullptr;  // [c_out] or null
  void* packed = nullptr;      // norm_conv_few_packed_bytes of room for the weights
  int64_t w_stride_out = 0, w_stride_in = 0, w_stride_k[2] = {0, 0};
  int64_t n = 0, depth = 1;
  int c = 0, c_out = 0;
  int in[2] = {1, 1}, out[2] = {1, 1}, kernel[2] = {1, 1}, padding[2] = {0, 0}, dilation[2] = {1, 1};
  int sm_count = 0, smem_per_block = 0, smem_per_sm = 0;
  int64_t tiles = 0;                           // set by the launcher
  int tiles_per_image = 0, tiles_per_row = 0;  // likewise
  ActChain act;
  Dtype dtype = Dtype::kFloat32;
};

// y = linear interpolation of x to twice its size (align_corners=False) + residual. Dense, channels innermost; a
// contiguous tensor is n * c samples of one channel.
struct UpsampleLinearParams {
  const void* x = nullptr;         // [n, d, h, w, c]
  const void* residual = nullptr;  // of y's layout; null: none
  void* y = nullptr;               // [n, 2 d, 2 h, 2 w, c]; without double_depth [n, d, 2 h, 2 w, c]
  int64_t n = 0, c = 0, d = 1, h = 0, w = 0;
  bool double_depth = false;
  Dtype dtype = Dtype::kFloat32;
};

// Its gradient, without the residual's.
struct UpsampleLinearBackwardParams {
  const void* dy = nullptr;  // [n, 2 d, 2 h, 2 w, c]; without double_depth [n, d, 2 h, 2 w, c]
  void* dx = nullptr;        // [n, d, h, w, c]
  int64_t n = 0, c = 0, d = 1, h = 0, w = 0;
  bool double_depth = false;
  Dtype dtype = Dtype::kFloat32;
};

// Elements repeated factors times along depth, height and width; backward: the sums over the repetitions.
struct UpsampleNearestParams {
  const void* from = nullptr;  // the small tensor, [n, d, h, w, c]; backward: the large one
  void* to = nullptr;
  int64_t n = 0, c = 0, d = 1, h = 0, w = 0;
  int64_t pitch = 0;  // elements from one position of `from` to the next: c, or more in a part of a tensor
  int64_t factors[3] = {1, 1, 1};
  bool backward = false;
  Dtype dtype = Dtype::kFloat32;
};

// y = x with its outermost positions repeated around it. Dense, channels innermost, as above.
struct PadReplicateParams {
  const void* x = nullptr;  // [n, in..., c]
  void* y = nullptr;        // [n, out..., c]
  int64_t n = 0, c = 0;
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, before[3] = {0, 0, 0};  // depth, height, width
  Dtype dtype = Dtype::kFloat32;
};

// y = the largest value of each window of x. Dense, channels innermost, as above.
struct MaxPoolParams {
  const void* x = nullptr;  // [n, in..., c]
  void* y = nullptr;        // [n, out..., c]
  int64_t n = 0, c = 0;
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1};  // depth, height, width
  int64_t kernel[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, padding[3] = {0, 0, 0};
  Dtype dtype = Dtype::kFloat32;
};

// The weight of the transposed convolution that does what nearest upsampling and a convolution behind it do: along each
// dim the sums of `factor` neighbouring taps, the last tap first. 2D is 3D with depth 1.
struct UpsampleConvWeightParams {
  const void* weight = nullptr;             // [groups * c_out, c_in, kernel...], of these strides
  int64_t stride_out = 0, stride_in = 0;    // elements, from one output and one input channel to the next
  int64_t stride[3] = {0, 0, 0};            // elements, along depth, height, width
  void* to = nullptr;                       // [groups * c_in, c_out, kernel + factor - 1...]
  bool channels_last = false;               // of `to`: its c_out innermost
  int64_t groups = 1, c_out = 0, c_in = 0;  // channels of one group
  int64_t kernel[3] = {1, 1, 1}, factor[3] = {1, 1, 1};
  Dtype dtype = Dtype::kFloat32;
};

}  // namespace kgopt
