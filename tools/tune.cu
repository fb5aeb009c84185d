// SPDX-FileCopyrightText: the libxent authors
// SPDX-License-Identifier: Apache-2.0

// Times the kernels of src/cuda in every shape that geometry.hpp could choose, to make its table.
//
//   tune [--best] [--stress N] [--only WARPS KEEP BLOCKS] [ROWSxVOCAB ...]     (see tools/tune)
//
// bfloat16. Prints, for each shape, warps a row, batches kept and blocks an SM: forward, loss_and_grad into its own
// buffer and over the logits, in GB/s of the bytes that must move, beside a plain read and a device-to-device copy. The
// loss of every shape is compared with that of the first; a shape that differs is reported and the exit status is 1.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

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

__global__ void fill_targets(int64_t *out, int64_t rows, int64_t vocab) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows; i += int64_t{gridDim.x} * blockDim.x) {
    out[i] = (i * 7919) % vocab;
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
int stress = 0, only_warps = 0, only_keep = -1, only_blocks = 0;

template <typename F>
double median_ms(F run) {
  std::vector<double> times;
  for (int i = 0; i < 7; ++i) {
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

void launch(const void *kernel, int blocks, int threads, int shared, void **args) {
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  CHECK(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), args,
                         static_cast<size_t>(shared), nullptr));
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

template <typename T>
bool tune(int64_t rows, int64_t vocab, Element type, const char *name, bool wide_search) {
  bool same = true;
  T *logits, *grad;
  int64_t *targets;
  double *losses;
  float *stats;
  CHECK(cudaMalloc(&logits, static_cast<size_t>(rows * vocab) * sizeof(T)));
  CHECK(cudaMalloc(&grad, static_cast<size_t>(rows * vocab) * sizeof(T)));
  CHECK(cudaMalloc(&targets, static_cast<size_t>(rows) * 8));
  CHECK(cudaMalloc(&losses, static_cast<size_t>(rows) * 8));
  CHECK(cudaMalloc(&stats, static_cast<size_t>(rows) * 8));
  fill<<<1024, 256>>>(logits, rows * vocab, 1u);
  fill_targets<<<64, 256>>>(targets, rows, vocab);
  CHECK(cudaGetLastError());
  const double size = static_cast<double>(rows * vocab) * sizeof(T);
  const double copy =
      2 * size / 1e6 / median_ms([&] {
        CHECK(cudaMemcpyAsync(grad, logits, static_cast<size_t>(rows * vocab) * sizeof(T), cudaMemcpyDeviceToDevice));
      });
  int device = 0, processors = 0;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const double read = size / 1e6 / median_ms([&] {
                        read_all<<<static_cast<unsigned>(processors * 4), 512>>>(
                            reinterpret_cast<const uint4 *>(logits),
                            rows * vocab * static_cast<int64_t>(sizeof(T)) / 16, reinterpret_cast<uint32_t *>(stats));
                      });
  std::printf("%s rows %lld vocab %lld: read %.0f copy %.0f GB/s\n", name, static_cast<long long>(rows),
              static_cast<long long>(vocab), read, copy);

  Params p = {};
  p.math.exponent = kLog2e;
  p.math.unit = p.math.chain = p.math.chain_rest = p.math.one_minus_smoothing = 1.0f;
  p.math.sum_scale = p.math.slope_drop = 1.0f;
  p.rows = rows;
  p.classes = p.all_classes = p.vocab = vocab;
  p.reduction = XENT_REDUCTION_SUM;
  p.logits = vector_tensor(logits, type, vocab);
  p.targets = vector_tensor(targets, Element::i64, 1);
  p.stats = vector_tensor(stats, Element::f32, 2);
  p.row_loss = losses;
  void *args[] = {&p};
  std::vector<double> first(static_cast<size_t>(rows)), now(first.size());
  bool have_first = false;
  const void *const forward = address(forward_kernel<T, kPlain>);
  const void *const both = address(both_kernel<T, kPlain>);
  const int64_t vectors = ceil_div(vocab, 16 / static_cast<int>(sizeof(T)));
  const int64_t forward_batches = ceil_div(vectors, kForwardBatch * 32);
  const int64_t batches = ceil_div(vectors, kBatch * 32);
  double best[3] = {};
  std::string best_name[3];
  for (const int warps : {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24}) {
    if (warps > 1 && warps > batches) continue;
    if (only_warps != 0 && warps != only_warps) continue;
    if (batches / warps > 70) continue;
    p.geometry.warps = warps;
    p.geometry.cluster = 1;
    p.geometry.batches = static_cast<int>(forward_batches);
    const int slots = slot_bytes(warps, kPartialWords<kPlain>);
    const int shared = warps * kRingBytes<kBatch> + slots;
    const auto report = [&](int what, double ms, double moved, int keep, int blocks) {
      const double rate = moved / 1e6 / ms;
      const double limit = what == 0 ? read : copy;
      char text[128];
      std::snprintf(text, sizeof text, "warps %d keep %d blocks %d: %.3f ms %.0f GB/s %.3f", warps, keep, blocks, ms,
                    rate, rate / limit);
      if (rate > best[what]) best[what] = rate, best_name[what] = text;
      if (wide_search) std::printf("  %s %s\n", what == 0 ? "forward" : what == 1 ? "own" : "in place", text);
    };
    const auto check = [&] {
      CHECK(cudaMemcpy(now.data(), losses, now.size() * 8, cudaMemcpyDeviceToHost));
      if (!have_first) first = now, have_first = true;
      double worst = 0;
      for (size_t i = 0; i < now.size(); ++i) worst = std::max(worst, std::fabs(now[i] - first[i]));
      if (!(worst < 1e-5)) {
        int64_t bad = 0, at = 0;
        for (size_t i = 0; i < now.size(); ++i) {
          if (!(std::fabs(now[i] - first[i]) < 1e-5)) at = static_cast<int64_t>(i), ++bad;
        }
        same = false;
        std::vector<float> kept(2 * now.size());
        CHECK(cudaMemcpy(kept.data(), stats, kept.size() * 4, cudaMemcpyDeviceToHost));
        const size_t r = static_cast<size_t>(at);
        std::printf("  loss %.9g for %.9g, stats %.9g %.9g log %.9g, near %.9g\n", now[r], first[r], kept[2 * r],
                    kept[2 * r + 1], std::log(kept[2 * r + 1]), std::log(kept[2 * r + 3]));
        std::printf("  WRONG: %lld losses differ by %g at %d warps keep %d in %s, the last in row %lld\n",
                    static_cast<long long>(bad), worst, warps, p.geometry.keep, p.grad_logits.data ? "both" : "forward",
                    static_cast<long long>(at));
      }
    };
    int occupancy = 0;
    if (warps * 32 <= kForwardThreads) {
      CHECK(cudaFuncSetAttribute(forward, cudaFuncAttributeMaxDynamicSharedMemorySize, slots));
      CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&occupancy, forward, warps * 32, static_cast<size_t>(slots)));
      CHECK(cudaMemset(losses, 0xff, now.size() * 8));
      p.grad_logits = Tensor{};
      const int grid = static_cast<int>(std::min<int64_t>(rows, int64_t{occupancy} * processors));
      const double ms = median_ms([&] { launch(forward, grid, warps * 32, slots, args); });
      report(0, ms, size, 0, occupancy);
      check();
      for (int i = 0; i < stress; ++i) {
        CHECK(cudaMemset(losses, 0xff, now.size() * 8));
        launch(forward, grid, warps * 32, slots, args);
        check();
      }
    }
    if (warps * 32 > kBothThreads) continue;
    CHECK(cudaFuncSetAttribute(both, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&occupancy, both, warps * 32, static_cast<size_t>(shared)));
    p.geometry.batches = static_cast<int>(batches);
    const int mine = static_cast<int>((batches + warps - 1) / warps);
    for (int keep = kStages; keep >= std::max(0, kStages - 2); --keep) {
      if (keep > mine) continue;
      if (only_keep >= 0 && keep != only_keep) continue;
      p.geometry.keep = keep;
      for (int blocks = occupancy; blocks >= std::max(1, occupancy - (occupancy <= 3 ? 2 : 0)); --blocks) {
        if (only_blocks != 0 && blocks != only_blocks) continue;
        const int gradient_grid = static_cast<int>(std::min<int64_t>(rows, int64_t{blocks} * processors));
        for (const bool in_place : {false, true}) {
          p.grad_logits = vector_tensor(in_place ? logits : grad, type, vocab);
          CHECK(cudaMemset(losses, 0xff, now.size() * 8));
          report(in_place ? 2 : 1, median_ms([&] { launch(both, gradient_grid, warps * 32, shared, args); }), 2 * size,
                 keep, blocks);
          if (!in_place) check();
          for (int i = 0; i < (in_place ? 0 : stress); ++i) {
            CHECK(cudaMemset(losses, 0xff, now.size() * 8));
            launch(both, gradient_grid, warps * 32, shared, args);
            check();
          }
        }
        fill<<<1024, 256>>>(logits, rows * vocab, 1u);
      }
    }
  }
  for (int what = 0; what < 3; ++what) {
    std::printf("  best %s: %s\n", what == 0 ? "forward" : what == 1 ? "own" : "in place", best_name[what].c_str());
  }
  for (void *p_ : {static_cast<void *>(logits), static_cast<void *>(grad), static_cast<void *>(targets),
                   static_cast<void *>(losses), static_cast<void *>(stats)}) {
    CHECK(cudaFree(p_));
  }
  std::fflush(stdout);
  return same;
}

}  // namespace

int main(int argc, char **argv) {
  std::vector<std::pair<int64_t, int64_t>> shapes;
  bool wide = true;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--best") {
      wide = false;
    } else if (std::string(argv[i]) == "--stress" && i + 1 < argc) {
      stress = std::atoi(argv[++i]);
    } else if (std::string(argv[i]) == "--only" && i + 3 < argc) {
      only_warps = std::atoi(argv[++i]);
      only_keep = std::atoi(argv[++i]);
      only_blocks = std::atoi(argv[++i]);
    } else {
      const std::string text = argv[i];
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
  for (const auto &[rows, vocab] : shapes) {
    same &= tune<bf16>(rows, vocab, Element::bf16, "bfloat16", wide);
  }
  return same ? 0 : 1;
}
