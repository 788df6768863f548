// Which implementation a CUDA convolution takes, and why: choose_conv() is the one place where that is decided.
// Torch-free, so that it can be inspected and tested without a GPU. Who runs what it chose: conv3d/api/.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "conv3d/choice/few_channels.h"
#include "conv3d/choice/measured.h"
#include "conv3d/depthwise/cost.h"
#include "conv3d/few_channels/autocorrelation/plan.h"
#include "conv3d/few_channels/plan.h"
#include "conv3d/implicit_gemm/plan.h"
#include "conv3d/norm_conv/plan.h"
#include "conv3d/small_chain/plan.h"
#include "conv3d/wgmma/transposed_norm/cost.h"

namespace kgopt {

// The last four ask for one kernel of a plain convolution; other ops take them for kKgopt.
enum class ConvBackend { kAuto, kKgopt, kAten, kImplicitGemm, kTapColumns, kPositionRows, kFewChannels };
inline constexpr ConvBackend kTunedBackends[] = {ConvBackend::kAten, ConvBackend::kImplicitGemm,
                                                 ConvBackend::kTapColumns, ConvBackend::kPositionRows,
                                                 ConvBackend::kFewChannels};

// cuDNN through aten::convolution, conv3d/direct/direct.cu, and conv3d/norm_conv/norm_conv1x1.cu without a norm: none
// of them has anything to plan here.
struct AtenPlan {};
struct DirectPlan {};
struct HeadPlan {};

// A family is the type of its plan; the folder is in the comment.
using AnyConvPlan = std::variant<ImplicitGemmPlan,    // implicit_gemm/
                                 FewChannelsPlan,     // few_channels/
                                 TapColumnsPlan,      // wgmma/tap_columns/
                                 PositionRowsPlan,    // wgmma/position_rows/
                                 TransposedNormPlan,  // wgmma/transposed_norm/
                                 ChainPlan,           // small_chain/
                                 HeadPlan,            // norm_conv/
                                 DepthwisePlan,       // depthwise/
                                 DirectPlan,          // direct/
                                 AtenPlan>;
enum class ConvPath {  // in the order of the plans
  kImplicitGemm,
  kFewChannels,
  kTapColumns,
  kPositionRows,
  kTransposedNorm,
  kChain,
  kHead,
  kDepthwise,
  kDirect,
  kAten
};

inline const char* conv_path_name(ConvPath path) {
  switch (path) {
    case ConvPath::kImplicitGemm: return "implicit GEMM";
    case ConvPath::kFewChannels: return "kernel of few channels on wgmma";
    case ConvPath::kTapColumns: return "taps as columns on wgmma";
    case ConvPath::kPositionRows: return "rows of positions on wgmma";
    case ConvPath::kTransposedNorm: return "convolution and norm in one launch on wgmma";
    case ConvPath::kChain: return "a small chain in one launch";
    case ConvPath::kHead: return "kernel of 1 x 1 convolutions to a few channels";
    case ConvPath::kDepthwise: return "depthwise";
    case ConvPath::kDirect: return "direct";
    default: return "cuDNN";
  }
}

// The backend that names the path's kernel.
inline ConvBackend backend_of(ConvPath path) {
  switch (path) {
    case ConvPath::kImplicitGemm: return ConvBackend::kImplicitGemm;
    case ConvPath::kTapColumns: return ConvBackend::kTapColumns;
    case ConvPath::kPositionRows: return ConvBackend::kPositionRows;
    case ConvPath::kFewChannels: return ConvBackend::kFewChannels;
    case ConvPath::kAten: return ConvBackend::kAten;
    default: return ConvBackend::kKgopt;
  }
}

// What a caller wants done to a plain convolution's output while it is stored.
enum class ConvTailKind { kNone, kAct, kMore };  // kMore: a residual, a scale or moments

struct Choice {
  AnyConvPlan plan = AtenPlan();
  std::string reason;
  const char* cannot = nullptr;  // why the kernel that was asked for cannot run it
  // Of a pipeline. It is composed of single ops: the convolution's output is stored, by `plan` where that is of few
  // channels, else by the choice for kStore.
  bool composed = false;
  // kStats by the kernels of few channels: statistics come from the input's autocorrelation, and `plan` does what that
  // cannot.
  std::optional<AutocorrelationPlan> autocorrelation;
  std::shared_ptr<const Choice> statistics;  // kResidualLse: the pass in front, unless all of it is one launch
  std::shared_ptr<const Choice> passes;      // kChain: what is taken where its launch is refused after all

