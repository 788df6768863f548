// From a call's dtype and activations to the instance of a kernel.
#pragma once

#include <type_traits>

#include "common/device/dtype.cuh"
#include "common/device/floor.cuh"
#include "common/device/pointwise.cuh"
#include "common/status.h"
#include "groupnorm/params.h"

namespace kgopt {

template <typename T_, Chain kPre_, Chain kAct_>
struct NormTraits {
  using T = T_;
  static constexpr Chain kPre = kPre_, kAct = kAct_;
  static constexpr int kVec = kVecSize<T>;
};

// launch(NormTraits()) with p's dtype and chains. The kernels on chip have none for float64. Without kLeaky, LeakyReLU
// takes the instance for any chain: of small tensors launches are the most part. A residual or a PReLU takes
// LeakyReLU's instance, which computes none and ReLU as well (common/device/floor.cuh), or the one for any chain.
template <bool kLeaky = true, typename Params, typename Launch>
Status dispatch_norm(const char* kernel, const Params& p, Launch launch) {
  const auto with_type = [&](auto zero) {
    using T = decltype(zero);
    Status status;
    constexpr bool kForward = std::is_base_of_v<GroupNormFwdArgs, Params>;
    if constexpr (kForward) {
      if (p.is_extended) {
        const bool is_floored = p.pre_act.empty() && (p.act.empty() || is_two_lines(p.act));
        if (kLeaky && is_floored) return Status(launch(NormTraits<T, Chain::kNone, Chain::kLeakyRelu>()));
        return Status(launch(NormTraits<T, Chain::kAny, Chain::kAny>()));
      }
    }
    KGOPT_DISPATCH_CHAINS(p.pre_act, p.act, kPre, kAct, {
      constexpr bool kFloored = kForward && kPre == Chain::kNone;
      constexpr bool kWalked = kAct == Chain::kLeakyRelu && !kLeaky;
      status = launch(NormTraits<T, kWalked ? Chain::kAny : kPre,
                                 kWalked    ? Chain::kAny
                                 : kFloored ? with_floor(kAct)
                                            : kAct>());
    });
    return status;
  };
  switch (p.dtype) {
    case Dtype::kFloat32: return with_type(float());
    case Dtype::kBFloat16: return with_type(__nv_bfloat16());
    case Dtype::kFloat16: return with_type(__half());
    default: return Status::Unsupported(kernel, "float64");
  }
}

}  // namespace kgopt
