// GroupNorm forward of channels_last x with x on chip; see groupnorm/columns/params.h.
#pragma once

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "groupnorm/columns/params.h"
#include "groupnorm/shared/vectors.cuh"
#include "groupnorm/shared/words.cuh"

namespace kgopt {

template <typename T_, Chain kPre_, Chain kAct_, int kHeld_, bool kExtends_ = false>
struct ColumnTraits {
  using T = T_;
  static constexpr Chain kPre = kPre_, kAct = kAct_;
  static constexpr int kVec = kVecSize<T>;
  // Values of 16 bits lose nothing where the mean is part of the shift: their own rounding is coarser.
  static constexpr bool kFolds = sizeof(T) == 2 && (kPre == Chain::kNone || kPre == Chain::kRelu);
  static constexpr int kHeld = kHeld_;         // chunks in registers
  static constexpr bool kExtends = kExtends_;  // there may be a residual or a PReLU
};

// Shared memory after the slots.
struct ColumnTables {
  float2* entries;   // [walkers][runs of a row] mean, sum of squared deviations
  float2* stats;     // [2][groups] mean, rstd
  float2* affines;   // [2][channels] weight, bias
  float* counts;     // [walkers] values of a run
  float4* messages;  // [blocks][groups], of a cluster
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <typename Traits>
struct ColumnBlock {
  using T = typename Traits::T;
  static constexpr int kVec = Traits::kVec, kPasses = kColumnPasses, kSlots = kColumnSlots;
  static constexpr int kHeld = Traits::kHeld, kRing = kColumnRing;
  static constexpr bool kFolds = Traits::kFolds;
  static_assert(kHeld <= kRing && kRing <= kSlots);

  const GroupNormColumnsFwdParams& p;
  const ColumnShares& d;
  char* const slots;
  const ColumnTables tables;
  uint64_t* const exchanged;
  const uint32_t team, rank;
  const uint32_t tid, lane = threadIdx.x % 32;  // of the threads that go through x
  uint32_t walker, position, column;
  bool active;
  uint32_t own;                      // vectors of this thread's share
  int64_t offset;                    // of the first, in a slab
  int64_t step;                      // elements from one to the next
  uint32_t mine;                     // bytes from a slot to this thread's first vector
  uint32_t group_of[kVec / 4] = {};  // of each element, eight bits each

  __device__ __forceinline__ ColumnBlock(const GroupNormColumnsFwdParams& params, char* memory, const ColumnTables& t,
                                         uint64_t* barrier, uint32_t thread)
      : p(params),
        d(params.shares),
        slots(memory),
        tables(t),
        exchanged(barrier),
        team(d.by_blocks(blockIdx.x)),
        rank(blockIdx.x - team * d.blocks),
        tid(thread) {
    const uint32_t warp = tid / 32;
    walker = d.by_warps_per_row(warp);
    position = d.by_columns(lane);
    column = (warp - walker * d.warps_per_row) * d.columns + lane - position * d.columns;
    active = walker < d.walkers && position < d.positions && column < d.vectors;
    const uint32_t row = walker * d.positions + position, first = rank * d.share + row;
    const uint32_t end = min((rank + 1) * d.share, d.rows);
    own = active && first < end ? d.by_stride(end - first + d.stride - 1) : 0;
    offset = int64_t(first) * d.pitch + column * kVec;
    step = int64_t(d.stride) * d.pitch;
    mine = (row * d.vectors + column) * 16;
  }
  __device__ __forceinline__ void find_groups() {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const uint32_t group = active ? d.by_channels_per_group(channel_of(j)) : 0;
      group_of[j / 4] |= group << (j % 4 * 8);
    }
  }
  // Of the slab.
  __device__ __forceinline__ uint32_t channel_of(int j) const {
    const uint32_t element = column * kVec + j;
    return d.turns == 1 ? element : element - d.by_channels(element) * d.channels;
  }

