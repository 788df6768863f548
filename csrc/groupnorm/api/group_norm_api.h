// The CUDA GroupNorm ops as C++ functions, for the fused pipelines, and what their files share.
#pragma once

#include <string>
#include <tuple>

#include "common/host/torch_utils.h"
#include "common/host/workspace.h"
#include "groupnorm/api/checks.h"
#include "groupnorm/groupnorm.h"

namespace kgopt {

inline MemoryFormat format_of(const Tensor& x, const GroupNormDims& d) {
  return d.channels_last ? channels_last_format(x.dim()) : MemoryFormat::Contiguous;
}

inline OptTensor dense_or_none(const OptTensor& t) {
  return t ? OptTensor(dense_in(*t, MemoryFormat::Contiguous)) : std::nullopt;
}

inline const void* data_or_null(const OptTensor& t) { return t ? t->const_data_ptr() : nullptr; }

inline Dtype affine_dtype(const char* op, const OptTensor& weight, const OptTensor& bias) {
  return weight ? check_dtype(op, "weight", *weight) : bias ? check_dtype(op, "bias", *bias) : Dtype::kFloat32;
}

inline int64_t acc_size(const GroupNormDims& d) { return d.dtype == Dtype::kFloat64 ? 8 : 4; }

// A dense slope, for kernels on dense tensors of these sizes.
inline PReluSlopes slopes_of(const char* op, const Tensor& slope, const GroupNormDims& d) {
  PReluSlopes s;
  s.data = slope.const_data_ptr();
  s.dtype = check_dtype(op, "slope", slope);
  s.count = slope.numel();
  s.lie_in(d);
  return s;
}

// (y, mean, rstd)
std::tuple<Tensor, Tensor, Tensor> group_norm_fwd_cuda(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias,
                                                       double eps, std::string act, std::string pre_act);

// (mean, rstd); x, dense and not empty, is overwritten by the normalized tensor, plus itself with add_input. Without
// `given` nobody wants the statistics, and they are no tensors.
std::tuple<Tensor, Tensor> group_norm_inplace_cuda(const char* op, const Tensor& x, int64_t num_groups,
                                                   const OptTensor& weight, const OptTensor& bias, double eps,
                                                   const std::string& act, const std::string& pre_act,
                                                   bool add_input = false, bool given = true);

// (y, mean, rstd): logsumexp over channels, kept, of u + hardswish(tanh(GroupNorm(u))) of u = x + shift, where x is
// contiguous, not empty and not float64. Without `given` the statistics are no tensors.
std::tuple<Tensor, Tensor, Tensor> norm_residual_logsumexp_cuda(const char* op, const Tensor& x, int64_t num_groups,
                                                                const OptTensor& weight, const OptTensor& bias,
                                                                double eps, const OptTensor& shift, bool given);

// (out, channel_mean, mean, rstd), all in the statistics' dtype; without `given` out alone, in x's. `shift`, [C], is
// added to every channel of x beforehand, as it were.
std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_mean_cuda(const Tensor& x, int64_t num_groups,
                                                                const OptTensor& weight, const OptTensor& bias,
                                                                double eps, const OptTensor& shift = std::nullopt,
                                                                bool given = true);

// (dweight, dbias) and (dx, dweight, dbias), uninitialized; of an x without elements dweight and dbias are zero.
std::tuple<Tensor, Tensor> allocate_affine_gradients(const Tensor& x, const GroupNormDims& d, const OptTensor& weight,
                                                     const OptTensor& bias);
std::tuple<Tensor, Tensor, Tensor> allocate_gradients(const Tensor& x, const GroupNormDims& d, const OptTensor& weight,
                                                      const OptTensor& bias);
// For a backward that passes over memory, with p's dims and slices set: its rows and its sums in the workspace, and
// where the gradients go. mean and rstd are dense, and so are weight and bias.
void prepare_backward_passes(const char* op, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                             const OptTensor& weight, const OptTensor& bias,
                             const std::tuple<Tensor, Tensor, Tensor>& gradients, Workspace* workspace,
                             GroupNormPassesBwdParams* p);

// Mean and variance of each channel of x, [N, C, 2]: from x, which is dense, or from partials with a row a channel.
Tensor allocate_moments(const Tensor& x, int64_t c);
void channel_moments_cuda(const char* op, const Tensor& x, const Tensor& moments);
void channel_moments_cuda(const char* op, const Tensor& x, const StatsPartials& partials, const Tensor& moments);
// Fills table, [N, C] of (mean, rstd, weight, bias) in the moments' type.
void moments_table_cuda(const char* op, const Tensor& moments, int64_t num_groups, const OptTensor& weight,
                        const OptTensor& bias, double eps, void* table);
Tensor group_norm_moments_cuda(Tensor x, Tensor moments, int64_t num_groups, OptTensor weight, OptTensor bias,
                               double eps, std::string act);

}  // namespace kgopt
