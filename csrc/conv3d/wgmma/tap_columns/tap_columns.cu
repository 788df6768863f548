// Launch of the convolution with taps as columns, its weight packing and its tensor map.
#include "conv3d/wgmma/tap_columns/tap_columns.h"

#include <algorithm>

#include "common/device/dependent_launch.cuh"
#include "common/device/mma.cuh"
#include "common/host/tensor_map.h"
#include "conv3d/wgmma/pack.cuh"
#include "conv3d/wgmma/tap_columns/kernel.cuh"

namespace kgopt {
namespace {

constexpr const char* kName = "conv_tap_columns_kernel";

// One 16-byte piece of an image a thread.
__global__ void __launch_bounds__(128) conv_tap_columns_pack_kernel(const __grid_constant__ TapColumnsPackParams p) {
  let_dependents_start();
  const TapColumnsPlan& plan = p.plan;
  const bool half = plan.math != ConvMath::kTf32;
  const int per_piece = half ? 8 : 4;
  const int pieces_per_row = plan.row_bytes / 16;
  const int rows = plan.taps_w * plan.c_tile;
  const int64_t pieces = plan.packed_bytes / 16;
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  pack_bias(p, int64_t(plan.n_tiles) * plan.c_tile);
  for (int64_t i = first; i < p.moment_values; i += int64_t(gridDim.x) * blockDim.x) p.moments[i] = 0.f;
  for (int64_t index = first; index < pieces; index += int64_t(gridDim.x) * blockDim.x) {
    int64_t rest = index;
    const int piece = rest % pieces_per_row;
    rest /= pieces_per_row;
    const int row = rest % rows;
    rest /= rows;
    int kh = rest % plan.taps[1];
    rest /= plan.taps[1];
    const int chunk = rest % plan.chunks;
    rest /= plan.chunks;
    int kd = rest % plan.taps[0];
    const int n_tile = rest / plan.taps[0];
    int kw = row / plan.c_tile;
    const int co = n_tile * plan.c_tile + tap_columns_channel(row % plan.c_tile, half);
    const int ci = (chunk * pieces_per_row + piece) * per_piece;
    const int64_t image = index - row * pieces_per_row - piece;
    if (plan.flip) {
      kd = plan.taps[0] - 1 - kd;
      kh = plan.taps[1] - 1 - kh;
      kw = plan.taps_w - 1 - kw;
    }
    const int64_t from =
        co * p.stride_out + ci * p.stride_in + kd * p.stride_k[0] + kh * p.stride_k[1] + kw * p.stride_k[2];
    uint32_t words[4] = {};
    if (half) {
      uint32_t v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool valid = ci + i < p.c_in && co < p.c_out;
        v[i] = valid ? half_bits(p, from + i * p.stride_in) : 0;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = v[2 * i] | v[2 * i + 1] << 16;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool valid = ci + i < p.c_in && co < p.c_out;
        words[i] = to_tf32(valid ? static_cast<const float*>(p.weight)[from + i * p.stride_in] : 0.f);
      }
    }
    const int swizzled = piece ^ (row * plan.row_bytes / 128 & (pieces_per_row - 1));
    static_cast<uint4*>(p.packed)[image + row * pieces_per_row + swizzled] =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The blocks may start while the packing still runs; they wait for it before they read weights.
template <auto kKernel>
Status launch_after_pack(const TapColumnsParams& p, cudaStream_t stream) {
  return launch_after<kKernel>(true, kName, dim3(p.plan.blocks), kWgmmaThreads, p.plan.smem_bytes, stream, p);
}

template <ConvMath kMath, int kTile, int kSegments, bool kWide, int kMore>
Status launch_rows(const TapColumnsParams& p, cudaStream_t stream) {
  if (p.plan.row_bytes == 64) {
    return launch_after_pack<conv_tap_columns_kernel<kMath, 3, kTile, kSegments, 64, kWide, kMore>>(p, stream);
  }
  return launch_after_pack<conv_tap_columns_kernel<kMath, 3, kTile, kSegments, 128, kWide, kMore>>(p, stream);
}

template <ConvMath kMath, int kTile, int kSegments>
Status launch_more(const TapColumnsParams& p, cudaStream_t stream) {
  if (p.moments) return launch_rows<kMath, kTile, kSegments, false, 2>(p, stream);
  if (p.residual || p.scale != 1) return launch_rows<kMath, kTile, kSegments, false, 1>(p, stream);
  return launch_rows<kMath, kTile, kSegments, false, 0>(p, stream);
}

template <ConvMath kMath>
Status launch_tile(const TapColumnsParams& p, cudaStream_t stream) {
  if (p.plan.wide) return launch_rows<kMath, 64, 2, true, 0>(p, stream);
  return p.plan.c_tile == 32 ? launch_more<kMath, 32, 4>(p, stream) : launch_more<kMath, 64, 2>(p, stream);
}

}  // namespace

Status run_conv_tap_columns_pack(const TapColumnsPackParams& p, cudaStream_t stream) {
  const int64_t pieces = p.plan.packed_bytes / 16;
  const int blocks = static_cast<int>(std::min<int64_t>((pieces + 127) / 128, 2048));
  return launch_kernel<conv_tap_columns_pack_kernel>("conv_tap_columns_pack_kernel", p, blocks, 128, 0, stream);
}

Status set_tap_columns_input(TapColumnsParams* p, const void* x, int64_t n, int64_t c_in, int64_t stride_w,
                             int64_t stride_d, int64_t stride_n) {
  const TapColumnsPlan& plan = p->plan;
  const bool half = plan.math != ConvMath::kTf32;
  const cuuint64_t size = half ? 2 : 4;
  TensorMapSpec map{};
  map.type = plan.math == ConvMath::kTf32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
             : plan.math == ConvMath::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  map.rank = 4;
  map.data = x;
  const cuuint64_t sizes[4] = {cuuint64_t(c_in), cuuint64_t(p->in[1]) * p->in[2], cuuint64_t(p->in[0]), cuuint64_t(n)};
  // A dim of size 1 may have any stride, which the map would refuse.
  if (p->in[0] == 1) stride_d = stride_w * sizes[1];
  if (n == 1) stride_n = stride_d * p->in[0];
  const cuuint64_t strides[3] = {stride_w * size, stride_d * size, stride_n * size};
  const cuuint32_t box[4] = {cuuint32_t(plan.row_bytes / size), cuuint32_t(plan.box_rows), 1, 1};
  std::copy(sizes, sizes + 4, map.sizes);
  std::copy(strides, strides + 3, map.strides);
  std::copy(box, box + 4, map.box);
  map.swizzle = plan.row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode_tensor_map(kName, map, p->x_map);
}

Status run_conv_tap_columns(const TapColumnsParams& p, cudaStream_t stream) {
  if (p.plan.tiles == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_tile<ConvMath::kTf32>(p, stream);
    case ConvMath::kBf16: return launch_tile<ConvMath::kBf16>(p, stream);
    default: return launch_tile<ConvMath::kFp16>(p, stream);
  }
}

}  // namespace kgopt
