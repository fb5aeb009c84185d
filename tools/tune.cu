// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Times the kernels of src/cuda in every shape that geometry.hpp could choose, to make its table.
//
//   tune [--best] [--over] [--only TEXT] [--ignored PERCENT] [ROWSxVOCAB ...]     (see tools/tune)
//
// bfloat16. Prints, for each kernel and shape whose line has TEXT, forward, loss_and_grad and backward into their own
// buffer, or with --over over the logits, which are filled anew before each run, in GB/s of the bytes that must move,
// beside a plain read and a device-to-device copy of that size. Losses and gradients of every shape are compared with
// those of the first; a shape that differs is reported and the exit status is 1.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "backward.cuh"
#include "forward.cuh"
#include "geometry.hpp"
#include "kernel_table.cuh"
#include "reduce.cuh"

namespace {

using namespace xent::cuda;

#define CHECK(call)                                                                      \
  do {                                                                                   \
    const cudaError_t code = (call);                                                     \
    if (code != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(code)); \
      std::exit(2);                                                                      \
    }                                                                                    \
  } while (0)

template <typename T>
__global__ void fill(T *out, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
    store_as(out + i, static_cast<float>(h >> 8) * (8.0f / 16777216.0f) - 4.0f);
  }
}

__global__ void __launch_bounds__(512) read_all(const uint4 *in, int64_t count, uint32_t *out) {
  uint32_t x = 0;
  const int64_t step = int64_t{gridDim.x} * 512;
  int64_t i = blockIdx.x * int64_t{512} + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = in[i + j * step];
#pragma unroll
    for (int j = 0; j < 4; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (x == 12345) *out = x;
}

cudaEvent_t begin_event, end_event;
bool best_only = false, over = false;
std::string only;
int ignored_percent = 6;

template <typename F, typename Before>
double median_ms(F run, Before before) {
  std::vector<double> times;
  for (int i = 0; i < 7; ++i) {
    before();
    CHECK(cudaEventRecord(begin_event));
    run();
    CHECK(cudaEventRecord(end_event));
    CHECK(cudaEventSynchronize(end_event));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin_event, end_event));
    if (i > 1) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void launch(const void *kernel, int64_t blocks, int threads, int shared, void **args) {
  CHECK(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), args,
                         static_cast<size_t>(shared), nullptr));
}

// Blocks of a kernel that an SM holds.
int resident(const void *kernel, int threads, int shared) {
  int blocks = 0;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, static_cast<size_t>(shared)));
  return blocks;
}

Tensor vector_tensor(void *data, Element type, int64_t stride) {
  Tensor t = {};
  t.data = data;
  t.type = type;
  t.rank = 1;
  t.stride[0] = stride;
  t.col_stride = 1;
  return t;
}

Divisor divisor(int64_t d) {
  int shift = 0;
  while ((int64_t{1} << shift) < d) ++shift;
  return {static_cast<uint64_t>((static_cast<unsigned __int128>(1) << (62 + shift)) / static_cast<uint64_t>(d)) + 1, d,
          shift};
}