  ConvPath path() const { return static_cast<ConvPath>(plan.index()); }
  template <typename Plan>
  const Plan& as() const {
    return std::get<Plan>(plan);
  }
  // Whether its kernel does what is wanted of the output.
  bool does(ConvTailKind tail) const {
    if (path() == ConvPath::kPositionRows) return tail != ConvTailKind::kMore;
    return path() == ConvPath::kTapColumns && !as<TapColumnsPlan>().wide;
  }
  std::string explain() const {
    if (cannot) return std::string("none: ") + cannot;
    const ConvPath by = path();
    return (by == ConvPath::kAten ? "aten: " : by == ConvPath::kDirect ? "kgopt (direct): " : "kgopt: ") + reason;
  }
};
static_assert(std::is_same_v<std::variant_alternative_t<size_t(ConvPath::kChain), AnyConvPlan>, ChainPlan> &&
                  std::is_same_v<std::variant_alternative_t<size_t(ConvPath::kAten), AnyConvPlan>, AtenPlan>,
              "paths are in the order of the plans");

// Whether statistics come from the input's autocorrelation. The kernel that corrects it is launched, too, and must be
// able to leave samples out, which blocks that walk through several do not. The other plans' estimates were 0.8 of what
// was measured on an H200.
inline bool autocorrelation_wins(const AutocorrelationPlan& plan, const FewChannelsPlan& few) {
  return !plan.refusal && !few.refusal && !few.by_window && plan.cycles + kAutocorrelationCheck < 1.2 * few.cycles;
}

namespace choice_detail {

// The plans of all families that store a convolution.
struct StoringPlans {
  ImplicitGemmPlan implicit_gemm;
  TapColumnsPlan tap_columns;
  PositionRowsPlan position_rows;
  FewChannelsPlan few_channels;

