// A convolution to a few channels of a tensor that is normalized and activated as it is read, channels_last: the heads
// of VAEs and diffusion models. x is read once, and next to nothing is written.
//
// Every position is normalized and multiplied once, with the weights of all taps side by side as columns of one
// product, D[position][tap, channel]. What belongs to an output is then added up from D at as many positions as there
// are taps, in shared memory. A block takes a region of 16 x 32 positions and stores what lies inside of it by half a
// kernel.
#include <algorithm>

#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/floor.cuh"
#include "common/device/mma.cuh"
#include "pointwise/pointwise.h"

namespace kgopt {
namespace {

constexpr const char* kName = "norm_conv_few_kernel";
constexpr int kThreads = 256, kBlocksPerSm = 2;
constexpr int kRegionRows = 16, kRegionColumns = 32;  // a warp multiplies a row of it at once
// Between columns of D: lanes that store four neighbouring columns of eight positions meet no bank twice.
constexpr int kPitch = kRegionRows * kRegionColumns + 4;
constexpr int kMaxTiles = 5;  // of 8 columns of D

// Channels of a step of the loop: a 16-byte vector for each of four lanes, two products.
template <typename T>
constexpr int kStep = 4 * kVecSize<T>;

template <typename T>
int smem_bytes(const NormConvFewParams& p, int tiles) {
  const int steps = (p.c + kStep<T> - 1) / kStep<T>;
  return steps * 2 * tiles * 32 * 8 + steps * kStep<T> * 8 + p.kernel[0] * p.kernel[1] * p.c_out * kPitch * 4;
}

__device__ __forceinline__ uint32_t word_of(const float (&z)[4], int i, float) { return round_for_tf32(z[i]); }
template <typename T>
__device__ __forceinline__ uint32_t word_of(const float (&z)[8], int i, T) {
  const float pair[2] = {z[2 * i], z[2 * i + 1]};
  const Vec<T, 2> v = pack<T, 2>(pair);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint2 b, float) {
  mma_tf32(c, a, b.x, b.y);
}
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint2 b, __nv_bfloat16) {
  mma_bf16(c, a, b.x, b.y);
}
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint2 b, __half) {
  mma_fp16(c, a, b.x, b.y);
}

// Fragments of the weights as the lanes of a warp hold them, [step][half of it][tile][lane]. K is numbered such that a
// lane's vector of channels is its words of two products.
template <typename T>
__global__ void __launch_bounds__(128)
    norm_conv_few_pack_kernel(const __grid_constant__ NormConvFewParams p, int tiles) {
  constexpr int kSize = kVecSize<T>, kWords = kSize / 4;  // of a word of the products: values
  let_dependents_start();
  const int steps = (p.c + kStep<T> - 1) / kStep<T>, columns = p.kernel[0] * p.kernel[1] * p.c_out;
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= steps * 2 * tiles * 32) return;
  const int lane = i % 32, tile = i / 32 % tiles, half = i / (32 * tiles) % 2, step = i / (64 * tiles);
  const int column = tile * 8 + lane / 4, tap = column / p.c_out;
  const int first = step * kStep<T> + lane % 4 * kSize + half * 2 * kWords;
  float w[2 * kWords];
#pragma unroll
  for (int j = 0; j < 2 * kWords; ++j) {
    const bool exists = column < columns && first + j < p.c;
    const int64_t at = (column - tap * p.c_out) * p.w_stride_out + (first + j) * p.w_stride_in +
                       tap / p.kernel[1] * p.w_stride_k[0] + tap % p.kernel[1] * p.w_stride_k[1];
    w[j] = exists ? to_acc(static_cast<const T*>(p.weight)[at]) : 0.f;
  }
  uint2 words;
  if constexpr (kWords == 1) {
    words = make_uint2(to_tf32(w[0]), to_tf32(w[1]));
  } else {
    const float low[2] = {w[0], w[1]}, high[2] = {w[2], w[3]};
    const Vec<T, 2> a = pack<T, 2>(low), b = pack<T, 2>(high);
    words = make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
  }
  static_cast<uint2*>(p.packed)[i] = words;
}

// Sixteen bytes, and their neighbours to a line of 128 into L2: those are the next step's.
template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> load_with_line(const T* p) {
  uint4 v;
  asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return *reinterpret_cast<const Vec<T, kSize>*>(&v);
}

