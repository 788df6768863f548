// The weight of the transposed convolution that does what nearest upsampling and a convolution behind it do.
#include "common/device/dtype.cuh"
#include "common/host/launch.h"
#include "pointwise/pointwise.h"

namespace kgopt {
namespace {

constexpr int kThreads = 256;
constexpr int kSmemBytes = 40 * 1024;  // of taps: what a block has without asking, and room for a second block

// Sizes along depth, height, width as ints: a kernel that had more would not fit into shared memory.
template <typename T>
struct WeightArgs {
  const T* weight;
  T* to;
  int64_t stride_out, stride_in, stride[3];
  int64_t c_out, c_in;      // of a group
  int tiles_out, tiles_in;  // of a group
  int tile_out, tile_in;    // channels of a tile
  int kernel[3], size[3];   // of the weight, of the result
  bool channels_last;
  bool in_first;  // of the weight: input channels lie side by side, not taps
};

struct Range {
  int first, last;
};

// The taps of the weight that tap j of the result is the sum of.
__device__ __forceinline__ Range taps_of(int j, int kernel, int size) {
  return {max(0, kernel - 1 - j), min(kernel - 1, size - 1 - j)};
}

// A block has all taps of a tile of channels in shared memory, [tap][input channel][output channel], since the result
// has input and output channels the other way round. Of a channels_last result a thread computes all taps of a pair of
// channels, so that a warp writes neighbouring output channels; of a contiguous one a tap of many pairs.
template <typename T>
__global__ void __launch_bounds__(kThreads) upsample_conv_weight_kernel(const __grid_constant__ WeightArgs<T> a) {
  using Acc = acc_t<T>;
  extern __shared__ __align__(16) unsigned char smem[];
  Acc* const held = reinterpret_cast<Acc*>(smem);
  int64_t rest = blockIdx.x;
  const int64_t first_out = rest % a.tiles_out * a.tile_out;
  rest /= a.tiles_out;
  const int64_t first_in = rest % a.tiles_in * a.tile_in;
  const int64_t group = rest / a.tiles_in;
  const int outs = static_cast<int>(min(static_cast<int64_t>(a.tile_out), a.c_out - first_out));
  const int ins = static_cast<int>(min(static_cast<int64_t>(a.tile_in), a.c_in - first_in));
  const int pitch = a.tile_out + 1;  // words: neighbouring rows begin in other banks
  const int plane = a.kernel[1] * a.kernel[2], taps = a.kernel[0] * plane;
  const T* const from = a.weight + (group * a.c_out + first_out) * a.stride_out + first_in * a.stride_in;
  for (int e = threadIdx.x; e < outs * ins * taps; e += kThreads) {
    int tap, in, out;
    if (a.in_first) {
      in = e % ins;
      tap = e / ins % taps;
      out = e / ins / taps;
    } else {
      tap = e % taps;
      in = e / taps % ins;
      out = e / taps / ins;
    }
    const int d = tap / plane, h = (tap - d * plane) / a.kernel[2], w = tap % a.kernel[2];
    const T value = from[out * a.stride_out + in * a.stride_in + d * a.stride[0] + h * a.stride[1] + w * a.stride[2]];
    held[(tap * a.tile_in + in) * pitch + out] = to_acc(value);
  }
  __syncthreads();

  const int step = a.tile_in * pitch;  // from one tap to the next
  const auto sum_of = [&](const Acc* pair, Range d, Range h, Range w) {
    Acc sum(0);
    for (int i = d.first; i <= d.last; ++i) {
      for (int j = h.first; j <= h.last; ++j) {
        for (int k = w.first; k <= w.last; ++k) sum += pair[(i * plane + j * a.kernel[2] + k) * step];
      }
    }
    return from_acc<T>(sum);
  };
  const int size = a.size[0] * a.size[1] * a.size[2];
  T* const to = a.to + (group * a.c_in + first_in) * a.c_out * size;
  if (a.channels_last) {
    for (int e = threadIdx.x; e < outs * ins; e += kThreads) {
      const int in = e / outs, out = e - in * outs;
      const Acc* const pair = held + in * pitch + out;
      T* at = to + static_cast<int64_t>(in) * size * a.c_out + first_out + out;
      for (int i = 0; i < a.size[0]; ++i) {
        const Range d = taps_of(i, a.kernel[0], a.size[0]);
        for (int j = 0; j < a.size[1]; ++j) {
          const Range h = taps_of(j, a.kernel[1], a.size[1]);
          for (int k = 0; k < a.size[2]; ++k, at += a.c_out)
            *at = sum_of(pair, d, h, taps_of(k, a.kernel[2], a.size[2]));
        }
      }
    }
    return;
  }
  // Threads beyond the last whole set of taps have none; of more taps than threads each has several.
  const int sets = max(kThreads / size, 1);
  const int set = size <= kThreads ? threadIdx.x / size : 0;
  if (set >= sets) return;
  for (int j = size <= kThreads ? threadIdx.x % size : threadIdx.x; j < size; j += kThreads) {
    const Range d = taps_of(j / (a.size[1] * a.size[2]), a.kernel[0], a.size[0]);
    const Range h = taps_of(j / a.size[2] % a.size[1], a.kernel[1], a.size[1]);
    const Range w = taps_of(j % a.size[2], a.kernel[2], a.size[2]);
    for (int e = set; e < outs * ins; e += sets) {
      const int in = e / outs, out = e - in * outs;
      to[(in * a.c_out + first_out + out) * size + j] = sum_of(held + in * pitch + out, d, h, w);
    }
  }
}

template <typename T>
Status launch(const UpsampleConvWeightParams& p, cudaStream_t stream) {
  const char* const name = "upsample_conv_weight_kernel";
  WeightArgs<T> a{};
  a.weight = static_cast<const T*>(p.weight);
  a.to = static_cast<T*>(p.to);
  a.stride_out = p.stride_out;
  a.stride_in = p.stride_in;
  a.c_out = p.c_out;
  a.c_in = p.c_in;
  a.channels_last = p.channels_last;
  int64_t taps = 1, size = 1;
  for (int d = 0; d < 3; ++d) {
    if (p.kernel[d] > 4096) return Status::Unsupported(name, "the kernel has too many taps for shared memory");
    taps *= p.kernel[d];
    size *= p.kernel[d] + p.factor[d] - 1;
    a.kernel[d] = static_cast<int>(p.kernel[d]);
    a.size[d] = static_cast<int>(p.kernel[d] + p.factor[d] - 1);
    a.stride[d] = p.stride[d];
  }
  if (size > int64_t(1) << 30) return Status::Unsupported(name, "the result has too many taps");
  a.in_first = p.stride_in == 1 && taps > 1;
  // 32 output channels are what a warp writes at a time; a few input channels, so that there are blocks for all of the
  // GPU. Large kernels take fewer of both.
  const auto bytes = [&](int out, int in) { return taps * in * (out + 1) * static_cast<int64_t>(sizeof(acc_t<T>)); };
  a.tile_out = 32;
  a.tile_in = 8;
  while (a.tile_in > 1 && bytes(a.tile_out, a.tile_in) > kSmemBytes) a.tile_in /= 2;
  while (a.tile_out > 1 && bytes(a.tile_out, a.tile_in) > kSmemBytes) a.tile_out /= 2;
  const int64_t smem = bytes(a.tile_out, a.tile_in);
  if (smem > kSmemBytes) return Status::Unsupported(name, "the kernel has too many taps for shared memory");
  const int64_t tiles_out = (p.c_out + a.tile_out - 1) / a.tile_out, tiles_in = (p.c_in + a.tile_in - 1) / a.tile_in;
  const int64_t blocks = p.groups * tiles_out * tiles_in;
  if (blocks > 0x7fffffff) return Status::Unsupported(name, "the weight has too many channels for one launch");
  a.tiles_out = static_cast<int>(tiles_out);
  a.tiles_in = static_cast<int>(tiles_in);
  return launch_kernel<&upsample_conv_weight_kernel<T>>(name, a, static_cast<unsigned>(blocks), kThreads,
                                                        static_cast<int>(smem), stream);
}

}  // namespace

Status run_upsample_conv_weight(const UpsampleConvWeightParams& p, cudaStream_t stream) {
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dtype, T, { status = launch<T>(p, stream); });
  return status;
}

}  // namespace kgopt