  // Why a path cannot run the convolution, null when it can.
  const char* refusal(ConvPath path) const {
    return path == ConvPath::kImplicitGemm   ? implicit_gemm.refusal
           : path == ConvPath::kTapColumns   ? tap_columns.refusal
           : path == ConvPath::kPositionRows ? position_rows.refusal
           : path == ConvPath::kFewChannels  ? few_channels.refusal
                                             : nullptr;
  }
  AnyConvPlan of(ConvPath path) const {
    switch (path) {
      case ConvPath::kImplicitGemm: return implicit_gemm;
      case ConvPath::kTapColumns: return tap_columns;
      case ConvPath::kPositionRows: return position_rows;
      case ConvPath::kFewChannels: return few_channels;
      default: return AtenPlan();
    }
  }
};

// The path of a plain convolution, by the nearest measured one; with `own`, the fastest of the extension's.
inline ConvPath choose_by_table(const ConvProblem& problem, const DeviceLimits& limits, bool own,
                                const StoringPlans& plans, std::string* reason) {
  const ConvPath paths[kTimedPaths] = {ConvPath::kAten, ConvPath::kImplicitGemm, ConvPath::kTapColumns,
                                       ConvPath::kPositionRows, ConvPath::kFewChannels};
  const ConvPrediction predicted =
      predict_conv(problem, limits, plans.implicit_gemm, plans.tap_columns, plans.position_rows, plans.few_channels);
  if (const double aten = padded_aten_microseconds(problem); aten > 0 && !own) {
    const double us = predicted.us[kTimedImplicitGemm];
    *reason = "an output padding of the stride or more, which cuDNN does not have: about " +
              std::to_string(std::lround(aten)) + " us, implicit GEMM: " + std::to_string(std::lround(us)) + " us";
    return us > 0 && us < kPredictedMargin * aten ? ConvPath::kImplicitGemm : ConvPath::kAten;
  }
  const ConvPrediction t = estimate_conv(problem, limits, predicted);
  int best = own ? kTimedImplicitGemm : kTimedAten;
  // Where it makes no difference cuDNN is taken.
  double least = own ? 1e30 : own_margin(problem) * t.us[kTimedAten];
  for (int i = kTimedImplicitGemm; i < kTimedPaths; ++i) {
    const double us = own && t.us[i] <= 0 ? predicted.us[i] : t.us[i];
    if (us > 0 && us < least) best = i, least = us;
  }
  if (t.us[kTimedAten] <= 0) {
    *reason = "far from every measured convolution";
    return paths[best];
  }
  *reason = "by the nearest measured convolutions:";
  for (int i = 0; i < kTimedPaths; ++i) {
    if (t.us[i] <= 0 && !plans.refusal(paths[i])) continue;
    *reason += std::string(i == 0 ? " " : "; ") + conv_path_name(paths[i]) + ": ";
    *reason += t.us[i] > 0 ? std::to_string(std::lround(t.us[i])) + " us" : plans.refusal(paths[i]);
  }
  return paths[best];
}

// A 1 x 1 convolution of channels_last tensors to at most 4 channels, which cuDNN pads to a tile's.
inline bool is_head(const ConvProblem& q) {
  NormConv1x1Params p;
  p.n = q.n;
  p.s = 1;
  for (int i = 0; i < 3; ++i) {
    if (q.kernel[i] != 1 || q.stride[i] != 1 || q.padding[i] != 0) return false;
    p.s *= q.out[i];
  }
  p.c = static_cast<int>(q.c_in);
  p.c_out = static_cast<int>(q.c_out);
  p.dtype = q.dtype;
  return !q.transposed && q.groups == 1 && !q.planar && q.channels_innermost && p.n * p.s >= kHeadLeastRows &&
         !norm_conv1x1_refusal(p);
}

// A transposed convolution of one value a sample. PyTorch keeps cuDNN's plan of a transposed convolution by the layout
// of its result, which such a one does not have: the plan of x in one layout would read x in the other.
inline bool has_no_layout(const ConvProblem& q) {
  return q.transposed && q.c_out == 1 && q.out[0] == 1 && q.out[1] == 1 && q.out[2] == 1;
}

// A plain convolution.
inline Choice choose_stored(const ConvProblem& problem, const DeviceLimits& limits, ConvBackend backend,
                            ConvTailKind tail) {
  Choice choice;
  if (backend == ConvBackend::kAten) {
    choice.reason = "backend=\"aten\" was asked for";
    return choice;
  }
  if (backend == ConvBackend::kAuto && has_no_layout(problem)) {
    choice.plan = DirectPlan();
    choice.reason = "transposed, of one value a sample, whose layout cuDNN's plans cannot tell";
    return choice;
  }
  const bool named = backend != ConvBackend::kAuto && backend != ConvBackend::kKgopt;
  if (!named && is_depthwise(problem)) {
    const DepthwisePlan depthwise = plan_depthwise(problem, limits);
    const auto times = [&] { return depthwise_times(problem, DepthwiseWork::kForward, depthwise.microseconds); };
    if (!depthwise.refusal && backend == ConvBackend::kKgopt) {
      choice.plan = depthwise;
      choice.reason = "backend=\"kgopt\" was asked for; a depthwise convolution: " + times();
      return choice;
    }
    if (!depthwise.refusal) {
      const char* loses = depthwise_loses(problem, DepthwiseWork::kForward, depthwise.microseconds);
      if (padded_aten_microseconds(problem) > depthwise.microseconds) loses = nullptr;
      if (!loses) choice.plan = depthwise;
      choice.reason = std::string(loses ? loses : "a depthwise convolution") + ": " + times();
      return choice;
    }
  }
  StoringPlans plans;
  plans.implicit_gemm = plan_implicit_gemm(problem, limits);
  if (const char* refusal = plans.implicit_gemm.refusal) {  // a problem that no kernel of tensor cores takes
    choice.reason = refusal;
    if (backend == ConvBackend::kKgopt) choice.plan = DirectPlan();
    if (named) choice.cannot = refusal;
    return choice;
  }
  if (!named && is_head(problem)) {
    choice.plan = HeadPlan();
    choice.reason = "a 1 x 1 convolution to a few channels";
    return choice;
  }
  plans.few_channels = plan_few_channels(problem, limits);
  plans.tap_columns = plan_tap_columns(problem, limits);
  plans.position_rows = plan_position_rows(problem, limits);
  ConvPath path;
  if (named) {
    path = backend == ConvBackend::kTapColumns     ? ConvPath::kTapColumns
           : backend == ConvBackend::kPositionRows ? ConvPath::kPositionRows
           : backend == ConvBackend::kFewChannels  ? ConvPath::kFewChannels
                                                   : ConvPath::kImplicitGemm;
    choice.cannot = plans.refusal(path);
    choice.reason = "its kernel was asked for";
  } else {
    path = choose_by_table(problem, limits, backend == ConvBackend::kKgopt, plans, &choice.reason);
    if (backend == ConvBackend::kKgopt) choice.reason = "backend=\"kgopt\" was asked for; " + choice.reason;
  }
  // Positions as rows: the kernel does an activation and no more; where more is wanted, taps as columns make up for it.
  if (path == ConvPath::kPositionRows && tail == ConvTailKind::kMore && !plans.tap_columns.refusal &&
      !plans.tap_columns.wide) {
    path = ConvPath::kTapColumns;
  }
  choice.plan = plans.of(path);
  return choice;
}

// Microseconds of the first or third pipeline by the kernels for few channels, fitted to 100 random chains in two
// precisions on an H200: nine in ten within 0.78 and 1.21.
struct FewChannelsMicroseconds {
  const ConvProblem& problem;
  const DeviceLimits& limits;
  // x of half types is gathered value by value where rows are no vectors, and so are most of these kernels' weights.
  bool slow = problem.dtype != Dtype::kFloat32 && problem.in[2] % 4 != 0;