template <typename T, int kTiles, Chain kAct>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    norm_conv_few_kernel(const __grid_constant__ NormConvFewParams p) {
  constexpr int kSize = kVecSize<T>;
  extern __shared__ __align__(16) char smem[];
  const int steps = (p.c + kStep<T> - 1) / kStep<T>, channels = steps * kStep<T>;
  const int taps = p.kernel[0] * p.kernel[1], columns = taps * p.c_out;
  uint2* const weights = reinterpret_cast<uint2*>(smem);                               // [step][half of it][tile][lane]
  float2* const table = reinterpret_cast<float2*>(weights + steps * 2 * kTiles * 32);  // scale, shift
  float* const sums = reinterpret_cast<float*>(table + channels);                      // D, [column][position]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  wait_for_prerequisites();
  for (int i = threadIdx.x; i < steps * 2 * kTiles * 16; i += kThreads) {
    reinterpret_cast<uint4*>(weights)[i] = static_cast<const uint4*>(p.packed)[i];
  }
  const int span[2] = {(p.kernel[0] - 1) * p.dilation[0], (p.kernel[1] - 1) * p.dilation[1]};
  const int tile_rows = kRegionRows - span[0], tile_columns = kRegionColumns - span[1];
  int of_sample = -1;
  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int64_t image = tile / p.tiles_per_image;
    const int rest = static_cast<int>(tile - image * p.tiles_per_image);
    const int h0 = rest / p.tiles_per_row * tile_rows, w0 = rest % p.tiles_per_row * tile_columns;  // of the output
    const int sample = static_cast<int>(image / p.depth);
    __syncthreads();  // the sums of the tile before are read
    if (sample != of_sample) {
      for (int i = threadIdx.x; i < channels; i += kThreads) {
        float2 k = make_float2(1.f, 0.f);
        if (p.table && i < p.c) {
          const float4 of = static_cast<const float4*>(p.table)[int64_t(sample) * p.c + i];  // mean, rstd, weight, bias
          k.x = of.y * of.z;
          k.y = fmaf(-of.x, k.x, of.w);
        }
        table[i] = k;
      }
      of_sample = sample;
      __syncthreads();
    }
    const T* const x = static_cast<const T*>(p.x) + image * p.in[0] * p.in[1] * p.c;
    for (int row = warp; row < kRegionRows; row += kThreads / 32) {
      const int h = h0 + row - p.padding[0];
      const bool row_exists = h >= 0 && h < p.in[0];
      const T* from[4];
      bool exists[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int w = w0 + g + r * 8 - p.padding[1];
        exists[r] = row_exists && w >= 0 && w < p.in[1];
        from[r] = x + (exists[r] ? (int64_t(h) * p.in[1] + w) * p.c : 0) + t * kSize;
      }
      float acc[2][kTiles][4] = {};
      auto load = [&](Vec<T, kSize>(&v)[4], int step) {
        const bool in_x = row_exists && step * kStep<T> + t * kSize < p.c;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          if (exists[r] && in_x) {
            v[r] = load_with_line<T, kSize>(from[r] + step * kStep<T>);
          } else {
            v[r] = Vec<T, kSize>{};
          }
        }
      };
      auto use = [&](const Vec<T, kSize>(&v)[4], int step) {
        float2 k[kSize];
#pragma unroll
        for (int i = 0; i < kSize; i += 2) {
          const float4 two = *reinterpret_cast<const float4*>(table + step * kStep<T> + t * kSize + i);
          k[i] = make_float2(two.x, two.y), k[i + 1] = make_float2(two.z, two.w);
        }
        uint32_t words[4][4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float z[kSize];
          unpack(v[r], z);
#pragma unroll
          for (int i = 0; i < kSize; ++i) z[i] = fmaf(z[i], k[i].x, k[i].y);
          finish_chain<kAct, T>(floored(p.act), z);
#pragma unroll
          for (int i = 0; i < 4; ++i) words[r][i] = word_of(z, i, T());
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const uint2 b = weights[((step * 2 + half) * kTiles + n) * 32 + lane];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              const uint32_t a[4] = {words[2 * m][2 * half], words[2 * m + 1][2 * half], words[2 * m][2 * half + 1],
                                     words[2 * m + 1][2 * half + 1]};
              multiply(acc[m][n], a, b, T());
            }
          }
        }
      };
      // Two steps in turns, so that one is on its way while the other is multiplied. An odd one's other half is behind
      // the channels, zeros that nobody multiplies.
      if (row_exists) {
        Vec<T, kSize> even[4], odd[4];
        load(even, 0);
        for (int step = 0; step < steps; step += 2) {
          load(odd, step + 1);
          use(even, step);
          load(even, step + 2);
          if (step + 1 < steps) use(odd, step + 1);
        }
      }
      // Around x there are zeros, not what the norm makes of them.
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = n * 8 + t * 2 + e;
          if (column >= columns) continue;
          float* const to = sums + column * kPitch + row * kRegionColumns + g;
#pragma unroll
          for (int r = 0; r < 4; ++r) to[r * 8] = exists[r] ? acc[r / 2][n][r % 2 * 2 + e] : 0.f;
        }
      }
    }
    __syncthreads();
    T* const y = static_cast<T*>(p.y) + image * p.out[0] * p.out[1] * p.c_out;
    // Lanes take neighbouring columns of a row, so that they read D without conflicts.
    for (int i = threadIdx.x; i < tile_rows * kRegionColumns; i += kThreads) {
      const int row = i / kRegionColumns, column = i % kRegionColumns, h = h0 + row, w = w0 + column;
      if (column >= tile_columns || h >= p.out[0] || w >= p.out[1]) continue;
      for (int k = 0; k < p.c_out; ++k) {
        float sum = p.bias ? to_acc(static_cast<const T*>(p.bias)[k]) : 0.f;
        const float* from = sums + k * kPitch + i;
        for (int kh = 0; kh < p.kernel[0]; ++kh) {
          for (int kw = 0; kw < p.kernel[1]; ++kw) {
            sum += from[kh * p.dilation[0] * kRegionColumns + kw * p.dilation[1]];
            from += p.c_out * kPitch;
          }
        }
        y[(int64_t(h) * p.out[1] + w) * p.c_out + k] = from_acc<T>(sum);
      }
    }
  }
}

