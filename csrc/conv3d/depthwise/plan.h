// Which depthwise convolutions there are kernels for, and their tiles. Plain arithmetic without CUDA or torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/refusal.h"
#include "conv3d/depthwise/params.h"
#include "conv3d/problem.h"

namespace kgopt {

// One pass over a tensor: a convolution, a transposed one, or the gradient of x of either; of a weight's gradient the
// positions that meet each other.
struct DepthwisePass {
  int64_t n = 0, channels = 0;
  bool scatter = false, flipped = false;  // flipped: taps are read from the last one on
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, kernel[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, padding[3] = {},
          dilation[3] = {1, 1, 1};
  int apart[3] = {1, 1, 1};  // positions of the tensors from one of the pass to the next
  Dtype dtype = Dtype::kFloat32;
  bool planar = false;
};

// Outputs of a dilated pass at stride 1 that are `dilation` apart read inputs that are as far apart. So it is that many
// passes of each dim without dilation, over tensors that lie between each other.
struct DepthwisePhase {
  DepthwisePass pass;
  int64_t in_first[3] = {}, out_first[3] = {};  // position 0 of the phase's tensors
};

inline int depthwise_phase_count(const int (&phases)[3]) { return phases[0] * phases[1] * phases[2]; }

// The first phase has the most outputs of all; one that has none has an empty output.
inline DepthwisePhase depthwise_phase(const DepthwisePass& whole, const int (&phases)[3], int index) {
  DepthwisePhase phase;
  phase.pass = whole;
  for (int i = 0; i < 3; ++i) {
    const int64_t step = phases[i], first = index % step;
    index /= static_cast<int>(step);
    if (step == 1) continue;
    const int64_t in_first = ((first - whole.padding[i]) % step + step) % step;
    const auto part = [&](int64_t size, int64_t from) { return std::max<int64_t>(0, (size - from + step - 1) / step); };
    phase.out_first[i] = first;
    phase.in_first[i] = in_first;
    phase.pass.out[i] = part(whole.out[i], first);
    phase.pass.in[i] = part(whole.in[i], in_first);
    phase.pass.padding[i] = (whole.padding[i] - first + in_first) / step;
    phase.pass.dilation[i] = 1;
    phase.pass.apart[i] = static_cast<int>(step);
  }
  return phase;
}

// A group has one input channel and one output channel.
inline bool is_depthwise(const ConvProblem& q) { return q.groups > 1 && q.groups == q.c_in && q.c_out == q.c_in; }

inline DepthwisePass depthwise_pass(const ConvProblem& q, bool of_dx) {
  DepthwisePass s;
  s.n = q.n;
  s.channels = q.c_out;
  s.scatter = q.transposed != of_dx;
  bool strided = false;
  for (int i = 0; i < 3; ++i) {
    s.in[i] = of_dx ? q.out[i] : q.in[i];
    s.out[i] = of_dx ? q.in[i] : q.out[i];
    s.kernel[i] = q.kernel[i];
    s.stride[i] = q.stride[i];
    s.padding[i] = q.padding[i];
    s.dilation[i] = q.dilation[i];
    strided = strided || q.stride[i] != 1;
  }
  if (s.scatter && !strided) {
    s.scatter = false;
    s.flipped = true;
    for (int i = 0; i < 3; ++i) s.padding[i] = s.dilation[i] * (s.kernel[i] - 1) - s.padding[i];
  }
  s.dtype = q.dtype;
  s.planar = q.planar;
  return s;
}

inline constexpr char kDepthwiseKernels[] =
    "kernels that are not 3, 5 or 7 wide, as high, and in volumes as deep or one plane, at stride 1 or 2";
inline constexpr char kDepthwiseDilation[] = "a dilation beside a stride, or of more than 32 phases";

namespace depthwise_detail {

inline constexpr int kMostPhases = 32;          // each is a launch
inline constexpr int kSmemOfBlock = 72 * 1024;  // three blocks a multiprocessor
inline constexpr int64_t kMostBlocks = (int64_t(1) << 31) - 1;
inline constexpr int kMostItems = 1 << 15;             // of a tile: divisors are exact below 2^16
inline constexpr int kWgradChain = 1024;               // values that a thread adds one after the other, in fp32
inline constexpr double kClock = 1700;                 // cycles a microsecond
inline constexpr double kBytesPerMicrosecond = 2.6e6;  // of an H200's memory, of a pass with halos

inline int up_to(int64_t value, int64_t step) { return static_cast<int>((value + step - 1) / step); }

inline DepthwiseDivisor divisor(int d) {
  DepthwiseDivisor by;
  by.divisor = static_cast<uint32_t>(d);
  by.factor = d > 1 ? static_cast<uint32_t>(((uint64_t(1) << 32) + d - 1) / d) : 0;
  return by;
}

// `neighbours`: threads whose rows are `alternate` apart, beside which those of the next plane stand.
inline DepthwiseTile make_tile(int rows, int span, int alternate, int neighbours, int planes, int depth_planes,
                               int lanes, int slack = 0) {
  DepthwiseTile t;
  t.rows = rows;
  t.span = span;
  t.step = up_to(rows, alternate);
  t.slack = slack;
  t.pitch = (span + 2 * slack) | 1;
  t.planes = planes;
  const int slots = t.step * alternate;
  t.plane = slots * t.pitch * lanes;
  if (lanes == 1) t.plane += (((neighbours - slots) * t.pitch) % 32 + 32) % 32;
  t.all_rows = rows * planes * depth_planes;
  t.by_rows = divisor(rows);
  t.by_all_rows = divisor(t.all_rows);
  t.by_span = divisor(span);
  t.by_planes = divisor(planes);
  return t;
}
inline int tile_floats(const DepthwiseTile& t, int depth_planes) {
  return (t.plane * t.planes * depth_planes + 3) / 4 * 4;
}

// Elements of the pieces that rows of `width` elements are whole ones of, up to 16 bytes.
inline int piece_of(int64_t width, int size) {
  int piece = 16 / size;
  while (width % piece != 0) piece /= 2;
  return piece;
}
// Columns beside a tile of such rows, which pieces reach.
inline int slack_of(int64_t width, int lanes, int size) { return lanes == 1 ? piece_of(width, size) - 1 : 0; }

// Warp instructions that bring a tile of `rows` rows into shared memory or out of it.
inline double copy_instructions(int64_t rows, int span, int lanes, int vector) {
  const double chunks = double(rows) * (lanes == 1 ? double(span) / vector + 1 : double(span) * lanes / vector);
  return chunks / 32 * (34 + (lanes == 1 ? 2.3 : 1.3) * vector);
}

// Blocks that a multiprocessor holds of these kernels, which are compiled for 128 registers at most.
inline int resident_blocks(int threads, int smem_bytes, const DeviceLimits& limits) {
  return std::max(1, std::min(512 / threads, limits.smem_per_sm / (smem_bytes + 1024)));
}

// Measured cycles over the model's, on an H200: latencies and banks, most of all of several small planes in a block.
// The model ranks tiles without it.
inline double unmodelled(const DepthwisePlan& plan) {
  if (plan.volume) return plan.mode == DepthwiseMode::kGather1 ? 1.5 : plan.mode == DepthwiseMode::kGather2 ? 2.5 : 2;
  return plan.lanes > 1 ? 2.1 : plan.in.planes > 1 ? 5 : 2.8;
}
inline double unmodelled(const DepthwiseWgradPlan& plan, bool volume) {
  return volume || plan.lanes > 1 ? 2.8 : plan.moved.planes > 1 ? 5 : 2.5;
}
// And beyond that, of phases, which overlap, but copy planar rows by elements.
inline double unmodelled_phase(const DepthwisePlan& plan) {
  if (!plan.volume) return 1;
  return plan.lanes == 1 ? (plan.kernel == 3 ? 2.4 : 1.1) : plan.kernel == 7 ? 1.9 : 1.1;
}
inline double unmodelled_phase(const DepthwiseWgradPlan& plan, bool volume) {
  return volume && plan.lanes > 1 && plan.kernel == 5 ? 2.1 : 1.3;
}

// The phases of a pass at stride 1 in every dim that is dilated, and few enough; whether there are such.
inline bool set_phases(const DepthwisePass& s, int (&phases)[3]) {
  int64_t count = 1;
  for (int i = 0; i < 3; ++i) {
    const int64_t step = s.kernel[i] > 1 ? s.dilation[i] : 1;
    if (step > 1 && (s.stride[i] != 1 || s.scatter)) return false;
    if ((count *= step) > kMostPhases) return false;
    phases[i] = static_cast<int>(step);
  }
  return true;
}

// Elements of memory that a pass moves for each of its own: rows of which it wants every so many come in sectors.
inline double spread_of(const DepthwisePass& s) {
  return s.planar ? std::min(s.apart[2], 32 / static_cast<int>(dtype_size(s.dtype))) : 1;
}

inline bool is_fast_kernel(const DepthwisePass& s) {
  const int64_t k = s.kernel[2];
  if ((k != 3 && k != 5 && k != 7) || s.kernel[1] != k) return false;
  if (s.stride[1] != s.stride[2] || s.stride[2] > 2) return false;
  const bool volume = s.kernel[0] == k && s.stride[0] == s.stride[2];
  // Images do not stride kernels 7 wide, volumes do.
  const bool planes = s.kernel[0] == 1 && s.stride[0] == 1 && s.padding[0] == 0 && (k < 7 || s.stride[2] == 1);
  return volume || planes;
}

}  // namespace depthwise_detail

// Cells of a dim, the inputs in front of cell 0's first one that it reads, and by how much outputs begin earlier.
struct DepthwiseCells {
  int64_t cells, lead, skew;
};
inline DepthwiseCells depthwise_cells(const DepthwisePass& s, int dim) {
  if (!s.scatter || s.kernel[dim] == 1) return {s.out[dim], s.padding[dim], 0};
  // o + padding = 2 q + up; cell i is q = i + padding / 2.
  const int64_t first = s.padding[dim] / 2, last = (s.out[dim] - 1 + s.padding[dim]) / 2;
  return {last - first + 1, (s.kernel[dim] - 1) / 2 - first, s.padding[dim] % 2};
}

// Tiles that cover the outputs of a pass.
inline void cover(DepthwisePlan* plan, const DepthwisePass& s) {
  using depthwise_detail::up_to;
  plan->tiles[0] = up_to(depthwise_cells(s, 1).cells, plan->rows * depthwise_cell_rows(plan->mode, plan->volume));
  plan->tiles[1] =
      up_to(depthwise_cells(s, 2).cells, plan->groups * depthwise_cell_columns(plan->mode, plan->kernel, plan->volume));
  plan->segments = up_to(depthwise_cells(s, 0).cells, plan->segment);
  plan->blocks = s.n * plan->channel_blocks * plan->tiles[0] * plan->tiles[1] * plan->segments;
}
inline void cover(DepthwiseWgradPlan* plan, const DepthwisePass& s) {
  using depthwise_detail::up_to;
  const int columns = depthwise_wgrad_columns(plan->kernel, plan->stride, plan->taps);
  plan->tiles[0] = up_to(s.out[1], plan->rows);
  plan->tiles[1] = up_to(s.out[2], plan->groups * columns);
  plan->segments = up_to(s.out[0], plan->segment);
  plan->items = s.n * plan->segments * plan->tiles[0] * plan->tiles[1];
}

inline DepthwisePlan plan_depthwise_pass(const DepthwisePass& s, const DeviceLimits& limits) {
  using namespace depthwise_detail;
  int phases[3];
  if (!set_phases(s, phases)) return refused<DepthwisePlan>(kDepthwiseDilation);
  if (const int count = depthwise_phase_count(phases); count > 1) {
    DepthwisePlan plan = plan_depthwise_pass(depthwise_phase(s, phases, 0).pass, limits);
    std::copy(phases, phases + 3, plan.phases);
    plan.microseconds *= count * unmodelled_phase(plan);
    return plan;
  }
  DepthwisePlan best;
  double best_cycles = 0;
  best.lanes = s.planar ? 1 : kDepthwiseLanes;
  const int size = dtype_size(s.dtype), lanes = best.lanes;
  double outputs = double(s.n) * s.channels, inputs = outputs;
  for (int i = 0; i < 3; ++i) {
    outputs *= double(s.out[i]);
    inputs *= double(s.in[i]);
  }
  const double memory = (outputs + inputs) * size * spread_of(s) / kBytesPerMicrosecond;
  if (!is_fast_kernel(s)) {
    best.refusal = kDepthwiseKernels;
    return best;
  }
  DepthwisePlan plan = best;
  plan.kernel = static_cast<int>(s.kernel[2]);
  plan.volume = s.kernel[0] > 1;
  plan.mode = s.scatter          ? DepthwiseMode::kScatter2
              : s.stride[2] == 2 ? DepthwiseMode::kGather2
                                 : DepthwiseMode::kGather1;
  plan.direct = lanes == 1 && plan.mode == DepthwiseMode::kGather1 && s.out[2] % (16 / size) == 0 && s.apart[2] == 1;
  const int up = depthwise_up(plan.mode), step = depthwise_stride(plan.mode);
  const int at = depthwise_taps(plan.mode, plan.kernel);
  const int cell_rows = depthwise_cell_rows(plan.mode, plan.volume);
  const int cell_columns = depthwise_cell_columns(plan.mode, plan.kernel, plan.volume);
  const int open = plan.volume ? depthwise_open_cells(plan.mode, plan.kernel) : 1;
  const int depth_planes = plan.volume ? step : 1, depth_outputs = plan.volume ? up : 1;
  const int64_t cells_d = depthwise_cells(s, 0).cells, cells_h = depthwise_cells(s, 1).cells;
  const int64_t cells_w = depthwise_cells(s, 2).cells;
  const int k = plan.kernel, weights = k * k * (plan.volume ? k : 1);
  const int window = (cell_columns - 1) * step + at;

  // Instructions of a thread for its cells of one depth.
  const int fma = weights * cell_rows * cell_columns;
  const int window_loads = depth_planes * ((cell_rows - 1) * step + at) * window;
  const int weight_loads = lanes == 1 ? weights / k * (k > 4 ? 2 : 1) : weights;
  const int moves = plan.volume ? open * cell_columns * up * up * up : 0;
  const bool kept = weights <= 27 || !plan.volume;  // weights stay in registers
  const double of_thread = fma + window_loads + (kept ? 0 : weight_loads) + moves + 30;
  const double shared = window_loads + (kept ? 0 : lanes == 1 ? weight_loads : weights);

  const bool whole_rows = lanes > 1 || s.apart[2] == 1;
  const int piece_in = whole_rows ? piece_of(lanes > 1 ? s.channels : s.in[2], size) : 1;
  const int piece_out = whole_rows ? piece_of(lanes > 1 ? s.channels : s.out[2], size) : 1;
  const int most_groups = static_cast<int>(std::min<int64_t>((cells_w + cell_columns - 1) / cell_columns, 32));
  const int64_t row_threads = (cells_h + cell_rows - 1) / cell_rows;
  for (int rows = 1; rows <= 32 && rows < row_threads * 2; rows += rows < 8 ? 1 : rows < 16 ? 2 : 4) {
    if (rows > row_threads) rows = static_cast<int>(row_threads);
    for (int groups = 1; groups <= most_groups && rows * groups * lanes <= kDepthwiseThreads; ++groups) {
      plan.rows = rows;
      plan.groups = groups;
      plan.tiles[0] = up_to(cells_h, rows * cell_rows);
      plan.tiles[1] = up_to(cells_w, groups * cell_columns);
      const bool whole = plan.tiles[0] == 1 && plan.tiles[1] == 1 && lanes == 1;
      int planes = whole ? static_cast<int>(std::min<int64_t>(kDepthwiseThreads / (rows * groups), s.channels)) : 1;
      for (; planes >= 1; planes = planes > 8 ? planes * 3 / 4 : planes - 1) {
        plan.in = make_tile((rows * cell_rows - 1) * step + at, (groups * cell_columns - 1) * step + at,
                            cell_rows * step, rows, planes, depth_planes, lanes, slack_of(s.in[2], lanes, size));
        plan.out = make_tile(rows * cell_rows * up, groups * cell_columns * up, cell_rows * up, rows, planes,
                             depth_outputs, lanes);
        const int in_floats = tile_floats(plan.in, depth_planes) * (plan.volume ? 2 : 1);
        const int out_floats =
            lanes > 1 || plan.direct ? 0 : tile_floats(plan.out, depth_outputs) * (plan.volume ? 2 : 1);
        plan.weight_plane = lanes > 1 ? 0 : weights / k * (k > 4 ? 8 : 4);
        if (plan.weight_plane % 8 == 0) plan.weight_plane += 4;  // neighbours' meet other banks
        const int weight_floats = lanes > 1 ? weights * lanes : plan.weight_plane * planes;
        // Of planes the outputs take the place of the inputs.
        plan.smem_out = plan.volume ? in_floats : 0;
        plan.smem_weights = plan.volume ? in_floats + out_floats : std::max(in_floats, out_floats);
        plan.smem_bytes = 4 * (plan.smem_weights + weight_floats);
        if (plan.smem_bytes <= std::min(kSmemOfBlock, limits.smem_per_block) &&
            int64_t(plan.in.all_rows) * plan.in.span * lanes < kMostItems &&
            int64_t(plan.out.all_rows) * plan.out.span < kMostItems) {
          break;
        }
      }
      if (planes < 1) continue;
      plan.threads = up_to(rows * groups * planes * lanes, 32) * 32;
      plan.channel_blocks = up_to(s.channels, lanes > 1 ? lanes : planes);
      const double warps = plan.threads / 32.0;
      const double copies = copy_instructions(plan.in.all_rows, plan.in.span, lanes, piece_in) +
                            (lanes > 1     ? plan.out.all_rows * plan.out.span / 2.0 * 2
                             : plan.direct ? plan.out.all_rows * plan.out.span / 256.0 * 24
                                           : copy_instructions(plan.out.all_rows, plan.out.span, 1, piece_out) +
                                                 plan.out.all_rows * plan.out.span / 32.0);
      const double of_step = std::max((warps * of_thread + copies) / 4, warps * shared + copies / 3) + 40;
      const int resident = resident_blocks(plan.threads, plan.smem_bytes, limits);
      const double tiles = double(s.n) * plan.channel_blocks * plan.tiles[0] * plan.tiles[1];
      for (int segments = 1; segments <= (plan.volume ? std::min<int64_t>(cells_d, 64) : 1); segments *= 2) {
        plan.segment = plan.volume ? up_to(cells_d, segments) : 1;
        plan.segments = up_to(cells_d, plan.segment);
        const double steps = plan.segment + open - 1;
        const double blocks = tiles * plan.segments;
        if (blocks > double(kMostBlocks)) continue;
        plan.blocks = static_cast<int64_t>(blocks);
        // Of one block alone on a multiprocessor, whose loads nothing hides but its own work, and of all of them.
        const double alone = 1500 + steps * (std::max(of_step, 900.0) + 200);
        const double rounds = std::max(1.0, blocks / limits.sm_count);
        const double busy = rounds * (steps * of_step + 600) + 1200;
        const double cycles = std::max(busy, std::ceil(rounds / resident) * alone);
        const double us = 3 + std::max(memory, cycles / kClock);
        if (best.blocks == 0 || us + 1e-5 * cycles < best.microseconds + 1e-9) {
          best = plan;
          best.microseconds = us + 1e-5 * cycles;
          best_cycles = cycles;
        }
      }
    }
    if (rows == row_threads) break;
  }
  if (best.blocks == 0) best.refusal = "no tile fits, or it has too many";
  best.microseconds = 3 + std::max(memory, unmodelled(best) * best_cycles / kClock);
  return best;
}

// Why no pass over this problem runs here, whatever its kernel; null: it may.
inline const char* depthwise_refusal(const ConvProblem& q) {
  if (q.is_empty()) return kEmptyProblem;
  if (!is_depthwise(q)) return "it is not depthwise";
  if (q.dtype == Dtype::kFloat64) return "float64 is summed in float64";
  for (int i = 0; i < 3; ++i) {
    // Positions of taps, beyond the borders too, are int.
    const int64_t reach = 2 * q.kernel[i] * q.dilation[i] + std::abs(q.padding[i]);
    if ((std::max(q.in[i], q.out[i]) + 1) * q.stride[i] + reach >= int64_t(1) << 30) return "a size of 2^30";
  }
  // Bytes from one row of a phase to the next, too.
  const int64_t width = std::max(q.in[2], q.out[2]) * q.dilation[1];
  if (q.c_out >= int64_t(1) << 30 || (q.planar ? 1 : q.c_out) * width >= int64_t(1) << 28) {
    return "rows of 2^28 elements";
  }
  return nullptr;
}

inline DepthwisePlan plan_depthwise(const ConvProblem& q, const DeviceLimits& limits, bool of_dx = false) {
  if (const char* refusal = depthwise_refusal(q)) return refused<DepthwisePlan>(refusal);
  return plan_depthwise_pass(depthwise_pass(q, of_dx), limits);
}

// The positions that meet each other in the gradient of the weight: those of `still` as outputs, of `moved` as inputs,
// as in the pass that gathers.
inline DepthwisePass depthwise_wgrad_pass(const ConvProblem& q) { return depthwise_pass(q, /*of_dx=*/q.transposed); }

inline DepthwiseWgradPlan plan_depthwise_wgrad_pass(const DepthwisePass& s, const DeviceLimits& limits) {
  using namespace depthwise_detail;
  int phases[3];
  if (!set_phases(s, phases)) return refused<DepthwiseWgradPlan>(kDepthwiseDilation);
  if (const int count = depthwise_phase_count(phases); count > 1) {
    DepthwiseWgradPlan plan = plan_depthwise_wgrad_pass(depthwise_phase(s, phases, 0).pass, limits);
    std::copy(phases, phases + 3, plan.phases);
    plan.partial_floats *= count;
    plan.microseconds *= count * unmodelled_phase(plan, s.kernel[0] > 1);
    return plan;
  }
  const auto& still = s.out;
  const auto& moved = s.in;
  const int size = dtype_size(s.dtype), lanes = s.planar ? 1 : kDepthwiseLanes;
  DepthwiseWgradPlan best;
  double best_cycles = 0;
  best.lanes = lanes;
  best.weights = s.channels * s.kernel[0] * s.kernel[1] * s.kernel[2];
  best.depth = static_cast<int>(s.kernel[0]);
  double of_still = double(s.n) * s.channels, of_moved = of_still;
  for (int i = 0; i < 3; ++i) {
    of_still *= double(still[i]);
    of_moved *= double(moved[i]);
  }
  const double memory = (of_still + of_moved) * size * spread_of(s) / kBytesPerMicrosecond;
  const int k = static_cast<int>(s.kernel[2]), stride = static_cast<int>(s.stride[2]);
  const bool fast =
      (k == 3 || k == 5 || k == 7) && s.kernel[1] == k && stride <= 2 && s.stride[1] == stride && s.kernel[0] <= 64;
  if (!fast) return refused<DepthwiseWgradPlan>(kDepthwiseKernels);
  DepthwiseWgradPlan plan = best;
  plan.kernel = k;
  plan.stride = stride;
  const bool march = s.kernel[0] == k && s.stride[0] == stride;
  plan.taps = march ? depthwise_wgrad_taps(k, stride) : 1;
  if (plan.taps > 1) plan.depth = depthwise_wgrad_blocks(k, stride, plan.taps);
  const int columns = depthwise_wgrad_columns(k, stride, plan.taps), window = (columns - 1) * stride + k;
  const double of_thread = (plan.taps * (k * k + 1) + 1) * columns + k * window + 30, shared = k * window + columns;
  const bool whole_rows = lanes > 1 || s.apart[2] == 1;
  const int piece_moved = whole_rows ? piece_of(lanes > 1 ? s.channels : moved[2], size) : 1;
  const int piece_still = whole_rows ? piece_of(lanes > 1 ? s.channels : still[2], size) : 1;
  const int most_groups = static_cast<int>(std::min<int64_t>((still[2] + columns - 1) / columns, 32));
  for (int rows = 1; rows <= 32 && rows < still[1] * 2; rows += rows < 8 ? 1 : rows < 16 ? 2 : 4) {
    if (rows > still[1]) rows = static_cast<int>(still[1]);
    for (int groups = 1; groups <= most_groups && rows * groups * lanes <= kDepthwiseThreads; ++groups) {
      plan.rows = rows;
      plan.groups = groups;
      plan.tiles[0] = up_to(still[1], rows);
      plan.tiles[1] = up_to(still[2], groups * columns);
      const bool whole = plan.tiles[0] == 1 && plan.tiles[1] == 1 && lanes == 1;
      int planes = whole ? static_cast<int>(std::min<int64_t>(kDepthwiseThreads / (rows * groups), s.channels)) : 1;
      for (; planes >= 1; planes = planes > 8 ? planes * 3 / 4 : planes - 1) {
        plan.threads = up_to(rows * groups * planes * lanes, 32) * 32;
        plan.moved = make_tile((rows - 1) * stride + k, (groups * columns - 1) * stride + k, stride, rows, planes, 1,
                               lanes, slack_of(moved[2], lanes, size));
        plan.still = make_tile(rows, groups * columns, 1, rows, planes, 1, lanes, slack_of(still[2], lanes, size));
        plan.smem_still = tile_floats(plan.moved, 1);
        // At the end the sums of every thread lie there.
        plan.smem_bytes = 4 * std::max(plan.smem_still + tile_floats(plan.still, 1), plan.threads * plan.taps * k * k);
        if (plan.smem_bytes <= std::min(kSmemOfBlock, limits.smem_per_block) &&
            int64_t(plan.moved.all_rows) * plan.moved.span * lanes < kMostItems) {
          break;
        }
      }
      if (planes < 1) continue;
      plan.channel_blocks = up_to(s.channels, lanes > 1 ? lanes : planes);
      // Long enough that planes at the ends, which are read twice, are few; short enough for many blocks.
      plan.segment = plan.taps > 1 ? static_cast<int>(std::min<int64_t>(still[0], 16)) : 1;
      plan.segments = up_to(still[0], plan.segment);
      const double items = double(s.n) * plan.segments * plan.tiles[0] * plan.tiles[1];
      if (items >= double(kMostBlocks)) continue;
      plan.items = static_cast<int64_t>(items);
      const double warps = plan.threads / 32.0;
      const double copies = copy_instructions(plan.moved.all_rows, plan.moved.span, lanes, piece_moved) +
                            copy_instructions(plan.still.all_rows, plan.still.span, lanes, piece_still);
      const double of_item = (plan.segment + plan.taps - 1) *
                             (std::max((warps * of_thread + copies) / 4, warps * shared + copies / 3) + 80);
      const int resident = resident_blocks(plan.threads, plan.smem_bytes, limits);
      const double kinds = double(plan.channel_blocks) * plan.depth;
      if (kinds > double(kMostBlocks)) continue;
      // Beyond what keeps sums short, enough blocks for the device and no more.
      const int64_t least = up_to(plan.items, std::max(1, kWgradChain / columns / plan.segment));
      const int64_t wanted = static_cast<int64_t>(std::ceil(2.0 * resident * limits.sm_count / kinds));
      plan.splits = static_cast<int>(std::min<int64_t>({std::max(least, wanted), plan.items, 60000}));
      plan.partial_floats = plan.splits * plan.weights;
      const double of_split = double(up_to(plan.items, plan.splits));
      const double alone = 3000 + of_split * (of_item + 1100.0 * (plan.segment + plan.taps - 1));
      const double rounds = std::max(1.0, kinds * plan.splits / limits.sm_count);
      const double busy = rounds * (of_split * of_item + 100.0 * k * k) + 1500;
      const double cycles = std::max(busy, std::ceil(rounds / resident) * alone);
      const double us = 6 + std::max(memory, cycles / kClock);
      if (best.items == 0 || us + 1e-5 * cycles < best.microseconds) {
        best = plan;
        best.microseconds = us + 1e-5 * cycles;
        best_cycles = cycles;
      }
    }
    if (rows == still[1]) break;
  }
  if (best.items == 0) best.refusal = "no tile fits, or it has too many";
  best.microseconds = 6 + std::max(memory, unmodelled(best, s.kernel[0] > 1) * best_cycles / kClock);
  return best;
}

inline DepthwiseWgradPlan plan_depthwise_wgrad(const ConvProblem& q, const DeviceLimits& limits) {
  if (const char* refusal = depthwise_refusal(q)) return refused<DepthwiseWgradPlan>(refusal);
  return plan_depthwise_wgrad_pass(depthwise_wgrad_pass(q), limits);
}

}  // namespace kgopt
