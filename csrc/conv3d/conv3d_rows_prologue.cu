// Launch of the convolution by rows with a norm in front.
#include "conv3d_rows_prologue.h"

#include "../common/dependent_launch.cuh"
#include "conv3d_rows_prologue_kernel.cuh"

namespace kgopt {
namespace {

constexpr const char* kName = "conv_rows_prologue_kernel";

template <ConvMath kMath, int kN, int kRowBytes>
Status launch(const RowsParams& p, const RowsPrologue& prologue, cudaStream_t stream) {
  return launch_after<conv_rows_prologue_kernel<kMath, kN, kRowBytes>>(
      true, kName, dim3(p.plan.blocks), kRowsPrologueThreads, p.plan.smem_bytes, stream, p, prologue);
}

template <ConvMath kMath>
Status launch_tile(const RowsParams& p, const RowsPrologue& prologue, cudaStream_t stream) {
  if (p.plan.columns == 256) {
    return p.plan.row_bytes == 64 ? launch<kMath, 256, 64>(p, prologue, stream)
                                  : launch<kMath, 256, 128>(p, prologue, stream);
  }
  return p.plan.row_bytes == 64 ? launch<kMath, 208, 64>(p, prologue, stream)
                                : launch<kMath, 208, 128>(p, prologue, stream);
}

}  // namespace

Status run_conv_rows_prologue(const RowsParams& p, const RowsPrologue& prologue, cudaStream_t stream) {
  if (p.plan.tiles == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_tile<ConvMath::kTf32>(p, prologue, stream);
    case ConvMath::kBf16: return launch_tile<ConvMath::kBf16>(p, prologue, stream);
    case ConvMath::kFp16: return launch_tile<ConvMath::kFp16>(p, prologue, stream);
    default: return Status::Unsupported(kName, "fp32 accuracy");
  }
}

}  // namespace kgopt
