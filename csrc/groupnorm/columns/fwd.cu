// GroupNorm forward of channels_last tensors with x on chip, for GPUs with clusters.
#include "groupnorm/columns/kernel.cuh"
#include "groupnorm/columns/launch.h"
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/dispatch.cuh"

namespace kgopt {
namespace {

constexpr const char* kName = "group_norm_columns_fwd_kernel";

template <typename T, Chain kPre, Chain kAct>
Status launch(NormTraits<T, kPre, kAct>, const GroupNormColumnsFwdParams& p, const ColumnPlan& plan,
              cudaStream_t stream) {
  // Calls that walk a chain leave no registers.
  if constexpr (kPre != Chain::kAny && kAct != Chain::kAny) {
    if (p.shares.held > 0 && !p.is_extended) {
      return launch_columns(kName, group_norm_columns_fwd_kernel<ColumnTraits<T, kPre, kAct, kColumnHeld>>,
                            plan.threads, p, plan, stream);
    }
  }
  return launch_columns(kName, group_norm_columns_fwd_kernel<ColumnTraits<T, kPre, kAct, 0>>, plan.threads, p, plan,
                        stream);
}

}  // namespace

Status run_group_norm_columns_fwd(const GroupNormColumnsFwdParams& p, const ColumnPlan& plan, cudaStream_t stream) {
  return dispatch_norm(kName, p, [&](auto traits) { return launch(traits, p, plan, stream); });
}

}  // namespace kgopt
