// Which implementation a CUDA convolution takes, and why. The one place where that is decided; torch-free, so that it
// can be inspected and tested without a GPU.
#pragma once

#include <array>
#include <map>
#include <string>

#include "conv3d_flat_table.h"
#include "conv3d_gram_plan.h"
#include "conv3d_hopper_table.h"
#include "conv3d_narrow_plan.h"
#include "conv3d_plan.h"

namespace kgopt {

enum class ConvBackend { kAuto, kKgopt, kAten };

enum class ConvPath {
  kImplicitGemm,  // conv3d_kernel.cuh
  kNarrow,        // conv3d_narrow_kernel.cuh
  kHopper,        // conv3d_hopper_kernel.cuh
  kRows,          // conv3d_rows_kernel.cuh
  kFlat,          // conv3d_flat_kernel.cuh
  kGram,          // conv3d_gram_kernel.cuh: statistics without the convolution
  kDirect,        // conv3d_direct.cu
  kAten           // cuDNN through aten::convolution
};

struct ConvChoice {
  ConvPath path = ConvPath::kAten;
  ConvPlan plan;
  NarrowPlan narrow;
  HopperPlan hopper;
  RowsPlan rows;
  FlatPlan flat;
  GramPlan gram;
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

// Whether statistics come from the Gram matrix. The narrow kernel must be there to correct it, which costs a launch;
// its estimate, of busy units alone, was two thirds of what it took on an H200 where both were measured.
inline bool gram_wins(const GramPlan& gram, const NarrowPlan& narrow) {
  return !gram.refusal && !narrow.refusal && gram.cycles + 5000 < 1.5 * narrow.cycles;
}

inline ConvChoice choose_conv(const ConvProblem& problem, const DeviceLimits& limits, ConvBackend backend) {
  ConvChoice choice;
  const bool fused = problem.epilogue == ConvEpilogue::kStats || problem.epilogue == ConvEpilogue::kResidualLse;
  choice.plan = plan_conv(problem, limits);
  if (backend == ConvBackend::kAten) {
    choice.reason = "backend=\"aten\" was asked for";
    return choice;
  }
  if (problem.epilogue == ConvEpilogue::kStoreStats) {
    choice.flat = plan_flat(problem, limits);
    if (flat_loses(problem, choice.flat, backend == ConvBackend::kKgopt) == nullptr) {
      choice.path = ConvPath::kFlat;
      choice.reason = "stride 1 without padding: convolution, activation and norm in one launch on wgmma";
      return choice;
    }
  }
  if (choice.plan.refusal) {
    choice.reason = choice.plan.refusal;
    if (backend == ConvBackend::kKgopt && !fused) choice.path = ConvPath::kDirect;
    return choice;
  }
  choice.narrow = plan_narrow(problem, limits);
  choice.hopper = plan_hopper(problem, limits);
  choice.gram = plan_gram(problem, limits);
  choice.rows = plan_rows(problem, limits);
  // The two kernels for channels-innermost tensors, the faster of them by prediction.
  const bool by_rows = !choice.rows.refusal &&
                       (choice.hopper.refusal || rows_microseconds(choice.rows) < hopper_microseconds(choice.hopper));
  const ConvPath own = gram_wins(choice.gram, choice.narrow) ? ConvPath::kGram
                       : !choice.narrow.refusal              ? ConvPath::kNarrow
                       : by_rows                             ? ConvPath::kRows
                       : !choice.hopper.refusal              ? ConvPath::kHopper
                                                             : ConvPath::kImplicitGemm;
  if (backend == ConvBackend::kKgopt) {
    choice.path = own;
    choice.reason = "backend=\"kgopt\" was asked for";
    return choice;
  }
  const int64_t c_in = problem.c_in / problem.groups, c_out = problem.c_out / problem.groups;
  if (problem.groups != 1) {
    choice.reason = "grouped convolutions go to cuDNN";
  } else if (fused && c_in <= 2 * kNarrowInputChannels &&
             (c_in <= kNarrowInputChannels || c_out <= kNarrowOutputChannels)) {
    choice.path = own;
    choice.reason = "narrow input: the convolution's output never reaches memory";
    if (own == ConvPath::kNarrow) choice.reason += "; on wgmma";
    if (own == ConvPath::kGram) choice.reason += "; its statistics come from the Gram matrix of the input";
  } else if (fused) {
    choice.reason = "input channels above " + std::to_string(2 * kNarrowInputChannels) + ", or above " +
                    std::to_string(kNarrowInputChannels) + " and output channels above " +
                    std::to_string(kNarrowOutputChannels) + ": cuDNN and a stored output are faster";
  } else if (const char* const why_not = innermost_loses(problem, choice.hopper, choice.rows); why_not == nullptr) {
    choice.path = by_rows ? ConvPath::kRows : ConvPath::kHopper;
    choice.reason = by_rows ? "channels innermost: wgmma over rows of positions"
                            : "channels innermost and few: wgmma with the taps of the width as columns";
  } else if (problem.channels_innermost && problem.kernel[0] > 1 && problem.dtype == Dtype::kFloat32 &&
             problem.allow_tf32 && c_in % 4 == 0) {
    choice.reason = "16-byte pieces of channels innermost in TF32: cuDNN is faster";
  } else if (c_in <= kNarrowInputChannels && c_out <= kNarrowOutputChannels) {
    choice.path = choice.narrow.refusal ? ConvPath::kImplicitGemm : ConvPath::kNarrow;
    choice.reason = "narrow channels, where cuDNN is slow";
    if (choice.path == ConvPath::kNarrow) choice.reason += "; on wgmma";
  } else {
    choice.reason = "input channels above " + std::to_string(kNarrowInputChannels) + " or output channels above " +
                    std::to_string(kNarrowOutputChannels) + ": cuDNN is faster";
    choice.reason += std::string("; not on wgmma: ") + why_not;
  }
  return choice;
}

using ConvKey = std::array<int64_t, 33>;
inline ConvKey conv_key(const ConvProblem& q, const DeviceLimits& l, ConvBackend backend) {
  ConvKey key{
      q.n,        q.c_in,           q.c_out,       q.groups,    q.transposed,     int64_t(q.dtype),   q.allow_tf32,
      l.sm_count, l.smem_per_block, l.smem_per_sm, l.has_wgmma, int64_t(backend), int64_t(q.epilogue)};
  key[13] = q.channels_innermost;
  key[32] = q.planar;
  for (int i = 0; i < 3; ++i) {
    const int64_t dim[6] = {q.in[i], q.out[i], q.kernel[i], q.stride[i], q.padding[i], q.dilation[i]};
    for (int j = 0; j < 6; ++j) key[14 + i * 6 + j] = dim[j];
  }
  return key;
}

// The same as `choose`, remembered: planning looks at hundreds of tiles, and a model calls with the same few shapes.
template <typename Choice>
const Choice& choose_cached(const ConvProblem& q, const DeviceLimits& l, ConvBackend backend,
                            Choice (*choose)(const ConvProblem&, const DeviceLimits&, ConvBackend)) {
  thread_local std::map<ConvKey, Choice> known;
  const ConvKey key = conv_key(q, l, backend);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  if (known.size() >= 256) known.clear();
  return known.emplace(key, choose(q, l, backend)).first->second;
}

}  // namespace kgopt
