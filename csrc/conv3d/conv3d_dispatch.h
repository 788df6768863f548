// Which implementation a CUDA convolution takes, and why. The one place where that is decided; torch-free, so that it
// can be inspected and tested without a GPU.
#pragma once

#include <string>

#include "conv3d_plan.h"

namespace kgopt {

enum class ConvBackend { kAuto, kKgopt, kAten };

enum class ConvPath {
  kImplicitGemm,  // conv3d_kernel.cuh
  kDirect,        // conv3d_direct.cu
  kAten           // cuDNN through aten::convolution
};

struct ConvChoice {
  ConvPath path = ConvPath::kAten;
  ConvPlan plan;
  std::string reason;

  std::string explain() const {
    const char* name = path == ConvPath::kAten ? "aten: " : path == ConvPath::kDirect ? "kgopt (direct): " : "kgopt: ";
    return name + reason;
  }
};

// Input channels per group up to which the implicit GEMM beats cuDNN, measured on an H200 (benchmarks/results): below,
// cuDNN pads channels to its tile and runs at a tenth of its rate; above, its wgmma kernels win.
inline constexpr int64_t kNarrowInputChannels = 16;
inline constexpr int64_t kNarrowOutputChannels = 64;

inline ConvChoice choose_conv(const ConvProblem& problem, const DeviceLimits& limits, ConvBackend backend) {
  ConvChoice choice;
  const bool fused = problem.epilogue == ConvEpilogue::kStats || problem.epilogue == ConvEpilogue::kResidualLse;
  choice.plan = plan_conv(problem, limits);
  if (backend == ConvBackend::kAten) {
    choice.reason = "backend=\"aten\" was asked for";
    return choice;
  }
  if (choice.plan.refusal) {
    choice.reason = choice.plan.refusal;
    if (backend == ConvBackend::kKgopt && !fused) choice.path = ConvPath::kDirect;
    return choice;
  }
  if (backend == ConvBackend::kKgopt) {
    choice.path = ConvPath::kImplicitGemm;
    choice.reason = "backend=\"kgopt\" was asked for";
    return choice;
  }
  const int64_t c_in = problem.c_in / problem.groups, c_out = problem.c_out / problem.groups;
  if (problem.groups != 1) {
    choice.reason = "grouped convolutions go to cuDNN";
  } else if (fused && c_in <= 2 * kNarrowInputChannels) {
    choice.path = ConvPath::kImplicitGemm;
    choice.reason = "narrow input: the convolution's output never reaches memory";
  } else if (fused) {
    choice.reason =
        "input channels above " + std::to_string(2 * kNarrowInputChannels) + ": cuDNN and a stored output are faster";
  } else if (c_in <= kNarrowInputChannels && c_out <= kNarrowOutputChannels) {
    choice.path = ConvPath::kImplicitGemm;
    choice.reason = "narrow channels, where cuDNN is slow";
  } else {
    choice.reason = "input channels above " + std::to_string(kNarrowInputChannels) + " or output channels above " +
                    std::to_string(kNarrowOutputChannels) + ": cuDNN is faster";
  }
  return choice;
}

}  // namespace kgopt
