#include "rms_norm.h"

#include <algorithm>
#include <cmath>
#include <memory>

namespace mindspeed {
namespace {

template <typename T>
struct ForwardArgs {
  Rows rows;
  const T *x, *w;
  T* y;
  float* rstd;
  float eps;
};

template <typename T>
struct BackwardArgs {
  Rows rows;
  const T *dy, *x, *w;
  const float* rstd;
  T* dx;
  float* partial;  // [blocks, width]
  int64_t rows_per_block;
};

template <typename T>
struct SumArgs {
  const float* partial;
  T* dw;
  int64_t blocks, width;
};

}  // namespace
}  // namespace mindspeed

#define MS_KERNEL "../cpu/rms_norm_rows.inc"
#include "../common/for_each_level.inc"

namespace mindspeed {
namespace {

// Below this many elements per thread, waking the threads costs more than they save (torch uses the same figure).
constexpr int64_t kGrain = 32768;
// Blocks of rows for the sum over rows: enough for any processor to share, few enough that adding them up is cheap.
constexpr int64_t kMaxBlocks = 64;

// Cuts [0, pieces) into one contiguous range per thread, over `elements` in all.
template <typename Args>
void run(void (*range)(const Args&, int64_t, int64_t), const Args& args, int64_t pieces, int64_t elements,
         int threads) {
  const int64_t useful = std::min({static_cast<int64_t>(threads), pieces, (elements + kGrain - 1) / kGrain});
  if (useful <= 1) return range(args, 0, pieces);
  const int64_t share = (pieces + useful - 1) / useful;
#pragma omp parallel for num_threads(static_cast<int>(useful)) schedule(static, 1)
  for (int64_t t = 0; t < useful; ++t) range(args, std::min(pieces, t * share), std::min(pieces, (t + 1) * share));
}

template <typename T>
void forward(const Rows& rows, const void* x, const void* w, void* y, float* rstd, float eps, int threads, int level) {
  const ForwardArgs<T> args{rows, static_cast<const T*>(x), static_cast<const T*>(w), static_cast<T*>(y), rstd, eps};
  run(MS_LEVEL_CALL(level, forward_rows<T>), args, rows.count(), rows.count() * rows.width, threads);
}

template <typename T>
void backward(const Rows& rows, const void* dy, const void* x, const void* w, const float* rstd, void* dx, void* dw,
              int threads, int level) {
  const int64_t total = rows.count(), h = rows.width;
  const int64_t wanted = std::max<int64_t>(1, std::min({total, kMaxBlocks, total * h / kGrain}));
  const int64_t rows_per_block = std::max<int64_t>(1, (total + wanted - 1) / wanted);
  const int64_t blocks = (total + rows_per_block - 1) / rows_per_block;
  const std::unique_ptr<float[]> partial(new float[blocks * h]);
  const BackwardArgs<T> args{rows, static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(w),
                             rstd, static_cast<T*>(dx),       partial.get(),           rows_per_block};
  run(MS_LEVEL_CALL(level, backward_blocks<T>), args, blocks, total * h, threads);
  const SumArgs<T> sum{partial.get(), static_cast<T*>(dw), blocks, h};
  run(MS_LEVEL_CALL(level, sum_blocks<T>), sum, (h + kLanes - 1) / kLanes, blocks * h, threads);
}

}  // namespace

void rms_norm_forward(Dtype dtype, const Rows& rows, const void* x, const void* w, void* y, float* rstd, float eps,
                      int threads, int level) {
  switch (dtype) {
    case Dtype::kFloat32:
      return forward<float>(rows, x, w, y, rstd, eps, threads, level);
    case Dtype::kBfloat16:
      return forward<Bf16>(rows, x, w, y, rstd, eps, threads, level);
    case Dtype::kFloat16:
      return forward<Fp16>(rows, x, w, y, rstd, eps, threads, level);
  }
}

void rms_norm_backward(Dtype dtype, const Rows& rows, const void* dy, const void* x, const void* w, const float* rstd,
                       void* dx, void* dw, int threads, int level) {
  switch (dtype) {
    case Dtype::kFloat32:
      return backward<float>(rows, dy, x, w, rstd, dx, dw, threads, level);
    case Dtype::kBfloat16:
      return backward<Bf16>(rows, dy, x, w, rstd, dx, dw, threads, level);
    case Dtype::kFloat16:
      return backward<Fp16>(rows, dy, x, w, rstd, dx, dw, threads, level);
  }
}

}  // namespace mindspeed
