// Which kernels a GroupNorm on CUDA takes: what the choice must know, and the choice in words.
#include "groupnorm/api/norm_call.h"
#include "groupnorm/explain.h"

namespace kgopt {

NormPlanInput norm_plan_input(const char* op, const Tensor& x, std::initializer_list<const void*> tensors,
                              const GroupNormDims& d, bool backward, const ActChain& pre_act, const ActChain& act,
                              NormExtras extras) {
  const auto address_of = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const DeviceInfo info = check_gpu(op, x);
  const uintptr_t first = address_of(*tensors.begin());
  NormPlanInput in;
  in.dims = d;
  in.tensors = backward ? 2 : 1;
  for (const void* t : tensors) {
    in.aligned = in.aligned && address_of(t) % 16 == 0;
    in.aligned_alike = in.aligned_alike && (first - address_of(t)) % 16 == 0;
  }
  in.x_offset = static_cast<uint32_t>(first % 128);
  in.set_activations(pre_act, act, extras);
  in.max_blocks = info.compute_capability >= 90 ? max_cluster_blocks(x.get_device_index()) : 0;
  in.has_bulk_copy = info.compute_capability >= 90 && has_bulk_copy();
  in.sm_count = info.sm_count;
  in.smem_bytes = info.smem_per_block;
  in.smem_per_sm = info.smem_per_sm;
  return in;
}

bool exceeds_l2(const char* op, const Tensor& x, const GroupNormDims& d) {
  return d.numel() * dtype_size(d.dtype) > check_gpu(op, x).l2_bytes / 2;
}

namespace {

std::string explain_group_norm(Tensor x, int64_t num_groups, std::string act, std::string pre_act, bool backward,
                               std::optional<bool> channels_last, bool reasons) {
  const char* const op = "explain_group_norm";
  GroupNormDims d = check_group_norm(op, x, num_groups);
  if (channels_last) d.channels_last = *channels_last && x.dim() > 2;
  const ActChain act_chain = as_relu(check_act(op, act), backward), pre_chain = check_act(op, pre_act, "pre_act");
  if (d.numel() == 0) return "nothing: x has no elements";
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const NormPlanInput in = norm_plan_input(op, x, {x.const_data_ptr()}, d, backward, pre_chain, act_chain);
  return explain_norm_choice(choose_group_norm(in), in, reasons);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) { m.impl("explain_group_norm", TORCH_BOX(&kgopt::explain_group_norm)); }