  // The u-th slab of this team.
  __device__ __forceinline__ uint32_t slab(uint32_t u) const { return team + u * d.teams; }
  __device__ __forceinline__ uint32_t part(uint32_t u) const {
    return slab(u) - d.by_slabs_per_sample(slab(u)) * d.slabs_per_sample;
  }
  // Its first element for this thread.
  __device__ __forceinline__ int64_t base(uint32_t u) const {
    return d.by_slabs_per_sample(slab(u)) * (int64_t(d.rows) * d.pitch) + int64_t(part(u)) * d.channels + offset;
  }
  // Where chunk t lies. The last chunk leaves its slot first, so slab by slab the slots are taken the other way round.
  __device__ __forceinline__ uint32_t slot(uint32_t u, uint32_t t) const {
    return (u & 1 ? min(d.chunks, uint32_t(kSlots)) + kHeld - 1 - t : t) & (kSlots - 1);
  }
  // Without an L2 hint: nvcc 13.0 makes an illegal instruction of cp.async with one.
  static __device__ __forceinline__ void load(const T* from, uint32_t address) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  }
  static __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // Waits for all but the last `pending` groups of loads.
  static __device__ __forceinline__ void wait(uint32_t pending) {
    switch (pending) {
      case 7: asm volatile("cp.async.wait_group 7;" ::: "memory"); break;
      case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
      case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
      case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
      case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
      case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
      case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
      default: asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    __syncwarp();  // a warp that stays diverged would do everything twice
  }
  __device__ __forceinline__ uint32_t address(uint32_t slot) const {
    return shared_address(slots) + slot * d.slot_bytes + mine;
  }
  __device__ __forceinline__ const T* place(uint32_t slot) const {
    return reinterpret_cast<const T*>(slots + slot * d.slot_bytes + mine);
  }
  __device__ __forceinline__ void load_chunk(int64_t first, uint32_t slot, uint32_t t) const {
    const T* const from = static_cast<const T*>(p.x) + first + int64_t(t * kPasses) * step;
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      if (t * kPasses + k < own) load(from + k * step, address(slot) + k * d.pass_bytes);
    }
  }

  // Sums of what one thread sees of each of its channels, relative to the first value.
  struct Sums {
    float shift[kVec], sum[kVec], squares[kVec];
  };
  __device__ __forceinline__ void add(Sums& s, const Vec<T, kVec>& input) const {
    float v[kVec];
    values_of<Traits::kPre>(input, p.pre_act, v);
    add_relative(v, s.shift, s.sum, s.squares);
  }
  __device__ __forceinline__ uint32_t left_of(uint32_t t) const { return own > t * kPasses ? own - t * kPasses : 0; }
  __device__ __forceinline__ void take_chunk(uint32_t slot, uint32_t left, Vec<T, kVec> (&input)[kPasses]) const {
    const uint32_t stride = d.pass_bytes / sizeof(T);
    const T* const from = place(slot);
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      input[k] = Vec<T, kVec>{};  // or what was there before would have to be kept
      if (k < left) input[k] = load_vec<T, kVec>(from + k * stride);
    }
  }
  __device__ __forceinline__ void add_chunk(Sums& s, uint32_t left, const Vec<T, kVec> (&input)[kPasses]) const {
    if (left >= kPasses) {
#pragma unroll
      for (int k = 0; k < kPasses; ++k) add(s, input[k]);
      return;
    }
#pragma unroll
    for (int k = 0; k < kPasses - 1; ++k) {
      if (k < left) add(s, input[k]);
    }
  }

  // The warp's moments of each run of elements, to the block's table. Sums over the positions are taken relative to the
  // first position's mean. The counts of values are those of every slab: they need not be told twice.
  __device__ __forceinline__ void write_entries(const Sums& s, float2* entries, bool with_counts) const {
    float mean[kVec], m2[kVec];
    const float count = static_cast<float>(own), inverse = own == 0 ? 0.f : __fdividef(1.f, count);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float to_mean = s.sum[j] * inverse, rest = s.squares[j] - s.sum[j] * to_mean;
      mean[j] = s.shift[j] + to_mean;
      m2[j] = rest < 0.f ? 0.f : rest;
    }
