// What the GroupNorm kernels are told. A tensor [N, C, *] is seen as [N, C, S] (contiguous) or [N, S, C]
// (channels_last), dense. Sizes and offsets are in elements.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace kgopt {

struct GroupNormDims {
  int64_t n = 0, c = 0, s = 0, g = 1;
  bool channels_last = false;
  Dtype dtype = Dtype::kFloat32;
  bool by_sample = false;  // weight and bias are [N, C], as their gradients are; else [C]

  int64_t channels_per_group() const { return c / g; }
  // Elements of weight and bias from sample to sample.
  KGOPT_HD int64_t affine_stride() const { return by_sample ? c : 0; }
  KGOPT_HD int64_t parameters() const { return by_sample ? n * c : c; }
  int64_t numel() const { return n * c * s; }
};

// The slopes of a PReLU. They are a parameter that training changes, so kernels read them from device memory.
struct PReluSlopes {
  const void* data = nullptr;  // [count], of the tensors' type or fp32; null: there is no PReLU
  Dtype dtype = Dtype::kFloat32;
  int64_t count = 1;  // one for all channels, or C
  // Of dense tensors: the channel of element i is i / inner % count. The magic numbers are those of the two divisions
  // (channel_at in shared/prelu.cuh), 0 where the hardware has to divide.
  int64_t inner = 1;
  uint64_t inner_magic = 0, count_magic = 0;

  KGOPT_HD bool by_channel() const { return count > 1; }
  // Of tensors of these sizes.
  void lie_in(const GroupNormDims& d) {
    inner = d.channels_last ? 1 : d.s;
    const auto magic = [&](uint64_t by) {
      // n / by is the high half of n * magic for every n below 2^64 / by (Granlund, Montgomery 1994).
      const bool fits = by > 1 && uint64_t(d.numel()) < ~uint64_t(0) / by;
      return fits ? ~uint64_t(0) / by + 1 : 0;
    };
    inner_magic = magic(inner);
    count_magic = magic(count);
  }
};

// What every way of computing y = act(PReLU(GroupNorm(pre_act(x)) + residual)) (+ x) with x on chip takes and gives.
struct GroupNormFwdArgs {
  const void* x = nullptr;
  void* y = nullptr;               // may be x
  const void* residual = nullptr;  // of x's type and layout, or null
  PReluSlopes slopes;
  bool is_extended = false;      // there is a residual or a PReLU, for which some instances look (dispatch_norm)
  const void* weight = nullptr;  // [C] or null (ones)
  const void* bias = nullptr;    // [C] or null (zeros)
  uint32_t affine_stride = 0;    // of weight and bias from sample to sample; of columns alone other than 0
  Dtype affine_dtype = Dtype::kFloat32, dtype = Dtype::kFloat32;
  ActChain pre_act, act;
  bool add_input = false;
  bool streaming_stores = false;  // y is larger than L2
  float eps = 1e-5f;
  float* mean = nullptr;  // [N, G]
  float* rstd = nullptr;  // [N, G]
};

// The same of its backward.
struct GroupNormBwdArgs {
  const void* x = nullptr;
  const void* dy = nullptr;
  void* dx = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;
  Dtype affine_dtype = Dtype::kFloat32, dtype = Dtype::kFloat32;
  ActChain pre_act, act;
  bool streaming_stores = false;  // dx is larger than L2
  const float* mean = nullptr;    // [N, G]
  const float* rstd = nullptr;    // [N, G]
};

// Words (groupnorm/shared/words.cuh) that a thread clears, at most, where a kernel clears them itself: a few, which
// takes as long as the first loads. A memset for more.
inline constexpr int kClearedWords = 4;

// Partial statistics: for each sample, slice and row the triple (mean, sum of squared deviations, count), stored
// [n][slices][rows][3] in fp32 (fp64 for fp64 data). A row is a channel, or a group where a group is contiguous.
// The convolution epilogues write the same format.
struct StatsPartials {
  void* data = nullptr;
  int64_t slices = 0;
  int64_t rows = 0;  // per sample; a multiple of the groups
};

struct GroupStatsParams {
  const void* x = nullptr;
  GroupNormDims dims;
  ActChain pre_act;          // statistics are those of pre_act(x)
  StatsPartials partials;    // rows: c, or for contiguous x any number for which rows divide [C, S] evenly
  int64_t slice_length = 0;  // elements of a row (contiguous), or turns of positions (channels_last) per slice
  int64_t turns = 1;         // channels_last: positions that are walked as one; a multiple of it is partials.slices
};

// Merge of the partials.
struct GroupStatsFinalizeParams {
  StatsPartials partials;
  int64_t n = 0, c = 0, g = 1;
  double eps = 1e-5;
  bool is_double = false;        // type of the partials and of every output below
  void* mean = nullptr;          // [N, G]
  void* rstd = nullptr;          // [N, G]
  void* channel_mean = nullptr;  // [N, C], or null; needs rows == c
  void* table = nullptr;         // [N, C] of (mean, rstd, weight, bias), or null
  const void* weight = nullptr;  // [C] or null (ones)
  const void* bias = nullptr;    // [C] or null (zeros)
  int64_t affine_stride = 0;     // of the two from sample to sample: 0 or C
  Dtype affine_dtype = Dtype::kFloat32;
  const int* only = nullptr;  // [N]: the samples that are wanted; null: all
};

