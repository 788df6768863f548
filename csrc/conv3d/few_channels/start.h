// From a convolution's operands to the parameters of the kernels for few channels.
#pragma once

#include "conv3d/few_channels/autocorrelation/autocorrelation.h"
#include "conv3d/few_channels/few_channels.h"
#include "conv3d/operands.h"

namespace kgopt {

inline FewChannelsParams few_channels_params(const ConvOperands& o, const FewChannelsPlan& plan) {
  FewChannelsParams p{};
  set_input(&p, o);
  set_weight(&p, o);
  p.n = o.n;
  p.c_out_total = static_cast<int>(o.c_out);
  p.plan = plan;
  p.load = rows_in_vectors(o)                                          ? FewChannelsLoad::kVectors
           : dtype_size(o.dtype) == 4 || has_channel_pairs(p, o.dtype) ? FewChannelsLoad::kWords
                                                                       : FewChannelsLoad::kHalves;
  return p;
}

// The same for statistics from the input's autocorrelation.
inline AutocorrelationParams autocorrelation_params(const ConvOperands& o, const AutocorrelationPlan& plan) {
  AutocorrelationParams p{};
  set_input(&p, o);
  set_weight(&p, o);
  p.vectors = rows_in_vectors(o, 16 / dtype_size(o.dtype));
  p.plan = plan;
  return p;
}

}  // namespace kgopt
