// Host-side planning of the implicit GEMM: classes of a transposed convolution, channel chunks, tile shape, shared
// memory layout, grid. Plain arithmetic without CUDA or torch, so that tests can look at every decision.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/refusal.h"
#include "conv3d/implicit_gemm/params.h"

namespace kgopt {

// Shared memory, in 32-bit words, in the order in which the kernel lays it out.
struct ImplicitGemmSmemLayout {
  int offsets;   // K offset table, an int2 per (k step, lane % 4)
  int halo_map;  // coordinates and offset of each halo position, an int2
  int weights;   // two stages when they change from step to step
  int epilogue;
  int halo;  // two stages
  int total;
};

KGOPT_HD ImplicitGemmSmemLayout implicit_gemm_smem_layout(const ImplicitGemmPlan& p) {
  const int split = p.math == ConvMath::kTf32x3 ? 2 : 1;
  auto align = [](int words) { return (words + 31) / 32 * 32; };
  ImplicitGemmSmemLayout s{};
  s.offsets = 0;
  s.halo_map = s.offsets + align(p.k_steps_max * 8);
  s.weights = s.halo_map + align(p.halo[0] * p.halo[1] * p.pitch * 2);
  s.epilogue = s.weights + align(p.k_steps_max * p.nb * 64 * split * (p.chunks > 1 ? 2 : 1));
  s.halo = s.epilogue + align(p.nb * 8 * (3 * kConvWarps));
  s.total = s.halo + align((p.words + p.zero_plane) * p.plane * 2 * split);
  return s;
}

// Thread blocks per multiprocessor that the kernels' launch bounds leave registers for.
KGOPT_HD constexpr int conv_blocks_per_sm(ConvMath math, int nb) {
  return math == ConvMath::kTf32x3 ? (nb >= 8 ? 2 : 3) : (nb >= 16 ? 2 : nb >= 8 ? 3 : 4);
}

namespace plan_detail {

// Taps k of residue r satisfy k * dilation = r + padding (mod stride): an arithmetic progression.
inline ConvDimClass transposed_dim_class(int r, int kernel, int stride, int padding, int dilation, int64_t out) {
  ConvDimClass c{};
  c.k_step = stride / std::gcd(stride, dilation);
  c.k0 = -1;
  for (int k = 0; k < std::min(kernel, c.k_step); ++k) {
    if ((r + padding - k * dilation) % stride == 0) {
      c.k0 = k;
      break;
    }
  }
  c.q_count = out > r ? static_cast<int>((out - r + stride - 1) / stride) : 0;
  if (c.k0 < 0) {
    c.k0 = 0;
    return c;
  }
  c.taps = (kernel - 1 - c.k0) / c.k_step + 1;
  c.off0 = (r + padding - c.k0 * dilation) / stride;
  c.off_step = -(c.k_step * dilation / stride);
  c.tile_lo = std::min(c.off0, c.off0 + (c.taps - 1) * c.off_step);
  return c;
}

inline ConvDimClass regular_dim_class(int kernel, int padding, int dilation, int64_t out) {
  return ConvDimClass{kernel, 0, 1, -padding, dilation, static_cast<int>(out), -padding};
}

}  // namespace plan_detail

inline int conv_class_taps(const ImplicitGemmPlan& p, int cd, int ch, int cw) {
  return p.dim[0][cd].taps * p.dim[1][ch].taps * p.dim[2][cw].taps;
}

// Fills everything that depends on the tile shape. False when it does not fit in shared memory.
inline bool plan_tile(ImplicitGemmPlan* p, const DeviceLimits& limits, int log_d, int log_h, int log_w) {
  p->tile_log2[0] = log_d;
  p->tile_log2[1] = log_h;
  p->tile_log2[2] = log_w;
  for (int i = 0; i < 3; ++i) {
    int span = 0, q_max = 0;
    for (int r = 0; r < p->classes[i]; ++r) {
      const ConvDimClass& c = p->dim[i][r];
      span = std::max(span, c.taps > 0 ? (c.taps - 1) * std::abs(c.off_step) : 0);
      q_max = std::max(q_max, c.q_count);
    }
    p->halo[i] = ((1 << p->tile_log2[i]) - 1) * p->in_step[i] + span + 1;
    p->tiles[i] = (q_max + (1 << p->tile_log2[i]) - 1) >> p->tile_log2[i];
    if (p->halo[i] > 1023) return false;  // the halo map packs coordinates in ten bits each
  }
  p->pitch = p->halo[2];
  // Fragment loads read 8 neighbouring words for each of 4 K entries. With taps innermost those four may sit in
  // two rows: keep neighbouring rows out of each other's banks. With channels innermost they sit in four planes,
  // which must start 8 banks apart.
  if (p->taps_fast) {
    while (p->pitch % 32 < 10 || p->pitch % 32 > 22) ++p->pitch;
  }
  p->plane = p->halo[0] * p->halo[1] * p->pitch;
  while (p->plane % 32 != 8) ++p->plane;
  p->tiles_per_sample = p->tiles[0] * p->tiles[1] * p->tiles[2];
  p->smem_bytes = implicit_gemm_smem_layout(*p).total * 4;
  return p->smem_bytes <= limits.smem_per_block;
}

// Estimated cycles of one quarter of a multiprocessor for all tiles: the slowest of tensor cores, shared memory and
// instruction issue, and the halo. An m16n8k8 issues about every 6 cycles; a halo position costs about 25 instructions
// and each of its words 12 (load, round, store); counts read off the machine code.
inline double plan_cost(const ImplicitGemmPlan& p) {
  const double split = p.math == ConvMath::kTf32x3 ? 3.0 : 1.0;
  const double mma = p.mb * p.nb * 6.0 * split;
  const double a_loads = 4.0 * p.mb * (split > 1 ? 2 : 1), b_loads = p.nb * (split > 1 ? 2 : 1);
  const double lds = kConvWarps * (a_loads + 2 + 2 * b_loads);
  const double issue = a_loads * 2 + b_loads + p.mb * p.nb * split * (split > 1 ? 2.5 : 1) + 6;
  const double halo = double(p.halo[0]) * p.halo[1] * p.pitch * (25 + 12.0 * p.words) * p.chunks / kConvThreads;
  return double(p.tiles_per_sample) *
         (double(p.k_steps_max) * p.chunks * std::max(mma, std::max(lds, issue)) + halo + 300.0);
}

// Tiles per block: the number that finishes first, counting whole waves of `capacity` blocks. A block's start (tables,
// weights, first load) costs as much as `start` tiles.
inline int64_t tiles_per_block(int64_t tiles, int64_t blocks_per_slice, int64_t capacity, double start, int64_t most) {
  double best_time = -1;
  int64_t best = 1;
  for (int64_t per_slice = 1; per_slice <= std::min(most, tiles); ++per_slice) {
    const int64_t slices = (tiles + per_slice - 1) / per_slice;
    const int64_t waves = std::max<int64_t>(1, (blocks_per_slice * slices + capacity - 1) / capacity);
    const double time = double(waves) * (double(per_slice) + start);
    if (best_time < 0 || time < best_time) {
      best_time = time;
      best = per_slice;
    }
  }
  return best;
}

inline void plan_slices(ImplicitGemmPlan* p, const ConvProblem& problem, const DeviceLimits& limits) {
  const int per_sm =
      std::max(1, std::min(conv_blocks_per_sm(p->math, p->nb), limits.smem_per_sm / (p->smem_bytes + 1024)));
  const int64_t blocks_per_slice =
      problem.n * p->n_tiles * problem.groups * p->classes[0] * p->classes[1] * p->classes[2];
  p->tiles_per_slice =
      tiles_per_block(p->tiles_per_sample, blocks_per_slice, int64_t(limits.sm_count) * per_sm, 1.5, 128);
  p->slices = (p->tiles_per_sample + p->tiles_per_slice - 1) / p->tiles_per_slice;
}

inline ImplicitGemmPlan plan_implicit_gemm(const ConvProblem& problem, const DeviceLimits& limits) {
  ImplicitGemmPlan p;
  const auto refuse = refuser(p);
  if (problem.is_empty()) return refuse(kEmptyProblem);
  if (problem.dtype == Dtype::kFloat64) return refuse("float64 has no tensor-core path here");
  p.math = conv_math(problem);
  const int64_t limit = int64_t(1) << 30;
  for (int i = 0; i < 3; ++i) {
    if (problem.in[i] > limit || problem.out[i] > limit || problem.kernel[i] > 4096 || problem.padding[i] > limit ||
        problem.dilation[i] > 4096 || problem.stride[i] > 4096) {
      return refuse("a size, kernel, stride, padding or dilation is too large");
    }
  }
  const int c_in = static_cast<int>(problem.c_in / problem.groups);
  const int c_out = static_cast<int>(problem.c_out / problem.groups);

  for (int i = 0; i < 3; ++i) {
    const int stride = static_cast<int>(problem.stride[i]), kernel = static_cast<int>(problem.kernel[i]);
    const int padding = static_cast<int>(problem.padding[i]), dilation = static_cast<int>(problem.dilation[i]);
    if (problem.transposed) {
      if (stride > kMaxDimClasses) return refuse("a transposed convolution's stride is above 4");
      p.classes[i] = p.out_step[i] = stride;
      p.in_step[i] = 1;
      for (int r = 0; r < stride; ++r) {
        p.dim[i][r] = plan_detail::transposed_dim_class(r, kernel, stride, padding, dilation, problem.out[i]);
      }
    } else {
      p.in_step[i] = stride;
      p.dim[i][0] = plan_detail::regular_dim_class(kernel, padding, dilation, problem.out[i]);
    }
  }
  int max_taps = 0;
  for (int d = 0; d < p.classes[0]; ++d) {
    for (int h = 0; h < p.classes[1]; ++h) {
      for (int w = 0; w < p.classes[2]; ++w) max_taps = std::max(max_taps, conv_class_taps(p, d, h, w));
    }
  }

  // Output channels: 64 accumulator registers a thread at most, so that three blocks share a multiprocessor.
  // logsumexp needs every channel of a position in one block; above 64 channels it halves the positions instead.
  const int col_blocks = (c_out + 7) / 8;
  const bool lse = problem.epilogue == ConvEpilogue::kResidualLse;
  p.mb = 2;
  if (col_blocks <= 1) {
    p.nb = 1;
  } else if (col_blocks <= 3) {
    p.nb = 3;
  } else if (col_blocks <= 4) {
    p.nb = 4;
  } else {
    p.nb = 8;
  }
  if (lse) {
    if (problem.groups != 1) return refuse("logsumexp over channels needs groups = 1");
    if (col_blocks > 16) return refuse("logsumexp over channels needs at most 128 output channels");
    if (col_blocks > 8) {
      p.nb = 16;
      p.mb = 1;
    }
  }
  p.n_tiles = (col_blocks + p.nb - 1) / p.nb;

  // Input channels per chunk: as many words as keep a chunk's weights within 32 KB (the halo needs room too).
  const int per_word = conv_channels_per_word(p.math);
  const int split = conv_split_factor(p.math);
  const int words_total = (c_in + per_word - 1) / per_word;
  p.words = words_total >= 8 ? 8 : words_total > 4 ? 8 : words_total;
  const auto weight_bytes = [&](int words) { return ((words * max_taps + 7) / 8) * p.nb * 256 * split; };
  while (p.words > 1 && weight_bytes(p.words) > 32 * 1024) p.words = p.words > 4 ? 4 : p.words - 1;

  const int positions_log2 = p.mb == 2 ? 7 : 6;
  const bool stores = problem.epilogue == ConvEpilogue::kStore || problem.epilogue == ConvEpilogue::kStoreStats;
  for (;; p.words = p.words > 4 ? 4 : p.words - 1) {
    if (p.words < 1) return refuse("a tile with its halo and weights does not fit in shared memory");
    p.chunks = (words_total + p.words - 1) / p.words;
    p.taps_fast = p.words < 4;
    p.k_steps_max = (p.words * max_taps + 7) / 8;
    p.zero_plane = 0;
    for (int d = 0; d < p.classes[0]; ++d) {
      for (int h = 0; h < p.classes[1]; ++h) {
        for (int w = 0; w < p.classes[2]; ++w) {
          if ((p.words * conv_class_taps(p, d, h, w)) % 8 != 0) p.zero_plane = 1;
        }
      }
    }
    double best = -1;
    int best_log[3] = {0, 0, 0};
    for (int log_w = 0; log_w <= positions_log2; ++log_w) {
      for (int log_h = 0; log_h + log_w <= positions_log2; ++log_h) {
        const int log_d = positions_log2 - log_w - log_h;
        if (!plan_tile(&p, limits, log_d, log_h, log_w)) continue;
        double cost = plan_cost(p);
        // Two blocks at least should share a multiprocessor: one loads while the other computes.
        if (p.smem_bytes * 2 > limits.smem_per_sm) cost *= 1.5;
        // Fragment rows shorter than 8 positions conflict in shared memory.
        if (log_w < 3) cost *= 1.3;
        // Short rows are stored as partial cache lines: 8 to 64 output channels at 126 columns took 1250 us with rows
        // of 8, 777 with 32, 563 with 64 and 479 with 128.
        if (stores && log_w < 7) cost *= 1.0 + 0.25 * (7 - log_w);
        if (best < 0 || cost < best) {
          best = cost;
          best_log[0] = log_d;
          best_log[1] = log_h;
          best_log[2] = log_w;
        }
      }
    }
    if (best >= 0) {
      plan_tile(&p, limits, best_log[0], best_log[1], best_log[2]);
      break;
    }
  }

  const int64_t class_count = int64_t(p.classes[0]) * p.classes[1] * p.classes[2];
  p.packed_class_words = int64_t(p.k_steps_max) * p.nb * 64 * split * p.chunks * p.n_tiles * problem.groups;
  p.packed_words = p.packed_class_words * class_count;

  plan_slices(&p, problem, limits);
  if (problem.n * p.slices > (int64_t(1) << 31) - 1) return refuse("more than 2^31 tiles");
  if (p.n_tiles > 65535 || class_count * problem.groups > 65535) {
    return refuse("output channels or conv groups exceed the launch grid");
  }
  return p;
}

}  // namespace kgopt
