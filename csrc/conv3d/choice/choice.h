// Which implementation a CUDA convolution takes, and why. The one place where that is decided; torch-free, so that it
// can be inspected and tested without a GPU.
#pragma once

#include <array>
#include <map>
#include <string>

#include "conv3d/choice/measured.h"
#include "conv3d/few_channels/autocorrelation/plan.h"
#include "conv3d/few_channels/plan.h"
#include "conv3d/implicit_gemm/plan.h"
#include "conv3d/small_chain/plan.h"
#include "conv3d/wgmma/transposed_norm/cost.h"

namespace kgopt {

// The last four ask for one kernel of a plain convolution; other ops take them for kKgopt.
enum class ConvBackend { kAuto, kKgopt, kAten, kImplicitGemm, kHopper, kRows, kNarrow };

enum class ConvPath {
  kImplicitGemm,  // conv3d/implicit_gemm/kernel.cuh
  kNarrow,        // conv3d/few_channels/gather/kernel.cuh
  kHopper,        // conv3d/wgmma/tap_columns/kernel.cuh
  kRows,          // conv3d/wgmma/position_rows/kernel.cuh
  kFlat,          // conv3d/wgmma/transposed_norm/kernel.cuh
  kChain,         // conv3d/small_chain/kernel.cuh
  kDirect,        // conv3d/direct/direct.cu
  kAten           // cuDNN through aten::convolution
};

inline const char* conv_path_name(ConvPath path) {
  switch (path) {
    case ConvPath::kImplicitGemm: return "implicit GEMM";
    case ConvPath::kNarrow: return "kernel of few channels on wgmma";
    case ConvPath::kHopper: return "taps as columns on wgmma";
    case ConvPath::kRows: return "rows of positions on wgmma";
    case ConvPath::kFlat: return "convolution and norm in one launch on wgmma";
    case ConvPath::kChain: return "a small chain in one launch";
    case ConvPath::kDirect: return "direct";
    default: return "cuDNN";
  }
}

struct ConvChoice {
  ConvPath path = ConvPath::kAten;
  ConvPlan plan;
  NarrowPlan narrow;
  HopperPlan hopper;
  RowsPlan rows;
  FlatPlan flat;
  ChainPlan chain;
  AutocorrelationPlan autocorrelation;
  bool from_input = false;  // statistics come from the input's autocorrelation, and `narrow` does what that cannot
  bool stores = false;      // kNarrow, before logsumexp: one convolution that is stored, instead of two
  std::string reason;
  const char* cannot = nullptr;  // why the kernel that was asked for cannot run it

  std::string explain() const {
    if (cannot) return std::string("none: ") + cannot;
    const char* name = path == ConvPath::kAten ? "aten: " : path == ConvPath::kDirect ? "kgopt (direct): " : "kgopt: ";
    return name + reason;
  }
};

// Input channels per group up to which convolutions that store no output, or statistics with it, take the implicit
// GEMM; measured on an H200 (benchmarks/results): below, cuDNN pads channels to its tile and runs at a tenth of its
// rate.
inline constexpr int64_t kNarrowInputChannels = 16;
inline constexpr int64_t kNarrowOutputChannels = 64;

// Whether statistics come from the input's autocorrelation. The kernel that corrects it is launched, too, and must be
// able to leave samples out, which blocks that walk through several do not. The other plans' estimates were 0.8 of what
// was measured on an H200.
inline bool autocorrelation_wins(const AutocorrelationPlan& plan, const NarrowPlan& narrow) {
  return !plan.refusal && !narrow.refusal && !narrow.gathered &&
         plan.cycles + kAutocorrelationCheck < 1.2 * narrow.cycles;
}

// Why a path cannot run the convolution, null when it can.
inline const char* conv_refusal(const ConvChoice& choice, ConvPath path) {
  return path == ConvPath::kImplicitGemm ? choice.plan.refusal
         : path == ConvPath::kHopper     ? choice.hopper.refusal
         : path == ConvPath::kRows       ? choice.rows.refusal
         : path == ConvPath::kNarrow     ? choice.narrow.refusal
                                         : nullptr;
}

// The path of a plain convolution, by the nearest measured one; with `own`, the fastest of the extension's.
inline void choose_by_table(const ConvProblem& problem, const DeviceLimits& limits, bool own, ConvChoice* choice) {
  const ConvPath paths[kTimedPaths] = {ConvPath::kAten, ConvPath::kImplicitGemm, ConvPath::kHopper, ConvPath::kRows,
                                       ConvPath::kNarrow};
  const ConvPrediction predicted =
      predict_conv(problem, limits, choice->plan, choice->hopper, choice->rows, choice->narrow);
  if (const double aten = padded_aten_microseconds(problem); aten > 0 && !own) {
    const double us = predicted.us[kTimedImplicitGemm];
    const bool takes = us > 0 && us < kPredictedMargin * aten;
    choice->path = takes ? ConvPath::kImplicitGemm : ConvPath::kAten;
    choice->reason = "an output padding of the stride or more, which cuDNN does not have: about " +
                     std::to_string(std::lround(aten)) + " us, implicit GEMM: " + std::to_string(std::lround(us)) +
                     " us";
    return;
  }
  const ConvPrediction t = estimate_conv(problem, limits, predicted);
  int best = own ? kTimedImplicitGemm : kTimedAten;
  // Where it makes no difference cuDNN is taken.
  double least = own ? 1e30 : kOwnMargin * t.us[kTimedAten];
  for (int i = kTimedImplicitGemm; i < kTimedPaths; ++i) {
    const double us = own && t.us[i] <= 0 ? predicted.us[i] : t.us[i];
    if (us > 0 && us < least) best = i, least = us;
  }
  choice->path = paths[best];
  if (t.us[kTimedAten] <= 0) {
    choice->reason = "far from every measured convolution";
    return;
  }
  choice->reason = "by the nearest measured convolutions:";
  for (int i = 0; i < kTimedPaths; ++i) {
    if (t.us[i] <= 0 && !conv_refusal(*choice, paths[i])) continue;
    choice->reason += std::string(i == 0 ? " " : "; ") + conv_path_name(paths[i]) + ": ";
    choice->reason += t.us[i] > 0 ? std::to_string(std::lround(t.us[i])) + " us" : conv_refusal(*choice, paths[i]);
  }
}

namespace dispatch_detail {

// Microseconds of the first or third pipeline by the narrow kernels, fitted to 100 random chains in two precisions on
// an H200: nine in ten within 0.78 and 1.21.
struct NarrowMicroseconds {
  const ConvProblem& problem;
  const DeviceLimits& limits;
  // x of half types is gathered value by value where rows are no vectors, and so are most of these kernels' weights.
  bool slow = problem.dtype != Dtype::kFloat32 && problem.in[2] % 4 != 0;