#pragma unroll
    for (int width = 1; width < kVec; width *= 2) {
      if (width >> d.run_log2) break;
#pragma unroll
      for (int j = 0; j < kVec; j += 2 * width) {
        const float delta = mean[j + width] - mean[j];
        m2[j] += m2[j + width] + delta * delta * (0.5f * width * count);
        mean[j] += 0.5f * delta;
      }
    }
    __syncwarp();  // or shuffles go lane by lane
    const float run = static_cast<float>(1 << d.run_log2);
    float counts[1] = {count};
    positions_sum(counts);
    const float total = counts[0], inverse_total = total == 0.f ? 0.f : __fdividef(1.f, total);
    const bool writes = active && position == 0;
    float2* const out = entries + walker * d.runs + column * d.runs_per_vector;
    // What happens once a slab is short rather than unrolled: its instructions come from memory. So four elements at a
    // time, whose shuffles do not wait for one another, and then the values of the next four move up.
#pragma unroll 1
    for (int first = 0; first < kVec; first += 4) {
      float origin[4], sums[8];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        origin[k] = __shfl_sync(0xffffffffu, mean[k], lane - position * d.columns);
        const float distance = mean[k] - origin[k], weighted = count == 0.f ? 0.f : count * distance;
        sums[2 * k] = weighted;
        sums[2 * k + 1] = count == 0.f ? 0.f : m2[k] + run * weighted * distance;
      }
      positions_sum(sums);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = first + k;
        const float to_mean = sums[2 * k] * inverse_total, rest = sums[2 * k + 1] - run * sums[2 * k] * to_mean;
        if (writes && (j & ((1 << d.run_log2) - 1)) == 0) {
          out[j >> d.run_log2] = make_float2(origin[k] + to_mean, rest < 0.f ? 0.f : rest);
        }
      }
      if ((first + 4) >> d.run_log2 == 0) break;  // the rest is of the same run
