// GroupNorm forward of channels_last tensors with x on chip, for GPUs with clusters.
#include <algorithm>

#include "group_norm_columns_kernel.cuh"
#include "group_norm_columns_launch.h"
#include "groupnorm.h"

namespace kgopt {
namespace {

constexpr const char* kName = "group_norm_columns_fwd_kernel";

template <typename T, Chain kPre, Chain kAct>
Status launch(const GroupNormColumnsFwdParams& p, const ColumnPlan& plan, cudaStream_t stream) {
  using Traits = ColumnTraits<T, kPre, kAct>;
  GroupNormColumnsFwdParams params = p;
  params.shares.held = std::min<uint32_t>(p.shares.held, Traits::kHeld);
  return launch_columns(kName, group_norm_columns_fwd_kernel<Traits>, plan.threads, params, plan, stream);
}

}  // namespace

Status run_group_norm_columns_fwd(const GroupNormColumnsFwdParams& p, const ColumnPlan& plan, cudaStream_t stream) {
  Status status;
  switch (p.dtype) {
#define KGOPT_COLUMNS_DTYPE(name, T)                                                                        \
  case Dtype::name:                                                                                         \
    KGOPT_DISPATCH_CHAINS(p.pre_act, p.act, kPre, kAct, status = (launch<T, kPre, kAct>(p, plan, stream))); \
    break;
    KGOPT_COLUMNS_DTYPE(kFloat32, float)
    KGOPT_COLUMNS_DTYPE(kBFloat16, __nv_bfloat16)
    KGOPT_COLUMNS_DTYPE(kFloat16, __half)
#undef KGOPT_COLUMNS_DTYPE
    default: return Status::Unsupported(kName, "float64");
  }
  return status;
}

}  // namespace kgopt
