// The CPU GroupNorm as C++ functions, for the fused pipelines.
#pragma once

#include <string>
#include <tuple>

#include "common/host/torch_utils.h"

namespace kgopt {

// (y, mean, rstd)
std::tuple<Tensor, Tensor, Tensor> group_norm_fwd_cpu(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias,
                                                      double eps, std::string act, std::string pre_act);

// (mean, rstd); dense x is overwritten by act(GroupNorm(pre_act(x))).
std::tuple<Tensor, Tensor> group_norm_inplace_cpu(const char* op, const Tensor& x, int64_t num_groups,
                                                  const OptTensor& weight, const OptTensor& bias, double eps,
                                                  const std::string& act, const std::string& pre_act);

// (dx, dweight, dbias)
std::tuple<Tensor, Tensor, Tensor> group_norm_backward_cpu(Tensor dy, Tensor x, Tensor mean, Tensor rstd,
                                                           int64_t num_groups, OptTensor weight, OptTensor bias,
                                                           std::string act, std::string pre_act);

// (out, channel_mean, mean, rstd)
std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_mean_fwd_cpu(Tensor x, int64_t num_groups, OptTensor weight,
                                                                   OptTensor bias, double eps);

std::tuple<Tensor, Tensor> group_stats_cpu(Tensor x, int64_t num_groups, double eps);

}  // namespace kgopt
