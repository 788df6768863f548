// Argument checks of the norms over channels, shared by the CUDA and the CPU files.
#pragma once

#include "channel_norm/channel_norm_params.h"
#include "groupnorm/api/checks.h"

namespace kgopt {

inline ChannelNormKind check_channel_norm_kind(const char* op, const std::string& kind) {
  KGOPT_CHECK(kind == "rms" || kind == "l2" || kind == "layer", op, ": kind is '", kind,
              "', expected 'rms', 'l2' or 'layer'");
  return kind == "rms" ? ChannelNormKind::kRms : kind == "l2" ? ChannelNormKind::kL2 : ChannelNormKind::kLayer;
}

// All but the pointers.
inline ChannelNormParams check_channel_norm(const char* op, const Tensor& x, const OptTensor& weight,
                                            const OptTensor& bias, const std::string& kind, double eps,
                                            const std::string& act) {
  const GroupNormDims d = check_group_norm(op, x, 1, weight, bias);
  ChannelNormParams p;
  p.dtype = d.dtype;
  p.n = d.n;
  p.c = d.c;
  p.s = d.s;
  p.channels_last = d.channels_last || d.s == 1;  // one position: both are the same memory
  p.kind = check_channel_norm_kind(op, kind);
  p.eps = eps;
  p.act = check_act(op, act);
  const OptTensor& affine = weight ? weight : bias;
  if (affine) p.affine_dtype = check_dtype(op, weight ? "weight" : "bias", *affine);
  return p;
}

inline ChannelNormParams check_channel_norm_backward(const char* op, const Tensor& dy, const Tensor& x,
                                                     const OptTensor& weight, const OptTensor& bias,
                                                     const std::string& kind, double eps, const std::string& act) {
  const ChannelNormParams p = check_channel_norm(op, x, weight, bias, kind, eps, act);
  check_like(op, "dy", dy, x);
  return p;
}

}  // namespace kgopt