// Mean and variance (biased) of each channel, [N, C, 2], from partials with a row a channel.
struct ChannelMomentsParams {
  StatsPartials partials;
  int64_t n = 0, c = 0;
  bool is_double = false;  // type of the partials and of the moments
  void* moments = nullptr;
};

// The table of GroupStatsFinalizeParams from these.
struct MomentsTableParams {
  const void* moments = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;
  Dtype affine_dtype = Dtype::kFloat32;
  bool is_double = false;
  int64_t n = 0, c = 0, g = 1;
  double eps = 1e-5;
  void* table = nullptr;
};

// What such a row holds, as statistics and parameters lie.
struct AffineSource {
  const void* mean = nullptr;    // [N, G]
  const void* rstd = nullptr;    // [N, G]
  const void* weight = nullptr;  // [C] or null (ones)
  const void* bias = nullptr;    // [C] or null (zeros)
  int64_t affine_stride = 0;     // of the two from sample to sample: 0 or C
  Dtype affine_dtype = Dtype::kFloat32;
  int64_t c = 0, g = 1;
};

// y = act((pre_act(x) - mean) * rstd * weight + bias + residual), plus x with add_input. y may be x. With slopes, a
// PReLU in place of act; then there is no pre_act and no add_input.
struct NormalizeParams {
  const void* x = nullptr;
  void* y = nullptr;
  const void* residual = nullptr;  // of x's type and layout, or null
  const void* table = nullptr;
  GroupNormDims dims;
  PReluSlopes slopes;
  ActChain pre_act, act;
  bool add_input = false;  // the residual connection around norm and activations
};

// out[n] = 1/C sum_c (weight_c (channel_mean_nc - mean_ng) rstd_ng + bias_c)
struct GroupNormMeanParams {
  const void* channel_mean = nullptr;
  const void* mean = nullptr;
  const void* rstd = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;
  Dtype affine_dtype = Dtype::kFloat32;
  bool is_double = false;
  int64_t n = 0, c = 0, g = 1;
  void* out = nullptr;
  Dtype out_dtype = Dtype::kFloat32;
};

// dx, and the partial channel sums from which dweight and dbias come. With z = xhat * weight + bias,
// dz = dy * act'(z); sums hold (sum dz, sum dz * xhat) over the positions of a channel.
struct GroupNormPassesBwdParams {
  const void* dy = nullptr;    // of x's type and layout; null: dz is dout[n] / (C * S) everywhere
  const void* dout = nullptr;  // [N], accumulation type; only with dy == null
  const void* x = nullptr;
  AffineSource affine;
  const void* channel_mean = nullptr;  // [N, C]; only with dy == null
  GroupNormDims dims;
  ActChain pre_act, act;
  void* partial_sums = nullptr;  // [n][slices][c][partial_values], of which the first two are these sums
  int partial_values = 2;
  int64_t slices = 0;
  int64_t slice_length = 0;  // positions, or turns of them, per slice
  int64_t turns = 1;         // positions that are walked as one; a multiple of it is slices
  void* rows = nullptr;      // [N, C] of GradientRow, from the merge
  void* dx = nullptr;
  void* dweight = nullptr;               // [C], or with dims.by_sample [N, C]
  void* dbias = nullptr;                 // of the same sizes
  Dtype affine_dtype = Dtype::kFloat32;  // of dweight and dbias
};

// The backward of a PReLU or a LeakyReLU behind a norm and a sum. With z = GroupNorm(x) + residual: dz = dy where z >
// 0, else dy * slope; the gradient of a slope is the sum of dy * z over the other elements of its channel, or of all
// channels.
struct PReluBwdParams {
  const void* dy = nullptr;        // of x's type and layout, as is the next
  const void* residual = nullptr;  // or null
  void* dz = nullptr;              // what norm.dy is
  PReluSlopes slopes;
  double slope = 0;               // of all channels, where slopes has none
  void* dslope = nullptr;         // [slopes.count], of their type, or null
  void* slope_sums = nullptr;     // [C], accumulation type, of a slope of all channels
  GroupNormPassesBwdParams norm;  // a third partial value is the slope's
};

// Sums over the samples.
struct AffineGradientParams {
  const void* channel_sums = nullptr;  // [N, C, 2]
  int64_t n = 0, c = 0;
  bool is_double = false;   // type of channel_sums
  void* dweight = nullptr;  // [C]
  void* dbias = nullptr;    // [C]
  Dtype affine_dtype = Dtype::kFloat32;
};

// dx = dmean / m - drstd * rstd^3 * (x - mean) / m, m the elements of a group.
struct GroupStatsBackwardParams {
  const void* x = nullptr;
  const void* mean = nullptr;
  const void* rstd = nullptr;
  const void* dmean = nullptr;
  const void* drstd = nullptr;
  void* dx = nullptr;
  void* table = nullptr;  // workspace [N, C] of 4
  GroupNormDims dims;
};

}  // namespace kgopt
