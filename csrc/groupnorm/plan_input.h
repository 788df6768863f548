// What a family's plan must know of a GroupNorm, and what it answers beside its shares. Host code, free of CUDA.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "groupnorm/params.h"

namespace kgopt {

// Elements up to which a single launch makes up for chains that few warps walk (H200, bf16 and fp32).
inline constexpr int64_t kMostWalked = 9 << 20;

// What may stand between a norm and the activation behind it.
enum class NormExtras { kNone, kPRelu, kResidual };  // kResidual: and perhaps a PReLU

// Elements, of so many bytes, from which on a sum behind the norm is faster by passes over memory (H200).
constexpr int64_t most_summed(int size) { return size == 2 ? 22 << 20 : 96 << 20; }

struct NormPlanInput {
  GroupNormDims dims;
  int tensors = 1;  // that are read: x, or in a backward x and dy

  // Where the tensors of x's sizes start.
  bool aligned = true;        // all at a multiple of 16 bytes
  bool aligned_alike = true;  // all at the same distance from a multiple of 16 bytes
  uint32_t x_offset = 0;      // bytes from a 128-byte line to x

  // The activations around the norm.
  bool long_chain = false;  // they are walked at run time
  bool extended = false;    // a residual or a PReLU stands in front of the one behind the norm
  bool sums = false;        // a residual
  bool plain = true;        // none in front of the norm, and behind it none, ReLU or SiLU
  bool holds = true;        // they leave registers for chunks

  // The device, and what this binary has for it.
  int max_blocks = 16;        // of a cluster; 0 without clusters
  bool has_bulk_copy = true;  // compute capability 9.0 or later, and code built for it
  int sm_count = 132;
  int64_t smem_bytes = 227 << 10;   // of a block
  int64_t smem_per_sm = 228 << 10;  // of a multiprocessor

  bool backward() const { return tensors == 2; }
  // Whether they take so long that they want all the warps that a multiprocessor has, beside which x does not fit.
  bool crowds_out() const { return long_chain && dims.numel() > kMostWalked; }
  void set_activations(const ActChain& pre, const ActChain& act, NormExtras extras = NormExtras::kNone) {
    extended = extras != NormExtras::kNone;
    sums = extras == NormExtras::kResidual;
    const Chain pre_kind = chain_kind(pre), kind = norm_chain_kind(act);
    long_chain = extended ? !(pre.empty() && (act.empty() || is_two_lines(act))) : !is_compiled_in(pre, act);
    plain = pre_kind == Chain::kNone && chain_kind(act) != Chain::kAny && !extended;
    holds = !long_chain && (!backward() || kind != Chain::kSilu) && !extended;
  }
};

// The bytes of a group's channels at a position that fill a sector.
inline constexpr int64_t kSectorBytes = 32;

inline bool has_narrow_groups(const GroupNormDims& d) {
  return d.channels_last && d.channels_per_group() * dtype_size(d.dtype) < kSectorBytes;
}

// What a launch needs beside its tensors.
struct NormScratch {
  int64_t words = 0;  // of 64 bits, through which blocks exchange moments or sums (groupnorm/shared/words.cuh)
  // Backward: fp32 values that a second launch adds up to dweight and dbias. Where they are `sum_rows` times [C][2],
  // run_affine_gradient adds them up. None: the first launch writes dweight and dbias.
  int64_t sums = 0, sum_rows = 0;
};

// Scratch of channel sums alone.
inline NormScratch sums_of_rows(int64_t rows, const GroupNormDims& d) { return {0, rows * d.c * 2, rows}; }

}  // namespace kgopt