#pragma unroll
      for (int k = 0; k + 4 < kVec; ++k) {
        mean[k] = mean[k + 4];
        m2[k] = m2[k + 4];
      }
      __syncwarp();
    }
    if (writes && column == 0 && with_counts) tables.counts[walker] = total * run;
  }
  // Over the warp's positions of this column; valid for the first.
  template <int kCount>
  __device__ __forceinline__ void positions_sum(float (&v)[kCount]) const {
#pragma unroll 1
    for (uint32_t up = d.positions_power / 2; up > 0; up /= 2) {
      const bool is_there = position + up < d.positions;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const float other = __shfl_down_sync(0xffffffffu, v[k], up * d.columns);
        v[k] += is_there ? other : 0.f;
      }
    }
  }

  // Whether moments go to the shared memory of the team's blocks, which are a cluster: all of its slab lies in slots.
  __device__ __forceinline__ bool sends() const { return kHeld == 0 && !p.words && d.blocks > 1; }
  // Values of a group that a block of the team has.
  __device__ __forceinline__ float count_of(uint32_t block) const {
    return block < d.full_blocks ? d.full_count : block == d.full_blocks ? d.rest_count : 0.f;
  }
  // Sums over the aligned `lanes` lanes around this one.
  static __device__ __forceinline__ float2 lanes_sums(float2 v, uint32_t lanes) {
#pragma unroll 1
    for (uint32_t mask = lanes / 2; mask > 0; mask /= 2) {
      const float2 other =
          make_float2(__shfl_xor_sync(0xffffffffu, v.x, mask), __shfl_xor_sync(0xffffffffu, v.y, mask));
      v.x += other.x;
      v.y += other.y;
    }
    return v;
  }

  // The block's moments of each group, from `entries`, told to the team, by `threads` threads.
  __device__ __forceinline__ void publish(uint32_t u, const float2* run_entries, uint32_t thread,
                                          uint32_t threads) const {
    const uint32_t lanes = 1u << d.block_lanes_log2, member = thread & (lanes - 1);
    const float total = count_of(rank);
    const int64_t group0 = int64_t(slab(u)) * d.groups;
    for (uint32_t first = thread / 32 * 32 >> d.block_lanes_log2; first < d.groups;
         first += threads >> d.block_lanes_log2) {
      const uint32_t g = first + (lane >> d.block_lanes_log2);
      float origin = 0.f, a = 0.f, b = 0.f;
      if (g < d.groups) {
        const float2* const entries = run_entries + g * d.group_runs;
        origin = entries[0].x;
        for (uint32_t turn = 0; turn < d.turns; ++turn) {
          uint32_t w = d.by_group_runs(member), i = member - w * d.group_runs;
          while (w < d.walkers) {
            const float2 entry = entries[w * d.runs + turn * d.turn_runs + i];
            const float n = tables.counts[w], distance = entry.x - origin, weighted = n * distance;
            if (n != 0.f) {
              a += weighted;
              b += entry.y + weighted * distance;
            }
            w += d.lanes_walkers;
            i += d.lanes_runs;
            if (i >= d.group_runs) {
              i -= d.group_runs;
              ++w;
            }
          }
        }
      }
      __syncwarp();
      const float2 sums = lanes_sums(make_float2(a, b), lanes);
      if (g >= d.groups) continue;
      const float to_mean = total == 0.f ? 0.f : __fdividef(sums.x, total), rest = sums.y - sums.x * to_mean;
      const float mean = total == 0.f ? 0.f : origin + to_mean, m2 = total == 0.f || rest < 0.f ? 0.f : rest;
      if (p.words) {
        if (member == 0) store_relaxed(p.words + (group0 + g) * d.blocks + rank, pack_word(mean, m2));
      } else if (sends()) {
        for (uint32_t to = member; to < d.blocks; to += lanes) {
          cluster_send(make_float4(mean, m2, 0.f, 0.f), tables.messages + rank * d.groups + g, exchanged, to);
        }
      } else if (member == 0) {
        tables.messages[g] = make_float4(mean, m2, 0.f, 0.f);
      }
    }
    if (p.words && thread == 0) atomicAdd(told_of(u), 1);  // one of a block: more would queue
  }

  // How many of the team's blocks have told words of a slab.
  __device__ __forceinline__ uint32_t* told_of(uint32_t u) const {
    return reinterpret_cast<uint32_t*>(p.words + int64_t(d.slabs) * d.groups * d.blocks) + slab(u);
  }
  // The slab's statistics from all blocks' moments, into the block's table, by `threads` threads.
  __device__ __forceinline__ void await(uint32_t u, uint32_t thread, uint32_t threads) const {
    const uint32_t lanes = 1u << d.team_lanes_log2, member = thread & (lanes - 1);
    const int64_t group0 = int64_t(slab(u)) * d.groups;
    if (p.words) {
      if (thread == 0) await_told(told_of(u), d.blocks);
      __syncthreads();
    } else if (sends()) {
      cluster_barrier_wait(exchanged, 0);
      __syncwarp();
    } else {
      __syncthreads();
    }
    const uint32_t words = d.full_blocks > member ? ((d.full_blocks - member - 1) >> d.team_lanes_log2) + 1 : 0;
    const bool has_rest = d.rest_count > 0 && member == 0;
    for (uint32_t first = thread / 32 * 32 >> d.team_lanes_log2; first < d.groups;
         first += threads >> d.team_lanes_log2) {
      const uint32_t g = first + (lane >> d.team_lanes_log2), count = g < d.groups ? words : 0;
      float origin = 0.f;
      float2 sums = make_float2(0.f, 0.f);
      if (p.words) {
        const uint64_t* const from = p.words + (group0 + g) * d.blocks;
        uint64_t word[kTeamWords + 1];
        load_words<kTeamWords>(from + member, lanes, count, has_rest && g < d.groups ? from + d.full_blocks : nullptr,
                               pack_word(0.f, 0.f), word);
        sums = sum_moments<kTeamWords>(word, count, has_rest, lanes, d.full_count, d.rest_count, &origin);
      } else if (g < d.groups) {
        origin = tables.messages[g].x;
        for (uint32_t block = member; block < d.blocks; block += lanes) {
          const float4 message = tables.messages[block * d.groups + g];
          const float n = count_of(block), distance = message.x - origin;
          if (n == 0.f) continue;
          sums.x += n * distance;
          sums.y += message.y + n * distance * distance;
        }
      }
      __syncwarp();
      sums = lanes_sums(sums, lanes);
      if (g >= d.groups || member != 0) continue;
      const float total = d.total_count, to_mean = quotient(sums.x, total), rest = sums.y - sums.x * to_mean,
                  m2 = rest < 0.f ? 0.f : rest;
      const float mean = origin + to_mean, rstd = reciprocal_root(quotient(m2, total) + p.eps);
      stats(u)[g] = make_float2(mean, rstd);
      if (rank == 0) {
        p.mean[group0 + g] = mean;
        p.rstd[group0 + g] = rstd;
      }
    }
  }

  // Two tables take turns: a warp may be a slab ahead.
  __device__ __forceinline__ float2* stats(uint32_t u) const { return tables.stats + (u & 1) * d.groups; }
  __device__ __forceinline__ float2* affines(uint32_t u) const { return tables.affines + (u & 1) * d.affines; }
  // Neighbouring lanes ask for channels that are a vector apart: with eight in one, these would lie in an eighth of the
  // banks.
  __device__ __forceinline__ uint32_t affine_place(uint32_t channel) const {
    return kVec == 4 ? channel : channel % kVec * (d.affines / kVec) + channel / kVec;
  }

  // A PReLU's slopes are as LeakyReLU's, of each channel.
  static constexpr bool kHasSlopes = Traits::kExtends && Traits::kAct == Chain::kLeakyRelu;
  struct Coefficients {
    float mean[kFolds ? 1 : kVec], scale[kVec], shift[kVec], slope[kHasSlopes ? kVec : 1];
  };
  __device__ __forceinline__ Coefficients coefficients(uint32_t u) const {
    constexpr float kScale = kFinishScale<Traits::kAct, T>;
    Coefficients c;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const uint32_t channel = active ? channel_of(j) : 0;
      const float2 s = stats(u)[group_of[j / 4] >> (j % 4 * 8) & 255], affine = affines(u)[affine_place(channel)];
      const float bias = affine.y * kScale;
      c.scale[j] = affine.x * s.y * kScale;
      c.shift[j] = kFolds ? bias - s.x * c.scale[j] : bias;
      if constexpr (!kFolds) c.mean[j] = s.x;
      if constexpr (kHasSlopes) {
        c.slope[j] = floored(p.act).slope;
        if (p.slopes.data) {
          const int64_t slope = p.slopes.by_channel() ? int64_t(part(u)) * d.channels + channel : 0;
          c.slope[j] = slope_at<T>(p.slopes, slope);
        }
      }
    }
    return c;
  }
  __device__ __forceinline__ void normalize(const Coefficients& c, T* to, const Vec<T, kVec>& input,
                                            const Vec<T, kVec>& residual) const {
    float v[kVec];
    values_of<Traits::kPre>(input, p.pre_act, v);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if constexpr (!kFolds) v[j] -= c.mean[j];
      v[j] = v[j] * c.scale[j] + c.shift[j];
    }
    if constexpr (kHasSlopes) {
      const float floor = floored(p.act).floor;
      add_residual<Traits::kAct>(p, residual, v);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        v[j] = fast_max(v[j], floor);
        v[j] = v[j] > 0.f ? v[j] : v[j] * c.slope[j];
      }
      finish_values<Chain::kNone>(p, to, input, p.streaming_stores, v);
    } else {
      if constexpr (Traits::kExtends) extend<Traits::kAct>(p, to, residual, v);
      finish_values<Traits::kAct, true, false>(p, to, input, p.streaming_stores, v);
    }
  }
  // What the residual has for a chunk of which `left` vectors are there, of y from `to` on.
  __device__ __forceinline__ void load_residual(const T* to, uint32_t left, Vec<T, kVec> (&residual)[kPasses]) const {
    if constexpr (Traits::kExtends) {
#pragma unroll
      for (int k = 0; k < kPasses; ++k) {
        if (k < left) residual[k] = residual_of<Traits::kAct>(p, to + k * step);
      }
    }
  }
  // Chunk t, in `slot`; then that slot's next load, chunk next_t from `next` on, if there is one.
  __device__ __forceinline__ void normalize_chunk(const Coefficients& c, int64_t first, uint32_t slot, uint32_t t,
                                                  bool loads, int64_t next, uint32_t next_t) const {
    const uint32_t to = address(slot), left = left_of(t), next_left = loads ? left_of(next_t) : 0;
    T* const y = static_cast<T*>(p.y) + first + int64_t(t * kPasses) * step;
    const T* const x = static_cast<const T*>(p.x) + next + int64_t(next_t * kPasses) * step;
    Vec<T, kVec> input[kPasses], residual[kPasses];
    load_residual(y, left, residual);
    take_chunk(slot, left, input);
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      if (k < left) normalize(c, y + k * step, input[k], residual[k]);
      if (k < next_left) load(x + k * step, to + k * d.pass_bytes);
    }
  }

  // The first slab's loads.
  __device__ __forceinline__ void start() const {
    for (uint32_t t = 0; t < min(d.chunks, uint32_t(kSlots)); ++t) {
      load_chunk(base(0), t, t);
      commit();
    }
  }
  __device__ __forceinline__ void start_sums(Sums& s, uint32_t slot) const {
    s = Sums{};
    if (own > 0) values_of<Traits::kPre>(load_vec<T, kVec>(place(slot)), p.pre_act, s.shift);
  }
  // What a warp needs to normalize slab u. All threads.
  __device__ __forceinline__ Coefficients coefficients_of(uint32_t u) const {
    // The parameters are asked for now and stored after the wait for the other blocks.
    const uint32_t channel0 = part(u) * d.channels + d.by_slabs_per_sample(slab(u)) * p.affine_stride;
    float2 affine = affine_of(p.weight, p.bias, channel0 + min(tid, d.channels - 1), p.affine_dtype);
    await(u, tid, blockDim.x);
    for (uint32_t c = tid; c < d.channels;) {
      affines(u)[affine_place(c)] = affine;
      c += blockDim.x;
      if (c < d.channels) affine = affine_of(p.weight, p.bias, channel0 + c, p.affine_dtype);
    }
    __syncthreads();
    __syncwarp();
    return coefficients(u);
  }
  __device__ __forceinline__ void finish_sums(const Sums& s, uint32_t u) const {
    write_entries(s, tables.entries, true);
    __syncthreads();
    if (sends()) cluster_wait();  // the others' barriers are ready; a cluster has one slab
    publish(u, tables.entries, tid, blockDim.x);
    __syncwarp();
  }

  // The next slab's first loads, into L2: memory would idle until the statistics are there.
  __device__ __forceinline__ void prefetch(uint32_t u) const {
    const T* const x = static_cast<const T*>(p.x) + base(u);
    const uint32_t vectors = min(own, uint32_t(kSlots * kPasses));
    for (uint32_t i = 0; i < vectors; ++i) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(x + i * step));
    }
    __syncwarp();
  }

  // With chunks in registers, the next chunks stay in their slots and the rest go through a ring of the first slots, so
  // that what is read again is what was read last: it is in L2. The i-th of these chunks:
  __device__ __forceinline__ uint32_t chunk_again(uint32_t i) const {
    const uint32_t late = d.chunks - min(d.chunks, uint32_t(kSlots + kRing));
    return i < late ? d.chunks - kRing - 1 - i : kHeld + i - late;
  }
  // The k-th chunk to be normalized, and where it lies: those of the ring, those that stayed, and those that come again
  // in the same places. `places` has those of a slab's first chunks, four bits each.
  __device__ __forceinline__ uint32_t chunk_at(uint32_t k) const {
    if (k >= kSlots) return chunk_again(k - kSlots);
    if (k >= kRing) return k;
    return d.chunks - 1 - k >= kSlots ? d.chunks - 1 - k : kRing - 1;
  }
  static __device__ __forceinline__ uint32_t place_of(uint32_t places, uint32_t t) { return places >> 4 * t & 15; }
  __device__ __forceinline__ uint32_t place_at(uint32_t places, uint32_t k) const {
    k %= kSlots;
    return place_of(places, k < kRing ? (d.chunks - 1 - kSlots - k) % kRing : k);
  }

  // Slab after slab: its statistics, then its normalization from the last chunk to the first, while the slots that
  // become free take what did not fit, or the next slab. What the registers hold since the first chunks comes last. A
  // group of loads is committed at every step that a slot has part in, so the one that a step needs is always as far
  // back.
  __device__ __forceinline__ void run() {
    // The first warp clears words, which is done by the time that the first chunk is there.
    const bool clears = d.cleared > 0 && tid < 32;
    uint32_t counted = 0;
    uint64_t seen[kClearedWords] = {};
    if (clears) clear_words(p.words, d.cleared, tid, 32, seen);
    start();
    find_groups();
    const uint32_t slabs = d.slabs_of(team), pending = min(d.chunks, uint32_t(kSlots)) - 1;
    const uint32_t rereads = d.chunks < kSlots ? 0 : d.chunks - kSlots - kHeld;
    Vec<T, kVec> held[kHeld > 0 ? kHeld : 1][kPasses];
    uint32_t places = 0x76543210;
    for (uint32_t u = 0; u < slabs; ++u) {
      const int64_t first = base(u), next = base(u + 1);
      Sums s;
      const auto sum_chunk = [&](uint32_t t, Vec<T, kVec>(&input)[kPasses]) {
        uint32_t from = slot(u, t), later = t + kSlots;
        if constexpr (kHeld > 0) {
          from = place_of(places, t < kSlots ? t : (t - kSlots) % kRing);
          later = t < kRing ? t + kSlots : t < kSlots ? d.chunks : t + kRing;
        }
        wait(kHeld == 0 || t < kSlots + kRing ? pending : kRing - 1);
        if (t == 0 && u == 0 && clears) {
          await_cleared(p.words, tid, 32, seen);
          __syncwarp();
          if (tid == 0) counted = count_cleared();
        }
        if (t == 0) start_sums(s, from);
        take_chunk(from, left_of(t), input);
        add_chunk(s, left_of(t), input);
        if (later < d.chunks) load_chunk(first, from, later);
        commit();
      };
#pragma unroll
      for (int h = 0; h < kHeld; ++h) sum_chunk(h, held[h]);
      for (uint32_t t = kHeld; t < d.chunks; ++t) {
        Vec<T, kVec> input[kPasses];
        sum_chunk(t, input);
      }
      if (u == 0 && clears && tid == 0) await_all_cleared(counted);
      __syncwarp();
      finish_sums(s, u);
      if (d.ahead && u + 1 < slabs) prefetch(u + 1);
      const Coefficients c = coefficients_of(u);
      for (uint32_t k = 0; k < d.chunks - kHeld; ++k) {
        wait(pending);
        const bool again = k < rereads;
        uint32_t t = d.chunks - 1 - k, from = slot(u, t), next_t = again ? t - kSlots : k - rereads;
        if constexpr (kHeld > 0) {
          t = chunk_at(k);
          from = place_at(places, k);
          if (again) next_t = chunk_again(k);
        }
        normalize_chunk(c, first, from, t, again || u + 1 < slabs, again ? first : next, next_t);
        commit();
      }
      if constexpr (kHeld > 0) {
        uint32_t next_places = 0;
#pragma unroll
        for (uint32_t t = 0; t < kSlots; ++t) next_places |= place_at(places, rereads + t) << 4 * t;
        places = next_places;
      }
#pragma unroll
      for (int h = 0; h < kHeld; ++h) {
        T* const y = static_cast<T*>(p.y) + first + int64_t(h * kPasses) * step;
#pragma unroll
        for (int k = 0; k < kPasses; ++k) {
          if (k < left_of(h)) normalize(c, y + k * step, held[h][k], {});
        }
      }
    }
  }
};

#endif

template <typename Traits>
__global__ void __launch_bounds__(kColumnMaxThreads, 1)
    group_norm_columns_fwd_kernel(const __grid_constant__ GroupNormColumnsFwdParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  __shared__ uint64_t exchanged;
  const ColumnShares& d = p.shares;
  ColumnTables t;
  t.messages = reinterpret_cast<float4*>(memory + d.data_bytes);
  t.entries = reinterpret_cast<float2*>(t.messages + (p.words ? 0 : d.blocks * d.groups));
  t.stats = t.entries + d.walkers * d.runs;
  t.affines = t.stats + 2 * d.groups;
  t.counts = reinterpret_cast<float*>(t.affines + 2 * d.affines);
  ColumnBlock<Traits> block(p, memory, t, &exchanged, threadIdx.x);
  if (block.sends()) {
    if (threadIdx.x == 0) {
      barrier_init(&exchanged, 1);
      barrier_init_fence();
    }
    __syncwarp();  // the compiler initializes it by the whole warp
    if (threadIdx.x == 0) barrier_expect_bytes(&exchanged, d.blocks * d.groups * sizeof(float4));
    __syncthreads();
    cluster_arrive();
  }
  block.run();
#endif
}

}  // namespace kgopt