  FewChannelsPlan plan(ConvEpilogue epilogue) const {
    ConvProblem q = problem;
    q.epilogue = epilogue;
    return plan_few_channels(q, limits);
  }
  double pass(const FewChannelsPlan& p) const {
    const double weights = p.by_window || p.by_positions ? 0 : 8.0 * p.k_steps * p.columns * p.window;
    double x = double(problem.n) * problem.c_in / limits.sm_count;
    for (int i = 0; i < 3; ++i) x *= double(problem.in[i]);
    return (p.by_window ? (slow ? 0.54e-3 : 0.26e-3) : 0.69e-3) * std::max(0.0, p.cycles - 10000) +
           kWeightMicroseconds * weights + 5.5 * (p.n_tiles - 1) + (slow ? 0.61e-3 : 0.34e-3) * x;
  }
  double mean(const FewChannelsPlan& p) const { return 22 + pass(p); }
  // Two convolutions, or one whose output goes to L2 or memory and is read from there twice.
  double lse(const FewChannelsPlan& p) const { return 24 + pass(plan(ConvEpilogue::kStats)) + pass(p); }
  double stored_lse(const FewChannelsPlan& p) const {
    double positions = double(problem.n);
    for (int i = 0; i < 3; ++i) positions *= double(problem.out[i]);
    return 26 + pass(p) + (8e-6 + 3.5e-6 * double(problem.c_out)) * positions;
  }
  static constexpr double kWeightMicroseconds = 0.1e-3;
};

// The second pipeline: convolution, activation and norm in one launch, or the implicit GEMM, which leaves statistics
// beside what it stores.
inline Choice choose_store_stats(const ConvProblem& problem, const DeviceLimits& limits, ConvBackend backend) {
  Choice choice;
  choice.composed = true;
  if (backend == ConvBackend::kAten) {
    choice.reason = "backend=\"aten\" was asked for";
    return choice;
  }
  TransposedNormPlan one_launch = plan_transposed_norm(problem, limits);
  const TransposedNormPlan scaled = plan_transposed_norm(problem, limits, true);
  if (!scaled.refusal && transposed_norm_loses(problem, scaled, true) == nullptr &&
      (one_launch.refusal ||
       transposed_norm_microseconds(problem, scaled) < transposed_norm_microseconds(problem, one_launch))) {
    one_launch = scaled;
  }
  if (transposed_norm_loses(problem, one_launch, backend != ConvBackend::kAuto) == nullptr) {
    choice.plan = one_launch;
    choice.composed = false;
    choice.reason = "stride 1 without padding: convolution, activation and norm in one launch on wgmma";
    if (one_launch.scaled) choice.reason += ", of fp16 operands scaled by powers of two";
    return choice;
  }
  const ImplicitGemmPlan implicit_gemm = plan_implicit_gemm(problem, limits);
  const int64_t c_in = problem.c_in / problem.groups, c_out = problem.c_out / problem.groups;
  if (implicit_gemm.refusal) {
    choice.reason = implicit_gemm.refusal;
  } else if (backend != ConvBackend::kAuto) {
    choice.reason = "backend=\"kgopt\" was asked for";
    ConvProblem stored = problem;
    stored.epilogue = ConvEpilogue::kStore;
    choice.composed = !plan_tap_columns(stored, limits).refusal;  // the faster convolution, and a norm behind it
  } else if (problem.groups != 1) {
    choice.reason = "grouped convolutions go to cuDNN";
  } else if (c_in <= kFewInputChannels && c_out <= kFewOutputChannels) {
    choice.reason = "few channels, where cuDNN is slow";
    choice.composed = false;
  } else {
    choice.reason = "input channels above " + std::to_string(kFewInputChannels) + " or output channels above " +
                    std::to_string(kFewOutputChannels) + ": cuDNN is faster";
  }
  if (!choice.composed) choice.plan = implicit_gemm;
  return choice;
}

// A pass of the first or third pipeline that leaves the convolution's output out: its statistics, or logsumexp.
inline Choice choose_pass(const ConvProblem& problem, const DeviceLimits& limits, ConvBackend backend) {
  Choice choice;
  choice.composed = true;
  if (backend == ConvBackend::kAten) {
    choice.reason = "backend=\"aten\" was asked for";
    return choice;
  }
  const ImplicitGemmPlan implicit_gemm = plan_implicit_gemm(problem, limits);
  if (implicit_gemm.refusal) {
    choice.reason = implicit_gemm.refusal;
    return choice;
  }
  if (backend == ConvBackend::kAuto && problem.groups != 1) {
    choice.reason = "grouped convolutions go to cuDNN";
    return choice;
  }
  if (backend == ConvBackend::kAuto && !has_few_channels(problem.c_in, problem.c_out)) {
    choice.reason = "input channels above " + std::to_string(2 * kFewInputChannels) + ", or above " +
                    std::to_string(kFewInputChannels) + " and output channels above " +
                    std::to_string(kFewOutputChannels) + ": cuDNN and a stored output are faster";
    return choice;
  }
  choice.composed = false;
  const FewChannelsPlan few = plan_few_channels(problem, limits);
  choice.plan = few.refusal ? AnyConvPlan(implicit_gemm) : AnyConvPlan(few);
  const bool lse = problem.epilogue == ConvEpilogue::kResidualLse;
  if (!lse) {
    const AutocorrelationPlan autocorrelation = plan_autocorrelation(problem, limits);
    if (autocorrelation_wins(autocorrelation, few)) choice.autocorrelation = autocorrelation;
  }
  if (backend != ConvBackend::kAuto) {
    choice.reason = "backend=\"kgopt\" was asked for";
    return choice;
  }
  choice.reason = "few input channels: the convolution's output never reaches memory";
  if (few.refusal) return choice;
  choice.reason += "; on wgmma";
  if (choice.autocorrelation) choice.reason += "; statistics from the input's autocorrelation";
  if (!lse) return choice;
  const FewChannelsMicroseconds us{problem, limits};
  const FewChannelsPlan stored = us.plan(ConvEpilogue::kStore);
  if (!stored.refusal && us.stored_lse(stored) < us.lse(few)) {
    choice.plan = stored;
    choice.composed = true;
    choice.reason = "few input channels, on wgmma: storing the output once takes less than two convolutions";
  }
  return choice;
}

// The pass for statistics in front of the one into logsumexp. Both compute the same convolution, to the same rounding,
// and neither stores it, or both of them give way to a stored output.
inline void add_statistics(const ConvProblem& problem, const DeviceLimits& limits, ConvBackend backend, Choice* lse) {
  if (lse->composed) return;
  ConvProblem of_statistics = problem;
  of_statistics.epilogue = ConvEpilogue::kStats;
  Choice statistics = choose_pass(of_statistics, limits, backend);
  if (statistics.composed || lse->path() == ConvPath::kFewChannels) lse->reason = statistics.reason;
  if (statistics.composed) {
    lse->composed = true;
    lse->plan = AtenPlan();
    return;
  }
  if (lse->path() == ConvPath::kImplicitGemm && statistics.path() == ConvPath::kFewChannels) {
    statistics.plan = plan_implicit_gemm(of_statistics, limits);
    statistics.autocorrelation = std::nullopt;
  }
  lse->statistics = std::make_shared<const Choice>(std::move(statistics));
}

// Microseconds of the first or third pipeline by passes.
inline double passes_microseconds(const ConvProblem& problem, const DeviceLimits& limits, const Choice& choice) {
  const bool lse = problem.epilogue == ConvEpilogue::kResidualLse;
  if (choice.path() != ConvPath::kFewChannels) return predict_aten(problem) + (lse ? 20 : 10);
  const FewChannelsMicroseconds us{problem, limits};
  const FewChannelsPlan& plan = choice.as<FewChannelsPlan>();
  return choice.composed ? us.stored_lse(plan) : lse ? us.lse(plan) : us.mean(plan);
}

}  // namespace choice_detail

// The one choice. `tail`: what is wanted of a plain convolution's output while it is stored.
inline Choice choose_conv(const ConvProblem& problem, const DeviceLimits& limits, ConvBackend backend,
                          ConvTailKind tail = ConvTailKind::kNone) {
  using namespace choice_detail;
  if (problem.epilogue == ConvEpilogue::kStore) return choose_stored(problem, limits, backend, tail);
  if (problem.epilogue == ConvEpilogue::kStoreStats) return choose_store_stats(problem, limits, backend);
  Choice passes = choose_pass(problem, limits, backend);
  const bool may_chain = backend == ConvBackend::kAuto && problem.norm_groups != 0;
  const double us = may_chain ? passes_microseconds(problem, limits, passes) : 0;
  if (problem.epilogue == ConvEpilogue::kResidualLse) add_statistics(problem, limits, backend, &passes);
  if (!may_chain) return passes;
  const ChainPlan chain = plan_chain(problem, limits);
  if (chain.refusal || chain.cycles / kCyclesPerMicrosecond >= us) return passes;
  Choice choice;
  choice.plan = chain;
  choice.reason = "a small chain: convolution, norm and what follows in one launch";
  choice.passes = std::make_shared<const Choice>(std::move(passes));
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

// What `make` gives for the key, remembered: planning looks at hundreds of tiles, and a model calls with the same few
// shapes. Each caller's `make` has a memory of its own.
template <typename Make>
auto remembered(const ConvKey& key, const Make& make) {
  using Known = std::shared_ptr<const decltype(make())>;
  thread_local std::map<ConvKey, Known> known;
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  if (known.size() >= 256) known.clear();
  return known.emplace(key, std::make_shared<const decltype(make())>(make())).first->second;
}

inline std::shared_ptr<const Choice> remembered_choice(const ConvProblem& q, const DeviceLimits& l, ConvBackend backend,
                                                       ConvTailKind tail = ConvTailKind::kNone) {
  ConvKey key = conv_key(q, l, backend);
  key[11] += 16 * int64_t(tail);
  return remembered(key, [&] { return choose_conv(q, l, backend, tail); });
}

}  // namespace kgopt
