// GroupNorm forward of channels_last tensors with x on chip, for GPUs with clusters.
#include "groupnorm/columns/kernel.cuh"
#include "groupnorm/columns/launch.h"
#include "groupnorm/groupnorm.h"

namespace kgopt {
namespace {

constexpr const char* kName = "group_norm_columns_fwd_kernel";

template <typename T, Chain kPre, Chain kAct>
Status launch(const GroupNormColumnsFwdParams& p, const ColumnPlan& plan, cudaStream_t stream) {
  // Calls that walk a chain leave no registers.
  if constexpr (kPre != Chain::kAny && kAct != Chain::kAny) {
    if (p.shares.held > 0) {
      return launch_columns(kName, group_norm_columns_fwd_kernel<ColumnTraits<T, kPre, kAct, kColumnHeld>>,
                            plan.threads, p, plan, stream);
    }
  }
  return launch_columns(kName, group_norm_columns_fwd_kernel<ColumnTraits<T, kPre, kAct, 0>>, plan.threads, p, plan,
                        stream);
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