// One shape of the problem, and the kernels of bfloat16 on it.
class Tuner {
 public:
  Tuner(int64_t rows, int64_t vocab) : rows_(rows), vocab_(vocab), losses_now_(static_cast<size_t>(rows)) {
    const size_t bytes = static_cast<size_t>(rows * vocab) * sizeof(bf16);
    CHECK(cudaMalloc(&logits_, bytes));
    CHECK(cudaMalloc(&grad_, bytes));
    CHECK(cudaMalloc(&targets_, static_cast<size_t>(rows) * 8));
    CHECK(cudaMalloc(&losses_, static_cast<size_t>(rows) * 8));
    CHECK(cudaMalloc(&stats_, static_cast<size_t>(rows) * 8));
    fill_logits();
    std::vector<int64_t> targets(static_cast<size_t>(rows));
    uint64_t r = 88172645463325252u;
    int64_t counted = 0;
    for (int64_t &target : targets) {
      r ^= r << 13, r ^= r >> 7, r ^= r << 17;
      const bool ignored = static_cast<int>(r % 100) < ignored_percent;
      target = ignored ? -100 : static_cast<int64_t>((r >> 20) % static_cast<uint64_t>(vocab));
      counted += !ignored;
    }
    CHECK(cudaMemcpy(targets_, targets.data(), targets.size() * 8, cudaMemcpyHostToDevice));
    moved_[0] = static_cast<double>(counted * vocab) * sizeof(bf16);
    moved_[1] = moved_[2] = moved_[0] + static_cast<double>(bytes);
    grads_now_.resize(std::min<size_t>(bytes / sizeof(bf16), 1u << 26));
    int device = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device));
    limit_[1] = limit_[2] =
        2.0 * static_cast<double>(bytes) / 1e6 /
        median_ms([&] { CHECK(cudaMemcpyAsync(grad_, logits_, bytes, cudaMemcpyDeviceToDevice)); }, [] {});
    limit_[0] = static_cast<double>(bytes) / 1e6 /
                median_ms(
                    [&] {
                      read_all<<<static_cast<unsigned>(processors_ * 4), 512>>>(
                          reinterpret_cast<const uint4 *>(logits_), static_cast<int64_t>(bytes / 16),
                          reinterpret_cast<uint32_t *>(stats_));
                    },
                    [] {});
    std::printf("bfloat16 %lld x %lld: read %.0f copy %.0f GB/s\n", static_cast<long long>(rows),
                static_cast<long long>(vocab), limit_[0], limit_[1]);
    p_.math.exponent = kLog2e;
    p_.math.unit = p_.math.chain = p_.math.chain_rest = p_.math.one_minus_smoothing = 1.0f;
    p_.math.sum_scale = p_.math.slope_drop = 1.0f;
    p_.rows = rows;
    p_.classes = p_.all_classes = p_.vocab = vocab;
    p_.reduction = XENT_REDUCTION_SUM;
    p_.has_ignore_index = 1;
    p_.ignore_index = -100;
    p_.logits = vector_tensor(logits_, Element::bf16, vocab);
    p_.targets = vector_tensor(targets_, Element::i64, 1);
    p_.stats = vector_tensor(stats_, Element::f32, 2);
    p_.row_loss = losses_;
  }
  ~Tuner() {
    for (void *memory : {static_cast<void *>(logits_), static_cast<void *>(grad_), static_cast<void *>(targets_),
                         static_cast<void *>(losses_), static_cast<void *>(stats_)}) {
      CHECK(cudaFree(memory));
    }
  }
  Tuner(const Tuner &) = delete;
  Tuner &operator=(const Tuner &) = delete;

  bool run() {
    const int64_t vectors = ceil_div(vocab_, kLanes<bf16>);
    const bool even = vocab_ % kLanes<bf16> == 0;
    if (vectors <= kTeamVectors) {
      teams(vectors, false, even);
      teams(vectors, true, even);
    }
    streams(vectors);
    if (vectors > kTeamVectors) rows(vectors, even);
    pieces(vectors);
    if (vectors > kTeamVectors) blocks(vectors, even);
    if (vectors > kTeamVectors) backward(vectors, even);
    stages(vectors);
    for (const int what : {0, 1, 2}) std::printf("  best %s: %s\n", kWorks[what], best_name_[what].c_str());
    std::fflush(stdout);
    return same_;
  }

 private:
  void fill_logits() {
    fill<<<1024, 256>>>(logits_, rows_ * vocab_, 1u);
    CHECK(cudaGetLastError());
  }

  static constexpr const char *kWorks[] = {"forward", "loss_and_grad", "backward"};

  void teams(int64_t vectors, bool gradient, bool even) {
    const void *kernels[2][2] = {{address(team_kernel<bf16, kPlain, false, Layout::adjacent>),
                                  address(team_kernel<bf16, kPlain, false, Layout::even>)},
                                 {address(team_kernel<bf16, kPlain, true, Layout::adjacent>),
                                  address(team_kernel<bf16, kPlain, true, Layout::even>)}};
    p_.geometry = {1, 0, 0, 1, team_shape(vectors).span, 0};
    for (int take = 32 / p_.geometry.span; take <= 32; take *= 2) {
      p_.geometry.rows = take;
      time(gradient, kernels[gradient][even], ceil_div(rows_, kTeamThreads / 32 * take), kTeamThreads, 0,
           "team, span " + std::to_string(p_.geometry.span) + ", rows " + std::to_string(take));
    }
  }

  void streams(int64_t vectors) {
    const void *const kernel = address(forward_kernel<bf16, kPlain>);
    p_.geometry = {1, static_cast<int>(ceil_div(vectors, kForwardBatch * 32)), 0, 1, 0, 0};
    const int64_t slots = int64_t{resident(kernel, 32, 0)} * processors_;
    for (const int64_t grid : {std::min(rows_, slots), ceil_div(rows_, 4), ceil_div(rows_, 2), rows_}) {
      if (grid >= std::min(rows_, slots)) time(false, kernel, grid, 32, 0, "stream, blocks " + std::to_string(grid));
    }
  }

  void rows(int64_t vectors, bool even) {
    const void *const kernel =
        even ? address(row_kernel<bf16, kPlain, Layout::even>) : address(row_kernel<bf16, kPlain, Layout::adjacent>);
    p_.geometry = {1, static_cast<int>(ceil_div(vectors, kForwardBatch * 32)), 0, 1, 0, 0};
    const int pieces = share_pieces(p_.geometry, kSerial<kForwardBatch>);
    for (const int warps : {1, 2, 3, 4, 6, 8, 11, 16, 24}) {
      if (warps > pieces || warps * 32 > kRowThreads) continue;
      time(false, kernel, rows_, warps * 32, pieces * kPartialWords<kPlain> * 4,
           "rows, warps " + std::to_string(warps));
    }
  }

  // Its partials lie where a gradient would.
  void pieces(int64_t vectors) {
    p_.geometry = {1, static_cast<int>(ceil_div(vectors, kForwardBatch * 32)), 0, 1, 0, 0};
    const int64_t count = rows_ * share_pieces(p_.geometry, kSerial<kForwardBatch>);
    p_.partials = reinterpret_cast<float *>(grad_);
    const void *const split = address(split_kernel<bf16, kPlain, kForwardBatch>);
    const void *const combine = address(combine_kernel<bf16, kPlain>);
    const int shared = kSplitWarps * kSerial<kForwardBatch> * kStageBytes<kForwardBatch>;
    resident(split, kSplitWarps * 32, shared);
    void *args[] = {&p_};
    time(false, "pieces", [&] {
      launch(split, ceil_div(count, kSplitWarps), kSplitWarps * 32, shared, args);
      int serial = kSerial<kForwardBatch>;
      void *combine_args[] = {&p_, &serial};
      launch(combine, rows_, 32, 0, combine_args);
    });
  }

  void blocks(int64_t vectors, bool even) {
    const void *const kernels[2][2] = {{address(block_kernel<bf16, kPlain, Layout::adjacent, false>),
                                        address(block_kernel<bf16, kPlain, Layout::even, false>)},
                                       {address(block_kernel<bf16, kPlain, Layout::adjacent, true>),
                                        address(block_kernel<bf16, kPlain, Layout::even, true>)}};
    const int units = static_cast<int>(ceil_div(vectors, kUnit));
    for (const int warps : {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24}) {
      if ((warps - 1) * kUnit >= vectors || units > 7 * warps) continue;
      for (const int stash : {0, 1, 2}) {
        if (stash > 0 && warps * stash >= units) continue;
        p_.geometry = {warps, units, stash, 1, 0, 0};
        const int shared = warps * stash * kUnit * 16;
        const void *const kernel = kernels[stash > 0][even];
        resident(kernel, warps * 32, shared);
        time(true, kernel, rows_, warps * 32, shared,
             "block, warps " + std::to_string(warps) + (stash > 0 ? ", stash " + std::to_string(stash) : ""));
      }
    }
  }

  void backward(int64_t vectors, bool even) {
    const void *const kernel =
        even ? address(unit_kernel<bf16, kPlain, Layout::even>) : address(unit_kernel<bf16, kPlain, Layout::adjacent>);
    const int units = static_cast<int>(ceil_div(vectors, kUnit));
    // Of statistics that forward has left.
    p_.geometry = {1, static_cast<int>(ceil_div(vectors, kForwardBatch * 32)), 0, 1, 0, 0};
    p_.grad_logits = {};
    void *forward_args[] = {&p_};
    launch(address(forward_kernel<bf16, kPlain>), std::min<int64_t>(rows_, 4096), 32, 0, forward_args);
    p_.geometry = {1, units, 0, 1, 0, 0};
    Divisor of_row = divisor(units);
    void *unit_args[] = {&p_, &of_row};
    time(2, "units", [&] { launch(kernel, rows_ * units, 32, 0, unit_args); });
    const void *const old = address(backward_kernel<bf16, bf16, kPlain>);
    const int64_t batches = ceil_div(vectors + 1, kBatch * 32);  // a misaligned row begins inside a vector
    int warps = 1;
    while (warps < kBackwardThreads / 32 && warps * kRepeats < batches) warps *= 2;
    int pieces = static_cast<int>(ceil_div(batches, int64_t{warps} * kRepeats));
    void *args[] = {&p_, &pieces, &warps};
    time(2, "any layout",
         [&] { launch(old, ceil_div(rows_ * pieces, kBackwardThreads / 32 / warps), kBackwardThreads, 0, args); });
  }

  void stages(int64_t vectors) {
    const void *const kernel = address(both_kernel<bf16, kPlain>);
    const int batches = static_cast<int>(ceil_div(vectors, kBatch * 32));
    for (const int warps : {1, 2, 4, 6, 8, 10, 12, 16, 20}) {
      if ((warps > 1 && warps > batches) || batches / warps > 70) continue;
      const int shared = warps * kRingBytes<kBatch> + slot_bytes(warps, kPartialWords<kPlain>);
      const int64_t most = resident(kernel, warps * 32, shared);
      for (int keep = kStages; keep >= kStages - 2; --keep) {
        if (keep > ceil_div(batches, warps)) continue;
        p_.geometry = {warps, batches, keep, 1, 0, 0};
        time(true, kernel, std::min(rows_, most * processors_), warps * 32, shared,
             "stages, warps " + std::to_string(warps) + ", keep " + std::to_string(keep));
      }
    }
  }

  void time(int work, const void *kernel, int64_t blocks, int threads, int shared, const std::string &name) {
    void *args[] = {&p_};
    time(work, name, [&] { launch(kernel, blocks, threads, shared, args); });
  }

  template <typename Run>
  void time(int work, const std::string &name, Run run) {
    if ((kWorks[work] + (", " + name)).find(only) == std::string::npos) return;
    const bool gradient = work != 0;
    bf16 *const grad = over ? logits_ : grad_;
    p_.grad_logits = gradient ? vector_tensor(grad, Element::bf16, vocab_) : Tensor{};
    CHECK(cudaMemset(losses_, 0xff, losses_now_.size() * 8));
    CHECK(cudaMemset(grad_, 0xff, grads_now_.size() * sizeof(bf16)));
    const double ms = median_ms(run, [&] {
      if (gradient && over) fill_logits();
    });
    const double rate = moved_[work] / 1e6 / ms;
    char text[128];
    std::snprintf(text, sizeof text, "%-40s %.4f ms %.0f GB/s %.3f", name.c_str(), ms, rate, rate / limit_[work]);
    if (rate > best_[work]) best_[work] = rate, best_name_[work] = text;
    if (!best_only) std::printf("  %-14s %s\n", kWorks[work], text);
    check(work, grad, name);
    if (gradient && over) fill_logits();
  }

  void check(int work, const bf16 *grad, const std::string &name) {
    int64_t bad = 0;
    if (work < 2) CHECK(cudaMemcpy(losses_now_.data(), losses_, losses_now_.size() * 8, cudaMemcpyDeviceToHost));
    if (losses_first_.empty()) losses_first_ = losses_now_;
    for (size_t i = 0; i < losses_now_.size(); ++i) bad += !(std::fabs(losses_now_[i] - losses_first_[i]) < 1e-5);
    if (work != 0) {
      CHECK(cudaMemcpy(grads_now_.data(), grad, grads_now_.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
      if (grads_first_.empty()) grads_first_ = grads_now_;
      for (size_t i = 0; i < grads_now_.size(); ++i) {
        const float a = __bfloat162float(grads_first_[i]), b = __bfloat162float(grads_now_[i]);
        bad += !(std::fabs(a - b) <= 0.01f * std::fabs(a) + 1e-9f);
      }
    }
    if (bad == 0) return;
    same_ = false;
    std::printf("  WRONG: %lld values of %s (%s) differ\n", static_cast<long long>(bad), name.c_str(), kWorks[work]);
  }

  int64_t rows_, vocab_;
  bf16 *logits_ = nullptr, *grad_ = nullptr;
  int64_t *targets_ = nullptr;
  double *losses_ = nullptr;
  float *stats_ = nullptr;
  int processors_ = 0;
  Params p_ = {};
  double moved_[3] = {}, limit_[3] = {}, best_[3] = {};
  std::string best_name_[3];
  std::vector<double> losses_first_, losses_now_;
  std::vector<bf16> grads_first_, grads_now_;
  bool same_ = true;
};

}  // namespace

int main(int argc, char **argv) {
  std::vector<std::pair<int64_t, int64_t>> shapes;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text == "--best") {
      best_only = true;
    } else if (text == "--over") {
      over = true;
    } else if (text == "--only" && i + 1 < argc) {
      only = argv[++i];
    } else if (text == "--ignored" && i + 1 < argc) {
      ignored_percent = std::atoi(argv[++i]);
    } else {
      const size_t x = text.find('x');
      if (x == std::string::npos) {
        std::fprintf(stderr, "tune: a shape is ROWSxVOCAB, got %s\n", argv[i]);
        return 2;
      }
      shapes.emplace_back(std::atoll(text.c_str()), std::atoll(text.c_str() + x + 1));
    }
  }
  CHECK(cudaEventCreate(&begin_event));
  CHECK(cudaEventCreate(&end_event));
  bool same = true;
  if (shapes.empty()) shapes = {{4096, 128256}, {8192, 32000}, {4096, 50257}, {4096, 151936}, {4096, 262144}};
  for (const auto &[rows, vocab] : shapes) same &= Tuner(rows, vocab).run();
  return same ? 0 : 1;
}
