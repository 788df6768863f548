// Direct convolution, one output element a thread: the plain path for fp64 (gradient checks) and for the shapes that
// the implicit GEMM refuses. Neighbouring threads take neighbouring output columns, so loads along the width coalesce.
#include "common/device/dtype.cuh"
#include "common/host/launch.h"
#include "conv3d/implicit_gemm/implicit_gemm.h"

namespace kgopt {
namespace {

template <typename T>
__global__ void __launch_bounds__(256) conv_direct_kernel(const __grid_constant__ ConvDirectParams p) {
  using Acc = acc_t<T>;
  const int64_t positions = int64_t(p.out[0]) * p.out[1] * p.out[2];
  const int64_t c_out_total = int64_t(p.c_out) * p.groups;
  const int64_t total = p.n * c_out_total * positions;
  const T* const x = static_cast<const T*>(p.x);
  const T* const weight = static_cast<const T*>(p.weight);
  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < total;
       index += int64_t(gridDim.x) * blockDim.x) {
    const int64_t position = index % positions;
    const int64_t row = index / positions;
    const int64_t n = row / c_out_total;
    const int channel = int(row % c_out_total);
    const int group = channel / p.c_out;
    const int co = channel % p.c_out;
    const int o[3] = {int(position / (int64_t(p.out[1]) * p.out[2])), int(position / p.out[2] % p.out[1]),
                      int(position % p.out[2])};
    const T* const w_row = weight + group * p.w_stride_group + co * p.w_stride_out;
    const T* const x_row = x + n * p.x_stride_n + int64_t(group) * p.c_in * p.x_stride_c;
    Acc acc = p.bias ? static_cast<Acc>(static_cast<const T*>(p.bias)[channel]) : Acc(0);

    // Input coordinate of tap k along dim i, or -1 when the tap reads padding or falls between strides.
    auto input_at = [&](int i, int k) -> int64_t {
      int64_t at;
      if (p.transposed) {
        const int64_t scaled = int64_t(o[i]) + p.padding[i] - int64_t(k) * p.dilation[i];
        if (scaled < 0 || scaled % p.stride[i] != 0) return -1;
        at = scaled / p.stride[i];
      } else {
        at = int64_t(o[i]) * p.stride[i] - p.padding[i] + int64_t(k) * p.dilation[i];
      }
      return at >= 0 && at < p.in[i] ? at : -1;
    };
    for (int kd = 0; kd < p.kernel[0]; ++kd) {
      const int64_t d = input_at(0, kd);
      if (d < 0) continue;
      for (int kh = 0; kh < p.kernel[1]; ++kh) {
        const int64_t h = input_at(1, kh);
        if (h < 0) continue;
        for (int kw = 0; kw < p.kernel[2]; ++kw) {
          const int64_t w = input_at(2, kw);
          if (w < 0) continue;
          const T* xs = x_row + d * p.x_stride[0] + h * p.x_stride[1] + w * p.x_stride[2];
          const T* ws = w_row + kd * p.w_stride_k[0] + kh * p.w_stride_k[1] + kw * p.w_stride_k[2];
          for (int ci = 0; ci < p.c_in; ++ci) {
            acc += static_cast<Acc>(xs[ci * p.x_stride_c]) * static_cast<Acc>(ws[ci * p.w_stride_in]);
          }
        }
      }
    }
    static_cast<T*>(p.y)[n * p.y_stride_n + channel * p.y_stride_c + o[0] * p.y_stride[0] + o[1] * p.y_stride[1] +
                         o[2] * p.y_stride[2]] = static_cast<T>(acc);
  }
}

}  // namespace

Status run_conv_direct(const ConvDirectParams& p, cudaStream_t stream) {
  const int64_t total = p.n * p.c_out * p.groups * p.out[0] * p.out[1] * p.out[2];
  if (total == 0) return Status::Ok();
  const int64_t wanted = (total + 255) / 256;
  const unsigned blocks = static_cast<unsigned>(wanted < (1 << 20) ? wanted : (1 << 20));
  Status status;
  KGOPT_DISPATCH_DTYPE(
      p.dtype, T, { status = launch_kernel<&conv_direct_kernel<T>>("conv_direct_kernel", p, blocks, 256, 0, stream); });
  return status;
}

}  // namespace kgopt