  NarrowPlan plan(ConvEpilogue epilogue) const {
    ConvProblem q = problem;
    q.epilogue = epilogue;
    return plan_narrow(q, limits);
  }
  double pass(const NarrowPlan& p) const {
    const double weights = p.gathered || p.position_rows ? 0 : 8.0 * p.k_steps * p.columns * p.window;
    double x = double(problem.n) * problem.c_in / limits.sm_count;
    for (int i = 0; i < 3; ++i) x *= double(problem.in[i]);
    return (p.gathered ? (slow ? 0.54e-3 : 0.26e-3) : 0.69e-3) * std::max(0.0, p.cycles - 10000) +
           kWeightMicroseconds * weights + 5.5 * (p.n_tiles - 1) + (slow ? 0.61e-3 : 0.34e-3) * x;
  }
  double mean(const NarrowPlan& p) const { return 22 + pass(p); }
  // Two convolutions, or one whose output goes to L2 or memory and is read from there twice.
  double lse(const NarrowPlan& p) const { return 24 + pass(plan(ConvEpilogue::kStats)) + pass(p); }
  double stored_lse(const NarrowPlan& p) const {
    double positions = double(problem.n);
    for (int i = 0; i < 3; ++i) positions *= double(problem.out[i]);
    return 26 + pass(p) + (8e-6 + 3.5e-6 * double(problem.c_out)) * positions;
  }
  static constexpr double kWeightMicroseconds = 0.1e-3;
};

inline ConvChoice choose_passes(const ConvProblem& problem, const DeviceLimits& limits, ConvBackend backend) {
  ConvChoice choice;
  const bool fused = problem.epilogue == ConvEpilogue::kStats || problem.epilogue == ConvEpilogue::kResidualLse;
  choice.plan = plan_conv(problem, limits);
  if (backend == ConvBackend::kAten) {
    choice.reason = "backend=\"aten\" was asked for";
    return choice;
  }
  if (problem.epilogue == ConvEpilogue::kStoreStats) {
    choice.flat = plan_flat(problem, limits);
    if (flat_loses(problem, choice.flat, backend != ConvBackend::kAuto) == nullptr) {
      choice.path = ConvPath::kFlat;
      choice.reason = "stride 1 without padding: convolution, activation and norm in one launch on wgmma";
      return choice;
    }
  }
  if (choice.plan.refusal) {
    choice.reason = choice.plan.refusal;
    if (backend == ConvBackend::kKgopt && !fused) choice.path = ConvPath::kDirect;
    if (backend != ConvBackend::kAuto && backend != ConvBackend::kKgopt) choice.cannot = choice.plan.refusal;
    return choice;
  }
  choice.narrow = plan_narrow(problem, limits);
  choice.hopper = plan_hopper(problem, limits);
  choice.rows = plan_rows(problem, limits);
  if (problem.epilogue == ConvEpilogue::kStore && backend != ConvBackend::kAuto && backend != ConvBackend::kKgopt) {
    choice.path = backend == ConvBackend::kHopper   ? ConvPath::kHopper
                  : backend == ConvBackend::kRows   ? ConvPath::kRows
                  : backend == ConvBackend::kNarrow ? ConvPath::kNarrow
                                                    : ConvPath::kImplicitGemm;
    choice.cannot = conv_refusal(choice, choice.path);
    choice.reason = "its kernel was asked for";
    return choice;
  }
  if (problem.epilogue == ConvEpilogue::kStore) {
    choose_by_table(problem, limits, backend == ConvBackend::kKgopt, &choice);
    if (backend == ConvBackend::kKgopt) choice.reason = "backend=\"kgopt\" was asked for; " + choice.reason;
    return choice;
  }
  choice.autocorrelation = plan_autocorrelation(problem, limits);
  choice.from_input = autocorrelation_wins(choice.autocorrelation, choice.narrow);
  const ConvPath own = !choice.narrow.refusal   ? ConvPath::kNarrow
                       : !choice.hopper.refusal ? ConvPath::kHopper
                                                : ConvPath::kImplicitGemm;
  if (backend != ConvBackend::kAuto) {
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
    if (own == ConvPath::kNarrow && choice.from_input) choice.reason += "; statistics from the input's autocorrelation";
    if (own == ConvPath::kNarrow && problem.epilogue == ConvEpilogue::kResidualLse) {
      const NarrowMicroseconds us{problem, limits};
      const NarrowPlan stored = us.plan(ConvEpilogue::kStore);
      choice.stores = !stored.refusal && us.stored_lse(stored) < us.lse(choice.narrow);
      if (choice.stores)
        choice.reason = "narrow input, on wgmma: storing the output once takes less than two convolutions";
    }
  } else if (fused) {
    choice.reason = "input channels above " + std::to_string(2 * kNarrowInputChannels) + ", or above " +
                    std::to_string(kNarrowInputChannels) + " and output channels above " +
                    std::to_string(kNarrowOutputChannels) + ": cuDNN and a stored output are faster";
  } else if (c_in <= kNarrowInputChannels && c_out <= kNarrowOutputChannels) {
    choice.path = ConvPath::kImplicitGemm;
    choice.reason = "narrow channels, where cuDNN is slow";
  } else {
    choice.reason = "input channels above " + std::to_string(kNarrowInputChannels) + " or output channels above " +
                    std::to_string(kNarrowOutputChannels) + ": cuDNN is faster";
  }
  return choice;
}

// Microseconds of the first or third pipeline by passes.
inline double passes_microseconds(const ConvProblem& problem, const DeviceLimits& limits, const ConvChoice& choice) {
  const bool lse = problem.epilogue == ConvEpilogue::kResidualLse;
  const NarrowMicroseconds us{problem, limits};
  if (choice.path != ConvPath::kNarrow) {
    ConvProblem plain = problem;
    plain.epilogue = ConvEpilogue::kStore;
    const ConvPrediction t =
        predict_conv(plain, limits, choice.plan, choice.hopper, choice.rows, plan_narrow(plain, limits));
    return t.us[kTimedAten] + (lse ? 20 : 10);
  }
  if (choice.stores) return us.stored_lse(us.plan(ConvEpilogue::kStore));
  return lse ? us.lse(choice.narrow) : us.mean(choice.narrow);
}

}  // namespace dispatch_detail

inline ConvChoice choose_conv(const ConvProblem& problem, const DeviceLimits& limits, ConvBackend backend) {
  ConvChoice choice = dispatch_detail::choose_passes(problem, limits, backend);
  if (backend != ConvBackend::kAuto || problem.norm_groups == 0) return choice;
  choice.chain = plan_chain(problem, limits);
  if (choice.chain.refusal) return choice;
  const double us = choice.chain.cycles / kHopperCyclesPerMicrosecond;
  if (us < dispatch_detail::passes_microseconds(problem, limits, choice)) {
    choice.path = ConvPath::kChain;
    choice.reason = "a small chain: convolution, norm and what follows in one launch";
  }
  return choice;
}

using ConvKey = std::array<int64_t, 35>;
inline ConvKey conv_key(const ConvProblem& q, const DeviceLimits& l, ConvBackend backend) {
  ConvKey key{
      q.n,        q.c_in,           q.c_out,       q.groups,    q.transposed,     int64_t(q.dtype),   q.allow_tf32,
      l.sm_count, l.smem_per_block, l.smem_per_sm, l.has_wgmma, int64_t(backend), int64_t(q.epilogue)};
  key[13] = q.channels_innermost;
  key[32] = q.planar;
  key[33] = q.norm_groups;
  key[34] = l.cluster_blocks;
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