template <typename T, int kTiles, Chain kAct>
Status launch(NormConvFewParams p, cudaStream_t stream) {
  const int tile_rows = kRegionRows - (p.kernel[0] - 1) * p.dilation[0];
  const int tile_columns = kRegionColumns - (p.kernel[1] - 1) * p.dilation[1];
  p.tiles_per_row = (p.out[1] + tile_columns - 1) / tile_columns;
  p.tiles_per_image = p.tiles_per_row * ((p.out[0] + tile_rows - 1) / tile_rows);
  p.tiles = p.n * p.depth * p.tiles_per_image;
  const int bytes = smem_bytes<T>(p, kTiles);
  // As many blocks as are on the GPU at once: the weights' fragments are made once a block.
  const int per_sm = std::max(1, std::min(p.smem_per_sm / (bytes + 1024), kBlocksPerSm));
  const int blocks = static_cast<int>(std::min<int64_t>(p.tiles, int64_t(p.sm_count) * per_sm));
  return launch_after<norm_conv_few_kernel<T, kTiles, kAct>>(true, kName, dim3(blocks), kThreads, bytes, stream, p);
}

template <typename T, int kTiles>
Status launch_chain(const NormConvFewParams& p, cudaStream_t stream) {
  switch (chain_kind(p.act)) {
    case Chain::kNone:
    case Chain::kRelu: return launch<T, kTiles, Chain::kRelu>(p, stream);
    case Chain::kSilu: return launch<T, kTiles, Chain::kSilu>(p, stream);
    default: return launch<T, kTiles, Chain::kAny>(p, stream);
  }
}

// Tiles of columns that are compiled in: one output channel of a 3 x 3 kernel needs two, three of them four.
int column_tiles(const NormConvFewParams& p) {
  const int columns = p.kernel[0] * p.kernel[1] * p.c_out;
  return columns <= 16 ? 2 : columns <= 32 ? 4 : kMaxTiles;
}

template <typename T>
int packed_fragments(const NormConvFewParams& p) {
  return (p.c + kStep<T> - 1) / kStep<T> * 2 * column_tiles(p) * 32;
}

template <typename T>
Status launch_tiles(const NormConvFewParams& p, cudaStream_t stream) {
  const int tiles = column_tiles(p);
  norm_conv_few_pack_kernel<T><<<(packed_fragments<T>(p) + 127) / 128, 128, 0, stream>>>(p, tiles);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, kName, cudaGetErrorString(error)};
  return tiles == 2   ? launch_chain<T, 2>(p, stream)
         : tiles == 4 ? launch_chain<T, 4>(p, stream)
                      : launch_chain<T, kMaxTiles>(p, stream);
}

}  // namespace

const char* norm_conv_few_refusal(const NormConvFewParams& p) {
  if (p.dtype == Dtype::kFloat64) return "float64";
  const int size = 16 / static_cast<int>(dtype_size(p.dtype));
  if (p.c < 1 || p.c % size != 0) return "channels are no whole vectors";
  if (p.kernel[0] * p.kernel[1] * p.c_out > kMaxTiles * 8) return "too many taps and output channels";
  if ((p.kernel[0] - 1) * p.dilation[0] > kRegionRows / 2 || (p.kernel[1] - 1) * p.dilation[1] > kRegionColumns / 2) {
    return "the kernel reaches too far";
  }
  const int tiles = column_tiles(p);
  const int bytes = p.dtype == Dtype::kFloat32 ? smem_bytes<float>(p, tiles) : smem_bytes<__half>(p, tiles);
  if (bytes > p.smem_per_block) return "the weights do not fit in shared memory";
  return nullptr;
}

int64_t norm_conv_few_packed_bytes(const NormConvFewParams& p) {
  return int64_t(8) * (p.dtype == Dtype::kFloat32 ? packed_fragments<float>(p) : packed_fragments<__half>(p));
}

Status run_norm_conv_few(const NormConvFewParams& p, cudaStream_t stream) {
  if (p.n * p.depth * p.out[0] * p.out[1] == 0) return Status::Ok();
  switch (p.dtype) {
    case Dtype::kFloat32: return launch_tiles<float>(p, stream);
    case Dtype::kBFloat16: return launch_tiles<__nv_bfloat16>(p, stream);
    case Dtype::kFloat16: return launch_tiles<__half>(p, stream);
    default: return Status::Unsupported(kName, "float64");
  }
}

}  // namespace kgopt
